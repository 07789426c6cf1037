/// @file  Timeline as a trace in Chrome's JSON format, which Perfetto opens. Included by name.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/timeline.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

namespace detail {

class TraceWriter {
 public:
  TraceWriter(const Timeline& timeline, double unit_ns) : timeline_(timeline), unit_ns_(unit_ns) {}

  std::string write() {
    const int p = static_cast<int>(timeline_.ranks.size());
    name_process(0, "ranks");
    for (int rank = 0; rank < p; ++rank) name_thread(0, rank, sentence("rank ", rank));
    for (int rank = 0; rank < p; ++rank) {
      for (const TimedAction& a : timeline_.ranks[static_cast<std::size_t>(rank)]) {
        slice(0, rank, "compute", to_string(a.action.kind), a.action, a.start, a.end);
      }
    }
    if (!timeline_.transfers.empty()) links();
    return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n" + events_ + "\n]}\n";
  }

 private:
  /// Integer nanoseconds, so that neither sums nor neighbours suffer from rounding.
  [[nodiscard]] std::int64_t nanoseconds(double time) const {
    const double ns = time * unit_ns_;
    expects(std::abs(ns) < 9e18, ErrorCode::usage, [&] {
      return sentence("time ", time,
                      " of the timeline is no number of nanoseconds that a trace "
                      "can hold");
    });
    return std::llround(ns);
  }
  /// The format counts in microseconds.
  static std::string microseconds(std::int64_t ns) {
    std::array<char, 40> digits{};
    std::snprintf(digits.data(), digits.size(), "%s%lld.%03lld", ns < 0 ? "-" : "",
                  static_cast<long long>(std::abs(ns) / 1000),
                  static_cast<long long>(std::abs(ns) % 1000));
    return digits.data();
  }

  void event(std::string_view text) {
    if (!events_.empty()) events_ += ",\n";
    events_ += text;
  }
  static std::string place(int pid, int tid) { return sentence("\"pid\":", pid, ",\"tid\":", tid); }

  void name_process(int pid, std::string_view name) {
    event(sentence("{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":", pid,
                   ",\"args\":{\"name\":\"", name, "\"}}"));
  }
  void name_thread(int pid, int tid, std::string_view name) {
    event(sentence("{\"ph\":\"M\",\"name\":\"thread_name\",", place(pid, tid),
                   ",\"args\":{\"name\":\"", name, "\"}}"));
    event(sentence("{\"ph\":\"M\",\"name\":\"thread_sort_index\",", place(pid, tid),
                   ",\"args\":{\"sort_index\":", tid, "}}"));
  }

  void slice(int pid, int tid, std::string_view category, std::string_view what, const Action& a,
             double start, double end) {
    const std::int64_t begin = nanoseconds(start);
    event(sentence("{\"ph\":\"X\",\"cat\":\"", category, "\",\"name\":\"", what, " ", a.microbatch,
                   "\",", place(pid, tid), ",\"ts\":", microseconds(begin),
                   ",\"dur\":", microseconds(nanoseconds(end) - begin),
                   ",\"args\":{\"chunk\":", a.chunk, ",\"microbatch\":", a.microbatch, "}}"));
  }

  /// Slices of one track must not overlap, but messages under way do: a link gets as many lanes as
  /// it ever has messages under way at once.
  void links() {
    name_process(1, "links");
    std::map<std::pair<int, int>, std::vector<std::pair<double, int>>> lanes;  // free at, place
    std::vector<std::size_t> lane_of;
    for (const Transfer& t : timeline_.transfers) {
      auto& of_link = lanes[{t.from, t.to}];
      const auto free = std::find_if(of_link.begin(), of_link.end(),
                                     [&](const auto& lane) { return lane.first <= t.start; });
      lane_of.push_back(static_cast<std::size_t>(free - of_link.begin()));
      if (free == of_link.end()) {
        of_link.push_back({t.end, 0});
      } else {
        free->first = t.end;
      }
    }
    int tid = 0;
    for (auto& [link, of_link] : lanes) {
      for (std::size_t k = 0; k < of_link.size(); ++k) {
        const std::string more = k == 0 ? std::string() : sentence(" (", k + 1, ")");
        name_thread(1, tid, sentence("rank ", link.first, " to ", link.second, more));
        of_link[k].second = tid++;
      }
    }
    for (std::size_t i = 0; i < timeline_.transfers.size(); ++i) {
      const Transfer& t = timeline_.transfers[i];
      const int track = lanes[{t.from, t.to}][lane_of[i]].second;
      const bool is_gradient = t.sent.kind == ActionKind::send_backward;
      slice(1, track, "transfer", is_gradient ? "gradient" : "activation", t.sent, t.start, t.end);
      flow(i, t, track);
    }
  }

  /// Arrows from the action that made the message, through its transfer, to the one that uses it.
  void flow(std::size_t id, const Transfer& t, int track) {
    const TimedAction* const maker = find(t.from, t.sent);
    const TimedAction* const user = find(t.to, t.received);
    if (maker == nullptr || user == nullptr) return;
    // A step belongs to the slice around its time: the maker's last nanosecond is still its own.
    const std::int64_t made = std::max(nanoseconds(maker->start), nanoseconds(maker->end) - 1);
    step("s", id, place(0, t.from), made);
    step("t", id, place(1, track), nanoseconds(t.start));
    step("f", id, place(0, t.to), nanoseconds(user->start));
  }
  void step(std::string_view phase, std::size_t id, std::string_view at, std::int64_t ns) {
    event(sentence("{\"ph\":\"", phase, "\",\"bp\":\"e\",\"cat\":\"transfer\",\"name\":\"message\"",
                   ",\"id\":", id, ",", at, ",\"ts\":", microseconds(ns), "}"));
  }

  /// The compute action that a send or a receive belongs to.
  const TimedAction* find(int rank, const Action& transfer) {
    using Key = std::tuple<int, bool, int, int>;
    if (index_.empty()) {
      for (std::size_t r = 0; r < timeline_.ranks.size(); ++r) {
        for (const TimedAction& a : timeline_.ranks[r]) {
          if (a.action.kind == ActionKind::backward_weight) continue;
          index_.push_back({Key{static_cast<int>(r), gives_input_gradient(a.action.kind),
                                a.action.chunk, a.action.microbatch},
                            &a});
        }
      }
      std::sort(index_.begin(), index_.end(),
                [](const auto& a, const auto& b) { return a.first < b.first; });
    }
    const bool is_gradient =
        transfer.kind == ActionKind::send_backward || transfer.kind == ActionKind::recv_backward;
    const Key key{rank, is_gradient, transfer.chunk, transfer.microbatch};
    const auto at =
        std::lower_bound(index_.begin(), index_.end(), key,
                         [](const auto& entry, const Key& wanted) { return entry.first < wanted; });
    return at != index_.end() && at->first == key ? at->second : nullptr;
  }

  const Timeline& timeline_;
  double unit_ns_;
  std::string events_;
  std::vector<std::pair<std::tuple<int, bool, int, int>, const TimedAction*>> index_;
};

}  // namespace detail

/// The timeline as a JSON object: a track of compute slices for each rank, tracks of transfers for
/// each directed link, and arrows from the action that makes a message to the one that uses it.
/// @param nanoseconds_per_unit  of the timeline's times; the default reads them as milliseconds.
///        Times are rounded to whole nanoseconds.
/// Throws Error(usage) for a time that is not finite.   @cost  about 200 bytes an action and
/// 600 a transfer
[[nodiscard]] inline std::string to_trace_json(const Timeline& timeline,
                                               double nanoseconds_per_unit = 1e6) {
  return detail::TraceWriter(timeline, nanoseconds_per_unit).write();
}

}  // namespace mega::inline v0::dpp
