/// @file  Tests of the picture of a timeline: exact coordinates of a tiny one, and that no text
/// leaves its place in crowded ones.
#include <mega/core/error.hpp>
#include <mega/dpp/cluster_simulator.hpp>
#include <mega/dpp/svg.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

using namespace mega;
using namespace mega::dpp;

namespace {

using enum ActionKind;

int count(std::string_view text, std::string_view what) {
  int found = 0;
  for (std::size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++found;
  return found;
}

bool has(std::string_view text, std::string_view what) {
  return count(text, what) == 1;
}

/// An element of the picture, with the attributes that place it.
struct Element {
  bool is_text = false;
  std::string css, content;
  double x = 0, y = 0, width = 0, height = 0, size = 0;
};

std::string attribute(std::string_view tag, std::string_view name) {
  const std::string key = " " + std::string(name) + "=\"";
  const std::size_t at = tag.find(key);
  if (at == tag.npos) return "";
  const std::size_t begin = at + key.size();
  return std::string(tag.substr(begin, tag.find('"', begin) - begin));
}

std::vector<Element> elements(std::string_view svg) {
  std::vector<Element> found;
  for (std::size_t at = svg.find('<'); at != svg.npos; at = svg.find('<', at + 1)) {
    const std::string_view tag = svg.substr(at, svg.find('>', at) - at);
    const bool is_text = tag.substr(0, 6) == "<text ";
    if (!is_text && tag.substr(0, 6) != "<rect ") continue;
    Element e;
    e.is_text = is_text;
    e.css = attribute(tag, "class");
    const auto value = [&](std::string_view name) {
      return std::strtod(attribute(tag, name).c_str(), nullptr);
    };
    e.x = value("x");
    e.y = value("y");
    e.width = value("width");
    e.height = value("height");
    e.size = value("font-size");
    const std::size_t close = at + tag.size() + 1;
    if (is_text) e.content = std::string(svg.substr(close, svg.find('<', close) - close));
    if (e.css != "bg") found.push_back(e);
  }
  return found;
}

/// Open tags are closed in order: enough of a parser for what the picture uses.
bool is_well_formed(std::string_view svg) {
  std::vector<std::string> open;
  for (std::size_t at = svg.find('<'); at != svg.npos; at = svg.find('<', at + 1)) {
    const std::size_t end = svg.find('>', at);
    if (end == svg.npos) return false;
    const std::string_view tag = svg.substr(at + 1, end - at - 1);
    if (tag.front() == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.emplace_back(tag.substr(0, tag.find(' ')));
    }
    at = end;
  }
  return open.empty();
}

/// 0.602 em is the advance of the widest common monospaced fonts.
double text_width(const Element& text) {
  return 0.602 * text.size * static_cast<double>(text.content.size());
}

void check_text_stays_inside(const std::string& svg, double width) {
  const auto all = elements(svg);
  std::vector<std::pair<double, double>> axis;  // extents of the axis' labels, from left to right
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Element& e = all[i];
    if (!e.is_text) {
      CHECK(e.x + e.width <= width + 0.01);
      continue;
    }
    CHECK(e.size >= 7);  // smaller than that nobody reads
    double left = e.x;
    if (e.css == "n") left -= text_width(e) / 2;
    if (e.css == "r") left -= text_width(e);
    CHECK(left >= 0);
    CHECK(left + text_width(e) <= width);
    if (e.css != "n") continue;
    const Element& box = all[i - 1];  // a micro-batch's number follows its box
    const bool in_box =
        !box.is_text && box.css != "idle" && box.y < e.y && e.y < box.y + box.height;
    if (in_box) {
      CHECK(left >= box.x);
      CHECK(left + text_width(e) <= box.x + box.width);
      CHECK(e.size <= box.height);
    } else {
      axis.push_back({left, left + text_width(e)});
    }
  }
  CHECK(axis.size() >= 2);
  for (std::size_t i = 1; i < axis.size(); ++i) CHECK(axis[i - 1].second < axis[i].first);
}

}  // namespace

TEST_CASE("dpp: picture of two actions, every coordinate") {
  Timeline timeline;
  timeline.ranks = {{{make_action(forward, 0, 0), 0, 1}}, {{make_action(forward, 0, 0), 1, 2}}};
  const std::string svg =
      to_svg(timeline, {.title = "a < b", .unit = "ms", .width = 400, .row_height = 20});
  CHECK(is_well_formed(svg));
  CHECK(has(svg, "<title>a &lt; b</title>"));
  CHECK(has(svg, "class=\"t\" x=\"10\" y=\"24\" font-size=\"14\">a &lt; b</text>"));
  // The plot begins after "rank 1", 6 * 0.61 * 12 = 43.92 wide, and two margins of 10; it ends
  // half a "2", 3.66, before the right margin: 63.92 to 386.34, so a unit is 161.21 wide.
  const auto all = elements(svg);
  std::vector<Element> boxes, idle;
  for (const Element& e : all) {
    if (e.css == "forward o") boxes.push_back(e);
    if (e.css == "idle") idle.push_back(e);
  }
  REQUIRE(boxes.size() == 2);
  CHECK(boxes[0].x == 63.92);
  CHECK(boxes[1].x == 225.13);
  CHECK(boxes[0].width == 161.21);
  CHECK(boxes[1].width == 161.21);
  CHECK(boxes[0].y == 34);
  CHECK(boxes[1].y == 34 + 20 + 4);
  CHECK(boxes[0].height == 20);
  REQUIRE(idle.size() == 3);  // two rows and the legend
  CHECK(idle[0].x == 63.92);
  CHECK(idle[0].width == 322.42);
  CHECK(idle[2].width == 12);
  CHECK(has(svg, "<title>forward of chunk 0, micro-batch 0: 1 to 2</title>"));
  CHECK(has(svg, "class=\"r\" x=\"53.92\" y=\"48\" font-size=\"12\">rank 0</text>"));
  CHECK(has(svg, ">rank 1</text>"));
  CHECK(has(svg, ">ms</text>"));
  // The first number and the tick of 0.5: 63.92 + 80.605, which rounds to either side.
  CHECK(count(svg, "class=\"n\" x=\"144.53\"") + count(svg, "class=\"n\" x=\"144.52\"") == 2);
  // Rows end at 34 + 2 * 24 = 82, ticks below them, then the legend.
  CHECK(has(svg, "<path class=\"axis\" d=\"M63.92 82v5\"/>"));
  CHECK(has(svg, "class=\"n\" x=\"386.34\" y=\"100\" font-size=\"12\">2</text>"));
  for (const char* tick : {">0.5</text>", ">1.5</text>"}) CHECK(has(svg, tick));
  CHECK_FALSE(has(svg, ">0.2</text>"));  // its label would come too near its neighbours
  CHECK(has(svg, ">idle</text>"));
  CHECK(count(svg, "<rect ") == 1 + 2 + 2 + 2);
  CHECK_FALSE(svg.find("<script") != svg.npos);
  CHECK(has(svg, "prefers-color-scheme:dark"));
}

