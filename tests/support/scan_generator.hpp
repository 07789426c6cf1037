/// @file  Synthetic training jobs as traces: a discrete-event replay of what N ranks would have
/// done, with faults put in on purpose and every clock wrong.
///
/// A step is a 1F1B pipeline: layers of an attention and an MLP kernel with tensor-parallel
/// all-reduces behind each, sends and receives between stages, gradients reduced over the data
/// parallel group bucket by bucket behind the last backward, a norm over the model, the optimizer.
/// A host thread launches every operation in program order and runs ahead of the device until the
/// end of the step. A collective starts when its last member has arrived and ends for all together;
/// a transfer needs both ends. Streams run in order; a communication waits for the compute that was
/// launched before it, as PyTorch's does.
///
/// All noise comes from hashes of (seed, rank, operation), so that the same job without its fault
/// has the same noise. What the faults are stands in the truth and nowhere in the trace.
#pragma once
#include <mega/scan/trace.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mega_test {

namespace scan = mega::scan;

enum class FaultKind {
  slow_gpu,         ///< all kernels of `rank` take factor times as long
  slow_edge,        ///< sends between `rank` and `peer`, both ways
  slow_links,       ///< every transfer in which `rank` takes part
  stage_imbalance,  ///< `stage` has factor times its layers; variant: a heavy output head instead
  data_imbalance,   ///< load of micro-batches varies with sigma `factor`; variant: attention only
  late_host,        ///< `rank` launches factor times slower; variant: a few long stalls a step
  hang,             ///< `rank` stops in step `from_step`; variant: its file is missing too
};

struct Fault {
  FaultKind kind = FaultKind::slow_gpu;
  int rank = -1;
  int peer = -1;
  int stage = -1;
  double factor = 1;
  int from_step = 0;
  bool variant = false;
};

struct JobSpec {
  int dp = 2, tp = 1, pp = 1;
  int layers = 2;  ///< of a stage
  int microbatches = 4;
  int steps = 5;
  double noise = 0.02;        ///< sigma of every duration
  double clock_spread_s = 5;  ///< offsets of clocks
  double drift_ppm = 50;      ///< of clocks
  double attention_us = 500;  ///< forward of one layer; backward takes twice as long
  double mlp_us = 700;        ///< likewise
  double tp_bytes = 32e6;     ///< of an all-reduce
  double pp_bytes = 16e6;     ///< of a send
  double dp_bytes = 100e6;    ///< of one layer's gradients
  double tp_bandwidth = 200;  ///< bytes a ns
  double net_bandwidth = 40;  ///< bytes a ns
  bool sharded = true;        ///< reduce-scatter and all-gather instead of all-reduce
  bool labelled = true;       ///< events say forward or backward and their micro-batch
  bool numbered = true;       ///< communications carry sequence numbers
  bool one_clock_a_node = false;
  std::vector<Fault> faults;

  [[nodiscard]] int ranks() const { return dp * tp * pp; }
  /// tp fastest, pp slowest.
  [[nodiscard]] int rank_of(int p, int d, int t) const { return (p * dp + d) * tp + t; }
  [[nodiscard]] int stage_of(int rank) const { return rank / (dp * tp); }
  [[nodiscard]] int replica_of(int rank) const { return rank / tp % dp; }
};

struct SyntheticClock {
  scan::Nanoseconds offset = 0;
  double drift = 0;
  [[nodiscard]] scan::Nanoseconds show(double t) const {
    return static_cast<scan::Nanoseconds>(std::llround(t + drift * t)) + offset;
  }
};

struct Truth {
  std::vector<Fault> faults;
  std::vector<SyntheticClock> clocks;
  std::vector<double> step_ns;  ///< true length of each step that ended
};

struct SyntheticJob {
  scan::Trace trace;
  Truth truth;
};

namespace detail {

/// Numbers from a counter: the same arguments, the same number.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : seed_(seed) {}

  [[nodiscard]] std::uint64_t bits(std::uint64_t a, std::uint64_t b, std::uint64_t salt) const {
    return mix(mix(mix(seed_ ^ salt * 0x9E3779B97F4A7C15ULL) ^ a) ^ b);
  }
  [[nodiscard]] double uniform(std::uint64_t a, std::uint64_t b, std::uint64_t salt) const {
    return static_cast<double>(bits(a, b, salt) >> 11U) * 0x1p-53;
  }
  [[nodiscard]] double gauss(std::uint64_t a, std::uint64_t b, std::uint64_t salt) const {
    const double u = uniform(a, b, salt * 2 + 1) + 0x1p-54;
    const double v = uniform(a, b, salt * 2 + 2);
    return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

 private:
  static std::uint64_t mix(std::uint64_t z) {
    z += 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31U);
  }
  std::uint64_t seed_;
};

