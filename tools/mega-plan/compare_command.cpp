#include "compare_command.hpp"

#include "arguments.hpp"
#include "named_schedules.hpp"
#include "step_model.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/v_schedule.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace plan {

namespace dpp = mega::dpp;
using mega::ErrorCode;
using mega::expects;
using mega::sentence;

namespace {

struct CompareArguments {
  int p = 0, m = 0;
  std::optional<std::string> vpp;
  TimeArguments times;
  std::optional<std::string> model;
  TransformerRunArguments run;
  double link_latency = 0;
  std::optional<std::string> link_bandwidth, message_bytes, memory_cap;
  double tolerance = 0.5;  ///< percent
  bool json = false;
};

/// One schedule that fits, with its figures.
struct Row {
  Request request;
  int v = 1;
  std::string label;
  double step = 0;
  double bubble_wall = 0, bubble_span = 0;
  double peak_activations = 0;  ///< of a rank's share, worst rank
  double peak_memory = 0;       ///< as StageCosts::memory, worst rank
  double coverage = 1;
  double exposed = 0;  ///< a rank, mean
  std::vector<int> layers{};
};

struct LeftOut {
  std::string label;
  int v = 1;
  std::string why;
};

struct Comparison {
  std::vector<Row> rows;  ///< fastest first
  std::vector<LeftOut> left_out;
  double tolerance = 0;  ///< part of a step
  std::size_t best = 0;  ///< of the rows: least memory of those as fast as the first but for that

  [[nodiscard]] const Row& best_row() const { return rows[best]; }
  [[nodiscard]] const Row& fastest() const { return rows.front(); }
};

/// Largest sum over a rank's live activations of what `memory` gives each stage; worst rank.
double peak_of(const dpp::ScheduleView& s, const std::vector<double>& memory) {
  double worst = 0;
  for (int rank = 0; rank < s.p; ++rank) {
    double live = 0, freed_behind_pair = 0, peak = 0;
    for (const dpp::Action& a : s.of_rank(rank)) {
      const double own = memory[static_cast<std::size_t>(s.stage(rank, a.chunk))];
      if (a.kind == dpp::ActionKind::forward) peak = std::max(peak, live += own);
      live -= std::exchange(freed_behind_pair, 0.0);
      if (!dpp::gives_weight_gradient(a.kind)) continue;
      if (a.with_next) {
        freed_behind_pair = own;
      } else {
        live -= own;
      }
    }
    worst = std::max(worst, peak);
  }
  return worst;
}

/// The schedules worth looking at with v chunks a rank.
std::vector<Request> candidates(const StepModel& model, int v) {
  std::vector<Request> list;
  const auto add = [&](std::string name) -> Request& {
    Request& request = list.emplace_back();
    request.name = std::move(name);
    request.p = model.p;
    request.m = model.m;
    request.v = v;
    return request;
  };
  if (v == 1) {
    for (const char* const name : {"1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2"}) add(name);
  } else {
    add("looped-bfs");
    add("dfc");
    add("split-dfc");
    if (model.m > 2 * model.p) add("interleaved").group_size = 2 * model.p;
    if (model.m > model.p) add("bfc");
  }
  if (v == 2) {
    for (const char* const name : {"zb-v", "v-half", "v-min", "v", "dualpipev"}) add(name);
    add("auto").placement = "v";
  }
  add("auto").placement = "loop";
  return list;
}

/// The request as `mega-plan schedule --name` and the trainers' --schedule take it.
std::string label_of(const Request& request) {
  std::string label = request.name;
  if (request.group_size) label += sentence(" --group-size ", *request.group_size);
  // What is searched for has the cap of the whole comparison.
  if (request.name == "v" && request.memory_cap)
    label += sentence(" --memory-cap ", *request.memory_cap);
  if (request.placement && request.v == 2) label += sentence(" --placement ", *request.placement);
  return label;
}

/// The search's share of the run: a schedule of the size is timed a few hundred times at least.
constexpr double most_searched_actions = 2e5;
constexpr double search_effort = 5e7;  ///< actions timed by the local search

class Comparer {
 public:
  /// @param tolerance  part of a step by which the best may be slower than the fastest
  Comparer(const StepModel& model, std::optional<double> cap, double tolerance)
      : model_(model), cap_(cap) {
    found_.tolerance = tolerance;
  }

