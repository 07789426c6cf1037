/// @file  Schedules as the CSV text of PyTorch's torch.distributed.pipelining, both ways. Included
/// by name: mega.hpp leaves it out.
///
/// One line a rank, rank 0 first; cells in the order of execution, separated by commas. A cell is
///   <stage><word><microbatch>   word: F forward, I backward_input, W backward_weight, B backward,
///                               SEND_F, RECV_F, SEND_B, RECV_B
///   <stage>REDUCE_GRAD          reduce
///   (<cell>;<cell>)OVERLAP_F_B  a pair: one forward and one backward side by side
///   <stage>UNSHARD, <stage>RESHARD   parameters of sharded data parallelism; no action of mega
///   nothing                     an idle step of a compute-only file
/// A byte order mark before the first cell is passed over.
/// and two words of mega's own, so that a lowered schedule is written whole:
///   <stage>LOSS<microbatch>, <stage>TIED_REDUCE
/// strip_implicit() takes out what PyTorch does not read; insert_implicit() puts it back.
///
/// Two spellings of the backward are in circulation:
///   current    I = input gradient, B = both gradients
///   old        B = input gradient, BW = both gradients (PyTorch until early 2025)
/// A file with I, OVERLAP_F_B or REDUCE_GRAD is current, one with BW is old. In a file with none of
/// these, B means both gradients if there is no W, and the input gradient if every B has its W and
/// every W its B, since a weight gradient is not computed twice. Anything else is refused, unless
/// the caller names the spelling.
/// Source: the files under test/distributed/pipelining/artifacts of PyTorch and its runtime.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/verifier.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::dpp {

/// How a file spells the backward; see the head of this header.
enum class BackwardSpelling : std::uint8_t {
  detect,   ///< reading: by the documented rule
  current,  ///< I, W, B
  old,      ///< B, W, BW
};

[[nodiscard]] constexpr std::string_view to_string(BackwardSpelling spelling) noexcept {
  switch (spelling) {
    case BackwardSpelling::detect: return "detect";
    case BackwardSpelling::current: return "current";
    case BackwardSpelling::old: return "old";
  }
  return "unknown";
}

/// A schedule out of a file, and what the file said beyond it.
struct CsvSchedule {
  Schedule schedule;
  TablePlacement placement;  ///< which rank holds which stage
  BackwardSpelling spelling = BackwardSpelling::current;
  std::size_t unshards = 0;     ///< UNSHARD cells left out
  std::size_t reshards = 0;     ///< RESHARD cells left out
  std::size_t empty_cells = 0;  ///< idle steps left out
  /// [p] column of each action in its row, from 1. Halves of a pair share theirs.
  std::vector<std::vector<int>> columns{};
};

/// Cells that can be read but are no schedule together. what() is the sentence.
class WrongSchedule : public Error {
 public:
  /// @param rank    of the cell; -1 if the file has none to blame
  /// @param column  of the cell in its row, from 1
  WrongSchedule(Fault fault, int rank, int column, const std::string& sentence)
      : Error(ErrorCode::bad_input, sentence), fault_(fault), rank_(rank), column_(column) {}

