/// @file  libFuzzer entry of the importer of mega's own trace files; scan_fuzz.hpp says what must
/// hold. clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
///         -I include <this file> -lz
#include "scan_fuzz.hpp"
#include <mega/scan/own_format.hpp>

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return mega_test::fuzz_importer(data, size, mega::scan::import_own_format);
}
