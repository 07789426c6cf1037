/// @file  Files that survive a crash: every creation, write, flush, rename and removal of a save
/// goes through here, and every failure is reported. POSIX.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>

#include <dirent.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace mega::inline v0::ckpt {

/// The calls that change a file system.
enum class FileOperation : std::uint8_t { create, write, flush, rename, make_directory, remove };

/// Test seam: a hook that is called before each operation of this header.
/// The hook returns 0 to let the operation happen, or the errno value it fails with; it may also
/// throw, or end the process as a power cut would. No hook is installed unless a test does it.
struct FileFaults {
  /// `ordinal` counts the operations since install(), from 0, over all threads.
  using Hook = int (*)(FileOperation operation, const char* path, std::uint64_t ordinal);

  /// Replaces the hook and restarts the count; null removes it. Call while no save is running.
  static void install(Hook hook) noexcept {
    ordinal().store(0);
    installed().store(hook);
  }

  /// @return 0, or the errno value with which the operation has to fail
  static int before(FileOperation operation, const char* path) {
    const Hook hook = installed().load(std::memory_order_acquire);
    return hook == nullptr ? 0 : hook(operation, path, ordinal().fetch_add(1));
  }

 private:
  static std::atomic<Hook>& installed() noexcept {
    static std::atomic<Hook> hook{nullptr};
    return hook;
  }
  static std::atomic<std::uint64_t>& ordinal() noexcept {
    static std::atomic<std::uint64_t> count{0};
    return count;
  }
};

namespace detail {

inline std::string errno_text(int error) {
  return std::generic_category().message(error);
}

/// Runs `call` (which returns -1 and sets errno on failure) until it is not interrupted.
/// @return 0 or the errno value
template <class Call>
int retry_interrupted(FileOperation operation, const char* path, Call call) {
  for (;;) {
    int error = FileFaults::before(operation, path);
    if (error == 0) error = call() == -1 ? errno : 0;
    if (error != EINTR) return error;
  }
}

inline std::string parent_directory(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const auto slash = path.rfind('/');
  if (slash == std::string_view::npos) return ".";
  return std::string(slash == 0 ? "/" : path.substr(0, slash));
}

/// 16 hexadecimal digits that another process cannot predict.
inline std::string random_suffix() {
  std::uint64_t value = 0;
  const auto got = ::getrandom(&value, sizeof value, 0);
  expects(got == static_cast<ssize_t>(sizeof value), ErrorCode::not_durable,
          "the system gave no random bytes for the name of a temporary file");
  std::string out;
  for (int digit = 0; digit < 16; ++digit, value >>= 4) out += "0123456789abcdef"[value & 15];
  return out;
}

/// Closes a descriptor at the end of a scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// Writes all of `data`, which the kernel may take in pieces. @param written  bytes before, and
/// then those too
/// @throws Error not_durable that names the file `shown`, the bytes written and the system's reason
inline void write_all(int fd, const std::string& path, const std::string& shown, Index& written,
                      std::span<const std::byte> data) {
  const auto asked = data.size();
  while (!data.empty()) {
    ssize_t taken = 0;
    const int error = retry_interrupted(FileOperation::write, path.c_str(), [&] {
      taken = ::write(fd, data.data(), data.size());
      return taken < 0 ? -1 : 0;
    });
    // Zero bytes taken without an error would loop for ever; a full device may answer so.
    expects(error == 0 && taken > 0, ErrorCode::not_durable, [&] {
      return sentence("file ", shown, ": write stopped at byte ", written, " with ", data.size(),
                      " of ", asked, " bytes left: ", errno_text(error == 0 ? ENOSPC : error));
    });
    written += taken;
    data = data.subspan(static_cast<std::size_t>(taken));
  }
}

}  // namespace detail

/// Flushes a directory, so that the names created, renamed or removed in it survive a power cut.
/// @throws Error not_durable
inline void fsync_directory(const std::string& path) {
  const detail::Descriptor directory(
      ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK));
  int error = directory.get() < 0 ? errno : 0;
  if (error == 0) {
    error = detail::retry_interrupted(FileOperation::flush, path.c_str(),
                                      [&] { return ::fsync(directory.get()); });
  }
  // EINVAL: this file system has no flush for directories, and nothing else can be asked of it.
  expects(error == 0 || error == EINVAL, ErrorCode::not_durable, [&] {
    return sentence("directory ", path, " could not be flushed: ", detail::errno_text(error));
  });
}

