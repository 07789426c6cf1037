/// @file  The pipeline in what a mega trainer recorded of itself.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/metrics.hpp>
#include <mega/scan/align.hpp>
#include <mega/scan/match.hpp>
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace plan {

namespace detail {

namespace dpp = mega::dpp;
namespace scan = mega::scan;

/// One pipeline of the job: the ranks of the first data and tensor coordinates. Times are aligned.
/// A loss counts to its forward, or where the rank computes something else between the two, to its
/// backward. A message is under way from
/// when its sender begins, or where both ends meet from when the later one does, until the receiver
/// has it, or until it lies in the receiver's slot where that comes for it later.
class RecordedPipeline {
 public:
  explicit RecordedPipeline(const scan::Trace& trace)
      : t_(trace), matches_(scan::match(trace)), alignment_(scan::align(trace, matches_)) {
    choose_ranks();
    expect_partners();
    mega::expects(record_.p == 1 || alignment_.aligned(), mega::ErrorCode::bad_input, [&] {
      return mega::sentence("the ranks' clocks cannot be aligned: ", alignment_.refusal);
    });
  }

  dpp::PipelineRecord read() {
    record_.resolution_ns = resolution_ns;
    collect();
    keep_whole_iterations();
    add_transfers();
    return std::move(record_);
  }

 private:
  /// Events of CUDA tell their distance in milliseconds as float: half a microsecond at four
  /// seconds.
  static constexpr std::int64_t resolution_ns = 1000;

  /// Rank, step, micro-batch, chunk.
  using Place = std::tuple<int, std::int32_t, std::int32_t, std::int32_t>;
  struct Span {
    std::int64_t begin = 0, end = 0;
  };

  void choose_ranks() {
    using Coordinates = std::pair<std::int32_t, std::int32_t>;
    std::optional<Coordinates> first;
    for (const scan::Rank& r : t_.ranks) {
      if (r.pipeline >= 0)
        first = std::min(first.value_or(Coordinates{r.data, r.tensor}), {r.data, r.tensor});
    }
    mega::expects(first.has_value(), mega::ErrorCode::bad_input, [] {
      return "no rank of the trace says where in a pipeline it stands; valid are the files of a "
             "mega trainer's --trace";
    });
    for (const scan::Rank& r : t_.ranks) {
      const bool chosen = r.pipeline >= 0 && Coordinates{r.data, r.tensor} == *first;
      stage_rank_.push_back(chosen ? r.pipeline : -1);
      if (chosen) record_.p = std::max(record_.p, r.pipeline + 1);
    }
    for (int rank = 0; rank < record_.p; ++rank) {
      const auto files = std::count(stage_rank_.begin(), stage_rank_.end(), rank);
      mega::expects(files == 1, mega::ErrorCode::bad_input, [&] {
        return mega::sentence(files, " traces are of pipeline rank ", rank, " of ", record_.p,
                              "; one is needed of each");
      });
    }
  }

  void expect_partners() const {
    for (const scan::TableIndex i : matches_.leftovers) {
      const scan::Communication& call = t_.communications[i];
      const scan::Event& e = t_.events[call.event];
      const auto is_peer = [&](const scan::Rank& r) { return r.rank == call.peer; };
      const bool known = call.peer < 0 || rank_of(e) < 0 || e.chunk < 0 ||
                         std::any_of(t_.ranks.begin(), t_.ranks.end(), is_peer);
      mega::expects(known, mega::ErrorCode::bad_input, [&] {
        return mega::sentence("rank ", t_.rank(e), " exchanges messages with rank ", call.peer,
                              ", of which there is no trace; give the files of all ranks");
      });
    }
  }

  [[nodiscard]] int rank_of(const scan::Event& e) const { return stage_rank_[t_.rank_index(e)]; }
  [[nodiscard]] Span span_of(const scan::Event& e) const {
    const scan::TableIndex rank = t_.rank_index(e);
    return {alignment_.at(rank, e.begin), alignment_.at(rank, e.end)};
  }
  [[nodiscard]] static Place place_of(int rank, const scan::Event& e) {
    return {rank, e.step, e.microbatch, e.chunk};
  }

  void collect() {
    using enum dpp::ActionKind;
    std::map<Place, Span> losses;
    for (std::size_t i = 0; i < t_.events.size(); ++i) {
      const scan::Event& e = t_.events[i];
      const int rank = rank_of(e);
      if (rank < 0 || e.step < 0) continue;
      const Span span = span_of(e);
      if (e.kind == scan::EventKind::iteration)
        record_.iterations.push_back({rank, e.step, span.begin, span.end, {}});
      if (e.microbatch < 0 || e.chunk < 0) continue;
      const std::string_view name = t_.name(e);
      if (e.kind == scan::EventKind::loss) losses[place_of(rank, e)] = span;
      for (const dpp::ActionKind kind : {forward, backward, backward_input, backward_weight}) {
        if (name != dpp::to_string(kind) || !scan::is_compute(e.kind)) continue;
        record_.compute.push_back(
            {rank, e.step, dpp::make_action(kind, e.chunk, e.microbatch), span.begin, span.end});
        if (dpp::gives_input_gradient(kind)) backward_begins_[place_of(rank, e)] = span.begin;
      }
    }
    count_losses(losses);
  }

  void count_losses(const std::map<Place, Span>& losses) {
    std::map<int, std::vector<std::int64_t>> begins;  // of each rank's actions
    for (const dpp::ComputeRecord& c : record_.compute) begins[c.rank].push_back(c.start_ns);
    for (auto& [rank, all] : begins) std::sort(all.begin(), all.end());
    const auto begins_between = [&](int rank, std::int64_t first, std::int64_t last) {
      const auto& all = begins[rank];
      const auto found = std::upper_bound(all.begin(), all.end(), first);
      return found != all.end() && *found < last;
    };
    std::map<Place, std::int64_t> of_backwards;
    for (dpp::ComputeRecord& c : record_.compute) {
      if (c.action.kind != dpp::ActionKind::forward) continue;
      const Place place{c.rank, c.iteration, c.action.microbatch, c.action.chunk};
      const auto loss = losses.find(place);
      if (loss == losses.end()) continue;
      if (begins_between(c.rank, c.start_ns, loss->second.begin))
        of_backwards[place] = loss->second.begin;
      else
        c.end_ns = std::max(c.end_ns, loss->second.end);
    }
    for (dpp::ComputeRecord& c : record_.compute) {
      const auto loss =
          of_backwards.find({c.rank, c.iteration, c.action.microbatch, c.action.chunk});
      if (loss != of_backwards.end() && dpp::gives_input_gradient(c.action.kind))
        c.start_ns = std::min(c.start_ns, loss->second);
    }
  }

  [[nodiscard]] bool is_whole(int iteration) const {
    const auto found = ranks_in_.find(iteration);
    return found != ranks_in_.end() && found->second >= record_.p;
  }

  /// A trace may begin or end within an iteration. Its last compute action is when a rank may
  /// reduce.
  void keep_whole_iterations() {
    for (const dpp::IterationRecord& i : record_.iterations) ++ranks_in_[i.iteration];
    std::erase_if(record_.iterations, [&](const auto& i) { return !is_whole(i.iteration); });
    std::erase_if(record_.compute, [&](const auto& c) { return !is_whole(c.iteration); });
    std::map<std::pair<int, int>, std::int64_t> done;
    for (const dpp::ComputeRecord& c : record_.compute) {
      std::int64_t& latest =
          done.try_emplace({c.rank, c.iteration}, std::numeric_limits<std::int64_t>::min())
              .first->second;
      latest = std::max(latest, c.end_ns);
    }
    for (dpp::IterationRecord& i : record_.iterations) {
      if (const auto found = done.find({i.rank, i.iteration}); found != done.end())
        i.reduce_ns = std::clamp(found->second, i.begin_ns, i.end_ns);
    }
  }

  void add_transfers() {
    for (const scan::Instance& instance : matches_.instances) {
      const auto members = matches_.of(instance);
      if (members.size() != 2) continue;
      const scan::Event* sent = nullptr;
      const scan::Event* received = nullptr;
      for (const scan::TableIndex c : members) {
        const scan::Communication& call = t_.communications[c];
        if (call.op == scan::CommunicationOp::send) sent = &t_.events[call.event];
        if (call.op == scan::CommunicationOp::recv) received = &t_.events[call.event];
      }
      if (sent == nullptr || received == nullptr || !is_whole(sent->step)) continue;
      const int from = rank_of(*sent), to = rank_of(*received);
      if (from < 0 || to < 0 || sent->chunk < 0 || received->chunk < 0) continue;
      const Span out = span_of(*sent), in = span_of(*received);
      const bool meets = in.begin < out.end;
      const std::int64_t start = meets ? std::max(out.begin, in.begin) : out.begin;
      record_.transfers.push_back(
          {from, to, sent->step, start, std::max(start, meets ? in.end : out.end)});

      // The chunk sends its output before its backward runs, and a gradient after that.
      const auto backward = backward_begins_.find(place_of(from, *sent));
      const bool forward = backward == backward_begins_.end() || out.begin < backward->second;
      record_.hand_overs.push_back(forward ? dpp::HandOver{from, sent->chunk, to, received->chunk}
                                           : dpp::HandOver{to, received->chunk, from, sent->chunk});
    }
    std::sort(record_.hand_overs.begin(), record_.hand_overs.end());
    record_.hand_overs.erase(std::unique(record_.hand_overs.begin(), record_.hand_overs.end()),
                             record_.hand_overs.end());
  }

  const scan::Trace& t_;
  scan::Matches matches_;
  scan::Alignment alignment_;
  std::vector<int> stage_rank_;  // by index into Trace::ranks; -1: of another pipeline
  std::map<Place, std::int64_t> backward_begins_;
  std::map<int, int> ranks_in_;  // iterations
  dpp::PipelineRecord record_;
};

}  // namespace detail

/// Throws Error(bad_input) where the trace says of no pipeline, or of a part of one.
inline mega::dpp::PipelineRecord recorded_pipeline(const mega::scan::Trace& trace) {
  return detail::RecordedPipeline(trace).read();
}

}  // namespace plan
