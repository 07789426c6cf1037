/// @file  Tests of the cluster simulator: against the ideal model, by hand, and by its laws under
/// random delays.
#include <mega/core/error.hpp>
#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/dual_pipe_v.hpp>
#include <mega/dpp/v_schedule.hpp>
#include <mega/dpp/verifier.hpp>
#include <mega/dpp/zero_bubble.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

using namespace mega;
using namespace mega::dpp;

// Times that are small multiples of 1/8 add up exactly in double, so they compare with ==.

namespace {

using enum ActionKind;
using enum DispatchRule;

/// Mean makespan and highest peak over seeds 1..n.
struct Sample {
  double mean = 0;
  int peak = 0;
  int deadlocks = 0;
};

Sample sample(const ScheduleView& schedule, Cluster cluster, Dispatch dispatch, int n) {
  Sample found;
  for (int seed = 1; seed <= n; ++seed) {
    cluster.jitter.seed = static_cast<std::uint64_t>(seed);
    const ClusterRun run = simulate(schedule, cluster, dispatch);
    found.mean += run.timing.makespan / n;
    for (const int peak : run.timing.peak_per_rank) found.peak = std::max(found.peak, peak);
    found.deadlocks += run.deadlocked() ? 1 : 0;
  }
  return found;
}

/// Stages of unlike cost, in eighths.
std::vector<ActionTimes> uneven_times(int stages, double pair) {
  std::vector<ActionTimes> times;
  for (int stage = 0; stage < stages; ++stage) {
    times.push_back({1 + stage % 3 * 0.25, 1.5, 0.5 + stage % 2 * 0.125, stage % 4 * 0.25, pair});
  }
  return times;
}

/// Every rank's actions run once, one at a time, each after what it needs.
void check_consistent(const ScheduleView& s, const ClusterRun& run) {
  std::vector<double> forward_end(static_cast<std::size_t>(s.stages() * s.m), -1.0);
  std::vector<double> gradient_end = forward_end;
  const auto at = [&](int stage, int microbatch) {
    return static_cast<std::size_t>(stage * s.m + microbatch);
  };
  std::size_t actions = 0;
  for (int rank = 0; rank < s.p; ++rank) {
    double free = 0;
    for (const TimedAction& a : run.timeline.ranks[static_cast<std::size_t>(rank)]) {
      REQUIRE(a.start >= free);
      if (!a.action.with_next) free = a.end;
      double& end = (a.action.kind == forward
                         ? forward_end
                         : gradient_end)[at(s.stage(rank, a.action.chunk), a.action.microbatch)];
      if (a.action.kind == backward_weight) {
        REQUIRE(a.start >= end);
        continue;
      }
      REQUIRE(end == -1);
      end = a.end;
      ++actions;
    }
  }
  CHECK(actions == static_cast<std::size_t>(2 * s.stages() * s.m));
  for (int rank = 0; rank < s.p; ++rank) {
    for (const TimedAction& a : run.timeline.ranks[static_cast<std::size_t>(rank)]) {
      const int stage = s.stage(rank, a.action.chunk);
      const int mb = a.action.microbatch;
      if (a.action.kind == forward && stage > 0) {
        REQUIRE(a.start >= forward_end[at(stage - 1, mb)]);
      }
      if (gives_input_gradient(a.action.kind)) {
        REQUIRE(a.start >= forward_end[at(stage, mb)]);
        if (stage + 1 < s.stages()) REQUIRE(a.start >= gradient_end[at(stage + 1, mb)]);
      }
    }
  }
}

}  // namespace

