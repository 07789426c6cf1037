/// @file  Common load: which kernels vary from micro-batch to micro-batch because the work does.
///
/// What a micro-batch takes varies for two reasons. Its work may: then all passes over it vary
/// together, the forward and, later, the backward. Or something is in the way: other ranks on the
/// same processors, another job, a daemon. That comes in bursts, which hit whatever runs at the
/// time. So durations of a kernel of one pass and one of another are compared over the
/// micro-batches of each rank and step. Work is the reason where they correlate in the same
/// micro-batch, and more so than in different ones that lie nearer in time.
///
/// Assumed: loads of neighbouring micro-batches are independent; what delays kernels does not come
/// back for the same micro-batch's later pass. What recurs at one place of every step, such as slow
/// first micro-batches, is taken out beforehand, and outliers are cut to three standard deviations.
#pragma once
#include <mega/scan/verdict.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/kernel_times.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// The pair of kernels that says best that the work varies; zeros where none does.
struct CommonLoad {
  double correlation = 0;  ///< in the same micro-batch
  double neighbours = 0;   ///< in micro-batches that are nearer in time
};

class CommonLoadSearch {
 public:
  CommonLoadSearch(KernelTimes& times, const JobLayout& job, const DiagnoseOptions& options)
      : times_(times), job_(job), o_(options), away_(times.logs.size(), 0) {}

