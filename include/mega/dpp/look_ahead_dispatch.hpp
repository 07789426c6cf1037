/// @file  Dispatch policies that choose: LookAhead<L> and BoundedLookAhead take a later action
/// while the next one of their list waits, and Replay<L> performs an order that they once took.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/device.hpp>
#include <mega/core/error.hpp>
#include <mega/core/mesh.hpp>
#include <mega/core/view.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/dispatch.hpp>
#include <mega/dpp/look_ahead.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::dpp {

namespace detail {

/// A lowered list cut where a rank may choose. Portions go by the position of their compute action
/// among the list's compute actions; a fused pair is one portion, that of its first half.
class Portions {
 public:
  struct Collective {
    int behind = 0;  ///< compute actions that stand before it
    Action action;
  };

  explicit Portions(std::span<const Action> list) {
    std::size_t begin = 0, owner = 0;
    bool paired = false;
    for (const Action& a : list) {
      if (a.microbatch == all_microbatches) {
        collectives_.push_back({static_cast<int>(ranges_.size()), a});
        continue;
      }
      actions_.push_back(a);
      const bool computes = is_compute(a.kind);
      if (computes) {
        if (!paired) owner = ranges_.size();
        ranges_.push_back(paired ? Range{} : Range{begin, begin});
        paired = a.with_next;
      }
      const bool sends = a.kind == ActionKind::send_forward || a.kind == ActionKind::send_backward;
      if (computes || sends) ranges_[owner].end = begin = actions_.size();
    }
  }

  [[nodiscard]] std::span<const Action> operator[](int position) const {
    const Range& at = ranges_[static_cast<std::size_t>(position)];
    return std::span<const Action>(actions_).subspan(at.begin, at.end - at.begin);
  }
  [[nodiscard]] const std::vector<Collective>& collectives() const noexcept { return collectives_; }

 private:
  struct Range {
    std::size_t begin = 0, end = 0;
  };
  std::vector<Action> actions_;  // without the collectives
  std::vector<Range> ranges_;    // by position
  std::vector<Collective> collectives_;
};

/// A step in an order that is decided portion by portion under the rule of LookAheadOrder.
/// Allocates at construction only.
class DecidedOrder {
 public:
  DecidedOrder(std::span<const Action> list, int limit) : portions_(list), rule_(list, limit) {
    executed_.reserve(static_cast<std::size_t>(rule_.size()));
  }

  [[nodiscard]] const LookAheadOrder& rule() const noexcept { return rule_; }
  /// Compute actions of the last step, in the order in which they were queued.
  [[nodiscard]] std::span<const Action> executed() const noexcept { return executed_; }

  /// @param decide  decide() gives the position that the rule allows and that is to be next
  template <class Step, class Decide>
  void run(Step& step, const Decide& decide) {
    rule_.restart();
    executed_.clear();
    std::size_t collective = 0;
    while (!rule_.at_end()) {
      const int position = decide();
      for (const Action& a : portions_[position]) {
        step.perform(a);
        if (is_compute(a.kind)) executed_.push_back(a);
      }
      rule_.done(position);
      const int done = rule_.at_end() ? rule_.size() : rule_.statically_next();
      const auto& all = portions_.collectives();
      for (; collective < all.size() && all[collective].behind <= done; ++collective)
        step.perform(all[collective].action);
    }
  }

 private:
  Portions portions_;
  LookAheadOrder rule_;
  std::vector<Action> executed_;
};

/// Keeps the host at most one action ahead of the one that runs: who decides long before the device
/// gets there decides on stale news. Costs nothing on a device that runs work as it is queued.
template <device_policy Device>
class Pace {
 public:
  explicit Pace(Device& device)
      : stream_(device.make_stream("pace")), done_{device.make_event(), device.make_event()} {}

  /// Returns when all but the last action marked are done.
  void hold() {
    stream_.wait(done_[next_]);
    stream_.synchronize();
  }
  void mark(typename Device::stream_type& compute) {
    compute.record(done_[next_]);
    next_ = 1 - next_;
  }

 private:
  typename Device::stream_type stream_;
  std::array<typename Device::stream_type::event_type, 2> done_;
  std::size_t next_ = 0;  // the older of the two
};

/// Device memory in which a rank of the mesh learns what its leader decides.
[[nodiscard]] constexpr std::size_t decision_bytes(const Mesh& mesh) noexcept {
  return mesh.tensor * mesh.context > 1 ? sizeof(std::int32_t) : 0;
}

/// The ranks that compute one stage together, tensor and context ranks, do what the first of them
/// decides. It says so on a communicator and a stream of their own, apart from the stages'
/// collectives. One rank alone has neither.
template <device_policy Device, class Comm>
class Leader {
 public:
  /// Collective over `world`.
  Leader(Device& device, Comm& world, const Mesh& mesh) {
    if (decision_bytes(mesh) == 0) return;
    const int first = mesh.group(mesh.group(world.rank(), Axis::tensor), Axis::context);
    group_.emplace(Group{device.allocate(decision_bytes(mesh)), world.split(first, world.rank()),
                         device.make_stream("decision")});
    // Whoever decides late may be doing something else for the first time.
    if constexpr (comm::has_attended_calls<Comm>) group_->comm.attend(true);
  }