TEST_CASE("dpp: a cluster without flaws gives the times of the ideal model") {
  const auto check = [](const ScheduleView& s, double pair) {
    CAPTURE(s.p);
    CAPTURE(s.v);
    const auto times = uneven_times(s.stages(), pair);
    const Timing ideal = simulate(s, times);
    const ClusterRun run = simulate(s, Cluster{.times = times});
    CHECK(run.timing.makespan == ideal.makespan);
    CHECK(run.timing.longest_span == ideal.longest_span);
    CHECK(run.timing.busy == ideal.busy);
    CHECK(run.timing.peak_per_rank == ideal.peak_per_rank);
    CHECK(run.timeline.end() == ideal.makespan);
    CHECK_FALSE(run.deadlocked());
    CHECK(run.stuck.empty());
    check_consistent(s, run);
  };
  for (const auto& [p, m, v] : std::vector<std::array<int, 3>>{
           {1, 1, 1}, {1, 4, 3}, {2, 1, 1}, {3, 5, 2}, {4, 8, 2}, {5, 7, 3}}) {
    const auto dfc = make_schedule(ScheduleTraversal<DFC>{}, p, m, v);
    check(dfc, -1);
    check(lower(dfc), -1);
    check(make_schedule(GPipe{}, p, m, v), -1);
    check(make_schedule(GPipe{}, p, m, v, VPlacement{}), -1);
    check(make_schedule(SplitBackward<GPipe, WeightsPending>{{}, {3}}, p, m, v), -1);
  }
  // Rank 0's second forward and first backward fused.
  std::vector<std::vector<Action>> lists{{{forward, false, 0, 0},
                                          {forward, true, 0, 1},
                                          {backward, false, 0, 0},
                                          {backward, false, 0, 1}},
                                         {{forward, false, 0, 0},
                                          {backward, false, 0, 0},
                                          {forward, false, 0, 1},
                                          {backward, false, 0, 1}}};
  check(Schedule::from_lists(2, 1, lists), 2.5);
}

TEST_CASE("dpp: a link takes one message after the other, and latency overlaps") {
  // GPipe on two ranks: forwards end at 1, 2, 3; a message keeps the link for 4 / 2 and arrives 10
  // after it has left.
  Cluster cluster;
  cluster.links = {{.latency = 10, .bandwidth = 2}};
  cluster.message_bytes = 4;
  const ClusterRun run = simulate(make_schedule(GPipe{}, 2, 3, 1), cluster);
  REQUIRE(run.timeline.transfers.size() == 6);
  const double starts[] = {1, 3, 5, 20, 22, 24};
  for (std::size_t i = 0; i < 6; ++i) {
    const Transfer& t = run.timeline.transfers[i];
    CAPTURE(i);
    CHECK(t.start == starts[i]);
    CHECK(t.end == starts[i] + 2 + 10);
    CHECK(t.from == (i < 3 ? 0 : 1));
    CHECK(t.to == (i < 3 ? 1 : 0));
    const auto mb = static_cast<int>(i % 3);
    CHECK(t.sent == make_action(i < 3 ? send_forward : send_backward, 0, mb));
    CHECK(t.received == make_action(i < 3 ? recv_forward : recv_backward, 0, mb));
  }
  // The last stage: forwards at 13, 15, 17; backwards of 2 from 18; the first stage's from 32.
  CHECK(run.timing.makespan == 38);
  CHECK(run.timing.longest_span == 38);
  CHECK(run.timing.busy == 9);
  // To rank 1: under way from 1 to 17, it computes 13-14 and 15-16 in that time. To rank 0: 20 to
  // 36, it computes 32-36.
  CHECK(run.transfers.total == 16 + 16);
  CHECK(run.transfers.covered == 2 + 4);
  CHECK(run.transfers.exposed() == 26);
  CHECK(run.transfers.coverage() == 6.0 / 32);
}

TEST_CASE("dpp: chunks share a link, directions do not") {
  // Two ranks, two chunks: stages 0 and 2 both send from rank 0 to rank 1.
  Cluster cluster;
  cluster.links = {{}, {0, 1}, {0, 4}, {}};  // 0 -> 1: 8 units a message; 1 -> 0: 2 units
  cluster.message_bytes = 8;
  const ClusterRun run = simulate(make_schedule(ScheduleTraversal<DFC>{}, 2, 6, 2), cluster);
  double free[2] = {0, 0};
  int seen[2] = {0, 0};
  bool queued = false;
  for (const Transfer& t : run.timeline.transfers) {
    const auto link = static_cast<std::size_t>(t.from);
    CHECK(t.end - t.start == (t.from == 0 ? 8 : 2));
    CHECK(t.start >= free[link]);
    queued = queued || (t.start == free[link] && seen[link] > 0);
    free[link] = t.end;
    ++seen[link];
  }
  // Four stages: three hops forwards and three back, 6 messages each.
  CHECK(seen[0] == 6 * 2 + 6 * 1);
  CHECK(seen[1] == 6 * 1 + 6 * 2);
  CHECK(queued);
  CHECK(run.timing.makespan >= 18 * 8);
}

