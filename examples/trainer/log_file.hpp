/// @file  The file of --log-json: begun anew, or gone on with where a run is resumed.
#pragma once
#include <mega/core/error.hpp>

#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

namespace trainer {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using OpenFile = std::unique_ptr<std::FILE, CloseFile>;

namespace detail {

/// How every line of a log begins.
inline constexpr std::string_view record_head = "{\"step\": ";

/// What stands behind the last line break.
[[nodiscard]] inline std::string last_piece(std::FILE* file, long size) {
  constexpr long piece = 1 << 16;
  std::string tail;
  while (static_cast<long>(tail.size()) < size) {
    const long count = std::min(piece, size - static_cast<long>(tail.size()));
    std::string part(static_cast<std::size_t>(count), '\0');
    std::fseek(file, size - static_cast<long>(tail.size()) - count, SEEK_SET);
    if (std::fread(part.data(), 1, part.size(), file) != part.size()) break;
    tail.insert(0, part);
    const auto line_break = tail.rfind('\n');
    if (line_break != tail.npos) return tail.substr(line_break + 1);
    if (tail.size() > std::size_t{1} << 20) break;  // no record is as long
  }
  return tail;
}

}  // namespace detail

/// Makes a log end with its last whole record: what a killed run had written of one more is cut
/// off, since a record behind it would make one unreadable line of both.
/// @return what was done, for the user; empty where nothing had to be
/// @throws  Error(usage) where the file ends in something else than a log does
[[nodiscard]] inline std::string end_with_whole_record(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0)
    return {};
  const OpenFile file(std::fopen(path.c_str(), "r+"));
  if (!file) return {};  // whoever opens it to go on says why
  const auto size = static_cast<long>(status.st_size);
  const std::string tail = detail::last_piece(file.get(), size);
  if (tail.empty()) return {};
  const auto common = std::min(tail.size(), detail::record_head.size());
  mega::expects(tail.compare(0, common, detail::record_head, 0, common) == 0,
                mega::ErrorCode::usage, [&] {
                  return mega::sentence("--log-json: '", path,
                                        "' does not end as a log does, so --load does not go on "
                                        "with it; give another file");
                });
  std::string done;
  int failed = 0;
  if (nlohmann::json::accept(tail)) {
    std::fseek(file.get(), 0, SEEK_END);
    failed = std::fputc('\n', file.get()) == EOF || std::fflush(file.get()) != 0 ? errno : 0;
  } else {
    failed =
        ::ftruncate(fileno(file.get()), size - static_cast<long>(tail.size())) != 0 ? errno : 0;
    done = mega::sentence("--log-json: the last line of ", path,
                          " was not finished, as a run that is killed leaves it; its ", tail.size(),
                          tail.size() == 1 ? " byte is" : " bytes are", " cut off");
  }
  mega::expects(failed == 0, mega::ErrorCode::not_durable, [&] {
    return mega::sentence("--log-json: the last line of ", path,
                          " is not whole and could not be mended: ", std::strerror(failed));
  });
  return done;
}

/// @param go_on  behind what is there
/// @throws  Error(bad_input) where it cannot be written
[[nodiscard]] inline OpenFile open_log(const std::string& path, bool go_on) {
  OpenFile file(std::fopen(path.c_str(), go_on ? "a" : "w"));
  mega::expects(file != nullptr, mega::ErrorCode::bad_input, [&] {
    return mega::sentence("--log-json: cannot write '", path, "': ", std::strerror(errno));
  });
  return file;
}

}  // namespace trainer