  [[nodiscard]] Fault fault() const noexcept { return fault_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int column() const noexcept { return column_; }

 private:
  Fault fault_;
  int rank_, column_;
};

/// One sentence on what read_csv() left out; empty if nothing.
[[nodiscard]] inline std::string left_out(const CsvSchedule& read) {
  std::string text;
  const auto add = [&](std::size_t count, std::string_view what) {
    if (count > 0) text += sentence(text.empty() ? "left out: " : ", ", count, " ", what);
  };
  add(read.unshards, "UNSHARD");
  add(read.reshards, "RESHARD");
  add(read.empty_cells, read.empty_cells == 1 ? "idle step" : "idle steps");
  return text;
}

namespace detail {

enum class CsvMeaning : std::uint8_t { action, ambiguous_backward, unshard, reshard };

/// What stands between the stage and the micro-batch of a cell.
struct CsvWord {
  std::string_view text;
  CsvMeaning meaning = CsvMeaning::action;
  ActionKind kind = ActionKind::forward;
  bool of_microbatch = true;
};

inline constexpr std::array<CsvWord, 14> csv_words{{
    {"F", CsvMeaning::action, ActionKind::forward, true},
    {"I", CsvMeaning::action, ActionKind::backward_input, true},
    {"W", CsvMeaning::action, ActionKind::backward_weight, true},
    {"B", CsvMeaning::ambiguous_backward, ActionKind::backward, true},
    {"BW", CsvMeaning::action, ActionKind::backward, true},
    {"SEND_F", CsvMeaning::action, ActionKind::send_forward, true},
    {"RECV_F", CsvMeaning::action, ActionKind::recv_forward, true},
    {"SEND_B", CsvMeaning::action, ActionKind::send_backward, true},
    {"RECV_B", CsvMeaning::action, ActionKind::recv_backward, true},
    {"REDUCE_GRAD", CsvMeaning::action, ActionKind::reduce, false},
    {"UNSHARD", CsvMeaning::unshard, ActionKind::reduce, false},
    {"RESHARD", CsvMeaning::reshard, ActionKind::reduce, false},
    {"LOSS", CsvMeaning::action, ActionKind::loss, true},
    {"TIED_REDUCE", CsvMeaning::action, ActionKind::tied_reduce, false},
}};

inline constexpr std::string_view csv_valid_cells =
    "valid are <stage> then F, I, W, B, BW, SEND_F, RECV_F, SEND_B, RECV_B or LOSS then "
    "<microbatch>, as in 2F0; <stage> then REDUCE_GRAD, TIED_REDUCE, UNSHARD or RESHARD; "
    "(2F0;1B3)OVERLAP_F_B; and nothing";

/// One cell, or one half of a pair.
struct CsvCell {
  std::string_view text;
  CsvMeaning meaning = CsvMeaning::action;
  ActionKind kind = ActionKind::forward;
  bool with_next = false;
  int stage = 0;
  int microbatch = all_microbatches;
  int column = 0;  // counted from 1
};

/// Where a cell stands and what it says; hostile bytes shown as \xNN, long text cut.
[[nodiscard]] inline std::string csv_place(std::size_t row, int column, std::string_view text) {
  constexpr std::size_t shown = 40;
  constexpr std::string_view hex = "0123456789abcdef";
  std::string visible;
  for (const char letter : text.substr(0, shown)) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte >= 0x20 && byte < 0x7f) {
      visible += letter;
    } else {
      visible += "\\x";
      visible += hex[byte >> 4U];
      visible += hex[byte & 15U];
    }
  }
  if (text.size() > shown) visible += "...";
  return sentence("row ", row + 1, ", column ", column, ", '", visible, "'");
}

/// Reads one file; the steps of read_csv() in their order.
class CsvReader {
 public:
  CsvReader(std::string_view text, std::string_view name) : name_(name) {
    expects(text.size() <= max_bytes, ErrorCode::bad_input, [&] {
      return sentence(name_, ": ", text.size(), " bytes are above the limit of ", max_bytes);
    });
    constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
    if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
    split(text);
  }

  CsvSchedule read(BackwardSpelling wanted) {
    const BackwardSpelling spelling = settle_spelling(wanted);
    const int stages = find_ranks_of_stages();
    const int m = count_microbatches(stages);
    TablePlacement place(std::span<const int>(rank_of_).first(static_cast<std::size_t>(stages)));
    const int p = place.ranks();
    const int v = place.chunks();
    Schedule made(p, m, v, place);
    std::vector<Action> list;
    std::vector<std::vector<int>> columns(static_cast<std::size_t>(p));
    for (int rank = 0; rank < p; ++rank) {
      list.clear();
      for (const CsvCell& cell : cells_of(rank)) {
        if (cell.meaning == CsvMeaning::unshard || cell.meaning == CsvMeaning::reshard) continue;
        Action a = make_action(cell.kind, place.chunk_of(cell.stage, p, v), cell.microbatch);
        a.with_next = cell.with_next;
        list.push_back(a);
        columns[static_cast<std::size_t>(rank)].push_back(cell.column);
      }
      made.append(list);
    }
    return {std::move(made),
            std::move(place),
            spelling,
            count(CsvMeaning::unshard),
            count(CsvMeaning::reshard),
            empty_cells_,
            std::move(columns)};
  }

 private:
  static constexpr std::size_t max_bytes = std::numeric_limits<int>::max();
  static constexpr int max_chunks = std::numeric_limits<decltype(Action::chunk)>::max();