class JobReplay {
 public:
  JobReplay(const JobSpec& spec, std::uint64_t seed) : s_(spec), noise_(seed) {
    for (int r = 0; r < s_.ranks(); ++r) program(r);
    simulate();
  }

  /// Length of each step that every rank ended, in ns.
  [[nodiscard]] std::vector<double> step_lengths() const {
    std::vector<double> ends(static_cast<std::size_t>(s_.steps), 0);
    std::vector<char> whole(ends.size(), 1);
    for (const Op& op : ops_) {
      const auto step = static_cast<std::size_t>(op.step);
      if (op.end < 0) whole[step] = 0;
      ends[step] = std::max(ends[step], op.end);
    }
    std::vector<double> out;
    double before = 0;
    for (std::size_t s = 0; s < ends.size() && whole[s] != 0; ++s) {
      out.push_back(ends[s] - before);
      before = ends[s];
    }
    return out;
  }

  [[nodiscard]] SyntheticJob emit() const;

 private:
  enum Stream { compute, tensor, send_down, recv_down, send_up, recv_up, data, model, streams };
  static constexpr int nothing = -1;

  struct Op {
    double work = 0;  // ns, noise and faults included; of a communication: see its Instance
    double launch = 0, launch_end = -1, begin = -1, end = -1;
    double host_delay = 0;  // before the launch
    int name = 0;
    int rank = 0;
    int instance = nothing;
    int host_after = nothing;  // the host waits for the end of this one before it launches
    int stream_next = nothing;
    int first_edge = nothing;
    int waiting = 0;  // for launch, stream and dependencies
    std::int16_t step = 0, microbatch = -1;
    std::uint8_t stream = 0;
    scan::EventKind kind = scan::EventKind::compute;
    scan::CommunicationOp comm = scan::CommunicationOp::unknown;
  };
  struct Edge {
    int to, next;
  };
  struct Instance {
    int members = 0, arrived = 0;
    double bytes = 0, transfer = 0, last = 0;
    int group = nothing;
    std::int64_t sequence = 0;
    std::vector<int> ops;
  };
  struct GroupInfo {
    std::string name;
    std::vector<std::int32_t> ranks;
  };

  [[nodiscard]] double factor(FaultKind kind, int rank, int step) const {
    double f = 1;
    for (const Fault& fault : s_.faults) {
      if (fault.kind == kind && fault.rank == rank && step >= fault.from_step) f *= fault.factor;
    }
    return f;
  }
  [[nodiscard]] double jitter(int rank, std::uint64_t which) const {
    const auto r = static_cast<std::uint64_t>(rank);
    double f = std::exp(s_.noise * noise_.gauss(r, which, 1));
    if (noise_.uniform(r, which, 7) < 0.001) f *= 1 + noise_.uniform(r, which, 8);
    return f;
  }
  /// Relative load of a micro-batch of a replica; mean 1.
  [[nodiscard]] double load(int rank, int step, int microbatch, bool attention) const {
    double f = 1;
    for (const Fault& fault : s_.faults) {
      if (fault.kind != FaultKind::data_imbalance || (fault.variant && !attention)) continue;
      const auto replica = static_cast<std::uint64_t>(s_.replica_of(rank));
      const auto batch = static_cast<std::uint64_t>(step) << 20U;
      const double g =
          0.8 * noise_.gauss(replica, batch, 21) +
          0.6 * noise_.gauss(replica, batch + static_cast<std::uint64_t>(microbatch) + 1, 22);
      f *= std::exp(fault.factor * g - fault.factor * fault.factor / 2);
    }
    return f;
  }

  int name_of(const char* text) {
    for (std::size_t i = 0; i < names_.size(); ++i) {
      if (names_[i] == text) return static_cast<int>(i);
    }
    names_.emplace_back(text);
    return static_cast<int>(names_.size() - 1);
  }
  int group_of(const std::string& name, std::vector<std::int32_t> ranks) {
    const auto [at, is_new] = group_index_.try_emplace(name, static_cast<int>(groups_.size()));
    if (is_new) groups_.push_back({name, std::move(ranks)});
    return at->second;
  }

  // ---- building the program of one rank -------------------------------------------------------

