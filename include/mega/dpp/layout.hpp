/// @file  Pipeline layouts as text, in Megatron-LM's spelling: which stage holds which layers.
#pragma once
#include <mega/core/error.hpp>
#include <mega/dpp/layers.hpp>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mega::inline v0::dpp {

/// The layers of every stage, read from a text such as "E t3|t4|t4|t3 L" or, the same model,
/// "Ettt|(t*4|)*2,tttL". The pieces:
///
///   E        the embedding: once, before everything else
///   t, t3    a transformer layer, or that many
///   L        final norm, head and loss: once, behind everything else
///   |        the next stage begins
///   piece*n  the piece n times
///   (...)*n  the pieces in the group n times; a group holds no other group
///
/// Spaces, tabs and commas only please the eye. Stages stand in the order in which the data passes
/// them; placements say which rank holds which, LoopPlacement as Megatron does: stage chunk*p +
/// rank.
///
/// Differences to Megatron: a count may follow t directly, and spaces are allowed. Stages without a
/// layer are accepted at the two ends only, where they hold the embedding or the head alone; one in
/// the middle would only pass activations on, and LayerSplit knows none. Counts of 0 are refused,
/// and so is m, a layer of multi-token prediction, which the models of this library do not have.
///
/// Literal and constexpr: `constexpr Layout layout("E t3|t1 L")` refuses a wrong text when it is
/// compiled, and static_assert can compare stages() and layers() with the plan.
/// Errors: Error(usage) that names the character, counted from 1, and what may stand there.
/// Cost: reads the text once, groups once for each repetition.
/// Source: Megatron-LM, option --pipeline-model-parallel-layout.
class Layout {
 public:
  static constexpr int max_stages = 1024;
  static constexpr int max_layers = 65536;

  constexpr explicit Layout(std::string_view text);

  [[nodiscard]] constexpr int stages() const noexcept { return stages_; }
  [[nodiscard]] constexpr int layers() const noexcept {
    int sum = 0;
    for (const int count : counts()) sum += count;
    return sum;
  }
  /// Layers of each stage.
  [[nodiscard]] constexpr std::span<const int> counts() const noexcept {
    return {counts_.data(), static_cast<std::size_t>(stages_)};
  }

  /// Chunks that each of p ranks holds. Throws Error(usage) where p does not divide stages().
  [[nodiscard]] constexpr int chunks(int p) const;

  /// The split for a model of `layers` layers on p ranks with v chunks each.
  /// Throws Error(usage) where the numbers of layers or stages differ.
  [[nodiscard]] constexpr LayerSplit split(int layers, int p, int v) const;
  [[nodiscard]] constexpr LayerSplit split() const { return {layers(), counts()}; }

 private:
  std::array<int, max_stages> counts_{};
  int stages_ = 1;
};

/// The text of which Layout makes these counts: "E t3|t4|t4|t3 L".
[[nodiscard]] inline std::string layout_text(std::span<const int> counts) {
  std::string text = "E";
  for (std::size_t stage = 0; stage < counts.size(); ++stage) {
    if (stage > 0) text += '|';
    if (counts[stage] == 0) continue;
    if (stage == 0) text += ' ';
    text += 't';
    if (counts[stage] > 1) text += std::to_string(counts[stage]);
  }
  return text + (counts.size() > 1 && counts.back() == 0 ? "L" : " L");
}

[[nodiscard]] inline std::string layout_text(const LayerSplit& split) {
  std::vector<int> counts;
  for (int stage = 0; stage < split.stages(); ++stage)
    counts.push_back(split.of_stage(stage).count());
  return layout_text(std::span<const int>(counts));
}

namespace detail {

/// Reads the pieces from left to right and counts layers into the caller's stages.
class LayoutReader {
 public:
  constexpr LayoutReader(std::string_view text, std::span<int> counts) noexcept
      : text_(text), counts_(counts) {}

