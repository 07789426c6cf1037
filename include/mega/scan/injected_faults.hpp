/// @file  Faults on purpose: a recorder that makes ranks or links slow by really waiting, for
/// demonstrations and for tests of whatever is to find them.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/hooks.hpp>
#include <mega/scan/recorder.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

struct InjectedFault {
  enum class Kind : std::uint8_t {
    slow_rank,  ///< computing takes `factor` times as long
    slow_link,  ///< what moves between two ranks takes `factor` times as long as on `usual_link`
    late_host,  ///< a step is queued `ms` late
  };
  Kind kind = Kind::slow_rank;
  int rank = 0;
  int peer = -1;  ///< the other end of a link
  double factor = 1;
  double ms = 0;
  std::int64_t from_step = 0;
};

/// What a slow link is compared with.
struct UsualLink {
  double latency_ns = 20'000;
  double bytes_per_ns = 2;
};
inline constexpr UsualLink usual_link{};

/// "slow-rank=3,factor=1.5", "slow-link=2-3,factor=4" or "late-host=1,ms=5", each with
/// ",from-step=N" if wanted; several are separated by semicolons.
/// @throws  Error(usage) with the wrong text and what is valid
[[nodiscard]] inline std::vector<InjectedFault> parse_faults(std::string_view text, int world) {
  // What is waited stays far below the range of a clock, and below what anybody waits for.
  constexpr double most_factor = 1000, most_ms = 60'000, most_step = 1e15;
  const auto wrong = [&](std::string_view part, std::string_view why) {
    return Error(ErrorCode::usage,
                 sentence("the fault '", part, "' ", why,
                          "; valid are slow-rank=R,factor=F, slow-link=R-R,factor=F and "
                          "late-host=R,ms=T, each with ,from-step=N if wanted, for ranks 0 to ",
                          world - 1));
  };
  const auto number = [&](std::string_view part, std::string_view value) {
    double out = 0;
    const auto [end, failed] = std::from_chars(value.data(), value.data() + value.size(), out);
    if (failed != std::errc() || end != value.data() + value.size() || !std::isfinite(out))
      throw wrong(part, sentence("has '", value, "' where a number belongs"));
    return out;
  };
  const auto rank = [&](std::string_view part, std::string_view value) {
    const double out = number(part, value);
    if (out != std::floor(out) || out < 0 || out >= world)
      throw wrong(part, sentence("names rank ", value));
    return static_cast<int>(out);
  };
  const auto cut = [](std::string_view& rest, char at) {
    const std::size_t end = std::min(rest.find(at), rest.size());
    const std::string_view piece = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    return piece;
  };
  std::vector<InjectedFault> out;
  while (!text.empty()) {
    const std::string_view part = cut(text, ';');
    InjectedFault fault;
    bool sized = false, begins = false;
    const auto once = [&](std::string_view key, bool& given) {
      if (std::exchange(given, true)) throw wrong(part, sentence("says ", key, " twice"));
    };
    std::string_view rest = part;
    for (bool first = true; !rest.empty(); first = false) {
      std::string_view value = cut(rest, ',');
      const std::string_view key = cut(value, '=');
      if (first && key == "slow-rank") {
        fault.rank = rank(part, value);
      } else if (first && key == "slow-link") {
        fault.kind = InjectedFault::Kind::slow_link;
        fault.rank = rank(part, cut(value, '-'));
        fault.peer = rank(part, value);
        if (fault.peer == fault.rank) throw wrong(part, "names one rank twice");
      } else if (first && key == "late-host") {
        fault.kind = InjectedFault::Kind::late_host;
        fault.rank = rank(part, value);
      } else if (!first && key == "factor" && fault.kind != InjectedFault::Kind::late_host) {
        once(key, sized);
        fault.factor = number(part, value);
        if (fault.factor < 1 || fault.factor > most_factor)
          throw wrong(part, sentence("has a factor outside 1 to ", most_factor));
      } else if (!first && key == "ms" && fault.kind == InjectedFault::Kind::late_host) {
        once(key, sized);
        fault.ms = number(part, value);
        if (fault.ms < 0 || fault.ms > most_ms)
          throw wrong(part, sentence("has milliseconds outside 0 to ", most_ms));
      } else if (!first && key == "from-step") {
        once(key, begins);
        const double step = number(part, value);
        if (step != std::floor(step) || step < 0 || step > most_step)
          throw wrong(part, sentence("begins at step ", value));
        fault.from_step = static_cast<std::int64_t>(step);
      } else {
        throw wrong(part, sentence("has '", key, "' in a place where it means nothing"));
      }
    }
    if (!sized) throw wrong(part, "does not say how slow");
    out.push_back(fault);
  }
  return out;
}

