/// @file  TCP sockets of a bootstrap: owned descriptors, listening at rank 0, connecting to it
/// within a deadline. Plain C++ on POSIX sockets.
#pragma once
#include <mega/comm/bootstrap.hpp>
#include <mega/comm/world.hpp>
#include <mega/core/error.hpp>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace mega::inline v0::comm::detail {

using Clock = std::chrono::steady_clock;

[[nodiscard]] inline Clock::duration clock_duration(Seconds seconds) {
  return std::chrono::duration_cast<Clock::duration>(seconds);
}

[[nodiscard]] inline int poll_timeout(Clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
}

/// An owned file descriptor. Move-only.
class Descriptor {
 public:
  Descriptor() noexcept = default;
  explicit Descriptor(int native) noexcept : native_(native) {}
  Descriptor(Descriptor&& other) noexcept : native_(std::exchange(other.native_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(native_, other.native_);
    return *this;
  }
  ~Descriptor() {
    if (native_ >= 0) (void)::close(native_);
  }
  [[nodiscard]] int native() const noexcept { return native_; }
  explicit operator bool() const noexcept { return native_ >= 0; }

 private:
  int native_ = -1;
};

/// Addresses of a host, freed with it.
class Addresses {
 public:
  Addresses(const std::string& host, int port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_family = AF_UNSPEC;
    status_ = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first_);
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  ~Addresses() {
    if (first_ != nullptr) ::freeaddrinfo(first_);
  }
  [[nodiscard]] const addrinfo* first() const noexcept { return first_; }
  [[nodiscard]] const char* problem() const noexcept { return ::gai_strerror(status_); }

 private:
  int status_ = 0;
  addrinfo* first_ = nullptr;
};

/// A listening socket: on the loopback alone where the address says so, else on all interfaces.
[[nodiscard]] inline Descriptor listen_at(const ProcessIdentity& who) {
  const auto try_listen = [&](const sockaddr* address, socklen_t bytes, int family) {
    Descriptor out(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!out) return out;
    const int on = 1, off = 0;
    (void)::setsockopt(out.native(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6)
      (void)::setsockopt(out.native(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (::bind(out.native(), address, bytes) != 0 || ::listen(out.native(), SOMAXCONN) != 0)
      return Descriptor();
    return out;
  };
  const auto port = htons(static_cast<std::uint16_t>(who.port));
  const bool loopback = who.address == "localhost" || who.address.starts_with("127.");
  int error = 0;
  if (!loopback) {
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_port = port;
    if (who.address == "::1") any.sin6_addr = in6addr_loopback;
    if (auto out = try_listen(reinterpret_cast<const sockaddr*>(&any), sizeof any, AF_INET6))
      return out;
    error = errno;
  }
  // Hosts without IPv6 have no other.
  if (loopback || error != EADDRINUSE) {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = port;
    any.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
    if (loopback && who.address != "localhost")
      (void)::inet_pton(AF_INET, who.address.c_str(), &any.sin_addr);
    if (auto out = try_listen(reinterpret_cast<const sockaddr*>(&any), sizeof any, AF_INET))
      return out;
    error = errno;
  }
  throw Error(ErrorCode::usage,
              error == EADDRINUSE
                  ? sentence("port ", who.port, " of this host is in use, perhaps by another run; ",
                             "set MASTER_PORT to a free one from 1 to 65535")
                  : sentence("rank 0 cannot listen on ", who.address, ":", who.port, ": ",
                             std::strerror(error)));
}

/// One attempt to connect within `until`; none where nobody answers, and then says why.
[[nodiscard]] inline Descriptor connect_to(const ProcessIdentity& who, Clock::time_point until,
                                           std::string& why) {
  const Addresses addresses(who.address, who.port);
  if (addresses.first() == nullptr) why = addresses.problem();
  for (const addrinfo* at = addresses.first(); at != nullptr; at = at->ai_next) {
    Descriptor out(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!out) continue;
    int error = 0;
    if (::connect(out.native(), at->ai_addr, at->ai_addrlen) != 0) {
      error = errno;
      if (error == EINPROGRESS) {
        pollfd wanted{out.native(), POLLOUT, 0};
        error = ETIMEDOUT;
        if (::poll(&wanted, 1, poll_timeout(until)) == 1) {
          socklen_t bytes = sizeof error;
          (void)::getsockopt(out.native(), SOL_SOCKET, SO_ERROR, &error, &bytes);
        }
      }
    }
    if (error == 0) return out;
    why = std::strerror(error);
  }
  return {};
}

/// "10.0.0.7:41234".
[[nodiscard]] inline std::string peer_name(const sockaddr_storage& address, socklen_t bytes) {
  char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
  (void)::getnameinfo(reinterpret_cast<const sockaddr*>(&address), bytes, host, sizeof host, port,
                      sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return sentence(host, ":", port);
}

}  // namespace mega::inline v0::comm::detail
