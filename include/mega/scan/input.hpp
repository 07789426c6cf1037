/// @file  Where importers get their bytes: a file, an archive's member or standard input, as a
/// Source that is read forward once, in bounded memory.
///
/// Plain files are mapped, so all their bytes are at hand at once and belong to the page cache.
/// gzip is inflated into a rolling window that the importer consumes; members of a tar archive
/// (ustar, pax and GNU names, with or without gzip around or inside) are one Source each.
#pragma once
#include <mega/core/error.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::scan {

/// What the user says about the file that is imported.
struct ImportOptions {
  std::int32_t rank = -1;  ///< global rank that recorded it; -1: as the file or its name says
};

/// Bytes one after the other, of unknown length.
class Reader {
 public:
  Reader() = default;
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  virtual ~Reader() = default;
  /// Writes at the front of `into`. @return bytes written; 0: the end. @pre !into.empty()
  virtual std::size_t read(std::span<char> into) = 0;
  /// Why the bytes ended before they should have, in one sentence; empty: they did not.
  [[nodiscard]] virtual std::string damage() const { return {}; }
};

/// A named text that is consumed from the front. What is at hand is one contiguous view; it grows
/// on demand, and the memory behind it never exceeds what was asked to be at hand plus a window.
class Source {
 public:
  /// All of `text` is at hand. @pre it outlives the source
  Source(std::string name, std::string_view text) : name_(std::move(name)), at_hand_(text) {}
  Source(std::string name, std::unique_ptr<Reader> reader)
      : name_(std::move(name)), reader_(std::move(reader)) {}

  /// For messages and for ranks that stand in file names: "path", or "archive:member".
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// Unconsumed bytes in memory; more may follow.
  [[nodiscard]] std::string_view at_hand() const noexcept { return at_hand_; }
  /// @pre count <= at_hand().size()
  void consume(std::size_t count) noexcept { at_hand_.remove_prefix(count); }

  /// Brings at least one more byte behind those at hand. Views into at_hand() become invalid.
  /// @return false: the source has ended
  bool read_more() { return fill(at_hand_.size() + 1); }

  /// The bytes at hand: `count` of them at least, unless the source ends before. Earlier views
  /// become invalid.
  std::string_view look(std::size_t count) {
    if (at_hand_.size() < count) (void)fill(count);
    return at_hand_;
  }

  /// Everything that is left. @throws Error(bad_input) if that is more than `limit` bytes
  std::string_view everything(std::size_t limit) {
    const std::string_view all =
        look(limit == std::numeric_limits<std::size_t>::max() ? limit : limit + 1);
    expects(all.size() <= limit, ErrorCode::bad_input, [&] {
      return sentence(name_, " is longer than ", limit,
                      " bytes, the most that a file of its kind may have");
    });
    return all;
  }

  /// Why the text ended early (a torn gzip stream, a cut archive); empty: it did not.
  [[nodiscard]] std::string damage() const { return reader_ ? reader_->damage() : std::string{}; }

 private:
  static constexpr std::size_t window = std::size_t{1} << 20U;

  bool fill(std::size_t count) {
    while (reader_ != nullptr && !ended_ && at_hand_.size() < count) {
      if (end_ == capacity_) make_room();
      const std::size_t got = reader_->read({buffer_.get() + end_, capacity_ - end_});
      ended_ = got == 0;
      end_ += got;
      at_hand_ = {buffer_.get() + end_ - got - at_hand_.size(), at_hand_.size() + got};
    }
    return at_hand_.size() >= count;
  }

  /// What is at hand moves to the front; if it fills more than half, into twice the room.
  void make_room() {
    const std::size_t kept = at_hand_.size();
    if (capacity_ < window || kept > capacity_ / 2) {
      const std::size_t capacity = std::max(window, 2 * capacity_);
      auto larger = std::make_unique_for_overwrite<char[]>(capacity);
      std::copy_n(at_hand_.data(), kept, larger.get());
      buffer_ = std::move(larger);
      capacity_ = capacity;
    } else {
      std::memmove(buffer_.get(), at_hand_.data(), kept);
    }
    end_ = kept;
    at_hand_ = {buffer_.get(), kept};
  }

  std::string name_;
  std::unique_ptr<Reader> reader_;
  std::unique_ptr<char[]> buffer_;
  std::size_t capacity_ = 0;
  std::size_t end_ = 0;  // of what the reader wrote into buffer_
  std::string_view at_hand_;
  bool ended_ = false;
};

