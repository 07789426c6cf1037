// One of two sources that include every header; they agree on what a view of the library is.
#include "every_header.hpp"

#include <cstdio>

mega::Matrix<float> transposed_shape(mega::Matrix<float> m);

int main() {
  float data[6] = {};
  const auto m = transposed_shape(mega::Matrix<float>(data, 2, 3));
  if (m.data() == data && m.extent(0) == 3 && m.extent(1) == 2) return 0;
  std::puts("the two sources disagree on mega::View");
  return 1;
}
