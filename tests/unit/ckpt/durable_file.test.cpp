/// @file  Tests of ckpt/durable_file.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/ckpt/durable_file.hpp>

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

namespace ckpt = mega::ckpt;
using ckpt::FileOperation;
using mega::ErrorCode;
using mega::tests::contains;
using mega::tests::content_of;
using mega::tests::sentence_of;
using mega::tests::TemporaryDirectory;
using mega::tests::throws_code;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

struct Hooked {
  explicit Hooked(ckpt::FileFaults::Hook hook) { ckpt::FileFaults::install(hook); }
  ~Hooked() { ckpt::FileFaults::install(nullptr); }
};

}  // namespace

TEST_CASE("durable_file: content arrives, and the file is not overwritten") {
  TemporaryDirectory dir;
  const std::string path = dir / "a";
  {
    ckpt::DurableFile file(path);
    file.write(bytes_of("one "));
    file.write({});
    file.write(bytes_of("two"));
    CHECK(file.bytes() == 7);
    file.finish();
    CHECK(throws_code(ErrorCode::logic, [&] { file.write(bytes_of("x")); }));
    CHECK(throws_code(ErrorCode::logic, [&] { file.finish(); }));
  }
  CHECK(content_of(path) == "one two");
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::DurableFile again(path); }));
  CHECK(content_of(path) == "one two");
  CHECK(contains(sentence_of([&] { ckpt::DurableFile again(path); }), path));
}

TEST_CASE("durable_file: a link of the file's name is refused, its target stays untouched") {
  TemporaryDirectory dir;
  const auto target = dir.write("target", "kept");
  std::filesystem::create_symlink(target, dir / "link");
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::DurableFile file(dir / "link"); }));
  std::filesystem::create_symlink(dir / "absent", dir / "dangling");
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::DurableFile file(dir / "dangling"); }));
  CHECK(content_of(target) == "kept");
  CHECK_FALSE(std::filesystem::exists(dir / "absent"));
}

TEST_CASE("durable_file: an unfinished file is removed, a moved-from one removes nothing") {
  TemporaryDirectory dir;
  {
    ckpt::DurableFile file(dir / "a");
    file.write(bytes_of("half"));
    CHECK(std::filesystem::exists(dir / "a"));
    ckpt::DurableFile taken(std::move(file));
    taken.write(bytes_of("+"));
  }
  CHECK_FALSE(std::filesystem::exists(dir / "a"));
  {
    ckpt::DurableFile file(dir / "b");
    ckpt::DurableFile taken(std::move(file));
    taken.write(bytes_of("whole"));
    taken.finish();
  }
  CHECK(content_of(dir / "b") == "whole");
}

TEST_CASE("durable_file: interrupted calls are repeated") {
  TemporaryDirectory dir;
  // Every second call, whichever it is, is interrupted once.
  const Hooked hooked([](FileOperation, const char*, std::uint64_t ordinal) {
    return ordinal % 2 == 0 ? EINTR : 0;
  });
  ckpt::make_directory(dir / "d");
  ckpt::DurableFile file(dir / "d/a");
  file.write(bytes_of("text"));
  file.finish();
  ckpt::rename_durably(dir / "d/a", dir / "b");
  CHECK(content_of(dir / "b") == "text");
  CHECK(ckpt::remove_flat_directory(dir / "d"));
}

TEST_CASE("durable_file: every failing operation names the path and the reason") {
  TemporaryDirectory dir;
  ckpt::DurableFile file(dir / "a");
  file.write(bytes_of("12345"));
  dir.write("from", "x");
  const Hooked hooked([](FileOperation operation, const char*, std::uint64_t) {
    return operation == FileOperation::remove ? EACCES : ENOSPC;
  });
  const auto full = ckpt::detail::errno_text(ENOSPC);
  for (const auto& said : {
           sentence_of([&] { ckpt::DurableFile other(dir / "c"); }),
           sentence_of([&] { file.write(bytes_of("678")); }),
           sentence_of([&] { file.finish(); }),
           sentence_of([&] { ckpt::make_directory(dir / "d"); }),
           sentence_of([&] { ckpt::make_directories(dir / "d/e"); }),
           sentence_of([&] { ckpt::rename_durably(dir / "from", dir / "to"); }),
           sentence_of([&] { ckpt::fsync_directory(dir.path()); }),
       }) {
    CAPTURE(said);
    CHECK(contains(said, full));
    CHECK(contains(said, dir.path()));
  }
  const auto write = sentence_of([&] { file.write(bytes_of("678")); });
  CHECK(contains(write, "byte 5"));
  CHECK(contains(write, "3 of 3"));
  CHECK_FALSE(ckpt::remove_file(dir / "from"));
  CHECK(std::filesystem::exists(dir / "from"));
}

