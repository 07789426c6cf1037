// A view has between one and five extents; six are refused where they are written.
#include <mega/core/view.hpp>

void six_extents() {
#if MEGA_TWIN
  mega::View<float, 5> view;
#else
  // mega-expect: "mega: View has between one and five extents"
  mega::View<float, 6> view;
#endif
  static_cast<void>(view);
}
