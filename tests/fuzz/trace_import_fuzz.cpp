/// @file  libFuzzer entry of the trace importers: any bytes are either refused with an Error or
/// give a trace whose indices all point into its tables and whose spans do not end before they
/// begin. clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
///         -I include <this file> -lz
#include <mega/scan/import.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

namespace {

using namespace mega::scan;

/// The same bytes again, a few at a time.
class Drops final : public Reader {
 public:
  Drops(std::string_view text, std::size_t piece) : text_(text), piece_(piece) {}
  std::size_t read(std::span<char> into) override {
    const std::size_t count = std::min({piece_, into.size(), text_.size()});
    std::copy_n(text_.data(), count, into.data());
    text_.remove_prefix(count);
    return count;
  }

 private:
  std::string_view text_;
  std::size_t piece_;
};

void check(bool holds) {
  if (!holds) std::abort();
}

void check_trace(const Trace& t) {
  const auto inside = [](TableIndex index, std::size_t size) {
    check(index == none || index < size);
  };
  for (std::size_t i = 0; i < t.events.size(); ++i) {
    const Event& e = t.events[i];
    check(e.lane < t.lanes.size() && t.lanes[e.lane].rank < t.ranks.size());
    check(e.end >= e.begin);
    inside(e.name, t.names.size());
    inside(e.detail, t.communications.size());
    inside(e.launch, t.events.size());
    check(e.kind != EventKind::communication || e.detail != none);
  }
  for (std::size_t i = 0; i < t.communications.size(); ++i) {
    const Communication& c = t.communications[i];
    check(c.event < t.events.size());
    inside(c.group, t.groups.size());
    inside(c.dtype, t.names.size());
  }
}

Trace import_of(Source source) {
  Trace trace;
  const auto visit = [&](Source& text) {
    try {
      import_source(trace, text);
    } catch (const mega::Error&) {
    }
  };
  detail::Remarks remarks;
  detail::visit_text(source, visit, remarks);
  check_trace(trace);
  return trace;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Trace whole = import_of(Source("input", text));
  const Trace dropped = import_of(Source("input", std::make_unique<Drops>(text, 7)));
  check(whole.events.size() == dropped.events.size());
  return 0;
}
