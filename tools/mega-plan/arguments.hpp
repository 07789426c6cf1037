/// @file  What the subcommands read from the command line and write to files, refused in one
/// sentence where it makes no sense.
#pragma once
#include <mega/dpp/simulator.hpp>

#include <CLI/CLI.hpp>

#include <cstddef>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace plan {

/// Largest p*m*v of a plan: what it needs stays below two gigabytes.
inline constexpr long long most_forwards = 1LL << 22;
inline constexpr long long most_stages = 1LL << 14;

/// Throws unless p, m, v >= 1 and p*m*v <= most_forwards.
void expect_size(int p, int m, int v);

/// An option that takes a whole number of least..most. Another text is refused with these.
CLI::Option* add_whole(CLI::App& command, const std::string& option, std::function<void(int)> take,
                       const std::string& description, int least = 1,
                       int most = std::numeric_limits<int>::max());

/// An option that takes a number, of which the command itself says what is valid.
CLI::Option* add_number(CLI::App& command, const std::string& option,
                        std::function<void(double)> take, const std::string& description);

/// Throws where an option was given with nothing for its value.
void expect_values(const CLI::App& command);

/// The whole of a file of at most `limit` bytes, which may be a pipe or a device such as
/// /dev/stdin. Throws Error(bad_input).
[[nodiscard]] std::string read_input(const std::string& path, std::size_t limit);

/// Throws unless the number is finite and above 0; `zero`: or 0.
void expect_amount(std::string_view option, double value, bool zero = false);

/// "1,2,4" as whole numbers of at least 1.
[[nodiscard]] std::vector<int> counts_of(std::string_view option, std::string_view text);

/// A finite number above 0.
[[nodiscard]] double amount_of(std::string_view option, std::string_view text);

/// "4e9" or "80GB" as a number of bytes: K, M, G and T count by 1000, Ki, Mi, Gi and Ti by 1024.
[[nodiscard]] double bytes_of(std::string_view option, std::string_view text);

/// Durations of actions, as the options --times, --comm and --pair give them.
struct TimeArguments {
  std::string times = "1,1,1";
  double comm = 0;
  double pair = -1;  ///< not given

  /// @param of_what  whose times they are, for the help
  void add_to(CLI::App& command, std::string_view of_what);
  [[nodiscard]] mega::dpp::ActionTimes parsed() const;

  CLI::Option* times_option = nullptr;
  CLI::Option* comm_option = nullptr;
  CLI::Option* pair_option = nullptr;
};

/// Files of one run. None appears before all of them are written whole; each replaces what had its
/// name at once. Pipes and devices get their bytes first: see ckpt::ReplacedFile.
class OutputFiles {
 public:
  /// An empty name is passed over. Throws where two files would have one path, and where the name
  /// belongs to a directory or a disk.
  void add(const std::string& name, std::string text);
  /// Whether one of them goes where the command prints to, which then prints nothing else.
  /// Throws Error(usage) where it was asked for JSON there, too.
  [[nodiscard]] bool take_standard_output(bool json) const;
  void write() const;

 private:
  struct File {
    std::string path;
    std::string text;
  };
  std::vector<File> files_;
};

/// "1 chunk", "2 chunks".
[[nodiscard]] std::string counted(int count, std::string_view noun);

/// Equal neighbours told once: "8 7 (3 times) 6".
[[nodiscard]] std::string joined(std::span<const int> numbers);

/// With as many digits after the point as asked; what they show as zero has no sign.
[[nodiscard]] std::string fixed(double value, int digits);

}  // namespace plan
