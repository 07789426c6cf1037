/// @file  libFuzzer entry of the importer of joined timelines; scan_fuzz.hpp says what
/// must hold. clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined
/// -fno-sanitize-recover=all
///         -I include <this file> -lz
#include "scan_fuzz.hpp"
#include <mega/scan/joined_timeline.hpp>

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return mega_test::fuzz_importer(data, size, mega::scan::import_joined_timeline);
}
