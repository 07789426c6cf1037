/// @file  Tests of pipeline layouts as text, against the unrolling by text that Megatron-LM does.
#include "tests/support/refusal.hpp"
#include <mega/core/error.hpp>
#include <mega/dpp/layout.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <random>
#include <string>
#include <string_view>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

std::vector<int> counts_of(std::string_view text) {
  const Layout layout(text);
  return {layout.counts().begin(), layout.counts().end()};
}

std::string refusal(std::string_view text) {
  return mega_test::refusal_of([&] { (void)Layout(text); });
}

std::string repeated(const std::string& piece, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += piece;
  return out;
}

/// Layers of each stage by unrolling the text itself: groups first, then single pieces.
std::vector<int> unrolled(std::string text) {
  std::erase(text, ',');
  for (std::size_t open; (open = text.find('(')) != std::string::npos;) {
    const std::size_t close = text.find(')', open);
    std::size_t end = close + 2;
    while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
    text = text.substr(0, open) +
           repeated(text.substr(open + 1, close - open - 1),
                    std::stoi(text.substr(close + 2, end - close - 2))) +
           text.substr(end);
  }
  for (std::size_t star; (star = text.find('*')) != std::string::npos;) {
    std::size_t end = star + 1;
    while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
    text = text.substr(0, star - 1) +
           repeated(text.substr(star - 1, 1), std::stoi(text.substr(star + 1, end - star - 1))) +
           text.substr(end);
  }
  std::vector<int> counts(1, 0);
  for (const char c : text) {
    if (c == '|') counts.push_back(0);
    if (c == 't') ++counts.back();
  }
  return counts;
}

}  // namespace

constexpr Layout at_compile_time("E t3|t4|t4|t3 L");
static_assert(at_compile_time.stages() == 4 && at_compile_time.layers() == 14);
static_assert(at_compile_time.counts()[1] == 4 && at_compile_time.chunks(2) == 2);
static_assert(at_compile_time.split(14, 4, 1).of_stage(2) == LayerRange{7, 11});
static_assert(Layout("Et*3|(tt|)*29,t|L").stages() == 32);

TEST_CASE("dpp: layouts in both spellings") {
  CHECK(counts_of("E t3|t4|t4|t3 L") == std::vector<int>{3, 4, 4, 3});
  CHECK(counts_of("Ettt|(t*4|)*2,tttL") == std::vector<int>{3, 4, 4, 3});
  CHECK(counts_of("EtL") == std::vector<int>{1});
  CHECK(counts_of("\tE ,, t 2 * 3 | , t\t* 2,L ") == std::vector<int>{6, 2});
  CHECK(counts_of("E*1t1L*1") == std::vector<int>{1});
  CHECK(counts_of("E(t|t)*3L") == std::vector<int>{1, 2, 2, 1});
  CHECK(counts_of("E t12|t0012 L") == std::vector<int>{12, 12});
  CHECK(counts_of("(Et)*1|tL") == std::vector<int>{1, 1});
  // Groups that begin or end in a stage's middle.
  CHECK(counts_of("Et(|tt)*2,tL") == std::vector<int>{1, 2, 3});
  CHECK(counts_of("E(t|tt|ttt)*2,ttL") == std::vector<int>{1, 2, 4, 2, 5});
  // Stages of the embedding and of the head alone.
  CHECK(counts_of("E|t*3|(t|)*5L") == std::vector<int>{0, 3, 1, 1, 1, 1, 1, 0});
  CHECK(counts_of("E|t*3|(t|)*4t|L") == std::vector<int>{0, 3, 1, 1, 1, 1, 1, 0});
  CHECK(counts_of("E|L") == std::vector<int>{0, 0});
  CHECK(counts_of("EL") == std::vector<int>{0});

  const std::vector<int> deep = counts_of("Et*3|(tt|)*29,t|L");
  REQUIRE(deep.size() == 32);
  CHECK(deep.front() == 3);
  CHECK(deep[1] == 2);
  CHECK(deep[29] == 2);
  CHECK(deep[30] == 1);
  CHECK(deep[31] == 0);
}

TEST_CASE("dpp: a thousand random layouts read as their text unrolled says") {
  std::mt19937 random(7);
  const auto upto = [&](unsigned n) { return static_cast<int>(random() % n); };
  // Of layers and separators; every separator has a layer before it.
  const auto pieces = [&] {
    std::string out;
    for (int i = upto(4) + 1; i > 0; --i) {
      const char* const kinds[] = {"t", "t,", "t|", "t*2|", "t*11", "t*3,", "tt"};
      out += kinds[upto(7)];
    }
    return out;
  };
  for (int i = 0; i < 1000; ++i) {
    std::string text = "E";
    for (int part = upto(4) + 1; part > 0; --part)
      text += upto(2) == 0 ? pieces() : "(" + pieces() + ")*" + std::to_string(upto(12) + 1);
    text += "L";
    CAPTURE(text);
    const std::vector<int> counts = counts_of(text);
    CHECK(counts == unrolled(text));
    CHECK(counts_of(layout_text(counts)) == counts);
  }
}

