/// @file  What every importer of traces must hold, whatever the bytes: an Error(bad_input) with a
/// sentence, or a Trace whose indices are inside its tables, whose times can be subtracted, which
/// is no larger than its text allows, and which every later pass accepts.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/chrome_json.hpp>
#include <mega/scan/hang.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/own_format.hpp>
#include <mega/scan/trace.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace mega_test {

inline void check_trace(const mega::scan::Trace& t, std::size_t bytes) {
  using namespace mega::scan;
  const auto inside = [](TableIndex i, std::size_t size) { return i == none || i < size; };
  if (t.events.size() > bytes || t.ranks.size() > bytes + 1) std::abort();
  for (const Lane& lane : t.lanes) {
    if (lane.rank >= t.ranks.size()) std::abort();
  }
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    const Event& e = t.events[i];
    Nanoseconds difference = 0;
    if (__builtin_sub_overflow(e.end, e.begin, &difference) || difference < 0) std::abort();
    if (e.lane >= t.lanes.size() || !inside(e.name, t.names.size())) std::abort();
    if (!inside(e.detail, t.communications.size()) || !inside(e.launch, t.events.size()))
      std::abort();
    if (e.detail != none && t.communications[e.detail].event != i) std::abort();
  }
  for (std::size_t i = 0; i < t.communications.size(); ++i) {
    const Communication& c = t.communications[i];
    if (!inside(c.group, t.groups.size()) || !inside(c.dtype, t.names.size())) std::abort();
    if (c.event >= t.events.size()) std::abort();
  }
  for (const TableIndex i : t.outstanding) {
    if (i >= t.communications.size()) std::abort();
  }
  for (const Progress& p : t.progress) {
    if (p.rank >= t.ranks.size() || p.group >= t.groups.size()) std::abort();
  }
}

/// Imports the bytes, and uses what came of them.
template <class Import>
int fuzz_importer(const std::uint8_t* data, std::size_t size, Import import) {
  using namespace mega::scan;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  Trace t;
  try {
    Source source("_dump_3", text);
    import(t, source, ImportOptions{});
  } catch (const mega::Error& e) {
    if (e.code() != mega::ErrorCode::bad_input || e.what()[0] == '\0') std::abort();
    check_trace(t, size);
    return 0;
  }
  check_trace(t, size);
  (void)find_hang(t);
  std::string written;
  const auto sink = [&](std::string_view piece) { written += piece; };
  write_chrome_json(t, match(t), {}, sink);
  Trace again;
  std::size_t events = 0;
  for (TableIndex rank = 0; rank < t.ranks.size() && rank < 4; ++rank) {
    written.clear();
    write_own_format(t, rank, sink);
    Source source("again", written);
    import_own_format(again, source, {});
    for (std::size_t i = 0; i < t.events.size(); ++i)
      events += t.rank_index(t.events[i]) == rank ? 1 : 0;
    if (again.events.size() != events || again.defects.malformed_records != 0) std::abort();
  }
  return 0;
}

}  // namespace mega_test
