/// @file  What crosses a control channel: packed messages, the greetings of a new connection, and
/// frames on a non-blocking connection.
#pragma once
#include <mega/comm/detail/tcp_socket.hpp>
#include <mega/core/error.hpp>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::comm::detail {

/// Writes the parts of a message: numbers as they lie in memory, strings with their length.
class Packer {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T> Packer& put(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Packer& put(const std::string& text) {
    put(static_cast<std::uint64_t>(text.size()));
    bytes_ += text;
    return *this;
  }
  template <class T>
  Packer& put(std::span<const T> values) {
    put(static_cast<std::uint64_t>(values.size()));
    for (const T& value : values) put(value);
    return *this;
  }
  [[nodiscard]] std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Reads them back; a message that is too short is refused.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  requires std::is_trivially_copyable_v<T>
  [[nodiscard]] T get() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  [[nodiscard]] std::string text() { return std::string(take(get<std::uint64_t>())); }
  [[nodiscard]] std::vector<std::string> texts() {
    std::vector<std::string> out;
    for (auto n = get<std::uint64_t>(); n > 0; --n) out.push_back(text());
    return out;
  }
  template <class T>
  [[nodiscard]] std::vector<T> numbers() {
    std::vector<T> out;
    for (auto n = get<std::uint64_t>(); n > 0; --n) out.push_back(get<T>());
    return out;
  }

 private:
  std::string_view take(std::uint64_t n) {
    expects(n <= bytes_.size(), ErrorCode::bad_input,
            [&] { return sentence("a message ends after ", bytes_.size(), " of ", n, " bytes"); });
    const std::string_view part = bytes_.substr(0, static_cast<std::size_t>(n));
    bytes_.remove_prefix(part.size());
    return part;
  }
  std::string_view bytes_;
};

/// First words on a connection. Whoever does not know them, or belongs to another run, gets no
/// further.
struct Greeting {
  static constexpr char words[8] = {'m', 'e', 'g', 'a', ' ', 'r', '1', '\n'};
  char magic[8] = {};
  std::uint64_t nonce = 0;  ///< the reply repeats it, so that no echo passes for rank 0
  std::int32_t rank = 0;
  std::int32_t size = 0;
  char job[104] = {};
};
struct GreetingReply {
  static constexpr char words[8] = {'m', 'e', 'g', 'a', ' ', 'w', '1', '\n'};
  char magic[8] = {};
  std::uint64_t nonce = 0;
  std::int32_t accepted = 0;
  char reason[300] = {};
};

template <std::size_t N>
void copy_text(char (&out)[N], std::string_view text) {
  const std::size_t n = std::min(text.size(), N - 1);
  std::memcpy(out, text.data(), n);
  std::memset(out + n, 0, N - n);
}
template <std::size_t N>
[[nodiscard]] std::string text_of(const char (&in)[N]) {
  return {in, ::strnlen(in, N)};
}

enum class FrameKind : std::uint32_t {
  heartbeat,     ///< to rank 0: status
  contribution,  ///< to rank 0: key, members, record
  result,        ///< from rank 0: key, records
  question,      ///< to rank 0: number, key, ranks
  answer,        ///< from rank 0: number, texts
  note,          ///< through rank 0: destination, key, text
  failure,       ///< rank, shared, sentence
};

/// A non-blocking connection with a buffer each way.
class Line {
 public:
  Line() = default;
  explicit Line(Descriptor socket) : socket_(std::move(socket)) {
    const int flags = ::fcntl(socket_.native(), F_GETFL);
    (void)::fcntl(socket_.native(), F_SETFL, flags | O_NONBLOCK);
    const int on = 1;
    (void)::setsockopt(socket_.native(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  [[nodiscard]] bool is_open() const noexcept { return static_cast<bool>(socket_); }
  [[nodiscard]] int native() const noexcept { return socket_.native(); }
  [[nodiscard]] bool has_output() const noexcept { return !out_.empty(); }
  void close() { *this = Line(); }

  void put(const void* data, std::size_t bytes) {
    out_.append(static_cast<const char*>(data), bytes);
  }
  void put(FrameKind kind, std::string_view payload) {
    const Header header{frame_magic, kind, payload.size()};
    put(&header, sizeof header);
    out_ += payload;
  }

  /// Writes and reads as much as goes without waiting. False: the other side is gone.
  [[nodiscard]] bool flush() {
    while (!out_.empty()) {
      const auto n = ::send(native(), out_.data(), out_.size(), MSG_NOSIGNAL);
      if (n < 0) return again();
      out_.erase(0, static_cast<std::size_t>(n));
    }
    return true;
  }
  [[nodiscard]] bool fill() {
    char part[1 << 14];
    // No peer, however fast, keeps this loop from the others.
    for (int parts = 0; parts < 64; ++parts) {
      const auto n = ::recv(native(), part, sizeof part, 0);
      if (n == 0) return false;
      if (n < 0) return again();
      in_.append(part, static_cast<std::size_t>(n));
      if (n < static_cast<std::ptrdiff_t>(sizeof part)) break;
    }
    return true;
  }

  /// Takes a struct from the input once it is there.
  template <class T>
  [[nodiscard]] bool take(T& out) {
    if (in_.size() < sizeof out) return false;
    std::memcpy(&out, in_.data(), sizeof out);
    in_.erase(0, sizeof out);
    return true;
  }
  /// Gives every complete frame to handle(kind, payload). @throws Error(bad_input) on other bytes
  template <class Handle>
  void take_frames(const Handle& handle) {
    std::size_t at = 0;
    while (in_.size() - at >= sizeof(Header)) {
      Header header;
      std::memcpy(&header, in_.data() + at, sizeof header);
      expects(header.magic == frame_magic && header.bytes <= most_bytes, ErrorCode::bad_input,
              "sent bytes that are no message of this protocol");
      if (in_.size() - at - sizeof header < header.bytes) break;
      handle(header.kind, std::string_view(in_).substr(at + sizeof header, header.bytes));
      at += sizeof header + header.bytes;
    }
    in_.erase(0, at);
  }

 private:
  struct Header {
    std::uint32_t magic;
    FrameKind kind;
    std::uint64_t bytes;
  };
  static constexpr std::uint32_t frame_magic = 0x6d656761;
  static constexpr std::uint64_t most_bytes = std::uint64_t{1} << 28;

  [[nodiscard]] static bool again() noexcept {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  }

  Descriptor socket_;
  std::string in_, out_;
};

}  // namespace mega::inline v0::comm::detail
