/// @file  CUDA graphs: the work that a stream was given, recorded once and launched by one call.
/// Plain C++: needs the CUDA headers, not nvcc.
#pragma once
#include <mega/core/replay.hpp>
#include <mega/cuda/check.hpp>
#include <mega/cuda/stream.hpp>

#include <cuda_runtime.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mega::inline v0::cuda {

/// An owned graph that can be launched. A launch runs after what the stream holds, and one launch
/// after the other. Destroyed while one runs, it goes when that is done. Move-only.
class ExecutableGraph {
 public:
  ExecutableGraph() noexcept = default;
  explicit ExecutableGraph(cudaGraph_t graph) {
    check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
  }
  ExecutableGraph(ExecutableGraph&& other) noexcept
      : graph_(std::exchange(other.graph_, nullptr)) {}
  ExecutableGraph& operator=(ExecutableGraph&& other) noexcept {
    std::swap(graph_, other.graph_);
    return *this;
  }
  ~ExecutableGraph() {
    if (graph_ != nullptr) (void)cudaGraphExecDestroy(graph_);
  }

  [[nodiscard]] explicit operator bool() const noexcept { return graph_ != nullptr; }

  /// @pre  there is a graph   @sync  ordered on stream
  void launch(Stream& stream) const {
    check(cudaGraphLaunch(graph_, stream.native()), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

/// An owned graph. Move-only.
class Graph {
 public:
  Graph() noexcept = default;
  explicit Graph(cudaGraph_t graph) noexcept : graph_(graph) {}
  Graph(Graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(graph_, other.graph_);
    return *this;
  }
  ~Graph() {
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
  }

  [[nodiscard]] cudaGraph_t native() const noexcept { return graph_; }
  /// Kernels, copies and fills.
  [[nodiscard]] std::size_t nodes() const {
    std::size_t count = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    return count;
  }
  /// @cost  grows with the nodes, and device memory for them
  [[nodiscard]] ExecutableGraph instantiate() const { return ExecutableGraph(graph_); }

 private:
  cudaGraph_t graph_ = nullptr;
};

/// While it lives, what the calling thread queues on the stream is recorded and does not run, and
/// so is what it queues on streams that wait for this one. Its end, by an exception too, ends the
/// recording on all of them.
///
/// The mode is that of the thread: a call that a graph cannot hold, such as an allocation, fails
/// here, where it would be wrong, while threads of other ranks, libraries and watchdogs go on with
/// theirs. The mode that asks the whole process would fail them, the relaxed one would let a
/// mistake of this thread pass.
class Capture {
 public:
  explicit Capture(Stream& stream) : stream_(stream) {
    check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() {
    if (ended_) return;
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(stream_.native(), &graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();  // whoever left early says why
  }

  /// What was recorded. @pre  not called before; all other streams were joined again
  [[nodiscard]] Graph end() {
    ended_ = true;
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(stream_.native(), &graph);
    Graph out(graph);
    check(status, "cudaStreamEndCapture");
    return out;
  }

 private:
  Stream& stream_;
  bool ended_ = false;
};

/// The graph of what body() queues on the stream, which is not run.
/// @pre  body() was run before: first uses allocate, load code and build plans
template <std::invocable Body>
[[nodiscard]] Graph capture(Stream& stream, const Body& body) {
  Capture capture(stream);
  body();
  return capture.end();
}

/// Replays of Cuda, see core/replay.hpp: a place is run by its body under a new revision, or after
/// the scratch of one of its streams has moved; then it is captured and launched; from then on it
/// is launched.
/// @cost  one executable graph a place, whose device memory CUDA takes beside what is planned
class GraphReplays {
 public:
  template <std::invocable Body, std::same_as<Stream>... Others>
  void run(std::size_t place, std::uint64_t revision, const Body& body, Stream& stream,
           const Others&... others) {
    if (place >= places_.size()) places_.resize(place + 1);
    Place& at = places_[place];
    const auto bindings = [&] {
      // Neither number ever falls, so the sum stands still only if all of them do.
      return Bindings{revision, (stream.scratch_revision() + ... + others.scratch_revision())};
    };
    if (!at.was_run || at.bindings != bindings()) {
      at = {};
      body();
      at.bindings = bindings();
      at.was_run = true;
      return;
    }
    if (!at.graph) {
      const Graph graph = capture(stream, body);
      nodes_ += graph.nodes();
      at.graph = graph.instantiate();
    }
    at.graph.launch(stream);
  }

  void clear() noexcept { places_.clear(); }

  /// Graphs that are kept.
  [[nodiscard]] std::size_t size() const noexcept {
    std::size_t count = 0;
    for (const Place& at : places_) count += at.graph ? 1 : 0;
    return count;
  }
  /// Nodes of all graphs that were ever made.
  [[nodiscard]] std::size_t nodes() const noexcept { return nodes_; }

 private:
  struct Bindings {
    std::uint64_t revision = 0, scratch = 0;
    friend bool operator==(const Bindings&, const Bindings&) = default;
  };
  struct Place {
    Bindings bindings;
    bool was_run = false;
    ExecutableGraph graph;
  };

  std::vector<Place> places_;
  std::size_t nodes_ = 0;
};

static_assert(replays_of<GraphReplays, Stream>);

}  // namespace mega::inline v0::cuda