TEST_CASE("dpp: any edit of a layout is read or refused in a sentence with its place") {
  const std::string valid = "Et*3|(tt|)*4,t2|L";
  const std::string letters = "EtLm|*()0x9, ";
  int accepted = 0, refused = 0;
  for (std::size_t at = 0; at <= valid.size(); ++at) {
    for (const char c : letters) {
      for (const std::string& text :
           {valid.substr(0, at) + c + valid.substr(at),
            at < valid.size() ? valid.substr(0, at) + c + valid.substr(at + 1) : valid,
            at < valid.size() ? valid.substr(0, at) + valid.substr(at + 1) : valid}) {
        CAPTURE(text);
        const std::string said = refusal(text);
        if (said == "accepted") {
          ++accepted;
          CHECK(counts_of(layout_text(counts_of(text))) == counts_of(text));
        } else {
          ++refused;
          CHECK((said.find(" character ") != std::string::npos ||
                 said.find("does not end with L") != std::string::npos));
        }
      }
    }
  }
  CHECK(accepted > 50);
  CHECK(refused > 200);
}

TEST_CASE("dpp: a wrong layout is refused with the character and what may stand there") {
  CHECK(refusal("") ==
        "an empty layout names no stage; the least is 'E t L', one layer in one stage");
  CHECK(refusal(" , ") == refusal(""));
  CHECK(refusal("E t|t") == "layout 'E t|t' does not end with L, which stands for head and loss");
  CHECK(refusal("t|tL") ==
        "layout 't|tL': 't' at character 1 comes before E; a layout begins with E, the embedding");
  CHECK(refusal("|E t L").find("'|' at character 1 comes before E") != std::string::npos);
  CHECK(refusal("L").find("'L' at character 1 comes before E") != std::string::npos);
  CHECK(refusal("Et|EtL") ==
        "layout 'Et|EtL': 'E' at character 4 is a second one; E stands once, at the beginning");
  CHECK(refusal("E*2 t L").find("'E' at character 1 is a second one") != std::string::npos);
  CHECK(refusal("EtL|t") ==
        "layout 'EtL|t': '|' at character 4 comes after L; L ends the layout, once");
  CHECK(refusal("EtLL").find("'L' at character 4 comes after L") != std::string::npos);
  CHECK(refusal("Et(tL)*2").find("'t' at character 4 comes after L") != std::string::npos);
  CHECK(refusal("Et||tL") != "accepted");
  CHECK(refusal("Et|t||tL") ==
        "layout 'Et|t||tL': '|' at character 6 ends stage 2, counted from 0, without a layer; only "
        "the first and the last stage may hold none");
  CHECK(refusal("E|||L").find("ends stage 1") != std::string::npos);
  CHECK(refusal("Et*3|(tt|)*29,m|L") ==
        "layout 'Et*3|(tt|)*29,m|L': 'm' at character 15 is a layer of multi-token prediction, "
        "which these models do not have; leave it out");
  CHECK(refusal("E t*x L") ==
        "layout 'E t*x L': '*' at character 4 has no count behind it, as in t*3");
  CHECK(refusal("E t*").find("'*' at character 4 has no count") != std::string::npos);
  CHECK(refusal("E t*-1 L").find("'*' at character 4 has no count") != std::string::npos);
  CHECK(refusal("E (t*)*3 L").find("'*' at character 5 has no count") != std::string::npos);
  CHECK(refusal("E t*0 L") == "layout 'E t*0 L': the count at character 5 is 0; the least is 1");
  CHECK(refusal("E t0 L").find("character 4 is 0") != std::string::npos);
  CHECK(refusal("E (t)*0 L").find("character 7 is 0") != std::string::npos);
  CHECK(refusal("E*t L").find("'*' at character 2 has no count") != std::string::npos);
  CHECK(refusal("E t**3 L").find("'*' at character 4 has no count") != std::string::npos);
  CHECK(refusal("E t*3*2 L") ==
        "layout 'E t*3*2 L': '*' at character 6 has no piece before it, as in t*3");
  CHECK(refusal("E |3 t L") ==
        "layout 'E |3 t L': '3' at character 4 is a count without t or * before it, as in t3 or "
        "t*3");
  CHECK(refusal("E (t|)*2,) L") ==
        "layout 'E (t|)*2,) L': ')' at character 10 closes no group; leave it out, or open one "
        "with (");
  CHECK(refusal("E (tt|t L") == "layout 'E (tt|t L': '(' at character 3 has no ) behind it");
  CHECK(refusal("E ((t)*2|)*2 L") ==
        "layout 'E ((t)*2|)*2 L': '(' at character 4 stands in the group of character 3; a group "
        "holds no other group, so write that one out");
  CHECK(refusal("E ( ,)*1000000000 L").find("'(' at character 3 begins a group without a piece") !=
        std::string::npos);
  CHECK(refusal("E (tt) L") ==
        "layout 'E (tt) L': ')' at character 6 has no * and count behind it; a group is repeated, "
        "as in (tt|)*3");
  CHECK(refusal("E (t)3 L").find("')' at character 5 has no *") != std::string::npos);
  CHECK(refusal("e t L").find("the embedding is E") != std::string::npos);
  CHECK(refusal("E T L").find("a layer is t") != std::string::npos);
  CHECK(refusal("E t l").find("head and loss are L") != std::string::npos);
  CHECK(refusal("E t;t L") ==
        "layout 'E t;t L': ';' at character 4 is no piece of a layout; the pieces are E, t, L, | "
        "and groups in ()");
  CHECK(refusal(std::string_view("E t\0L", 5)).find("layout 'E t?L': '?' at character 4") == 0);
  CHECK(refusal("E t\xe2\x80\x93L").find("'?' at character 4 is no piece") != std::string::npos);
}

