/// @file  The actions of an order that decide when its step ends.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/detail/order_words.hpp>
#include <mega/dpp/detail/pipeline.hpp>
#include <mega/dpp/detail/stopwatch.hpp>
#include <mega/dpp/search_problem.hpp>

#include <cstddef>
#include <vector>

namespace mega::inline v0::dpp::detail {

/// The actions that decide when the step ends, as (rank, position): from the last action of the
/// rank that the goal is measured on back to the first of the pipeline, each beginning when the
/// next one listed ends or, across ranks, when its data has arrived.
class CriticalPath {
 public:
  struct Node {
    int rank = 0;
    int position = 0;
  };

  /// @pre watch.run(words) gave true
  CriticalPath(const Pipeline& pipe, const Words& words, const Stopwatch& watch,
               ScheduleGoal goal) {
    std::vector<Node> forward(Pipeline::at(pipe.p * pipe.v) * Pipeline::at(pipe.m));
    std::vector<Node> gradient(forward.size());
    std::vector<std::vector<int>> microbatch(words.size());
    int worst = 0;
    for (int rank = 0; rank < pipe.p; ++rank) {
      number_letters(words[Pipeline::at(rank)], pipe.v, [&](const Letter& letter, int i) {
        const Node here{rank, static_cast<int>(microbatch[Pipeline::at(rank)].size())};
        const std::size_t slot = pipe.slot(pipe.stage(rank, letter.chunk), i);
        if (letter.kind == ActionKind::forward) forward[slot] = here;
        if (letter.kind == ActionKind::backward_input) gradient[slot] = here;
        microbatch[Pipeline::at(rank)].push_back(i);
      });
      const bool later = goal == ScheduleGoal::makespan ? watch.end(rank) > watch.end(worst)
                                                        : watch.span(rank) > watch.span(worst);
      if (later) worst = rank;
    }
    Node node{worst, static_cast<int>(words[Pipeline::at(worst)].size()) - 1};
    for (;;) {
      nodes.push_back(node);
      const auto& word = words[Pipeline::at(node.rank)];
      const auto position = Pipeline::at(node.position);
      const Letter letter = word[position];
      const int stage = pipe.stage(node.rank, letter.chunk);
      const int i = microbatch[Pipeline::at(node.rank)][position];
      const auto& starts = watch.starts(node.rank);
      if (position > 0) {
        const Letter before = word[position - 1];
        const double end =
            starts[position - 1] + pipe.duration(before.kind, pipe.stage(node.rank, before.chunk));
        if (end == starts[position]) {
          --node.position;
          continue;
        }
      }
      if (letter.kind == ActionKind::forward) {
        if (stage == 0) return;
        node = forward[pipe.slot(stage - 1, i)];
      } else if (letter.kind == ActionKind::backward_weight) {
        node = gradient[pipe.slot(stage, i)];
      } else if (stage == pipe.last_stage()) {
        node = forward[pipe.slot(stage, i)];
      } else {
        node = gradient[pipe.slot(stage + 1, i)];
      }
    }
  }

  std::vector<Node> nodes;
};

}  // namespace mega::inline v0::dpp::detail