/// Next line without its end ("\n" or "\r\n"); the last may lack one. Of a line longer than
/// `limit` bytes the front is given and the rest passed over.
/// @return false: there is none. The view is valid until the source is used again.
inline bool next_line(Source& source, std::string_view& line,
                      std::size_t limit = std::size_t{1} << 24U) {
  std::size_t end = source.at_hand().find('\n');
  for (std::size_t searched = source.at_hand().size(); end == std::string_view::npos;) {
    if (searched > limit || !source.read_more()) break;
    end = source.at_hand().find('\n', searched);
    searched = source.at_hand().size();
  }
  const std::string_view text = source.at_hand();
  line = text.substr(0, std::min({end, limit, text.size()}));
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (end != std::string_view::npos) {
    source.consume(end + 1);
    return true;
  }
  source.consume(std::min(text.size(), limit));
  return !text.empty();
}

namespace detail {

/// A file descriptor that is closed with the object.
class Descriptor {
 public:
  explicit Descriptor(int number) noexcept : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ > 2) ::close(number_);
  }
  [[nodiscard]] int number() const noexcept { return number_; }

 private:
  int number_;
};

/// The bytes of a regular file, read-only.
class Mapping {
 public:
  /// An empty view where the file cannot be mapped (a pipe, nothing in it).
  Mapping(int descriptor, std::size_t size) : size_(size) {
    if (size == 0) return;
    at_ = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (at_ != MAP_FAILED) ::madvise(at_, size, MADV_SEQUENTIAL);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (at_ != MAP_FAILED) ::munmap(at_, size_);
  }
  [[nodiscard]] std::string_view view() const noexcept {
    if (at_ == MAP_FAILED) return {};
    return {static_cast<const char*>(at_), size_};
  }

 private:
  void* at_ = MAP_FAILED;
  std::size_t size_;
};

class DescriptorReader final : public Reader {
 public:
  explicit DescriptorReader(int descriptor) noexcept : descriptor_(descriptor) {}
  std::size_t read(std::span<char> into) override {
    for (;;) {
      const ssize_t got = ::read(descriptor_, into.data(), into.size());
      if (got >= 0) return static_cast<std::size_t>(got);
      if (errno == EINTR) continue;
      damage_ = sentence("reading failed: ", std::strerror(errno));
      return 0;
    }
  }
  [[nodiscard]] std::string damage() const override { return damage_; }

 private:
  int descriptor_;
  std::string damage_;
};

/// Inflates the gzip members of a source, one after the other.
class GzipReader final : public Reader {
 public:
  /// @pre the source outlives the reader
  explicit GzipReader(Source& packed) : packed_(packed) {
    constexpr int gzip_window = 15 + 16;
    expects(::inflateInit2(&stream_, gzip_window) == Z_OK, ErrorCode::logic,
            "zlib could not be set up");
  }
  ~GzipReader() override { ::inflateEnd(&stream_); }

  std::size_t read(std::span<char> into) override {
    constexpr std::size_t most = std::numeric_limits<uInt>::max();
    const std::size_t room = std::min(into.size(), most);
    stream_.next_out = reinterpret_cast<Bytef*>(into.data());
    stream_.avail_out = static_cast<uInt>(room);
    while (stream_.avail_out == room && damage_.empty()) {
      if (packed_.at_hand().empty() && !packed_.read_more()) {
        if (!between_) damage_ = "the gzip stream ends in the middle";
        break;
      }
      const std::string_view input = packed_.at_hand();
      if (between_ && started_ && input[0] != '\x1f') break;  // padding behind the last member
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(input.data()));
      stream_.avail_in = static_cast<uInt>(std::min(input.size(), most));
      const uInt offered = stream_.avail_in;
      const int status = ::inflate(&stream_, Z_NO_FLUSH);
      packed_.consume(offered - stream_.avail_in);
      started_ = true;
      between_ = status == Z_STREAM_END;
      if (between_) {
        ::inflateReset(&stream_);
      } else if (status != Z_OK && status != Z_BUF_ERROR) {
        damage_ = sentence("the gzip stream is damaged: ",
                           stream_.msg != nullptr ? stream_.msg : "unknown reason");
      }
    }
    return room - stream_.avail_out;
  }
  [[nodiscard]] std::string damage() const override {
    return damage_.empty() ? packed_.damage() : damage_;
  }

 private:
  Source& packed_;
  z_stream stream_{};
  bool started_ = false;
  bool between_ = true;  // members: nothing of one is pending
  std::string damage_;
};

/// The next `size` bytes of a source.
class MemberReader final : public Reader {
 public:
  /// @pre the source outlives the reader
  MemberReader(Source& archive, std::uint64_t size) noexcept : archive_(archive), left_(size) {}

