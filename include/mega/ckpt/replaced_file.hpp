/// @file  ReplacedFile: a file of a user's choice that appears whole or not at all.
#pragma once
#include <mega/ckpt/durable_file.hpp>
#include <mega/core/error.hpp>

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace mega::inline v0::ckpt {

/// Bytes go to a file of another name beside the wanted one; finish() gives it its name, replacing
/// at once what had it. Without finish() nothing remains. A link keeps pointing where it does, and
/// its target is replaced.
class ReplacedFile {
 public:
  /// @throws Error(usage) if the name belongs to something that is no regular file;
  ///         Error(not_durable) if nothing can be written beside it
  explicit ReplacedFile(const std::string& name)
      : path_(destination(name)),
        beside_(path_ + "." + detail::random_suffix() + ".tmp"),
        file_(beside_, path_) {}
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;
  ~ReplacedFile() {
    if (closed_) remove_file(beside_);
  }

  /// Where a file of that name will be: with its links followed.
  /// @throws Error(usage) if the name belongs to something that is no regular file
  [[nodiscard]] static std::string destination(const std::string& name) {
    std::error_code unknown;
    const auto status = std::filesystem::status(name, unknown);
    const bool is_there = std::filesystem::exists(status);
    expects(!is_there || std::filesystem::is_regular_file(status), ErrorCode::usage, [&] {
      return sentence(name,
                      " is there and is not a regular file; give another name for the output");
    });
    return is_there ? std::filesystem::canonical(name).string() : name;
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  void write(std::string_view text) { file_.write(std::as_bytes(std::span(text))); }

  /// Writes everything out, so that finish() can hardly fail: for several files that are to appear
  /// together.
  void close() {
    if (std::exchange(closed_, true)) return;
    file_.finish();
  }
  void finish() {
    close();
    rename_durably(beside_, path_);
    closed_ = false;
  }

 private:
  std::string path_, beside_;
  DurableFile file_;
  bool closed_ = false;
};

}  // namespace mega::inline v0::ckpt
