/// @file  What a run says: a progress bar on a terminal, plain lines elsewhere, JSON lines in a
/// file.
#pragma once
#include "config.hpp"
#include "log_file.hpp"
#include <mega/core/error.hpp>
#include <mega/train/trainer.hpp>

#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace trainer {

/// Figures of one step.
struct StepReport {
  std::int64_t step = 0;  ///< counted from 1
  std::int64_t steps = 0;
  mega::StepResult result;
  bool scales_loss = false;  ///< so its scale is worth a word
  double learning_rate = 0;
  double seconds = 0;
  std::int64_t tokens = 0;        ///< of the step, over all ranks
  std::size_t memory_bytes = 0;   ///< that the run has taken, as its backend counts them
  std::size_t planned_bytes = 0;  ///< that it was to take; 0: nothing was planned
  std::string dial;               ///< where it stood in the step, as JSON; empty: not told
  std::string decision;           ///< on the order, as JSON; empty: none

  [[nodiscard]] double tokens_per_s() const noexcept {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  }
};

[[nodiscard]] inline std::string readable_bytes(std::size_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

/// Of a step, as its lines show it.
[[nodiscard]] inline std::string memory_text(const StepReport& r) {
  std::string out = readable_bytes(r.memory_bytes);
  if (r.planned_bytes > 0)
    out += mega::sentence(" of ", readable_bytes(r.planned_bytes), " planned");
  return out;
}

/// Speaks for rank 0; on other ranks it says nothing.
class Console {
 public:
  /// @param log  of its steps; null where they are not kept
  Console(const Config& config, bool speaks, LogFile* log)
      : level_(speaks ? config.log_level : LogLevel::quiet),
        interval_(config.log_interval),
        terminal_(isatty(STDERR_FILENO) == 1),
        log_(log) {
    if (log_ == nullptr) return;
    const bool resumed = !config.load_dir.empty();
    if (const std::string mended = log_->begin(resumed); !mended.empty()) say(mended);
  }

  void say(const std::string& text) { print(LogLevel::info, text); }
  void detail(const std::string& text) { print(LogLevel::debug, text); }

  void step(const StepReport& r) {
    write_json(r);
    if (level_ == LogLevel::quiet) return;
    if (terminal_) draw_bar(r);
    if (r.step % interval_ != 0 && r.step != r.steps) return;
    char scale[48] = "";
    if (r.scales_loss) std::snprintf(scale, sizeof scale, " | loss scale %g", r.result.loss_scale);
    char line[320];
    std::snprintf(line, sizeof line,
                  "step %*lld/%lld | loss %.4f | lr %.3e | grad norm %.3f | %.0f tokens/s | %s%s%s",
                  static_cast<int>(std::to_string(r.steps).size()), static_cast<long long>(r.step),
                  static_cast<long long>(r.steps), r.result.loss, r.learning_rate,
                  r.result.gradient_norm, r.tokens_per_s(), memory_text(r).c_str(), scale,
                  r.result.skipped ? " | skipped: the gradient norm is not finite" : "");
    if (!terminal_ || r.step == r.steps) print(LogLevel::info, line);
  }

 private:
  void print(LogLevel level, const std::string& text) {
    if (level_ < level) return;
    clear_bar();
    std::fprintf(stderr, "%s\n", text.c_str());
    std::fflush(stderr);
  }

  /// Columns of the terminal; 80 where it does not say.
  [[nodiscard]] static int columns() {
    winsize size{};
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  }

  /// One line, cut to the terminal's width, since a wrapped one could not be drawn over.
  void draw_bar(const StepReport& r) {
    constexpr int width = 20;
    const int filled = r.steps > 0 ? static_cast<int>(width * r.step / r.steps) : width;
    const double left = static_cast<double>(r.steps - r.step) * r.seconds;
    char line[256];
    std::snprintf(line, sizeof line,
                  "[%.*s%*s] %lld/%lld %.0fs loss %.3f lr %.1e norm %.2f %.0f tok/s %s", filled,
                  "####################", width - filled, "", static_cast<long long>(r.step),
                  static_cast<long long>(r.steps), left, r.result.loss, r.learning_rate,
                  r.result.gradient_norm, r.tokens_per_s(), memory_text(r).c_str());
    std::fprintf(stderr, "\r\033[K%.*s", columns() - 1, line);
    std::fflush(stderr);
    drawn_ = true;
  }
  void clear_bar() {
    if (drawn_) std::fputs("\r\033[K", stderr);
    drawn_ = false;
  }

  void write_json(const StepReport& r) {
    if (log_ == nullptr) return;
    char loss[40], norm[40];
    // 17 digits bring a double back bit for bit; JSON has no word for what is not finite.
    std::snprintf(loss, sizeof loss, std::isfinite(r.result.loss) ? "%.17g" : "null",
                  r.result.loss);
    std::snprintf(norm, sizeof norm, std::isfinite(r.result.gradient_norm) ? "%.17g" : "null",
                  r.result.gradient_norm);
    const std::string planned =
        r.planned_bytes > 0 ? mega::sentence("\"planned_bytes\": ", r.planned_bytes, ", ") : "";
    const std::string dial = r.dial.empty() ? "" : mega::sentence(", \"dial\": ", r.dial);
    const std::string decision =
        r.decision.empty() ? "" : mega::sentence(", \"decision\": ", r.decision);
    char scale[64] = "";
    if (r.scales_loss)
      std::snprintf(scale, sizeof scale, "\"loss_scale\": %.17g, ", r.result.loss_scale);
    char line[512];
    const int length = std::snprintf(
        line, sizeof line,
        "{\"step\": %lld, \"loss\": %s, \"lr\": %.17g, \"grad_norm\": %s, \"tokens\": %lld, "
        "\"tokens_per_s\": %.6g, \"seconds\": %.6g, \"peak_bytes\": %zu, ",
        static_cast<long long>(r.step), loss, r.learning_rate, norm,
        static_cast<long long>(r.tokens), r.tokens_per_s(), r.seconds, r.memory_bytes);
    std::string record(line, static_cast<std::size_t>(length));
    record += planned + scale + "\"skipped\": " + (r.result.skipped ? "true" : "false");
    record += dial + decision;
    log_->write(record + "}\n", mega::sentence("step ", r.step));
  }

  LogLevel level_;
  std::int64_t interval_;
  bool terminal_;
  bool drawn_ = false;
  LogFile* log_;
};

}  // namespace trainer