  struct Builder {
    int rank = 0, p = 0, d = 0, t = 0;
    int step = 0, microbatch = -1;
    int last_compute = nothing;  // what the compute stream's next operation follows
    int host_after = nothing;
    std::array<int, streams> last{};
    std::vector<int> wait_for;  // communications that the next kernel needs
    std::unordered_map<std::int64_t, std::int64_t> calls;
    std::uint64_t count = 0;
  };

  int push(Builder& b, Op op, const std::vector<int>& after) {
    const int at = static_cast<int>(ops_.size());
    op.rank = b.rank;
    op.step = static_cast<std::int16_t>(b.step);
    op.microbatch = static_cast<std::int16_t>(b.microbatch);
    op.waiting = 1;  // the launch
    op.host_after = std::exchange(b.host_after, nothing);
    op.host_delay = host_delay(b, at);
    int& before = b.last[op.stream];
    if (before != nothing) {
      ops_[static_cast<std::size_t>(before)].stream_next = at;
      ++op.waiting;
    }
    before = at;
    for (const int from : after) {
      edges_.push_back({at, ops_[static_cast<std::size_t>(from)].first_edge});
      ops_[static_cast<std::size_t>(from)].first_edge = static_cast<int>(edges_.size() - 1);
      ++op.waiting;
    }
    ops_.push_back(std::move(op));
    ++b.count;
    return at;
  }

  /// What the host does between two launches: Python, mostly.
  [[nodiscard]] double host_delay(const Builder& b, int) const {
    const auto r = static_cast<std::uint64_t>(b.rank);
    double gap = 8000 * std::exp(0.3 * noise_.gauss(r, b.count, 31));
    for (const Fault& fault : s_.faults) {
      if (fault.kind != FaultKind::late_host || fault.rank != b.rank || b.step < fault.from_step)
        continue;
      if (!fault.variant) {
        gap *= fault.factor;
      } else if (noise_.uniform(r, b.count, 32) < 0.02) {
        gap += fault.factor * 1e6 * (0.5 + noise_.uniform(r, b.count, 33));
      }
    }
    return gap;
  }

  void kernel(Builder& b, const char* name, double us, scan::EventKind kind, bool attention) {
    Op op;
    op.name = name_of(name);
    op.stream = compute;
    op.kind = kind;
    op.work = us * 1000 * gpu_speed(b.rank) * jitter(b.rank, b.count) *
              factor(FaultKind::slow_gpu, b.rank, b.step);
    if (b.microbatch >= 0) op.work *= load(b.rank, b.step, b.microbatch, attention);
    b.last_compute = push(b, op, b.wait_for);
    b.wait_for.clear();
  }
  /// No two GPUs are equal: a constant part of the noise.
  [[nodiscard]] double gpu_speed(int rank) const {
    return std::exp(0.3 * s_.noise * noise_.gauss(static_cast<std::uint64_t>(rank), 0, 5));
  }

  int communicate(Builder& b, Stream stream, scan::CommunicationOp comm, const char* name,
                  int group, int members, double bytes, double bandwidth, int peer) {
    const bool pair = peer >= 0;
    const std::int64_t key = static_cast<std::int64_t>(group) * 64 + (pair ? 40 : int(comm)) +
                             (pair && stream >= send_up ? 1 : 0);
    const std::int64_t sequence = b.calls[key]++;
    const auto [at, is_new] =
        instance_index_.try_emplace(key << 24 | sequence, static_cast<int>(instances_.size()));
    if (is_new) {
      Instance made;
      made.members = members;
      made.bytes = bytes;
      made.group = group;
      made.sequence = sequence;
      made.transfer = (bytes / bandwidth + 8000) *
                      jitter(100000 + group, static_cast<std::uint64_t>(key << 24 | sequence));
      instances_.push_back(std::move(made));
    }
    const int at_instance = at->second;
    Op op;
    op.name = name_of(name);
    op.stream = static_cast<std::uint8_t>(stream);
    op.kind = scan::EventKind::communication;
    op.comm = comm;
    op.instance = at_instance;
    std::vector<int> after = b.wait_for;  // what the compute stream waits for, this waits for too
    if (b.last_compute != nothing) after.push_back(b.last_compute);
    const int made = push(b, op, after);
    Instance& instance = instances_[static_cast<std::size_t>(at_instance)];
    instance.ops.push_back(made);
    double slow = factor(FaultKind::slow_links, b.rank, b.step);
    for (const Fault& f : s_.faults) {
      if (f.kind != FaultKind::slow_edge || !pair || b.step < f.from_step) continue;
      const bool here =
          (f.rank == b.rank && f.peer == peer) || (f.peer == b.rank && f.rank == peer);
      if (here && stream != recv_down && stream != recv_up) slow *= f.factor;
    }
    instance.transfer *= slow;
    return made;
  }

