/// @file  device_evidence: what a rank's device said of itself beside what those of its peers said,
/// as a sentence for a verdict. A clock that is kept down is a cause of slow kernels; one that is
/// not, with equal temperature and power, sends the reader elsewhere.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

namespace detail {

[[nodiscard]] constexpr std::uint32_t bit(ClockLimit limit) noexcept {
  return static_cast<std::uint32_t>(limit);
}

/// Medians of a rank's samples, and the shares of them in which its clock was kept down.
struct DeviceSummary {
  struct Limit {
    std::uint32_t bits;
    std::string_view words;
  };
  static constexpr std::array<Limit, 5> limits{{
      {bit(ClockLimit::heat) | bit(ClockLimit::hardware_heat), "heat"},
      {bit(ClockLimit::power_cap) | bit(ClockLimit::power_brake), "the limit of its power"},
      {bit(ClockLimit::hardware_slowdown), "a slowdown that its hardware asked for"},
      {bit(ClockLimit::setting) | bit(ClockLimit::display_setting), "a setting"},
      {bit(ClockLimit::sync_boost), "the slowest GPU of its boost group"},
  }};

  std::optional<double> sm_mhz, temperature_c, busy_percent, power_w;
  std::array<double, limits.size()> limited{};

  [[nodiscard]] static std::optional<double> median(std::vector<double> values) {
    // One sample says little of a run.
    if (values.size() < 3) return {};
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  /// @param from  samples before it do not count
  [[nodiscard]] static DeviceSummary of(const Trace& trace, TableIndex rank, Nanoseconds from) {
    DeviceSummary out;
    std::vector<double> mhz, celsius, busy, watts;
    double samples = 0;
    for (const DeviceState& s : trace.device_states) {
      if (s.rank != rank || s.at < from) continue;
      ++samples;
      if (s.sm_mhz >= 0) mhz.push_back(s.sm_mhz);
      if (s.temperature_c >= 0) celsius.push_back(s.temperature_c);
      if (s.busy_percent >= 0) busy.push_back(s.busy_percent);
      if (s.power_mw >= 0) watts.push_back(s.power_mw / 1e3);
      for (std::size_t l = 0; l < limits.size(); ++l)
        out.limited[l] += (s.clock_limits & limits[l].bits) != 0 ? 1 : 0;
    }
    for (double& share : out.limited) share = samples > 0 ? share / samples : 0;
    out.sm_mhz = median(std::move(mhz));
    out.temperature_c = median(std::move(celsius));
    out.busy_percent = median(std::move(busy));
    out.power_w = median(std::move(watts));
    return out;
  }

  /// The middle one of several ranks, whatever each one's number of samples.
  [[nodiscard]] static DeviceSummary middle_of(const std::vector<DeviceSummary>& all) {
    const auto middle = [&](std::optional<double> DeviceSummary::*member) {
      std::vector<double> values;
      for (const DeviceSummary& s : all)
        if (s.*member) values.push_back(*(s.*member));
      std::sort(values.begin(), values.end());
      return values.empty() ? std::nullopt : std::optional(values[values.size() / 2]);
    };
    DeviceSummary out;
    out.sm_mhz = middle(&DeviceSummary::sm_mhz);
    out.temperature_c = middle(&DeviceSummary::temperature_c);
    out.busy_percent = middle(&DeviceSummary::busy_percent);
    out.power_w = middle(&DeviceSummary::power_w);
    for (std::size_t l = 0; l < limits.size(); ++l) {
      for (const DeviceSummary& s : all) out.limited[l] += s.limited[l];
      out.limited[l] /= static_cast<double>(std::max<std::size_t>(all.size(), 1));
    }
    return out;
  }
};

/// When the first event of each rank in a step from `step` on began, in the rank's own clock.
[[nodiscard]] inline std::vector<Nanoseconds> begins_of_step(const Trace& trace,
                                                             std::int32_t step) {
  constexpr Nanoseconds ever = std::numeric_limits<Nanoseconds>::min();
  constexpr Nanoseconds never = std::numeric_limits<Nanoseconds>::max();
  std::vector<Nanoseconds> out(trace.ranks.size(), step < 0 ? ever : never);
  for (std::size_t i = 0; step >= 0 && i < trace.events.size(); ++i) {
    const Event& e = trace.events[i];
    if (e.step < step) continue;
    Nanoseconds& begin = out[trace.rank_index(e)];
    begin = std::min(begin, e.begin);
  }
  return out;
}

}  // namespace detail

/// One sentence such as "its SM clock was 1200 MHz where its peers' was 1980 MHz, kept down by heat
/// in 92 % of the samples; its temperature was 88 C where its peers' was 61 C", or that it was as
/// its peers' devices. Empty where the devices of either side said nothing, or fewer than three
/// times.
/// @param rank, peers  indices into Trace::ranks; a peer that is the rank does not count
/// @param since_step   the first step that counts; -1: all
[[nodiscard]] inline std::string device_evidence(const Trace& trace, TableIndex rank,
                                                 std::span<const TableIndex> peers,
                                                 std::int32_t since_step = -1) {
  using detail::DeviceSummary;
  if (trace.device_states.empty()) return {};
  const std::vector<Nanoseconds> from = detail::begins_of_step(trace, since_step);
  const DeviceSummary own = DeviceSummary::of(trace, rank, from[rank]);
  std::vector<DeviceSummary> others;
  for (const TableIndex peer : peers) {
    if (peer == rank) continue;
    DeviceSummary summary = DeviceSummary::of(trace, peer, from[peer]);
    if (summary.sm_mhz) others.push_back(summary);
  }
  const DeviceSummary theirs = DeviceSummary::middle_of(others);
  if (!own.sm_mhz || !theirs.sm_mhz) return {};

  const auto whole = [](double x) { return static_cast<std::int64_t>(std::llround(x)); };
  std::string out;
  const auto tell = [&](std::string_view what, double mine, double of_peers,
                        std::string_view unit) {
    out += sentence(out.empty() ? "" : "; ", "its ", what, " was ", whole(mine), " ", unit,
                    " where its peers' was ", whole(of_peers), " ", unit);
  };
  // GPUs of one kind differ by a few per cent in what they can hold.
  if (*own.sm_mhz < 0.96 * *theirs.sm_mhz) tell("SM clock", *own.sm_mhz, *theirs.sm_mhz, "MHz");
  for (std::size_t l = 0; l < own.limited.size(); ++l) {
    if (own.limited[l] < 0.25 || own.limited[l] < theirs.limited[l] + 0.25) continue;
    out += sentence(out.empty() ? "its SM clock was" : ",", " kept down by ",
                    DeviceSummary::limits[l].words, " in ", whole(100 * own.limited[l]),
                    " % of the samples");
  }
  if (own.temperature_c && theirs.temperature_c && *own.temperature_c > *theirs.temperature_c + 8)
    tell("temperature", *own.temperature_c, *theirs.temperature_c, "C");
  if (own.power_w && theirs.power_w && std::abs(*own.power_w / *theirs.power_w - 1) > 0.15)
    tell("power", *own.power_w, *theirs.power_w, "W");
  if (own.busy_percent && theirs.busy_percent && *own.busy_percent < *theirs.busy_percent - 10)
    tell("share of time with kernels", *own.busy_percent, *theirs.busy_percent, "%");
  if (!out.empty()) return out;
  return sentence("its device was as its peers': SM clock ", whole(*own.sm_mhz), " MHz and ",
                  whole(*theirs.sm_mhz), " MHz");
}

}  // namespace mega::inline v0::scan
