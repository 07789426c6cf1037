/// @file  The printed form of Config, derived from describe().
#pragma once
#include "config.hpp"

#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

namespace trainer {

/// The effective configuration, an option a line, as the command line would take it.
class Listing {
 public:
  void section(const char* title) { out_ << "# " << title << '\n'; }
  template <class T>
  void operator()(std::string_view names, const T& member, const char*) {
    const std::string_view name = names.substr(0, names.find(','));
    if constexpr (std::is_same_v<T, std::string>) {
      // Most texts are empty where they are not given, and cannot be given so.
      if (member.empty()) {
        out_ << "# --" << name << " is empty\n";
        return;
      }
    }
    out_ << "--" << name;
    if constexpr (std::is_same_v<T, bool>) {
      out_ << '=' << (member ? "true" : "false") << '\n';
    } else if constexpr (std::is_same_v<T, std::string>) {
      out_ << "='" << member << "'\n";
    } else {
      out_ << '=' << member << '\n';
    }
  }
  template <class E, std::size_t N>
  void choice(std::string_view names, const E& member, const Names<E, N>& table, const char*) {
    out_ << "--" << names.substr(0, names.find(',')) << '=' << name_of(table, member) << '\n';
  }

  [[nodiscard]] static std::string of(const Config& config) {
    Listing listing;
    describe(config, listing);
    return listing.out_.str();
  }

 private:
  std::ostringstream out_;
};

}  // namespace trainer