/// Renames atomically within one file system, then flushes the directories of both names.
/// @throws Error not_durable; the old name is then still valid, unless only the flush failed
inline void rename_durably(const std::string& from, const std::string& to) {
  const int error = detail::retry_interrupted(
      FileOperation::rename, to.c_str(), [&] { return std::rename(from.c_str(), to.c_str()); });
  expects(error == 0, ErrorCode::not_durable, [&] {
    return sentence(from, " could not be renamed to ", to, ": ", detail::errno_text(error));
  });
  const auto target = detail::parent_directory(to);
  fsync_directory(target);
  if (const auto source = detail::parent_directory(from); source != target) fsync_directory(source);
}

/// Makes one directory, which must not exist yet; permissions follow the umask. Its parent is not
/// flushed: a directory that matters is flushed by whoever renames it into place.
/// @throws Error not_durable
inline void make_directory(const std::string& path) {
  const int error = detail::retry_interrupted(FileOperation::make_directory, path.c_str(),
                                              [&] { return ::mkdir(path.c_str(), 0777); });
  expects(error == 0, ErrorCode::not_durable, [&] {
    return sentence("directory ", path, " could not be made: ", detail::errno_text(error));
  });
}

/// Makes a directory and its missing parents, each flushed into its parent. Existing ones are kept.
/// @throws Error not_durable
inline void make_directories(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return;
  const auto parent = detail::parent_directory(path);
  if (parent != path && parent != ".") make_directories(parent);
  const int error = detail::retry_interrupted(FileOperation::make_directory, path.c_str(),
                                              [&] { return ::mkdir(path.c_str(), 0777); });
  const bool made_by_another =
      error == EEXIST && ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  expects(error == 0 || made_by_another, ErrorCode::not_durable, [&] {
    return sentence("directory ", path, " could not be made: ", detail::errno_text(error));
  });
  fsync_directory(parent);
}

/// Removes a file, never what a link points to. For cleaning up: failure is an answer, not an
/// error.
inline bool remove_file(const std::string& path) noexcept {
  try {
    return detail::retry_interrupted(FileOperation::remove, path.c_str(),
                                     [&] { return ::unlink(path.c_str()); }) == 0;
  } catch (...) {
    return false;
  }
}

/// Names in a directory, without "." and "..", in byte order.
/// @throws Error bad_input if it cannot be read
[[nodiscard]] inline std::vector<std::string> list_directory(const std::string& path) {
  DIR* const directory = ::opendir(path.c_str());
  int error = directory == nullptr ? errno : 0;
  std::vector<std::string> names;
  while (error == 0) {
    errno = 0;
    const dirent* const entry = ::readdir(directory);
    if (entry == nullptr) {
      error = errno;
      break;
    }
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (directory != nullptr) ::closedir(directory);
  expects(error == 0, ErrorCode::bad_input, [&] {
    return sentence("directory ", path, " cannot be read: ", detail::errno_text(error));
  });
  std::sort(names.begin(), names.end());
  return names;
}

/// Removes a directory that holds only files. A nested directory in it stops the removal; links are
/// removed, not followed. For cleaning up: failure is an answer, not an error.
inline bool remove_flat_directory(const std::string& path) noexcept {
  try {
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) return false;
    for (const auto& name : list_directory(path)) {
      if (!remove_file(path + "/" + name)) return false;
    }
    return detail::retry_interrupted(FileOperation::remove, path.c_str(),
                                     [&] { return ::rmdir(path.c_str()); }) == 0;
  } catch (...) {
    return false;
  }
}

