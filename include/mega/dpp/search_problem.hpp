/// @file  What a search for a pipeline order is given and what it finds: the measured pipeline, the
/// goal, the budget, and the order with the candidates that it was compared with.
#pragma once
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/simulator.hpp>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::dpp {

/// A pipeline as measured: what its stages cost and what its ranks can hold.
struct PipelineProfile {
  int p = 1;                       ///< ranks
  int m = 1;                       ///< micro-batches
  int v = 1;                       ///< chunks a rank
  std::vector<ActionTimes> times;  ///< [p*v] by stage, or one entry for all
  /// [p] what the live activations of a rank may take, in the unit of activation_sizes; empty: any.
  std::vector<double> caps;
  /// [p*v] micro-batches that the place rank*v + chunk has room for; empty: for all. What is laid
  /// out for each chunk limits more than a rank's sum does.
  std::vector<int> chunk_caps = {};
  /// [p*v] slots of the place rank*v + chunk with which the order has to run to its end, as
  /// verify() judges; empty: as many as it requires. No chunk then holds more live activations
  /// either.
  std::vector<int> slots = {};
  /// Part of an activation that the input gradient has released already, in [0, 1]; the weight
  /// gradient releases the rest. 0: all is kept for the weight gradient.
  double released_by_input = 0;
  /// [p*v] by stage: what one live activation takes, in any unit; empty: 1 each, so that caps count
  /// activations of a chunk.
  std::vector<double> activation_sizes = {};
};

/// What the search makes small; ties go to less memory, then to the other of the two.
enum class ScheduleGoal : std::uint8_t {
  makespan,      ///< the step from its first action to its last: all ranks wait at its end
  longest_span,  ///< the longest time from a rank's first action to its last: ranks need not wait
                 ///< for each other between steps
};

/// When the local search stops. With `seconds` unlimited the result depends on nothing but the
/// arguments.
struct SearchBudget {
  int tries = 1000;  ///< orders timed by the local search of each placement, each at the cost of
                     ///< all its actions
  double seconds = std::numeric_limits<double>::infinity();  ///< of the whole call
  std::uint64_t seed = 0;
};

/// A candidate of the search that fits the caps, and its figures.
struct ScheduleCandidate {
  std::string name;
  double makespan = 0;
  double longest_span = 0;
  std::string_view placement;  ///< its name
};

struct AutoSchedule {
  Schedule schedule;           ///< compute actions; lower() makes it executable
  std::string candidate;       ///< where it came from
  std::string_view placement;  ///< name of the placement that it is on
  Timing timing;
  std::vector<double> memory_per_rank;        ///< [p] peak, in the unit of the caps
  std::vector<ScheduleCandidate> candidates;  ///< all that fit, in the order of their trial
  int tries = 0;                              ///< orders that the local search timed
};

}  // namespace mega::inline v0::dpp