  void tensor_reduce(Builder& b, const std::vector<std::int32_t>& ranks) {
    if (s_.tp == 1) return;
    const int group = group_of("tp_" + std::to_string(b.p) + "_" + std::to_string(b.d), ranks);
    const int made =
        communicate(b, tensor, scan::CommunicationOp::all_reduce, "ncclDevKernel_AllReduce_Sum",
                    group, s_.tp, s_.tp_bytes, s_.tp_bandwidth, nothing);
    b.wait_for.push_back(made);
  }

  int transfer(Builder& b, Stream stream, int other_stage) {
    const int peer = s_.rank_of(other_stage, b.d, b.t);
    const bool sends = stream == send_down || stream == send_up;
    const int low = std::min(b.rank, peer), high = std::max(b.rank, peer);
    const int group = group_of("pp_" + std::to_string(low) + "_" + std::to_string(high),
                               {static_cast<std::int32_t>(low), static_cast<std::int32_t>(high)});
    return communicate(b, stream, sends ? scan::CommunicationOp::send : scan::CommunicationOp::recv,
                       "ncclDevKernel_SendRecv", group, 2, s_.pp_bytes, s_.net_bandwidth, peer);
  }

  struct StageShape {
    int layers = 1;
    double head_us = 0;
  };
  [[nodiscard]] StageShape shape_of(int p) const {
    StageShape out{s_.layers, 0};
    const double stage_us = s_.layers * (s_.attention_us + s_.mlp_us);
    if (p == s_.pp - 1) out.head_us = 0.04 * stage_us;
    for (const Fault& f : s_.faults) {
      if (f.kind != FaultKind::stage_imbalance || f.stage != p) continue;
      if (f.variant && p == s_.pp - 1) {
        out.head_us += (f.factor - 1) * stage_us;
      } else {
        out.layers = static_cast<int>(std::ceil(s_.layers * f.factor));
      }
    }
    return out;
  }

  void program(int rank) {
    Builder b;
    b.rank = rank;
    b.p = s_.stage_of(rank);
    b.d = s_.replica_of(rank);
    b.t = rank % s_.tp;
    b.last.fill(nothing);
    std::vector<std::int32_t> tp_ranks, dp_ranks, mp_ranks;
    for (int t = 0; t < s_.tp; ++t) tp_ranks.push_back(s_.rank_of(b.p, b.d, t));
    for (int d = 0; d < s_.dp; ++d) dp_ranks.push_back(s_.rank_of(b.p, d, b.t));
    for (int p = 0; p < s_.pp; ++p) {
      for (int t = 0; t < s_.tp; ++t) mp_ranks.push_back(s_.rank_of(p, b.d, t));
    }
    first_op_.push_back(static_cast<int>(ops_.size()));
    const StageShape shape = shape_of(b.p);
    const auto kind_of = [&](scan::EventKind k) {
      return s_.labelled ? k : scan::EventKind::compute;
    };

    const auto forward = [&](int m) {
      b.microbatch = m;
      if (b.p > 0) b.wait_for.push_back(transfer(b, recv_down, b.p - 1));
      const auto kind = kind_of(scan::EventKind::forward);
      if (b.p == 0) kernel(b, "embedding", 20, kind, false);
      for (int l = 0; l < shape.layers; ++l) {
        kernel(b, "attention", s_.attention_us, kind, true);
        tensor_reduce(b, tp_ranks);
        kernel(b, "mlp", s_.mlp_us, kind, false);
        tensor_reduce(b, tp_ranks);
      }
      if (b.p == s_.pp - 1) kernel(b, "output_head", shape.head_us, kind, false);
      if (b.p < s_.pp - 1) transfer(b, send_down, b.p + 1);
    };
    std::vector<int> reductions;
    const auto backward = [&](int m) {
      b.microbatch = m;
      if (b.p < s_.pp - 1) b.wait_for.push_back(transfer(b, recv_up, b.p + 1));
      const auto kind = kind_of(scan::EventKind::backward);
      if (b.p == s_.pp - 1) kernel(b, "output_head_backward", 2 * shape.head_us, kind, false);
      for (int l = 0; l < shape.layers; ++l) {
        kernel(b, "mlp_backward", 2 * s_.mlp_us, kind, false);
        tensor_reduce(b, tp_ranks);
        kernel(b, "attention_backward", 2 * s_.attention_us, kind, true);
        tensor_reduce(b, tp_ranks);
        if (m == s_.microbatches - 1 && s_.dp > 1) reductions.push_back(gradients(b, dp_ranks));
      }
      if (b.p > 0) transfer(b, send_up, b.p - 1);
    };
    for (b.step = 0; b.step < s_.steps; ++b.step) {
      reductions.clear();
      const int warm = std::min(s_.pp - 1 - b.p, s_.microbatches);
      for (int m = 0; m < warm; ++m) forward(m);
      for (int m = warm; m < s_.microbatches; ++m) {
        forward(m);
        backward(m - warm);
      }
      for (int m = s_.microbatches - warm; m < s_.microbatches; ++m) backward(m);
      b.microbatch = -1;
      b.wait_for.insert(b.wait_for.end(), reductions.begin(), reductions.end());
      if (s_.pp * s_.tp > 1) {
        const int norm =
            communicate(b, model, scan::CommunicationOp::all_reduce, "ncclDevKernel_AllReduce_Sum",
                        group_of("mp_" + std::to_string(b.d), mp_ranks), s_.pp * s_.tp, 8,
                        s_.net_bandwidth, nothing);
        b.wait_for.push_back(norm);
      }
      kernel(b, "adam", 60 + 40 * shape.layers, kind_of(scan::EventKind::optimizer), false);
      if (s_.sharded && s_.dp > 1) {
        b.wait_for.push_back(
            communicate(b, data, scan::CommunicationOp::all_gather, "ncclDevKernel_AllGather",
                        group_of("dp_" + std::to_string(b.p) + "_" + std::to_string(b.t), dp_ranks),
                        s_.dp, s_.dp_bytes * shape.layers / 2, s_.net_bandwidth, nothing));
      }
      b.host_after = b.wait_for.empty() ? b.last_compute : b.wait_for.back();
    }
  }

