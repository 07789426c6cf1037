// Which ranks share processors, from what their recordings say.
#include <mega/scan/recorder.hpp>
#include <mega/scan/shared_processors.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace mega::scan;

namespace {

/// A rank of each pair of host and processors.
Trace trace_of(const std::vector<std::pair<std::string, std::string>>& places) {
  Trace t;
  for (const auto& [host, processors] : places) {
    Rank rank;
    rank.rank = static_cast<std::int32_t>(t.ranks.size());
    rank.host = host;
    rank.processors = processors;
    t.ranks.push_back(rank);
  }
  return t;
}

/// "a 3 of 2; " of each shared host.
std::string shared(const std::vector<std::pair<std::string, std::string>>& places) {
  std::string out;
  for (const SharedHost& host : shared_hosts(trace_of(places)))
    out += host.name + " " + std::to_string(host.ranks) + " on " + std::to_string(host.processors) +
           "; ";
  return out;
}

}  // namespace

TEST_CASE("scan: ranks share a host that has fewer processors for them") {
  CHECK(shared({}) == "");
  CHECK(shared({{"a", "0"}}) == "");
  CHECK(shared({{"a", "0-1"}, {"a", "0-1"}}) == "");
  CHECK(shared({{"a", "0-1"}, {"a", "0-1"}, {"a", "0-1"}}) == "a 3 on 2; ");
  // Each by itself on a processor of its own, or all on one.
  CHECK(shared({{"a", "0"}, {"a", "1"}, {"a", "2"}}) == "");
  CHECK(shared({{"a", "5"}, {"a", "5"}}) == "a 2 on 1; ");
  // Ranges that overlap, touch and hold one another.
  CHECK(shared({{"a", "0-2"}, {"a", "1-1,3"}, {"a", "2-4"}, {"a", "0"}, {"a", "0"}}) == "");
  CHECK(shared({{"a", "0-2"}, {"a", "1-1"}, {"a", "2-3"}, {"a", "0"}, {"a", "0"}}) == "a 5 on 4; ");
  CHECK(shared({{"b", "0"}, {"a", "0"}, {"b", "0"}, {"a", "0"}, {"c", "0"}}) ==
        "a 2 on 1; b 2 on 1; ");
}

TEST_CASE("scan: what is unknown or no list of processors claims nothing") {
  for (const std::string wrong :
       {"", ",", "x", "0,", "0-", "-1", "3-1", "0-1-2", "0;1", "0 ", " 0", "99999999999", "0x1"}) {
    CAPTURE(wrong);
    CHECK(shared({{"a", wrong}, {"a", wrong}, {"a", "0"}}) == "");
    CHECK(shared({{"a", wrong}, {"a", "0"}, {"a", "0"}}) == "a 2 on 1; ");
  }
  CHECK(shared({{"", "0"}, {"", "0"}}) == "");
  // As many as an index has: a sum that leaves 32 bits.
  CHECK(detail::count_processors(detail::parse_processors("0-2147483647,5")) == 2147483648);
}

TEST_CASE("scan: a shared host in a sentence") {
  CHECK(to_string(SharedHost{"node7", 8, 2}) ==
        "8 ranks of host node7 share 2 processors: their times contain waiting for one another");
  CHECK(to_string(SharedHost{"x", 2, 1}).find("share 1 processor:") != std::string::npos);
}

TEST_CASE("scan: a recording of the host says where it runs, unless it is told") {
  const HostRecorder recorder({}, std::make_unique<NoSink>());
  CHECK(recorder.info().host == host_name());
  CHECK(recorder.info().processors == own_processors());
  RecordingInfo told;
  told.host = "elsewhere";
  told.processors = "7";
  const HostRecorder other(told, std::make_unique<NoSink>());
  CHECK(other.info().host == "elsewhere");
  CHECK(other.info().processors == "7");
#ifdef __linux__
  CHECK(!host_name().empty());
  CHECK(detail::count_processors(detail::parse_processors(own_processors())) >= 1);
#endif
  CHECK(detail::read_line("/no/such/file").empty());
}
