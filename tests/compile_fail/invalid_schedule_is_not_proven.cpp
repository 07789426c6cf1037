// A proof of an order that deadlocks fails, and the compiler prints where the ranks wait.
#include <mega/dpp/proof.hpp>

#include <string_view>

using namespace mega::dpp;

/// Rank r runs r forwards, or p-1-r, before it takes one forward and one backward in turn.
template <bool last_ranks_first>
struct Staggered {
  static constexpr std::string_view name = "staggered";
  static constexpr int length(int, int m, int) { return 2 * m; }
  static constexpr int order(int rank, int p, int m, int, ActionSpan out) {
    const int early = last_ranks_first ? rank : p - 1 - rank;
    ActionSink list(out);
    for (int i = 0; i < m + early; ++i) {
      if (i < m) list.put(ActionKind::forward, 0, i);
      if (i >= early) list.put(ActionKind::backward, 0, i - early);
    }
    return list.count();
  }
};

#if MEGA_TWIN
static_assert(proven([] { return lower(make_schedule(Staggered<false>{}, 3, 4, 1)); }));
#else
// mega-expect: "deadlock, (rank=)?0, (position=)?2, .*recv_backward, (chunk=)?0, (microbatch=)?0"
static_assert(proven([] { return lower(make_schedule(Staggered<true>{}, 3, 4, 1)); }));
#endif
