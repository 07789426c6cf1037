/// @file  Own time: spans of a lane may hold each other; here each time is counted once.
#pragma once
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::detail {

/// An operation, or a part of one.
struct Part {
  TableIndex event = none;
  Nanoseconds begin = 0, end = 0;
};

/// A computation that holds computations of its lane, as a layer its products, is left out: they
/// stand for it. One that holds only other things, as communications, is what they leave of it, in
/// parts. All else is whole.
class OwnTime {
 public:
  /// @param spans  whole events, in any order
  [[nodiscard]] static std::vector<Part> of(const Trace& trace, std::vector<Part> spans) {
    return OwnTime(trace).run(std::move(spans));
  }

 private:
  /// A computation around what is at hand.
  struct Outer {
    Part rest;                ///< of it, behind what it has held so far
    std::vector<Part> parts;  ///< before and between that
    bool holds_computation = false;
  };

  explicit OwnTime(const Trace& trace) : t_(trace) {}

  std::vector<Part> run(std::vector<Part> spans) {
    std::sort(spans.begin(), spans.end(), [&](const Part& a, const Part& b) {
      return std::tuple(lane(a), a.begin, b.end, a.event) <
             std::tuple(lane(b), b.begin, a.end, b.event);
    });
    out_.reserve(spans.size());
    for (const Part& span : spans) {
      while (!open_.empty() &&
             (lane(open_.back().rest) != lane(span) || open_.back().rest.end <= span.begin))
        close();
      const bool computes = is_compute(t_.events[span.event].kind);
      if (!open_.empty() && span.end <= open_.back().rest.end) hold(open_.back(), span, computes);
      if (computes) {
        open_.push_back({span, {}, false});
      } else {
        out_.push_back(span);
      }
    }
    while (!open_.empty()) close();
    return std::move(out_);
  }

  static void hold(Outer& outer, const Part& inner, bool computes) {
    outer.holds_computation = outer.holds_computation || computes;
    if (inner.end == inner.begin) return;
    if (inner.begin > outer.rest.begin)
      outer.parts.push_back({outer.rest.event, outer.rest.begin, inner.begin});
    outer.rest.begin = std::max(outer.rest.begin, inner.end);
  }
  void close() {
    const Outer& outer = open_.back();
    if (!outer.holds_computation) {
      out_.insert(out_.end(), outer.parts.begin(), outer.parts.end());
      // What lasts no time is kept whole.
      if (outer.rest.end > outer.rest.begin || outer.parts.empty()) out_.push_back(outer.rest);
    }
    open_.pop_back();
  }
  [[nodiscard]] TableIndex lane(const Part& part) const { return t_.events[part.event].lane; }

  const Trace& t_;
  std::vector<Outer> open_;
  std::vector<Part> out_;
};

}  // namespace mega::inline v0::scan::detail
