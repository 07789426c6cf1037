// order() gets room that knows its end; a policy that wants a bare span is none.
#include <mega/dpp/schedule.hpp>

#include <span>
#include <string_view>

using namespace mega::dpp;

using BareSpan = std::span<Action>;

template <class Room>
struct Order {
  static constexpr std::string_view name = "order";
  static constexpr int length(int, int m, int) { return 2 * m; }
  static constexpr int order(int, int, int, int, Room) { return 0; }
};

void make() {
#if MEGA_TWIN
  (void)make_schedule(Order<ActionSpan>{}, 2, 4, 1);
#else
  // mega-expect: "writes_traversal_order|traversal_policy|no instance of function template"
  (void)make_schedule(Order<BareSpan>{}, 2, 4, 1);
#endif
}
