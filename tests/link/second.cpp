// The other source: every header, in reverse order.
#include "every_header_reversed.hpp"

mega::Matrix<float> transposed_shape(mega::Matrix<float> m) {
  return mega::Matrix<float>(m.data(), m.extent(1), m.extent(0));
}
