#include <mega/train/parameter_table.hpp>

#include <doctest/doctest.h>

#include <string>
#include <vector>

using mega::Index;
using mega::Parameter;
using mega::train::ParameterTable;
using mega::train::Range;
using mega::train::Region;

namespace {

std::vector<std::vector<Parameter>> model() {
  return {{{.name = "embedding", .shape = {101, 4}, .shard = {0, {101}}},
           {.name = "norm", .shape = {4}, .partial_over_tensor = true}},
          {{.name = "a", .shape = {6, 3}, .shard = {0, {6}}}, {.name = "b", .shape = {5}}},
          {{.name = "head", .shape = {101, 4}, .shard = {0, {101}}, .tied_to = "embedding"}}};
}

}  // namespace

TEST_CASE("train: every tensor has a place of its own, partial ones first, pieces divide") {
  const auto stages = model();
  for (const int tensor : {1, 2}) {
    for (const int data : {1, 2, 3}) {
      const std::vector<int> own{0, 1};
      const ParameterTable table(
          stages, own, {.tensor = 0, .tensor_degree = tensor, .data = 0, .data_degree = data});
      std::vector<int> used(static_cast<std::size_t>(table.gradient_size()), 0);
      for (const auto& e : table.entries()) {
        CHECK(e.gradient == e.value);
        CHECK(e.value % ParameterTable::granule == 0);
        for (Index i = e.value; i < e.value + e.size; ++i) ++used[static_cast<std::size_t>(i)];
      }
      for (const int times : used) CHECK(times <= 1);
      const Region& first = table.regions()[0];
      CHECK(first.begin == 0);
      CHECK(first.partial_end == 16);
      CHECK(table.entries()[1].value == 0);
      CHECK(first.size() % (data * ParameterTable::granule) == 0);
      CHECK(table.regions()[1].partial_end == table.regions()[1].begin);
      Index covered = 0;
      for (int d = 0; d < data; ++d) {
        CHECK(table.piece(first, d).begin == first.begin + covered);
        covered += table.piece(first, d).size();
      }
      CHECK(covered == first.size());
      CHECK(table.model_parameters() == 4);
      CHECK(table.model_size() == 404 + 4 + 18 + 5);
      CHECK(table.has_ties());
      CHECK(table.ties_lead_to("embedding"));
      CHECK(!table.ties_lead_to("a"));
    }
  }
}

TEST_CASE(
    "train: a tied parameter shares values with an owner on its rank and never its accumulator") {
  const auto stages = model();
  const std::vector<int> both{0, 2}, only_head{2};
  const ParameterTable together(stages, both, {});
  const auto& head = together.entries()[2];
  CHECK(head.alias);
  CHECK(head.value == together.entries()[0].value);
  CHECK(head.gradient >= together.value_size());
  CHECK(head.order == 0);
  CHECK(!head.counted);
  CHECK(together.entries()[0].counted);
  const ParameterTable apart(stages, only_head, {});
  CHECK(!apart.entries()[0].alias);
  CHECK(!apart.entries()[0].counted);
  CHECK(apart.gradient_size() == apart.value_size());
}

TEST_CASE("train: replicated tensors count once over the tensor axis") {
  const auto stages = model();
  const std::vector<int> own{0};
  const ParameterTable second(stages, own,
                              {.tensor = 1, .tensor_degree = 2, .data = 0, .data_degree = 1});
  CHECK(second.entries()[0].counted);
  CHECK(!second.entries()[1].counted);
}

TEST_CASE("train: names used twice and broken ties are refused by name") {
  const auto refusal = [](std::vector<std::vector<Parameter>> stages) -> std::string {
    try {
      const std::vector<int> own{0};
      (void)ParameterTable(stages, own, {});
    } catch (const mega::Error& e) {
      return e.what();
    }
    return "accepted";
  };
  CHECK(refusal({{{.name = "x", .shape = {1}}}, {{.name = "x", .shape = {1}}}}).find("'x'") !=
        std::string::npos);
  CHECK(refusal({{{.name = "x", .shape = {1}, .tied_to = "y"}}})
            .find("'y', which no stage declares") != std::string::npos);
  CHECK(refusal({{{.name = "x", .shape = {1}}}, {{.name = "z", .shape = {2}, .tied_to = "x"}}})
            .find("another shape") != std::string::npos);
}
