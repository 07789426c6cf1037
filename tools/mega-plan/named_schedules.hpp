/// @file  The library's schedules by name.
#pragma once
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>

#include <optional>
#include <string>
#include <vector>

namespace plan {

/// Most orders that a search may time: minutes for a pipeline of a thousand actions.
inline constexpr int most_tries = 1'000'000;

/// The names that make_named() takes, a line each, those of split- as one.
[[nodiscard]] std::string list_of_names();

/// A schedule to be made. What is not given is chosen; what the name has no use for is refused.
struct Request {
  std::string name;
  int p = 1;
  int m = 1;
  std::optional<int> v;
  std::optional<int> group_size;
  /// Live activations of a chunk on each rank; for auto in the unit of activation_sizes if given.
  std::optional<double> memory_cap;
  std::optional<std::string> weights;
  std::optional<std::string> placement;
  /// What the automatic search looks at; other schedules do not depend on them.
  std::vector<mega::dpp::ActionTimes> times{{}};  ///< of a chunk: one entry for all, or by stage
  std::vector<double> activation_sizes{};         ///< by stage; empty: 1 each
  std::optional<std::string> goal;
  std::optional<int> tries;
};

struct MadeSchedule {
  mega::dpp::Schedule schedule;  ///< compute order
  std::string origin;            ///< of the automatic search's result: the candidate it came from
};

/// Chunks a rank of the request: its own number, or that of the name.
/// Throws Error(usage) for a name that is none, with the list of all.
[[nodiscard]] int chunks_of(const Request& request);

/// Whether the schedule's stages go down the ranks and up again.
[[nodiscard]] bool is_on_v(const Request& request);

/// Throws Error(usage) for an impossible request.
[[nodiscard]] MadeSchedule make_named(const Request& request);

}  // namespace plan
