/// @file  What chaos tests are made of: any policy's orders as one type, channels with random
/// delays, a stage whose tensor ranks meet in every call.
#pragma once
#include "residual_stage.hpp"
#include "run_residual.hpp"
#include <mega/comm/thread.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/rng.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/placement.hpp>
#include <mega/dpp/schedule.hpp>
#include <mega/dpp/traversal.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace mega_test {

/// Orders as values, with the placement they were made for: one type for every policy, so that a
/// test compiles one trainer.
struct GivenOrders {
  static constexpr std::string_view name = "given";
  std::vector<std::vector<mega::dpp::Action>> lists;
  mega::dpp::TablePlacement table;

  [[nodiscard]] mega::dpp::TablePlacement placement() const { return table; }
  [[nodiscard]] std::vector<std::vector<mega::dpp::Action>> orders(int, int, int) const {
    return lists;
  }
  [[nodiscard]] int length(int, int, int) const {
    std::size_t longest = 0;
    for (const auto& list : lists) longest = std::max(longest, list.size());
    return static_cast<int>(longest);
  }
  int order(int rank, int, int, int, mega::dpp::ActionSpan out) const {
    const auto& list = lists[static_cast<std::size_t>(rank)];
    const int count = static_cast<int>(list.size());
    std::copy(list.begin(), list.end(), out.first(count).begin());
    return count;
  }
};
static_assert(mega::dpp::orders_all_ranks<GivenOrders>);

[[nodiscard]] inline GivenOrders given(const mega::dpp::Schedule& schedule) {
  const mega::dpp::ScheduleView s = schedule;
  GivenOrders out;
  std::vector<int> ranks;
  for (int stage = 0; stage < s.stages(); ++stage) ranks.push_back(s.rank_of(stage));
  out.table = mega::dpp::TablePlacement(ranks);
  for (int r = 0; r < s.p; ++r) out.lists.emplace_back(s.of_rank(r).begin(), s.of_rank(r).end());
  return out;
}

/// Delays of the messages of a rank; none where `max_us` is 0.
struct Delays {
  std::uint64_t seed = 0;
  int max_us = 0;
};
inline thread_local Delays delays_of_this_rank;

/// ThreadComm whose messages leave late, one in two.
class DelayedComm : public mega::comm::ThreadComm {
 public:
  class sender {
   public:
    sender(mega::comm::ChannelSender inner, std::uint32_t id)
        : inner_(std::move(inner)), id_(id), delays_(delays_of_this_rank) {}

    template <class S>
    void send(S& stream, Vector<const std::byte> message) {
      if (delays_.max_us > 0) {
        const std::uint32_t bits =
            mega::RandomKey{delays_.seed, 0, id_, mega::RandomUse::test}.bits(sent_++);
        const int us = static_cast<int>((bits >> 1) % static_cast<std::uint32_t>(delays_.max_us));
        if (bits % 2 == 0)
          stream.run([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
      }
      inner_.send(stream, message);
    }
    [[nodiscard]] bool can_send() const { return inner_.can_send(); }

   private:
    mega::comm::ChannelSender inner_;
    std::uint32_t id_;
    Delays delays_;
    Index sent_ = 0;
  };

  explicit DelayedComm(mega::comm::ThreadComm&& base) : ThreadComm(std::move(base)) {}
  [[nodiscard]] DelayedComm split(int color, int key) {
    return DelayedComm(ThreadComm::split(color, key));
  }
  [[nodiscard]] sender open_sender(int peer, std::uint32_t id) {
    return {ThreadComm::open_sender(peer, id), id};
  }
};

/// Tensor ranks hold the same values and meet in every call: the largest of equals changes no bit,
/// and shows it where one of them does something else than the others.
template <class Comm>
class MeetingStage : public ResidualStage<false> {
  using Base = ResidualStage<false>;

 public:
  using saved_type = Base::saved_type;

  MeetingStage(ResidualShape shape, mega::StagePosition at, Comm& tensor)
      : Base(shape, at), tensor_(&tensor) {}

  void forward(auto& ctx, Matrix<const float> in, Matrix<float> out, saved_type& saved) {
    Base::forward(ctx, in, out, saved);
    meet(ctx, out);
  }
  void backward_input(auto& ctx, Matrix<const float> dout, Matrix<float> din, saved_type& saved) {
    Base::backward_input(ctx, dout, din, saved);
    if (!din.empty()) meet(ctx, din);
  }

 private:
  void meet(auto& ctx, Matrix<float> values) {
    tensor_->all_reduce(ctx.stream, Vector<float>(values.data(), values.size()),
                        mega::comm::Reduce::max);
  }

  Comm* tensor_;
};

template <class Device, class Dispatch>
struct ChaosPlan : mega::DefaultPlan {
  using communicator = DelayedComm;
  using stage = MeetingStage<DelayedComm>;
  using device = Device;
  using traversal = GivenOrders;
  using dispatch = Dispatch;
};

}  // namespace mega_test
