/// @file  "distributedInfo": which rank of which job a file says it is, and its groups; and the
/// rank of a file that does not say.
#pragma once
#include <mega/core/error.hpp>
#include <mega/scan/detail/rank_name.hpp>
#include <mega/scan/json_scanner.hpp>
#include <mega/scan/kineto/collectives.hpp>
#include <mega/scan/trace.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mega::inline v0::scan::kineto {

struct DistributedInfo {
  std::int32_t rank = -1, world = -1;  ///< -1: it does not say
};

/// One element of "pg_config". @pre it is an object, and comes next
inline void read_group(JsonScanner& json, Collectives& collectives) {
  json.enter();
  JsonText key;
  std::string name;
  std::vector<std::int32_t> ranks;
  for (json.start_record(); json.next_key(key); json.start_record()) {
    const auto kind = json.kind();
    if (key.raw == "pg_name") {
      name = json.token();
    } else if (key.raw == "ranks" && kind == JsonScanner::Kind::array) {
      json.enter();
      for (json.start_record(); json.next_element(); json.start_record()) {
        std::int64_t rank = 0;
        if (json.number(rank) && is_rank(rank) && ranks.size() < rank_limit)
          ranks.push_back(static_cast<std::int32_t>(rank));
      }
    } else {
      json.skip_long();
    }
  }
  collectives.configure(name, std::move(ranks));
}

/// @param collectives  get the groups  @pre the value is an object, and comes next
[[nodiscard]] inline DistributedInfo read_distributed_info(JsonScanner& json,
                                                           Collectives& collectives) {
  DistributedInfo out;
  json.enter();
  JsonText key;
  const auto read = [&](std::int32_t& number) {
    std::int64_t value = -1;
    if (json.number(value) && is_rank(value)) number = static_cast<std::int32_t>(value);
  };
  for (json.start_record(); json.next_key(key); json.start_record()) {
    if (key.raw == "rank") {
      read(out.rank);
    } else if (key.raw == "world_size") {
      read(out.world);
    } else if (key.raw == "pg_config" && json.kind() == JsonScanner::Kind::array) {
      json.enter();
      for (json.start_record(); json.next_element(); json.start_record()) {
        if (json.kind() == JsonScanner::Kind::object) {
          read_group(json, collectives);
        } else {
          json.skip_long();
        }
      }
    } else {
      json.skip_long();
    }
  }
  return out;
}

/// The rank of a file that does not say: what its name says, or its place among the files.
inline void guess_rank(Trace& t, TableIndex index) {
  Rank& own = t.ranks[index];
  // Another file may be a part of the same rank's recording, but not if it has the number by its
  // place.
  const auto taken = [&](std::int32_t rank, bool by_name) {
    for (std::size_t r = 0; r < t.ranks.size(); ++r) {
      const Rank& other = t.ranks[r];
      const bool is_part = by_name && detail::rank_in_name(other.source) == rank;
      if (r != index && other.rank == rank && !is_part) return true;
    }
    return false;
  };
  ++t.defects.rank_guessed;
  own.rank = detail::rank_in_name(own.source);
  const bool by_name = own.rank >= 0 && !taken(own.rank, true);
  if (!by_name) {
    own.rank = static_cast<std::int32_t>(index);
    while (taken(own.rank, false)) ++own.rank;
    own.is_numbered_by_place = true;
  }
  t.notes.push_back(sentence(own.source, " does not say its rank; ", own.rank,
                             by_name ? " was taken from its name" : " was taken from its place"));
}

}  // namespace mega::inline v0::scan::kineto
