/// @file  Tests of ckpt/directory_lock.hpp.
#include "../../support/temporary_directory.hpp"
#include <mega/ckpt/directory_lock.hpp>

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace ckpt = mega::ckpt;
using mega::ErrorCode;
using mega::tests::contains;
using mega::tests::content_of;
using mega::tests::TemporaryDirectory;
using mega::tests::throws_code;

TEST_CASE("directory_lock: one owner at a time, who is named and leaves nothing behind") {
  TemporaryDirectory dir;
  const std::string root = dir / "a/b";
  {
    const ckpt::DirectoryLock first(root);
    CHECK(first.is_owned());
    CHECK(first.owner().empty());
    const ckpt::DirectoryLock second(root);
    CHECK_FALSE(second.is_owned());
    CHECK(contains(second.owner(), "process " + std::to_string(::getpid()) + " on host "));
    CHECK_FALSE(contains(second.owner(), "\n"));
  }
  CHECK(std::filesystem::is_empty(root));
  CHECK(ckpt::DirectoryLock(root).is_owned());
}

TEST_CASE("directory_lock: who is no owner takes nothing away from the one that is") {
  TemporaryDirectory dir;
  const ckpt::DirectoryLock first(dir.path());
  for (int i = 0; i < 3; ++i) CHECK_FALSE(ckpt::DirectoryLock(dir.path()).is_owned());
  CHECK(std::filesystem::exists(dir / ".lock"));
}

TEST_CASE("directory_lock: an owner that moves stays one") {
  TemporaryDirectory dir;
  std::optional<ckpt::DirectoryLock> kept;
  {
    ckpt::DirectoryLock made(dir.path());
    kept.emplace(std::move(made));
  }
  CHECK(kept->is_owned());
  CHECK_FALSE(ckpt::DirectoryLock(dir.path()).is_owned());
  kept.reset();
  CHECK(ckpt::DirectoryLock(dir.path()).is_owned());
}

TEST_CASE("directory_lock: an owner that was killed is none") {
  TemporaryDirectory dir;
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const ckpt::DirectoryLock lock(dir.path());
    (void)!::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  CHECK(contains(ckpt::DirectoryLock(dir.path()).owner(), "process " + std::to_string(child)));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  CHECK(std::filesystem::exists(dir / ".lock"));  // which means nothing any more
  CHECK(ckpt::DirectoryLock(dir.path()).is_owned());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_CASE("directory_lock: of many that come and go never two are owners") {
  TemporaryDirectory dir;
  std::atomic<int> owners{0}, most{0}, turns{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1500; ++i) {
        const ckpt::DirectoryLock lock(dir.path());
        if (!lock.is_owned()) continue;
        const int now = ++owners;
        if (now > most) most = now;
        ++turns;
        ::usleep(20);  // long enough for another to come between
        if (owners > most) most = owners.load();
        --owners;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(most == 1);
  CHECK(turns > 0);
}

TEST_CASE("directory_lock: what another program wrote is shown without its control characters") {
  TemporaryDirectory dir;
  const ckpt::DirectoryLock owner(dir.path());
  const auto said = [&](const std::string& text) {
    dir.write(".lock", text);
    return ckpt::DirectoryLock(dir.path()).owner();
  };
  CHECK(said("process \x1b[31m7\nmore") == "process ?[31m7");
  CHECK(said("") == "another process");
  CHECK(said(std::string(5000, 'x')) == "another process");
}

TEST_CASE("directory_lock: where no folder can be, there is no lock") {
  TemporaryDirectory dir;
  dir.write("file", "");
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::DirectoryLock lock(dir / "file"); }));
  std::filesystem::create_directory(dir / "linked");
  std::filesystem::create_symlink(dir / "file", dir / "linked/.lock");
  CHECK(throws_code(ErrorCode::not_durable, [&] { ckpt::DirectoryLock lock(dir / "linked"); }));
  CHECK(content_of(dir / "file").empty());
}