  std::size_t read(std::span<char> into) override {
    if (left_ == 0) return 0;
    if (archive_.at_hand().empty() && !archive_.read_more()) {
      cut_ = true;
      return 0;
    }
    const std::string_view text = archive_.at_hand();
    const auto count = static_cast<std::size_t>(
        std::min<std::uint64_t>(left_, std::min(text.size(), into.size())));
    std::copy_n(text.data(), count, into.data());
    archive_.consume(count);
    left_ -= count;
    return count;
  }
  /// Passes over what was not read.
  void finish() {
    std::array<char, 4096> ignored{};
    while (read(ignored) != 0) {
    }
  }
  [[nodiscard]] std::string damage() const override {
    return !archive_.damage().empty() ? archive_.damage()
           : cut_                     ? "the archive ends in the middle of this member"
                                      : "";
  }

 private:
  Source& archive_;
  std::uint64_t left_;
  bool cut_ = false;  // only a read that finds nothing tells an end from what is not yet at hand
};

[[nodiscard]] inline bool looks_like_gzip(std::string_view head) noexcept {
  return head.starts_with("\x1f\x8b");
}

constexpr std::size_t tar_block = 512;

[[nodiscard]] inline bool looks_like_tar(std::string_view head) noexcept {
  return head.size() >= tar_block && head.substr(257, 5) == "ustar";
}

/// Number of a tar header: octal text, or base 256 where the first byte says so.
[[nodiscard]] inline std::uint64_t tar_number(std::string_view field) noexcept {
  std::uint64_t value = 0;
  if ((static_cast<unsigned char>(field[0]) & 0x80U) != 0) {
    for (const char c : field.substr(field.size() - 8))
      value = value << 8U | static_cast<unsigned char>(c);
    return value;
  }
  for (const char c : field) {
    if (c >= '0' && c <= '7') value = value << 3U | static_cast<std::uint64_t>(c - '0');
  }
  return value;
}

[[nodiscard]] inline std::string tar_text(std::string_view field) {
  return std::string(field.substr(0, field.find('\0')));
}

/// Value of `key` in the records "length key=value\n" of a pax header; empty: not there.
[[nodiscard]] inline std::string pax_value(std::string_view records, std::string_view key) {
  while (!records.empty()) {
    std::size_t length = 0, digits = 0;
    while (digits < records.size() && digits < 9 && records[digits] >= '0' &&
           records[digits] <= '9')
      length = length * 10 + static_cast<std::size_t>(records[digits++] - '0');
    if (length <= digits + 1 || length > records.size()) return {};
    std::string_view record = records.substr(digits + 1, length - digits - 1);
    if (record.ends_with('\n')) record.remove_suffix(1);
    const std::size_t equals = record.find('=');
    if (equals != std::string_view::npos && record.substr(0, equals) == key)
      return std::string(record.substr(equals + 1));
    records.remove_prefix(length);
  }
  return {};
}

/// Sentences on what was not visited.
using Remarks = std::vector<std::string>;

template <class Visit>
void visit_text(Source& source, Visit& visit, Remarks& remarks);

template <class Visit>
void visit_tar(Source& archive, Visit& visit, Remarks& remarks) {
  constexpr std::uint64_t name_limit = std::uint64_t{1} << 20U;
  std::string long_name;
  std::uint64_t long_size = 0;
  bool cut = false;  // within a member, whose reader says so
  while (archive.look(tar_block).size() >= tar_block) {
    const std::string_view header = archive.at_hand().substr(0, tar_block);
    if (header.find_first_not_of('\0') == std::string_view::npos) return;  // the end mark
    std::string name = tar_text(header.substr(0, 100));
    const std::string prefix = tar_text(header.substr(345, 155));
    if (!prefix.empty() && header.substr(257, 6) == std::string_view("ustar\0", 6))
      name = prefix + "/" + name;
    const char type = header[156];
    std::uint64_t size = tar_number(header.substr(124, 12));
    archive.consume(tar_block);
    const bool extends = type == 'x' || type == 'L';
    if (!extends) {
      if (!long_name.empty()) name = std::exchange(long_name, {});
      if (long_size != 0) size = std::exchange(long_size, 0);
    }
    const std::uint64_t padding = (tar_block - size % tar_block) % tar_block;
    MemberReader rest(archive, padding);
    if (extends && size <= name_limit) {
      const std::string_view text = archive.look(static_cast<std::size_t>(size));
      const std::string_view records = text.substr(0, static_cast<std::size_t>(size));
      if (type == 'L') {
        long_name = tar_text(records);
      } else {
        long_name = pax_value(records, "path");
        for (const char c : pax_value(records, "size")) {
          if (c >= '0' && c <= '9')
            long_size = long_size * 10 + static_cast<std::uint64_t>(c - '0');
        }
      }
      archive.consume(records.size());
      rest.finish();
      continue;
    }
    auto reader = std::make_unique<MemberReader>(archive, size);
    MemberReader& member = *reader;
    Source source(archive.name() + ":" + name, std::move(reader));
    if (type == '0' || type == '\0') visit_text(source, visit, remarks);
    member.finish();
    cut = !member.damage().empty();
    rest.finish();
  }
  if (cut) return;
  const std::string damage = archive.damage();
  remarks.push_back(sentence(archive.name(), " ends without an end mark",
                             damage.empty() ? "" : sentence(" (", damage, ")"),
                             ": files may be missing in it"));
}

