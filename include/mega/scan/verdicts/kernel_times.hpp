/// @file  KernelTimes: how long every kernel took, by name, pass, rank and step.
#pragma once
#include <mega/scan/trace.hpp>
#include <mega/scan/verdicts/job_layout.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::verdicts {

/// Kernels of one name in one pass on one rank in one step, in order of time.
struct KernelCell {
  TableIndex rank = 0, step = 0;
  std::size_t first = 0, count = 0;  ///< into the columns of KernelTimes
  double middle = 0;                 ///< median of the logarithms of the durations
  double total = 0;                  ///< ns
  std::size_t alone = 0;             ///< of the count, those that ran beside none of NCCL's
  double alone_middle = 0;           ///< as middle, of these
  double alone_least = 0;            ///< of their logarithms, see undisturbed()
  double alone_total = 0;            ///< ns
};

/// Kernels of one name in one pass, everywhere. A layer's operation has one name in the forward and
/// in the backward pass, and other work.
struct Kernel {
  TableIndex name = none;
  EventKind pass = EventKind::compute;
  std::size_t first = 0, count = 0;  ///< into KernelTimes::cells
  double least = 0;                  ///< lower median over the ranks of the cells' alone_least
  double middle = 0;                 ///< the same of their alone_middle
  double total = 0;                  ///< ns
  double variation = 0;              ///< relative, that its load makes: see common_load.hpp
};

struct KernelTimes {
  std::vector<float> logs;  ///< of durations in ns
  std::vector<Nanoseconds> begins;
  std::vector<std::int32_t> microbatches;  ///< -1 where the file does not say
  std::vector<char> alone;                 ///< ran beside none of NCCL's
  std::vector<KernelCell> cells;           ///< by kernel, rank, step
  std::vector<Kernel> kernels;
};

/// How the spans of device work nest, by event.
struct Nesting {
  std::vector<char> holds;      ///< others of its lane: its time is theirs, and of waits among them
  std::vector<EventKind> pass;  ///< its kind, or where that is `compute` the kind of what holds it
};

[[nodiscard]] inline Nesting find_nesting(const Trace& trace) {
  struct Span {
    TableIndex lane, event;
    Nanoseconds begin, end;
  };
  std::vector<Span> spans;
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    if (is_device_work(e)) spans.push_back({e.lane, static_cast<TableIndex>(i), e.begin, e.end});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::tie(a.lane, a.begin, b.end, a.event) < std::tie(b.lane, b.begin, a.end, b.event);
  });
  Nesting out{std::vector<char>(trace.events.size(), 0),
              std::vector<EventKind>(trace.events.size(), EventKind::other)};
  std::vector<const Span*> open;
  for (const Span& span : spans) {
    const auto inside = [&](const Span& outer) {
      return outer.lane == span.lane && span.begin < outer.end && span.end <= outer.end;
    };
    while (!open.empty() && !inside(*open.back())) open.pop_back();
    EventKind& pass = out.pass[span.event];
    pass = trace.events[span.event].kind;
    if (!open.empty()) {
      out.holds[open.back()->event] = 1;
      if (pass == EventKind::compute) pass = out.pass[open.back()->event];
    }
    open.push_back(&span);
  }
  return out;
}

/// When NCCL's kernels run on each rank: they take multiprocessors from what runs beside them, the
/// longer the later the other ranks come, so that a kernel beside one says nothing of its GPU.
class NcclSpans {
 public:
  explicit NcclSpans(const Trace& trace) : spans_(trace.ranks.size()) {
    for (std::size_t i = 0; i < trace.events.size(); ++i) {
      const Event& e = trace.events[i];
      if (e.kind == EventKind::communication && e.duration() > 0 &&
          trace.name(e).starts_with("nccl"))
        spans_[trace.rank_index(e)].push_back({e.begin, e.end});
    }
    for (std::vector<Span>& rank : spans_) {
      std::sort(rank.begin(), rank.end());
      std::size_t kept = 0;  // those that overlap become one
      for (const Span& span : rank) {
        if (kept > 0 && span.first <= rank[kept - 1].second) {
          rank[kept - 1].second = std::max(rank[kept - 1].second, span.second);
        } else {
          rank[kept++] = span;
        }
      }
      rank.resize(kept);
    }
  }
  [[nodiscard]] bool beside(TableIndex rank, const Event& e) const {
    const std::vector<Span>& all = spans_[rank];
    const auto after = std::partition_point(all.begin(), all.end(),
                                            [&](const Span& s) { return s.first < e.end; });
    return after != all.begin() && std::prev(after)->second > e.begin;
  }

