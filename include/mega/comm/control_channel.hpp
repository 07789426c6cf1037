/// @file  ControlChannel: the TCP connections of a run's processes to rank 0, over which they
/// exchange records, live signs and failures. Plain C++ on POSIX sockets, no device.
#pragma once
#include <mega/comm/bootstrap.hpp>
#include <mega/comm/call.hpp>
#include <mega/comm/detail/control_messages.hpp>
#include <mega/comm/detail/tcp_socket.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace mega::inline v0::comm {

/// The processes of a run, connected through rank 0. Records are exchanged through it at start and
/// when communicators are made; it carries no data of a step. A thread of its own gives a live sign
/// every second, or eight times in a shorter deadline, so that a process that was killed is noticed
/// at once, and one that was stopped after half the deadline. The first failure that any rank has
/// ends every wait on all of them.
/// @cost  a connection a rank at rank 0, and one thread a process
class ControlChannel {
 public:
  /// Collective: returns when all processes of the run have come.
  /// @throws  Error(timeout) naming the ranks that did not come within the deadline, Error(usage)
  ///          where the port is taken or rank 0 belongs to another run
  explicit ControlChannel(ProcessIdentity who, Seconds deadline = default_deadline)
      : who_(std::move(who)),
        world_(deadline),
        interval_(std::min(Seconds(1), deadline / 8)),
        lines_(static_cast<std::size_t>(who_.size)),
        heard_(static_cast<std::size_t>(who_.size), detail::Clock::now()),
        statuses_(static_cast<std::size_t>(who_.size)) {
    expects(who_.size >= 1 && who_.rank >= 0 && who_.rank < who_.size, ErrorCode::usage, [&] {
      return sentence("rank ", who_.rank, " of ", who_.size, " processes; valid are 0 to size - 1");
    });
    int ends[2];
    expects(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, ErrorCode::device,
            [] { return sentence("pipe2 failed: ", std::strerror(errno)); });
    wake_out_ = detail::Descriptor(ends[0]);
    wake_in_ = detail::Descriptor(ends[1]);
    if (who_.size == 1) {
      thread_ = std::thread([this] { run(); });
      return;
    }
    if (who_.rank == 0)
      listener_ = detail::listen_at(who_);
    else
      join();
    heard_[0] = detail::Clock::now();
    thread_ = std::thread([this] { run(); });
    try {
      if (who_.rank == 0) await_all();
      // A rank that came late has waited less than those that came first, whom rank 0 tells.
      (void)exchange(meeting, all(), "", world_.deadline() + Seconds(2));
    } catch (...) {
      stop();
      throw;
    }
  }
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;
  /// An end without leave() is a failure to the others.
  ~ControlChannel() {
    if (!ended_ && who_.size > 1)
      world_.fail(Failure{who_.rank, false, "it left the run before its end"});
    stop();
  }

  [[nodiscard]] int rank() const noexcept { return who_.rank; }
  [[nodiscard]] int size() const noexcept { return who_.size; }
  [[nodiscard]] const ProcessIdentity& identity() const noexcept { return who_; }
  /// The deadline and the first failure. A failure that is recorded there is told to all.
  [[nodiscard]] World& world() noexcept { return world_; }

