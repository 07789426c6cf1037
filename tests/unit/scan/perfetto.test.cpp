/// @file  The file is read by a decoder of its own, which knows the wire format and the schema's
/// field numbers only, and replayed as a viewer does.
#include "../../support/timeline_trace.hpp"
#include <mega/scan/perfetto.hpp>
#include <mega/scan/trace.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using namespace mega::scan;
using mega_test::Timeline;

/// Fields of one message.
struct Message {
  struct Field {
    int number;
    int wire;
    std::uint64_t value;
    std::string_view bytes;
  };
  std::vector<Field> fields;

  explicit Message(std::string_view text) {
    while (!text.empty()) {
      const std::uint64_t tag = varint(text);
      Field f{static_cast<int>(tag >> 3U), static_cast<int>(tag & 7U), 0, {}};
      if (f.wire == 0) {
        f.value = varint(text);
      } else if (f.wire == 1) {
        if (text.size() < 8) throw std::runtime_error("cut");
        std::memcpy(&f.value, text.data(), 8);
        text.remove_prefix(8);
      } else if (f.wire == 2) {
        const std::uint64_t length = varint(text);
        if (length > text.size()) throw std::runtime_error("cut");
        f.bytes = text.substr(0, length);
        text.remove_prefix(length);
      } else {
        throw std::runtime_error("wire type");
      }
      fields.push_back(f);
    }
  }
  static std::uint64_t varint(std::string_view& text) {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      if (text.empty() || shift > 63) throw std::runtime_error("varint");
      const auto byte = static_cast<std::uint8_t>(text[0]);
      text.remove_prefix(1);
      value |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
      if (byte < 0x80) return value;
    }
  }
  [[nodiscard]] std::vector<Field> all(int number) const {
    std::vector<Field> found;
    std::copy_if(fields.begin(), fields.end(), std::back_inserter(found),
                 [&](const Field& f) { return f.number == number; });
    return found;
  }
  [[nodiscard]] std::uint64_t number(int field, std::uint64_t otherwise = 0) const {
    const auto found = all(field);
    return found.empty() ? otherwise : found.front().value;
  }
  [[nodiscard]] std::string text(int field) const {
    const auto found = all(field);
    return found.empty() ? std::string() : std::string(found.front().bytes);
  }
};

struct Seen {
  std::string name, category, track, process;
  std::uint64_t begin = 0, end = 0;
  std::size_t depth = 0;
  std::set<std::uint64_t> flows, ending;
  std::map<std::string, std::string> arguments;
};

struct Replay {
  std::vector<Seen> slices;
  std::size_t strings = 0;  // interned
};

/// What a viewer makes of the file. Throws where it would drop something.
Replay replay(std::string_view file) {
  struct Track {
    std::string name;
    std::uint64_t parent = 0;
    std::vector<std::size_t> open;
    std::uint64_t last = 0;
  };
  Replay out;
  std::map<std::uint64_t, Track> tracks;
  std::map<int, std::map<std::uint64_t, std::string>> interned;
  bool cleared = false;
  for (const auto& field : Message(file).fields) {
    if (field.number != 1 || field.wire != 2) throw std::runtime_error("not a packet");
    const Message packet(field.bytes);
    if (packet.number(10) == 0) throw std::runtime_error("packet without sequence");
    cleared = cleared || (packet.number(13) & 1U) != 0;
    for (const auto& strings : packet.all(12)) {
      for (const auto& entry : Message(strings.bytes).fields) {
        const Message item(entry.bytes);
        if (!interned[entry.number].emplace(item.number(1), item.text(2)).second)
          throw std::runtime_error("a string was interned twice");
        ++out.strings;
      }
    }
    for (const auto& descriptor : packet.all(60)) {
      const Message d(descriptor.bytes);
      Track track;
      track.parent = d.number(5);
      track.name = d.text(2);
      for (const auto& process : d.all(3)) {
        track.name = Message(process.bytes).text(6);
        if (Message(process.bytes).number(1) == 0) throw std::runtime_error("pid 0");
      }
      if (d.number(1) == 0) {  // the root, whose children are processes
        if (d.number(19) != 1) throw std::runtime_error("no order of processes");
        continue;
      }
      if (!tracks.emplace(d.number(1), track).second) throw std::runtime_error("track id");
    }
    for (const auto& event : packet.all(11)) {
      const Message e(event.bytes);
      const std::uint64_t time = packet.number(8);
      if (!cleared || (packet.number(13) & 2U) == 0) throw std::runtime_error("no state");
      Track& track = tracks.at(e.number(11));
      if (time < track.last) throw std::runtime_error("time goes back");
      track.last = time;
      if (e.number(9) == 2) {
        out.slices.at(track.open.at(track.open.size() - 1)).end = time;
        track.open.pop_back();
        continue;
      }
      if (e.number(9) != 1) throw std::runtime_error("type");
      Seen s;
      s.name = interned[2].at(e.number(10));
      s.category = interned[1].at(e.number(3));
      s.track = track.name;
      s.process = tracks.at(track.parent).name;
      s.begin = time;
      s.depth = track.open.size();
      for (const auto& flow : e.all(47)) s.flows.insert(flow.value);
      for (const auto& flow : e.all(48)) s.ending.insert(flow.value);
      for (const auto& flow : e.fields) {
        if ((flow.number == 47 || flow.number == 48) && flow.wire != 1)
          throw std::runtime_error("a flow id that is not fixed64");
      }
      for (const auto& annotation : e.all(4)) {
        const Message a(annotation.bytes);
        const auto text = a.all(17);
        s.arguments[interned[3].at(a.number(1))] =
            text.empty() ? std::to_string(static_cast<std::int64_t>(a.number(4)))
                         : interned[29].at(text.front().value);
      }
      track.open.push_back(out.slices.size());
      out.slices.push_back(std::move(s));
    }
  }
  for (const auto& [id, track] : tracks) {
    if (!track.open.empty()) throw std::runtime_error("a slice without an end");
  }
  return out;
}