  CommonLoad run() {
    std::vector<std::size_t> order(times_.kernels.size());
    for (std::size_t k = 0; k < order.size(); ++k) order[k] = k;
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return times_.kernels[a].total > times_.kernels[b].total;
    });
    if (order.size() > most_kernels) order.resize(most_kernels);
    for (const std::size_t k : order) find_deviations(times_.kernels[k]);

    struct Pair {
      std::size_t a, b;
      double together;
    };
    std::vector<Pair> pairs;
    CommonLoad best;
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (std::size_t j = i + 1; j < order.size(); ++j) {
        const Comparison c = compare(times_.kernels[order[i]], times_.kernels[order[j]]);
        if (!varies(c.all)) continue;
        pairs.push_back({order[i], order[j], c.all.deviation()});
        const double more = c.apart.correlation() - c.apart.neighbours();
        if (varies(c.apart) && more >= least_correlation &&
            more > best.correlation - best.neighbours)
          best = {c.apart.correlation(), c.apart.neighbours()};
      }
    }
    // Once it is known that the work varies, what goes with it does for that reason.
    if (best.correlation <= 0) return best;
    for (const Pair& pair : pairs) {
      for (const std::size_t k : {pair.a, pair.b}) {
        Kernel& kernel = times_.kernels[k];
        kernel.variation = std::max(kernel.variation, pair.together);
      }
    }
    return best;
  }

 private:
  /// Sums over the micro-batches of all ranks and steps.
  struct Covariance {
    double ab = 0, aa = 0, bb = 0;
    double nearer = 0;  // with a different micro-batch, nearer in time
    std::size_t count = 0, pairs = 0;

    [[nodiscard]] double correlation() const { return share(ab); }
    [[nodiscard]] double neighbours() const {
      const double scale =
          static_cast<double>(count) / static_cast<double>(std::max<std::size_t>(1, pairs));
      return std::max(0.0, share(nearer) * scale);
    }
    [[nodiscard]] double deviation() const {
      return std::sqrt(std::max(0.0, ab / static_cast<double>(count)));
    }
    /// Half of the variation is common at least, and by no accident: Fisher's transformation makes
    /// a correlation nearly normal.
    [[nodiscard]] bool significant() const {
      if (count < 12 || correlation() < least_correlation) return false;
      return std::atanh(std::min(0.9999, correlation())) *
                 std::sqrt(static_cast<double>(count - 3)) >=
             least_deviations;
    }

    Covariance& operator+=(const Covariance& more) {
      ab += more.ab, aa += more.aa, bb += more.bb, nearer += more.nearer;
      count += more.count, pairs += more.pairs;
      return *this;
    }

   private:
    [[nodiscard]] double share(double sum) const {
      return aa * bb > 0 ? sum / std::sqrt(aa * bb) : 0;
    }
  };
  struct Comparison {
    Covariance all;
    Covariance apart;  // of runs that have another micro-batch's between them, or as near
  };

  /// The runs of a kernel in one micro-batch.
  struct Mean {
    std::int32_t microbatch;
    double away;
    double time;  // middle, in ns
  };

  [[nodiscard]] bool varies(const Covariance& c) const {
    return c.significant() && c.deviation() > o_.data_variation;
  }

  /// Of every run of the kernel: how far the logarithm of its duration is from the rest of its
  /// cell, and from what is usual at this place.
  void find_deviations(const Kernel& kernel) {
    struct Place {
      std::int32_t stage;
      std::size_t at, of;  // the how-many-eth run of how many
      std::size_t index;
      auto key() const { return std::tie(stage, of, at); }
    };
    std::vector<Place> places;
    for (std::size_t c = kernel.first; c < kernel.first + kernel.count; ++c) {
      const KernelCell& cell = times_.cells[c];
      for (std::size_t i = 0; i < cell.count; ++i) {
        places.push_back({job_.stage[cell.rank], i, cell.count, cell.first + i});
        away_[cell.first + i] = double(times_.logs[cell.first + i]) - cell.middle;
      }
    }
    std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
      return a.key() != b.key() ? a.key() < b.key() : a.index < b.index;
    });
    std::vector<double> values, all;
    for (std::size_t i = 0; i < places.size();) {
      std::size_t end = i;
      values.clear();
      for (; end < places.size() && places[end].key() == places[i].key(); ++end)
        values.push_back(away_[places[end].index]);
      const double usual = lower_median(values);
      for (; i < end; ++i) all.push_back(away_[places[i].index] -= usual);
    }
    const double most = 3 * spread_around(all, 0);
    for (const Place& p : places) away_[p.index] = std::clamp(away_[p.index], -most, most);
  }

  [[nodiscard]] Comparison compare(const Kernel& a, const Kernel& b) {
    Comparison out;
    std::size_t i = a.first, j = b.first;
    while (i < a.first + a.count && j < b.first + b.count) {
      const KernelCell& x = times_.cells[i];
      const KernelCell& y = times_.cells[j];
      const auto at_x = std::pair(x.rank, x.step), at_y = std::pair(y.rank, y.step);
      if (at_x != at_y) {
        ++(at_x < at_y ? i : j);
        continue;
      }
      ++i, ++j;
      add(out, x, y);
    }
    return out;
  }

  void add(Comparison& out, const KernelCell& x, const KernelCell& y) {
    const bool labelled = times_.microbatches[x.first] >= 0 && times_.microbatches[y.first] >= 0;
    if (!labelled && x.count != y.count) return;
    const std::size_t layers = labelled ? 0 : runs_in_a_row(x, y);
    take_means(x, layers, x_);
    take_means(y, layers, y_);
    if (x_.size() != y_.size() || x_.size() < 3) return;
    for (std::size_t i = 0; i < x_.size(); ++i) {
      if (x_[i].microbatch != y_[i].microbatch) return;
    }
    // The distance is chosen for the whole cell: a single run's would be by how it was delayed.
    const auto count = static_cast<std::ptrdiff_t>(x_.size());
    std::ptrdiff_t nearest = 0;
    for (std::ptrdiff_t lag = 1 - count / 2; lag <= count / 2; ++lag) {
      if (lag != 0 && (nearest == 0 || usual_gap(lag) < usual_gap(nearest))) nearest = lag;
    }
    const bool apart = usual_gap(nearest) <= as_near * usual_gap(0);
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      const std::ptrdiff_t other = i + nearest;
      const bool has_other = other >= 0 && other < count;
      Covariance one;
      one.ab = x_[at(i)].away * y_[at(i)].away;
      one.aa = x_[at(i)].away * x_[at(i)].away;
      one.bb = y_[at(i)].away * y_[at(i)].away;
      one.nearer = has_other ? x_[at(i)].away * y_[at(other)].away : 0;
      one.count = 1;
      one.pairs = has_other ? 1 : 0;
      out.all += one;
      if (apart) out.apart += one;
    }
  }

  [[nodiscard]] static std::size_t at(std::ptrdiff_t i) { return static_cast<std::size_t>(i); }
  /// Between a run of x and the one of y that is `lag` micro-batches later, in ns; median.
  [[nodiscard]] double usual_gap(std::ptrdiff_t lag) {
    gaps_.clear();
    const auto count = static_cast<std::ptrdiff_t>(x_.size());
    for (std::ptrdiff_t i = std::max<std::ptrdiff_t>(0, -lag); i < std::min(count, count - lag);
         ++i)
      gaps_.push_back(std::abs(y_[at(i + lag)].time - x_[at(i)].time));
    return lower_median(gaps_);
  }

  /// In how many runs the two kernels take turns: of as many layers as a micro-batch passes.
  [[nodiscard]] std::size_t runs_in_a_row(const KernelCell& x, const KernelCell& y) const {
    std::size_t least = x.count, length = 0, i = 0, j = 0;
    int last = -1;
    while (i < x.count || j < y.count) {
      const bool first =
          j == y.count || (i < x.count && times_.begins[x.first + i] <= times_.begins[y.first + j]);
      if (last >= 0 && last != (first ? 0 : 1)) {
        least = std::min(least, length);
        length = 0;
      }
      last = first ? 0 : 1;
      ++length;
      ++(first ? i : j);
    }
    return std::max<std::size_t>(1, std::min(least, length));
  }

  /// One a micro-batch, in order of their numbers.
  /// @param layers  so many runs in a row are of one micro-batch; 0: they say which
  void take_means(const KernelCell& cell, std::size_t layers, std::vector<Mean>& out) {
    sums_.clear();
    for (std::size_t i = 0; i < cell.count; ++i) {
      const std::size_t at = cell.first + i;
      const auto microbatch =
          layers > 0 ? static_cast<std::int32_t>(i / layers) : times_.microbatches[at];
      auto& [count, away, time] = sums_[microbatch];
      count += 1;
      away += away_[at];
      time += static_cast<double>(times_.begins[at] - times_.begins[cell.first]) +
              std::exp(double(times_.logs[at])) / 2;
    }
    out.clear();
    for (const auto& [microbatch, sum] : sums_) {
      const auto& [count, away, time] = sum;
      out.push_back({microbatch, away / count,
                     time / count + static_cast<double>(times_.begins[cell.first])});
    }
  }

  /// Times as far as the same micro-batch's, a different one's is as near.
  static constexpr double as_near = 1.25;
  /// Pairs of kernels are compared among the ones with the most time.
  static constexpr std::size_t most_kernels = 16;
  static constexpr double least_correlation = 0.5;
  /// Of a normal variable; there are about a hundred pairs.
  static constexpr double least_deviations = 4;

  KernelTimes& times_;
  const JobLayout& job_;
  const DiagnoseOptions& o_;
  std::vector<double> away_;  // by run
  std::vector<Mean> x_, y_;
  std::vector<double> gaps_;
  std::map<std::int32_t, std::tuple<double, double, double>> sums_;  // count, away, time
};

/// Fills Kernel::variation of the kernels with the most time.
inline CommonLoad find_common_load(KernelTimes& times, const JobLayout& job,
                                   const DiagnoseOptions& options) {
  return CommonLoadSearch(times, job, options).run();
}

}  // namespace mega::inline v0::scan::verdicts