TEST_CASE("dpp: finite slots hold a message back until a micro-batch has left") {
  // 1F1B on two ranks with one slot on the last stage: its second activation is there at 2 but
  // enters at 4, when forward 1-2 and backward 2-4 of the first are done.
  const auto schedule = make_schedule(OneForwardOneBackward{}, 2, 3, 1);
  const ClusterRun run = simulate(schedule, Cluster{.slots = {2, 1}});
  std::vector<double> starts;
  for (const Transfer& t : run.timeline.transfers) {
    if (t.sent.kind == send_forward) starts.push_back(t.start);
  }
  CHECK(starts == std::vector<double>{1, 4, 7});
  CHECK(simulate(schedule, Cluster{}).timeline.transfers[1].start == 2);
  CHECK_FALSE(run.deadlocked());
}

TEST_CASE("dpp: a rank computes on while two outputs wait to leave, not three") {
  // Rank 0 forwards everything first; the last stage has one slot and alternates: it frees the slot
  // at 4, so the second output leaves then, and the fourth forward gets its buffer.
  std::vector<std::vector<Action>> lists(2);
  for (int mb = 0; mb < 4; ++mb) lists[0].push_back(make_action(forward, 0, mb));
  for (int mb = 0; mb < 4; ++mb) {
    lists[0].push_back(make_action(backward, 0, mb));
    lists[1].push_back(make_action(forward, 0, mb));
    lists[1].push_back(make_action(backward, 0, mb));
  }
  const ClusterRun run = simulate(Schedule::from_lists(4, 1, lists), Cluster{.slots = {4, 1}});
  const double starts[] = {0, 1, 2, 4};
  for (std::size_t i = 0; i < 4; ++i) CHECK(run.timeline.ranks[0][i].start == starts[i]);
  CHECK_FALSE(run.deadlocked());
}

TEST_CASE("dpp: a forward runs ahead once its output has a slot to go to") {
  // 1F1B with gradients that take 100. Forwards of micro-batches 0 and 1 end at 1 and 2; 1 enters
  // the last stage's only slot at 4, is through at 7, and only then may 2 be forwarded ahead.
  Cluster cluster{.slots = {3, 1}};
  cluster.links = {{}, {}, {.latency = 100}, {}};
  const auto schedule = make_schedule(OneForwardOneBackward{}, 2, 3, 1);
  const ClusterRun run = simulate(schedule, cluster, {look_ahead, 1});
  CHECK(run.timeline.ranks[0][2].action == make_action(forward, 0, 2));
  CHECK(run.timeline.ranks[0][2].start == 7);
  CHECK(run.timing.peak_per_rank[0] == 3);
  // The limit is look-ahead's: the static order waits for the gradient at 4 + 100.
  for (const Dispatch dispatch : {Dispatch{}, Dispatch{static_order, 1}}) {
    const ClusterRun waits = simulate(schedule, cluster, dispatch);
    CHECK(waits.timeline.ranks[0][2].action == make_action(backward, 0, 0));
    CHECK(waits.timeline.ranks[0][2].start == 104);
  }
}

TEST_CASE("dpp: each directed link has its own latency") {
  Cluster cluster;
  for (int link = 0; link < 9; ++link) cluster.links.push_back({.latency = 1.0 + link});
  for (const bool v_shape : {false, true}) {
    const auto schedule =
        v_shape ? make_schedule(GPipe{}, 3, 4, 2, VPlacement{}) : make_schedule(GPipe{}, 3, 4, 2);
    const ClusterRun run = simulate(schedule, cluster);
    CHECK(run.timeline.transfers.size() == static_cast<std::size_t>((v_shape ? 4 : 5) * 2 * 4));
    for (const Transfer& t : run.timeline.transfers) {
      CHECK(t.end - t.start == 1 + 3 * t.from + t.to);
    }
  }
}

