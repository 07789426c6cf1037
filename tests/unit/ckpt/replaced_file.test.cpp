/// @file  Tests of ckpt/replaced_file.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/ckpt/replaced_file.hpp>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>

namespace ckpt = mega::ckpt;
using ckpt::ReplacedFile;
using mega::ErrorCode;
using mega::tests::contains;
using mega::tests::content_of;
using mega::tests::sentence_of;
using mega::tests::TemporaryDirectory;
using mega::tests::throws_code;

namespace {

std::size_t files_in(const std::string& directory) {
  std::size_t count = 0;
  for (const auto& each : std::filesystem::directory_iterator(directory)) count += each.exists();
  return count;
}

/// Standard output goes to a file for as long as this lives.
class Redirected {
 public:
  explicit Redirected(const std::string& path, int flags) : kept_(::dup(STDOUT_FILENO)) {
    std::fflush(stdout);
    const int to = ::open(path.c_str(), O_WRONLY | O_CREAT | flags, 0666);
    ::dup2(to, STDOUT_FILENO);
    ::close(to);
  }
  ~Redirected() {
    std::fflush(stdout);
    ::dup2(kept_, STDOUT_FILENO);
    ::close(kept_);
  }

 private:
  int kept_;
};

}  // namespace

TEST_CASE("replaced_file: the old content stays until the new one is whole") {
  TemporaryDirectory dir;
  const std::string path = dir.write("a", "old");
  {
    ReplacedFile file(path);
    file.write("new ");
    file.write("text");
    file.close();
    CHECK(content_of(path) == "old");
    file.finish();
  }
  CHECK(content_of(path) == "new text");
  {
    ReplacedFile given_up(path);
    given_up.write("half");
  }
  {
    ReplacedFile given_up(path);
    given_up.write("whole, but not wanted");
    given_up.close();
  }
  CHECK(content_of(path) == "new text");
  CHECK(files_in(dir.path()) == 1);
}

TEST_CASE("replaced_file: a link keeps pointing where it does") {
  TemporaryDirectory dir;
  const std::string target = dir.write("target", "old");
  std::filesystem::create_symlink(target, dir / "link");
  ReplacedFile file(dir / "link");
  file.write("new");
  file.finish();
  CHECK(std::filesystem::is_symlink(dir / "link"));
  CHECK(content_of(target) == "new");
}

TEST_CASE("replaced_file: folders are refused, by their name") {
  TemporaryDirectory dir;
  CHECK(throws_code(ErrorCode::usage, [&] { ReplacedFile file(dir.path()); }));
  CHECK(contains(sentence_of([&] { ReplacedFile file(dir.path()); }), dir.path()));
  CHECK(files_in(dir.path()) == 0);
}

TEST_CASE("replaced_file: devices take the bytes, a full one says where it stopped") {
  ReplacedFile nothing("/dev/null");
  nothing.write("gone");
  nothing.finish();
  CHECK(std::filesystem::is_character_file("/dev/null"));
  CHECK_FALSE(ReplacedFile::is_standard_output("/dev/full"));
  ReplacedFile full("/dev/full");
  const auto write = [&] { full.write("abc"); };
  CHECK(throws_code(ErrorCode::not_durable, write));
  CHECK(sentence_of(write) ==
        "file /dev/full: write stopped at byte 0 with 3 of 3 bytes left: No space left on device");
  CHECK(std::filesystem::is_character_file("/dev/full"));
}

TEST_CASE("replaced_file: a pipe gets the bytes and stays one") {
  TemporaryDirectory dir;
  const std::string pipe = dir / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0666) == 0);
  std::string read;
  std::thread reader([&] { read = content_of(pipe); });
  {
    ReplacedFile file(pipe);
    file.write("one ");
    file.write("two");
    file.finish();
  }
  reader.join();
  CHECK(read == "one two");
  CHECK(std::filesystem::is_fifo(pipe));
  CHECK(files_in(dir.path()) == 1);
}

TEST_CASE("replaced_file: what standard output goes to is gone on with, not replaced") {
  TemporaryDirectory dir;
  const std::string path = dir.write("log", "before\n");
  struct stat old {
  }, now{};
  REQUIRE(::stat(path.c_str(), &old) == 0);
  bool stream = false, standard = false, other = true;
  {
    const Redirected to(path, O_APPEND);
    stream = ReplacedFile::is_stream("/dev/stdout");
    standard = ReplacedFile::is_standard_output("/dev/stdout");
    other = ReplacedFile::is_standard_output(dir / "another");
    ReplacedFile file("/dev/stdout");
    file.write("from the file\n");
    file.finish();
    std::printf("printed\n");
  }
  REQUIRE(::stat(path.c_str(), &now) == 0);
  CHECK(stream);
  CHECK(standard);
  CHECK_FALSE(other);
  CHECK(content_of(path) == "before\nfrom the file\nprinted\n");
  CHECK(now.st_ino == old.st_ino);
  CHECK(files_in(dir.path()) == 1);
}