  /// Number of stages.
  constexpr int read() {
    for (std::size_t at = skip(0); at < text_.size(); at = skip(at))
      at = text_[at] == '(' ? read_group(at) : read_piece(at);
    expects(begun_, ErrorCode::usage,
            "an empty layout names no stage; the least is 'E t L', one layer in one stage");
    expects(ended_, ErrorCode::usage, [&] {
      return sentence(quoted(), " does not end with L, which stands for head and loss");
    });
    return stage_ + 1;
  }

 private:
  [[nodiscard]] constexpr bool is_digit(std::size_t at) const noexcept {
    return at < text_.size() && text_[at] >= '0' && text_[at] <= '9';
  }
  [[nodiscard]] constexpr bool is_star(std::size_t at) const noexcept {
    return at < text_.size() && text_[at] == '*';
  }

  /// Where the next character that means something stands.
  [[nodiscard]] constexpr std::size_t skip(std::size_t at) const noexcept {
    while (at < text_.size() && (text_[at] == ' ' || text_[at] == '\t' || text_[at] == ',')) ++at;
    return at;
  }

  /// The layout for a sentence: what is not printable ASCII becomes a question mark.
  [[nodiscard]] std::string quoted() const {
    std::string text(text_);
    for (char& c : text) {
      if (c < ' ' || c > '~') c = '?';
    }
    return "layout '" + text + "'";
  }
  [[nodiscard]] std::string place(std::size_t at) const {
    const bool printable = text_[at] >= ' ' && text_[at] <= '~';
    return sentence(quoted(), ": '", printable ? text_[at] : '?', "' at character ", at + 1);
  }

  /// @pre  text_[at] is a digit; moves `at` behind the number
  constexpr int read_count(std::size_t& at) const {
    const std::size_t first = at;
    int count = 0;
    for (; is_digit(at); ++at) {
      count = count * 10 + (text_[at] - '0');
      expects(count <= Layout::max_layers, ErrorCode::usage, [&] {
        return sentence(quoted(), ": the count at character ", first + 1, " is above the limit of ",
                        Layout::max_layers);
      });
    }
    expects(count >= 1, ErrorCode::usage, [&] {
      return sentence(quoted(), ": the count at character ", first + 1, " is 0; the least is 1");
    });
    return count;
  }

  /// The count behind a '*' at `at`; 1 where there is none.
  constexpr int read_repetition(std::size_t& at) const {
    const std::size_t star = skip(at);
    if (!is_star(star)) return 1;
    at = skip(star + 1);
    expects(is_digit(at), ErrorCode::usage,
            [&] { return sentence(place(star), " has no count behind it, as in t*3"); });
    return read_count(at);
  }

  /// One piece at `at` with its counts; where the next one may begin.
  constexpr std::size_t read_piece(std::size_t at) {
    const std::size_t piece = at++;
    int layers = 1;
    if (text_[piece] == 't') {
      const std::size_t digits = skip(at);
      if (is_digit(digits)) layers = read_count(at = digits);
    }
    for (int left = read_repetition(at); left > 0; --left) take(piece, layers);
    return at;
  }

  /// Every turn takes a piece, so the limits of layers and stages end a group of any count.
  constexpr std::size_t read_group(std::size_t open) {
    std::size_t close = open + 1;
    while (close < text_.size() && text_[close] != ')' && text_[close] != '(') ++close;
    expects(close < text_.size(), ErrorCode::usage,
            [&] { return sentence(place(open), " has no ) behind it"); });
    expects(text_[close] == ')', ErrorCode::usage, [&] {
      return sentence(place(close), " stands in the group of character ", open + 1,
                      "; a group holds no other group, so write that one out");
    });
    expects(skip(open + 1) < close, ErrorCode::usage,
            [&] { return sentence(place(open), " begins a group without a piece"); });
    std::size_t at = close + 1;
    expects(is_star(skip(at)), ErrorCode::usage, [&] {
      return sentence(place(close), " has no * and count behind it; a group is repeated, as in ",
                      "(tt|)*3");
    });
    for (int left = read_repetition(at); left > 0; --left) {
      for (std::size_t in = skip(open + 1); in < close; in = skip(in)) in = read_piece(in);
    }
    return at;
  }

