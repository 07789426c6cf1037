/// @file  Whether files are of one job, and which are parts of one rank's recording.
///
/// Profilers write a file for each window of steps, so several files may be of one rank: parts,
/// whose steps, or else times, follow each other. Two files of one rank that are no parts are a
/// copy or another run, and analysing them together would accuse innocent ranks.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/input.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::detail {

/// How long the tables of a trace were before a file was imported.
struct TableSizes {
  explicit TableSizes(const Trace& t)
      : events(t.events.size()),
        ranks(t.ranks.size()),
        lanes(t.lanes.size()),
        progress(t.progress.size()),
        device_states(t.device_states.size()),
        guessed(t.defects.rank_guessed),
        truncated(t.defects.truncated_files) {}
  std::size_t events, ranks, lanes, progress, device_states;
  std::int64_t guessed, truncated;
};

/// Cost: one pass over the file's events.
[[nodiscard]] inline ImportedFile describe_file(const Trace& t, const std::string& name,
                                                const TableSizes& before,
                                                const ImportOptions& options) {
  ImportedFile file;
  file.name = name;
  file.says_ranks = options.rank < 0 && t.defects.rank_guessed == before.guessed;
  file.is_dump = t.progress.size() > before.progress;
  for (std::size_t r = before.ranks; r < t.ranks.size(); ++r) {
    if (t.ranks[r].rank >= 0) file.ranks.push_back(t.ranks[r].rank);
    file.is_dump |= t.ranks[r].missing;
  }
  std::sort(file.ranks.begin(), file.ranks.end());
  if (before.ranks < t.ranks.size()) file.clock = t.ranks[before.ranks].clock;
  file.events = t.events.size() - before.events;
  for (std::size_t i = before.events; i < t.events.size(); ++i) {
    const Event& e = t.events[i];
    const bool first = i == before.events;
    file.begin = first ? e.begin : std::min(file.begin, e.begin);
    file.end = first ? e.end : std::max(file.end, e.end);
    if (e.step >= 0) {
      file.first_step = file.first_step < 0 ? e.step : std::min(file.first_step, e.step);
      file.last_step = std::max(file.last_step, e.step);
    }
    const std::uint64_t word = static_cast<std::uint64_t>(e.begin) ^
                               std::rotl(static_cast<std::uint64_t>(e.end), 21) ^
                               std::rotl(std::uint64_t{e.name}, 42);
    file.digest = std::rotl((file.digest ^ word) * 0x9E3779B97F4A7C15ULL, 29);
  }
  return file;
}

/// The least rank that both files are of; -1: none.
[[nodiscard]] inline std::int32_t common_rank(const ImportedFile& a, const ImportedFile& b) {
  std::size_t i = 0, k = 0;
  while (i < a.ranks.size() && k < b.ranks.size()) {
    if (a.ranks[i] == b.ranks[k]) return a.ranks[i];
    ++(a.ranks[i] < b.ranks[k] ? i : k);
  }
  return -1;
}

/// Times, of which a tenth of the shorter part may be in both: operations of several streams do not
/// end where a file does.
[[nodiscard]] inline bool follow_each_other(const ImportedFile& a, const ImportedFile& b) {
  const auto length = [](Nanoseconds from, Nanoseconds to) {
    return static_cast<double>(to) - static_cast<double>(from);
  };
  const double shorter = std::min(length(a.begin, a.end), length(b.begin, b.end));
  return length(std::max(a.begin, b.begin), std::min(a.end, b.end)) <= shorter / 10;
}

/// How two files of one rank contradict each other as parts of one recording; "": they do not.
[[nodiscard]] inline std::string contradiction(const ImportedFile& a, const ImportedFile& b) {
  if (a.events > 0 && a.events == b.events && a.digest == b.digest)
    return "they hold the same events";
  if (a.is_dump || b.is_dump) return "a rank leaves one dump";
  if (a.events == 0 || b.events == 0) return {};
  if (a.ranks != b.ranks) return "they are of different ranks besides";
  const bool stepped = a.first_step >= 0 && b.first_step >= 0;
  const std::int32_t from = std::max(a.first_step, b.first_step);
  const std::int32_t to = std::min(a.last_step, b.last_step);
  if (stepped && from < to) return sentence("both have steps ", from, " to ", to);
  if (a.clock != b.clock) return "they read different clocks";
  if (!stepped) return follow_each_other(a, b) ? "" : "they overlap in time";
  // A file may end within a step that the next one goes on with.
  const bool one_step = a.first_step == a.last_step && b.first_step == b.last_step;
  const bool torn = !one_step && follow_each_other(a, b);
  return from == to && !torn ? sentence("both have step ", from) : "";
}

