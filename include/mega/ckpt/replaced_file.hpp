/// @file  ReplacedFile: a file of a user's choice that appears whole or not at all.
#pragma once
#include <mega/ckpt/durable_file.hpp>
#include <mega/core/error.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace mega::inline v0::ckpt {

/// Bytes go to a file of another name beside the wanted one; finish() gives it its name, replacing
/// at once what had it. Without finish() nothing remains. A link keeps pointing where it does, and
/// its target is replaced.
///
/// A pipe or a device of characters has no content to be replaced, and neither has what this
/// process prints to, as /dev/stdout: bytes go there as they come, as they would behind a shell's
/// >. A pipe that nobody reads is waited for.
class ReplacedFile {
 public:
  /// @throws Error(usage) if the name belongs to a directory or a disk;
  ///         Error(not_durable) if nothing can be written beside it
  explicit ReplacedFile(const std::string& name) : path_(destination(name)) {
    if (is_stream(path_)) {
      open_stream();
    } else {
      beside_ = path_ + "." + detail::random_suffix() + ".tmp";
      file_.emplace(beside_, path_);
    }
  }
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;
  ~ReplacedFile() {
    if (closed_) remove_file(beside_);
  }

  /// Where the bytes of a file of that name will be: with its links followed.
  /// @throws Error(usage) if the name belongs to a directory or a disk
  [[nodiscard]] static std::string destination(const std::string& name) {
    std::error_code unknown;
    const auto status = std::filesystem::status(name, unknown);
    if (!std::filesystem::exists(status) || is_stream(name)) return name;
    expects(std::filesystem::is_regular_file(status), ErrorCode::usage, [&] {
      return sentence(name, " is there and is not a regular file, a pipe or a character device; ",
                      "give another name for the output");
    });
    return std::filesystem::canonical(name).string();
  }

  /// Whether the name belongs to what takes bytes as they come.
  [[nodiscard]] static bool is_stream(const std::string& name) noexcept {
    struct stat status {};
    if (::stat(name.c_str(), &status) != 0) return false;
    return S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode) || standard_stream(status) >= 0;
  }
  /// Whether the bytes would mix with what this process prints to its standard output.
  [[nodiscard]] static bool is_standard_output(const std::string& name) noexcept {
    struct stat status {};
    return ::stat(name.c_str(), &status) == 0 && is_open_as(STDOUT_FILENO, status);
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  /// @throws Error(not_durable) with the byte that could not be written and the system's reason
  void write(std::string_view text) {
    const auto bytes = std::as_bytes(std::span(text));
    if (file_) {
      file_->write(bytes);
    } else {
      detail::write_all(stream_.get(), path_, path_, written_, bytes);
    }
  }

  /// Writes everything out, so that finish() can hardly fail: for several files that are to appear
  /// together.
  void close() {
    if (!file_ || std::exchange(closed_, true)) return;
    file_->finish();
  }
  void finish() {
    close();
    if (file_) rename_durably(beside_, path_);
    closed_ = false;
  }

 private:
  [[nodiscard]] static bool is_open_as(int descriptor, const struct stat& status) noexcept {
    struct stat open {};
    return ::fstat(descriptor, &open) == 0 && open.st_dev == status.st_dev &&
           open.st_ino == status.st_ino;
  }
  /// The descriptor on which this process prints to it; -1 if none.
  [[nodiscard]] static int standard_stream(const struct stat& status) noexcept {
    for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
      if (is_open_as(descriptor, status)) return descriptor;
    }
    return -1;
  }

  void open_stream() {
    struct stat status {};
    const int printed = ::stat(path_.c_str(), &status) == 0 ? standard_stream(status) : -1;
    const int error = detail::retry_interrupted(FileOperation::create, path_.c_str(), [&] {
      // A copy shares the position of what was printed before.
      stream_ = detail::Descriptor(printed >= 0 ? ::fcntl(printed, F_DUPFD_CLOEXEC, 0)
                                                : ::open(path_.c_str(), O_WRONLY | O_CLOEXEC));
      return stream_.get() < 0 ? -1 : 0;
    });
    expects(error == 0, ErrorCode::not_durable, [&] {
      return sentence("file ", path_, " could not be opened: ", detail::errno_text(error));
    });
  }

  std::string path_, beside_;
  std::optional<DurableFile> file_;
  detail::Descriptor stream_{-1};
  Index written_ = 0;
  bool closed_ = false;
};

}  // namespace mega::inline v0::ckpt
