/// @file  A second judge of lowered schedules, to hold the verifier against: ranks, messages,
/// out-buffers and slots as objects, moved one small step at a time in random order. It shares with
/// the verifier only the schedule and the words that say which transport is meant.
#pragma once
#include <mega/dpp/action.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/verifier.hpp>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace mega_test {

enum class Outcome { valid, invalid, deadlock };

/// What one rank's list does to the data that it holds, recvs delivering whatever is asked for.
class RankLedger {
 public:
  RankLedger(const mega::dpp::ScheduleView& schedule, int rank) : s_(schedule), rank_(rank) {}

  /// True when every action finds its inputs, makes nothing twice, and all is there in the end.
  bool balances() {
    const auto list = s_.of_rank(rank_);
    for (const auto& a : list) {
      tied_ = tied_ || a.kind == mega::dpp::ActionKind::tied_reduce;
    }
    for (std::size_t i = 0; i < list.size();) {
      const std::size_t count = list[i].with_next ? 2 : 1;
      if (i + count > list.size()) return false;
      if (count == 2 && !may_run_side_by_side(list[i], list[i + 1])) return false;
      for (std::size_t k = 0; k < count; ++k) {
        if (!known(list[i + k]) || !inputs_exist(list[i + k])) return false;
      }
      for (std::size_t k = 0; k < count; ++k) {
        if (!produce(list[i + k])) return false;
      }
      i += count;
    }
    return all_made();
  }
  [[nodiscard]] bool ties() const { return tied_; }

 private:
  enum Thing {
    input,
    output,
    output_sent,
    gradient_in,
    input_half,
    gradient_out,
    gradient_sent,
    weight_gradient,
    reduced,
    tied_sum
  };
  using Key = std::pair<Thing, std::pair<int, int>>;  // thing, stage, micro-batch

  static bool may_run_side_by_side(const mega::dpp::Action& a, const mega::dpp::Action& b) {
    using enum mega::dpp::ActionKind;
    const auto is_backward = [](const auto& x) {
      return x.kind == backward || x.kind == backward_input;
    };
    if (b.with_next) return false;
    if (a.chunk == b.chunk && a.microbatch == b.microbatch) return false;
    return a.kind == forward ? is_backward(b) : b.kind == forward && is_backward(a);
  }

  [[nodiscard]] int last() const { return s_.p * s_.v - 1; }
  [[nodiscard]] bool has(Thing thing, int stage, int microbatch) const {
    return things_.contains({thing, {stage, microbatch}});
  }
  bool make(Thing thing, int stage, int microbatch) {
    return things_.insert({thing, {stage, microbatch}}).second;
  }
  [[nodiscard]] bool has_all_weight_gradients(int stage) const {
    for (int microbatch = 0; microbatch < s_.m; ++microbatch) {
      if (!has(weight_gradient, stage, microbatch)) return false;
    }
    return true;
  }

  [[nodiscard]] bool known(const mega::dpp::Action& a) const {
    using enum mega::dpp::ActionKind;
    if (static_cast<int>(a.kind) > static_cast<int>(tied_reduce)) return false;
    if (a.chunk < 0 || a.chunk >= s_.v) return false;
    if (a.kind == reduce || a.kind == tied_reduce) return a.microbatch == -1;
    return 0 <= a.microbatch && a.microbatch < s_.m;
  }

  [[nodiscard]] bool inputs_exist(const mega::dpp::Action& a) const {
    using enum mega::dpp::ActionKind;
    const int stage = s_.stage(rank_, a.chunk);
    const int mb = a.microbatch;
    switch (a.kind) {
      case recv_forward: return stage != 0;
      case recv_backward: return stage != last();
      case forward: return stage == 0 || has(input, stage, mb);
      case send_forward: return stage != last() && has(output, stage, mb);
      case loss: return stage == last() && has(output, stage, mb);
      case backward:
      case backward_input: return has(output, stage, mb) && has(gradient_in, stage, mb);
      case backward_weight: return has(input_half, stage, mb);
      case send_backward: return stage != 0 && has(gradient_out, stage, mb);
      case reduce:
        if ((stage == 0 || stage == last()) && tied_ && !has(tied_sum, 0, 0)) return false;
        return has_all_weight_gradients(stage);
      case tied_reduce:
        if (stage != 0 && stage != last()) return false;
        for (int chunk = 0; chunk < s_.v; ++chunk) {
          const int held = s_.stage(rank_, chunk);
          if ((held == 0 || held == last()) && !has_all_weight_gradients(held)) return false;
        }
        return true;
    }
    return false;
  }

