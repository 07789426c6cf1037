#include "arguments.hpp"

#include <mega/ckpt/replaced_file.hpp>
#include <mega/core/error.hpp>

#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

namespace plan {

using mega::Error;
using mega::ErrorCode;
using mega::expects;
using mega::sentence;

namespace {

constexpr double largest = 1e15;

std::vector<std::string_view> pieces_of(std::string_view text) {
  std::vector<std::string_view> pieces;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    pieces.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return pieces;
}

template <class Number>
std::optional<Number> number_of(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void expect_value(std::string_view option, std::string_view text) {
  expects(!text.empty(), ErrorCode::usage,
          [&] { return sentence(option, " is empty; give it a value or leave it out"); });
}

}  // namespace

CLI::Option* add_whole(CLI::App& command, const std::string& option, std::function<void(int)> take,
                       const std::string& description, int least, int most) {
  const auto read = [=](const std::string& text) {
    expect_value(option, text);
    const auto number = number_of<int>(text);
    expects(number && least <= *number && *number <= most, ErrorCode::usage, [&] {
      return sentence(option, " is ", text, "; valid are whole numbers from ", least, " to ", most);
    });
    take(*number);
  };
  return command.add_option_function<std::string>(option, read, description)->type_name("INT");
}

CLI::Option* add_number(CLI::App& command, const std::string& option,
                        std::function<void(double)> take, const std::string& description) {
  const auto read = [=](const std::string& text) {
    expect_value(option, text);
    const auto number = number_of<double>(text);
    expects(number.has_value(), ErrorCode::usage, [&] {
      return sentence(option, " is ", text, "; valid are numbers such as 0.5, 12 and 4e14");
    });
    take(*number);
  };
  return command.add_option_function<std::string>(option, read, description)->type_name("FLOAT");
}

void expect_size(int p, int m, int v) {
  const auto expect_count = [](std::string_view option, int count) {
    expects(count >= 1, ErrorCode::usage,
            [&] { return sentence(option, " is ", count, "; the least is 1"); });
  };
  expect_count("--pp", p);
  expect_count("--micro-batches", m);
  expect_count("--vpp", v);
  expects(static_cast<long long>(p) * v <= most_stages, ErrorCode::usage, [&] {
    return sentence("--pp ", p, " times --vpp ", v, " exceeds ", most_stages,
                    ", the most stages of a plan");
  });
  const bool fits = p <= most_forwards / m && static_cast<long long>(p) * m <= most_forwards / v;
  expects(fits, ErrorCode::usage, [&] {
    return sentence("--pp ", p, " times --micro-batches ", m, " times --vpp ", v, " exceeds ",
                    most_forwards, ", the most forwards of a plan");
  });
}

void expect_values(const CLI::App& command) {
  for (const CLI::Option* const option : command.get_options()) {
    for (const std::string& value : option->results()) expect_value(option->get_name(), value);
  }
}

std::string read_input(const std::string& path, std::size_t limit) {
  std::error_code failure;
  const auto type = std::filesystem::status(path, failure).type();
  using enum std::filesystem::file_type;
  if (type != fifo && type != character && type != socket)
    return mega::ckpt::read_file(path, static_cast<mega::Index>(limit));
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  expects(file != nullptr, ErrorCode::bad_input,
          [&] { return sentence("file ", path, " cannot be opened: ", std::strerror(errno)); });
  std::string text;
  std::array<char, 65536> piece;
  while (const std::size_t got = std::fread(piece.data(), 1, piece.size(), file.get())) {
    text.append(piece.data(), got);
    expects(text.size() <= limit, ErrorCode::bad_input, [&] {
      return sentence(path, " gave more than the ", limit, " bytes that are allowed");
    });
  }
  expects(std::ferror(file.get()) == 0, ErrorCode::bad_input,
          [&] { return sentence(path, " cannot be read at byte ", text.size()); });
  return text;
}

void expect_amount(std::string_view option, double value, bool zero) {
  expects((zero ? value >= 0 : value > 0) && value <= largest, ErrorCode::usage, [&] {
    return sentence(option, " is ", value, "; valid are numbers ", zero ? "from 0" : "above 0",
                    " up to ", largest);
  });
}

std::vector<int> counts_of(std::string_view option, std::string_view text) {
  std::vector<int> counts;
  for (const std::string_view piece : pieces_of(text)) {
    const auto count = number_of<int>(piece);
    expects(count && *count >= 1, ErrorCode::usage, [&] {
      return sentence(option, " ", text,
                      " is no list of whole numbers of at least 1, such as 1,2,4");
    });
    counts.push_back(*count);
  }
  return counts;
}

double amount_of(std::string_view option, std::string_view text) {
  const auto number = number_of<double>(text);
  expects(number && *number > 0 && *number <= largest, ErrorCode::usage, [&] {
    return sentence(option, " ", text, " is no number; valid are those above 0 up to ", largest);
  });
  return *number;
}

double bytes_of(std::string_view option, std::string_view text) {
  std::string_view digits = text;
  if (digits.ends_with('B')) digits.remove_suffix(1);
  const bool binary = digits.ends_with('i');
  if (binary) digits.remove_suffix(1);
  int power = 0;
  constexpr std::string_view units = "KMGT";
  if (!digits.empty() && units.find(digits.back()) != units.npos) {
    power = static_cast<int>(units.find(digits.back())) + 1;
    digits.remove_suffix(1);
  }
  const auto number = number_of<double>(digits);
  const double bytes = number.value_or(0) * std::pow(binary ? 1024.0 : 1000.0, power);
  expects(number && bytes > 0 && bytes <= 1e18 && (!binary || power > 0), ErrorCode::usage, [&] {
    return sentence(option, " ", text,
                    " is no number of bytes above 0, such as 4e9, 80GB or 75GiB");
  });
  return bytes;
}

void TimeArguments::add_to(CLI::App& command, std::string_view of_what) {
  times_option = command.add_option(
      "--times", times,
      sentence("forward, input gradient, weight gradient of ", of_what, ", in any unit"));
  times_option->capture_default_str();
  comm_option = add_number(
      command, "--comm", [this](double given) { comm = given; },
      "time of one hop to another rank, as --times; transfers share no link");
  pair_option = add_number(
      command, "--pair", [this](double given) { pair = given; },
      sentence("time of a forward and a whole backward of ", of_what,
               " side by side; without it their sum"));
}

mega::dpp::ActionTimes TimeArguments::parsed() const {
  mega::dpp::ActionTimes result;
  const auto pieces = pieces_of(times);
  expects(pieces.size() == 3, ErrorCode::usage, [&] {
    return sentence("--times ", times, " has ", counted(static_cast<int>(pieces.size()), "number"),
                    "; valid are 3: forward, input gradient, weight gradient");
  });
  double* const into[] = {&result.forward, &result.backward_input, &result.backward_weight};
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto number = number_of<double>(pieces[i]);
    expects(number && *number > 0 && *number <= largest, ErrorCode::usage, [&] {
      return sentence("--times ", times, " has '", pieces[i], "'; valid are numbers above 0 up to ",
                      largest);
    });
    *into[i] = *number;
  }
  expect_amount("--comm", comm, true);
  result.hop = comm;
  if (pair_option == nullptr || pair_option->count() == 0) return result;
  const double backward = result.backward_input + result.backward_weight;
  const double least = std::max(result.forward, backward);
  expects(pair >= least && pair <= result.forward + backward, ErrorCode::usage, [&] {
    return sentence("--pair is ", pair, "; valid are ", least, " (the longer half) to ",
                    result.forward + backward, " (both halves one after the other)");
  });
  result.pair = pair;
  return result;
}

void OutputFiles::add(const std::string& name, std::string text) {
  if (name.empty()) return;
  const std::string path = mega::ckpt::ReplacedFile::destination(name);
  for (const File& file : files_) {
    expects(file.path != path, ErrorCode::usage,
            [&] { return sentence("two outputs are to be written to ", path); });
  }
  files_.push_back({path, std::move(text)});
}

bool OutputFiles::take_standard_output(bool json) const {
  for (const File& file : files_) {
    if (!mega::ckpt::ReplacedFile::is_standard_output(file.path)) continue;
    expects(!json, ErrorCode::usage, [&] {
      return sentence("--json prints where ", file.path, " is to be written; name another file");
    });
    return true;
  }
  return false;
}

void OutputFiles::write() const {
  using mega::ckpt::ReplacedFile;
  std::vector<std::unique_ptr<ReplacedFile>> whole;
  for (const bool streams : {false, true}) {
    for (const File& file : files_) {
      if (ReplacedFile::is_stream(file.path) != streams) continue;
      whole.push_back(std::make_unique<ReplacedFile>(file.path));
      whole.back()->write(file.text);
      whole.back()->close();
    }
  }
  for (const auto& file : whole) file->finish();
}

std::string counted(int count, std::string_view noun) {
  return sentence(count, " ", noun, count == 1 ? "" : noun.ends_with("ch") ? "es" : "s");
}

std::string joined(std::span<const int> numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i;
    while (end < numbers.size() && numbers[end] == numbers[i]) ++end;
    text += sentence(text.empty() ? "" : " ", numbers[i]);
    if (end - i > 1) text += sentence(" (", end - i, " times)");
    i = end;
  }
  return text;
}

std::string fixed(double value, int digits) {
  char text[512];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  const bool is_zero = std::string_view(text).find_first_not_of("-0.") == std::string_view::npos;
  return is_zero && text[0] == '-' ? text + 1 : text;
}

}  // namespace plan
