// The other source, compiled by nvcc: the umbrella, which is what device code may include.
#include <mega/mega.hpp>

mega::Matrix<float> transposed_shape(mega::Matrix<float> m) {
  return mega::Matrix<float>(m.data(), m.extent(1), m.extent(0));
}