  /// Adds up in ascending order: a micro-batch comes right after its predecessor.
  bool follows(Thing thing, int stage, int microbatch) {
    if (microbatch > 0 && !has(thing, stage, microbatch - 1)) return false;
    return make(thing, stage, microbatch);
  }

  bool produce(const mega::dpp::Action& a) {
    using enum mega::dpp::ActionKind;
    const int stage = s_.stage(rank_, a.chunk);
    const int mb = a.microbatch;
    switch (a.kind) {
      case recv_forward: return make(input, stage, mb);
      case recv_backward:
      case loss: return make(gradient_in, stage, mb);
      case forward: return follows(output, stage, mb);
      case send_forward: return make(output_sent, stage, mb);
      case backward: return follows(gradient_out, stage, mb) && follows(weight_gradient, stage, mb);
      case backward_input: return follows(gradient_out, stage, mb) && make(input_half, stage, mb);
      case backward_weight: return follows(weight_gradient, stage, mb);
      case send_backward: return make(gradient_sent, stage, mb);
      case reduce: return make(reduced, stage, 0);
      case tied_reduce: return make(tied_sum, 0, 0);
    }
    return false;
  }

  [[nodiscard]] bool all_made() const {
    for (int chunk = 0; chunk < s_.v; ++chunk) {
      const int stage = s_.stage(rank_, chunk);
      if (!has(reduced, stage, 0)) return false;
      for (int mb = 0; mb < s_.m; ++mb) {
        if (!has(weight_gradient, stage, mb)) return false;
        if (stage != last() && !has(output_sent, stage, mb)) return false;
        if (stage != 0 && !has(gradient_sent, stage, mb)) return false;
      }
    }
    return true;
  }

  mega::dpp::ScheduleView s_;
  int rank_;
  bool tied_ = false;
  std::set<Key> things_;
};

/// Runs the lists with explicit messages. @pre every rank's ledger balances
class ChannelModel {
 public:
  ChannelModel(const mega::dpp::ScheduleView& schedule, std::vector<int> slots,
               mega::dpp::Transport transport, std::mt19937& random)
      : s_(schedule), slots_(std::move(slots)), transport_(transport), random_(random) {
    for (int rank = 0; rank < s_.p; ++rank) ranks_.push_back({blocks_of(rank), 0, {}});
    occupants_.resize(static_cast<std::size_t>(s_.p * s_.v));
  }

  /// Every mailbox gets its messages in the order in which they are taken out of it.
  bool mail_is_in_order() {
    std::map<Mailbox, std::deque<Message>> mail;
    for (const bool taking : {false, true}) {
      for (int rank = 0; rank < s_.p; ++rank) {
        for (const auto& a : s_.of_rank(rank)) {
          if (!travels(a) || takes(a) != taking) continue;
          const Message message = message_of(rank, a);
          auto& box = mail[mailbox_of(message)];
          if (!taking) {
            box.push_back(message);
          } else if (box.empty() || box.front() != message) {
            return false;
          } else {
            box.pop_front();
          }
        }
      }
    }
    return std::all_of(mail.begin(), mail.end(),
                       [](const auto& box) { return box.second.empty(); });
  }

