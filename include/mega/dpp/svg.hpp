/// @file  Timeline as an SVG picture: one row a rank, one box an action. Included by name.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/action.hpp>
#include <mega/dpp/timeline.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

namespace mega::inline v0::dpp {

struct SvgOptions {
  std::string_view title{};
  std::string_view unit{};  ///< of the timeline's times, beside the axis
  int width = 1200;         ///< pixels, at least 320
  int row_height = 28;      ///< pixels, at least 12
};

namespace detail {

/// Builds the picture from top to bottom. All text is in a monospaced font, so what fits is known.
class SvgPicture {
 public:
  SvgPicture(const Timeline& timeline, const SvgOptions& options)
      : timeline_(timeline), options_(options), end_(timeline.end()) {
    expects(options.width >= 320 && options.row_height >= 12, ErrorCode::usage, [&] {
      return sentence("a picture of width ", options.width, " with rows of ", options.row_height,
                      " pixels is too small; the least are 320 and 12");
    });
    for (const auto& rank : timeline.ranks) {
      for (const TimedAction& a : rank) {
        kinds_seen_[static_cast<std::size_t>(a.action.kind)] = true;
        chunks_ = std::max(chunks_, a.action.chunk + 1);
      }
    }
    const std::string last = label(static_cast<int>(timeline.ranks.size()) - 1);
    left_ = std::max(text_width(last, font), text_width(options.unit, font)) + 2 * margin;
    // Half of the last tick's label stands to the right of the plot.
    right_ = options.width - margin - text_width(time(end_), font) / 2;
    expects(right_ - left_ >= 100, ErrorCode::usage, [&] {
      return sentence("a picture of width ", options.width, " leaves ", right_ - left_,
                      " pixels beside its labels; at least 100 are needed");
    });
    scale_ = end_ > 0 ? (right_ - left_) / end_ : 0.0;
  }

  std::string draw() {
    double y = margin;
    if (!options_.title.empty()) {
      text(margin, y + 14, shortened(options_.title, 14, options_.width - 2 * margin), "t", 14);
      y += 14 + margin;
    }
    for (std::size_t r = 0; r < timeline_.ranks.size(); ++r, y += options_.row_height + gap) {
      row(static_cast<int>(r), y);
    }
    y = axis(y);
    y = legend(y);

    std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"";
    out += number(options_.width) + "\" height=\"" + number(y) + "\" viewBox=\"0 0 " +
           number(options_.width) + " " + number(y) + "\">\n";
    if (!options_.title.empty()) out += "<title>" + escaped(options_.title) + "</title>\n";
    out += style;
    out += "<rect class=\"bg\" width=\"100%\" height=\"100%\"/>\n";
    return out + body_ + "</svg>\n";
  }

 private:
  static constexpr double margin = 10, gap = 4, font = 12, least_font = 7;
  /// Width of a character over the font's size; no common monospaced font is wider.
  static constexpr double advance = 0.61;
  static constexpr std::string_view style =
      "<style>\n"
      "text{font-family:ui-monospace,Menlo,Consolas,\"DejaVu Sans Mono\",monospace;fill:#1b1f24}\n"
      ".n{text-anchor:middle}.r{text-anchor:end}.t{font-weight:bold}\n"
      ".bg{fill:#fff}.o{stroke:#fff}.axis{stroke:#1b1f24}\n"
      ".idle{fill:#e4e7eb}.forward{fill:#9ecbff}.backward{fill:#ffb38f}\n"
      ".backward_input{fill:#ffd37a}.backward_weight{fill:#b4e2a4}\n"
      "@media (prefers-color-scheme:dark){text{fill:#e6edf3}\n"
      ".bg{fill:#0f1419}.o{stroke:#0f1419}.axis{stroke:#e6edf3}\n"
      ".idle{fill:#262d35}.forward{fill:#1f5fa8}.backward{fill:#a0421b}\n"
      ".backward_input{fill:#855600}.backward_weight{fill:#2b6a2e}}\n"
      "</style>\n";

  static std::string number(double value) {
    std::array<char, 40> digits{};
    std::snprintf(digits.data(), digits.size(), "%.2f", value);
    std::string text = digits.data();
    while (text.back() == '0') text.pop_back();
    if (text.back() == '.') text.pop_back();
    return text == "-0" ? "0" : text;
  }
  static std::string time(double value) { return sentence(value); }
  static std::string label(int rank) { return sentence("rank ", rank); }

  /// Letters beyond ASCII are given the room of two: some scripts need it.
  static double text_width(std::string_view text, double size) {
    double cells = 0;
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      cells += byte < 0x80 ? 1 : byte >= 0xC0 ? 2 : 0;
    }
    return cells * advance * size;
  }

  /// As much of the text as fits, with three dots where some is cut off.
  static std::string shortened(std::string_view text, double size, double room) {
    if (text_width(text, size) <= room) return std::string(text);
    const auto inside_letter = [](char c) {
      return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U;
    };
    std::string kept(text);
    while (!kept.empty() && text_width(kept, size) + 3 * advance * size > room) {
      while (!kept.empty() && inside_letter(kept.back())) kept.pop_back();
      if (!kept.empty()) kept.pop_back();
    }
    return kept + "...";
  }