  int gradients(Builder& b, const std::vector<std::int32_t>& dp_ranks) {
    const int group = group_of("dp_" + std::to_string(b.p) + "_" + std::to_string(b.t), dp_ranks);
    return s_.sharded ? communicate(b, data, scan::CommunicationOp::reduce_scatter,
                                    "ncclDevKernel_ReduceScatter_Sum", group, s_.dp, s_.dp_bytes,
                                    s_.net_bandwidth, nothing)
                      : communicate(b, data, scan::CommunicationOp::all_reduce,
                                    "ncclDevKernel_AllReduce_Sum", group, s_.dp, s_.dp_bytes,
                                    s_.net_bandwidth / 2, nothing);
  }

  // ---- the replay -----------------------------------------------------------------------------

  [[nodiscard]] int stops_at(int rank) const {
    for (const Fault& f : s_.faults) {
      if (f.kind != FaultKind::hang || f.rank != rank) continue;
      const auto r = static_cast<std::size_t>(rank);
      const int from = first_op_[r];
      const int to = r + 1 < first_op_.size() ? first_op_[r + 1] : static_cast<int>(ops_.size());
      std::vector<int> candidates;  // a communication that the rank never gets to
      for (int i = from; i < to; ++i) {
        const Op& op = ops_[static_cast<std::size_t>(i)];
        if (op.step == f.from_step && op.instance != nothing) candidates.push_back(i);
      }
      if (candidates.empty()) continue;
      return candidates[noise_.bits(r, 0, 41) % candidates.size()];
    }
    return static_cast<int>(ops_.size());
  }

  void simulate() {
    const auto n = static_cast<std::size_t>(s_.ranks());
    cursor_.assign(first_op_.begin(), first_op_.end());
    host_.assign(n, 0);
    stop_.resize(n);
    for (std::size_t r = 0; r < n; ++r) {
      const int to = r + 1 < n ? first_op_[r + 1] : static_cast<int>(ops_.size());
      stop_[r] = std::min(to, stops_at(static_cast<int>(r)));
      host_[r] = 2e5 * noise_.uniform(r, 0, 51);
      step_launch(r);
    }
    while (!ready_.empty()) {
      const int at = ready_.back();
      ready_.pop_back();
      start(at);
    }
  }

