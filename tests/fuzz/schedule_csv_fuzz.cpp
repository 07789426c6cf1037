/// @file  libFuzzer entry of the schedule CSV reader: any bytes are either refused with an Error or
/// give a schedule within its bounds that is written and read again without a change, and that
/// every later pass accepts.
/// clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
///         -I include <this file>
#include <mega/core/error.hpp>
#include <mega/dpp/csv.hpp>
#include <mega/dpp/passes.hpp>
#include <mega/dpp/simulator.hpp>
#include <mega/dpp/verifier.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace {

using namespace mega;
using namespace mega::dpp;

bool equal(const ScheduleView& a, const ScheduleView& b) {
  return a.p == b.p && a.m == b.m && a.v == b.v && std::ranges::equal(a.stage_of, b.stage_of) &&
         std::ranges::equal(a.first, b.first) && std::ranges::equal(a.actions, b.actions);
}

bool within_bounds(const ScheduleView& s) {
  for (int rank = 0; rank < s.p; ++rank) {
    for (const Action& a : s.of_rank(rank)) {
      if (a.chunk < 0 || a.chunk >= s.v) return false;
      if (a.microbatch != all_microbatches && (a.microbatch < 0 || a.microbatch >= s.m)) {
        return false;
      }
    }
  }
  return s.first.back() == static_cast<int>(s.actions.size());
}

void use(const ScheduleView& s) {
  const Schedule compute = compute_order(s);
  (void)verify(lower(merge_backward(compute)));
  (void)verify(lower(split_backward(s)));
  (void)verify(insert_implicit(strip_implicit(s)));
  try {
    (void)simulate(compute);
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const CsvSchedule read = read_csv(text);
    if (!within_bounds(read.schedule)) std::abort();
    const CsvSchedule again = read_csv(write_csv(read.schedule, read.spelling));
    if (!equal(read.schedule, again.schedule) || again.spelling != read.spelling) std::abort();
    use(read.schedule);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::bad_input || e.what()[0] == '\0') std::abort();
  }
  return 0;
}