  [[nodiscard]] std::span<const CsvCell> cells_of(int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    return std::span<const CsvCell>(cells_).subspan(first_[r], first_[r + 1] - first_[r]);
  }
  [[nodiscard]] int ranks() const { return static_cast<int>(first_.size()) - 1; }
  [[nodiscard]] std::size_t count(CsvMeaning meaning) const {
    std::size_t found = 0;
    for (const CsvCell& cell : cells_) found += cell.meaning == meaning ? 1U : 0U;
    return found;
  }

  [[noreturn]] void refuse(std::size_t row, int column, std::string_view text,
                           const std::string& why) const {
    throw Error(ErrorCode::bad_input, sentence(name_, ": ", csv_place(row, column, text), why));
  }
  [[noreturn]] void refuse(int rank, const CsvCell& cell, const std::string& why) const {
    refuse(static_cast<std::size_t>(rank), cell.column, cell.text, why);
  }

  [[noreturn]] void refute(Fault fault, int rank, const CsvCell& cell,
                           const std::string& why) const {
    throw WrongSchedule(
        fault, rank, cell.column,
        sentence(name_, ": ", csv_place(static_cast<std::size_t>(rank), cell.column, cell.text),
                 why));
  }

  static std::string_view trim(std::string_view text) {
    constexpr std::string_view blank = " \t\r";
    const auto begin = text.find_first_not_of(blank);
    if (begin == std::string_view::npos) return {};
    return text.substr(begin, text.find_last_not_of(blank) - begin + 1);
  }

  void split(std::string_view text) {
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
    expects(!text.empty(), ErrorCode::bad_input, [&] {
      return sentence(name_, ": the file is empty; a schedule has one line of cells a rank");
    });
    first_.push_back(0);
    for (std::size_t row = 0, begin = 0; begin <= text.size(); ++row) {
      const auto end = std::min(text.find('\n', begin), text.size());
      split_row(row, text.substr(begin, end - begin));
      expects(cells_.size() > first_.back(), ErrorCode::bad_input, [&] {
        return sentence(name_, ": row ", row + 1,
                        " holds no action; row r + 1 lists the actions "
                        "of rank r, and every rank holds at least one stage");
      });
      first_.push_back(cells_.size());
      begin = end + 1;
    }
  }

  void split_row(std::size_t row, std::string_view line) {
    int column = 1;
    for (std::size_t begin = 0; begin <= line.size(); ++column) {
      const auto end = std::min(line.find(',', begin), line.size());
      const std::string_view text = trim(line.substr(begin, end - begin));
      begin = end + 1;
      if (text.empty()) {
        ++empty_cells_;
      } else if (text.front() == '(') {
        add_pair(row, column, text);
      } else {
        cells_.push_back(parse(row, column, text, text));
      }
    }
  }

  /// @param part  of the cell `text`: all of it, or half of a pair
  [[nodiscard]] CsvCell parse(std::size_t row, int column, std::string_view text,
                              std::string_view part) const {
    constexpr std::string_view digits = "0123456789";
    const auto word_begin = std::min(part.find_first_not_of(digits), part.size());
    const auto word_end = std::min(part.find_first_of(digits, word_begin), part.size());
    const std::string_view word = part.substr(word_begin, word_end - word_begin);
    for (const CsvWord& known : csv_words) {
      if (word != known.text || word_begin == 0) continue;
      if (known.of_microbatch != (word_end < part.size())) break;
      CsvCell cell{text, known.meaning, known.kind, false, 0, all_microbatches, column};
      cell.stage = number(row, column, text, part.substr(0, word_begin));
      if (known.of_microbatch) {
        cell.microbatch = number(row, column, text, part.substr(word_end));
      }
      return cell;
    }
    refuse(row, column, text, sentence(", is no action; ", csv_valid_cells));
  }

  [[nodiscard]] int number(std::size_t row, int column, std::string_view text,
                           std::string_view digits) const {
    constexpr int limit = 1'000'000'000;
    std::int64_t value = 0;
    for (const char digit : digits) {
      if (digit < '0' || digit > '9') {
        refuse(row, column, text, sentence(", is no action; ", csv_valid_cells));
      }
      value = value * 10 + (digit - '0');
      if (value >= limit) {
        refuse(row, column, text,
               sentence(", holds a number beyond ", limit - 1, ", the largest that is read"));
      }
    }
    return static_cast<int>(value);
  }