  /// Every member (global rank) gives a record and gets those of all, in the order of `members`.
  /// Collective over the members; `key` names the exchange, as messages say it, and is unlike all
  /// others under way.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& key,
                                                  std::span<const int> members,
                                                  const std::string& record) {
    return exchange(key, members, record, world_.deadline());
  }
  /// The same without waiting: contribute() gives, collect() looks whether all have given.
  void contribute(const std::string& key, std::span<const int> members, const std::string& record) {
    detail::Packer payload;
    payload.put(key).put(members).put(record);
    post(0, detail::FrameKind::contribution, payload.take());
  }
  [[nodiscard]] std::optional<std::vector<std::string>> collect(const std::string& key) {
    std::lock_guard lock(mutex_);
    const auto found = results_.find(key);
    if (found == results_.end()) return std::nullopt;
    auto out = std::move(found->second);
    results_.erase(found);
    return out;
  }

  /// A text for another rank, which finds it under its key, in the order of sending.
  void tell(int rank, const std::string& key, const std::string& text) {
    detail::Packer payload;
    payload.put(static_cast<std::int32_t>(rank)).put(key).put(text);
    post(0, detail::FrameKind::note, payload.take());
  }
  [[nodiscard]] std::optional<std::string> told(const std::string& key) {
    std::lock_guard lock(mutex_);
    const auto found = notes_.find(key);
    if (found == notes_.end()) return std::nullopt;
    std::string out = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) notes_.erase(found);
    return out;
  }

  /// What this rank tells of itself with every live sign. This and the next two are called by the
  /// channel's own thread, so they must not wait; none is called any more once another is set.
  void set_status(std::function<std::string()> status) {
    std::lock_guard lock(calling_);
    status_ = std::move(status);
  }
  /// Where this rank is, to be added to another's failure: "rank 0 was in barrier #3", or nothing.
  void set_position(std::function<std::string()> position) {
    std::lock_guard lock(calling_);
    position_ = std::move(position);
  }
  /// What this process does, on the channel's own thread, when it still lives so long after a
  /// failure.
  void set_last_resort(Seconds after, std::function<void()> act) {
    std::lock_guard lock(calling_);
    patience_ = after;
    last_resort_ = std::move(act);
  }
  /// Time between two live signs.
  [[nodiscard]] Seconds interval() const noexcept { return interval_; }
  /// Last statuses of these ranks, as old as a live sign; none where rank 0 does not answer.
  [[nodiscard]] std::vector<std::string> statuses(std::span<const int> ranks) {
    return ask("", ranks);
  }

  /// Returns true once this rank's failure is on its way to the others.
  bool announced_within(Seconds limit) {
    wake();
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return announced_ && drained_; });
  }
  /// Records this rank's own failure, or one that no rank has alone, and tells all others.
  void fail(std::exception_ptr cause) noexcept {
    world_.fail(who_.rank, std::move(cause));
    wake();
  }
  [[noreturn]] void fail_and_throw(const Error& error) {
    fail(std::make_exception_ptr(error));
    world_.rethrow_cause();
    throw error;
  }
  [[noreturn]] void disagree_and_throw(std::string text) {
    world_.fail(Failure{who_.rank, true, std::move(text)});
    wake();
    world_.throw_echo();
  }

  /// Collective: the orderly end of the run.
  void leave() {
    if (ended_) return;
    if (who_.size > 1) (void)exchange(farewell, all(), "");
    std::unique_lock lock(mutex_);
    ended_ = true;
    // Rank 0 goes last, since closing might take back what the others have not read.
    if (who_.rank == 0)
      changed_.wait_for(lock, world_.deadline() / 2, [&] { return connected_ == 0; });
  }

 private:
  static constexpr const char* meeting = "the start of the run";
  static constexpr const char* farewell = "the end of the run";
  static constexpr std::size_t most_strangers = 256;

  struct Outgoing {
    int to;
    detail::FrameKind kind;
    std::string payload;
  };
  /// A connection whose greeting is not complete.
  struct Stranger {
    detail::Line line;
    std::string name;
    detail::Clock::time_point until;
  };
  struct Gathering {
    std::vector<int> members;
    std::vector<std::deque<std::string>> records;  // of each member
  };

  [[nodiscard]] std::vector<int> all() const {
    std::vector<int> out(static_cast<std::size_t>(who_.size));
    std::iota(out.begin(), out.end(), 0);
    return out;
  }
  [[nodiscard]] detail::Line& line_to(int rank) {
    return lines_[static_cast<std::size_t>(who_.rank == 0 ? rank : 0)];
  }
  [[nodiscard]] std::string place() const { return sentence(who_.address, ":", who_.port); }

  void wake() noexcept {
    const char byte = 0;
    (void)!::write(wake_in_.native(), &byte, 1);
  }
  void stop() noexcept {
    // A closed connection takes back what the other side has not read.
    if (world_.failed() && announced_within(Seconds(0.2)))
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake();
    if (thread_.joinable()) thread_.join();
    for (detail::Line& line : lines_) line.close();
  }
  void post(int to, detail::FrameKind kind, std::string payload) {
    {
      std::lock_guard lock(mutex_);
      outbox_.push_back({to, kind, std::move(payload)});
    }
    wake();
  }

  /// Waits until ready(); false past the limit. @throws the echo of a failure
  template <class Ready>
  bool await(std::unique_lock<std::mutex>& lock, Seconds limit, const Ready& ready) {
    const auto end = detail::Clock::now() + detail::clock_duration(limit);
    while (!ready()) {
      if (world_.failed()) {
        lock.unlock();
        world_.throw_echo();
      }
      if (detail::Clock::now() >= end) return false;
      changed_.wait_until(lock,
                          std::min(end, detail::Clock::now() + std::chrono::milliseconds(10)));
    }
    return true;
  }

  std::vector<std::string> exchange(const std::string& key, std::span<const int> members,
                                    const std::string& record, Seconds limit) {
    contribute(key, members, record);
    {
      std::unique_lock lock(mutex_);
      if (await(lock, limit, [&] { return results_.contains(key); })) {
        auto out = std::move(results_[key]);
        results_.erase(key);
        return out;
      }
    }
    std::vector<int> absent;
    for (const std::string& rank : ask(key, members)) absent.push_back(std::stoi(rank));
    fail_and_throw(
        Error(ErrorCode::timeout, sentence(key, ": ",
                                           absent.empty() ? std::string("rank 0 did not answer")
                                                          : rank_list(absent) + " did not come",
                                           " within ", to_string(world_.deadline()))));
  }

  /// A question to rank 0: the statuses of ranks, or with a key, which of them did not contribute.
  std::vector<std::string> ask(const std::string& key, std::span<const int> ranks) {
    std::uint64_t number = 0;
    {
      std::lock_guard lock(mutex_);
      number = ++questions_;
    }
    detail::Packer payload;
    payload.put(number).put(key).put(ranks);
    post(0, detail::FrameKind::question, payload.take());
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::milliseconds(300),
                           [&] { return answers_.contains(number); }))
      return {};
    auto out = std::move(answers_[number]);
    answers_.erase(number);
    return out;
  }

  // The meeting.

  /// Rank 0's part: its thread lets the others in.
  void await_all() {
    std::unique_lock lock(mutex_);
    if (await(lock, world_.deadline(), [&] { return connected_ == who_.size - 1; })) return;
    std::vector<int> absent;
    for (int r = 1; r < who_.size; ++r)
      if (!present_.contains(r)) absent.push_back(r);
    const std::string text =
        sentence(rank_list(absent), " of ", who_.size, " did not come to ", place(), " within ",
                 to_string(world_.deadline()),
                 turned_away_.empty() ? "" : "; last turned away was " + turned_away_);
    lock.unlock();
    fail_and_throw(Error(ErrorCode::timeout, text));
  }

  /// The part of all others.
  void join() {
    const auto end = detail::Clock::now() + detail::clock_duration(world_.deadline());
    std::string why = "nobody answered";
    std::random_device random;
    while (true) {
      if (detail::Descriptor socket = detail::connect_to(who_, end, why)) {
        detail::Line line(std::move(socket));
        detail::Greeting hello;
        std::memcpy(hello.magic, detail::Greeting::words, sizeof hello.magic);
        hello.nonce = std::uint64_t{random()} << 32 | random();
        hello.rank = who_.rank;
        hello.size = who_.size;
        detail::copy_text(hello.job, who_.job);
        line.put(&hello, sizeof hello);
        detail::GreetingReply reply;
        if (greet(line, reply, end) && reply.nonce == hello.nonce &&
            std::memcmp(reply.magic, detail::GreetingReply::words, sizeof reply.magic) == 0) {
          expects(reply.accepted != 0, ErrorCode::usage, [&] {
            return sentence("rank 0 at ", place(), " turned rank ", who_.rank,
                            " away: ", detail::text_of(reply.reason));
          });
          lines_[0] = std::move(line);
          connected_ = 1;
          return;
        }
        why = "what listens there is not rank 0 of a run";
      }
      if (detail::Clock::now() >= end)
        throw Error(ErrorCode::timeout,
                    sentence("rank ", who_.rank, " of ", who_.size, " did not reach rank 0 at ",
                             place(), " within ", to_string(world_.deadline()), ": ", why));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
  static bool greet(detail::Line& line, detail::GreetingReply& reply,
                    detail::Clock::time_point end) {
    while (line.flush() && detail::Clock::now() < end) {
      pollfd at{line.native(), static_cast<short>(line.has_output() ? POLLIN | POLLOUT : POLLIN),
                0};
      if (::poll(&at, 1, detail::poll_timeout(end)) < 0 && errno != EINTR) return false;
      if ((at.revents & POLLIN) != 0) {
        const bool alive = line.fill();
        if (line.take(reply)) return true;
        if (!alive) return false;
      } else if ((at.revents & (POLLERR | POLLHUP)) != 0) {
        return false;
      }
    }
    return false;
  }

  void accept_strangers() {
    while (strangers_.size() < most_strangers) {
      sockaddr_storage address{};
      socklen_t bytes = sizeof address;
      detail::Descriptor socket(::accept4(listener_.native(), reinterpret_cast<sockaddr*>(&address),
                                          &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) return;
      strangers_.push_back({detail::Line(std::move(socket)), detail::peer_name(address, bytes),
                            detail::Clock::now() + detail::clock_duration(world_.deadline() / 2)});
    }
  }

  /// Reads a stranger's greeting; true when it needs no more attention.
  bool welcome(Stranger& stranger) {
    const bool alive = stranger.line.fill();
    detail::Greeting hello;
    if (!stranger.line.take(hello)) {
      const bool late = detail::Clock::now() >= stranger.until;
      if (!alive || late) turn_away(stranger, "it gave no greeting of a rank");
      return !alive || late;
    }
    if (std::memcmp(hello.magic, detail::Greeting::words, sizeof hello.magic) != 0) {
      turn_away(stranger, "its greeting is not a rank's");
      return true;
    }
    std::string reason;
    const std::string job = detail::text_of(hello.job);
    detail::Greeting own;
    detail::copy_text(own.job, who_.job);
    if (job != detail::text_of(own.job))
      reason =
          sentence("it belongs to run '", job, "', this is run '", detail::text_of(own.job), "'");
    else if (hello.size != who_.size)
      reason = sentence("it counts ", hello.size, " processes, rank 0 counts ", who_.size);
    else if (hello.rank < 1 || hello.rank >= who_.size)
      reason = sentence("it is rank ", hello.rank, "; valid are 1 to ", who_.size - 1);
    else if (present_.contains(hello.rank))
      reason = sentence("rank ", hello.rank, " has come already, from ", present_[hello.rank]);
    detail::GreetingReply reply;
    std::memcpy(reply.magic, detail::GreetingReply::words, sizeof reply.magic);
    reply.nonce = hello.nonce;
    reply.accepted = reason.empty() ? 1 : 0;
    detail::copy_text(reply.reason, reason);
    stranger.line.put(&reply, sizeof reply);
    (void)stranger.line.flush();
    if (!reason.empty()) {
      turn_away(stranger, reason);
      return true;
    }
    heard_[static_cast<std::size_t>(hello.rank)] = detail::Clock::now();
    lines_[static_cast<std::size_t>(hello.rank)] = std::move(stranger.line);
    std::lock_guard lock(mutex_);
    present_[hello.rank] = stranger.name;
    ++connected_;
    changed_.notify_all();
    return true;
  }
  void turn_away(const Stranger& stranger, const std::string& why) {
    std::lock_guard lock(mutex_);
    turned_away_ = sentence("a client from ", stranger.name, ": ", why);
  }

  // The thread: everything below runs there, but for what mutex_ guards.

  void run() {
    try {
      serve();
    } catch (...) {
      world_.fail(who_.rank, std::current_exception());
      announce();
      for (detail::Line& line : lines_)
        if (line.is_open()) (void)line.flush();
    }
  }
  void serve() {
    auto next_sign = detail::Clock::now();
    while (true) {
      if (dispatch_outbox()) return;
      announce();
      if (const auto now = detail::Clock::now(); now >= next_sign) {
        give_sign();
        next_sign = now + detail::clock_duration(interval_);
      }
      move_bytes(next_sign);
      expect_signs();
      act_at_last();
    }
  }

  /// Hands out what this process wants to send; true when the thread shall end.
  bool dispatch_outbox() {
    std::deque<Outgoing> outbox;
    {
      std::lock_guard lock(mutex_);
      if (stop_) return true;
      outbox.swap(outbox_);
    }
    for (const Outgoing& out : outbox) send(out.to, out.kind, out.payload);
    return false;
  }

  /// To rank `to`, over rank 0 where this is not the sender.
  void send(int to, detail::FrameKind kind, const std::string& payload) {
    if (to == who_.rank) return handle(who_.rank, kind, payload);
    if (detail::Line& line = line_to(to); line.is_open()) line.put(kind, payload);
  }
  void send_to_all(detail::FrameKind kind, const std::string& payload, int except = -1) {
    for (int r = 0; r < who_.size; ++r)
      if (r != who_.rank && r != except && lines_[static_cast<std::size_t>(r)].is_open())
        lines_[static_cast<std::size_t>(r)].put(kind, payload);
  }

  void announce() {
    if (!world_.failed()) return;
    bool first = false;
    {
      std::lock_guard lock(mutex_);
      first = !std::exchange(announced_, true);
    }
    if (first) tell_failure(world_.failure(), who_.rank);
  }
  void tell_failure(const Failure& failure, int except) {
    detail::Packer payload;
    payload.put(static_cast<std::int32_t>(failure.rank))
        .put(static_cast<std::int32_t>(failure.shared ? 1 : 0))
        .put(failure.what);
    send_to_all(detail::FrameKind::failure, payload.take(), except);
  }
  /// Another rank's failure: others hear it as it is, this rank with where it was itself.
  void hear(Failure failure, int from) {
    {
      std::lock_guard lock(mutex_);
      if (world_.failed()) return;
      announced_ = true;
    }
    if (who_.rank == 0) tell_failure(failure, from);
    {
      std::lock_guard lock(calling_);
      if (const std::string where = position_ ? position_() : ""; !where.empty())
        failure.what += "; " + where;
    }
    world_.fail(std::move(failure));
    changed_.notify_all();
  }

  void give_sign() {
    std::string text;
    {
      std::lock_guard lock(calling_);
      if (status_) text = status_();
    }
    statuses_[static_cast<std::size_t>(who_.rank)] = text;
    send_to_all(detail::FrameKind::heartbeat, text);
  }

  void move_bytes(detail::Clock::time_point until) {
    std::vector<pollfd> wanted{{wake_out_.native(), POLLIN, 0}};
    std::vector<int> ranks;
    if (listener_ && strangers_.size() < most_strangers)
      wanted.push_back({listener_.native(), POLLIN, 0});
    for (const Stranger& stranger : strangers_)
      wanted.push_back({stranger.line.native(), POLLIN, 0});
    bool output = false;
    for (int r = 0; r < who_.size; ++r) {
      detail::Line& line = lines_[static_cast<std::size_t>(r)];
      if (!line.is_open()) continue;
      if (!line.flush()) {
        lose(r);
        continue;
      }
      output |= line.has_output();
      wanted.push_back(
          {line.native(), static_cast<short>(line.has_output() ? POLLIN | POLLOUT : POLLIN), 0});
    }
    {
      std::lock_guard lock(mutex_);
      drained_ = !output && outbox_.empty();
    }
    changed_.notify_all();
    (void)::poll(wanted.data(), wanted.size(), detail::poll_timeout(until));

    char byte[64];
    while (::read(wake_out_.native(), byte, sizeof byte) > 0) {
    }
    if (listener_) {
      accept_strangers();
      std::erase_if(strangers_, [&](Stranger& stranger) { return welcome(stranger); });
      std::lock_guard lock(mutex_);
      if (connected_ == who_.size - 1) {
        listener_ = detail::Descriptor();
        strangers_.clear();
      }
    }
    for (int r = 0; r < who_.size; ++r) {
      detail::Line& line = lines_[static_cast<std::size_t>(r)];
      if (!line.is_open()) continue;
      const bool alive = line.fill();
      try {
        line.take_frames([&](detail::FrameKind kind, std::string_view payload) {
          heard_[static_cast<std::size_t>(r)] = detail::Clock::now();
          handle(r, kind, payload);
        });
      } catch (const std::exception& e) {
        hear(Failure{r, false, e.what()}, r);
      }
      if (!alive) lose(r);
    }
  }

  void lose(int rank) {
    lines_[static_cast<std::size_t>(rank)].close();
    bool over = false;
    {
      std::lock_guard lock(mutex_);
      --connected_;
      over = over_;
    }
    changed_.notify_all();
    if (!over) hear(Failure{rank, false, "its process ended, its connection is closed"}, rank);
  }

  /// The other side reads its messages before it looks for signs, so a process that stood still
  /// itself accuses nobody.
  void expect_signs() {
    const Seconds limit = world_.deadline() / 2;
    for (int r = 0; r < who_.size; ++r) {
      if (!lines_[static_cast<std::size_t>(r)].is_open()) continue;
      if (detail::Clock::now() - heard_[static_cast<std::size_t>(r)] > limit)
        hear(Failure{r, false, "it gave no live sign for " + to_string(limit)}, r);
    }
  }

  void act_at_last() {
    if (!world_.failed()) return;
    if (!failed_since_) failed_since_ = detail::Clock::now();
    std::lock_guard lock(calling_);
    if (last_resort_ && detail::Clock::now() - *failed_since_ > patience_) last_resort_();
  }

  void handle(int from, detail::FrameKind kind, std::string_view payload) {
    detail::Unpacker in(payload);
    switch (kind) {
      case detail::FrameKind::heartbeat:
        statuses_[static_cast<std::size_t>(from)] = std::string(payload);
        return;
      case detail::FrameKind::contribution: return gather(from, in);
      case detail::FrameKind::question: return answer(from, in);
      case detail::FrameKind::note: {
        const int to = in.get<std::int32_t>();
        if (to != who_.rank) {
          expect_rank(to);
          return send(to, kind, std::string(payload));
        }
        const std::string key = in.text();
        std::lock_guard lock(mutex_);
        notes_[key].push_back(in.text());
        break;
      }
      case detail::FrameKind::result: {
        const std::string key = in.text();
        std::lock_guard lock(mutex_);
        results_[key] = in.texts();
        if (key == farewell) over_ = true;
        break;
      }
      case detail::FrameKind::answer: {
        const auto number = in.get<std::uint64_t>();
        std::lock_guard lock(mutex_);
        answers_[number] = in.texts();
        break;
      }
      case detail::FrameKind::failure: {
        Failure failure;
        failure.rank = in.get<std::int32_t>();
        failure.shared = in.get<std::int32_t>() != 0;
        failure.what = in.text();
        hear(std::move(failure), from);
        break;
      }
    }
    changed_.notify_all();
  }

  void expect_rank(int rank) const {
    expects(who_.rank == 0 && rank >= 0 && rank < who_.size, ErrorCode::bad_input,
            [&] { return sentence("sent a message for rank ", rank, " to rank ", who_.rank); });
  }

  void gather(int from, detail::Unpacker& in) {
    const std::string key = in.text();
    const std::vector<int> members = in.numbers<int>();
    for (const int member : members) expect_rank(member);
    Gathering& at = gatherings_[key];
    if (at.members.empty()) {
      at.members = members;
      at.records.resize(members.size());
    }
    const auto self = std::find(members.begin(), members.end(), from);
    expects(at.members == members && self != members.end(), ErrorCode::bad_input, [&] {
      return sentence("named ", rank_list(members), " for ", key, ", another rank ",
                      rank_list(at.members));
    });
    at.records[static_cast<std::size_t>(self - members.begin())].push_back(in.text());
    for (const auto& records : at.records)
      if (records.empty()) return;
    std::vector<std::string> whole;
    for (auto& records : at.records) {
      whole.push_back(std::move(records.front()));
      records.pop_front();
    }
    if (std::all_of(at.records.begin(), at.records.end(), [](auto& r) { return r.empty(); }))
      gatherings_.erase(key);
    detail::Packer payload;
    payload.put(key).put(std::span<const std::string>(whole));
    const std::string bytes = payload.take();
    for (const int member : members) send(member, detail::FrameKind::result, bytes);
  }

  void answer(int from, detail::Unpacker& in) {
    const auto number = in.get<std::uint64_t>();
    const std::string key = in.text();
    std::vector<std::string> out;
    const auto found = gatherings_.find(key);
    for (const int rank : in.numbers<int>()) {
      expect_rank(rank);
      if (key.empty()) {
        out.push_back(statuses_[static_cast<std::size_t>(rank)]);
      } else if (found != gatherings_.end()) {
        const auto& members = found->second.members;
        const auto at = std::find(members.begin(), members.end(), rank);
        if (at == members.end() ||
            found->second.records[static_cast<std::size_t>(at - members.begin())].empty())
          out.push_back(std::to_string(rank));
      }
    }
    detail::Packer payload;
    payload.put(number).put(std::span<const std::string>(out));
    send(from, detail::FrameKind::answer, payload.take());
  }

  const ProcessIdentity who_;
  World world_;
  const Seconds interval_;
  detail::Descriptor wake_out_, wake_in_, listener_;

  // Of the thread.
  std::vector<detail::Line> lines_;  // by rank: at rank 0 to all, elsewhere to rank 0
  std::vector<detail::Clock::time_point> heard_;
  std::vector<std::string> statuses_;
  std::vector<Stranger> strangers_;
  std::map<std::string, Gathering> gatherings_;
  std::optional<detail::Clock::time_point> failed_since_;

  std::mutex calling_;  // of the next four; held while one is called
  std::function<std::string()> status_, position_;
  std::function<void()> last_resort_;
  Seconds patience_{0};

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::deque<Outgoing> outbox_;
  std::map<std::string, std::vector<std::string>> results_;
  std::map<std::string, std::deque<std::string>> notes_;
  std::map<std::uint64_t, std::vector<std::string>> answers_;
  std::map<int, std::string> present_;  // ranks that have come, and from where
  std::string turned_away_;
  std::uint64_t questions_ = 0;
  int connected_ = 0;
  bool announced_ = false;  // this process's failure was handed to its lines
  bool drained_ = false;    // no bytes wait for the network
  bool over_ = false;       // all have said farewell: closed connections are in order
  bool ended_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace mega::inline v0::comm