TEST_CASE("dpp: too few slots are a deadlock, reported with what waits") {
  const auto schedule = make_schedule(OneForwardOneBackward{}, 3, 4, 1);
  const ClusterRun run = simulate(schedule, Cluster{.slots = {2, 2, 1}});
  CHECK(run.deadlocked());
  // Rank 0 cannot begin its third forward, though 1F1B wants it before the first backward. The
  // others compute what they have: two forwards and two backwards on the last rank.
  REQUIRE(run.stuck.size() == 3);
  CHECK(run.stuck[0].rank == 0);
  CHECK(run.stuck[0].action == make_action(forward, 0, 2));
  CHECK(run.stuck[1].action == make_action(forward, 0, 2));
  CHECK(run.stuck[2].action == make_action(forward, 0, 2));
  CHECK(run.unfinished == 24 - 2 - 3 - 4);
}

TEST_CASE("dpp: lists that wait for each other are reported, not waited for") {
  const std::vector<std::vector<Action>> lists{
      {make_action(forward, 0, 0), make_action(backward, 0, 0), make_action(forward, 1, 0),
       make_action(backward, 1, 0)}};
  const ClusterRun run = simulate(Schedule::from_lists(1, 2, lists), Cluster{});
  CHECK(run.unfinished == 3);
  REQUIRE(run.stuck.size() == 1);
  CHECK(run.stuck[0].action == make_action(backward, 0, 0));
}

TEST_CASE("dpp: random delays are those of the seed, whatever the rule") {
  const auto schedule = make_schedule(ScheduleTraversal<DFC>{}, 4, 8, 2);
  Cluster cluster;
  cluster.jitter = {.compute = 0.3, .link_delay = 0.6, .seed = 7};
  const ClusterRun once = simulate(schedule, cluster);
  const ClusterRun again = simulate(schedule, cluster);
  CHECK(once.timing.makespan == again.timing.makespan);
  const ClusterRun ahead = simulate(schedule, cluster, {look_ahead, 4});
  cluster.jitter.seed = 8;
  CHECK(simulate(schedule, cluster).timing.makespan != once.timing.makespan);

  double sum = 0, delays = 0, shortest = 9, longest = 0;
  int count = 0;
  bool reordered = false;
  for (std::size_t r = 0; r < 4; ++r) {
    const auto& list = once.timeline.ranks[r];
    for (std::size_t i = 0; i < list.size(); ++i) {
      const double time = list[i].end - list[i].start;
      const double relative = time / (list[i].action.kind == forward ? 1 : 2);
      shortest = std::min(shortest, relative);
      longest = std::max(longest, relative);
      sum += relative;
      ++count;
      const auto same =
          std::find_if(ahead.timeline.ranks[r].begin(), ahead.timeline.ranks[r].end(),
                       [&](const TimedAction& a) { return a.action == list[i].action; });
      REQUIRE(same != ahead.timeline.ranks[r].end());
      // Differences of sums of different terms: a few roundings at magnitude 100.
      CHECK(same->end - same->start == doctest::Approx(time).epsilon(1e-12));
      reordered =
          reordered || same - ahead.timeline.ranks[r].begin() != static_cast<std::ptrdiff_t>(i);
    }
  }
  CHECK(reordered);
  CHECK(shortest >= 0.7);
  CHECK(shortest < 0.75);
  CHECK(longest < 1.3);
  CHECK(longest > 1.25);
  // 128 uniform draws: the mean's deviation is 0.3 / sqrt(3 * 128) = 0.015; four of them.
  CHECK(std::abs(sum / count - 1) < 0.06);
  for (const Transfer& t : once.timeline.transfers) delays += t.end - t.start;
  // 112 exponential draws of mean 0.6: deviation 0.6 / sqrt(112) = 0.057; four of them.
  CHECK(once.timeline.transfers.size() == 112);
  CHECK(std::abs(delays / 112 - 0.6) < 0.23);
}

TEST_CASE("dpp: a slow rank stretches its own actions only") {
  Cluster cluster;
  cluster.slowness = {1, 2, 1};
  const ClusterRun run = simulate(make_schedule(OneForwardOneBackward{}, 3, 4, 1), cluster);
  for (std::size_t r = 0; r < 3; ++r) {
    for (const TimedAction& a : run.timeline.ranks[r]) {
      CHECK(a.end - a.start == (r == 1 ? 2 : 1) * (a.action.kind == forward ? 1 : 2));
    }
  }
  CHECK(run.timing.busy == 4 * 6);
  CHECK(run.timing.bubble_wall() == run.timing.makespan - 24);
}