  void consider(const std::vector<int>& chunks) {
    for (const int v : chunks) {
      for (Request& request : candidates(model_, v)) consider(request, v);
    }
    sort();
    choose();
  }

  [[nodiscard]] const Comparison& found() const noexcept { return found_; }
  /// Least memory of a schedule that was left out for its memory, and its name.
  [[nodiscard]] double least_memory() const noexcept { return least_memory_; }
  [[nodiscard]] const std::string& least_label() const noexcept { return least_label_; }
  [[nodiscard]] std::string memory_text(double memory) const {
    return model_.transformer ? fixed(memory / 1e9, 3) + " GB" : fixed(memory, 2) + " activations";
  }
  /// The same, rounded up: a cap that is enough.
  [[nodiscard]] std::string enough_text(double memory) const {
    const double step = model_.transformer ? 1e6 : 1e-2;
    return memory_text(std::ceil(memory / step * (1 - 1e-12)) * step);
  }

 private:
  /// Fastest first; of those that differ by rounding only, less memory, then as they were named.
  void sort() {
    std::vector<Row>& rows = found_.rows;
    if (rows.empty()) return;
    const auto fastest = std::min_element(
        rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.step < b.step; });
    const auto rounded = [step = fastest->step](const Row& row) {
      return std::llround(row.step / step * 1e9);
    };
    std::stable_sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) {
      const auto one = rounded(a), other = rounded(b);
      return one != other ? one < other : a.peak_memory < b.peak_memory;
    });
  }

  /// Of those that are as fast as the fastest but for the tolerance and rounding, the one with the
  /// least memory; of those the fastest.
  void choose() {
    constexpr double rounding = 1e-9;
    const std::vector<Row>& rows = found_.rows;
    for (std::size_t i = 1; i < rows.size(); ++i) {
      if (rows[i].step > rows.front().step * (1 + found_.tolerance + rounding)) break;
      if (rows[i].peak_memory < rows[found_.best].peak_memory * (1 - rounding)) found_.best = i;
    }
  }

  void consider(Request& request, int v) {
    const StageCosts costs = model_.stages(v, is_on_v(request));
    if (request.name == "v") {
      // The named caps are there anyway.
      if (!cap_ || *cap_ >= 2 * model_.p * largest_of(costs)) return;
      request.memory_cap = largest_v_cap(costs);
    }
    const auto leave_out = [&](std::string why) {
      found_.left_out.push_back({label_of(request), v, std::move(why)});
    };
    const auto leave_out_for_memory = [&](double needed) {
      if (least_label_.empty() || needed < least_memory_) {
        least_memory_ = needed;
        least_label_ = sentence(label_of(request), " with ", counted(v, "chunk"), " a rank");
      }
      leave_out(sentence("it needs ", memory_text(needed)));
    };
    if (request.name == "auto") {
      const double actions = 3.0 * model_.p * model_.m * v;
      if (actions > most_searched_actions) {
        return leave_out(
            sentence("its search is for up to ", most_searched_actions, " actions, not ", actions));
      }
      const double least = largest_micro_batch(costs, v, is_on_v(request));
      if (cap_ && *cap_ < least) return leave_out_for_memory(least);
      request.times = costs.times;
      if (cap_) {
        request.activation_sizes = costs.memory;
        request.memory_cap = *cap_ * (1 + 1e-12);
      }
      for (dpp::ActionTimes& times : request.times) times.hop += transfer_time();
      request.tries = static_cast<int>(std::min(2000.0, search_effort / actions));
    }
    std::optional<MadeSchedule> made;
    try {
      made = make_named(request);
    } catch (const mega::Error& refusal) {
      if (refusal.code() != ErrorCode::usage) throw;
      return leave_out(refusal.what());
    }
    Row row = measure(request, v, made->schedule, costs);
    if (cap_ && row.peak_memory > *cap_ * (1 + 1e-9)) {
      return leave_out_for_memory(row.peak_memory);
    }
    found_.rows.push_back(std::move(row));
  }

  [[nodiscard]] static double largest_of(const StageCosts& costs) {
    return *std::max_element(costs.memory.begin(), costs.memory.end());
  }

  /// What a micro-batch holds on the chunks of a rank, where that is most.
  [[nodiscard]] double largest_micro_batch(const StageCosts& costs, int v, bool on_v) const {
    std::vector<double> held(static_cast<std::size_t>(model_.p), 0.0);
    for (int stage = 0; stage < model_.p * v; ++stage) {
      const int rank = on_v ? dpp::VPlacement::rank_of(stage, model_.p, v)
                            : dpp::LoopPlacement::rank_of(stage, model_.p, v);
      held[static_cast<std::size_t>(rank)] += costs.memory[static_cast<std::size_t>(stage)];
    }
    return *std::max_element(held.begin(), held.end());
  }

  /// The largest cap of the V schedule with which no rank exceeds the comparison's; 2 if none does.
  /// Its caps count activations, of which some are smaller than others.
  [[nodiscard]] int largest_v_cap(const StageCosts& costs) const {
    const double enough = *cap_ * (1 + 1e-9);
    const auto fits = [&](int cap) {
      const dpp::VSchedule policy{{cap}};
      return peak_of(dpp::make_schedule(policy, model_.p, model_.m, 2), costs.memory) <= enough;
    };
    int fitting = std::max(2, static_cast<int>(enough / largest_of(costs)));
    for (int beyond = 2 * model_.p; beyond - fitting > 1;) {
      const int middle = std::midpoint(fitting, beyond);
      (fits(middle) ? fitting : beyond) = middle;
    }
    return fitting;
  }

  /// Of one message on an idle link.
  [[nodiscard]] double transfer_time() const {
    return model_.link.latency + model_.message_bytes / model_.link.bandwidth;
  }

  Row measure(const Request& request, int v, const dpp::Schedule& schedule,
              const StageCosts& costs) const {
    dpp::Cluster cluster;
    cluster.times = costs.times;
    cluster.links = {model_.link};
    cluster.message_bytes = model_.message_bytes;
    const dpp::ClusterEstimate run = dpp::estimate(schedule, cluster);
    expects(run.finished, ErrorCode::logic,
            [&] { return sentence(request.name, " does not run to its end"); });
    Row row{.request = request, .v = v, .label = label_of(request)};
    row.step = run.timing.makespan;
    // Rounding may take what is nothing below it.
    row.bubble_wall = std::max(0.0, run.timing.wall_fraction());
    row.bubble_span = std::max(0.0, run.timing.span_fraction());
    const auto& peaks = run.timing.peak_per_rank;
    row.peak_activations = static_cast<double>(*std::max_element(peaks.begin(), peaks.end())) / v;
    row.peak_memory = peak_of(schedule, costs.memory);
    row.coverage = run.transfers.coverage();
    row.exposed = std::max(0.0, run.transfers.exposed() / model_.p);
    row.layers = costs.layers;
    return row;
  }

  const StepModel& model_;
  std::optional<double> cap_;
  Comparison found_;
  double least_memory_ = 0;
  std::string least_label_;
};

