// Five bugs that real trainers had, built on purpose through the library's extension points: the
// grid's comparison must notice each. Numbers are issues of the projects that had them.
#include "transformer_run.hpp"
#include <mega/comm/concepts.hpp>
#include <mega/nn/gpt3.hpp>
#include <mega/nn/llama3.hpp>
#include <mega/train/gradient_reducer.hpp>

#include <doctest/doctest.h>

#include <span>
#include <type_traits>
#include <utility>
#include <vector>

using namespace grid;
using mega::Vector;
using mega::nn::Gpt3;
using mega::nn::Recompute;

namespace {

const auto on_host = [](int) { return mega::Host{}; };

/// Megatron-LM 844: tied gradients meet after the data-parallel reduction has cut them in pieces.
template <class Device, class Comm, class Store>
class TiesAfterReduction : public mega::train::GradientReducer<Device, Comm, Store> {
  using Base = mega::train::GradientReducer<Device, Comm, Store>;

 public:
  using Base::Base;
  template <class S>
  void tied_reduce(S&) {
    tied_ = true;
  }
  template <class S>
  void reduce(S& compute, int chunk) {
    Base::reduce(compute, chunk);
    if (std::exchange(tied_, false)) Base::tied_reduce(compute);
  }

 private:
  bool tied_ = false;
};

/// Megatron-LM 1446: gradients of norms under sequence parallelism stay partial.
template <class Device, class Comm, class Store>
class ForgetsPartialSums : public mega::train::GradientReducer<Device, Comm, Store> {
  using Base = mega::train::GradientReducer<Device, Comm, Store>;

 public:
  ForgetsPartialSums(Device& device, Store& store, mega::train::Groups<Comm>& groups,
                     typename Device::stream_type& transfer)
      : Base(device, store, groups, transfer),
        store_(store),
        groups_(groups),
        transfer_(transfer) {}
  template <class S>
  void reduce(S&, int chunk) {
    const auto& region = store_.table().regions()[static_cast<std::size_t>(chunk)];
    groups_.data.all_reduce(transfer_, store_.gradients().slice(region.begin, region.size()),
                            mega::comm::Reduce::sum);
  }

 private:
  Store& store_;
  mega::train::Groups<Comm>& groups_;
  typename Device::stream_type& transfer_;
};

/// torchtitan 596: each pipeline stage clips by its own norm. The sums of squares are the only
/// doubles that the ranks add up.
class KeepsNormsToItself : public mega::comm::ThreadComm {
 public:
  explicit KeepsNormsToItself(mega::comm::ThreadComm&& base) : ThreadComm(std::move(base)) {}
  [[nodiscard]] KeepsNormsToItself split(int color, int key) {
    return KeepsNormsToItself(ThreadComm::split(color, key));
  }
  template <class S, class T>
  void all_reduce(S& stream, Vector<T> inout, mega::comm::Reduce op) {
    if constexpr (!std::is_same_v<T, double>) ThreadComm::all_reduce(stream, inout, op);
  }
};

/// llm.c 412: a micro-batch overwrites the gradient of the ones before it.
template <class Spec, class Comm>
class OverwritesGradients : public mega::nn::Transformer<Spec, Comm> {
  using Base = mega::nn::Transformer<Spec, Comm>;

 public:
  using Base::Base;
  void bind(std::span<const mega::ParameterView<float>> views) {
    views_.assign(views.begin(), views.end());
    Base::bind(views);
  }
  template <class Ctx>
  void backward(Ctx& ctx, Matrix<const float> dout, Matrix<float> din,
                typename Base::saved_type& saved) {
    // All but the head's, which loss() has already added to.
    for (std::size_t i = 0; i + 1 < views_.size(); ++i) fill_zero(ctx.stream, views_[i].gradient);
    Base::backward(ctx, dout, din, saved);
  }

 private:
  std::vector<mega::ParameterView<float>> views_;
};

template <template <class, class, class> class Reducer>
struct WithReducer : Plan<Gpt3, mega::Host> {
  template <class Device, class Comm, class Store>
  using reducer = Reducer<Device, Comm, Store>;
};
struct WithOwnNorms : mega::DefaultPlan {
  using communicator = KeepsNormsToItself;
  using stage = mega::nn::Transformer<Gpt3, communicator>;
};
struct WithOverwriting : mega::DefaultPlan {
  using communicator = mega::comm::ThreadComm;
  using stage = OverwritesGradients<Gpt3, communicator>;
};

}  // namespace

TEST_CASE("grid: notices tied gradients that meet after the sharded reduction") {
  const Layout layout{.mesh = {.data = 2, .pipeline = 2}, .shard_optimizer = true};
  const Outcome one = run_host<Gpt3>(gpt(), {});
  CHECK(difference(run_host<Gpt3>(gpt(), layout), one) == "");
  CHECK(difference(run<WithReducer<TiesAfterReduction>>(gpt(), layout, on_host), one) != "");
}

TEST_CASE("grid: notices norm gradients left partial under sequence parallelism") {
  const Layout layout{.mesh = {.tensor = 2}, .sequence_parallel = true};
  const Outcome one = run_host<Gpt3>(gpt(), {});
  CHECK(difference(run<WithReducer<ForgetsPartialSums>>(gpt(), layout, on_host), one) != "");
  // Without rows divided among ranks the same code is right: it is this rule that is missing.
  CHECK(
      difference(run<WithReducer<ForgetsPartialSums>>(gpt(false), {.mesh = {.tensor = 2}}, on_host),
                 run_host<Gpt3>(gpt(false), {})) == "");
}

TEST_CASE(
    "grid: notices padded vocabulary rows that take part in the soft-max (Megatron-LM 1754)") {
  Model padded = gpt();
  padded.config.vocab = 30;  // what 29 is padded to at tp 2, taken for real
  const Outcome one = run_host<Gpt3>(gpt(), {});
  Outcome wrong = run_host<Gpt3>(padded, {.mesh = {.tensor = 2}});
  for (Tensors* t :
       {&wrong.first_gradients, &wrong.values, &wrong.first_moments, &wrong.second_moments}) {
    t->at("embedding.token.weight").resize(one.values.at("embedding.token.weight").size());
  }
  CHECK(difference(wrong, one) != "");
  CHECK(difference(run_host<Gpt3>(gpt(), {.mesh = {.tensor = 2}}), one) == "");
}

TEST_CASE("grid: notices clipping by the norm of a stage") {
  const Outcome one = run_host<Gpt3>(gpt(), {});
  CHECK(one.norms[0] > 0.5);  // clipped
  Outcome wrong = run<WithOwnNorms>(gpt(), {.mesh = {.pipeline = 2}}, on_host);
  // The losses are not shared either; only what is trained counts here.
  wrong.losses = one.losses;
  wrong.norms = one.norms;
  CHECK(difference(wrong, one) != "");
}

TEST_CASE("grid: notices micro-batches that overwrite each other's gradients") {
  const Outcome one = run_host<Gpt3>(gpt(), {});
  CHECK(difference(run<WithOverwriting>(gpt(), {}, on_host), one) != "");
  Model single = gpt();
  single.global_microbatches = 1;
  CHECK(difference(run<WithOverwriting>(single, {}, on_host), run_host<Gpt3>(single, {})) == "");
}