  /// What the leader's decide() gives, on all ranks of the group; the others' is not called.
  template <class Decide>
  [[nodiscard]] int decide(const Decide& decide) {
    if (!group_) return decide();
    static_assert(comm::has_broadcast<Comm, typename Device::stream_type, std::int32_t>,
                  "mega: look-ahead tells tensor ranks its decisions; the communicator needs "
                  "broadcast(stream, Vector<std::int32_t>, root)");
    std::int32_t choice = group_->comm.rank() == 0 ? decide() : 0;
    const Vector<std::int32_t> shared(reinterpret_cast<std::int32_t*>(group_->memory.data()), 1);
    upload(group_->stream, shared, Vector<const std::int32_t>(&choice, 1));
    group_->comm.broadcast(group_->stream, shared, 0);
    download(group_->stream, Vector<std::int32_t>(&choice, 1), Vector<const std::int32_t>(shared));
    group_->stream.synchronize();
    return choice;
  }

 private:
  struct Group {
    typename Device::memory_type memory;
    Comm comm;
    typename Device::stream_type stream;
  };
  std::optional<Group> group_;
};

}  // namespace detail

namespace detail {

/// Chooses by the rule of LookAheadOrder, and tells the ranks of the stage.
template <device_policy Device, class Comm>
class LookAheadDispatcher {
  static_assert(comm::has_channel_queries<Comm, typename Device::stream_type>,
                "mega: look-ahead asks channels whether a message is here; this communicator "
                "lacks can_send(), ready() or poll(), so use StaticDispatch");

 public:
  /// Collective over `world`, which outlives the dispatcher. @param list  of this rank, lowered
  LookAheadDispatcher(int ahead, Device& device, Comm& world, const Mesh& mesh,
                      std::span<const Action> list)
      : world_(world), order_(list, ahead), pace_(device), leader_(device, world, mesh) {}

  [[nodiscard]] std::span<const Action> executed() const noexcept { return order_.executed(); }

  void reorder(std::span<const Action> list) { order_ = DecidedOrder(list, order_.rule().limit()); }

  template <class Step>
  void run(Step& step) {
    order_.run(step, [&] {
      pace_.mark(step.compute());
      pace_.hold();
      return leader_.decide([&] { return choose(step); });
    });
  }

 private:
  template <class Step>
  int choose(Step& step) {
    const LookAheadOrder& rule = order_.rule();
    const auto look = [&] {
      return rule.next([&](const Action& a, bool ahead) {
        return step.has_arrived(a) && (!ahead || step.can_leave(a));
      });
    };
    std::optional<int> chosen = look();
    if (chosen) return *chosen;
    const Action& missing = rule[rule.statically_next()];
    const auto span = step.waiting_for(missing);
    int asked = 0;
    world_.poll(
        [&] {
          // Nothing has come for long: if own work has failed, nothing ever will.
          if (++asked == patience) step.compute().synchronize();
          chosen = look();
          return chosen.has_value();
        },
        [&](const std::string& when) {
          return sentence("rank ", world_.rank(), ": the input of ", to_string(missing),
                          " did not arrive ", when);
        });
    return *chosen;
  }

  static constexpr int patience = 2500;

  Comm& world_;
  DecidedOrder order_;
  Pace<Device> pace_;
  Leader<Device, Comm> leader_;
};

}  // namespace detail

/// The list in its order as long as its next action can begin; while that one waits for its input,
/// a later one whose input is here, by the rule of LookAheadOrder. At most L forwards run out of
/// turn, so a rank holds at most L activations more than in the static order, and every chunk has L
/// slots more. Results are those of the static order, bit for bit: what changes places touches
/// different accumulators.
/// Worth its memory where transfers or ranks are slow now and then; where they are not, nothing is
/// ever overtaken. L = 1 or 2 hides single late messages; more helps bursts.
/// @cost  the host follows the device: it waits for the action before the last one queued. One
///        broadcast of 4 bytes an action among the ranks of a stage, none where that is one rank
template <int L>
struct LookAhead {
  static_assert(L >= 1, "mega: LookAhead<L> needs L of at least 1; L = 0 is StaticDispatch");
  static constexpr std::string_view name = "look-ahead";
  static constexpr int ahead = L;
  static constexpr bool queries_channels = true;
  static constexpr std::size_t required_bytes(const Mesh& mesh) noexcept {
    return detail::decision_bytes(mesh);
  }