/// What the best row is told against: 1f1b, else dfc, else the fastest other.
const Row& yardstick(const Comparison& comparison) {
  const std::vector<Row>& rows = comparison.rows;
  for (const char* const name : {"1f1b", "dfc"}) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i != comparison.best && rows[i].request.name == name) return rows[i];
    }
  }
  return rows[comparison.best == 0 ? 1 : 0];
}

std::string name_of(const Row& row) {
  return sentence(row.label, " with ", counted(row.v, "chunk"), " a rank");
}

/// The choice in one sentence.
std::string reason(const Comparison& comparison, const Comparer& comparer) {
  const std::vector<Row>& rows = comparison.rows;
  const Row& best = comparison.best_row();
  if (rows.size() == 1) return sentence("best: ", name_of(best), ", the only schedule that fits");
  const Row& other = yardstick(comparison);
  const double gain = 100 * (1 - best.step / other.step);
  const auto bubble = [](const Row& row) { return fixed(100 * row.bubble_wall, 1); };
  const std::string difference = fixed(std::abs(gain), 1) + (gain < 0 ? " % longer" : " % shorter");
  return sentence("best: ", name_of(best), ", whose step of ", best.step, " is ",
                  std::abs(gain) < 0.05 ? std::string("as short as") : difference + " than",
                  " that of ", name_of(other), ", with ", bubble(best), " % bubble against ",
                  bubble(other), " % and a peak of ", comparer.memory_text(best.peak_memory),
                  " against ", comparer.memory_text(other.peak_memory));
}