  bool runs_to_the_end() {
    std::vector<int> turn(ranks_.size());
    std::iota(turn.begin(), turn.end(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      std::shuffle(turn.begin(), turn.end(), random_);
      for (const int rank : turn) {
        // Some ranks go far ahead of the others, some creep.
        for (auto budget = random_() % 7 + 1; budget > 0 && step(rank); --budget) moved = true;
      }
    }
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& r) { return r.block == r.blocks.size(); });
  }

 private:
  struct Message {
    int from_stage = 0;
    int to_stage = 0;
    int microbatch = 0;
    friend auto operator<=>(const Message&, const Message&) = default;
  };
  using Mailbox = std::pair<int, std::pair<int, int>>;

  /// Actions that start together, in the order of the list.
  using Block = std::vector<mega::dpp::Action>;
  struct Rank {
    std::vector<Block> blocks;
    std::size_t block = 0;
    std::vector<int> state;  // of the block's actions: 0 waiting, 1 started, 2 done
  };

  static bool takes(const mega::dpp::Action& a) {
    return a.kind == mega::dpp::ActionKind::recv_forward ||
           a.kind == mega::dpp::ActionKind::recv_backward;
  }
  static bool gives(const mega::dpp::Action& a) {
    return a.kind == mega::dpp::ActionKind::send_forward ||
           a.kind == mega::dpp::ActionKind::send_backward;
  }
  static bool travels(const mega::dpp::Action& a) { return takes(a) || gives(a); }

  Message message_of(int rank, const mega::dpp::Action& a) const {
    using enum mega::dpp::ActionKind;
    const int stage = s_.stage(rank, a.chunk);
    if (a.kind == send_forward) return {stage, stage + 1, a.microbatch};
    if (a.kind == send_backward) return {stage, stage - 1, a.microbatch};
    if (a.kind == recv_forward) return {stage - 1, stage, a.microbatch};
    return {stage + 1, stage, a.microbatch};
  }
  bool changes_rank(const Message& m) const {
    return s_.rank_of(m.from_stage) != s_.rank_of(m.to_stage);
  }
  bool is(mega::dpp::Transport::Kind kind) const { return transport_.kind == kind; }

  Mailbox mailbox_of(const Message& m) const {
    if (is(mega::dpp::Transport::Kind::blocking) && changes_rank(m)) {
      return {1, {s_.rank_of(m.from_stage), s_.rank_of(m.to_stage)}};
    }
    return {0, {m.from_stage, m.to_stage}};
  }

  std::vector<Block> blocks_of(int rank) const {
    std::vector<Block> blocks;
    bool pair_open = false;
    bool group_open = false;
    for (const auto& a : s_.of_rank(rank)) {
      const bool groups = is(mega::dpp::Transport::Kind::blocking) && travels(a) &&
                          changes_rank(message_of(rank, a));
      if (!pair_open && !(groups && group_open)) blocks.emplace_back();
      blocks.back().push_back(a);
      pair_open = !pair_open && a.with_next;
      group_open = groups;
    }
    return blocks;
  }

  bool room_for_one(int stage) const {
    if (slots_.empty()) return true;
    for (int place = 0; place < s_.p * s_.v; ++place) {
      if (s_.stage_of[static_cast<std::size_t>(place)] != stage) continue;
      return static_cast<int>(occupants_[static_cast<std::size_t>(stage)].size()) <
             slots_[static_cast<std::size_t>(place)];
    }
    return false;
  }

  /// The message that a compute action makes, if it leaves its rank.
  std::vector<Message> made_by(int rank, const mega::dpp::Action& a) const {
    using enum mega::dpp::ActionKind;
    const int stage = s_.stage(rank, a.chunk);
    std::vector<Message> made;
    if (a.kind == forward && stage + 1 < s_.p * s_.v)
      made.push_back({stage, stage + 1, a.microbatch});
    if ((a.kind == backward || a.kind == backward_input) && stage > 0) {
      made.push_back({stage, stage - 1, a.microbatch});
    }
    if (!made.empty() && !changes_rank(made.front())) made.clear();
    return made;
  }

  /// The stage whose slot the action's micro-batch moves into when the action starts, or -1.
  int moves_into(int rank, const mega::dpp::Action& a) const {
    using enum mega::dpp::ActionKind;
    const int stage = s_.stage(rank, a.chunk);
    if (a.kind == forward && stage == 0) return 0;
    if (is(mega::dpp::Transport::Kind::slots)) return a.kind == send_forward ? stage + 1 : -1;
    return a.kind == recv_forward ? stage : -1;
  }

  bool start(int rank, const mega::dpp::Action& a) {
    const int stage = moves_into(rank, a);
    if (stage >= 0 && !room_for_one(stage)) return false;
    const auto made = made_by(rank, a);
    if (is(mega::dpp::Transport::Kind::rendezvous) && transport_.buffers > 0 && !made.empty()) {
      auto& held = out_buffers_[{made.front().from_stage, made.front().to_stage}];
      if (static_cast<int>(held.size()) >= transport_.buffers) return false;
      held.insert(made.front().microbatch);
    }
    if (stage >= 0) occupants_[static_cast<std::size_t>(stage)].insert(a.microbatch);
    if (gives(a)) offered_.insert(message_of(rank, a));
    if (takes(a)) wanted_.insert(message_of(rank, a));
    if (a.kind == mega::dpp::ActionKind::tied_reduce) at_tied_.insert(rank);
    return true;
  }

  bool finish(int rank, const mega::dpp::Action& a) {
    using enum mega::dpp::ActionKind;
    if (takes(a)) {
      const Message message = message_of(rank, a);
      if (!offered_.contains(message)) return false;
      out_buffers_[{message.from_stage, message.to_stage}].erase(message.microbatch);
    }
    if (gives(a)) {
      const Message message = message_of(rank, a);
      const bool beside = is(mega::dpp::Transport::Kind::slots) || transport_.buffers > 0;
      if (!beside && changes_rank(message) && !wanted_.contains(message)) return false;
    }
    if (a.kind == tied_reduce) {
      const int ends[] = {s_.rank_of(0), s_.rank_of(s_.p * s_.v - 1)};
      for (const int end : ends) {
        if (!at_tied_.contains(end)) return false;
      }
    }
    if (a.kind == backward || a.kind == backward_weight) {
      const int stage = s_.stage(rank, a.chunk);
      occupants_[static_cast<std::size_t>(stage)].erase(a.microbatch);
    }
    return true;
  }

  /// One small step of a rank: starts the next action of its block, or finishes any started one.
  bool step(int rank) {
    Rank& r = ranks_[static_cast<std::size_t>(rank)];
    if (r.block == r.blocks.size()) return false;
    const Block& block = r.blocks[r.block];
    r.state.resize(block.size(), 0);
    for (std::size_t i = 0; i < block.size(); ++i) {
      if (r.state[i] != 0) continue;
      if (!start(rank, block[i])) return false;
      r.state[i] = 1;
      return true;
    }
    const std::size_t from = random_() % block.size();
    for (std::size_t k = 0; k < block.size(); ++k) {
      const std::size_t i = (from + k) % block.size();
      if (r.state[i] != 1 || !finish(rank, block[i])) continue;
      r.state[i] = 2;
      if (std::all_of(r.state.begin(), r.state.end(), [](int s) { return s == 2; })) {
        ++r.block;
        r.state.clear();
      }
      return true;
    }
    return false;
  }

  mega::dpp::ScheduleView s_;
  std::vector<int> slots_;
  mega::dpp::Transport transport_;
  std::mt19937& random_;
  std::vector<Rank> ranks_;
  std::vector<std::set<int>> occupants_;                      // by stage
  std::map<std::pair<int, int>, std::set<int>> out_buffers_;  // by stages
  std::set<Message> offered_, wanted_;
  std::set<int> at_tied_;
};

/// True when every rank's list is complete, in order, and finds what it needs.
inline bool lists_are_sound(const mega::dpp::ScheduleView& schedule) {
  std::vector<bool> ties;
  for (int rank = 0; rank < schedule.p; ++rank) {
    RankLedger ledger(schedule, rank);
    if (!ledger.balances()) return false;
    ties.push_back(ledger.ties());
  }
  const int last = schedule.p * schedule.v - 1;
  return ties[static_cast<std::size_t>(schedule.rank_of(0))] ==
         ties[static_cast<std::size_t>(schedule.rank_of(last))];
}

/// @pre lists_are_sound(schedule)
inline Outcome run_channels(const mega::dpp::ScheduleView& schedule, const std::vector<int>& slots,
                            mega::dpp::Transport transport, std::mt19937& random) {
  ChannelModel model(schedule, slots, transport, random);
  if (!model.mail_is_in_order()) return Outcome::invalid;
  return model.runs_to_the_end() ? Outcome::valid : Outcome::deadlock;
}

}  // namespace mega_test
