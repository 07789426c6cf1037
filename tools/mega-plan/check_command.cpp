#include "check_command.hpp"

#include "arguments.hpp"
#include "judgement.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/csv.hpp>
#include <mega/dpp/passes.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/svg.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace plan {

namespace dpp = mega::dpp;
using mega::ErrorCode;
using mega::expects;
using mega::sentence;

namespace {

struct CheckArguments {
  std::string file;
  std::string spelling = "detect";
  std::string links = "slots";
  TimeArguments times;
  bool json = false;
  std::string svg;
};

/// The file's schedule with everything that its system leaves unsaid.
dpp::Schedule completed(const dpp::Schedule& read) {
  bool transfers = false, whole = false;
  for (const dpp::Action& a : read.view().actions) {
    whole = whole || a.kind == dpp::ActionKind::loss;
    transfers = transfers || dpp::detail::channel_of(a.kind, 1) >= 0;
  }
  if (whole) return read;
  return transfers ? dpp::insert_implicit(read) : dpp::lower(dpp::compute_order(read));
}

/// Makes the positions of a verdict the columns of the file, and its action one that stands there.
/// What the file leaves unsaid belongs to the cell that it comes before (what arrives, the loss) or
/// behind.
class Columns {
 public:
  Columns(const dpp::CsvSchedule& read, const dpp::ScheduleView& judged) {
    bool only_computes = true;
    for (const dpp::Action& a : read.schedule.view().actions)
      only_computes = only_computes && dpp::detail::channel_of(a.kind, 1) < 0 &&
                      a.kind != dpp::ActionKind::loss;
    for (int rank = 0; rank < judged.p; ++rank) {
      const auto cells = read.schedule.of_rank(rank);
      const auto& columns = read.columns[static_cast<std::size_t>(rank)];
      std::vector<Cell>& own = of_rank_.emplace_back();
      std::size_t next = 0;
      for (const dpp::Action& a : judged.of_rank(rank)) {
        // Lowering makes the reductions anew.
        while (only_computes && next < cells.size() && !dpp::is_compute(cells[next].kind)) ++next;
        const bool is_next = next < cells.size() && cells[next].kind == a.kind &&
                             cells[next].chunk == a.chunk && cells[next].microbatch == a.microbatch;
        own.push_back(is_next ? Cell{columns[next++], a} : Cell{});
      }
      fill(own, judged.of_rank(rank), columns.back() + 1);
    }
  }

  void apply(dpp::Verdict& verdict) const {
    const Cell& cell = at(verdict.rank, verdict.position);
    // A list is to blame for what stands in it. What waits may be what it leaves unsaid.
    if (verdict.fault != dpp::Fault::missing && verdict.cycle.empty()) verdict.action = cell.action;
    verdict.position = cell.column;
    for (dpp::Blocked& blocked : verdict.cycle)
      blocked.position = at(blocked.rank, blocked.position).column;
  }

 private:
  static constexpr int unsaid = 0;
  struct Cell {
    int column = unsaid;
    dpp::Action action{};
  };

  static void fill(std::vector<Cell>& own, std::span<const dpp::Action> list, int end) {
    using enum dpp::ActionKind;
    if (list.empty()) return own.push_back({end, {}});
    Cell behind{end, list.back()};
    for (std::size_t i = own.size(); i-- > 0;) {
      const auto kind = list[i].kind;
      const bool before = kind == recv_forward || kind == recv_backward || kind == loss;
      if (own[i].column != unsaid) behind = own[i];
      if (own[i].column == unsaid && before) own[i] = behind;
    }
    Cell last{1, list.front()};
    for (Cell& cell : own) last = cell = cell.column == unsaid ? last : cell;
    own.push_back({end, list.back()});  // of what is missing
  }

  [[nodiscard]] const Cell& at(int rank, int position) const {
    const auto& own = of_rank_[static_cast<std::size_t>(rank)];
    return own[std::min(static_cast<std::size_t>(position), own.size() - 1)];
  }

