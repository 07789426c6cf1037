/// @file  SlowRankWatch: says during a run which rank has become slow, from what each rank's own
/// work in a step takes.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/view.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

struct SlowRank {
  int rank = 0;
  double factor = 1;            ///< of its own work: the median since then
  std::int64_t since_step = 0;  ///< first step of the interval in which it was slow first
  bool by_history = false;      ///< compared with its own past: it is not slow among its peers
};

/// "rank 3 computes 1.50 times as long as its peers since step 8".
[[nodiscard]] inline std::string to_string(const SlowRank& slow) {
  char factor[32];
  std::snprintf(factor, sizeof factor, "%.2f", slow.factor);
  return sentence("rank ", slow.rank, " computes ", factor, " times as long as ",
                  slow.by_history ? "it did before" : "its peers", " since step ", slow.since_step);
}

struct SlowRankOptions {
  double smallest_effect = 0.2;  ///< slower by less is not said
  double deviations = 3;         ///< and must stand out from its peers by this many
  int persistence = 3;           ///< observations in a row
};

/// The rule, apart from how the figures travel. Peers are ranks with equal work: those at one place
/// of the pipeline. A rank is slow in an observation if its time exceeds the lower median of its
/// peers by the smallest effect and by `deviations` robust standard deviations (1.4826 of the lower
/// median of the absolute deviations), so half of the peers may be slow at once. A rank that has no
/// peers, or is not slow among them, is compared with the median of its own first observations, and
/// only as far as the other ranks did not slow down as it did: so two ranks that are each other's
/// only peers can both have become slow. What has lasted is said once, and again after it had
/// ended.
class SlowRankRule {
 public:
  /// @param peers  peers[r]: the number of rank r's set of peers
  explicit SlowRankRule(std::vector<int> peers, SlowRankOptions options = {})
      : peers_(std::move(peers)), options_(options), ranks_(peers_.size()) {}

  /// @param seconds  a rank each, of the steps from first_step on; not positive where unknown
  /// @return  what has been slow for long enough just now, by rank
  std::vector<SlowRank> observe(std::int64_t first_step, const std::vector<double>& seconds) {
    expects(seconds.size() == ranks_.size(), ErrorCode::logic, [&] {
      return sentence(seconds.size(), " times were given for ", ranks_.size(), " ranks");
    });
    std::vector<SlowRank> out;
    const std::vector<double> past = against_past(seconds);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      State& state = ranks_[r];
      double ratio = 0, threshold = 1 + options_.smallest_effect;
      bool by_history = false;
      if (const std::vector<double> set = of_peers(static_cast<int>(r), seconds);
          seconds[r] > 0 && set.size() > 1) {
        ratio = seconds[r] / lower_median(set);
        threshold = threshold_among(set);
      }
      if (ratio <= threshold && seconds[r] > 0 && past[r] > 0) {
        std::vector<double> known, others;
        for (std::size_t o = 0; o < past.size(); ++o) {
          if (past[o] > 0) known.push_back(past[o]);
          if (o != r && past[o] > 0) others.push_back(past[o]);
        }
        const double own = others.empty() ? past[r] : past[r] / std::max(1.0, lower_median(others));
        by_history = own > threshold_among(known);
        if (by_history) ratio = own, threshold = 0;
      }
      if (ratio <= threshold) {
        state.streak.clear();
        state.said = false;
        continue;
      }
      if (state.said) continue;
      if (state.streak.empty()) state.since_step = first_step;
      state.streak.push_back(ratio);
      if (static_cast<int>(state.streak.size()) < options_.persistence) continue;
      state.said = true;
      out.push_back(
          {static_cast<int>(r), lower_median(state.streak), state.since_step, by_history});
    }
    return out;
  }

 private:
  static constexpr std::size_t first_observations = 4;

  struct State {
    std::vector<double> past;    // the first observations
    std::vector<double> streak;  // ratios of the present run of slow observations
    std::int64_t since_step = 0;
    bool said = false;
  };

  [[nodiscard]] static double lower_median(std::vector<double> values) {
    const auto at = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
    std::nth_element(values.begin(), at, values.end());
    return *at;
  }

  /// Times their lower median, above which one of them stands out.
  [[nodiscard]] double threshold_among(const std::vector<double>& values) const {
    const double middle = lower_median(values);
    std::vector<double> away;
    for (const double value : values) away.push_back(std::abs(value - middle));
    return 1 + std::max(options_.smallest_effect,
                        options_.deviations * 1.4826 * lower_median(away) / middle);
  }

  [[nodiscard]] std::vector<double> of_peers(int rank, const std::vector<double>& seconds) const {
    std::vector<double> out;
    for (std::size_t o = 0; o < seconds.size(); ++o)
      if (peers_[o] == peers_[static_cast<std::size_t>(rank)] && seconds[o] > 0)
        out.push_back(seconds[o]);
    return out;
  }

  /// Each rank's time over that of its first observations; 0 until these are there.
  [[nodiscard]] std::vector<double> against_past(const std::vector<double>& seconds) {
    std::vector<double> out(seconds.size(), 0.0);
    for (std::size_t r = 0; r < seconds.size(); ++r) {
      std::vector<double>& past = ranks_[r].past;
      if (past.size() == first_observations) {
        out[r] = seconds[r] / lower_median(past);
      } else if (seconds[r] > 0) {
        past.push_back(seconds[r]);
      }
    }
    return out;
  }

  std::vector<int> peers_;
  SlowRankOptions options_;
  std::vector<State> ranks_;
};

