/// @file  Bootstrap: who a process is in its run, and where the processes find each other, as the
/// launcher tells it in the environment. Standard C++ alone.
#pragma once
#include <mega/core/error.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <system_error>

namespace mega::inline v0::comm {

/// Who a process is in its run, and where rank 0 listens.
struct ProcessIdentity {
  int rank = 0;
  int size = 1;
  int local_rank = 0;                 ///< number among the processes of its host
  std::string address = "127.0.0.1";  ///< host name or number of rank 0's host
  int port = 0;
  std::string job;  ///< what the launcher calls the run; tells two runs on one port apart
};

/// Value of an environment variable, or nullptr.
using Environment = std::function<const char*(const char*)>;

namespace detail {

inline constexpr int most_processes = 1 << 16;

/// Variables of the environment, with refusals that name them.
class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  /// Empty when not set.
  [[nodiscard]] std::string text(const char* name) const {
    const char* value = environment_(name);
    return value == nullptr ? "" : value;
  }
  [[nodiscard]] bool has(const char* name) const { return !text(name).empty(); }

  [[nodiscard]] std::string required(const char* name, std::string_view why) const {
    std::string value = text(name);
    expects(!value.empty(), ErrorCode::usage, [&] { return sentence(name, " is not set; ", why); });
    return value;
  }
  [[nodiscard]] int number(const char* name, int lowest, int highest, std::string_view why) const {
    const std::string value = required(name, why);
    int out = 0;
    const char* const end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, out);
    expects(error == std::errc() && stop == end && out >= lowest && out <= highest,
            ErrorCode::usage, [&] {
              return sentence(name, " is '", value, "'; valid is a whole number from ", lowest,
                              " to ", highest);
            });
    return out;
  }

 private:
  const Environment& environment_;
};

/// "node003" of "node[003-006,010],other": the host on which SLURM runs task 0.
[[nodiscard]] inline std::string first_host(std::string_view list) {
  std::string host;
  std::size_t i = 0;
  for (; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const std::size_t close = list.find(']', i);
    expects(close != std::string_view::npos, ErrorCode::usage, [&] {
      return sentence("SLURM's node list '", list, "' has a [ without a ]; set MASTER_ADDR");
    });
    const std::string_view range = list.substr(i + 1, close - i - 1);
    host += range.substr(0, range.find_first_of("-,"));
    i = close;
  }
  const bool plain = std::all_of(host.begin(), host.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '.' || c == '_';
  });
  expects(!host.empty() && plain, ErrorCode::usage, [&] {
    return sentence("SLURM's node list '", list, "' begins with no host name; set MASTER_ADDR");
  });
  return host;
}

/// The three counts of a launcher, each below the world's size.
[[nodiscard]] inline ProcessIdentity counts(const Variables& env, const char* rank,
                                            const char* size, const char* local,
                                            std::string_view why) {
  ProcessIdentity who;
  who.size = env.number(size, 1, most_processes, why);
  who.rank = env.number(rank, 0, who.size - 1, why);
  who.local_rank = env.number(local, 0, who.size - 1, why);
  return who;
}

}  // namespace detail

/// Reads what the launcher tells a process: torchrun's RANK, WORLD_SIZE, LOCAL_RANK; or mpirun's
/// OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; or srun's SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID,
/// in this order, since the inner launcher may run under the outer one. MASTER_ADDR and MASTER_PORT
/// say where rank 0 listens; srun's node list and job number stand in for them, and 127.0.0.1 for
/// the address where mpirun runs on one host.
/// @throws  Error(usage) naming the variable, its value and what is valid
[[nodiscard]] inline ProcessIdentity identify(const Environment& environment = [](const char* n) {
  return static_cast<const char*>(std::getenv(n));
}) {
  const detail::Variables env(environment);
  const char* const port_range = "rank 0 listens there: give a free port from 1 to 65535";
  const auto port = [&] { return env.number("MASTER_PORT", 1, 65535, port_range); };
  const char* const host = "give the name of rank 0's host";

  if (env.has("RANK") || env.has("WORLD_SIZE")) {
    ProcessIdentity who = detail::counts(env, "RANK", "WORLD_SIZE", "LOCAL_RANK",
                                         "a run by torchrun has RANK, WORLD_SIZE and LOCAL_RANK");
    if (env.has("OMPI_COMM_WORLD_RANK") &&
        env.text("OMPI_COMM_WORLD_SIZE") == env.text("WORLD_SIZE")) {
      const int other = env.number("OMPI_COMM_WORLD_RANK", 0, who.size - 1, "");
      expects(other == who.rank, ErrorCode::usage, [&] {
        return sentence("RANK is ", who.rank, ", but OMPI_COMM_WORLD_RANK is ", other,
                        " of equally many processes; both must be equal, or one unset");
      });
    }
    who.address = env.required("MASTER_ADDR", host);
    who.port = port();
    who.job = env.text("TORCHELASTIC_RUN_ID");
    return who;
  }
  if (env.has("OMPI_COMM_WORLD_RANK") || env.has("OMPI_COMM_WORLD_SIZE")) {
    ProcessIdentity who = detail::counts(
        env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "a run by mpirun has OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK");
    const bool one_host = env.has("OMPI_COMM_WORLD_LOCAL_SIZE") &&
                          env.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, who.size, "") == who.size;
    if (!one_host || env.has("MASTER_ADDR")) who.address = env.required("MASTER_ADDR", host);
    who.port = port();
    who.job = env.text("PMIX_NAMESPACE");
    return who;
  }
  if (env.has("SLURM_PROCID")) {
    ProcessIdentity who =
        detail::counts(env, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
                       "a run by srun -n N has SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID");
    const char* const list =
        env.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    who.address = env.has("MASTER_ADDR") ? env.text("MASTER_ADDR")
                                         : detail::first_host(env.required(list, host));
    // Below the ports that systems hand out by themselves; equal in all processes of the job.
    who.port = env.has("MASTER_PORT")
                   ? port()
                   : 20000 + env.number("SLURM_JOB_ID", 0, 2147483647, port_range) % 10000;
    who.job = env.text("SLURM_JOB_ID");
    if (env.has("SLURM_STEP_ID")) who.job += "." + env.text("SLURM_STEP_ID");
    return who;
  }
  throw Error(ErrorCode::usage,
              "none of RANK, OMPI_COMM_WORLD_RANK and SLURM_PROCID is set, so this process does "
              "not know its rank; start it with torchrun, mpirun or srun");
}

}  // namespace mega::inline v0::comm
