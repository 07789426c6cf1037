/// @file  Orders as words, the form in which a search changes them.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/schedule.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mega::inline v0::dpp::detail {

/// An order as a word for each rank: which kind on which chunk comes next. The micro-batch is the
/// number of equal letters before it, so every word keeps micro-batches ascending.
struct Letter {
  ActionKind kind = ActionKind::forward;
  bool with_next = false;
  std::int16_t chunk = 0;
  friend bool operator==(const Letter&, const Letter&) = default;
};
using Words = std::vector<std::vector<Letter>>;

inline Words words_of(const ScheduleView& schedule) {
  Words words(static_cast<std::size_t>(schedule.p));
  for (int rank = 0; rank < schedule.p; ++rank) {
    for (const Action& a : schedule.of_rank(rank)) {
      if (!is_compute(a.kind)) continue;
      words[static_cast<std::size_t>(rank)].push_back({a.kind, a.with_next, a.chunk});
    }
  }
  return words;
}

/// The words with each whole backward as I and W and no pairs: the search moves single letters.
inline Words split_words(const Words& words) {
  Words split;
  for (const auto& word : words) {
    auto& letters = split.emplace_back();
    for (const Letter& letter : word) {
      const bool whole = letter.kind == ActionKind::backward;
      letters.push_back({whole ? ActionKind::backward_input : letter.kind, false, letter.chunk});
      if (whole) letters.push_back({ActionKind::backward_weight, false, letter.chunk});
    }
  }
  return split;
}

/// Calls visit(letter, micro-batch) for each letter of the word of a rank with v chunks.
template <class Visit>
void number_letters(const std::vector<Letter>& word, int v, const Visit& visit) {
  struct Seen {
    int forward = 0;
    int input = 0;
    int weight = 0;
  };
  std::vector<Seen> seen(static_cast<std::size_t>(v));
  for (const Letter& letter : word) {
    Seen& of_chunk = seen[static_cast<std::size_t>(letter.chunk)];
    switch (letter.kind) {
      case ActionKind::forward: visit(letter, of_chunk.forward++); break;
      case ActionKind::backward_input: visit(letter, of_chunk.input++); break;
      case ActionKind::backward_weight: visit(letter, of_chunk.weight++); break;
      default: ++of_chunk.weight; visit(letter, of_chunk.input++);
    }
  }
}

/// The words as lists of actions of the pipeline.
inline Schedule schedule_of(const Words& words, const ScheduleView& pipeline) {
  Schedule made(pipeline);
  std::vector<Action> list;
  for (const auto& word : words) {
    list.clear();
    number_letters(word, pipeline.v, [&](const Letter& letter, int microbatch) {
      list.push_back({letter.kind, letter.with_next, letter.chunk, microbatch});
    });
    made.append(list);
  }
  return made;
}

/// Moves one letter of `word` to another place; the letters between close up.
inline void move_letter(std::vector<Letter>& word, int from, int to) {
  const auto begin = word.begin();
  if (from < to) {
    std::rotate(begin + from, begin + from + 1, begin + to + 1);
  } else {
    std::rotate(begin + to, begin + from, begin + from + 1);
  }
}

}  // namespace mega::inline v0::dpp::detail
