// What is usual of the peers of each, and outliers among them.
#include <mega/scan/verdicts/onset.hpp>
#include <mega/scan/verdicts/robust.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <random>
#include <vector>

namespace {

using namespace mega::scan::verdicts;

/// The definition, all with all: every step of every peer is looked at for each.
std::vector<UsualFigures> usual_by_definition(const Figures& figures, double limit,
                                              std::size_t from) {
  std::vector<UsualFigures> out;
  for (std::size_t i = 0; i < figures.size(); ++i) {
    std::vector<double> shares, quartiles;
    for (std::size_t k = 0; k < figures.size(); ++k) {
      std::vector<double> known;
      double above = 0;
      for (std::size_t s = from; s < figures[k].size(); ++s) {
        if (!figures[k][s]) continue;
        known.push_back(*figures[k][s]);
        above += *figures[k][s] > limit ? 1 : 0;
      }
      if (k == i || known.empty()) continue;
      std::sort(known.begin(), known.end());
      shares.push_back(above / static_cast<double>(known.size()));
      quartiles.push_back(known[(known.size() - 1) * 3 / 4]);
    }
    if (shares.empty()) {
      out.push_back({0, 0});
      continue;
    }
    std::sort(shares.begin(), shares.end());
    std::sort(quartiles.begin(), quartiles.end());
    out.push_back({shares[(shares.size() - 1) / 2], quartiles[(quartiles.size() - 1) / 2]});
  }
  return out;
}

TEST_CASE("scan: the lower median of the others is that of the values without one of them") {
  const std::vector<double> values{3, 1, 2, 2, -1, 7, 2};
  for (std::size_t count = 0; count <= values.size(); ++count) {
    const std::vector<double> all(values.begin(),
                                  values.begin() + static_cast<std::ptrdiff_t>(count));
    const MedianOfOthers medians(all);
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<double> others = all;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      const std::optional<double> found = medians.without(all[i]);
      CHECK(found.has_value() == !others.empty());
      if (found) CHECK(*found == lower_median(others));
    }
    std::vector<double> copy = all;
    const std::optional<double> of_all = medians.without(std::nullopt);
    CHECK(of_all.has_value() == !copy.empty());
    if (of_all) CHECK(*of_all == lower_median(copy));
  }
}

TEST_CASE("scan: what is usual of the peers is the same as when all are compared with all") {
  std::mt19937 random(7);
  const auto below = [&](std::size_t bound) { return random() % bound; };
  std::size_t apart = 0, partly_unknown = 0, wholly_unknown = 0;
  for (int round = 0; round < 2000; ++round) {
    const std::size_t count = below(12), steps = below(9);
    const std::size_t kinds = 1 + below(round % 2 == 0 ? 4 : 1000);  // few: many are equal
    Figures figures(count, std::vector<std::optional<double>>(steps));
    for (auto& own : figures) {
      const bool absent = below(6) == 0;
      wholly_unknown += absent ? 1 : 0;
      for (auto& figure : own) {
        if (absent || below(4) == 0) continue;
        figure = static_cast<double>(below(kinds)) / static_cast<double>(kinds) - 0.25;
      }
      partly_unknown += !absent && std::count(own.begin(), own.end(), std::nullopt) > 0 ? 1 : 0;
    }
    const std::size_t from = steps == 0 ? 0 : below(steps);
    const std::vector<UsualFigures> found = find_usual(figures, 0.3, from);
    const std::vector<UsualFigures> expected = usual_by_definition(figures, 0.3, from);
    REQUIRE(found.size() == count);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(found[i].share == expected[i].share);
      CHECK(found[i].upper_quartile == expected[i].upper_quartile);
      apart += found[i].upper_quartile != found[0].upper_quartile ? 1 : 0;
    }
  }
  // The inputs reach what they are meant to.
  CHECK(apart > 100);
  CHECK(partly_unknown > 1000);
  CHECK(wholly_unknown > 1000);
}

TEST_CASE("scan: outliers that began at different steps are judged by peers of the same steps") {
  // From step 12 on the peers are at 0.3 in every other step. Over all steps that is rare, and 0.2
  // in each step from 12 on would stand out; over the same steps it does not, but 0.6 does, and so
  // does what began before.
  constexpr std::size_t steps = 24;
  Figures figures(8, std::vector<std::optional<double>>(steps, 0.0));
  for (std::size_t i = 0; i < 5; ++i) {
    for (std::size_t s = 12 + i % 2; s < steps; s += 2) figures[i][s] = 0.3;
  }
  for (std::size_t s = 12; s < steps; ++s) figures[5][s] = 0.2, figures[6][s] = 0.6;
  for (std::size_t s = 3; s < steps; ++s) figures[7][s] = 0.7;
  const std::vector<Onset> found = find_outliers(figures, 0.1);
  REQUIRE(found.size() == 8);
  for (std::size_t i = 0; i < 6; ++i) CHECK(!found[i].lasts());
  CHECK(found[6].lasts());
  CHECK(found[6].first == 12);
  CHECK(found[6].level == doctest::Approx(0.6));
  CHECK(found[7].lasts());
  CHECK(found[7].first == 3);
  CHECK(found[7].level == doctest::Approx(0.7));
}

TEST_CASE("scan: no figures, one alone, and none that is known") {
  CHECK(find_usual({}, 0.1).empty());
  CHECK(find_outliers({}, 0.1).empty());
  const Figures alone{{0.5, 0.6}};
  CHECK(find_usual(alone, 0.1)[0].share == 0);
  CHECK(find_usual(alone, 0.1)[0].upper_quartile == 0);
  CHECK(find_outliers(alone, 0.1)[0].slow == 2);
  const Figures unknown(3, std::vector<std::optional<double>>(4));
  for (const Onset& o : find_outliers(unknown, 0.1)) CHECK(!o.lasts());
}

}  // namespace