  /// The host of a rank launches until it has to wait for the device.
  void step_launch(std::size_t r) {
    while (cursor_[r] < stop_[r]) {
      Op& op = ops_[static_cast<std::size_t>(cursor_[r])];
      if (op.host_after != nothing) {
        const Op& awaited = ops_[static_cast<std::size_t>(op.host_after)];
        if (awaited.end < 0) return;
        // Reads the loss, gets the next batch.
        const auto which = static_cast<std::uint64_t>(op.step);
        host_[r] = std::max(host_[r], awaited.end) + 3e5 * (1 + noise_.uniform(r, which, 52));
      }
      host_[r] += op.host_delay;
      op.launch = host_[r];
      host_[r] += 4000 * (1 + 0.3 * noise_.uniform(r, static_cast<std::uint64_t>(cursor_[r]), 53));
      op.launch_end = host_[r];
      free(cursor_[r]++);
    }
  }

  void free(int at) {
    if (--ops_[static_cast<std::size_t>(at)].waiting == 0) ready_.push_back(at);
  }

  void start(int at) {
    Op& op = ops_[static_cast<std::size_t>(at)];
    op.begin = std::max(op.begin, op.launch_end + 3000);
    if (op.instance == nothing) {
      finish(at, op.begin + op.work);
      return;
    }
    Instance& instance = instances_[static_cast<std::size_t>(op.instance)];
    instance.last = std::max(instance.last, op.begin);
    if (++instance.arrived < instance.members) return;
    for (const int member : instance.ops) {
      const double late =
          -1000 * std::log(1 - noise_.uniform(static_cast<std::uint64_t>(member), 0, 61));
      finish(member, instance.last + instance.transfer + std::min(late, 6000.0));
    }
  }

  void finish(int at, double end) {
    Op& op = ops_[static_cast<std::size_t>(at)];
    op.end = end;
    const auto release = [&](int to) {
      Op& next = ops_[static_cast<std::size_t>(to)];
      next.begin = std::max(next.begin, end + 1000);
      free(to);
    };
    if (op.stream_next != nothing) release(op.stream_next);
    for (int e = op.first_edge; e != nothing; e = edges_[static_cast<std::size_t>(e)].next)
      release(edges_[static_cast<std::size_t>(e)].to);
    const auto r = static_cast<std::size_t>(op.rank);
    if (cursor_[r] < stop_[r] && ops_[static_cast<std::size_t>(cursor_[r])].host_after == at)
      step_launch(r);
  }

  JobSpec s_;
  Noise noise_;
  std::vector<Op> ops_;
  std::vector<Edge> edges_;
  std::vector<Instance> instances_;
  std::unordered_map<std::int64_t, int> instance_index_;
  std::vector<std::string> names_;
  std::vector<GroupInfo> groups_;
  std::unordered_map<std::string, int> group_index_;
  std::vector<int> first_op_;
  std::vector<int> cursor_, stop_, ready_;
  std::vector<double> host_;
};