/// What a shorter step than the best's would cost; empty where the best is the fastest.
std::string fastest_text(const Comparison& comparison, const Comparer& comparer) {
  const Row& best = comparison.best_row();
  const Row& fastest = comparison.fastest();
  if (comparison.best == 0) return {};
  const double gain = 100 * (1 - fastest.step / best.step);
  return sentence("fastest: ", name_of(fastest), ", whose step of ", fastest.step, " is ",
                  gain < 0.005 ? std::string("as short") : fixed(gain, 2) + " % shorter",
                  ", with a peak of ", comparer.memory_text(fastest.peak_memory), " against ",
                  comparer.memory_text(best.peak_memory), "; within ", 100 * comparison.tolerance,
                  " % of it (--tolerance) the least memory is best");
}

/// What makes the trainers run the schedule of a row. A search holds no more than it is allowed, in
/// a trainer as much as the order that it begins with if nothing is said.
std::string trainer_flags(const Row& row) {
  std::string flags = sentence("--pp ", row.request.p, " --vpp ", row.v, " --schedule ", row.label);
  if (row.request.name == "auto")
    flags += sentence(" --memory-cap ", std::llround(row.peak_activations * row.v));
  return flags;
}

StepModel step_model(const CompareArguments& a, const CLI::App& command) {
  const auto given = [&](const char* option) { return command.get_option(option)->count() > 0; };
  const auto expect = [](bool holds, const char* text) { expects(holds, ErrorCode::usage, text); };
  expect(given("--times") != given("--model"),
         "compare needs either --times or --model, and not both");
  expect(
      !given("--comm") || !(given("--link-latency") || given("--link-bandwidth")),
      "--comm and --link-latency or --link-bandwidth say the same in two ways; give one of them");
  StepModel model{.p = a.p, .m = a.m};
  if (given("--model")) {
    expect(given("--flops"),
           "--model needs --flops, the operations a second that one device sustains");
    expect(!given("--pair"), "--pair belongs to --times");
    expect(!given("--message-bytes"), "--message-bytes belongs to --times; a model has its own");
    model.transformer = transformer_parts(*a.model, a.run);
    model.message_bytes = model.transformer->message_bytes;
    expect_amount("--comm", a.times.comm, true);
  } else {
    for (const char* const option : {"--tp", "--seq-length", "--micro-batch-size", "--flops"}) {
      expects(!given(option), ErrorCode::usage,
              [&] { return sentence(option, " belongs to --model"); });
    }
    expects(given("--message-bytes") == given("--link-bandwidth"), ErrorCode::usage,
            "with --times, --link-bandwidth and --message-bytes belong together");
    model.rank_times = a.times.parsed();
    if (a.message_bytes) model.message_bytes = bytes_of("--message-bytes", *a.message_bytes);
  }
  model.hop = a.times.comm;
  expect_amount("--link-latency", a.link_latency, true);
  model.link.latency = a.link_latency;
  if (a.link_bandwidth) model.link.bandwidth = bytes_of("--link-bandwidth", *a.link_bandwidth);
  return model;
}

std::vector<int> chunks_to_try(const CompareArguments& a, const StepModel& model) {
  const int layers = model.transformer ? model.transformer->layers : 0;
  expects(layers == 0 || model.p <= layers, ErrorCode::usage, [&] {
    return sentence("--pp ", model.p, " is above the ", counted(layers, "layer"), " of the model");
  });
  std::vector<int> list;
  if (a.vpp) {
    list = counts_of("--vpp", *a.vpp);
    for (const int v : list) {
      expect_size(model.p, model.m, v);
      expects(layers == 0 || v <= layers / model.p, ErrorCode::usage, [&] {
        return sentence("--vpp ", v, " on --pp ", model.p, " makes more stages than the model's ",
                        counted(layers, "layer"), "; the largest valid one is ", layers / model.p);
      });
    }
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    return list;
  }
  for (const int v : {1, 2, 4}) {
    const bool fits = static_cast<long long>(model.p) * model.m * v <= most_forwards;
    if (fits && (layers == 0 || v <= layers / model.p) && (model.p > 1 || v == 1))
      list.push_back(v);
  }
  return list;
}