/// Calls `visit` with what is inside gzip and tar.
template <class Visit>
void visit_text(Source& source, Visit& visit, Remarks& remarks) {
  const std::string_view head = source.look(tar_block);
  if (looks_like_gzip(head)) {
    Source text(source.name(), std::make_unique<GzipReader>(source));
    if (looks_like_tar(text.look(tar_block))) {
      visit_tar(text, visit, remarks);
    } else {
      visit(text);
    }
  } else if (looks_like_tar(head)) {
    visit_tar(source, visit, remarks);
  } else {
    visit(source);
  }
}

template <class Visit>
void visit_file(const std::filesystem::path& path, Visit& visit, Remarks& remarks) {
  const bool standard_input = path == "-";
  const Descriptor file(standard_input ? 0 : ::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const std::string name = standard_input ? "standard input" : path.string();
  expects(file.number() >= 0, ErrorCode::bad_input,
          [&] { return sentence(name, " cannot be read: ", std::strerror(errno)); });
  struct stat info {};
  const bool regular = ::fstat(file.number(), &info) == 0 && S_ISREG(info.st_mode);
  const Mapping mapping(file.number(), regular ? static_cast<std::size_t>(info.st_size) : 0);
  if (!mapping.view().empty()) {
    Source source(name, mapping.view());
    return visit_text(source, visit, remarks);
  }
  Source source(name, std::make_unique<DescriptorReader>(file.number()));
  visit_text(source, visit, remarks);
}

/// "a", "a and b", "a, b, c and 4 more"
[[nodiscard]] inline std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t most = 3;
  std::string out;
  for (std::size_t i = 0; i < std::min(most, names.size()); ++i) {
    const bool last = i + 1 == names.size();
    out += sentence(i == 0 ? "" : last ? " and " : ", ", names[i]);
  }
  if (names.size() > most) out += sentence(" and ", names.size() - most, " more");
  return out;
}

/// Names in a folder, sorted.
struct FolderContent {
  explicit FolderContent(const std::filesystem::path& path) {
    namespace fs = std::filesystem;
    std::error_code fault;
    for (fs::directory_iterator entry(path, fault), end; !fault && entry != end;
         entry.increment(fault)) {
      std::error_code unknown;  // as of a link to nothing
      const std::string name = entry->path().filename().string();
      if (entry->is_directory(unknown)) {
        if (!name.starts_with('.')) folders.push_back(name);
      } else {
        (entry->is_regular_file(unknown) ? files : others).push_back(name);
      }
    }
    expects(!fault, ErrorCode::bad_input,
            [&] { return sentence(path.string(), " cannot be read: ", fault.message()); });
    for (std::vector<std::string>* const names : {&files, &folders, &others}) {
      std::sort(names->begin(), names->end(), [](const std::string& a, const std::string& b) {
        return a.size() != b.size() ? a.size() < b.size() : a < b;
      });
    }
  }
  std::vector<std::string> files, folders, others;
};

}  // namespace detail

/// Calls `visit(Source&)` for every text that `path` names: a file, "-" for standard input, every
/// regular file of a directory (shorter names first, then by character, so that "dump_10" comes
/// after "dump_9"), every regular member of a tar archive. gzip is recognised by its first bytes
/// at each of these places. Directories within a directory are not searched.
/// @return sentences on what was not visited: directories, what is no file, lost ends of archives
/// @throws Error(bad_input) if the path cannot be read; damage inside is the source's damage()
template <class Visit>
std::vector<std::string> for_each_source(const std::filesystem::path& path, Visit visit) {
  detail::Remarks remarks;
  std::error_code fault;
  if (!std::filesystem::is_directory(path, fault)) {
    detail::visit_file(path, visit, remarks);
    return remarks;
  }
  const detail::FolderContent content(path);
  if (!content.folders.empty()) {
    remarks.push_back(sentence(content.folders.size() == 1 ? "the folder " : "the folders ",
                               detail::listed(content.folders), " in ", path.string(),
                               content.folders.size() == 1 ? " was" : " were",
                               " not searched: name what belongs to the job"));
  }
  if (!content.others.empty()) {
    remarks.push_back(
        sentence(detail::listed(content.others), " in ", path.string(),
                 content.others.size() == 1 ? " is no file and was" : " are no files and were",
                 " passed over"));
  }
  for (const std::string& name : content.files) detail::visit_file(path / name, visit, remarks);
  return remarks;
}

}  // namespace mega::inline v0::scan
