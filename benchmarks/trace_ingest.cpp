// Import of Kineto's JSON on one core: bytes of text a second, memory beside the text, and, where
// simdjson is installed, its on-demand parser on the same fields of the same bytes.
//
//   bench_trace_ingest [--megabytes 256] [--rounds 5] [--file TRACE.json]
//
// Without --file the text is generated, with the records, the order and the widths of PyTorch's. It
// lies in memory for both parsers where speed is measured, and in a temporary file that is mapped
// where memory is. Both parsers keep their memory from round to round; in new pages, they get it
// from the system each time, which is dear on virtual machines. The speed from the mapped file has
// the page faults of the text as well. Prints one JSON object. Times are of the processor;
// anonymous memory is read at its highest and at the end.
#include <mega/scan/import.hpp>

#include <CLI/CLI.hpp>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#if __has_include(<simdjson.h>)
#include <simdjson.h>
#define MEGA_BENCH_SIMDJSON 1
#endif

namespace {

/// A trace as a PyTorch 2 job writes it: operators with shapes, calls of the runtime, kernels with
/// their launch arguments, flows, steps, and a communication kernel now and then.
class Generator {
 public:
  explicit Generator(std::size_t bytes) : bytes_(bytes) {}

  void write(std::FILE* file) {
    out_ =
        "\n{\n  \"schemaVersion\": 1,\n  \"deviceProperties\": [\n    {\n      \"id\": 0, "
        "\"name\": \"NVIDIA H200\", \"totalGlobalMem\": 150754820096\n    }\n  ],\n"
        "  \"distributedInfo\": {\"backend\": \"nccl\", \"rank\": 3, \"world_size\": 8},\n"
        "  \"displayTimeUnit\": \"ms\",\n  \"baseTimeNanoseconds\": 1711964646000000000,\n"
        "  \"traceEvents\": [\n";
    std::size_t written = 0;
    while (written + out_.size() < bytes_) {
      operation();
      if (out_.size() < (std::size_t{1} << 20U)) continue;
      written += out_.size();
      std::fwrite(out_.data(), 1, out_.size(), file);
      out_.clear();
    }
    out_ +=
        "  {\n    \"name\": \"Record Window End\", \"ph\": \"i\", \"s\": \"g\",\n    \"pid\": "
        "\"\", \"tid\": \"\", \"ts\": 1\n  }\n  ],\n  \"traceName\": \"trace.json\"\n}\n";
    std::fwrite(out_.data(), 1, out_.size(), file);
  }

 private:
  template <class... Values>
  void print(const char* format, Values... values) {
    char line[1024];
    const int length = std::snprintf(line, sizeof line, format, values...);
    out_.append(line, static_cast<std::size_t>(length));
  }

