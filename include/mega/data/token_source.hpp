/// @file  Where tokens come from: the token_source concept, and bytes of text as tokens.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace mega::inline v0::data {

template <class S>
concept counts_tokens = requires(const S& source) {
  { source.size() } -> std::same_as<Index>;
};
template <class S>
concept reads_tokens = requires(const S& source, Index first, std::span<std::int32_t> out) {
  source.read(first, out);
};
/// A sequence of size() tokens of which any stretch can be read; const, from several threads.
template <class S>
concept token_source = counts_tokens<S> && reads_tokens<S>;

/// Text as tokens without a tokenizer: each byte is a token, each document ends with one more.
/// Documents are held in memory, one byte a token.
class ByteTokenSource {
 public:
  /// The token behind each document's last byte.
  static constexpr std::int32_t end_of_document = 256;
  [[nodiscard]] static constexpr Index vocab_size() noexcept { return 257; }

  /// Adds a document at the end. An empty one has no token to learn from: it is only counted.
  void append(std::string_view document) {
    if (document.empty()) {
      ++empty_documents_;
      return;
    }
    text_ += document;
    ends_.push_back(size() + static_cast<Index>(document.size()) + 1);
  }

  /// Tokens of all documents.
  [[nodiscard]] Index size() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
  [[nodiscard]] Index documents() const noexcept { return static_cast<Index>(ends_.size()); }
  /// Documents that were skipped because they held no byte.
  [[nodiscard]] Index empty_documents() const noexcept { return empty_documents_; }

  /// Tokens [first, first + out.size()).
  /// @throws Error logic if they are not all within size()
  void read(Index first, std::span<std::int32_t> out) const {
    const auto count = static_cast<Index>(out.size());
    expects(first >= 0 && first <= size() && count <= size() - first, ErrorCode::logic, [&] {
      return sentence("tokens ", first, " to ", first, " + ", count, " lie outside the source's ",
                      size());
    });
    auto document = std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin();
    for (auto& token : out) {
      // Each earlier document put one token into the sequence that has no byte in the text.
      if (first + 1 == ends_[static_cast<std::size_t>(document)]) {
        token = end_of_document;
        ++document;
      } else {
        token = static_cast<unsigned char>(text_[static_cast<std::size_t>(first - document)]);
      }
      ++first;
    }
  }

 private:
  std::string text_;         // all documents, one after the other
  std::vector<Index> ends_;  // of each document, in tokens
  Index empty_documents_ = 0;
};

static_assert(token_source<ByteTokenSource>);

namespace detail {

[[noreturn]] inline void refuse(const std::string& path, std::string_view problem, int error) {
  throw Error(ErrorCode::bad_input,
              sentence("data ", path, " ", problem, ": ", std::generic_category().message(error)));
}

inline struct stat status_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) refuse(path, "cannot be found", errno);
  return status;
}

/// Calls `use(bytes)` for consecutive pieces of a regular file.
template <class Use>
void for_each_piece(const std::string& path, Use use) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) refuse(path, "cannot be opened", errno);
  struct Close {
    int file;
    ~Close() { ::close(file); }
  } const close{file};
  struct stat status {};
  if (::fstat(file, &status) != 0) refuse(path, "cannot be read", errno);
  expects(S_ISREG(status.st_mode), ErrorCode::bad_input,
          [&] { return sentence("data ", path, " is neither a regular file nor a directory"); });
  std::string piece(std::size_t{1} << 18, '\0');
  for (;;) {
    const ssize_t got = ::read(file, piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path, "cannot be read", errno);
    if (got == 0) return;
    use(std::string_view(piece).substr(0, static_cast<std::size_t>(got)));
  }
}

inline void collect_files(const std::string& directory, std::vector<std::string>& out) {
  DIR* const stream = ::opendir(directory.c_str());
  if (stream == nullptr) refuse(directory, "cannot be opened", errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* const entry = ::readdir(stream)) {
    if (entry->d_name[0] != '.') names.push_back(entry->d_name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(stream);
  if (error != 0) refuse(directory, "cannot be read", error);
  for (const auto& name : names) {
    std::string path = directory + "/" + name;
    struct stat link {};
    if (::lstat(path.c_str(), &link) != 0) refuse(path, "cannot be found", errno);
    if (S_ISDIR(link.st_mode)) {
      collect_files(path, out);
    } else if (S_ISREG(S_ISLNK(link.st_mode) ? status_of(path).st_mode : link.st_mode)) {
      out.push_back(std::move(path));
    }
  }
}

}  // namespace detail

/// Regular files in and below a directory, in byte order of their paths, so in the same order on
/// every machine. Hidden names are left out; links to files are followed, links to directories not.
/// @throws Error bad_input
[[nodiscard]] inline std::vector<std::string> files_below(const std::string& directory) {
  std::vector<std::string> paths;
  detail::collect_files(directory, paths);
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// Adds a file as one document, byte for byte.
/// @throws Error bad_input
inline void append_text_file(ByteTokenSource& source, const std::string& path) {
  std::string document;
  detail::for_each_piece(path, [&](std::string_view piece) { document += piece; });
  source.append(document);
}

/// Reads a file, or every file below a directory.
/// @param append_file  called with (source, path) for each file
/// @throws Error bad_input, also if there is no document with text
template <std::invocable<ByteTokenSource&, const std::string&> AppendFile>
[[nodiscard]] ByteTokenSource open_documents(const std::string& path, AppendFile append_file) {
  ByteTokenSource source;
  if (S_ISDIR(detail::status_of(path).st_mode)) {
    for (const auto& file : files_below(path)) append_file(source, file);
  } else {
    append_file(source, path);
  }
  expects(source.size() > 0, ErrorCode::bad_input, [&] {
    return sentence("data ", path, " holds no text: ", source.empty_documents(),
                    " documents, all of them empty");
  });
  return source;
}

/// Every file is plain text and one document.
[[nodiscard]] inline ByteTokenSource open_text(const std::string& path) {
  return open_documents(path, append_text_file);
}

}  // namespace mega::inline v0::data