void print_text(const Comparison& comparison, const Comparer& comparer, const StepModel& model) {
  const bool bytes = model.transformer.has_value();
  std::printf("%s, %s; times in %s\n\n", counted(model.p, "rank").c_str(),
              counted(model.m, "micro-batch").c_str(), bytes ? "seconds" : "the unit of --times");
  std::printf("%-29s %4s %12s %8s %8s %9s %9s %9s %12s\n", "schedule", "vpp", "step", "wall %",
              "span %", "peak act", bytes ? "peak GB" : "", "covered %", "exposed");
  for (const Row& row : comparison.rows) {
    std::printf("%-29s %4d %12.6g %8.2f %8.2f %9.2f %9s %9.2f %12.4g\n", row.label.c_str(), row.v,
                row.step, 100 * row.bubble_wall, 100 * row.bubble_span, row.peak_activations,
                bytes ? fixed(row.peak_memory / 1e9, 3).c_str() : "", 100 * row.coverage,
                row.exposed);
  }
  for (const LeftOut& each : comparison.left_out) {
    std::printf("left out: %s with %s a rank: %s\n", each.label.c_str(),
                counted(each.v, "chunk").c_str(), each.why.c_str());
  }
  std::printf("\n%s\n", reason(comparison, comparer).c_str());
  const std::string fastest = fastest_text(comparison, comparer);
  if (!fastest.empty()) std::printf("%s\n", fastest.c_str());
  const std::vector<int>& layers = comparison.best_row().layers;
  if (!layers.empty()) std::printf("layers by stage: %s\n", joined(layers).c_str());
  std::printf("in the trainers: %s\n", trainer_flags(comparison.best_row()).c_str());
}

void print_json(const Comparison& comparison, const Comparer& comparer, const StepModel& model) {
  nlohmann::ordered_json out = {{"ranks", model.p},
                                {"micro_batches", model.m},
                                {"unit", model.transformer ? "seconds" : "of --times"},
                                {"best", comparison.best_row().label},
                                {"vpp", comparison.best_row().v},
                                {"why", reason(comparison, comparer)},
                                {"trainer_flags", trainer_flags(comparison.best_row())},
                                {"tolerance", comparison.tolerance},
                                {"fastest", comparison.fastest().label},
                                {"fastest_vpp", comparison.fastest().v}};
  auto& rows = out["schedules"] = nlohmann::ordered_json::array();
  for (const Row& row : comparison.rows) {
    auto& entry =
        rows.emplace_back(nlohmann::ordered_json{{"schedule", row.label},
                                                 {"vpp", row.v},
                                                 {"trainer_flags", trainer_flags(row)},
                                                 {"step", row.step},
                                                 {"bubble_wall", row.bubble_wall},
                                                 {"bubble_span", row.bubble_span},
                                                 {"peak_activations", row.peak_activations},
                                                 {"transfer_coverage", row.coverage},
                                                 {"exposed_transfer", row.exposed}});
    if (!model.transformer) continue;
    entry["peak_bytes"] = row.peak_memory;
    entry["layers"] = row.layers;
  }
  auto& left_out = out["left_out"] = nlohmann::ordered_json::array();
  for (const LeftOut& each : comparison.left_out)
    left_out.push_back({{"schedule", each.label}, {"vpp", each.v}, {"why", each.why}});
  std::printf("%s\n", out.dump(2).c_str());
}

