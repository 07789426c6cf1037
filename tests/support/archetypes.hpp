/// @file  Minimal models of the library's concepts: they have what a concept asks and nothing more,
/// so that a template compiled with them cannot lean on more. The device stands for a GPU: its
/// streams are handles that run no host code, and its operations are overloads beside them.
#pragma once
#include <mega/comm/concepts.hpp>
#include <mega/core/context.hpp>
#include <mega/core/device.hpp>
#include <mega/core/hooks.hpp>
#include <mega/core/stage.hpp>
#include <mega/core/view.hpp>
#include <mega/optim/adamw.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace mega_test::archetype {

using mega::Index;
using mega::Matrix;
using mega::Vector;
using mega::View;

struct Event {
  Event() = default;
  Event(Event&&) = default;
  Event& operator=(Event&&) = default;
};

/// Cannot run callables: what works on it works by overloads for its type alone.
struct Stream {
  using event_type = Event;
  Stream() = default;
  Stream(Stream&&) = default;
  Stream& operator=(Stream&&) = default;
  void record(Event&) {}
  void wait(const Event&) {}
  void synchronize() {}
};

template <class T, int R>
void copy(Stream&, View<T, R>, View<const T, R>) {}
template <class T, int R>
void fill_zero(Stream&, View<T, R>) {}
template <class T, int R>
void upload(Stream&, View<T, R>, View<const std::type_identity_t<T>, R>) {}
template <class T, int R>
void download(Stream&, View<T, R>, View<const std::type_identity_t<T>, R>) {}
inline void assign(Stream&, Vector<mega::optim::StepInputs>, const mega::optim::StepInputs&) {}
inline void reciprocal(Stream&, Vector<float>, Vector<const std::int64_t>) {}
inline void accumulate(Stream&, Vector<float>, Vector<const float>) {}
inline void to_storage(Stream&, Vector<float>, Vector<const float>) {}
inline void initialise_values(Stream&, Vector<float>, const mega::Parameter&, std::uint64_t, int,
                              int) {}
inline void sums_of_squares(Stream&, Vector<double>, Vector<const float>,
                            Vector<const mega::optim::SquareRange>) {}
inline void clip_by_norm(Stream&, Vector<mega::optim::UpdateControl>, Vector<const double>,
                         double) {}
inline void correct_bias(Stream&, Vector<mega::optim::UpdateControl>,
                         Vector<const mega::optim::StepInputs>, mega::optim::AdamWOptions) {}
inline void adamw_update(Stream&, Vector<float>, Vector<float>, Vector<float>, Vector<const float>,
                         Vector<const mega::optim::Segment>,
                         Vector<const mega::optim::UpdateControl>, mega::optim::AdamWOptions) {}

struct Memory {
  Memory() = default;
  Memory(Memory&&) = default;
  Memory& operator=(Memory&&) = default;
  [[nodiscard]] std::byte* data() const { return nullptr; }
  [[nodiscard]] std::size_t bytes() const { return 0; }
};

struct Device {
  using stream_type = Stream;
  using memory_type = Memory;
  [[nodiscard]] Stream make_stream(const char*) { return {}; }
  [[nodiscard]] Event make_event() { return {}; }
  [[nodiscard]] Memory allocate(std::size_t) { return {}; }
};
static_assert(mega::device_policy<Device>);

struct Sender {
  void send(Stream&, Vector<const std::byte>) {}
};
struct Receiver {
  void post(Stream&, Vector<std::byte>) {}
  void complete(Stream&) {}
};

struct Communicator {
  using sender = Sender;
  using receiver = Receiver;
  Communicator() = default;
  Communicator(Communicator&&) = default;
  Communicator& operator=(Communicator&&) = default;
  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 1; }
  [[nodiscard]] Communicator split(int, int) { return {}; }
  void barrier(Stream&) {}
  template <mega::comm::element T>
  void all_reduce(Stream&, Vector<T>, mega::comm::Reduce) {}
  void reduce_scatter(Stream&, Vector<float>, Vector<const float>, mega::comm::Reduce) {}
  void all_gather(Stream&, Vector<float>, Vector<const float>) {}
  void broadcast(Stream&, Vector<float>, int) {}
  void all_to_all(Stream&, Vector<float>, Vector<const float>) {}
  [[nodiscard]] Sender open_sender(int, std::uint32_t) { return {}; }
  [[nodiscard]] Receiver open_receiver(int, std::uint32_t) { return {}; }
};
static_assert(mega::comm::communicator<Communicator, Stream>);

struct Recorder {
  struct Token {};
  Token begin(Stream&, const mega::SpanInfo&) noexcept { return {}; }
  void end(Stream&, Token) noexcept {}
};
static_assert(mega::event_recorder<Recorder, Stream>);

/// Tokens in, a cube between chunks, classes as targets: three different ranks and element types.
struct Stage {
  using input_type = View<const std::int32_t, 1>;
  using target_type = View<const std::int64_t, 2>;
  using edge_type = View<float, 3>;
  struct saved_type {};
  using const_edge = View<const float, 3>;

  [[nodiscard]] std::array<Index, 1> input_extents() const { return {1}; }
  [[nodiscard]] std::array<Index, 2> target_extents() const { return {1, 1}; }
  [[nodiscard]] std::array<Index, 3> edge_extents() const { return {1, 1, 1}; }
  [[nodiscard]] saved_type make_saved(mega::Arena&) const { return {}; }
  [[nodiscard]] std::size_t workspace_bytes() const { return 0; }
  [[nodiscard]] std::vector<mega::Parameter> parameters() const { return {}; }
  void bind(std::span<const mega::ParameterView<float>>) {}
  template <class Ctx>
  void forward(Ctx&, input_type, edge_type, saved_type&) {}
  template <class Ctx>
  void forward(Ctx&, const_edge, edge_type, saved_type&) {}
  template <class Ctx>
  void backward_input(Ctx&, const_edge, edge_type, saved_type&) {}
  template <class Ctx>
  void backward_weight(Ctx&, saved_type&) {}
  template <class Ctx>
  void loss(Ctx&, edge_type, target_type) {}
};

struct Batch {
  [[nodiscard]] int microbatches() const { return 1; }
  [[nodiscard]] Stage::input_type input(int) const { return {&token, 1}; }
  [[nodiscard]] Stage::target_type target(int) const { return {&wanted, 1, 1}; }
  [[nodiscard]] Index first_sample(int) const { return 0; }
  [[nodiscard]] std::int64_t valid_targets() const { return 1; }
  std::int32_t token = 0;
  std::int64_t wanted = 0;
};

}  // namespace mega_test::archetype