  constexpr void take(std::size_t at, int layers) {
    const char piece = text_[at];
    expects(!ended_ || !is_piece(piece), ErrorCode::usage,
            [&] { return sentence(place(at), " comes after L; L ends the layout, once"); });
    expects(begun_ || piece == 'E' || !is_piece(piece), ErrorCode::usage, [&] {
      return sentence(place(at), " comes before E; a layout begins with E, the embedding");
    });
    switch (piece) {
      case 'E':
        expects(!begun_, ErrorCode::usage, [&] {
          return sentence(place(at), " is a second one; E stands once, at the beginning");
        });
        begun_ = true;
        return;
      case 't':
        layers_ += layers;
        expects(layers_ <= Layout::max_layers, ErrorCode::usage, [&] {
          return sentence(place(at), " makes more layers than the limit of ", Layout::max_layers);
        });
        counts_[static_cast<std::size_t>(stage_)] += layers;
        return;
      case 'L': ended_ = true; return;
      case '|': next_stage(at); return;
      default:
        expects(false, ErrorCode::usage,
                [&] { return place(at) + std::string(why_refused(piece)); });
    }
  }

  constexpr void next_stage(std::size_t at) {
    expects(stage_ == 0 || counts_[static_cast<std::size_t>(stage_)] > 0, ErrorCode::usage, [&] {
      return sentence(place(at), " ends stage ", stage_, ", counted from 0, without a layer; ",
                      "only the first and the last stage may hold none");
    });
    ++stage_;
    expects(stage_ < Layout::max_stages, ErrorCode::usage, [&] {
      return sentence(place(at), " makes more stages than the limit of ", Layout::max_stages);
    });
  }

  [[nodiscard]] static constexpr bool is_piece(char c) noexcept {
    return c == 'E' || c == 't' || c == 'L' || c == '|';
  }

  [[nodiscard]] static constexpr std::string_view why_refused(char c) noexcept {
    switch (c) {
      case 'm':
        return " is a layer of multi-token prediction, which these models do not have; leave it "
               "out";
      case ')': return " closes no group; leave it out, or open one with (";
      case '*': return " has no piece before it, as in t*3";
      case 'e': return " is no piece; the embedding is E";
      case 'T': return " is no piece; a layer is t";
      case 'l': return " is no piece; head and loss are L";
      default: break;
    }
    return c >= '0' && c <= '9'
               ? " is a count without t or * before it, as in t3 or t*3"
               : " is no piece of a layout; the pieces are E, t, L, | and groups in ()";
  }

  std::string_view text_;
  std::span<int> counts_;
  int stage_ = 0;
  int layers_ = 0;
  bool begun_ = false;  // E was there
  bool ended_ = false;  // L was there
};

}  // namespace detail

constexpr Layout::Layout(std::string_view text)
    : stages_(detail::LayoutReader(text, counts_).read()) {}

constexpr int Layout::chunks(int p) const {
  expects(p >= 1 && stages_ % p == 0, ErrorCode::usage, [&] {
    const int below = p >= 1 ? stages_ / p * p : 0;
    return sentence("layout '", layout_text(counts()), "' has ", stages_,
                    " stages, which do not divide over ", p, " ranks; the nearest numbers are ",
                    below > 0 ? sentence(below, " and ", below + p) : std::to_string(p));
  });
  return stages_ / p;
}

constexpr LayerSplit Layout::split(int model_layers, int p, int v) const {
  expects(stages_ == p * v, ErrorCode::usage, [&] {
    const int missing = p * v - stages_;
    return sentence("layout '", layout_text(counts()), "' has ", stages_, " stages, but ", p,
                    " ranks with ", v, " chunks each hold ", p * v, "; ",
                    missing > 0 ? "add " : "take away ", missing > 0 ? missing : -missing, " |");
  });
  expects(layers() == model_layers, ErrorCode::usage, [&] {
    const int missing = model_layers - layers();
    return sentence("layout '", layout_text(counts()), "' has ", layers(),
                    " layers, but the model has ", model_layers, "; ",
                    missing > 0 ? "add " : "take away ", missing > 0 ? missing : -missing, " t");
  });
  return split();
}

}  // namespace mega::inline v0::dpp