  /// One operator with the operators it calls, its kernel and their flow.
  void operation() {
    static constexpr const char* operators[] = {
        "aten::linear",
        "aten::addmm",
        "aten::layer_norm",
        "aten::native_layer_norm",
        "autograd::engine::evaluate_function: AddmmBackward0",
        "aten::mul",
        "aten::to",
        "aten::_scaled_dot_product_flash_attention"};
    static constexpr const char* kernels[] = {
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
        "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, "
        "at::detail::Array<char*, 3>)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_"
        "segment_k_off_kernel__5x_cublas",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
        "cutlass::bfloat16_t> >(Flash_fwd_params)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, "
        "float, float const*, float const*, float const*, float*, float*, float*)"};
    const unsigned which = static_cast<unsigned>(random_());
    const double length = 20.0 + which % 80;
    const double at = clock_;
    for (unsigned depth = 0; depth < 3; ++depth) {
      ++sequence_;
      print(
          "  {\n    \"ph\": \"X\", \"cat\": \"cpu_op\", \"name\": \"%s\", \"pid\": 2910249, "
          "\"tid\": %d,\n    \"ts\": %.3f, \"dur\": %.3f,\n    \"args\": {\n      \"External "
          "id\": %u,\"Record function id\": %u, \"Concrete Inputs\": [\"\", \"\", \"[1, -1]\", "
          "\"True\"], \"Input type\": [\"c10::BFloat16\", \"c10::BFloat16\", \"ScalarList\", "
          "\"Scalar\"], \"Input Strides\": [[4096, 1], [4096, 1], [], []], \"Input Dims\": "
          "[[8192, 4096], [4096, 4096], [], []], \"Ev Idx\": %u\n    }\n  },\n",
          operators[(which + depth) % 8], which % 3 == 0 ? 2919752 : 2910249, at + depth,
          length - 2 * depth, sequence_ % 1000000, sequence_, sequence_);
    }
    const unsigned correlation = 7000 + sequence_;
    if (sequence_ % 300 == 0) {
      print(
          "  {\n    \"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"ncclDevKernel_AllReduce_Sum_"
          "bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)\", \"pid\": 0, \"tid\": 20,\n    "
          "\"ts\": %.3f, \"dur\": %.3f,\n    \"args\": {\n      \"External id\": %u, \"queued\": "
          "0, \"device\": 0, \"context\": 1, \"stream\": 20, \"correlation\": %u, \"grid\": [24, "
          "1, 1], \"block\": [512, 1, 1], \"Collective name\": \"allreduce\", \"In msg "
          "nelems\": 2049000, \"Out msg nelems\": 2049000, \"Group size\": 8, \"dtype\": "
          "\"BFloat16\", \"Process Group Name\": \"0\", \"Process Group Description\": "
          "\"default_pg\", \"Process Group Ranks\": \"[0, 1, 2, 3, 4, 5, 6, 7]\", \"Seq\": %u\n"
          "    }\n  },\n",
          at + 60, length, sequence_, correlation, sequence_ / 300);
    } else {
      print(
          "  {\n    \"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"%s\", \"pid\": 0, \"tid\": 7,"
          "\n    \"ts\": %.3f, \"dur\": %.3f,\n    \"args\": {\n      \"External id\": %u, "
          "\"queued\": 0, \"device\": 0, \"context\": 1, \"stream\": 7, \"correlation\": %u, "
          "\"registers per thread\": 30, \"shared memory\": 0, \"blocks per SM\": 5.300000, "
          "\"warps per SM\": 21.200001, \"grid\": [4, 106, 1], \"block\": [128, 1, 1], \"est. "
          "achieved occupancy %%\": 33\n    }\n  },\n",
          kernels[which / 8 % 4], at + 15, length * 0.9, sequence_, correlation);
    }
    print(
        "  {\n    \"ph\": \"f\", \"id\": %u, \"pid\": 0, \"tid\": 7, \"ts\": %.3f,\n    \"cat\": "
        "\"ac2g\", \"name\": \"ac2g\", \"bp\": \"e\"\n  },\n",
        correlation, at + 15);
    print(
        "  {\n    \"ph\": \"X\", \"cat\": \"cuda_runtime\", \"name\": \"cudaLaunchKernel\", "
        "\"pid\": 2910249, \"tid\": 2910249,\n    \"ts\": %.3f, \"dur\": %.3f,\n    \"args\": {\n"
        "      \"External id\": %u, \"cbid\": 211, \"correlation\": %u\n    }\n  },\n",
        at + 3, 5.5, sequence_, correlation);
    print(
        "  {\n    \"ph\": \"s\", \"id\": %u, \"pid\": 2910249, \"tid\": 2910249, \"ts\": %.3f,\n"
        "    \"cat\": \"ac2g\", \"name\": \"ac2g\"\n  },\n",
        correlation, at + 3);
    clock_ += length + 1;
  }

  std::size_t bytes_;
  std::string out_;
  std::mt19937 random_{1};
  double clock_ = 4458676524648.797;
  unsigned sequence_ = 0;
};

/// Bytes of a line of /proc/self/status, as "RssAnon".
std::int64_t memory_of(std::string_view key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return std::atoll(line.c_str() + key.size() + 1) * 1024;
  }
  return 0;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string out(std::filesystem::file_size(path), '\0');
  file.read(out.data(), static_cast<std::streamsize>(out.size()));
  return out;
}

/// Seconds of processor time, which other programs on the machine do not lengthen.
double core_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

/// Least seconds of `rounds` calls, with all that they free.
template <class Work>
double best_of(int rounds, Work work) {
  double best = std::numeric_limits<double>::max();
  for (int round = 0; round < rounds; ++round) {
    const double begin = core_seconds();
    work();
    best = std::min(best, core_seconds() - begin);
  }
  return best;
}