 private:
  using Span = std::pair<Nanoseconds, Nanoseconds>;
  std::vector<std::vector<Span>> spans_;  // by rank; disjoint, ascending
};

/// Lower median over the ranks of a figure's lower median over the steps; 0 where none has it.
[[nodiscard]] inline double usual_of(const KernelTimes& times, const Kernel& k,
                                     double KernelCell::*figure) {
  std::vector<double> of_rank, of_all;
  for (std::size_t c = k.first; c < k.first + k.count;) {
    const TableIndex rank = times.cells[c].rank;
    of_rank.clear();
    for (; c < k.first + k.count && times.cells[c].rank == rank; ++c) {
      if (times.cells[c].alone > 0) of_rank.push_back(times.cells[c].*figure);
    }
    if (!of_rank.empty()) of_all.push_back(lower_median(of_rank));
  }
  return of_all.empty() ? 0 : lower_median(of_all);
}

/// Cost: a sort of the kernels.
[[nodiscard]] inline KernelTimes tabulate_kernels(const Trace& trace, const JobLayout& job) {
  const Nesting nesting = find_nesting(trace);
  const NcclSpans nccl(trace);
  struct Item {
    std::uint64_t key;  // kernel, rank, step
    Nanoseconds begin;
    float log;
    std::int32_t microbatch;
    bool alone;
  };
  constexpr unsigned rank_bits = 18, step_bits = 18;
  std::vector<Item> items;
  for (std::size_t i = 0; i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    if (!is_compute(e.kind) || e.duration() <= 0 || e.name == none || nesting.holds[i] != 0)
      continue;
    const std::size_t step = job.step_index(e.step);
    if (step == JobLayout::no_step) continue;
    const std::uint64_t kernel = std::uint64_t{e.name} << 4U | std::uint64_t(nesting.pass[i]);
    const std::uint64_t rank = trace.rank_index(e);
    items.push_back({(kernel << rank_bits | rank) << step_bits | step, e.begin,
                     static_cast<float>(std::log(double(e.duration()))), e.microbatch,
                     !nccl.beside(trace.rank_index(e), e)});
  }
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::tie(a.key, a.begin) < std::tie(b.key, b.begin);
  });
  KernelTimes out;
  std::vector<float> scratch, alone;
  std::uint64_t last_kernel = ~std::uint64_t{0};
  for (std::size_t i = 0; i < items.size();) {
    const std::uint64_t key = items[i].key, kernel = key >> (rank_bits + step_bits);
    KernelCell cell;
    cell.rank = static_cast<TableIndex>(key >> step_bits & ((1U << rank_bits) - 1));
    cell.step = static_cast<TableIndex>(key & ((1U << step_bits) - 1));
    cell.first = out.logs.size();
    scratch.clear();
    alone.clear();
    for (; i < items.size() && items[i].key == key; ++i) {
      out.logs.push_back(items[i].log);
      out.begins.push_back(items[i].begin);
      out.microbatches.push_back(items[i].microbatch);
      out.alone.push_back(items[i].alone ? 1 : 0);
      scratch.push_back(items[i].log);
      const double duration = std::exp(static_cast<double>(items[i].log));
      cell.total += duration;
      if (!items[i].alone) continue;
      alone.push_back(items[i].log);
      cell.alone_total += duration;
    }
    cell.count = scratch.size();
    cell.middle = static_cast<double>(lower_median(scratch));
    cell.alone = alone.size();
    if (!alone.empty()) {
      cell.alone_least = static_cast<double>(undisturbed(alone));
      cell.alone_middle = static_cast<double>(lower_median(alone));
    }
    if (kernel != last_kernel) {
      Kernel made;
      made.name = static_cast<TableIndex>(kernel >> 4U);
      made.pass = static_cast<EventKind>(kernel & 0xFU);
      made.first = out.cells.size();
      out.kernels.push_back(made);
      last_kernel = kernel;
    }
    ++out.kernels.back().count;
    out.kernels.back().total += cell.total;
    out.cells.push_back(cell);
  }
  for (Kernel& k : out.kernels) {
    k.least = usual_of(out, k, &KernelCell::alone_least);
    k.middle = usual_of(out, k, &KernelCell::alone_middle);
  }
  return out;
}

}  // namespace mega::inline v0::scan::verdicts