TEST_CASE(
    "dpp: look-ahead under random delays ends, keeps its peak, and is the static order at 0") {
  for (const auto& [p, m, v] : std::vector<std::array<int, 3>>{{2, 3, 1}, {3, 7, 2}, {4, 16, 2}}) {
    for (const bool split : {false, true}) {
      const Schedule order =
          split ? make_schedule(SplitBackward<ScheduleTraversal<DFC>, WeightsPending>{{}, {2}}, p,
                                m, v)
                : make_schedule(ScheduleTraversal<DFC>{}, p, m, v);
      const Timing ideal = simulate(order);
      const std::vector<int> slots = required_slots(lower(order));
      for (int seed = 1; seed <= 20; ++seed) {
        for (const int limit : {0, 1, 4}) {
          for (const int extra : {-1, 0, limit}) {  // unlimited, required, required + limit
            Cluster cluster;
            cluster.links = {{.latency = 0.1, .bandwidth = 8}};
            cluster.message_bytes = 2;
            cluster.jitter = {
                .compute = 0.5, .link_delay = 1.5, .seed = static_cast<std::uint64_t>(seed)};
            if (extra >= 0) cluster.slots = slots;
            for (int& n : cluster.slots) n += extra;
            const ClusterRun run = simulate(order, cluster, {look_ahead, limit});
            REQUIRE_FALSE(run.deadlocked());
            check_consistent(order, run);
            for (std::size_t r = 0; r < ideal.peak_per_rank.size(); ++r) {
              CHECK(run.timing.peak_per_rank[r] <= ideal.peak_per_rank[r] + limit);
              const auto list = order.of_rank(static_cast<int>(r));
              const auto& ran = run.timeline.ranks[r];
              REQUIRE(ran.size() == list.size());
              for (std::size_t i = 0; limit == 0 && i < ran.size(); ++i) {
                REQUIRE(ran[i].action == list[i]);
              }
            }
          }
        }
      }
    }
  }
}

// The table of 30 seeds; the benchmark look_ahead prints it in full. Expected values are those of
// an independent model of the same cluster with draws of its own. One run of the depth-first order
// deviates by 3.0 (mean delay 0.6) and 6.3 (1.2), so the means of two samples of 30 runs lie within
// 2 * deviation * sqrt(2 / 30) of each other in 95 of 100 cases: 1.6 and 3.3.
TEST_CASE("dpp: look-ahead beats static orders on links of random delay, with bounded memory") {
  const auto dfc = make_schedule(ScheduleTraversal<DFC>{}, 4, 16, 2);
  const auto wide = make_schedule(Interleaved{{8}}, 4, 16, 2);
  const auto split = make_schedule(SplitBackward<Interleaved, WeightAtOnce>{{{8}}, {}}, 4, 16, 2);
  const auto on = [](const ScheduleView& s, double delay, Dispatch dispatch) {
    Cluster cluster;
    cluster.jitter.link_delay = delay;
    return sample(s, cluster, dispatch, 30);
  };

  const Sample dfc_06 = on(dfc, 0.6, {});
  CHECK(std::abs(dfc_06.mean - 120.4) < 1.6);
  CHECK(dfc_06.peak == 11);
  const Sample wide_06 = on(wide, 0.6, {});
  CHECK(std::abs(wide_06.mean - 116.3) < 1.6);
  CHECK(wide_06.peak == 15);
  const Sample dfc_12 = on(dfc, 1.2, {});
  CHECK(std::abs(dfc_12.mean - 151.2) < 3.3);
  CHECK(std::abs(on(wide, 1.2, {}).mean - 139.9) < 3.3);

  const Sample ahead_06 = on(dfc, 0.6, {look_ahead, 4});
  CHECK(std::abs(ahead_06.mean - 115.9) < 1.6);
  CHECK(ahead_06.peak == 15);

  // Without a bound the greedy rule is no faster and takes up to all 32 activations.
  const Sample greedy_06 = on(dfc, 0.6, {greedy});
  CHECK(std::abs(greedy_06.mean - 114.4) < 1.6);
  CHECK(greedy_06.peak >= 29);
  CHECK(greedy_06.deadlocks == 0);
  const Sample wide_ahead_06 = on(wide, 0.6, {look_ahead, 4});
  CHECK(wide_ahead_06.mean < greedy_06.mean);
  CHECK(wide_ahead_06.peak <= 15 + 4);

  // A counter of live activations deadlocks in every run.
  const Sample capped = on(dfc, 0.6, {capped_greedy, 11});
  CHECK(capped.deadlocks == 30);

  // Over g = 2p, against the static depth-first order.
  const Sample wide_ahead_12 = on(wide, 1.2, {look_ahead, 4});
  CHECK(wide_ahead_06.mean <= 0.955 * dfc_06.mean);
  CHECK(wide_ahead_12.mean <= 0.86 * dfc_12.mean);
  CHECK(wide_ahead_12.peak <= 15 + 4);
  // With the input gradient sent on its way before the weight gradient, one forward ahead is
  // enough.
  const Sample split_06 = on(split, 0.6, {look_ahead, 1});
  const Sample split_12 = on(split, 1.2, {look_ahead, 1});
  CHECK(split_06.mean <= 0.95 * dfc_06.mean);
  CHECK(split_12.mean <= 0.86 * dfc_12.mean);
  CHECK(split_06.peak <= 15 + 1);
  CHECK(split_12.peak <= 15 + 1);
}

