/// @file  DirectoryLock: one process at a time owns a directory, such as one that a run saves its
/// checkpoints in. POSIX.
#pragma once
#include <mega/ckpt/durable_file.hpp>
#include <mega/core/error.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace mega::inline v0::ckpt {

/// Owns a directory until it is destroyed or its process ends, however it ends. The owner is the
/// one that holds the system's lock on the file `.lock` in it, which names its process and host; a
/// file that nobody holds means nothing, and the last owner removes it.
///
/// Where the file system has no locks, every process is an owner: the lock is advice for runs that
/// would get in each other's way, and what they write is whole all the same. On a network it
/// reaches as far as the file system's locks do.
class DirectoryLock {
 public:
  static constexpr std::string_view file_name = ".lock";

  /// Makes the directory if it is missing, and looks once whether it is free.
  /// @throws Error(not_durable) where the directory cannot be made or written
  explicit DirectoryLock(const std::string& directory)
      : path_(directory + "/" + std::string(file_name)), file_(-1) {
    make_directories(directory);
    while (!try_once()) {
    }
  }
  DirectoryLock(DirectoryLock&& other) noexcept
      : path_(std::move(other.path_)),
        file_(std::move(other.file_)),
        owner_(std::move(other.owner_)),
        is_owned_(std::exchange(other.is_owned_, false)) {}
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  /// Removed before it is free, so that nobody waits for a file that has no name.
  ~DirectoryLock() {
    if (is_owned_ && file_.get() >= 0) remove_file(path_);
  }

  /// Whether this object is the owner.
  [[nodiscard]] bool is_owned() const noexcept { return is_owned_; }
  /// "process 4242 on host a": the owner, where it is another.
  [[nodiscard]] const std::string& owner() const noexcept { return owner_; }

 private:
  /// Whether it is decided; not so where the file lost its name before it was locked.
  bool try_once() {
    int error = detail::retry_interrupted(FileOperation::create, path_.c_str(), [&] {
      file_ = detail::Descriptor(
          ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
      return file_.get() < 0 ? -1 : 0;
    });
    expects(error == 0, ErrorCode::not_durable, [&] {
      return sentence("file ", path_, " could not be created: ", detail::errno_text(error));
    });
    while ((error = ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0 ? 0 : errno) == EINTR) {
    }
    if (error == EWOULDBLOCK) {
      owner_ = read_owner();
      file_ = detail::Descriptor(-1);
      return true;
    }
    struct stat held {
    }, named{};
    if (error == 0 && (::fstat(file_.get(), &held) != 0 || ::lstat(path_.c_str(), &named) != 0 ||
                       held.st_dev != named.st_dev || held.st_ino != named.st_ino)) {
      return false;
    }
    is_owned_ = true;
    write_owner();
    return true;
  }

  void write_owner() const noexcept {
    std::array<char, 256> host{};
    if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
    const std::string text = sentence("process ", static_cast<long>(::getpid()), " on host ",
                                      std::string_view(host.data()), "\n");
    // What only people read may stay unwritten on a full disk.
    if (::ftruncate(file_.get(), 0) == 0) (void)!::pwrite(file_.get(), text.data(), text.size(), 0);
  }
  [[nodiscard]] std::string read_owner() const {
    std::array<char, 512> text{};
    const ssize_t got = ::pread(file_.get(), text.data(), text.size(), 0);
    std::string_view read(text.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
    read = read.substr(0, read.find('\n'));
    return read.starts_with("process ") ? printable(read) : "another process";
  }
  /// Another program may have written it.
  [[nodiscard]] static std::string printable(std::string_view text) {
    std::string out(text);
    for (char& c : out) {
      if (c < ' ' || c > '~') c = '?';
    }
    return out;
  }

  std::string path_;
  detail::Descriptor file_;
  std::string owner_;
  bool is_owned_ = false;
};

}  // namespace mega::inline v0::ckpt
