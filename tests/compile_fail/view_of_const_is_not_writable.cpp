// A view of const elements does not become a view of mutable ones.
#include <mega/core/view.hpp>

void drop_const(mega::Matrix<const float> source) {
#if MEGA_TWIN
  mega::Matrix<const float> view = source;
#else
  // mega-expect: "(conversion from|no suitable).*View<const float"
  mega::Matrix<float> view = source;
#endif
  static_cast<void>(view);
}