  void add_pair(std::size_t row, int column, std::string_view text) {
    constexpr std::string_view word = ")OVERLAP_F_B";
    const auto middle = text.find(';');
    const auto end = text.find(')');
    if (middle == std::string_view::npos || end < middle ||
        text.substr(std::min(end, text.size())) != word) {
      refuse(row, column, text, sentence(", is no pair; ", csv_valid_cells));
    }
    CsvCell one = parse(row, column, text, trim(text.substr(1, middle - 1)));
    CsvCell other = parse(row, column, text, trim(text.substr(middle + 1, end - middle - 1)));
    const auto is_backward = [](const CsvCell& cell) { return gives_input_gradient(cell.kind); };
    const auto is_forward = [](const CsvCell& cell) { return cell.kind == ActionKind::forward; };
    if (!(is_forward(one) && is_backward(other)) && !(is_backward(one) && is_forward(other))) {
      refuse(row, column, text, ", does not pair one forward, F, with one backward, B or I");
    }
    one.with_next = true;
    cells_.push_back(one);
    cells_.push_back(other);
  }

  /// Settles what B means, and gives every B its kind.
  BackwardSpelling settle_spelling(BackwardSpelling wanted) {
    const CsvCell* current = nullptr;  // the first cell that only this spelling has
    const CsvCell* old = nullptr;
    int rank_of_current = 0;
    int rank_of_old = 0;
    for (int rank = 0; rank < ranks(); ++rank) {
      for (const CsvCell& cell : cells_of(rank)) {
        const bool only_current =
            cell.kind == ActionKind::backward_input || cell.with_next ||
            (cell.kind == ActionKind::reduce && cell.meaning == CsvMeaning::action);
        const bool only_old =
            cell.kind == ActionKind::backward && cell.meaning == CsvMeaning::action;
        if (only_current && current == nullptr) {
          current = &cell;
          rank_of_current = rank;
        }
        if (only_old && old == nullptr) {
          old = &cell;
          rank_of_old = rank;
        }
      }
    }
    if (current != nullptr && old != nullptr) {
      refuse(rank_of_old, *old,
             sentence(", is of the old spelling (B, W, BW), but ",
                      csv_place(static_cast<std::size_t>(rank_of_current), current->column,
                                current->text),
                      ", is of the current one (I, W, B)"));
    }
    if (wanted == BackwardSpelling::current && old != nullptr) {
      refuse(rank_of_old, *old, ", is of the old spelling (B, W, BW), and current was asked for");
    }
    if (wanted == BackwardSpelling::old && current != nullptr) {
      refuse(rank_of_current, *current,
             ", is of the current spelling (I, W, B), and old was asked for");
    }
    BackwardSpelling spelling = wanted;
    if (spelling == BackwardSpelling::detect) {
      if (old != nullptr) {
        spelling = BackwardSpelling::old;
      } else if (current != nullptr) {
        spelling = BackwardSpelling::current;
      } else {
        spelling = spelling_by_weights();
      }
    }
    for (CsvCell& cell : cells_) {
      if (cell.meaning != CsvMeaning::ambiguous_backward) continue;
      cell.meaning = CsvMeaning::action;
      cell.kind =
          spelling == BackwardSpelling::old ? ActionKind::backward_input : ActionKind::backward;
    }
    return spelling;
  }

  /// For files of only F, B and W: whether B and W go together, never do, or neither.
  [[nodiscard]] BackwardSpelling spelling_by_weights() const {
    using Key = std::pair<int, int>;
    std::vector<Key> halves;
    std::vector<Key> weights;
    for (const CsvCell& cell : cells_) {
      const Key key(cell.stage, cell.microbatch);
      if (cell.meaning == CsvMeaning::ambiguous_backward) halves.push_back(key);
      if (cell.kind == ActionKind::backward_weight) weights.push_back(key);
    }
    if (weights.empty()) return BackwardSpelling::current;
    std::sort(halves.begin(), halves.end());
    std::sort(weights.begin(), weights.end());
    if (halves == weights) return BackwardSpelling::old;
    std::vector<Key> alone;
    std::set_symmetric_difference(halves.begin(), halves.end(), weights.begin(), weights.end(),
                                  std::back_inserter(alone));
    for (int rank = 0; rank < ranks(); ++rank) {
      for (const CsvCell& cell : cells_of(rank)) {
        const bool concerned = cell.meaning == CsvMeaning::ambiguous_backward ||
                               cell.kind == ActionKind::backward_weight;
        if (!concerned || Key(cell.stage, cell.microbatch) != alone.front()) continue;
        refuse(rank, cell,
               ", leaves open what B means, since some but not all B have a W of the same stage "
               "and micro-batch; name the spelling: current (I, W, B) or old (B, W, BW)");
      }
    }
    return BackwardSpelling::current;  // unreachable: alone.front() stands in a cell
  }