TEST_CASE("durable_file: a write that the system takes in part goes on and reports the rest") {
  TemporaryDirectory dir;
  const auto child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10, 10};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int verdict = 1;
    try {
      ckpt::DurableFile file(dir / "a");
      file.write(bytes_of(std::string(100, 'x')));
    } catch (const mega::Error& fault) {
      // The first call takes 10 bytes, the second fails.
      verdict = contains(fault.what(), "byte 10 with 90 of 100") ? 0 : 2;
    }
    ::_exit(verdict);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("durable_file: make_directories makes parents and keeps what exists") {
  TemporaryDirectory dir;
  ckpt::make_directories(dir / "a/b/c");
  CHECK(std::filesystem::is_directory(dir / "a/b/c"));
  ckpt::make_directories(dir / "a/b/c");
  ckpt::make_directories(dir / "a/b/c/");
  dir.write("file", "");
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::make_directories(dir / "file"); }));
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::make_directories(dir / "file/x"); }));
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::make_directory(dir / "a"); }));
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::make_directory(dir / "x/y"); }));
}

TEST_CASE("durable_file: removal follows no link and enters no nested directory") {
  TemporaryDirectory dir;
  ckpt::make_directories(dir / "outside");
  dir.write("outside/kept", "kept");
  ckpt::make_directory(dir / "d");
  std::filesystem::create_symlink(dir / "outside", dir / "d/link");
  CHECK(ckpt::remove_flat_directory(dir / "d"));
  CHECK(content_of(dir / "outside/kept") == "kept");
  std::filesystem::create_symlink(dir / "outside", dir / "link");
  CHECK_FALSE(ckpt::remove_flat_directory(dir / "link"));
  ckpt::make_directories(dir / "nested/inner");
  CHECK_FALSE(ckpt::remove_flat_directory(dir / "nested"));
  CHECK(std::filesystem::exists(dir / "nested/inner"));
  CHECK_FALSE(ckpt::remove_flat_directory(dir / "absent"));
}

TEST_CASE("durable_file: InputFile reads at any position and refuses what it cannot") {
  TemporaryDirectory dir;
  const ckpt::InputFile file(dir.write("a", "0123456789"));
  CHECK(file.size() == 10);
  std::byte three[3];
  file.read(7, three);
  CHECK(three[0] == std::byte{'7'});
  CHECK(three[2] == std::byte{'9'});
  CHECK(throws_code(ErrorCode::bad_input, [&] { file.read(8, three); }));
  CHECK(throws_code(ErrorCode::bad_input, [&] { file.read(-1, three); }));
  file.read(10, {});

  CHECK(throws_code(ErrorCode::bad_input, [&] { ckpt::InputFile f(dir / "absent"); }));
  CHECK(throws_code(ErrorCode::bad_input, [&] { ckpt::InputFile f(dir.path()); }));
  CHECK(throws_code(ErrorCode::bad_input, [&] { ckpt::InputFile f("/dev/zero"); }));
  REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
  CHECK(throws_code(ErrorCode::bad_input, [&] { ckpt::InputFile f(dir / "pipe"); }));

  std::filesystem::create_symlink(dir / "a", dir / "link");
  CHECK(ckpt::InputFile(dir / "link").size() == 10);
  CHECK(throws_code(ErrorCode::bad_input,
                    [&] { ckpt::InputFile f(dir / "link", ckpt::Links::refuse); }));
}

TEST_CASE("durable_file: a file that shrinks after it was opened gives an error") {
  TemporaryDirectory dir;
  const ckpt::InputFile file(dir.write("a", std::string(100'000, 'x')));
  std::filesystem::resize_file(dir / "a", 50'000);
  std::vector<std::byte> all(100'000);
  const auto said = sentence_of([&] { file.read(0, all); });
  CHECK(contains(said, "truncated"));
  CHECK(contains(said, "50000"));
}

TEST_CASE("durable_file: read_file has a limit") {
  TemporaryDirectory dir;
  const auto path = dir.write("a", "12345");
  CHECK(ckpt::read_file(path, 5) == "12345");
  CHECK(throws_code(ErrorCode::bad_input, [&] { (void)ckpt::read_file(path, 4); }));
  CHECK(ckpt::read_file(dir.write("empty", ""), 0).empty());
}

TEST_CASE("durable_file: permissions follow the umask") {
  TemporaryDirectory dir;
  const auto before = ::umask(027);
  ckpt::DurableFile file(dir / "a");
  file.finish();
  ckpt::make_directory(dir / "d");
  ::umask(before);
  struct stat status {};
  REQUIRE(::stat((dir / "a").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0640);
  REQUIRE(::stat((dir / "d").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0750);
}