/// @throws Error(bad_input)
inline void expect_one_job(const ImportedFile& a, const ImportedFile& b) {
  expects(a.name != b.name, ErrorCode::bad_input, [&] { return a.name + " is given twice"; });
  const std::int32_t rank = common_rank(a, b);
  if (rank >= 0) {
    const std::string why = contradiction(a, b);
    expects(why.empty(), ErrorCode::bad_input, [&] {
      const bool said = a.says_ranks && b.says_ranks;
      return sentence(a.name, " and ", b.name, said ? " are both of rank " : " both count as rank ",
                      rank, " and are no parts of one recording: ", why, "; leave one out",
                      said ? "" : ", or say which rank it is of");
    });
    return;
  }
  const bool copied = a.events == b.events && a.digest == b.digest && a.events > 0;
  expects(!copied || (a.says_ranks && b.says_ranks), ErrorCode::bad_input, [&] {
    const bool counted = !a.ranks.empty() && !b.ranks.empty();
    return sentence(a.name, " and ", b.name, " hold the same events",
                    counted ? sentence(", though they count as ranks ", a.ranks.front(), " and ",
                                       b.ranks.front())
                            : "",
                    "; leave one out");
  });
}

/// @throws Error(bad_input) where new ranks are of a job of another size
inline void expect_one_size(const Trace& t, std::size_t first_new) {
  const auto of_known_size = [](const Rank& r) { return r.world > 0; };
  const auto from = t.ranks.begin(), added = from + static_cast<std::ptrdiff_t>(first_new);
  const auto one = std::find_if(added, t.ranks.end(), of_known_size);
  if (one == t.ranks.end()) return;
  const auto earlier = std::find_if(from, added, of_known_size);
  expects(earlier == added || earlier->world == one->world, ErrorCode::bad_input, [&] {
    return sentence(earlier->source, " is of a job of ", earlier->world, " ranks and ", one->source,
                    " of one of ", one->world, "; give the files of one job");
  });
}

/// What new rows of ranks hold goes to earlier rows of the same ranks.
inline void join_parts(Trace& t, const TableSizes& before) {
  std::vector<TableIndex> place;
  std::size_t kept = before.ranks;
  const auto earlier = t.ranks.begin() + static_cast<std::ptrdiff_t>(before.ranks);
  for (std::size_t r = before.ranks; r < t.ranks.size(); ++r) {
    const auto same = std::find_if(t.ranks.begin(), earlier, [&](const Rank& other) {
      return other.rank == t.ranks[r].rank && other.rank >= 0;
    });
    if (same != earlier) {
      t.notes.push_back(sentence(t.ranks[r].source, " is taken for a part of the recording that ",
                                 same->source, " has of rank ", same->rank));
      place.push_back(static_cast<TableIndex>(same - t.ranks.begin()));
    } else {
      place.push_back(static_cast<TableIndex>(kept));
      if (kept != r) t.ranks[kept] = std::move(t.ranks[r]);
      ++kept;
    }
  }
  if (kept == t.ranks.size()) return;
  t.ranks.resize(kept);
  const auto move = [&](TableIndex& rank) {
    if (rank != none && rank >= before.ranks) rank = place[rank - before.ranks];
  };
  for (std::size_t i = before.lanes; i < t.lanes.size(); ++i) move(t.lanes[i].rank);
  for (std::size_t i = before.progress; i < t.progress.size(); ++i) move(t.progress[i].rank);
  for (std::size_t i = before.device_states; i < t.device_states.size(); ++i)
    move(t.device_states[i].rank);
  std::stable_sort(t.device_states.begin(), t.device_states.end(),
                   [](const DeviceState& a, const DeviceState& b) { return a.at < b.at; });
}

