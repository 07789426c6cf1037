/// @file  Sharing the algorithms that were chosen for matrix products between the processes of a
/// run, so that equal products give equal bits on all ranks.
#pragma once
#include <mega/core/device.hpp>
#include <mega/train/agreement.hpp>

#include <algorithm>
#include <concepts>
#include <functional>
#include <set>
#include <string>
#include <string_view>

namespace mega::inline v0::train {

/// What was chosen, as nn::MatmulAlgorithms keeps it: text() gives a line a problem, sorted, whose
/// last field is the choice; read() takes such lines over instead of what is known of the same
/// problems, all or none of them.
template <class T>
concept algorithm_table = requires(T& table, const T& known, std::string_view text) {
  { known.text() } -> std::convertible_to<std::string>;
  table.read(text);
};

/// Collective over the agreement's ranks. Afterwards the tables of all ranks hold the same: of each
/// problem that any rank knows, the choice of the lowest rank that knows it. So rank 0's choices
/// hold everywhere, and what only later stages of a pipeline multiply is settled by the first of
/// the ranks that do.
///
/// Ranks that are threads of one process have one table and need no sharing. Ranks that are
/// processes call this twice: before the first step, so that the table that rank 0 read from a file
/// is everyone's, and after the first step, in which each rank chose by its own timing. That step's
/// bits may differ between ranks; all later ones follow one table, which rank 0 keeps for the next
/// run. A choice by cuBLASLt's heuristic needs no sharing.
/// @cost    two small broadcasts a rank, and the bytes of each problem once; streams keep their
///          plans where tables were equal
/// @throws  what read() throws, on every rank whose library cannot use a choice of another rank
template <device_policy Device, class Comm, algorithm_table Table>
void share_algorithms(Agreement<Device, Comm>& agreement, Table& table) {
  std::set<std::string, std::less<>> settled;
  std::string all;
  const auto for_each_line = [](std::string_view text, const auto& visit) {
    while (!text.empty()) {
      const std::string_view line = text.substr(0, text.find('\n'));
      text.remove_prefix(std::min(text.size(), line.size() + 1));
      visit(line, line.substr(0, line.rfind(' ')));
    }
  };
  for (int root = 0; root < agreement.size(); ++root) {
    std::string own;
    if (root == agreement.rank()) {
      for_each_line(table.text(), [&](std::string_view line, std::string_view problem) {
        if (!settled.contains(problem)) (own += line) += '\n';
      });
    }
    const std::string text = agreement.text_of(root, own);
    for_each_line(text,
                  [&](std::string_view, std::string_view problem) { settled.emplace(problem); });
    all += text;
  }
  if (table.text() != all) table.read(all);
}

}  // namespace mega::inline v0::train
