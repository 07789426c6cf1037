/// @file  Proofs of schedules by the compiler, which says what is wrong where it finds no proof.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/verifier.hpp>

#include <type_traits>

namespace mega::inline v0::dpp {

namespace detail {

/// Of a verdict what can outlive an evaluation.
struct Finding {
  Fault fault = Fault::none;
  int rank = 0;
  int position = 0;
  Action action{};
};

[[nodiscard]] constexpr Finding find_fault(const ScheduleView& schedule) {
  const Verdict verdict = verify(schedule);
  return {verdict.fault, verdict.rank, verdict.position, verdict.action};
}

/// Compilers print the arguments of a class whose static_assert fails, by name where they are
/// enumerators; of the values in an evaluation they print little or nothing.
template <Fault fault, int rank, int position, ActionKind action, int chunk, int microbatch>
struct FirstFault {
  static_assert(fault == Fault::none,
                "mega: the schedule is invalid; FirstFault<> names the fault, the rank, the "
                "position in the rank's lowered list, and the action, chunk and micro-batch there; "
                "print describe(verify(schedule)) for the sentence");
  static constexpr bool value = fault == Fault::none;
};

}  // namespace detail

/// True for a valid schedule; any other stops the compiler:
///   static_assert(proven([] { return lower(make_schedule(MyOrder{}, 4, 8, 2)); }));
/// @param make  a lambda without captures that returns a lowered schedule
/// @cost  that of making and verifying the schedule in the compiler, whose limits end it at some
///        size; expect_valid() does the same at run time, for any
template <class Make>
requires std::is_empty_v<Make>
[[nodiscard]] consteval bool proven(Make /*make*/) {
  constexpr detail::Finding found = detail::find_fault(Make{}());
  return detail::FirstFault<found.fault, found.rank, found.position, found.action.kind,
                            found.action.chunk, found.action.microbatch>::value;
}

}  // namespace mega::inline v0::dpp