namespace detail {

/// On the host by its own queue; a device stream brings an overload beside its type.
template <class S, class F>
void call_in_order(S& stream, F work) requires requires {
  stream.run(work);
}
{ stream.run(std::move(work)); }

/// Lets the time of faults pass, of each span and step by itself: what took too long, because the
/// thread lost its processor, is not taken from what comes next, which would hide the fault there.
class Delay {
 public:
  Delay() = default;
  /// @param cut_short  or null; once true, what is left of any time need not pass
  explicit Delay(const std::atomic<bool>* cut_short) : cut_short_(cut_short) {}

  /// With the processor at work.
  void busy(double ns) const noexcept {
    if (ns > 0) work_until(steady_now() + whole(ns));
  }
  /// Asleep, but for the end, since sleeps end late.
  void asleep(double ns) const noexcept {
    constexpr Nanoseconds inexact = 200'000, longest = 50'000'000;
    if (!(ns > 0)) return;
    const Nanoseconds end = steady_now() + whole(ns);
    for (Nanoseconds left = whole(ns); left > inexact && !is_cut_short(); left = end - steady_now())
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(left - inexact, longest)));
    work_until(end);
  }

 private:
  static Nanoseconds whole(double ns) noexcept { return static_cast<Nanoseconds>(ns); }
  [[nodiscard]] bool is_cut_short() const noexcept {
    return cut_short_ != nullptr && cut_short_->load(std::memory_order_relaxed);
  }
  void work_until(Nanoseconds end) const noexcept {
    while (steady_now() < end && !is_cut_short()) {
    }
  }

  const std::atomic<bool>* cut_short_ = nullptr;
};

/// What one stream's thread knows of its open spans.
struct FaultyLane {
  struct Open {
    Nanoseconds begin = 0;
    double inner_ns = 0;  // what spans inside took
  };
  const void* stream = nullptr;
  std::array<Open, 32> open;
  std::size_t depth = 0;
};

}  // namespace detail

/// Models event_recorder on the streams that Recorder records, and passes all on to it. The waits
/// are inside the spans, as slow hardware's would be: a slow rank's in the spans that compute, a
/// slow link's in those of its communication; a collective is as slow as its slowest link, for all
/// its members. Without faults it costs a branch a span. Copies share their state, as recorders do.
///
/// On a host stream a slow rank waits in a loop. That is what a slow processor does: it is busy for
/// longer, and where ranks share processors, there is less left for the others. Asleep, the rank
/// would hand its processor on, its peers would run the faster for its slowness, and the scheduler,
/// which prefers who has slept, would give it back in the middle of their spans. The factor is of
/// the time by the clock, waits for a processor included, as work that takes longer is interrupted
/// more often. Links and late hosts wait asleep, and so does the rank of a slow device: none of
/// them keeps a processor at work.
///
/// Not to be captured into graphs: a replay would wait for as long as the first run did.
template <class Recorder>
class FaultyRecorder {
 public:
  template <class T>
  struct Token {
    T inner;
    detail::FaultyLane* lane = nullptr;
    double slow_down = 0;  ///< more than the span's own time, of which it is a part
    double link_ns = 0;
  };

  FaultyRecorder() = default;
  /// @param rank       this rank
  /// @param cut_short  or null; once true, waits end at once and no more begin, so that a run which
  ///                   is asked to stop can. Outlives all copies
  FaultyRecorder(Recorder recorder, int rank, const std::vector<InjectedFault>& faults,
                 const std::atomic<bool>* cut_short = nullptr)
      : recorder_(std::move(recorder)) {
    for (const InjectedFault& fault : faults) {
      const bool here = fault.rank == rank || fault.kind == InjectedFault::Kind::slow_link;
      if (!here) continue;
      if (!state_) state_ = std::make_shared<State>();
      state_->rank = rank;
      state_->delay = detail::Delay(cut_short);
      state_->faults.push_back(fault);
    }
  }

  [[nodiscard]] Recorder& recorder() noexcept { return recorder_; }
  [[nodiscard]] bool records() const noexcept { return state_ != nullptr || recorder_.records(); }

  void begin_step(std::int64_t step) noexcept {
    if (state_) {
      state_->step = step;
      for (const InjectedFault& f : state_->faults)
        if (f.kind == InjectedFault::Kind::late_host && step >= f.from_step)
          state_->delay.asleep(f.ms * 1e6);
    }
    mega::begin_step(recorder_, step);
  }

