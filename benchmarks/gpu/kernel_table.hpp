/// @file  What the kernels of some steps come to: by kernel and by what they are for.
#pragma once
#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gpu_step {

/// Something a GPU did: a kernel, a copy, a memset.
struct Activity {
  std::string name;  ///< of a kernel: as the linker spells it
  std::uint64_t start_ns = 0;
  std::uint64_t end_ns = 0;
  std::uint32_t stream = 0;
};

enum class KernelGroup : std::uint8_t {
  products,
  attention,
  elementwise,
  head,
  optimizer,
  copies,
  communication,
  other,
};
inline constexpr std::array<std::string_view, 8> kernel_group_names{
    "matrix products", "attention",      "norms and element-wise", "head and loss",
    "optimizer",       "copies, memset", "communication",          "other",
};

[[nodiscard]] inline std::string demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? std::string(text.get()) : name;
}

namespace detail {

/// A demangled name without return type and parameters; template arguments stay.
[[nodiscard]] inline std::string without_parameters(std::string name) {
  constexpr std::string_view nameless = "(anonymous namespace)::", result = "void ";
  for (std::size_t at; (at = name.find(nameless)) != std::string::npos;)
    name.erase(at, nameless.size());
  if (name.starts_with(result)) name.erase(0, result.size());
  int depth = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

/// Without namespaces and template arguments.
[[nodiscard]] inline std::string_view last_word(std::string_view name) {
  name = name.substr(0, name.find('<'));
  const std::size_t at = name.rfind("::");
  return at == std::string_view::npos ? name : name.substr(at + 2);
}

/// The first template argument; empty where there is none.
[[nodiscard]] inline std::string_view first_argument(std::string_view name) {
  const std::size_t begin = name.find('<');
  if (begin == std::string_view::npos) return {};
  int depth = 0;
  for (std::size_t i = begin + 1; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (depth == 0 && (name[i] == ',' || name[i] == '>'))
      return name.substr(begin + 1, i - begin - 1);
    if (name[i] == '>') --depth;
  }
  return {};
}

[[nodiscard]] inline bool is_mega(std::string_view name) {
  return name.starts_with("mega::");
}

[[nodiscard]] inline bool holds_one_of(std::string_view text,
                                       std::initializer_list<std::string_view> words) {
  return std::any_of(words.begin(), words.end(), [&](std::string_view word) {
    return text.find(word) != std::string_view::npos;
  });
}

}  // namespace detail

/// What a table calls a kernel. Many kernels of the library are a loop that takes its body as first
/// template argument, so that one stays: run_each_row<LayerNormForward>.
[[nodiscard]] inline std::string short_kernel_name(const std::string& name) {
  const std::string whole = detail::without_parameters(demangled(name));
  std::string out(detail::last_word(whole));
  const std::string_view body = detail::first_argument(whole);
  if (detail::is_mega(whole) && detail::is_mega(body))
    out += '<' + std::string(detail::last_word(body)) + '>';
  return out;
}

/// By the words of which a name is made, those of cuBLAS, cuDNN and NCCL included; of the library's
/// own kernels, the types of their parameters count too.
[[nodiscard]] inline KernelGroup kernel_group(const std::string& name) {
  using enum KernelGroup;
  std::string text = demangled(name);
  const bool own = detail::is_mega(detail::without_parameters(text));
  if (!own) text = detail::without_parameters(text);
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const auto has = [&](std::initializer_list<std::string_view> words) {
    return detail::holds_one_of(text, words);
  };
  if (has({"nccl", "peer to peer"}) || (own && has({"memberbuffers"}))) return communication;
  if (text.starts_with("memcpy") || text.starts_with("memset")) return copies;
  if (own) {
    if (has({"rotate", "rope"})) return elementwise;
    if (has({"attend", "attention"})) return attention;
    if (has({"crossentropy", "rowmax", "sumexp", "addrowvalues", "loss"})) return head;
    if (has({"adamw", "square", "clip", "assign", "reciprocal", "addpartials", "addpieces"}))
      return optimizer;
    return elementwise;
  }
  if (has({"sdpa", "flash", "fmha", "dot_do_o", "convert_dq", "cudnn"})) return attention;
  if (has({"nvjet", "gemm", "cutlass", "xmma", "splitk", "cublas", "gemv"})) return products;
  return other;
}

struct KernelRow {
  std::string name;
  KernelGroup group = KernelGroup::other;
  double calls = 0;  ///< a step
  double us = 0;     ///< a step
};

/// All figures are of one step. Groups add up kernels, so that time in which two run counts twice:
/// those of two streams, and one that was launched to begin before the one ahead of it has ended.
/// busy counts it once, so the groups are busy_us + overlap_us.
struct KernelTable {
  std::vector<KernelRow> rows;  ///< the longest first
  std::array<double, kernel_group_names.size()> group_us{};
  double step_us = 0;          ///< from the first activity to the end of the last
  double busy_us = 0;          ///< something runs
  double overlap_us = 0;       ///< and again for each one more that runs at that time
  double compute_busy_us = 0;  ///< something runs on the compute stream
};

/// Length of the union of the activities.
/// @pre  sorted by start
template <class Counts>
[[nodiscard]] double busy_ns(const std::vector<Activity>& activities, const Counts& counts) {
  std::uint64_t until = 0, sum = 0;
  for (const Activity& a : activities) {
    if (!counts(a) || a.end_ns <= until) continue;
    sum += a.end_ns - std::max(a.start_ns, until);
    until = a.end_ns;
  }
  return static_cast<double>(sum);
}

[[nodiscard]] inline KernelTable tabulate(std::vector<Activity> activities,
                                          std::uint32_t compute_stream, int steps) {
  KernelTable table;
  if (activities.empty() || steps < 1) return table;
  std::sort(activities.begin(), activities.end(),
            [](const Activity& a, const Activity& b) { return a.start_ns < b.start_ns; });
  const double us_of_ns = 1e-3 / steps;
  std::map<std::string, KernelRow> by_name;  // as the linker spells it
  std::uint64_t end = 0;
  for (const Activity& a : activities) {
    KernelRow& row = by_name[a.name];
    row.calls += 1.0 / steps;
    row.us += static_cast<double>(a.end_ns - a.start_ns) * us_of_ns;
    end = std::max(end, a.end_ns);
  }
  std::map<std::pair<std::string, KernelGroup>, KernelRow> rows;
  for (const auto& [name, sums] : by_name) {
    const KernelGroup group = kernel_group(name);
    KernelRow& row = rows[{short_kernel_name(name), group}];
    row.calls += sums.calls;
    row.us += sums.us;
    table.group_us[static_cast<std::size_t>(group)] += sums.us;
  }
  for (const auto& [key, row] : rows)
    table.rows.push_back({key.first, key.second, row.calls, row.us});
  std::sort(table.rows.begin(), table.rows.end(),
            [](const KernelRow& a, const KernelRow& b) { return a.us > b.us; });
  table.step_us = static_cast<double>(end - activities.front().start_ns) * us_of_ns;
  table.busy_us = busy_ns(activities, [](const Activity&) { return true; }) * us_of_ns;
  for (const double us : table.group_us) table.overlap_us += us;
  table.overlap_us -= table.busy_us;
  table.compute_busy_us =
      busy_ns(activities, [&](const Activity& a) { return a.stream == compute_stream; }) * us_of_ns;
  return table;
}

}  // namespace gpu_step