  /// Fills rank_of_, returns the number of stages.
  int find_ranks_of_stages() {
    constexpr int nowhere = -1;
    // Every stage has a cell, so a number beyond the cells cannot be right.
    const auto limit = static_cast<int>(cells_.size());
    rank_of_.assign(cells_.size(), nowhere);
    int stages = 0;
    std::vector<int> held(first_.size(), 0);
    for (int rank = 0; rank < ranks(); ++rank) {
      int& chunks = held[static_cast<std::size_t>(rank)];
      for (const CsvCell& cell : cells_of(rank)) {
        if (cell.stage >= limit) {
          refute(Fault::out_of_place, rank, cell,
                 sentence(", names stage ", cell.stage, " in a file of ", limit,
                          limit == 1 ? " action" : " actions",
                          "; every stage from 0 on needs its own"));
        }
        int& owner = rank_of_[static_cast<std::size_t>(cell.stage)];
        if (owner == rank) continue;
        if (owner != nowhere) {
          refute(Fault::out_of_place, rank, cell,
                 sentence(", puts stage ", cell.stage, " on rank ", rank, ", but row ", owner + 1,
                          " has it on rank ", owner));
        }
        owner = rank;
        if (++chunks > max_chunks) {
          refuse(rank, cell,
                 sentence(", is stage ", chunks, " of the rank; the limit is ", max_chunks));
        }
        stages = std::max(stages, cell.stage + 1);
      }
    }
    for (int stage = 0; stage < stages; ++stage) {
      if (rank_of_[static_cast<std::size_t>(stage)] != nowhere) continue;
      throw WrongSchedule(
          Fault::missing, nowhere, 0,
          sentence(name_, ": stage ", stage, " has no cell, though the file names stages up to ",
                   stages - 1, "; every stage from 0 on stands on one rank"));
    }
    for (int rank = 0; rank < ranks(); ++rank) {
      const int chunks = held[static_cast<std::size_t>(rank)];
      if (chunks == held[0]) continue;
      refute(Fault::out_of_place, rank, cells_of(rank).back(),
             sentence(", ends the row of rank ", rank, ", which has ", chunks,
                      chunks == 1 ? " stage" : " stages", ", but rank 0 has ", held[0],
                      "; all ranks hold equally many"));
    }
    return stages;
  }

  /// The number of micro-batches; each stage has that many forwards, which also bounds the memory
  /// that any reader of the schedule needs by the size of the file.
  [[nodiscard]] int count_microbatches(int stages) const {
    int m = 0;
    const CsvCell* largest = nullptr;
    int rank_of_largest = 0;
    std::vector<int> forwards(static_cast<std::size_t>(stages), 0);
    for (int rank = 0; rank < ranks(); ++rank) {
      for (const CsvCell& cell : cells_of(rank)) {
        if (cell.kind == ActionKind::forward) ++forwards[static_cast<std::size_t>(cell.stage)];
        if (cell.microbatch >= m) {
          m = cell.microbatch + 1;
          largest = &cell;
          rank_of_largest = rank;
        }
      }
    }
    if (largest == nullptr) {
      throw WrongSchedule(Fault::missing, -1, 0,
                          sentence(name_, ": no cell computes a micro-batch"));
    }
    for (int stage = 0; stage < stages; ++stage) {
      if (forwards[static_cast<std::size_t>(stage)] == m) continue;
      refute(Fault::missing, rank_of_largest, *largest,
             sentence(", makes ", m, m == 1 ? " micro-batch" : " micro-batches", ", but stage ",
                      stage, " has no forward of micro-batch ", missing_forward(stage)));
    }
    return m;
  }

  /// The least micro-batch of which the stage has no forward; refutes a file that has a second one.
  [[nodiscard]] int missing_forward(int stage) const {
    std::vector<std::pair<int, const CsvCell*>> own;
    const int rank = rank_of_[static_cast<std::size_t>(stage)];
    for (const CsvCell& cell : cells_of(rank)) {
      if (cell.kind == ActionKind::forward && cell.stage == stage)
        own.emplace_back(cell.microbatch, &cell);
    }
    std::sort(own.begin(), own.end());
    int next = 0;
    for (std::size_t i = 0; i < own.size() && own[i].first <= next; ++i, ++next) {
      if (own[i].first == next) continue;
      refute(Fault::duplicate, rank, *own[i].second,
             sentence(", is a second forward of stage ", stage, ", micro-batch ", own[i].first,
                      ", after that of column ", own[i - 1].second->column));
    }
    return next;
  }

