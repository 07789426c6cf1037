/// @file  Ranks that are processes of the running test program, for tests with one GPU a process.
/// The program itself must not touch CUDA before it starts them.
#pragma once
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace process_ranks {

/// Name of the case that a rank runs; skipped by the program that starts the ranks.
inline constexpr const char* rank_case = "nccl process: a rank";

/// Seconds that a rank may need, with the start of CUDA and NCCL.
inline constexpr double start_up = 90;

/// In a rank: what it shall do.
inline std::string own_work() {
  const char* work = std::getenv("MEGA_TEST_WORK");
  REQUIRE(work != nullptr);
  return work;
}

inline int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  REQUIRE(::bind(socket, reinterpret_cast<sockaddr*>(&at), size) == 0);
  REQUIRE(::getsockname(socket, reinterpret_cast<sockaddr*>(&at), &size) == 0);
  ::close(socket);
  return ntohs(at.sin_port);
}

/// A process of this program that is rank `rank` and does `work`.
class Rank {
 public:
  Rank(const std::string& work, int rank, int size, int port) : output_(std::tmpfile()) {
    REQUIRE(output_ != nullptr);
    std::fflush(nullptr);
    process_ = ::fork();
    if (process_ != 0) return;
    const auto set = [](const char* name, const std::string& value) {
      ::setenv(name, value.c_str(), 1);
    };
    set("MEGA_TEST_WORK", work);
    set("RANK", std::to_string(rank));
    set("LOCAL_RANK", std::to_string(rank));
    set("WORLD_SIZE", std::to_string(size));
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(port));
    set("TORCHELASTIC_RUN_ID", "mega test " + std::to_string(::getppid()));
    set("CUDA_MODULE_LOADING", "EAGER");
    ::unsetenv("OMPI_COMM_WORLD_RANK");
    ::dup2(::fileno(output_), 1);
    ::dup2(::fileno(output_), 2);
    ::execl("/proc/self/exe", "rank", (std::string("--test-case=") + rank_case).c_str(),
            "--no-skip", static_cast<char*>(nullptr));
    ::_exit(127);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() {
    if (!ended_) {
      ::kill(process_, SIGKILL);
      ::waitpid(process_, &status_, 0);
    }
    std::fclose(output_);
  }

  void signal(int number) const { ::kill(process_, number); }
  /// False: still running after so many seconds.
  [[nodiscard]] bool ends_within(double seconds) {
    const auto begin = std::chrono::steady_clock::now();
    while (!ended_) {
      ended_ = ::waitpid(process_, &status_, WNOHANG) == process_;
      if (std::chrono::steady_clock::now() - begin > std::chrono::duration<double>(seconds)) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return ended_;
  }
  /// -1: ended by a signal.
  [[nodiscard]] int exit_code() const { return WIFEXITED(status_) ? WEXITSTATUS(status_) : -1; }
  [[nodiscard]] std::string text() const {
    // By position, since the rank writes through the same open file.
    std::string out(1 << 16, '\0');
    const auto n = ::pread(::fileno(output_), out.data(), out.size(), 0);
    out.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return out;
  }
  [[nodiscard]] bool says(const std::string& part) const {
    return text().find(part) != std::string::npos;
  }
  [[nodiscard]] bool says_within(const std::string& part, double seconds) const {
    for (double waited = 0; waited < seconds; waited += 0.02) {
      if (says(part)) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }

 private:
  std::FILE* output_;
  pid_t process_ = -1;
  bool ended_ = false;
  int status_ = 0;
};

/// Starts `size` ranks and expects that all end with every check passed. Returns what they wrote.
inline std::vector<std::string> expect_success(const std::string& work, int size) {
  const int port = free_port();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<Rank>(work, r, size, port));
  std::vector<std::string> texts;
  for (auto& rank : ranks) {
    CHECK(rank->ends_within(start_up));
    CHECK(rank->exit_code() == 0);
    texts.push_back(rank->text());
    CHECK_MESSAGE(rank->says("SUCCESS"), texts.back());
  }
  return texts;
}

}  // namespace process_ranks
