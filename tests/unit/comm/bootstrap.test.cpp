// Bootstrap: identities from launchers' environments, and runs of threads and processes on
// 127.0.0.1 with strangers, absent ranks, and ranks that are killed or stopped.
#include <mega/comm/bootstrap.hpp>
#include <mega/comm/control_channel.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

using mega::Error;
using mega::ErrorCode;
using mega::comm::ControlChannel;
using mega::comm::identify;
using mega::comm::ProcessIdentity;
using mega::comm::Seconds;

using Variables = std::map<std::string, std::string>;

ProcessIdentity identity_of(const Variables& variables) {
  return identify([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}
std::string refusal_of(const Variables& variables) {
  try {
    (void)identity_of(variables);
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::usage);
    return e.what();
  }
  return "accepted";
}
Variables with(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

const Variables torchrun{
    {"RANK", "5"},           {"WORLD_SIZE", "8"},      {"LOCAL_RANK", "1"},
    {"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "blue"}};
const Variables slurm{{"SLURM_PROCID", "3"},          {"SLURM_NTASKS", "4"},
                      {"SLURM_LOCALID", "1"},         {"SLURM_JOB_ID", "1234567"},
                      {"SLURM_STEP_ID", "2"},         {"SLURM_STEP_NODELIST", "gpu[007-009],x"},
                      {"SLURM_JOB_NODELIST", "other"}};
const Variables mpirun{{"OMPI_COMM_WORLD_RANK", "1"},
                       {"OMPI_COMM_WORLD_SIZE", "2"},
                       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                       {"MASTER_PORT", "4000"}};

/// A port that was free a moment ago.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof at;
  REQUIRE(::bind(socket, reinterpret_cast<sockaddr*>(&at), bytes) == 0);
  REQUIRE(::getsockname(socket, reinterpret_cast<sockaddr*>(&at), &bytes) == 0);
  ::close(socket);
  return ntohs(at.sin_port);
}

/// A client that is no rank; connects as soon as somebody listens.
class StrayClient {
 public:
  explicit StrayClient(int port) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<std::uint16_t>(port));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < 500; ++i) {
      socket_ = ::socket(AF_INET, SOCK_STREAM, 0);
      if (::connect(socket_, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0) return;
      ::close(socket_);
      socket_ = -1;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  StrayClient(const StrayClient&) = delete;
  StrayClient& operator=(const StrayClient&) = delete;
  ~StrayClient() { ::close(socket_); }
  [[nodiscard]] bool connected() const { return socket_ >= 0; }
  void say(const std::string& text) const {
    // The other side may hang up before it has taken all.
    CHECK(::send(socket_, text.data(), text.size(), MSG_NOSIGNAL) > 0);
  }
  /// The other side closes without a word.
  [[nodiscard]] bool is_dropped() const {
    char byte;
    return ::recv(socket_, &byte, 1, 0) <= 0;
  }

 private:
  int socket_ = -1;
};

ProcessIdentity member(int rank, int size, int port, std::string job = "test") {
  return {rank, size, rank, "127.0.0.1", port, std::move(job)};
}

struct End {
  std::string text = "done";
  std::optional<ErrorCode> code;
  double seconds = 0;
};
/// Runs f on a channel of its own and says how it ended.
End end_of(const ProcessIdentity& who, double deadline,
           const std::function<void(ControlChannel&)>& f) {
  End out;
  const auto begin = std::chrono::steady_clock::now();
  try {
    ControlChannel channel(who, Seconds(deadline));
    f(channel);
  } catch (const Error& e) {
    out.text = e.what();
    out.code = e.code();
  }
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return out;
}
std::vector<End> run(const std::vector<ProcessIdentity>& ranks, double deadline,
                     const std::function<void(ControlChannel&)>& f) {
  std::vector<End> ends(ranks.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] { ends[i] = end_of(ranks[i], deadline, f); });
  for (std::thread& thread : threads) thread.join();
  return ends;
}
std::vector<ProcessIdentity> members(int size, int port) {
  std::vector<ProcessIdentity> out;
  for (int r = 0; r < size; ++r) out.push_back(member(r, size, port));
  return out;
}
std::vector<int> ranks_of(int size) {
  std::vector<int> out;
  for (int r = 0; r < size; ++r) out.push_back(r);
  return out;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
/// Until the run fails, at most 20 s; throws the echo.
void wait_for_failure(ControlChannel& channel) {
  for (int i = 0; i < 2000; ++i) {
    channel.world().throw_if_failed();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

TEST_CASE("bootstrap: each launcher's variables give rank, size, local rank, address and port") {
  const ProcessIdentity torch = identity_of(torchrun);
  CHECK(torch.rank == 5);
  CHECK(torch.size == 8);
  CHECK(torch.local_rank == 1);
  CHECK(torch.address == "head");
  CHECK(torch.port == 29500);
  CHECK(torch.job == "blue");

  const ProcessIdentity task = identity_of(slurm);
  CHECK(task.rank == 3);
  CHECK(task.size == 4);
  CHECK(task.local_rank == 1);
  CHECK(task.address == "gpu007");
  CHECK(task.port == 24567);
  CHECK(task.job == "1234567.2");
  const ProcessIdentity told =
      identity_of(with(slurm, {{"MASTER_ADDR", "::1"}, {"MASTER_PORT", "77"}}));
  CHECK(told.address == "::1");
  CHECK(told.port == 77);

  const ProcessIdentity open_mpi = identity_of(mpirun);
  CHECK(open_mpi.rank == 1);
  CHECK(open_mpi.size == 2);
  CHECK(open_mpi.address == "127.0.0.1");
  CHECK(open_mpi.port == 4000);

  // The inner launcher counts: torchrun under mpirun or srun, and mpirun in a job of SLURM.
  CHECK(identity_of(with(torchrun, slurm)).rank == 5);
  CHECK(identity_of(with(torchrun, mpirun)).rank == 5);
  CHECK(identity_of(with(mpirun, slurm)).size == 2);
}

TEST_CASE("bootstrap: the first host of a SLURM node list") {
  using mega::comm::detail::first_host;
  CHECK(first_host("n1") == "n1");
  CHECK(first_host("n1,n2") == "n1");
  CHECK(first_host("n[3,5-7]") == "n3");
  CHECK(first_host("rack[0-1]n[00-03].site,z[1-2]") == "rack0n00.site");
  for (const char* wrong : {"", ",a", "n[1-2", "n 1", "[]", "a;b"})
    CHECK_THROWS_WITH_AS((void)first_host(wrong), doctest::Contains("MASTER_ADDR"), Error);
}

TEST_CASE("bootstrap: missing, contradictory and garbage variables are named") {
  CHECK(has(refusal_of({}), "none of RANK, OMPI_COMM_WORLD_RANK and SLURM_PROCID is set"));
  CHECK(has(refusal_of({{"RANK", "0"}}), "WORLD_SIZE is not set"));
  CHECK(has(refusal_of({{"WORLD_SIZE", "2"}}), "RANK is not set"));
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    CAPTURE(name);
    // An empty variable counts as missing.
    CHECK(has(refusal_of(with(torchrun, {{name, ""}})), std::string(name) + " is not set"));
  }
  CHECK(refusal_of(with(torchrun, {{"RANK", "8"}})) ==
        "RANK is '8'; valid is a whole number from 0 to 7");
  for (const char* value : {"-1", "1x", " 1", "0x1", "1.0", "99999999999999999999", "+1"}) {
    CAPTURE(value);
    CHECK(has(refusal_of(with(torchrun, {{"RANK", value}})),
              "RANK is '" + std::string(value) + "'; valid is a whole number from 0 to 7"));
  }
  CHECK(has(refusal_of(with(torchrun, {{"WORLD_SIZE", "0"}})), "WORLD_SIZE is '0'"));
  CHECK(has(refusal_of(with(torchrun, {{"LOCAL_RANK", "8"}})), "LOCAL_RANK is '8'"));
  CHECK(has(refusal_of(with(torchrun, {{"MASTER_PORT", "65536"}})), "from 1 to 65535"));
  CHECK(has(
      refusal_of(with(torchrun, {{"OMPI_COMM_WORLD_RANK", "4"}, {"OMPI_COMM_WORLD_SIZE", "8"}})),
      "RANK is 5, but OMPI_COMM_WORLD_RANK is 4"));
  CHECK(has(refusal_of(with(mpirun, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}})),
            "MASTER_ADDR is not set"));
  CHECK(has(refusal_of(with(mpirun, {{"MASTER_PORT", ""}})), "MASTER_PORT is not set"));
  CHECK(has(refusal_of(with(slurm, {{"SLURM_NTASKS", ""}})), "SLURM_NTASKS is not set"));
  CHECK(has(refusal_of(with(slurm, {{"SLURM_PROCID", "4"}})), "SLURM_PROCID is '4'"));
  CHECK(has(refusal_of(with(slurm, {{"SLURM_JOB_ID", "x"}})), "SLURM_JOB_ID is 'x'"));
  CHECK(has(refusal_of(with(slurm, {{"SLURM_STEP_NODELIST", "n[1"}})), "[ without a ]"));
}

TEST_CASE("bootstrap: 1, 2 and 5 ranks exchange records of all sizes, whole and in part") {
  for (const int size : {1, 2, 5}) {
    CAPTURE(size);
    std::atomic<int> right{0};
    const auto ends = run(members(size, free_port()), 10, [&](ControlChannel& channel) {
      const int me = channel.rank();
      const auto record = [](int rank) {
        // Empty, short with zeros inside, and larger than a socket's buffer.
        return std::string(rank == 1 ? 0 : rank == 2 ? 3000000 : 7, static_cast<char>(rank));
      };
      const auto all = ranks_of(size);
      for (int round = 0; round < 3; ++round) {
        const auto records = channel.exchange("round", all, record(me));
        if (static_cast<int>(records.size()) != size) return;
        for (int r = 0; r < size; ++r)
          if (records[static_cast<std::size_t>(r)] != record(r)) return;
      }
      // In the order of the members, who need not include rank 0.
      const std::vector<int> two{size - 1, size / 2};
      if (size > 2 && (me == two[0] || me == two[1])) {
        const auto records = channel.exchange("two", two, std::to_string(me));
        if (records != std::vector<std::string>{std::to_string(two[0]), std::to_string(two[1])})
          return;
      }
      ++right;
      channel.leave();
    });
    for (const End& end : ends) CHECK(end.text == "done");
    CHECK(right == size);
  }
}

TEST_CASE("bootstrap: contributions wait for no one, and notes keep their order") {
  const auto ends = run(members(3, free_port()), 10, [&](ControlChannel& channel) {
    const std::vector<int> pair{1, 2};
    if (channel.rank() == 1) {
      channel.contribute("pair", pair, "from 1");
      CHECK_FALSE(channel.collect("pair").has_value());
      for (int i = 0; i < 20; ++i) channel.tell(2, "sizes", std::to_string(i));
    }
    (void)channel.exchange("meet", ranks_of(3), "");
    if (channel.rank() == 2) {
      for (int i = 0; i < 20; ++i) CHECK(channel.told("sizes") == std::to_string(i));
      CHECK_FALSE(channel.told("sizes").has_value());
      channel.contribute("pair", pair, "from 2");
    }
    (void)channel.exchange("meet again", ranks_of(3), "");
    if (channel.rank() > 0) {
      CHECK(channel.collect("pair") == std::vector<std::string>{"from 1", "from 2"});
      CHECK_FALSE(channel.collect("pair").has_value());
    }
    channel.leave();
  });
  for (const End& end : ends) CHECK(end.text == "done");
}

TEST_CASE("bootstrap: statuses come with the live signs") {
  const auto ends = run(members(3, free_port()), 1.6, [&](ControlChannel& channel) {
    channel.set_status([&] { return "status of " + std::to_string(channel.rank()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    const std::vector<int> asked{2, 0};
    CHECK(channel.statuses(asked) == std::vector<std::string>{"status of 2", "status of 0"});
    channel.leave();
  });
  for (const End& end : ends) CHECK(end.text == "done");
}

TEST_CASE("bootstrap: ranks that never come are named on all that came") {
  const int port = free_port();
  const auto ends =
      run({member(0, 5, port), member(1, 5, port), member(3, 5, port)}, 1, [](ControlChannel&) {});
  const std::string who = "ranks 2,4 of 5 did not come to 127.0.0.1:" + std::to_string(port);
  for (const End& end : ends) {
    CHECK(has(end.text, who + " within 1 s"));
    CHECK(end.seconds < 3);
  }
  CHECK(ends[0].code == ErrorCode::timeout);
  CHECK(ends[1].code == ErrorCode::peer_failed);
  CHECK(has(ends[1].text, "rank 0 failed: "));
}

TEST_CASE("bootstrap: without rank 0 the others say so") {
  const int port = free_port();
  const auto ends = run({member(1, 2, port)}, 0.5, [](ControlChannel&) {});
  CHECK(ends[0].code == ErrorCode::timeout);
  CHECK(has(ends[0].text, "rank 1 of 2 did not reach rank 0 at 127.0.0.1:"));
  CHECK(has(ends[0].text, "Connection refused"));
}

TEST_CASE(
    "bootstrap: strangers with garbage, with half a greeting and silent ones change nothing") {
  const int port = free_port();
  std::vector<End> ends(3);
  std::thread zero(
      [&] { ends[0] = end_of(member(0, 3, port), 10, [](ControlChannel& c) { c.leave(); }); });
  StrayClient web(port), silent(port), half(port), flood(port);
  REQUIRE(web.connected());
  REQUIRE(flood.connected());
  web.say("GET / HTTP/1.1\r\nHost: head\r\n\r\n" + std::string(300, 'x'));
  CHECK(web.is_dropped());
  half.say(std::string("mega r1\n") + std::string(20, '\0'));
  flood.say(std::string(1000000, '\xff'));
  CHECK(flood.is_dropped());
  std::vector<std::thread> others;
  for (int r = 1; r < 3; ++r)
    others.emplace_back([&, r] {
      ends[static_cast<std::size_t>(r)] =
          end_of(member(r, 3, port), 10, [](ControlChannel& c) { c.leave(); });
    });
  zero.join();
  for (std::thread& other : others) other.join();
  for (const End& end : ends) CHECK(end.text == "done");
}

TEST_CASE("bootstrap: a rank does not take what listens there for rank 0") {
  const int port = free_port();
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<std::uint16_t>(port));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
  REQUIRE(::listen(listener, 16) == 0);
  std::atomic<bool> stop{false};
  std::thread impostor([&] {
    for (int turn = 0; !stop; ++turn) {
      const int client = ::accept(listener, nullptr, nullptr);
      if (client < 0) return;
      char bytes[4096];
      std::string all;
      while (all.size() < sizeof(mega::comm::detail::Greeting)) {
        const auto n = ::recv(client, bytes, sizeof bytes, 0);
        if (n <= 0) break;
        all.append(bytes, static_cast<std::size_t>(n));
      }
      // Gives the greeting back, long enough to be taken for a reply; or says yes to a greeting
      // that it has not read.
      all += all + all + all;
      if (turn % 2 == 1) {
        mega::comm::detail::GreetingReply yes;
        std::memcpy(yes.magic, mega::comm::detail::GreetingReply::words, sizeof yes.magic);
        yes.accepted = 1;
        all.assign(reinterpret_cast<const char*>(&yes), sizeof yes);
      }
      (void)::send(client, all.data(), all.size(), MSG_NOSIGNAL);
      ::close(client);
    }
  });
  const End end = end_of(member(1, 2, port), 0.6, [](ControlChannel&) {});
  stop = true;
  ::shutdown(listener, SHUT_RDWR);
  impostor.join();
  ::close(listener);
  CHECK(end.code == ErrorCode::timeout);
  CHECK(has(end.text, "is not rank 0 of a run"));
}

TEST_CASE("bootstrap: two jobs on one port do not mix") {
  const int port = free_port();
  std::vector<End> blue(2), red(2);
  std::thread blue0([&] {
    blue[0] = end_of(member(0, 2, port, "blue"), 10, [](ControlChannel& c) { c.leave(); });
  });
  {
    StrayClient arrived(port);
    REQUIRE(arrived.connected());
  }
  // Both ranks of the other job come while the first still waits.
  std::thread red1([&] { red[1] = end_of(member(1, 2, port, "red"), 10, [](ControlChannel&) {}); });
  std::thread red0([&] { red[0] = end_of(member(0, 2, port, "red"), 10, [](ControlChannel&) {}); });
  red0.join();
  red1.join();
  blue[1] = end_of(member(1, 2, port, "blue"), 10, [](ControlChannel& c) { c.leave(); });
  blue0.join();
  CHECK(blue[0].text == "done");
  CHECK(blue[1].text == "done");
  CHECK(has(red[0].text, "port " + std::to_string(port) + " of this host is in use"));
  CHECK(red[0].code == ErrorCode::usage);
  CHECK(has(red[1].text, "it belongs to run 'red', this is run 'blue'"));
  CHECK(red[1].code == ErrorCode::usage);
  CHECK(red[1].seconds < 5);
}

TEST_CASE(
    "bootstrap: a wrong world size and a rank that comes twice are turned away and told why") {
  const int port = free_port();
  std::vector<End> ends(4);
  std::thread zero([&] { ends[0] = end_of(member(0, 3, port), 2, [](ControlChannel&) {}); });
  {
    StrayClient arrived(port);
    REQUIRE(arrived.connected());
  }
  ends[2] = end_of(member(2, 4, port), 2, [](ControlChannel&) {});
  std::thread one([&] { ends[1] = end_of(member(1, 3, port), 2, [](ControlChannel&) {}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  ends[3] = end_of(member(1, 3, port), 2, [](ControlChannel&) {});
  zero.join();
  one.join();
  CHECK(has(ends[2].text, "turned rank 2 away: it counts 4 processes, rank 0 counts 3"));
  CHECK(has(ends[3].text, "rank 1 has come already, from 127.0.0.1:"));
  CHECK(has(ends[0].text, "rank 2 of 3 did not come"));
  CHECK(has(ends[0].text, "last turned away was a client from 127.0.0.1:"));
  CHECK(has(ends[1].text, "rank 0 failed: rank 2 of 3 did not come"));
}

TEST_CASE("bootstrap: a rank that fails or leaves is told to all, with where they were") {
  for (const bool throws : {true, false}) {
    CAPTURE(throws);
    for (const int culprit : {0, 2}) {
      CAPTURE(culprit);
      const auto ends = run(members(3, free_port()), 10, [&](ControlChannel& channel) {
        channel.set_position(
            [&] { return "rank " + std::to_string(channel.rank()) + " was in barrier #3"; });
        (void)channel.exchange("meet", ranks_of(3), "");
        if (channel.rank() != culprit) return wait_for_failure(channel);
        if (throws) channel.fail_and_throw(Error(ErrorCode::bad_input, "the disk is gone"));
      });
      for (int r = 0; r < 3; ++r) {
        const End& end = ends[static_cast<std::size_t>(r)];
        CHECK(end.seconds < 5);
        if (r == culprit) continue;
        CHECK(end.code == ErrorCode::peer_failed);
        CHECK(end.text == "rank " + std::to_string(culprit) + " failed: " +
                              (throws ? "the disk is gone" : "it left the run before its end") +
                              "; rank " + std::to_string(r) + " was in barrier #3");
      }
    }
  }
}

TEST_CASE("bootstrap: who does not come to an exchange is named") {
  const auto ends = run(members(3, free_port()), 1, [&](ControlChannel& channel) {
    if (channel.rank() == 1) return wait_for_failure(channel);
    (void)channel.exchange("split #2 on communicator world", ranks_of(3), "");
  });
  for (const End& end : ends)
    CHECK(has(end.text, "split #2 on communicator world: rank 1 did not come within 1 s"));
}

TEST_CASE("bootstrap: a process that is killed or stopped is noticed by all in time") {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    CAPTURE(signal);
    for (const int culprit : {0, 2}) {
      CAPTURE(culprit);
      const int port = free_port();
      const pid_t child = ::fork();
      if (child == 0) {
        try {
          ControlChannel channel(member(culprit, 3, port), Seconds(2));
          (void)channel.exchange("meet", ranks_of(3), "");
          std::raise(signal);
          wait_for_failure(channel);
        } catch (...) {
        }
        ::_exit(0);
      }
      std::vector<ProcessIdentity> rest;
      for (int r = 0; r < 3; ++r)
        if (r != culprit) rest.push_back(member(r, 3, port));
      const auto ends = run(rest, 2, [&](ControlChannel& channel) {
        (void)channel.exchange("meet", ranks_of(3), "");
        wait_for_failure(channel);
      });
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      for (const End& end : ends) {
        CHECK(has(end.text, "rank " + std::to_string(culprit) + " failed: it"));
        CHECK(has(end.text, signal == SIGKILL ? "its process ended" : "no live sign for 1 s"));
        CHECK(end.seconds < (signal == SIGKILL ? 1.0 : 2.0));
      }
    }
  }
}