  static std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : text) {
      switch (c) {
        case '&': out += "&amp;"; break;
        case '<': out += "&lt;"; break;
        case '>': out += "&gt;"; break;
        case '"': out += "&quot;"; break;
        default: out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
      }
    }
    return out;
  }

  void text(double x, double y, std::string_view what, std::string_view css, double size) {
    body_ += "<text class=\"" + std::string(css) + "\" x=\"" + number(x) + "\" y=\"" + number(y) +
             "\" font-size=\"" + number(size) + "\">" + escaped(what) + "</text>\n";
  }

  void box(double x, double y, double width, double height, std::string_view css, int chunk,
           std::string_view tip = {}) {
    body_ += "<rect class=\"" + std::string(css) + "\" x=\"" + number(x) + "\" y=\"" + number(y) +
             "\" width=\"" + number(width) + "\" height=\"" + number(height) + "\"";
    // Later chunks are paler, towards the colour of idle time behind them.
    if (chunk > 0) body_ += " fill-opacity=\"" + number(1 - 0.5 * chunk / (chunks_ - 1)) + "\"";
    body_ += tip.empty() ? "/>\n" : "><title>" + escaped(tip) + "</title></rect>\n";
  }

  void row(int rank, double y) {
    const double height = options_.row_height;
    text(left_ - margin, y + height / 2 + font / 3, label(rank), "r", font);
    box(left_, y, right_ - left_, height, "idle", 0);
    const auto& actions = timeline_.ranks[static_cast<std::size_t>(rank)];
    bool second_half = false;
    for (const TimedAction& a : actions) {
      const bool half = a.action.with_next || second_half;
      const double top = second_half ? y + height / 2 : y;
      action(a, top, half ? height / 2 : height);
      second_half = a.action.with_next;
    }
  }

  void action(const TimedAction& a, double y, double height) {
    const double x = left_ + a.start * scale_;
    const double width = (a.end - a.start) * scale_;
    std::string css(to_string(a.action.kind));
    if (width >= 4) css += " o";  // an outline would hide a narrower box
    box(x, y, width, height, css, a.action.chunk,
        sentence(to_string(a.action), ": ", a.start, " to ", a.end));
    const std::string micro_batch = std::to_string(a.action.microbatch);
    const double size = std::min({font, height - 2, (width - 2) / text_width(micro_batch, 1.0)});
    if (size < least_font) return;
    const double fitting = std::floor(size * 100) / 100;  // number() must not round it up
    text(x + width / 2, y + height / 2 + fitting / 3, micro_batch, "n", fitting);
  }

  /// 1, 2 or 5 times a power of ten, as small as the ticks' labels allow.
  [[nodiscard]] double tick_step() const {
    if (end_ == 0) return 1;
    for (double power = std::pow(10.0, std::floor(std::log10(end_)) - 3);; power *= 10) {
      for (const double step : {power, 2 * power, 5 * power}) {
        const double last = std::floor(end_ / step) * step;
        const double widest = std::max({text_width(time(step), font), text_width(time(last), font),
                                        text_width(time(last - step), font)});
        if (step * scale_ >= widest + 2 * margin) return step;
      }
    }
  }

  double axis(double y) {
    body_ += "<path class=\"axis\" fill=\"none\" d=\"M" + number(left_) + " " + number(y) + "H" +
             number(right_) + "\"/>\n";
    if (!options_.unit.empty()) text(left_ - margin, y + 18, options_.unit, "r", font);
    const double step = tick_step();
    for (int tick = 0; tick * step <= end_ * (1 + 1e-12); ++tick) {
      const double x = left_ + tick * step * scale_;
      body_ += "<path class=\"axis\" d=\"M" + number(x) + " " + number(y) + "v5\"/>\n";
      text(x, y + 18, time(tick * step), "n", font);
    }
    return y + 18 + 2 * margin;
  }

  double legend(double y) {
    double x = margin;
    const auto entry = [&](std::string_view name, std::string_view css, int chunk) {
      const double width = 18 + text_width(name, font);
      if (x > margin && x + width > options_.width - margin) {
        x = margin;
        y += 20;
      }
      box(x, y, 12, 12, css, chunk);
      text(x + 18, y + 10, name, "l", font);
      x += width + 2 * margin;
    };
    for (std::size_t kind = 0; kind < kinds_seen_.size(); ++kind) {
      if (!kinds_seen_[kind]) continue;
      std::string name(to_string(static_cast<ActionKind>(kind)));
      std::replace(name.begin(), name.end(), '_', ' ');
      entry(name, to_string(static_cast<ActionKind>(kind)), 0);
    }
    entry("idle", "idle", 0);
    for (int chunk = 0; chunks_ > 1 && chunk < chunks_; ++chunk) {
      entry(sentence("chunk ", chunk), "forward", chunk);
    }
    return y + 12 + margin;
  }

  const Timeline& timeline_;
  SvgOptions options_;
  double end_;
  double left_ = 0, right_ = 0;  ///< of the plot
  double scale_ = 0;             ///< pixels a unit of time
  int chunks_ = 1;
  std::array<bool, 16> kinds_seen_{};
  std::string body_;
};

}  // namespace detail

/// The timeline as the text of an SVG file, without scripts, for light and dark pages. Rows are
/// ranks from top to bottom; a box carries its micro-batch where there is room for the number, and
/// says everything when pointed at; the halves of a fused pair share their row's height; the chunk
/// sets the shade; what shows of the row's ground is idle time.
/// Throws Error(usage) for a size that leaves no room.   @cost  about 250 bytes an action
[[nodiscard]] inline std::string to_svg(const Timeline& timeline, const SvgOptions& options = {}) {
  return detail::SvgPicture(timeline, options).draw();
}

}  // namespace mega::inline v0::dpp