  std::vector<std::vector<Cell>> of_rank_;
};

template <class Choice, std::size_t N>
Choice chosen(std::string_view option, const std::string& text,
              const std::pair<std::string_view, Choice> (&choices)[N]) {
  std::string all;
  for (const auto& [name, choice] : choices) {
    if (name == text) return choice;
    all += sentence(all.empty() ? "" : ", ", name);
  }
  throw mega::Error(ErrorCode::usage, sentence(option, " ", text, " is unknown; valid are ", all));
}

nlohmann::ordered_json json_of(const dpp::ScheduleView& schedule, int rank, int position,
                               const dpp::Action& action) {
  nlohmann::ordered_json out = {
      {"rank", rank}, {"position", position}, {"action", std::string(to_string(action.kind))}};
  const bool known = 0 <= action.chunk && action.chunk < schedule.v;
  if (known) out["stage"] = schedule.stage(rank, action.chunk);
  if (action.microbatch != dpp::all_microbatches) out["micro_batch"] = action.microbatch;
  return out;
}

nlohmann::ordered_json fault_json(const dpp::ScheduleView& schedule, const dpp::Verdict& verdict) {
  auto out = json_of(schedule, verdict.rank, verdict.position, verdict.action);
  out["kind"] = std::string(to_string(verdict.fault));
  out["sentence"] = describe(verdict);
  if (verdict.cycle.empty()) return out;
  auto& cycle = out["cycle"] = nlohmann::ordered_json::array();
  for (const dpp::Blocked& blocked : verdict.cycle) {
    auto& entry =
        cycle.emplace_back(json_of(schedule, blocked.rank, blocked.position, blocked.action));
    entry["waits_for_rank"] = blocked.waits_for;
  }
  return out;
}

/// The order of such a file may run elsewhere; here it cannot.
bool is_supported(const dpp::Verdict& verdict) {
  return verdict.fault != dpp::Fault::out_of_order;
}

/// "valid", "invalid" or "not supported", and why.
std::string judgement_text(const dpp::Verdict& verdict) {
  if (verdict.ok()) return "valid: " + describe(verdict);
  if (is_supported(verdict)) return "invalid: " + describe(verdict);
  return sentence(
      "not supported: ", describe(verdict),
      "; here the micro-batches of each kind and chunk ascend, so that channels need no "
      "tags and gradients add up in one order");
}

/// What the reader itself refutes.
void print_wrong(const dpp::WrongSchedule& wrong, bool json) {
  if (!json) {
    std::printf("invalid: %s\n", wrong.what());
    return;
  }
  nlohmann::ordered_json fault;
  if (wrong.rank() >= 0) fault = {{"rank", wrong.rank()}, {"position", wrong.column()}};
  fault["kind"] = std::string(to_string(wrong.fault()));
  fault["sentence"] = wrong.what();
  const nlohmann::ordered_json out = {{"valid", false}, {"fault", std::move(fault)}};
  std::printf("%s\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

int run(const CheckArguments& arguments) {
  using Spelling = dpp::BackwardSpelling;
  const auto spelling = chosen<Spelling>(
      "--spelling", arguments.spelling,
      {{"detect", Spelling::detect}, {"current", Spelling::current}, {"old", Spelling::old}});
  const auto links = chosen<dpp::Transport>("--links", arguments.links,
                                            {{"slots", dpp::Transport::slots()},
                                             {"rendezvous", dpp::Transport::rendezvous()},
                                             {"blocking", dpp::Transport::blocking()}});
  const dpp::ActionTimes times = arguments.times.parsed();
  constexpr std::size_t largest_file = 256 << 20;
  const std::string text = read_input(arguments.file, largest_file);
  const dpp::CsvSchedule read = dpp::read_csv(text, arguments.file, spelling);
  const dpp::Schedule schedule = completed(read.schedule);
  const dpp::ScheduleView view = schedule.view();
  expect_size(view.p, view.m, view.v);
  Judgement judgement = judge(schedule, times);
  if (judgement.verdict.ok()) judgement.verdict = dpp::verify(schedule, {}, links);
  const bool valid = judgement.verdict.ok();
  if (!valid) Columns(read, view).apply(judgement.verdict);

  if (valid && !arguments.svg.empty()) {
    OutputFiles files;
    files.add(arguments.svg, dpp::to_svg(timeline_of(schedule, times), {.title = arguments.file}));
    const bool silent = files.take_standard_output(arguments.json);
    files.write();
    if (silent) return 0;
  }
  if (arguments.json) {
    nlohmann::ordered_json out = {{"valid", valid},
                                  {"ranks", view.p},
                                  {"micro_batches", view.m},
                                  {"chunks", view.v},
                                  {"spelling", std::string(to_string(read.spelling))}};
    if (!left_out(read).empty()) {
      out["left_out"] = {
          {"unshard", read.unshards}, {"reshard", read.reshards}, {"idle", read.empty_cells}};
    }
    if (!is_supported(judgement.verdict)) out["supported"] = false;
    if (!valid) out["fault"] = fault_json(view, judgement.verdict);
    if (judgement.run) put_figures(out, view, judgement);
    std::printf("%s\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    return valid ? 0 : 1;
  }
  std::printf("%s: %s, %s, %s a rank\n%s", arguments.file.c_str(), counted(view.p, "rank").c_str(),
              counted(view.m, "micro-batch").c_str(), counted(view.v, "chunk").c_str(),
              left_out(read).empty() ? "" : (left_out(read) + "\n").c_str());
  std::printf("%s\n", judgement_text(judgement.verdict).c_str());
  if (judgement.run) std::fputs(figures_text(view, judgement).c_str(), stdout);
  return valid ? 0 : 1;
}

}  // namespace

void add_check(CLI::App& app, int& exit_code) {
  CLI::App& command = *app.add_subcommand(
      "check", "Proves or refutes a schedule in PyTorch's CSV form, with or without transfers");
  const auto arguments = std::make_shared<CheckArguments>();
  command
      .add_option("file", arguments->file, "a line for each rank, as torch.distributed writes it")
      ->required();
  command
      .add_option("--spelling", arguments->spelling,
                  "of backwards: detect, current (I, W, B) or old (B, W, BW)")
      ->capture_default_str();
  command
      .add_option("--links", arguments->links,
                  "what it must run on: slots (receives posted ahead), rendezvous (two buffers a\n"
                  "channel) or blocking (both ends held, as by one NCCL stream)")
      ->capture_default_str();
  arguments->times.add_to(command, "one action on one chunk");
  command.add_flag("--json", arguments->json, "print one JSON object");
  command.add_option("--svg", arguments->svg, "draw the timeline of a valid schedule");
  command.footer(
      "Says whether the schedule is complete, ordered and free of deadlock, with the first fault "
      "or\n"
      "the cycle of waiting ranks. Positions are the columns of a rank's row, from 1; what the "
      "file\n"
      "leaves unsaid (loss, hand-overs inside a rank, reductions, missing transfers) stands at "
      "the\n"
      "cell that it belongs to. The file may be a pipe, as /dev/stdin.\n"
      "Micro-batches of each kind and chunk must ascend: another order may run in PyTorch, and is\n"
      "not supported here.\n"
      "Exit codes: 0 valid, 1 invalid or not supported, also where cells are missing, repeated or "
      "on\n"
      "a wrong rank,\n"
      "2 not readable as such cells, or an output that could not be written.\n"
      "Example: mega-plan check schedule.csv --links blocking --json");
  command.callback([arguments, &command, &exit_code] {
    expect_values(command);
    try {
      exit_code = run(*arguments);
    } catch (const dpp::WrongSchedule& wrong) {
      print_wrong(wrong, arguments->json);
      exit_code = 1;
    }
  });
}

}  // namespace plan