  template <class S>
  [[nodiscard]] auto begin(S& stream,
                           const SpanInfo& info) noexcept requires event_recorder<Recorder, S> {
    Token<decltype(recorder_.begin(stream, info))> token{recorder_.begin(stream, info)};
    if (state_) {
      token.lane = lane_of(&stream);
      token.slow_down = computes(info.kind) ? slow_down() : 0;
      token.link_ns = info.kind == SpanKind::communication ? link_ns(info) : 0;
      using detail::call_in_order;
      call_in_order(stream, [lane = token.lane]() noexcept {
        if (lane->depth < lane->open.size()) lane->open[lane->depth] = {steady_now(), 0};
        ++lane->depth;
      });
    }
    return token;
  }

  template <class S, class T>
  void end(S& stream, const Token<T>& token) noexcept requires event_recorder<Recorder, S> {
    if (token.lane != nullptr) {
      using detail::call_in_order;
      constexpr bool on_host = requires {
        stream.run(detail::NoWork{});
      };
      call_in_order(stream, [lane = token.lane, delay = state_->delay, factor = token.slow_down,
                             link = token.link_ns]() noexcept {
        if (--lane->depth >= lane->open.size()) return;
        const auto& span = lane->open[lane->depth];
        const auto spent = static_cast<double>(steady_now() - span.begin);
        const double more = std::max(0.0, spent - span.inner_ns) * factor;
        on_host ? delay.busy(more) : delay.asleep(more);
        delay.asleep(link);
        if (lane->depth > 0)
          lane->open[lane->depth - 1].inner_ns += static_cast<double>(steady_now() - span.begin);
      });
    }
    recorder_.end(stream, token.inner);
  }

  template <class S>
  void name_stream(const S& stream, const char* label) noexcept {
    mega::name_stream(recorder_, stream, label);
  }
  std::int32_t add_group(std::string name, std::vector<int> ranks) {
    return recorder_.add_group(std::move(name), std::move(ranks));
  }

 private:
  struct State {
    int rank = 0;
    std::vector<InjectedFault> faults;
    std::int64_t step = 0;
    detail::Delay delay;
    std::vector<std::unique_ptr<detail::FaultyLane>> lanes;
  };

  [[nodiscard]] static constexpr bool computes(SpanKind kind) noexcept {
    return kind == SpanKind::forward || kind == SpanKind::backward || kind == SpanKind::weight ||
           kind == SpanKind::loss || kind == SpanKind::optimizer || kind == SpanKind::compute;
  }
  [[nodiscard]] double slow_down() const noexcept {
    double factor = 1;
    for (const InjectedFault& f : state_->faults)
      if (f.kind == InjectedFault::Kind::slow_rank && state_->step >= f.from_step)
        factor *= f.factor;
    return factor - 1;
  }
  /// What the slow links add to an operation that crosses them.
  [[nodiscard]] double link_ns(const SpanInfo& info) const {
    double worst = 0;
    for (const InjectedFault& f : state_->faults) {
      if (f.kind != InjectedFault::Kind::slow_link || state_->step < f.from_step) continue;
      if (!crosses(info, f)) continue;
      const double usual =
          usual_link.latency_ns + static_cast<double>(info.bytes) / usual_link.bytes_per_ns;
      worst = std::max(worst, usual * (f.factor - 1));
    }
    return worst;
  }
  [[nodiscard]] bool crosses(const SpanInfo& info, const InjectedFault& f) const {
    // A message is slow where it leaves: its receiver waits for it anyway.
    if (info.name == "recv") return false;
    if (info.name == "send")
      return (state_->rank == f.rank && info.peer == f.peer) ||
             (state_->rank == f.peer && info.peer == f.rank);
    const std::vector<int> ranks = recorder_.group_ranks(info.group);
    const auto holds = [&](int rank) {
      return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    };
    return holds(f.rank) && holds(f.peer);
  }

  [[nodiscard]] detail::FaultyLane* lane_of(const void* stream) {
    for (const auto& lane : state_->lanes)
      if (lane->stream == stream) return lane.get();
    state_->lanes.push_back(std::make_unique<detail::FaultyLane>());
    state_->lanes.back()->stream = stream;
    return state_->lanes.back().get();
  }

  Recorder recorder_;
  std::shared_ptr<State> state_;
};

}  // namespace mega::inline v0::scan
