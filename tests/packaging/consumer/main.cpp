// The smallest use of the library from outside: exit code 0 when it does what it says.
#include <mega/mega.hpp>

#include <cstdio>

int main() {
  float data[12] = {};
  const mega::Matrix<float> m(data, 3, 4);
  m(2, 1) = 5;
  if (data[9] == 5 && MEGA_VERSION_MAJOR == 0) return 0;
  std::puts("mega::Matrix does not index rows first");
  return 1;
}
