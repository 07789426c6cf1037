/// @file  libFuzzer entry of the pickle reader: any bytes are either refused with an Error or give
/// a document that can be walked; nothing is executed, and memory is bounded by the bytes. clang++
/// -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
///         -I include <this file>
#include <mega/core/error.hpp>
#include <mega/scan/pickle.hpp>
#include <mega/scan/plain_document.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace mega::scan;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const PlainDocument d = read_pickle(bytes, "input");
    std::size_t budget = 1000;  // a value may hold itself
    std::vector<PlainDocument::Node> open{d.root()};
    while (!open.empty() && budget-- > 0) {
      const auto node = open.back();
      open.pop_back();
      if (d.text(node).size() > size || d.children(node).size() > size) std::abort();
      (void)d.find(node, "key");
      (void)d.real(node);
      for (const auto child : d.children(node)) open.push_back(child);
    }
  } catch (const mega::Error& e) {
    if (e.code() != mega::ErrorCode::bad_input || e.what()[0] == '\0') std::abort();
  }
  return 0;
}