  template <device_policy Device, class Comm>
  class dispatcher : public detail::LookAheadDispatcher<Device, Comm> {
   public:
    dispatcher(LookAhead, Device& device, Comm& world, const Mesh& mesh,
               std::span<const Action> list)
        : detail::LookAheadDispatcher<Device, Comm>(L, device, world, mesh, list) {}

    template <class Step>
    void run(std::span<const Action> /*list*/, Step& step) {
      detail::LookAheadDispatcher<Device, Comm>::run(step);
    }
  };
};

/// Look-ahead whose L is a value, equal on all ranks: `.dispatch = {2}` in the trainer's options. 0
/// is the static order, and costs what StaticDispatch does.
struct BoundedLookAhead {
  static constexpr std::string_view name = "bounded-look-ahead";
  static constexpr bool queries_channels = true;
  int ahead = 0;

  [[nodiscard]] constexpr std::size_t required_bytes(const Mesh& mesh) const noexcept {
    return ahead > 0 ? detail::decision_bytes(mesh) : 0;
  }

  template <device_policy Device, class Comm>
  class dispatcher {
   public:
    /// Collective over `world` unless L is 0. Throws Error(usage) if it is negative.
    dispatcher(BoundedLookAhead policy, Device& device, Comm& world, const Mesh& mesh,
               std::span<const Action> list) {
      if (policy.ahead != 0) chooser_.emplace(policy.ahead, device, world, mesh, list);
    }

    /// Compute actions of the last step, in the order in which they were queued; none if L is 0.
    [[nodiscard]] std::span<const Action> executed() const noexcept {
      return chooser_ ? chooser_->executed() : std::span<const Action>();
    }

    void reorder(std::span<const Action> list) {
      if (chooser_) chooser_->reorder(list);
    }

    template <class Step>
    void run(std::span<const Action> list, Step& step) {
      if (chooser_) return chooser_->run(step);
      for (const Action& a : list) step.perform(a);
    }

   private:
    std::optional<detail::LookAheadDispatcher<Device, Comm>> chooser_;
  };
};

/// An order that LookAhead<L> has executed, once more: the same actions in the same order on every
/// rank, whatever arrives when. For finding out what happened in a step, and for timing without the
/// decisions.
template <int L>
struct Replay {
  static constexpr std::string_view name = "replay";
  static constexpr int ahead = L;
  static constexpr bool queries_channels = false;
  static constexpr std::size_t required_bytes(const Mesh&) noexcept { return 0; }

  template <device_policy Device, class Comm>
  class dispatcher {
   public:
    dispatcher(Replay, Device&, Comm&, const Mesh&, std::span<const Action> list)
        : order_(list, L) {}

    /// For the steps from now on: what executed() gave on this rank, with this list. The static
    /// order until then.
    /// Throws Error(usage) if the length is wrong; the step, where the rule allows no such order.
    void follow(std::span<const Action> recorded) {
      const auto expected = static_cast<std::size_t>(order_.rule().size());
      expects(recorded.size() == expected, ErrorCode::usage, [&] {
        return sentence("the order to replay has ", recorded.size(),
                        " compute actions but the rank's list has ", expected);
      });
      recorded_.assign(recorded.begin(), recorded.end());
    }

    [[nodiscard]] std::span<const Action> executed() const noexcept { return order_.executed(); }

    template <class Step>
    void run(std::span<const Action> /*list*/, Step& step) {
      order_.run(step, [&] { return next(); });
    }

   private:
    int next() const {
      const LookAheadOrder& rule = order_.rule();
      if (recorded_.empty()) return rule.statically_next();
      const std::size_t place = order_.executed().size();
      const Action& wanted = recorded_[place];
      const bool paired = wanted.with_next && place + 1 < recorded_.size();
      const auto chosen = rule.next([&](const Action& a, bool) {
        return a == wanted || (paired && a == recorded_[place + 1]);
      });
      expects(chosen.has_value() && rule[*chosen] == wanted, ErrorCode::usage, [&] {
        return sentence("place ", place, " of the order to replay is ", to_string(wanted),
                        ", which look-ahead of ", L, " forwards would not run there");
      });
      return *chosen;
    }

    detail::DecidedOrder order_;
    std::vector<Action> recorded_;
  };
};

static_assert(dispatch_policy<LookAhead<1>> && dispatch_policy<BoundedLookAhead> &&
              dispatch_policy<Replay<1>>);

}  // namespace mega::inline v0::dpp