void run(const CompareArguments& arguments, const CLI::App& command) {
  expect_size(arguments.p, arguments.m, 1);
  const StepModel model = step_model(arguments, command);
  std::optional<double> cap;
  if (arguments.memory_cap) {
    cap = model.transformer ? bytes_of("--memory-cap", *arguments.memory_cap)
                            : amount_of("--memory-cap", *arguments.memory_cap);
  }
  expects(arguments.tolerance >= 0 && arguments.tolerance <= 100, ErrorCode::usage, [&] {
    return sentence("--tolerance is ", arguments.tolerance,
                    "; valid are 0 to 100, in percent of the shortest step");
  });
  Comparer comparer(model, cap, arguments.tolerance / 100);
  comparer.consider(chunks_to_try(arguments, model));
  const Comparison& found = comparer.found();
  expects(!found.rows.empty(), ErrorCode::usage, [&] {
    if (comparer.least_label().empty()) {
      return sentence("no schedule fits; ", found.left_out.front().label, ": ",
                      found.left_out.front().why);
    }
    return sentence("no schedule fits --memory-cap ", *arguments.memory_cap, "; the least is ",
                    comparer.enough_text(comparer.least_memory()), ", by ", comparer.least_label());
  });
  if (arguments.json) {
    print_json(found, comparer, model);
  } else {
    print_text(found, comparer, model);
  }
}

}  // namespace

void add_compare(CLI::App& app, int& /*exit_code*/) {
  CLI::App& command = *app.add_subcommand(
      "compare", "Times all schedules for one pipeline, fastest first, and says which to take");
  const auto a = std::make_shared<CompareArguments>();
  const auto into = [](auto& value) { return [&value](auto given) { value = given; }; };
  add_whole(command, "--pp", into(a->p), "pipeline ranks")->required();
  add_whole(command, "--micro-batches", into(a->m), "micro-batches of a step")->required();
  command.add_option("--vpp", a->vpp, "chunks a rank to try, as 1,2; by default 1, 2 and 4");
  a->times.add_to(command, "one micro-batch on one rank, all its chunks together");
  a->times.times_option->default_str("");
  command.add_option("--model", a->model, bundled_models() + ", or a Hugging Face config.json");
  const auto add_sized = [&](const char* option, int& value, const char* text) {
    add_whole(command, option, into(value), text)->default_str(std::to_string(value));
  };
  add_sized("--tp", a->run.tensor_degree, "with --model: tensor-parallel degree");
  add_sized("--seq-length", a->run.sequence, "with --model: tokens of a sample");
  add_sized("--micro-batch-size", a->run.micro_batch, "with --model: samples");
  add_number(command, "--flops", into(a->run.flops),
             "with --model: operations a second of one device");
  add_number(command, "--link-latency", into(a->link_latency), "of a message between two ranks");
  command.add_option("--link-bandwidth", a->link_bandwidth,
                     "bytes in a unit of time of a link between two ranks, such as 50GB");
  command.add_option("--message-bytes", a->message_bytes,
                     "with --times: of what two stages hand over");
  command.add_option("--memory-cap", a->memory_cap,
                     "of a rank's live activations: bytes with --model, else activations of a\n"
                     "rank's share of a micro-batch (1 chunk of v is 1/v of it)");
  add_number(command, "--tolerance", into(a->tolerance),
             "percent of the shortest step that another may take longer and still be best,\n"
             "if it holds less memory")
      ->default_str("0.5");
  command.add_flag("--json", a->json, "print one JSON object");
  command.footer(
      "Assumed: ranks alike; F, I and W of fixed length, and splitting them costs nothing; a link "
      "a\n"
      "direction and rank pair, one message after the other; reductions and the optimizer "
      "outside.\n"
      "With --model moreover: only matrix products count, all at --flops, divided by --tp without\n"
      "the cost of its exchanges; 16-bit activations, nothing recomputed, sequence-parallel "
      "norms;\n"
      "layers balanced with the head's cost. --memory-cap covers activations only: parameters,\n"
      "gradients and optimizer are the same for every schedule of one split.\n"
      "Example: mega-plan compare --pp 8 --micro-batches 32 --model llama3-8b --flops 4e14\n"
      "                           --seq-length 8192 --link-latency 1e-5 --link-bandwidth 50GB\n"
      "                           --memory-cap 60GB");
  command.callback([a, &command] {
    expect_values(command);
    run(*a, command);
  });
}

}  // namespace plan
