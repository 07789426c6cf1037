/// @file  Names of records, each once, and what a name alone says of a record.
#pragma once
#include <mega/scan/communication_name.hpp>
#include <mega/scan/decimal.hpp>
#include <mega/scan/detail/text.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/kineto/hash.hpp>
#include <mega/scan/trace.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::scan::kineto {

struct NameFacts {
  bool known = false;
  bool communicates = false;
  bool synchronizes = false;
  bool launches = false;
  CommunicationOp op = CommunicationOp::unknown;
  std::int32_t step = -1;  ///< of "ProfilerStep#N"
};

/// Kernels of communication libraries: NCCL and RCCL, expert-parallel dispatch and combine, and the
/// one-shot all-reduces of inference engines.
[[nodiscard]] inline bool is_communication_kernel(std::string_view name) noexcept {
  const std::string_view function = name.substr(0, name.find('('));
  for (const std::string_view part : {"ncclKernel", "ncclDevKernel", "ncclSymk", "rcclKernel"}) {
    if (detail::holds(function, part)) return true;
  }
  if (function.starts_with("nccl") || function.starts_with("rccl")) return true;
  const bool experts = detail::holds(function, "::ep::") || detail::holds(function, "deep_ep");
  if (experts) return !detail::holds(function, "layout");
  for (const std::string_view part :
       {"cross_device_reduce", "allreduce_fusion", "one_shot_all_reduce", "two_shot_all_reduce",
        "multimem_all_reduce", "multimem_one_shot", "mscclpp", "nvshmem"}) {
    if (detail::holds(function, part)) return true;
  }
  return false;
}

[[nodiscard]] inline NameFacts facts_of(std::string_view name) {
  NameFacts facts;
  facts.known = true;
  facts.communicates = is_communication_kernel(name);
  if (facts.communicates) {
    facts.op = communication_of(name.substr(0, name.find('(')));
    if (detail::holds(name, "dispatch") || detail::holds(name, "combine"))
      facts.op = CommunicationOp::all_to_all;
    if (detail::holds(name, "notify")) facts.op = CommunicationOp::barrier;
    if (detail::holds(name, "cross_device_reduce")) facts.op = CommunicationOp::all_reduce;
  }
  facts.synchronizes = detail::holds(name, "Synchronize") || detail::holds(name, "WaitEvent") ||
                       detail::holds(name, "WaitExternal") || detail::holds(name, " Sync");
  facts.launches =
      !facts.synchronizes && (detail::holds(name, "Launch") || detail::holds(name, "Memcpy") ||
                              detail::holds(name, "Memset"));
  constexpr std::string_view step = "ProfilerStep#";
  if (name.starts_with(step)) {
    const Decimal number = parse_decimal(name.substr(step.size()));
    if (number.fault == DecimalFault::no_fault && number.value >= 0 &&
        number.value <= std::numeric_limits<std::int32_t>::max())
      facts.step = static_cast<std::int32_t>(number.value);
  }
  return facts;
}

/// The names of one file, on their way into the table of all.
class Names {
 public:
  explicit Names(NameTable& table) : table_(table) {}

  /// @return none for a record without a name
  [[nodiscard]] TableIndex intern(const JsonText& text) {
    if (text.raw.empty() && text.plain) return none;
    const std::uint64_t hash = quick_hash(text.raw);
    Recent& recent = recent_[hash % recent_.size()];
    if (recent.hash == hash && recent.name != none && text.plain && table_[recent.name] == text.raw)
      return recent.name;
    const std::string_view clean = unescape(text, scratch_);
    const TableIndex name = table_.intern(clean);
    if (facts_.size() < table_.size()) facts_.resize(table_.size());
    if (!facts_[name].known) facts_[name] = facts_of(clean);
    recent = {hash, name};
    return name;
  }

  /// @param name  as intern() returned it
  [[nodiscard]] NameFacts facts(TableIndex name) const noexcept {
    return name == none ? NameFacts{} : facts_[name];
  }

 private:
  struct Recent {
    std::uint64_t hash = 0;
    TableIndex name = none;
  };

  NameTable& table_;
  std::array<Recent, 4096> recent_{};
  std::vector<NameFacts> facts_;  // by name
  std::string scratch_;
};

}  // namespace mega::inline v0::scan::kineto
