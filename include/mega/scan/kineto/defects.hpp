/// @file  Defects that only a whole file shows: flows without an end, and spans of a lane that
/// overlap. They are counted; nothing is changed.
#pragma once
#include <mega/scan/kineto/hash.hpp>
#include <mega/scan/kineto/record.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace mega::inline v0::scan::kineto {

/// A list of words that grows in place, where the system can move pages: a vector would hold both
/// its old and its new room while it grows, and twice what it needs in between.
class WordList {
 public:
  void push_back(std::uint64_t word) {
    if (size_ == capacity_) {
      capacity_ += std::max<std::size_t>(1024, capacity_ / 2);
      void* const moved = std::realloc(words_.get(), capacity_ * sizeof word);
      if (moved == nullptr) throw std::bad_alloc();
      (void)words_.release();
      words_.reset(static_cast<std::uint64_t*>(moved));
    }
    words_.get()[size_++] = word;
  }
  [[nodiscard]] std::uint64_t* begin() noexcept { return words_.get(); }
  [[nodiscard]] std::uint64_t* end() noexcept { return words_.get() + size_; }
  void clear() noexcept {
    words_.reset();
    size_ = capacity_ = 0;
  }

 private:
  struct Free {
    void operator()(std::uint64_t* words) const noexcept { std::free(words); }
  };
  std::unique_ptr<std::uint64_t, Free> words_;
  std::size_t size_ = 0, capacity_ = 0;
};

/// Arrows from a call to what it started. Correlations say more, so that only their ends are kept,
/// as 8 bytes each.
class Flows {
 public:
  void add(const Record& r) {
    if (r.phase == 't' || !r.has_id) return;
    const std::uint64_t key = (r.id ^ r.category_hash * odd_multiplier) << 1U;
    ends_.push_back(key | (r.phase == 'f' ? 1U : 0U));
  }

  /// How many ends belong to no whole flow. Forgets them all.
  [[nodiscard]] std::int64_t count_dangling() {
    std::int64_t dangling = 0;
    std::sort(ends_.begin(), ends_.end());
    for (auto at = ends_.begin(); at != ends_.end();) {
      const auto next =
          std::find_if(at, ends_.end(), [&](std::uint64_t key) { return key >> 1U != *at >> 1U; });
      const bool both = (*at & 1U) == 0 && (*(next - 1) & 1U) == 1;
      if (!both) dangling += next - at;
      at = next;
    }
    ends_.clear();
    return dangling;
  }

 private:
  WordList ends_;
};

/// Outer spans before inner ones. Recorders write a lane nearly in order, so that moving the few
/// strays is cheaper than sorting; strays that would have to move too far are sorted.
inline void sort_by_begin(const Trace& t, std::vector<TableIndex>::iterator from,
                          std::vector<TableIndex>::iterator to) {
  const auto before = [&](TableIndex a, TableIndex b) {
    const Event& x = t.events[a];
    const Event& y = t.events[b];
    return x.begin != y.begin ? x.begin < y.begin : x.end > y.end;
  };
  if (from == to) return;
  std::ptrdiff_t budget = 64 * (to - from);
  for (auto at = from + 1; at != to; ++at) {
    if (!before(*at, *(at - 1))) continue;
    const auto place = std::upper_bound(from, at, *at, before);
    budget -= at - place;
    if (budget < 0) return std::sort(from, to, before);
    std::rotate(place, at, at + 1);
  }
}

/// Spans of a lane must nest or be apart. Memory: 4 bytes for an event.
/// @param first_event, first_lane  of this file, to which all behind them belong
[[nodiscard]] inline std::int64_t count_overlaps(const Trace& t, std::size_t first_event,
                                                 std::size_t first_lane) {
  const std::size_t lanes = t.lanes.size() - first_lane;
  std::vector<std::uint32_t> counts(lanes + 1, 0);
  for (std::size_t i = first_event; i < t.events.size(); ++i)
    ++counts[t.events[i].lane - first_lane + 1];
  for (std::size_t l = 1; l < counts.size(); ++l) counts[l] += counts[l - 1];
  std::vector<TableIndex> order(t.events.size() - first_event);
  std::vector<std::uint32_t> next(counts.begin(), counts.end() - 1);
  for (std::size_t i = first_event; i < t.events.size(); ++i)
    order[next[t.events[i].lane - first_lane]++] = static_cast<TableIndex>(i);
  std::int64_t overlaps = 0;
  std::vector<Nanoseconds> enclosing;
  for (std::size_t l = 0; l < lanes; ++l) {
    const auto from = order.begin() + counts[l];
    const auto to = order.begin() + counts[l + 1];
    sort_by_begin(t, from, to);
    enclosing.clear();
    for (auto at = from; at != to; ++at) {
      const Event& e = t.events[*at];
      while (!enclosing.empty() && enclosing.back() <= e.begin) enclosing.pop_back();
      if (!enclosing.empty() && e.end > enclosing.back()) ++overlaps;
      enclosing.push_back(e.end);
    }
  }
  return overlaps;
}

}  // namespace mega::inline v0::scan::kineto