inline SyntheticJob JobReplay::emit() const {
  SyntheticJob out;
  scan::Trace& t = out.trace;
  std::vector<char> missing(static_cast<std::size_t>(s_.ranks()), 0);
  bool hangs = false;
  for (const Fault& f : s_.faults) {
    hangs = hangs || f.kind == FaultKind::hang;
    if (f.kind == FaultKind::hang && f.variant) missing[static_cast<std::size_t>(f.rank)] = 1;
  }
  double dump = 0;  // when a watchdog writes what is known: pending operations last until then
  for (const Op& op : ops_) dump = std::max({dump, op.end, op.begin, op.launch_end});
  if (hangs) dump += 60e9;

  std::vector<scan::TableIndex> groups(groups_.size(), scan::none);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups[g] = static_cast<scan::TableIndex>(t.groups.size());
    t.groups.push_back({groups_[g].name, groups_[g].ranks});
    std::sort(t.groups.back().ranks.begin(), t.groups.back().ranks.end());
  }
  std::vector<scan::TableIndex> names;
  for (const std::string& n : names_) names.push_back(t.names.intern(n));
  const scan::TableIndex launch_name = t.names.intern("cudaLaunchKernel");
  const scan::TableIndex step_name = t.names.intern("ProfilerStep");
  const scan::TableIndex dtype = t.names.intern("bf16");

  const auto n = static_cast<std::size_t>(s_.ranks());
  for (std::size_t r = 0; r < n; ++r) {
    const int rank = static_cast<int>(r);
    const std::uint64_t node = s_.one_clock_a_node ? r / 8 : r;
    SyntheticClock clock;
    clock.offset = static_cast<scan::Nanoseconds>(
        (2 * noise_.uniform(node, 1, 71) - 1) * s_.clock_spread_s * 1e9 + 1.7e18);
    clock.drift = (2 * noise_.uniform(node, 2, 71) - 1) * s_.drift_ppm * 1e-6;
    out.truth.clocks.push_back(clock);
    scan::Rank made;
    made.rank = rank;
    made.data = s_.replica_of(rank);
    made.pipeline = s_.stage_of(rank);
    made.tensor = rank % s_.tp;
    if (s_.one_clock_a_node) made.clock = "node" + std::to_string(node);
    made.missing = missing[r] != 0;
    t.ranks.push_back(made);
    if (made.missing) continue;

    std::array<scan::TableIndex, streams> lanes{};
    lanes.fill(scan::none);
    const auto lane_of = [&](std::uint8_t stream) {
      if (lanes[stream] == scan::none) {
        lanes[stream] = static_cast<scan::TableIndex>(t.lanes.size());
        t.lanes.push_back({static_cast<scan::TableIndex>(r), rank % 8, 7 + stream,
                           scan::LaneKind::device, "stream " + std::to_string(7 + stream)});
      }
      return lanes[stream];
    };
    const auto host = static_cast<scan::TableIndex>(t.lanes.size());
    t.lanes.push_back({static_cast<scan::TableIndex>(r), 1000 + rank, 1000 + rank,
                       scan::LaneKind::host, "python"});
    const int to = r + 1 < n ? first_op_[r + 1] : static_cast<int>(ops_.size());
    double step_begin = -1, step_end = -1;
    int step = -1;
    const auto close_step = [&] {
      if (step < 0) return;
      scan::Event e;
      e.begin = clock.show(step_begin);
      e.end = clock.show(step_end);
      e.name = step_name;
      e.lane = host;
      e.step = step;
      e.kind = scan::EventKind::iteration;
      t.events.push_back(e);
    };
    for (int i = first_op_[r]; i < to; ++i) {
      const Op& op = ops_[static_cast<std::size_t>(i)];
      if (op.launch_end < 0) break;
      if (op.step != step) {
        close_step();
        step = op.step;
        step_begin = op.launch;
        step_end = op.launch_end;
      }
      step_end = std::max({step_end, op.launch_end, op.end});
      scan::Event launch;
      launch.begin = clock.show(op.launch);
      launch.end = clock.show(op.launch_end);
      launch.name = launch_name;
      launch.lane = host;
      launch.step = op.step;
      launch.kind = scan::EventKind::launch;
      const auto launched = static_cast<scan::TableIndex>(t.events.push_back(launch));
      // An operation whose inputs never came did not begin.
      if (op.waiting > 0) continue;
      scan::Event e;
      e.begin = clock.show(op.begin);
      e.end = clock.show(op.end < 0 ? dump : op.end);
      e.name = names[static_cast<std::size_t>(op.name)];
      e.lane = lane_of(op.stream);
      e.launch = launched;
      e.step = op.step;
      e.microbatch = s_.labelled ? op.microbatch : -1;
      e.kind = op.kind;
      const auto at = static_cast<scan::TableIndex>(t.events.push_back(e));
      if (op.instance == nothing) continue;
      const Instance& instance = instances_[static_cast<std::size_t>(op.instance)];
      scan::Communication c;
      c.group = groups[static_cast<std::size_t>(instance.group)];
      c.op = op.comm;
      c.bytes = static_cast<std::int64_t>(instance.bytes);
      c.dtype = dtype;
      if (s_.numbered) c.sequence = instance.sequence;
      if (op.comm == scan::CommunicationOp::send || op.comm == scan::CommunicationOp::recv) {
        const GroupInfo& pair = groups_[static_cast<std::size_t>(instance.group)];
        c.peer = pair.ranks[0] == rank ? pair.ranks[1] : pair.ranks[0];
      }
      t.attach(at, c);
    }
    close_step();
  }
  out.truth.faults = s_.faults;
  out.truth.step_ns = step_lengths();
  return out;
}

/// Mean step of the steps from `from` on, in ns.
[[nodiscard]] inline double mean_step(const JobSpec& spec, std::uint64_t seed, int from) {
  const std::vector<double> steps = JobReplay(spec, seed).step_lengths();
  double sum = 0;
  for (std::size_t s = static_cast<std::size_t>(from); s < steps.size(); ++s) sum += steps[s];
  return sum / static_cast<double>(steps.size() - static_cast<std::size_t>(from));
}

}  // namespace detail

/// The job as its ranks' files would show it.
[[nodiscard]] inline SyntheticJob generate(const JobSpec& spec, std::uint64_t seed) {
  return detail::JobReplay(spec, seed).emit();
}