TEST_CASE("dpp: the greedy rule fills rank 0 with all forwards when gradients are far") {
  Cluster cluster;
  cluster.links = {{.latency = 1000}};
  const auto schedule = make_schedule(ScheduleTraversal<DFC>{}, 2, 4, 2);
  const ClusterRun run = simulate(schedule, cluster, {greedy});
  CHECK_FALSE(run.deadlocked());
  CHECK(run.timing.peak_per_rank == std::vector<int>{8, 5});
  check_consistent(schedule, run);
  // One rank without links alternates: B as soon as there is one, then F.
  const ClusterRun alone = simulate(make_schedule(GPipe{}, 1, 2, 1), {}, {greedy});
  const ActionKind kinds[] = {forward, backward, forward, backward};
  for (std::size_t i = 0; i < 4; ++i) CHECK(alone.timeline.ranks[0][i].action.kind == kinds[i]);
  const auto split = make_schedule(SplitBackward<GPipe, WeightAtOnce>{}, 1, 2, 1);
  CHECK_THROWS_WITH_AS((void)simulate(split, {}, {greedy}),
                       "the greedy rules run forwards and whole backwards, not backward_input of "
                       "chunk 0, micro-batch 0",
                       Error);
}

TEST_CASE("dpp: transfers count once where they overlap, and compute covers them once") {
  Timeline timeline;
  timeline.ranks = {{},
                    {{{forward, true, 0, 1}, 2, 4},  // a fused pair, then one more
                     {{backward, false, 0, 0}, 2, 4},
                     {{forward, false, 0, 2}, 5, 9}}};
  const auto transfer = [](int to, double start, double end) {
    return Transfer{1 - to, to, make_action(send_forward, 0, 0), make_action(recv_forward, 0, 0),
                    start,  end};
  };
  timeline.transfers = {transfer(1, 0, 3), transfer(1, 1, 2), transfer(1, 3.5, 5.5),
                        transfer(0, 4, 6), transfer(1, 8, 8), transfer(1, 8.5, 10)};
  const TransferTime time = transfer_time(timeline);
  CHECK(time.total == 3 + 2 + 1.5 + 2);
  CHECK(time.covered == 1 + 0.5 + 0.5 + 0.5 + 0);
  CHECK(time.exposed() == 8.5 - 2.5);
  CHECK(transfer_time(Timeline{}).coverage() == 1);
}

