/// @file  The sentence with which an act is refused.
#pragma once
#include <mega/core/error.hpp>

#include <doctest/doctest.h>

#include <string>

namespace mega_test {

/// what() of the Error that act() throws, whose code is checked; "accepted" where it throws none.
template <class Act>
[[nodiscard]] std::string refusal_of(const Act& act,
                                     mega::ErrorCode code = mega::ErrorCode::usage) {
  try {
    act();
  } catch (const mega::Error& e) {
    CHECK(e.code() == code);
    return e.what();
  }
  return "accepted";
}

}  // namespace mega_test