/// Watches the anonymous memory of the process from a thread of its own.
class MemoryWatch {
 public:
  MemoryWatch()
      : before_(memory_of("RssAnon:")), thread_([this] {
          while (!done_) {
            most_ = std::max(most_, memory_of("RssAnon:"));
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }) {}
  /// @return the most that was there above the beginning
  double stop() {
    done_ = true;
    thread_.join();
    return static_cast<double>(most_ - before_);
  }

 private:
  std::int64_t before_, most_ = 0;
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

#if defined(MEGA_BENCH_SIMDJSON)
/// The fields that import_kineto() keeps, read on demand; a sum so that nothing is optimised away.
/// As the importer does, it passes over the arguments of operators. With `numbers` the times become
/// doubles, which cannot hold nanoseconds, and the rest whole numbers; without, all stay text.
template <bool numbers>
std::uint64_t read_by_simdjson(simdjson::ondemand::parser& parser,
                               const simdjson::padded_string& text) {
  std::uint64_t sum = 0;
  auto document = parser.iterate(text);
  for (auto element : document["traceEvents"].get_array()) {
    bool on_host = false;
    for (simdjson::ondemand::field field : element.get_object()) {
      const simdjson::ondemand::raw_json_string key = field.key();
      simdjson::ondemand::value value = field.value();
      if (key == "cat") {
        const std::string_view category = value.get_string().value();
        on_host = category == "cpu_op" || category == "python_function";
        sum += category.size();
      } else if (key == "name" || key == "ph") {
        sum += value.get_string().value().size();
      } else if (key == "ts" || key == "dur") {
        if constexpr (numbers) {
          sum += static_cast<std::uint64_t>(value.get_double().value());
        } else {
          sum += value.raw_json_token().size();
        }
      } else if (key == "pid" || key == "tid" || key == "id") {
        std::uint64_t number = 0;
        if (!numbers || value.get_uint64().get(number) != simdjson::SUCCESS)
          number = value.raw_json_token().size();
        sum += number;
      } else if (key == "args" && !on_host) {
        for (simdjson::ondemand::field argument : value.get_object()) {
          const simdjson::ondemand::raw_json_string name = argument.key();
          if (name == "correlation" || name == "In msg nelems" || name == "Seq")
            sum += argument.value().get_uint64().value();
          else if (name == "Collective name" || name == "dtype" || name == "Process Group Name" ||
                   name == "Process Group Ranks")
            sum += argument.value().get_string().value().size();
        }
      }
    }
  }
  return sum;
}
#endif

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Import of Kineto's JSON on one core"};
  std::size_t megabytes = 256;
  int rounds = 5;
  std::string path;
  app.add_option("--megabytes", megabytes, "Size of the generated text")
      ->check(CLI::Range(1, 8192));
  app.add_option("--rounds", rounds, "The best of them counts")->check(CLI::Range(1, 1000));
  app.add_option("--file", path, "A trace instead of the generated text")->check(CLI::ExistingFile);
  CLI11_PARSE(app, argc, argv);

  const bool generated = path.empty();
  if (generated) {
    path = (std::filesystem::temp_directory_path() / "mega-trace-ingest.json").string();
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) {
      std::fprintf(stderr, "%s cannot be written\n", path.c_str());
      return 2;
    }
    Generator(megabytes << 20U).write(file);
    std::fclose(file);
  }
  const auto bytes = static_cast<double>(std::filesystem::file_size(path));

  std::size_t events = 0;
  double kept = 0, peak = 0;
  {
    mega::scan::Trace trace;
    const std::int64_t before = memory_of("RssAnon:");
    MemoryWatch watch;
    mega::scan::import_file(trace, path);
    peak = watch.stop();
    kept = static_cast<double>(memory_of("RssAnon:") - before);
    events = trace.events.size();
  }
  const double best_mapped = best_of(rounds, [&] {
    mega::scan::Trace trace;
    mega::scan::import_file(trace, path);
  });
  const std::string text = content_of(path);
  const auto import_speed = [&] {
    return bytes / best_of(rounds, [&] {
             mega::scan::Trace trace;
             mega::scan::Source source(path, text);
             mega::scan::import_source(trace, source);
           });
  };
  const double speed_in_new_pages = import_speed();
#if defined(MEGA_BENCH_SIMDJSON)
  const simdjson::padded_string padded(text);
  std::uint64_t sum = 0;
  const double in_new_pages = bytes / best_of(rounds, [&] {
                                simdjson::ondemand::parser parser;
                                sum += read_by_simdjson<true>(parser, padded);
                              });
#endif
  // From here on what is freed stays in the process, as simdjson's parser keeps its buffers.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  const double speed = import_speed();
  const double records = 48.0 * static_cast<double>(events);
  std::printf("{\"bytes\": %.0f, \"events\": %zu, \"gigabytes_per_second\": %.3f", bytes, events,
              speed / 1e9);
  std::printf(", \"in_new_pages_gigabytes_per_second\": %.3f", speed_in_new_pages / 1e9);
  std::printf(", \"mapped_file_gigabytes_per_second\": %.3f", bytes / best_mapped / 1e9);
  std::printf(", \"anonymous_bytes_per_48\": %.3f, \"anonymous_bytes_at_most_per_48\": %.3f",
              kept / records, peak / records);
#if defined(MEGA_BENCH_SIMDJSON)
  {
    simdjson::ondemand::parser parser;
    const double tokens =
        bytes / best_of(rounds, [&] { sum += read_by_simdjson<false>(parser, padded); });
    const double values =
        bytes / best_of(rounds, [&] { sum += read_by_simdjson<true>(parser, padded); });
    std::printf(
        ", \"simdjson_gigabytes_per_second\": %.3f, \"simdjson_without_numbers\": %.3f, "
        "\"simdjson_in_new_pages\": %.3f, \"of_simdjson\": %.3f, "
        "\"of_simdjson_without_numbers\": %.3f, \"sum\": %" PRIu64,
        values / 1e9, tokens / 1e9, in_new_pages / 1e9, speed / values, speed / tokens, sum);
  }
#endif
  std::printf("}\n");
  if (generated) std::filesystem::remove(path);
  return 0;
}