TEST_CASE("dpp: a cluster that does not fit the schedule is refused") {
  const auto schedule = make_schedule(ScheduleTraversal<DFC>{}, 2, 3, 2);
  CHECK_THROWS_WITH_AS((void)simulate(schedule, Cluster{.times = std::vector<ActionTimes>(3)}),
                       "the cluster has stage times for 3 entries, not 4", Error);
  CHECK_THROWS_AS((void)simulate(schedule, Cluster{.times = {}}), Error);
  CHECK_THROWS_AS((void)simulate(schedule, Cluster{.slowness = {1}}), Error);
  CHECK_THROWS_AS((void)simulate(schedule, Cluster{.links = std::vector<Link>(2)}), Error);
  CHECK_THROWS_AS((void)simulate(schedule, Cluster{.slots = {1, 1}}), Error);
  CHECK_THROWS_AS((void)simulate(schedule, Cluster{.jitter = {.compute = 1.5}}), Error);
  CHECK_THROWS_AS((void)simulate(schedule, {}, {capped_greedy, 0}), Error);
  CHECK_THROWS_AS((void)simulate(schedule, {}, {look_ahead, -1}), Error);
}

TEST_CASE("dpp: a pipeline of 256 ranks keeps the closed formula") {
  const ClusterRun run = simulate(make_schedule(OneForwardOneBackward{}, 256, 512, 1), Cluster{});
  CHECK(run.timing.makespan == 3 * (512 + 255));
  CHECK(run.timing.peak_per_rank.front() == 256);
  CHECK(run.timing.peak_per_rank.back() == 1);
}

namespace {

void check_estimate(const ScheduleView& schedule, const Cluster& cluster) {
  const ClusterRun run = simulate(schedule, cluster);
  const ClusterEstimate found = estimate(schedule, cluster);
  REQUIRE(found.finished);
  CHECK(found.timing.makespan == run.timing.makespan);
  CHECK(found.timing.longest_span == run.timing.longest_span);
  CHECK(found.timing.busy == run.timing.busy);
  CHECK(found.timing.peak_per_rank == run.timing.peak_per_rank);
  // The same seconds in another order of summation.
  CHECK(found.transfers.total == doctest::Approx(run.transfers.total).epsilon(1e-12));
  CHECK(found.transfers.covered == doctest::Approx(run.transfers.covered).epsilon(1e-12));
}

}  // namespace

TEST_CASE("dpp: an estimate is the simulation without its timeline") {
  std::vector<Schedule> schedules;
  for (const int m : {1, 3, 8, 13}) {
    for (const int p : {1, 2, 3, 5}) {
      schedules.push_back(make_schedule(OneForwardOneBackward{}, p, m, 1));
      schedules.push_back(make_schedule(ScheduleTraversal<DFC>{}, p, m, 2));
      schedules.push_back(make_schedule(ScheduleTraversal<BFC>{}, p, m, 3));
      schedules.push_back(make_schedule(ZeroBubbleH2{}, p, m, 1));
      schedules.push_back(make_schedule(VMin{}, p, m, 2));
      if (m >= 2 * p) schedules.push_back(make_schedule(DualPipeV{}, p, m, 2));
    }
  }
  for (const Schedule& schedule : schedules) {
    const ScheduleView view = schedule;
    CAPTURE(view.p);
    CAPTURE(view.m);
    CAPTURE(view.v);
    Cluster cluster;
    check_estimate(schedule, cluster);
    cluster.times = uneven_times(view.stages(), 3);
    cluster.links = {{.latency = 0.25, .bandwidth = 2}};
    cluster.message_bytes = 3;
    check_estimate(schedule, cluster);
    check_estimate(lower(schedule), cluster);
    cluster.jitter = {.compute = 0.3, .link_delay = 2.5, .seed = 5};
    cluster.slowness.assign(static_cast<std::size_t>(view.p), 1.0);
    cluster.slowness.back() = 1.25;
    check_estimate(schedule, cluster);
  }
}

TEST_CASE("dpp: an estimate says that the ranks wait for each other, and knows no slots") {
  Schedule stuck(2, 2, 1, LoopPlacement{});
  stuck.append(std::vector<Action>{make_action(forward, 0, 0), make_action(backward, 0, 0),
                                   make_action(forward, 0, 1), make_action(backward, 0, 1)});
  stuck.append(std::vector<Action>{make_action(forward, 0, 0), make_action(forward, 0, 1),
                                   make_action(backward, 0, 0), make_action(backward, 0, 1)});
  CHECK_FALSE(estimate(stuck, {}).finished);
  CHECK(simulate(stuck, Cluster{}).deadlocked());
  CHECK_THROWS_AS((void)estimate(stuck, Cluster{.slots = {2, 2}}), Error);
}
