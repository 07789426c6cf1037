/// @file  The hooks through which tracing, inspection and fault injection enter: three concepts,
/// three empty models. A module that is off adds no instruction and no byte.
#pragma once
#include <mega/core/view.hpp>

#include <concepts>
#include <cstdint>
#include <string_view>
#include <utility>

namespace mega::inline v0 {

/// What kind of work a span is.
enum class SpanKind : std::uint8_t {
  other,
  iteration,  ///< one training step of a rank
  forward,
  backward,  ///< whole backward, or its input half
  weight,    ///< weight-gradient half of a backward
  loss,
  optimizer,
  compute,        ///< operation that is none of the above
  communication,  ///< named as the operation: all_reduce, send, recv, ...
  wait,           ///< the stream waits for others; not work
};

/// What a recorded span was: enough to match it across ranks. What is left out, a span has from the
/// span around it (chunk, micro-batch) or not at all.
struct SpanInfo {
  std::string_view name;  ///< literal or otherwise outliving the recorder
  std::int32_t chunk = -1;
  std::int32_t microbatch = -1;
  std::int64_t bytes = 0;  ///< payload of this rank
  std::int32_t peer = -1;  ///< global rank, -1: none
  SpanKind kind = SpanKind::compute;
  std::int32_t group = -1;      ///< the recorder's number of a communicator, -1: none
  std::int64_t sequence = -1;   ///< position in the series of the group, -1: none
  std::string_view dtype = {};  ///< as name; empty: none
};

/// Records spans of device time. begin() and end() are ordered on the stream and never throw.
template <class R, class S>
concept event_recorder = requires(R& r, S& s, const SpanInfo& info) {
  { r.begin(s, info) }
  noexcept;
  { r.end(s, r.begin(s, info)) }
  noexcept;
};

/// The step that lies between steps.
inline constexpr std::int64_t no_step = -1;

/// Tells a recorder that wants to know that a step of this rank begins, before its first span, or
/// with no_step that what is queued from here on belongs to none.
template <class R>
constexpr void begin_step(R& recorder, std::int64_t step) noexcept {
  if constexpr (requires { recorder.begin_step(step); }) recorder.begin_step(step);
}

/// Labels a stream where the recorder wants to know. @param label  literal
template <class R, class S>
constexpr void name_stream(R& recorder, const S& stream, const char* label) noexcept {
  if constexpr (requires { recorder.name_stream(stream, label); })
    recorder.name_stream(stream, label);
}

/// Receives named tensors as they are produced. Must not change them.
template <class P, class S>
concept stat_sink = requires(P& p, S& s, std::string_view name, Matrix<const float> values) {
  { p.observe(s, name, values) }
  noexcept;
};

/// May change named tensors on purpose.
template <class F, class S>
concept fault_injector = requires(F& f, S& s, std::string_view name, Matrix<float> values) {
  { f.disturb(s, name, values) }
  noexcept;
};

struct NullRecorder {
  struct Token {};
  template <class S>
  static constexpr Token begin(S&, const SpanInfo&) noexcept {
    return {};
  }
  template <class S>
  static constexpr void end(S&, Token) noexcept {}
};

struct NullProbe {
  template <class S, class T>
  static constexpr void observe(S&, std::string_view, Matrix<T>) noexcept {}
};

struct NullInjector {
  template <class S, class T>
  static constexpr void disturb(S&, std::string_view, Matrix<T>) noexcept {}
};

/// Records one span from construction to the end of the scope.
template <class R, class S>
class ScopedSpan {
 public:
  [[nodiscard]] ScopedSpan(R& recorder, S& stream, const SpanInfo& info) noexcept
      : recorder_(recorder), stream_(stream), token_(recorder.begin(stream, info)) {}
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;
  ~ScopedSpan() { recorder_.end(stream_, token_); }

 private:
  R& recorder_;
  S& stream_;
  decltype(std::declval<R&>().begin(std::declval<S&>(), SpanInfo{})) token_;
};

}  // namespace mega::inline v0
