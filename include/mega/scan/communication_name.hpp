/// @file  What the names that frameworks give to communications mean: "nccl:_all_gather_base",
/// "AllReduce", "grads-reduce-scatter", "forward-send".
#pragma once
#include <mega/scan/trace.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

namespace mega::inline v0::scan {

namespace detail {

/// True if `word` stands in `name`, where case, '_', '-' and ' ' do not count. `word` is lower case
/// and has none of these.
[[nodiscard]] constexpr bool has_word(std::string_view name, std::string_view word) noexcept {
  const auto plain = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  const auto passed_over = [](char c) { return c == '_' || c == '-' || c == ' '; };
  for (std::size_t start = 0; start < name.size(); ++start) {
    std::size_t i = start;
    std::size_t k = 0;
    while (i < name.size() && k < word.size()) {
      if (plain(name[i]) == word[k]) {
        ++k;
      } else if (k == 0 || !passed_over(name[i])) {
        break;
      }
      ++i;
    }
    if (k == word.size()) return true;
  }
  return false;
}

}  // namespace detail

/// The operation that a free name names; unknown where it names none.
[[nodiscard]] constexpr CommunicationOp communication_of(std::string_view name) noexcept {
  using enum CommunicationOp;
  // Longer words first: "allreduce" holds "reduce".
  constexpr std::array<std::pair<std::string_view, CommunicationOp>, 15> words{
      {{"reducescatter", reduce_scatter},
       {"allreduce", all_reduce},
       {"allgather", all_gather},
       {"alltoall", all_to_all},
       {"sendrecv", send_recv},
       {"coalesced", send_recv},
       {"broadcast", broadcast},
       {"barrier", barrier},
       {"gather", gather},
       {"scatter", scatter},
       {"reduce", reduce},
       {"bcast", broadcast},
       {"receive", recv},
       {"recv", recv},
       {"send", send}}};
  for (const auto& [word, op] : words) {
    if (detail::has_word(name, word)) return op;
  }
  return unknown;
}

/// Bytes of an element of a dtype as PyTorch and NCCL spell it; 0 where the name is none.
[[nodiscard]] constexpr std::int64_t element_bytes_of(std::string_view dtype) noexcept {
  constexpr std::array<std::pair<std::string_view, std::int64_t>, 16> sizes{{{"bfloat16", 2},
                                                                             {"float16", 2},
                                                                             {"float64", 8},
                                                                             {"float32", 4},
                                                                             {"float8", 1},
                                                                             {"double", 8},
                                                                             {"half", 2},
                                                                             {"float", 4},
                                                                             {"int64", 8},
                                                                             {"int32", 4},
                                                                             {"int8", 1},
                                                                             {"long", 8},
                                                                             {"short", 2},
                                                                             {"int", 4},
                                                                             {"byte", 1},
                                                                             {"bool", 1}}};
  for (const auto& [name, bytes] : sizes) {
    if (detail::has_word(dtype, name)) return bytes;
  }
  return 0;
}

static_assert(communication_of("nccl:_reduce_scatter_base") == CommunicationOp::reduce_scatter);
static_assert(communication_of("nccl:recv 0<-8") == CommunicationOp::recv);
static_assert(element_bytes_of("BFloat16") == 2 && element_bytes_of("Char") == 0);

}  // namespace mega::inline v0::scan