/// Judges what a file added since `before`. @throws Error(bad_input) if it is of another job than
/// the files before it, or a copy
inline void settle_file(Trace& t, const Source& source, const TableSizes& before,
                        const ImportOptions& options) {
  const std::string damage = source.damage();
  if (!damage.empty() && t.defects.truncated_files == before.truncated) ++t.defects.truncated_files;
  if (t.defects.truncated_files > before.truncated) {
    t.warnings.push_back(sentence(source.name(), " is cut off",
                                  damage.empty() ? "" : sentence(" (", damage, ")"),
                                  ": what it held beyond is missing"));
  }
  ImportedFile file = describe_file(t, source.name(), before, options);
  for (const ImportedFile& other : t.files) expect_one_job(other, file);
  expect_one_size(t, before.ranks);
  join_parts(t, before);
  t.files.push_back(std::move(file));
}

/// Ranks that ran the same steps at no common moment: clocks of hosts that differ, or two runs.
/// @param dated  files of one rank each, not empty
inline void note_disjoint_times(Trace& t, const std::vector<const ImportedFile*>& dated) {
  const ImportedFile& first = *dated.front();
  const auto meets = [&](const ImportedFile& f, const ImportedFile& of) {
    return f.begin <= of.end && of.begin <= f.end;
  };
  for (const ImportedFile* f : dated) {
    const std::int32_t rank = f->ranks.front();
    if (rank == first.ranks.front() || f->first_step < 0 || first.first_step < 0 ||
        f->first_step > first.last_step || first.first_step > f->last_step)
      continue;
    const bool met = std::any_of(dated.begin(), dated.end(), [&](const ImportedFile* a) {
      return a->ranks.front() == rank &&
             std::any_of(dated.begin(), dated.end(), [&](const ImportedFile* b) {
               return b->ranks.front() == first.ranks.front() && meets(*a, *b);
             });
    });
    if (met) continue;
    constexpr Nanoseconds millisecond = 1'000'000;
    t.notes.push_back(sentence(
        f->name, " and ", first.name, " hold the same steps, but ",
        (std::max(f->begin, first.begin) - std::min(f->end, first.end)) / millisecond,
        " ms lie between them: their hosts' clocks differ, or they are of different runs"));
    return;
  }
}

/// Files whose stamps count from 1970 tell when they were recorded. Clocks of hosts differ by less
/// than `apart`, so a rank without a file near one of the first rank is of another run.
inline void warn_of_other_times(Trace& t) {
  constexpr Nanoseconds second = 1'000'000'000, year_2001 = second * second, apart = 600 * second;
  std::vector<const ImportedFile*> dated;
  for (const ImportedFile& f : t.files) {
    if (f.events > 0 && f.ranks.size() == 1 && f.begin > year_2001) dated.push_back(&f);
  }
  if (dated.empty()) return;
  const std::int32_t first = dated.front()->ranks.front();
  const auto is_near = [&](const ImportedFile& f) {
    return std::any_of(dated.begin(), dated.end(), [&](const ImportedFile* of) {
      return of->ranks.front() == first && f.begin - apart <= of->end && of->begin - apart <= f.end;
    });
  };
  std::vector<std::int32_t> met;
  const ImportedFile* stray = nullptr;
  for (const ImportedFile* f : dated) {
    if (is_near(*f)) met.push_back(f->ranks.front());
  }
  std::sort(met.begin(), met.end());
  for (const ImportedFile* f : dated) {
    const bool is_met = std::binary_search(met.begin(), met.end(), f->ranks.front());
    if (stray == nullptr && !is_met) stray = f;
  }
  if (stray == nullptr) return note_disjoint_times(t, dated);
  t.warnings.push_back(sentence(
      stray->name, " and ", dated.front()->name, " were recorded ",
      (std::max(stray->begin, dated.front()->begin) - std::min(stray->end, dated.front()->end)) /
          second,
      " s apart: they may be of different runs"));
}

}  // namespace mega::inline v0::scan::detail