TEST_CASE("dpp: picture has a box for each action, fused halves one above the other") {
  Timeline timeline;
  timeline.ranks = {{{{forward, true, 1, 3}, 0, 4}, {{backward, false, 0, 2}, 0, 4}}};
  const std::string svg = to_svg(timeline, {.width = 400, .row_height = 30});
  const auto all = elements(svg);
  const auto box = [&](std::string_view css) {
    return *std::find_if(all.begin(), all.end(), [&](const Element& e) { return e.css == css; });
  };
  CHECK(box("forward o").y == 10);
  CHECK(box("forward o").height == 15);
  CHECK(box("backward o").y == 25);
  CHECK(box("backward o").height == 15);
  CHECK(box("forward o").width == box("backward o").width);
  CHECK(has(svg, ">chunk 0</text>"));
  CHECK(has(svg, ">chunk 1</text>"));
  CHECK(count(svg, "fill-opacity=\"0.5\"") == 2);  // chunk 1: its box and the legend
  CHECK_FALSE(has(svg, ">chunk 2</text>"));
}

TEST_CASE("dpp: text of a picture stays in its place, however crowded") {
  const auto check = [](const ScheduleView& s, const SvgOptions& options, double unit = 1) {
    Cluster cluster;
    cluster.times = {{1.23 * unit, 1.07 * unit, 0.91 * unit, 0.3 * unit}};
    cluster.jitter = {.compute = 0.3, .link_delay = 0.5, .seed = 3};
    const ClusterRun run = simulate(s, cluster, {DispatchRule::look_ahead, 2});
    const std::string svg = to_svg(run.timeline, options);
    CHECK(is_well_formed(svg));
    check_text_stays_inside(svg, options.width);
    int actions = 0;
    for (const auto& rank : run.timeline.ranks) actions += static_cast<int>(rank.size());
    CHECK(count(svg, "micro-batch") == actions);
  };
  const auto busy = make_schedule(ScheduleTraversal<DFC>{}, 4, 120, 3);
  check(busy, {.title = "A title that is far too long for a picture of this width, by any measure",
               .unit = "milliseconds",
               .width = 420});
  check(busy, {.width = 5000, .row_height = 12});
  check(make_schedule(ScheduleTraversal<DFC>{}, 2, 3, 2), {.title = "short", .width = 321});
  check(make_schedule(OneForwardOneBackward{}, 130, 3, 1), {.unit = "s"});
  for (const double unit : {1e-9, 1e-4, 777.7, 1e12}) check(busy, {.width = 640}, unit);
}

TEST_CASE("dpp: a long title is cut with three dots, between letters") {
  Timeline timeline;
  timeline.ranks = {{{make_action(forward, 0, 0), 0, 1}}};
  std::string title;
  for (int i = 0; i < 100; ++i) title += "\xC3\xA9";  // e with an accent
  const std::string svg = to_svg(timeline, {.title = title, .width = 320});
  const std::size_t at = svg.find("...</text>");
  REQUIRE(at != svg.npos);
  CHECK(svg.substr(at - 2, 2) == "\xC3\xA9");
  CHECK(svg.find("<title>" + title) != svg.npos);
}

TEST_CASE("dpp: pictures of nothing, of no time and of no room") {
  CHECK(is_well_formed(to_svg(Timeline{})));
  Timeline instant;
  instant.ranks = {{{make_action(forward, 0, 0), 0, 0}}, {}};
  const std::string svg = to_svg(instant);
  CHECK(is_well_formed(svg));
  CHECK(svg.find("nan") == svg.npos);
  CHECK(svg.find("inf") == svg.npos);
  CHECK_THROWS_WITH_AS((void)to_svg(Timeline{}, {.width = 319}),
                       "a picture of width 319 with rows of 28 pixels is too small; the least are "
                       "320 and 12",
                       Error);
  CHECK_THROWS_AS((void)to_svg(Timeline{}, {.row_height = 11}), Error);
  CHECK_THROWS_AS(
      (void)to_svg(Timeline{}, {.unit = "a unit with a very long name indeed", .width = 330}),
      Error);
}