/// How much longer the steps since `fault` began are with it alone than without any.
[[nodiscard]] inline double effect_of(JobSpec spec, const Fault& fault, std::uint64_t seed) {
  spec.faults.clear();
  const double healthy = detail::mean_step(spec, seed, fault.from_step);
  spec.faults.push_back(fault);
  return detail::mean_step(spec, seed, fault.from_step) / healthy;
}

/// A job of random shape, healthy or with one or two faults, each of which makes steps at least
/// `least` times longer. About one in four is healthy, and one in four has two faults.
[[nodiscard]] inline JobSpec draw_job(std::uint64_t seed, double least = 1.2) {
  const detail::Noise draw(seed ^ 0x5CA9'0000'0000ULL);
  std::uint64_t n = 0;
  const auto uniform = [&](double lo, double hi) {
    return lo + (hi - lo) * draw.uniform(n++, 0, 3);
  };
  const auto pick = [&](int lo, int hi) {
    return lo + static_cast<int>(draw.bits(n++, 0, 4) % static_cast<std::uint64_t>(hi - lo + 1));
  };
  JobSpec s;
  s.dp = pick(2, 8);
  s.tp = std::array{1, 1, 2, 4}[static_cast<std::size_t>(pick(0, 3))];
  s.pp = std::array{1, 2, 3, 4, 4, 6, 8}[static_cast<std::size_t>(pick(0, 6))];
  if (pick(0, 39) == 0) s.dp = 16, s.tp = 4, s.pp = 8;
  s.layers = pick(1, 3);
  s.microbatches = std::max(4, s.pp * pick(1, 2));
  s.steps = pick(4, 8);
  if (s.ranks() > 128) s.layers = 1, s.steps = 4, s.microbatches = s.pp;
  s.noise = uniform(0.01, 0.05);
  s.attention_us = uniform(300, 1500);
  s.mlp_us = uniform(300, 1500);
  s.tp_bytes = uniform(8e6, 40e6);
  s.pp_bytes = uniform(4e6, 20e6);
  s.dp_bytes = uniform(20e6, 120e6);
  s.sharded = pick(0, 1) == 0;
  s.labelled = pick(0, 2) != 0;
  s.numbered = pick(0, 3) != 0;
  s.one_clock_a_node = pick(0, 2) == 0;

  const int roll = pick(0, 3);
  const std::size_t wanted = roll == 0 ? 0 : roll == 3 ? 2 : 1;
  while (s.faults.size() < wanted) {
    Fault f;
    f.kind = static_cast<FaultKind>(pick(0, 6));
    f.rank = pick(0, s.ranks() - 1);
    f.variant = pick(0, 1) == 0;
    f.from_step = pick(0, 2) == 0 ? s.steps / 2 : 0;
    const int stage = s.stage_of(f.rank);
    double grow = 1.25, most = 10;
    switch (f.kind) {
      case FaultKind::slow_gpu: f.factor = uniform(1.3, 2.2); break;
      case FaultKind::slow_edge:
        if (s.pp == 1 || stage == s.pp - 1) continue;
        f.peer = f.rank + s.dp * s.tp;
        f.factor = uniform(3, 10), grow = 1.6, most = 500;
        break;
      case FaultKind::slow_links:
        // A rank in one group only cannot be told from the others of that group.
        if (s.pp == 1 && s.tp == 1) continue;
        f.factor = uniform(3, 10), grow = 1.6, most = 500;
        break;
      case FaultKind::stage_imbalance:
        if (s.pp == 1) continue;
        f.stage = stage, f.rank = -1, f.from_step = 0, f.factor = uniform(1.3, 2);
        break;
      case FaultKind::data_imbalance:
        f.rank = -1, f.from_step = 0, f.factor = uniform(0.3, 0.6), most = 1.2;
        break;
      case FaultKind::late_host: f.factor = uniform(3, 10), grow = 1.5, most = 3000; break;
      case FaultKind::hang:
        if (wanted > 1) continue;
        f.from_step = pick(1, s.steps - 1);
        break;
    }
    const auto meets = [](int a, const Fault& other) {
      return a >= 0 && (other.rank == a || other.peer == a);
    };
    const bool again = std::any_of(s.faults.begin(), s.faults.end(), [&](const Fault& other) {
      return meets(f.rank, other) || meets(f.peer, other) || (other.kind == f.kind && f.rank < 0);
    });
    if (again) continue;
    if (f.kind != FaultKind::hang) {
      while (f.factor < most && effect_of(s, f, seed) < least) f.factor *= grow;
      if (f.factor >= most) continue;
    }
    s.faults.push_back(f);
  }
  return s;
}

}  // namespace mega_test
