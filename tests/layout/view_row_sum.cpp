// Walking the rows of a matrix through View is the pointer arithmetic that one writes by hand.
#include <mega/core/view.hpp>

#if MEGA_BARE
extern "C" float subject(const float* data, mega::Index rows, mega::Index cols) {
  float sum = 0;
  for (mega::Index r = 0; r < rows; ++r) {
    for (mega::Index c = 0; c < cols; ++c) sum += data[r * cols + c];
  }
  return sum;
}
#else
extern "C" float subject(const float* data, mega::Index rows, mega::Index cols) {
  const mega::Matrix<const float> m(data, rows, cols);
  float sum = 0;
  for (mega::Index r = 0; r < m.rows(); ++r) {
    for (mega::Index c = 0; c < m.cols(); ++c) sum += m(r, c);
  }
  return sum;
}
#endif