/// A new file that is written front to back and is either finished or removed.
/// An object destroyed before finish() removes its file: a half-written file has no reader.
class DurableFile {
 public:
  /// Creates the file; an existing one, and a link of that name, is refused. Errors name it
  /// `shown`, where that is not empty: what the user knows the file as.
  /// @throws Error not_durable
  explicit DurableFile(std::string path, std::string shown = {})
      : path_(std::move(path)), shown_(shown.empty() ? path_ : std::move(shown)), file_(-1) {
    const int error = detail::retry_interrupted(FileOperation::create, path_.c_str(), [&] {
      file_ = detail::Descriptor(
          ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
      return file_.get() < 0 ? -1 : 0;
    });
    expects(error == 0, ErrorCode::not_durable, [&] {
      return sentence("file ", shown_, " could not be created: ", detail::errno_text(error));
    });
  }
  DurableFile(DurableFile&&) noexcept = default;
  DurableFile& operator=(DurableFile&&) = delete;
  ~DurableFile() {
    if (file_.get() >= 0) remove_file(path_);
  }

  /// Appends all of `data`.
  /// @throws Error not_durable with the path, the bytes written and the system's reason
  void write(std::span<const std::byte> data) {
    expects(file_.get() >= 0, ErrorCode::logic,
            [&] { return sentence("file ", shown_, " is finished and takes no more bytes"); });
    detail::write_all(file_.get(), path_, shown_, bytes_, data);
  }

  /// Flushes the file to the device and closes it; its directory still has to be flushed.
  /// @throws Error not_durable; the file is then removed
  void finish() {
    expects(file_.get() >= 0, ErrorCode::logic,
            [&] { return sentence("file ", shown_, " is finished already"); });
    int error = detail::retry_interrupted(FileOperation::flush, path_.c_str(),
                                          [&] { return ::fsync(file_.get()); });
    // A network file system may report a lost write only here. After EINTR the descriptor is gone.
    if (error == 0 && ::close(file_.release()) != 0 && errno != EINTR) {
      error = errno;
      remove_file(path_);
    }
    expects(error == 0, ErrorCode::not_durable, [&] {
      return sentence("file ", shown_, ": its ", bytes_,
                      " bytes could not be flushed: ", detail::errno_text(error));
    });
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Bytes written.
  [[nodiscard]] Index bytes() const noexcept { return bytes_; }

 private:
  std::string path_, shown_;
  detail::Descriptor file_;
  Index bytes_ = 0;
};

/// Whether a symbolic link may stand for the file.
enum class Links : std::uint8_t { follow, refuse };

/// A regular file open for reading at any position. Reads copy into the caller's memory: unlike a
/// mapping, a file that shrinks after it was opened gives an Error, not a signal.
class InputFile {
 public:
  /// @throws Error bad_input if the file is missing, unreadable or not a regular file
  explicit InputFile(std::string path, Links links = Links::follow)
      : path_(std::move(path)),
        // Without O_NONBLOCK, opening a named pipe would wait for a writer.
        file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK |
                                        (links == Links::refuse ? O_NOFOLLOW : 0))) {
    struct stat status {};
    const int error = file_.get() < 0 || ::fstat(file_.get(), &status) != 0 ? errno : 0;
    expects(error == 0, ErrorCode::bad_input, [&] {
      return sentence("file ", path_, " cannot be opened: ", detail::errno_text(error));
    });
    expects(S_ISREG(status.st_mode), ErrorCode::bad_input,
            [&] { return sentence(path_, " is not a regular file"); });
    size_ = status.st_size;
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Bytes in the file when it was opened.
  [[nodiscard]] Index size() const noexcept { return size_; }

  /// Fills `out` from byte `first`. Safe from several threads.
  /// @throws Error bad_input with the byte at which the file ends or cannot be read
  void read(Index first, std::span<std::byte> out) const {
    while (!out.empty()) {
      const ssize_t got = ::pread(file_.get(), out.data(), out.size(), first);
      if (got < 0 && errno == EINTR) continue;
      expects(got > 0, ErrorCode::bad_input, [&] {
        return got == 0 ? sentence("file ", path_, " is truncated: it ends before byte ", first,
                                   " and ", out.size(), " more bytes were expected there")
                        : sentence("file ", path_, " cannot be read at byte ", first, ": ",
                                   detail::errno_text(errno));
      });
      first += got;
      out = out.subspan(static_cast<std::size_t>(got));
    }
  }

 private:
  std::string path_;
  detail::Descriptor file_;
  Index size_ = 0;
};

/// The whole of a file of at most `limit` bytes.
/// @throws Error bad_input
[[nodiscard]] inline std::string read_file(const std::string& path, Index limit,
                                           Links links = Links::follow) {
  const InputFile file(path, links);
  expects(file.size() <= limit, ErrorCode::bad_input, [&] {
    return sentence("file ", path, " has ", file.size(), " bytes, more than the ", limit,
                    " that are allowed");
  });
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace mega::inline v0::ckpt