/// The places of a pipeline as sets of peers.
[[nodiscard]] inline std::vector<int> peers_of(const Mesh& mesh) {
  std::vector<int> out;
  for (int rank = 0; rank < mesh.size(); ++rank)
    out.push_back(mesh.coordinates(rank)[Axis::pipeline]);
  return out;
}

/// Brings the ranks' figures together: one all-reduce of 8 bytes a rank every `interval` steps, on
/// a communicator of its own; every rank comes to the same conclusion. Nothing where the interval
/// is 0 or the rank is alone.
template <device_policy Device, class Comm>
class SlowRankWatch {
 public:
  /// Collective over `world`, unless interval is 0.
  SlowRankWatch(Device& device, Comm& world, const Mesh& mesh, std::int64_t interval,
                SlowRankOptions options = {})
      : interval_(world.size() > 1 ? interval : 0), rule_(peers_of(mesh), options) {
    if (interval_ > 0) exchange_.push_back(Exchange(device, world));
  }

  /// After each step; collective over the world after every interval-th.
  /// @param take_seconds  take_seconds(): the rank's own time in the fastest step since the last
  ///                      call, see HostRecorder::take_fastest_step()
  template <class TakeSeconds>
  std::vector<SlowRank> step_done(std::int64_t step, const TakeSeconds& take_seconds) {
    if (interval_ <= 0 || ++steps_ % interval_ != 0) return {};
    const double seconds = take_seconds();
    const std::vector<double> all = exchange_.front().gather(seconds);
    // The first steps allocate, load and warm up.
    if (steps_ == interval_) return {};
    return rule_.observe(step - interval_ + 1, all);
  }

 private:
  class Exchange {
   public:
    Exchange(Device& device, Comm& world)
        : comm_(world.split(0, world.rank())),
          stream_(device.make_stream("watch")),
          memory_(device.allocate(sizeof(double) * static_cast<std::size_t>(world.size()))) {
      if constexpr (comm::has_attended_calls<Comm>) comm_.attend(true);
    }
    [[nodiscard]] std::vector<double> gather(double mine) {
      std::vector<double> all(static_cast<std::size_t>(comm_.size()), 0.0);
      all[static_cast<std::size_t>(comm_.rank())] = mine;
      const Vector<double> shared(reinterpret_cast<double*>(memory_.data()), comm_.size());
      upload(stream_, shared, Vector<const double>(all.data(), shared.size()));
      comm_.all_reduce(stream_, shared, comm::Reduce::sum);
      download(stream_, Vector<double>(all.data(), shared.size()), Vector<const double>(shared));
      stream_.synchronize();
      return all;
    }

   private:
    Comm comm_;
    typename Device::stream_type stream_;
    typename Device::memory_type memory_;
  };

  std::int64_t interval_;
  std::int64_t steps_ = 0;
  SlowRankRule rule_;
  std::vector<Exchange> exchange_;  // one, or none
};

}  // namespace mega::inline v0::scan