TEST_CASE("dpp: counts that no model has end at once") {
  CHECK(refusal("E t99999999999999999999 L").find("character 4 is above the limit of 65536") !=
        std::string::npos);
  CHECK(refusal("E t65536|t L").find("more layers than the limit of 65536") != std::string::npos);
  CHECK(counts_of("E t65536 L") == std::vector<int>{65536});
  CHECK(refusal("E (t65536)*65536 L").find("more layers") != std::string::npos);
  CHECK(refusal("E t65536*65536 L").find("more layers") != std::string::npos);
  CHECK(refusal("E (t|)*1024 L").find("more stages than the limit of 1024") != std::string::npos);
  CHECK(counts_of("E (t|)*1023 L").size() == 1024);
}

TEST_CASE("dpp: a layout that does not fit the model or the ranks names the difference") {
  const Layout layout("E t3|t4 L");
  CHECK(layout.split(7, 2, 1).of_stage(1) == LayerRange{3, 7});
  CHECK(layout.split(7, 1, 2).stages() == 2);
  CHECK(mega_test::refusal_of([&] { (void)layout.split(8, 2, 1); }) ==
        "layout 'E t3|t4 L' has 7 layers, but the model has 8; add 1 t");
  CHECK(mega_test::refusal_of([&] { (void)layout.split(4, 2, 1); }) ==
        "layout 'E t3|t4 L' has 7 layers, but the model has 4; take away 3 t");
  CHECK(mega_test::refusal_of([&] { (void)layout.split(7, 2, 2); }) ==
        "layout 'E t3|t4 L' has 2 stages, but 2 ranks with 2 chunks each hold 4; add 2 |");
  CHECK(mega_test::refusal_of([&] { (void)layout.split(7, 1, 1); }) ==
        "layout 'E t3|t4 L' has 2 stages, but 1 ranks with 1 chunks each hold 1; take away 1 |");
  const Layout five("E(t|)*4tL");
  CHECK(five.chunks(5) == 1);
  CHECK(five.chunks(1) == 5);
  CHECK(mega_test::refusal_of([&] { (void)five.chunks(2); }) ==
        "layout 'E t|t|t|t|t L' has 5 stages, which do not divide over 2 ranks; the nearest "
        "numbers are 4 and 6");
  CHECK(mega_test::refusal_of([&] { (void)five.chunks(8); }).find("the nearest numbers are 8") !=
        std::string::npos);
  CHECK(mega_test::refusal_of([&] { (void)five.chunks(0); }) != "accepted");
}

TEST_CASE("dpp: the text of a split makes the split again") {
  CHECK(layout_text(split_layers(9, 4)) == "E t2|t2|t3|t2 L");
  CHECK(layout_text(LayerSplit(5, std::vector<int>{0, 4, 1, 0})) == "E|t4|t|L");
  CHECK(layout_text(LayerSplit(0, std::vector<int>{0, 0})) == "E|L");
  CHECK(layout_text(LayerSplit(0, std::vector<int>{0})) == "E L");
  CHECK(layout_text(split_layers(1, 1)) == "E t L");
}
