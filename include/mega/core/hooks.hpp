/// @file  The hooks through which tracing, inspection and fault injection enter: three concepts,
/// three empty models. A module that is off adds no instruction and no byte.
#pragma once
#include <mega/core/view.hpp>

#include <concepts>
#include <cstdint>
#include <string_view>
#include <utility>

namespace mega::inline v0 {

/// What a recorded span was: enough to match it across ranks.
struct SpanInfo {
  std::string_view name;  ///< literal or otherwise outliving the recorder
  std::int32_t chunk = -1;
  std::int32_t microbatch = -1;
  std::int64_t bytes = 0;
  std::int32_t peer = -1;  ///< global rank, -1: none
};

/// Records spans of device time. begin() and end() are ordered on the stream and never throw.
template <class R, class S>
concept event_recorder = requires(R& r, S& s, const SpanInfo& info) {
  { r.begin(s, info) }
  noexcept;
  { r.end(s, r.begin(s, info)) }
  noexcept;
};

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
class [[nodiscard]] ScopedSpan {
 public:
  ScopedSpan(R& recorder, S& stream, const SpanInfo& info) noexcept
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
