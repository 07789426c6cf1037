/// @file  The command line of Config, derived from describe().
#pragma once
#include "config.hpp"
#include <mega/core/error.hpp>

#include <CLI/CLI.hpp>

#include <charconv>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

namespace trainer {

/// Makes a CLI11 option of every field. Long options may be written with underscores.
class CommandLine {
 public:
  CommandLine(Config& config, const std::string& program, const std::string& what)
      : app_(what, program) {
    app_.get_formatter()->column_width(44);
    app_.footer(
        "Exit codes: 0 done, also where SIGTERM or SIGINT asked it to stop, 2 wrong usage or "
        "input,\n"
        "3 a rank or its machine failed, 4 a checkpoint, a trace or a log could not be written.");
    describe(config, *this);
  }

  void section(const char* title) { section_ = title; }

  void operator()(const char* names, bool& member, const char* help) {
    app_.add_flag(options(names), member, help)->group(section_)->multi_option_policy(last);
  }
  template <class T>
  void operator()(const char* names, T& member, const char* help) {
    CLI::Option& option = *app_.add_option(options(names), member, help)
                               ->group(section_)
                               ->capture_default_str()
                               ->multi_option_policy(last);
    if constexpr (std::is_integral_v<T>) {
      option.check([](const std::string& text) { return wrong_integer<T>(text); });
    } else if constexpr (std::is_same_v<T, std::string>) {
      // Where nothing is the default, an empty text is what a script gives whose variable is unset.
      if (member.empty()) {
        option.check([](const std::string& text) {
          return text.empty() ? std::string("an empty text; give it a value or leave it out")
                              : std::string();
        });
      }
    }
  }
  template <class E, std::size_t N>
  void choice(const char* names, E& member, const Names<E, N>& table, const char* help) {
    std::map<std::string, E> values;
    std::string listed;
    for (const auto& [name, value] : table) {
      values.emplace(name, value);
      listed += (listed.empty() ? "" : "|") + std::string(name);
    }
    app_.add_option_function<std::string>(
            options(names),
            [&member, values, listed, names](const std::string& text) {
              const auto found = values.find(text);
              if (found == values.end())
                throw CLI::ValidationError(
                    mega::sentence("--", first(names), " is '", text, "'; it takes ", listed));
              member = found->second;
            },
            help)
        ->group(section_)
        ->type_name(listed)
        ->default_str(std::string(name_of(table, member)))
        ->multi_option_policy(last);
  }

  /// Exit code where the program should end now (help, wrong usage), else nothing.
  [[nodiscard]] std::optional<int> parse(int argc, const char* const* argv) {
    // CLI11 takes the arguments last first.
    std::vector<std::string> arguments;
    for (int i = argc - 1; i > 0; --i) arguments.push_back(with_dashes(argv[i]));
    try {
      app_.parse(arguments);
    } catch (const CLI::CallForHelp&) {
      std::fputs(app_.help().c_str(), stdout);
      return 0;
    } catch (const CLI::ParseError& e) {
      std::fprintf(stderr, "%s: %s; --help lists the options.\n", app_.get_name().c_str(),
                   e.what());
      return 2;
    }
    return std::nullopt;
  }

 private:
  /// A later option wins, so that defaults of a script can be overridden behind them.
  static constexpr CLI::MultiOptionPolicy last = CLI::MultiOptionPolicy::TakeLast;

  /// What is wrong with a text as a T; empty where nothing is. CLI11 itself takes the nearest T for
  /// a number beyond 64 bits, and 2^64 - 1 for -1.
  template <class T>
  static std::string wrong_integer(std::string_view text) {
    T value{};
    const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failed == std::errc() && end == text.data() + text.size()) return {};
    return mega::sentence("'", text, "' is not a whole number from ", std::numeric_limits<T>::min(),
                          " to ", std::numeric_limits<T>::max());
  }

  static std::string_view first(std::string_view names) { return names.substr(0, names.find(',')); }

  static std::string options(std::string_view names) {
    std::string out;
    for (std::size_t at = 0; at <= names.size();) {
      const std::size_t end = std::min(names.find(',', at), names.size());
      out += (out.empty() ? "--" : ",--") + std::string(names.substr(at, end - at));
      at = end + 1;
    }
    return out;
  }

  /// "--micro_batch_size=3" as "--micro-batch-size=3"; values keep their underscores.
  static std::string with_dashes(std::string argument) {
    if (argument.rfind("--", 0) != 0) return argument;
    for (std::size_t i = 0; i < argument.size() && argument[i] != '='; ++i) {
      if (argument[i] == '_') argument[i] = '-';
    }
    return argument;
  }

  CLI::App app_;
  std::string section_;
};

}  // namespace trainer
