/// @file  The file of --log-json: one run's at a time, begun anew, or gone on with where a run is
/// resumed.
#pragma once
#include <mega/core/error.hpp>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace trainer {

namespace detail {

/// How every line of a log begins.
inline constexpr std::string_view record_head = "{\"step\": ";

/// What stands behind the last line break.
[[nodiscard]] inline std::string last_piece(int file, long size) {
  constexpr long piece = 1 << 16;
  std::string tail;
  while (static_cast<long>(tail.size()) < size) {
    const long count = std::min(piece, size - static_cast<long>(tail.size()));
    std::string part(static_cast<std::size_t>(count), '\0');
    const off_t at = size - static_cast<long>(tail.size()) - count;
    if (::pread(file, part.data(), part.size(), at) != count) break;
    tail.insert(0, part);
    const auto line_break = tail.rfind('\n');
    if (line_break != tail.npos) return tail.substr(line_break + 1);
    if (tail.size() > std::size_t{1} << 20) break;  // no record is as long
  }
  return tail;
}

}  // namespace detail

/// The file of --log-json, for as long as the run lasts. It is locked, and the lock ends with the
/// process, however that ends; where the file system has no locks, or it is a pipe or a device, two
/// runs may write into it. What it holds stays until begin().
class LogFile {
 public:
  /// @throws  Error(usage) where another run writes it, Error(bad_input) where it cannot be written
  explicit LogFile(std::string path) : path_(std::move(path)) {
    const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
    std::error_code unknown;
    // Nobody has a file in a folder that the run is still to make, as that of --save.
    if (folder.empty() || std::filesystem::exists(folder, unknown)) own();
  }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;
  /// A run that was refused before it began leaves no empty log behind.
  ~LogFile() {
    if (is_new_ && !begun_) ::unlink(path_.c_str());
  }

  /// Empties it, or, where it is gone on with, cuts off what a killed run had written of one more
  /// record: another behind it would make one unreadable line of both.
  /// @return what was cut off, for the user; empty where nothing was
  /// @throws  Error(usage) where it is to be gone on with and ends in something else than a log
  /// does
  std::string begin(bool go_on) {
    if (!file_) own();
    std::string done;
    if (is_regular_ && go_on) done = end_with_whole_record();
    if (is_regular_ && !go_on) cut(0);
    begun_ = true;
    return done;
  }

  /// @param what  for the sentence where it fails
  /// @throws  Error(not_durable)
  void write(std::string_view line, std::string_view what) {
    const bool written = std::fwrite(line.data(), 1, line.size(), file_.get()) == line.size() &&
                         std::fflush(file_.get()) == 0;
    mega::expects(written, mega::ErrorCode::not_durable, [&] {
      return mega::sentence("--log-json: ", what, " could not be written: ", std::strerror(errno));
    });
  }

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  void own() {
    while (!try_once()) {
    }
  }
  /// Whether it is decided; not so where the file lost its name before it was locked.
  bool try_once() {
    file_.reset(opened());
    mega::expects(file_ != nullptr, mega::ErrorCode::bad_input, [&] {
      return mega::sentence("--log-json: cannot write '", path_, "': ", std::strerror(errno));
    });
    const int file = fileno(file_.get());
    struct stat status {};
    is_regular_ = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    if (!is_regular_) return true;
    int error = 0;
    while ((error = ::flock(file, LOCK_EX | LOCK_NB) == 0 ? 0 : errno) == EINTR) {
    }
    mega::expects(error != EWOULDBLOCK, mega::ErrorCode::usage, [&] {
      return mega::sentence("--log-json: '", path_,
                            "' is being written by another run; log elsewhere, or wait until that "
                            "has ended");
    });
    return error != 0 || (::fstat(file, &status) == 0 && status.st_nlink > 0);
  }

  /// A pipe has one end to write to; of a file also what is there is of interest, if it may be
  /// read.
  [[nodiscard]] std::FILE* opened() {
    struct stat status {};
    const bool is_file = ::stat(path_.c_str(), &status) != 0 || S_ISREG(status.st_mode);
    constexpr int append = O_APPEND | O_CLOEXEC;
    int file = is_file ? ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | append, 0666) : -1;
    is_new_ = file >= 0;
    if (file < 0 && is_file) file = ::open(path_.c_str(), O_RDWR | O_CREAT | append, 0666);
    if (file < 0 && (!is_file || errno == EACCES)) file = ::open(path_.c_str(), O_WRONLY | append);
    return file < 0 ? nullptr : ::fdopen(file, "a");
  }

  [[nodiscard]] std::string end_with_whole_record() {
    struct stat status {};
    if (::fstat(fileno(file_.get()), &status) != 0 || status.st_size == 0) return {};
    const auto size = static_cast<long>(status.st_size);
    const std::string tail = detail::last_piece(fileno(file_.get()), size);
    if (tail.empty()) return {};
    const auto common = std::min(tail.size(), detail::record_head.size());
    mega::expects(tail.compare(0, common, detail::record_head, 0, common) == 0,
                  mega::ErrorCode::usage, [&] {
                    return mega::sentence("--log-json: '", path_,
                                          "' does not end as a log does, so --load does not go on "
                                          "with it; give another file");
                  });
    if (nlohmann::json::accept(tail)) {
      write("\n", mega::sentence("the end of the last line of ", path_));
      return {};
    }
    cut(size - static_cast<long>(tail.size()));
    return mega::sentence("--log-json: the last line of ", path_,
                          " was not finished, as a run that is killed leaves it; its ", tail.size(),
                          tail.size() == 1 ? " byte is" : " bytes are", " cut off");
  }

  void cut(long size) {
    mega::expects(::ftruncate(fileno(file_.get()), size) == 0, mega::ErrorCode::not_durable, [&] {
      return mega::sentence("--log-json: ", path_, " could not be cut to its first ", size,
                            " bytes: ", std::strerror(errno));
    });
  }

  std::string path_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  bool is_new_ = false, is_regular_ = false, begun_ = false;
};

}  // namespace trainer
