/// @file  libFuzzer entry of the safetensors header parser: any bytes are either refused with an
/// Error or give a header whose tensors tile the data.
/// clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
///         -I include <this file>
#include <mega/ckpt/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto header =
        mega::ckpt::parse_safetensors(std::as_bytes(std::span(data, size)), "input");
    mega::Index covered = 0;
    for (const auto& tensor : header.tensors) {
      mega::Index elements = 1;
      for (const auto extent : tensor.shape) elements *= extent;
      const bool inside =
          tensor.offset >= 0 && tensor.bytes >= 0 &&
          header.data_begin + tensor.offset + tensor.bytes <= static_cast<mega::Index>(size);
      if (!inside || elements * mega::ckpt::element_bytes(tensor.dtype) != tensor.bytes)
        std::abort();
      covered += tensor.bytes;
    }
    if (header.data_begin + covered != static_cast<mega::Index>(size)) std::abort();
  } catch (const mega::Error&) {
  }
  return 0;
}
