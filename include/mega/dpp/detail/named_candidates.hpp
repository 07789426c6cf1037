/// @file  The named traversals that a search compares with.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/traversal.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <algorithm>
#include <string>
#include <string_view>

namespace mega::inline v0::dpp::detail {

/// From `first` to `last`, both included, in even steps of which there are at most 32.
template <class Visit>
void for_each_between(int first, int last, const Visit& visit) {
  const int step = std::max(1, (last - first + 31) / 32);
  for (int value = first; value < last; value += step) visit(value);
  visit(last);
}

/// Calls visit(name, policy) for a traversal with its weight gradients apart.
template <traversal_policy Base, class Visit>
void with_each_delay(const std::string& name, const Base& base, int p, int m, int v,
                     const Visit& visit) {
  const auto with = [&](const std::string& delay, WeightsPending waits) {
    visit(name + ", W " + delay, SplitBackward<Base, WeightsPending>{base, waits});
  };
  with("at once", {});
  with("by rank", {0, 1});
  with("by rank, twice", {0, 2});
  const int most = std::min(2 * p, m) * v;
  for (int pending = 1; pending <= most; pending *= 2)
    with(sentence("pending ", pending), {pending, 0});
  with("at end", {m * v, 0});
}

/// Calls visit(name, policy) for every named traversal of v chunks: those of one chunk, group sizes
/// from p to m, caps of the V schedules from 2 to 2p (of many sizes or caps 33 each), and pending
/// weight gradients in powers of two. Those that refuse p or m, need another placement, deadlock on
/// this one or exceed a cap drop out later. Of equal orders the first gives its name.
template <class Visit>
void for_each_named_traversal(int p, int m, int v, const Visit& visit) {
  if (v == 1) {
    visit("1f1b", OneForwardOneBackward{});
    visit("zb_h1", ZeroBubbleH1{});
    visit("zb_h2", ZeroBubbleH2{});
    visit("eager_1f1b", EagerOneForwardOneBackward{});
    with_each_delay("1f1b", OneForwardOneBackward{}, p, m, v, visit);
    with_each_delay("eager_1f1b", EagerOneForwardOneBackward{}, p, m, v, visit);
  } else {
    for_each_between(p, std::max(p, m), [&](int group) {
      const std::string name = group == p   ? "dfc"
                               : group == m ? "bfc"
                                            : sentence("group size ", group);
      visit(name, Interleaved{{group}});
      with_each_delay(name, Interleaved{{group}}, p, m, v, visit);
    });
  }
  visit("gpipe", GPipe{});
  with_each_delay("gpipe", GPipe{}, p, m, v, visit);
  if (v != 2) return;
  visit("zb_v", ZeroBubbleV{});
  visit("v_half", VHalf{});
  visit("v_min", VMin{});
  for_each_between(2, 2 * p,
                   [&](int cap) { visit(sentence("v_schedule of cap ", cap), VSchedule{{cap}}); });
  visit("dual_pipe_v", DualPipeV{});
}

}  // namespace mega::inline v0::dpp::detail