std::string written(const Timeline& of) {
  std::string text;
  write_perfetto(of.trace, of.matches, of.alignment,
                 [&](std::string_view piece) { text += piece; });
  return text;
}

const Seen& slice(const Replay& replay, std::string_view name, std::string_view process) {
  for (const Seen& s : replay.slices) {
    if (s.name == name && s.process == process) return s;
  }
  FAIL("no slice " << name);
  return replay.slices.front();
}

constexpr std::string_view first = "rank 4 (pp0)", second = "rank 6 (pp1)";

TEST_CASE("scan: Perfetto's file holds every event at its aligned time in nanoseconds") {
  const Timeline timeline;
  const Replay seen = replay(written(timeline));
  CHECK(seen.slices.size() == timeline.trace.events.size());
  const Seen& reduce = slice(seen, "nccl all_reduce", second);
  CHECK(reduce.begin == static_cast<std::uint64_t>(mega_test::timeline_start + 2500));
  CHECK(reduce.end == static_cast<std::uint64_t>(mega_test::timeline_start + 3001));
  CHECK(reduce.category == "communication");
  CHECK(reduce.arguments == std::map<std::string, std::string>{{"op", "all_reduce"},
                                                               {"group", "dp"},
                                                               {"sequence", "41"},
                                                               {"bytes", "4096"},
                                                               {"dtype", "bf16"}});
  const Seen& outer = slice(seen, "outer", first);
  CHECK(outer.category == "forward");
  CHECK(outer.arguments ==
        std::map<std::string, std::string>{{"step", "3"}, {"microbatch", "2"}, {"chunk", "1"}});
  CHECK(slice(seen, "send", first).arguments.at("peer") == "6");
  slice(seen, "a \"b\" \\ \n\x01 \xE2\x86\x92 \xEF\xBF\xBD", first);
}

TEST_CASE("scan: slices nest on their track, and overlapping ones have a track of their own") {
  const Replay seen = replay(written(Timeline()));
  const auto end = [&](std::string_view name) {
    const Seen& s = slice(seen, name, first);
    return s.end - static_cast<std::uint64_t>(mega_test::timeline_start);
  };
  CHECK(slice(seen, "outer", first).track == "stream 7");
  CHECK(slice(seen, "outer", first).depth == 0);
  CHECK(slice(seen, "until its end", first).depth == 1);
  CHECK(end("outer") == 1000);
  CHECK(end("until its end") == 1000);
  CHECK(slice(seen, "neighbour", first).depth == 0);  // begins when outer ends
  CHECK(slice(seen, "neighbour", first).track == "stream 7");
  CHECK(slice(seen, "overlaps", first).track == "stream 7, overlapping 1");
  CHECK(end("overlaps") == 1200);
  CHECK(slice(seen, "launch", first).track == "python");
}

TEST_CASE("scan: Perfetto's flows join the members of matched operations") {
  const Replay seen = replay(written(Timeline()));
  const Seen& early = slice(seen, "nccl all_reduce", first);
  const Seen& late = slice(seen, "nccl all_reduce", second);
  CHECK(early.flows.size() == 1);
  CHECK(early.ending.empty());
  CHECK(late.flows.empty());
  CHECK(late.ending == early.flows);
  CHECK(slice(seen, "recv", second).flows == slice(seen, "send", first).ending);
  CHECK(slice(seen, "launch", first).flows == slice(seen, "neighbour", first).ending);
  std::set<std::uint64_t> ids;
  for (const Seen& s : seen.slices) ids.insert(s.flows.begin(), s.flows.end());
  CHECK(ids.size() == 3);
  CHECK(std::any_of(ids.begin(), ids.end(), [](std::uint64_t id) { return id >> 32U != 0; }));
}

TEST_CASE("scan: names are interned once, however many slices carry them") {
  Timeline timeline;
  const std::size_t strings = replay(written(timeline)).strings;
  const std::size_t bytes = written(timeline).size();
  for (int i = 0; i < 1000; ++i) timeline.add(0, 0, 5000 + i, 5001 + i, "outer");
  CHECK(replay(written(timeline)).strings == strings);
  CHECK((written(timeline).size() - bytes) / 1000 < 60);  // begin and end
}

TEST_CASE("scan: times before zero are shifted, an instant nests, an empty trace is empty") {
  Timeline timeline;
  timeline.alignment.clocks[0].offset = -mega_test::timeline_start - 50;
  timeline.alignment.clocks[1].offset -= mega_test::timeline_start + 50;
  timeline.add(0, 0, 2000, 2000, "instant");
  const Replay seen = replay(written(timeline));
  CHECK(slice(seen, "outer", first).begin == 0);
  CHECK(slice(seen, "instant", first).begin == 2000);
  CHECK(slice(seen, "instant", first).end == 2000);
  std::string nothing;
  write_perfetto({}, {}, {}, [&](std::string_view piece) { nothing += piece; });
  CHECK(nothing.empty());
}

}  // namespace