  std::string name_;
  std::vector<CsvCell> cells_;
  std::vector<std::size_t> first_;  // [p+1] where each rank's cells begin
  std::vector<int> rank_of_;        // [cells] by stage
  std::size_t empty_cells_ = 0;
};

[[nodiscard]] inline std::string_view csv_word(ActionKind kind, BackwardSpelling spelling) {
  const bool old = spelling == BackwardSpelling::old;
  if (kind == ActionKind::backward_input) return old ? "B" : "I";
  if (kind == ActionKind::backward) return old ? "BW" : "B";
  for (const CsvWord& word : csv_words) {
    if (word.kind == kind && word.meaning == CsvMeaning::action) return word.text;
  }
  return {};
}

}  // namespace detail

/// Reads a schedule. A rank's chunks are its stages in ascending order; m is the largest
/// micro-batch + 1. The schedule is what the file says, neither lowered nor judged: a compute-only
/// file goes through lower(), one with transfers through insert_implicit(), then verify() tells
/// whether it can run.
/// @param name  of the file, for the sentences of errors
/// Throws Error(bad_input) with row and column (counted from 1) and the cell, for a cell outside
/// the grammar and an unclear spelling; the same as a WrongSchedule for a stage on two ranks or on
/// none, ranks with unequally many stages, and a stage without exactly one forward of each
/// micro-batch.
/// @cost  a few passes over the cells; a file with only F, B and W sorts the last two
[[nodiscard]] inline CsvSchedule read_csv(std::string_view text, std::string_view name = "schedule",
                                          BackwardSpelling spelling = BackwardSpelling::detect) {
  return detail::CsvReader(text, name).read(spelling);
}

/// Writes a schedule, compute-only or lowered: one line a rank, each ended by a newline. Reading
/// the text gives the same schedule wherever chunks ascend with their stages, as they do in every
/// placement of this library; writing what was read gives the same cells.
/// Throws Error(usage) for a rank without actions, a pair whose halves are not neighbours of the
/// list or not one forward and one backward, and for what the old spelling has no word for (pairs,
/// reduce).
[[nodiscard]] inline std::string write_csv(const ScheduleView& schedule,
                                           BackwardSpelling spelling = BackwardSpelling::current) {
  std::string text;
  const auto put = [&](int rank, const Action& a) {
    text += sentence(schedule.stage(rank, a.chunk), detail::csv_word(a.kind, spelling));
    if (a.microbatch != all_microbatches) text += std::to_string(a.microbatch);
  };
  for (int rank = 0; rank < schedule.p; ++rank) {
    const auto list = schedule.of_rank(rank);
    expects(!list.empty(), ErrorCode::usage, [&] {
      return sentence("rank ", rank, " has no action, and a line without cells is no rank");
    });
    for (std::size_t i = 0; i < list.size(); ++i) {
      const Action& a = list[i];
      if (i > 0) text += ',';
      const bool is_pair = a.with_next;
      expects(spelling != BackwardSpelling::old || (!is_pair && a.kind != ActionKind::reduce),
              ErrorCode::usage, [&] {
                return sentence("the old spelling has no word for ",
                                is_pair ? "a pair" : to_string(a.kind), ", at position ", i,
                                " of rank ", rank, "; use the current one");
              });
      if (!is_pair) {
        put(rank, a);
        continue;
      }
      const bool forward_first = a.kind == ActionKind::forward;
      const ActionKind other = i + 1 < list.size() ? list[i + 1].kind : ActionKind::loss;
      const bool matches = forward_first
                               ? gives_input_gradient(other)
                               : gives_input_gradient(a.kind) && other == ActionKind::forward;
      expects(matches && !list[i + 1].with_next, ErrorCode::usage, [&] {
        return sentence("the pair that begins with ", to_string(a), " at position ", i, " of rank ",
                        rank, " is not one forward and one backward next to each other");
      });
      text += '(';
      put(rank, a);
      text += ';';
      put(rank, list[++i]);
      text += ")OVERLAP_F_B";
    }
    text += '\n';
  }
  return text;
}

}  // namespace mega::inline v0::dpp
