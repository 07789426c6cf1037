/// @file  What a collective call is: ranks compare their calls, and messages name them.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {

enum class Operation : std::uint8_t {
  barrier,
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  split,
};

[[nodiscard]] constexpr std::string_view to_string(Operation operation) noexcept {
  switch (operation) {
    case Operation::barrier: return "barrier";
    case Operation::all_reduce: return "all_reduce";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::all_gather: return "all_gather";
    case Operation::broadcast: return "broadcast";
    case Operation::all_to_all: return "all_to_all";
    case Operation::split: return "split";
  }
  return "unknown operation";
}

[[nodiscard]] constexpr std::string_view to_string(Reduce reduce) noexcept {
  return reduce == Reduce::sum ? "sum" : "max";
}

enum class ElementType : std::uint8_t {
  none,
  float32,
  float64,
  bfloat16,
  float16,
  int32,
  int64,
  byte
};

[[nodiscard]] constexpr std::string_view to_string(ElementType type) noexcept {
  switch (type) {
    case ElementType::none: return "nothing";
    case ElementType::float32: return "float";
    case ElementType::float64: return "double";
    case ElementType::bfloat16: return "bfloat16";
    case ElementType::float16: return "float16";
    case ElementType::int32: return "int32";
    case ElementType::int64: return "int64";
    case ElementType::byte: return "byte";
  }
  return "unknown type";
}

template <element T>
[[nodiscard]] constexpr ElementType element_type_of() noexcept {
  if constexpr (std::same_as<T, float>) return ElementType::float32;
  if constexpr (std::same_as<T, double>) return ElementType::float64;
  if constexpr (std::same_as<T, Bfloat16>) return ElementType::bfloat16;
  if constexpr (std::same_as<T, Float16>) return ElementType::float16;
  if constexpr (std::same_as<T, std::int32_t>) return ElementType::int32;
  if constexpr (std::same_as<T, std::int64_t>) return ElementType::int64;
  return ElementType::byte;
}

[[nodiscard]] constexpr Index bytes_of(ElementType type) noexcept {
  switch (type) {
    case ElementType::none: return 0;
    case ElementType::byte: return 1;
    case ElementType::bfloat16:
    case ElementType::float16: return 2;
    case ElementType::float32:
    case ElementType::int32: return 4;
    case ElementType::float64:
    case ElementType::int64: return 8;
  }
  return 0;
}

/// One rank's view of one collective. Ranks of a communicator agree when their calls are equal.
struct Call {
  Operation operation = Operation::barrier;
  ElementType type = ElementType::none;
  Reduce reduce = Reduce::sum;
  int root = 0;                ///< member index within the communicator
  Index count = 0;             ///< elements of this rank's input
  std::uint64_t sequence = 0;  ///< the how-many-eth call on the communicator, from 1

  friend constexpr bool operator==(const Call&, const Call&) = default;
};

/// "rank 3" or "ranks 0,1,2".
[[nodiscard]] inline std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(ranks[i]);
  }
  return text;
}

/// Who a communicator is in messages: its name and the global ranks of its members.
/// The name may be set by any member at any time.
class Roster {
 public:
  Roster(std::vector<int> members, std::string name)
      : members_(std::move(members)), name_(std::move(name)) {}

  [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }
  [[nodiscard]] int global(int member) const { return members_[static_cast<std::size_t>(member)]; }
  [[nodiscard]] std::span<const int> members() const noexcept {
    return {members_.data(), members_.size()};
  }

  [[nodiscard]] std::string name() const {
    std::lock_guard lock(mutex_);
    return name_;
  }
  void set_name(std::string name) {
    std::lock_guard lock(mutex_);
    name_ = std::move(name);
  }

  /// "communicator tp of ranks 0,1".
  [[nodiscard]] std::string text() const {
    return sentence("communicator ", name(), " of ", rank_list(members()));
  }

 private:
  const std::vector<int> members_;
  mutable std::mutex mutex_;
  std::string name_;
};

/// "all_reduce(sum) #17 with 100 float".
[[nodiscard]] inline std::string describe(const Call& call, const Roster& roster) {
  std::string text(to_string(call.operation));
  if (call.operation == Operation::all_reduce || call.operation == Operation::reduce_scatter)
    text += sentence("(", to_string(call.reduce), ")");
  text += sentence(" #", call.sequence);
  if (call.type != ElementType::none)
    text += sentence(" with ", call.count, " ", to_string(call.type));
  if (call.operation == Operation::broadcast)
    text += sentence(" from rank ", roster.global(call.root));
  return text;
}

/// Which ranks called what, one clause for each different call. `calls` is in member order.
[[nodiscard]] inline std::string describe_disagreement(std::span<const Call> calls,
                                                       const Roster& roster) {
  std::string text = roster.text() + " disagrees";
  const char* separator = ": ";
  std::vector<int> told(calls.size(), 0);
  for (std::size_t first = 0; first < calls.size(); ++first) {
    if (told[first] != 0) continue;
    std::vector<int> same;
    for (std::size_t i = first; i < calls.size(); ++i) {
      if (calls[i] != calls[first]) continue;
      told[i] = 1;
      same.push_back(roster.global(static_cast<int>(i)));
    }
    text += sentence(separator, rank_list({same.data(), same.size()}), " called ",
                     describe(calls[first], roster));
    separator = ", ";
  }
  return text;
}

namespace detail {

/// Checks that a buffer of `whole` elements is `members` pieces of `piece` elements.
inline void expect_pieces(Operation operation, Index whole, Index piece, int members) {
  expects(whole == piece * members, ErrorCode::logic, [&] {
    return sentence(to_string(operation), " over ", members, " ranks needs ", piece * members,
                    " elements (", members, " pieces of ", piece, "), not ", whole);
  });
}

/// Checks that an all_to_all has equal buffers that divide among the members.
inline void expect_exchange(Index out, Index in, int members) {
  expects(out == in && in % members == 0, ErrorCode::logic, [&] {
    return sentence("all_to_all over ", members,
                    " ranks needs two buffers of one size divisible by ", members, ", not ", in,
                    " elements in and ", out, " out");
  });
}

inline void expect_member(std::string_view role, int member, int members) {
  expects(member >= 0 && member < members, ErrorCode::logic, [&] {
    return sentence(role, " ", member, " is not a rank of a communicator of ", members,
                    "; valid are 0 to ", members - 1);
  });
}

}  // namespace detail

/// New members and rank after a split, the same on every model.
/// colors and keys are in member order; a negative color gives a communicator of that rank alone.
/// @return  member indices of the new communicator of `member`, ordered by (key, old rank)
[[nodiscard]] inline std::vector<int> split_members(std::span<const int> colors,
                                                    std::span<const int> keys, int member) {
  const auto at = [](std::span<const int> values, int i) {
    return values[static_cast<std::size_t>(i)];
  };
  if (at(colors, member) < 0) return {member};
  std::vector<int> chosen;
  for (int i = 0; i < static_cast<int>(colors.size()); ++i) {
    if (at(colors, i) != at(colors, member)) continue;
    // Insertion keeps equal keys in rank order.
    chosen.push_back(i);
    for (std::size_t k = chosen.size() - 1; k > 0 && at(keys, chosen[k - 1]) > at(keys, i); --k)
      std::swap(chosen[k - 1], chosen[k]);
  }
  return chosen;
}

}  // namespace mega::inline v0::comm
