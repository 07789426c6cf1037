/// @file  Transformer<Spec>: a decoder-only Transformer as a family of stages, tensor-parallel,
/// with sequence parallelism and recomputation. Specifications: nn/gpt3.hpp, nn/llama3.hpp.
#pragma once
#include <mega/core/arena.hpp>
#include <mega/core/context.hpp>
#include <mega/core/error.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/stage.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/kernels.hpp>
#include <mega/nn/lm_head.hpp>
#include <mega/nn/residual_block.hpp>
#include <mega/nn/tensor_parallel.hpp>
#include <mega/nn/token_embedding.hpp>
#include <mega/nn/transformer_config.hpp>
#include <mega/nn/transformer_layer.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace mega::inline v0::nn {

/// What a specification names: the kinds of which the model is made.
template <class S>
concept transformer_spec = requires {
  { S::name } -> std::convertible_to<std::string_view>;
  { S::has_bias } -> std::convertible_to<bool>;
  typename S::norm;
  typename S::position;
  typename S::activation;
};

/// Layers [begin, end) of the model, as dpp/layers.hpp deals them.
template <class R>
concept layer_range = requires(const R& range) {
  { range.begin } -> std::convertible_to<int>;
  { range.end } -> std::convertible_to<int>;
};

/// One chunk of a pre-norm decoder: the layers of its range; on the first chunk also the embedding,
/// on the last one the final norm and the head. The edge is the residual stream, [rows, hidden] or,
/// under sequence parallelism, this tensor rank's rows of it. On the last chunk, out is normed, and
/// loss() holds the head.
///
/// Operations are found by the type of the stream: those of the host are in this module, those of
/// another device in the namespace of its stream. `Compute` says what numbers are stored as, who
/// multiplies and who attends; see kernels.hpp.
/// A step allocates nothing, reads no device memory on the host and calls nothing virtual.
/// @determinism  every Recompute, every cut into chunks and fused or split backward give equal
///               bits; sequence parallelism gives those of the same tensor degree in forward
template <transformer_spec Spec, class TensorComm, kernels Compute = Kernels<>>
class Transformer {
  using T = typename Compute::element;
  using Norm = typename Spec::norm;
  using Layer = TransformerLayer<Spec, Compute>;
  using Region = TensorRegion<TensorComm>;

 public:
  using spec_type = Spec;
  using input_type = Matrix<const std::int32_t>;   ///< tokens [micro_batch, sequence]
  using target_type = Matrix<const std::int32_t>;  ///< the token to predict; negative: none
  using edge_type = Matrix<T>;
  using value_type = T;  ///< of the parameters

  struct saved_type {
    Matrix<const std::int32_t> tokens;          ///< on the first chunk
    Matrix<const T> in;                         ///< on the others
    std::vector<Matrix<T>> boundaries;          ///< residual stream before and after each layer
    std::vector<typename Layer::Saved> layers;  ///< empty under full recomputation
    std::vector<typename Layer::Gradients> gradients;  ///< of a split backward
    typename Norm::Saved final_norm;
  };

  /// @param layers  of this chunk: split_layers(config.layers, at.stages).of_stage(at.stage)
  /// @param tensor  the ranks that divide each layer; outlives the stage
  /// @throws Error usage where the sizes do not fit each other or the layout; see validate()
  Transformer(const TransformerConfig& config, const TransformerRun& run, StagePosition at,
              const layer_range auto& layers, TensorComm& tensor)
      : config_(config),
        run_(checked(config, run, at, layers.begin, layers.end, tensor.size())),
        at_(at),
        region_(tensor, run.rows(), run.sequence_parallel),
        embedding_(config, run, tensor.rank(), tensor.size()),
        head_(config, run, tensor.rank(), tensor.size()) {
    for (int layer = layers.begin; layer < layers.end; ++layer)
      layers_.emplace_back(config, run, tensor.rank(), tensor.size(), layer);
  }

  [[nodiscard]] const TransformerConfig& config() const noexcept { return config_; }
  [[nodiscard]] const TransformerRun& run() const noexcept { return run_; }

  [[nodiscard]] std::array<Index, 2> input_extents() const noexcept {
    return {run_.micro_batch, run_.sequence};
  }
  [[nodiscard]] std::array<Index, 2> target_extents() const noexcept { return input_extents(); }
  [[nodiscard]] std::array<Index, 2> edge_extents() const noexcept {
    return {region_.own_rows(), config_.hidden};
  }

  [[nodiscard]] std::vector<Parameter> parameters() const {
    std::vector<Parameter> out;
    for_each_parameter(*this, [&](Parameter p, const auto&) { out.push_back(std::move(p)); });
    return out;
  }

  /// @pre  one view for each of parameters(), in this order
  void bind(std::span<const ParameterView<T>> views) {
    std::size_t next = 0;
    for_each_parameter(*this, [&](const Parameter& p, ParameterView<T>& view) {
      expects(next < views.size() && views[next].value.size() == local_size(p, region_.degree()),
              ErrorCode::logic,
              [&] { return sentence("no view of the right size for parameter '", p.name, "'"); });
      view = views[next++];
    });
  }

  [[nodiscard]] saved_type make_saved(Arena& arena) const {
    saved_type saved;
    const std::size_t count = layers_.size();
    for (std::size_t k = 0; k <= count; ++k) {
      // The input of a later chunk stays in its slot, the output of an earlier one goes on.
      const bool kept = (k > 0 || at_.first()) && (k < count || at_.last());
      saved.boundaries.push_back(kept ? arena.take<T>(region_.own_rows(), config_.hidden)
                                      : Matrix<T>{});
    }
    for (const Layer& layer : layers_) {
      if (run_.recompute != Recompute::full)
        saved.layers.push_back(layer.make_saved(arena, region_, config_.hidden, selective()));
      if (run_.split_backward)
        saved.gradients.push_back(layer.make_gradients(arena, region_, true));
    }
    if (at_.last()) saved.final_norm = Norm::make_saved(arena, region_.own_rows());
    return saved;
  }

  [[nodiscard]] std::size_t workspace_bytes() const {
    Arena counting;
    (void)make_workspace(counting, Call::forward);
    counting.rewind();
    (void)make_workspace(counting, Call::backward);
    counting.rewind();
    if (at_.last()) {
      (void)head_.make_scratch(counting, region_, true);
      counting.rewind();
      (void)head_.make_scratch(counting, region_, false);
    }
    return counting.peak();
  }

  /// On the first chunk.
  template <class Ctx>
  void forward(Ctx& ctx, input_type tokens, edge_type out, saved_type& saved) {
    const Workspace work = begin(ctx, Call::forward);
    saved.tokens = tokens;
    const Matrix<T> embedded = boundary(saved, 0, out);
    embedding_.forward(ctx, region_, embedded, tokens, work.scratch.partial);
    run_layers(ctx, embedded, out, saved, work);
  }

  /// On the other chunks.
  template <class Ctx>
  void forward(Ctx& ctx, Matrix<const T> in, edge_type out, saved_type& saved) {
    const Workspace work = begin(ctx, Call::forward);
    saved.in = in;
    run_layers(ctx, in, out, saved, work);
  }

  /// Both halves at once: one layer's gradients exist at a time and, under full recomputation, one
  /// layer's activations.
  template <class Ctx>
  void backward(Ctx& ctx, Matrix<const T> dout, edge_type din, saved_type& saved) {
    const Workspace work = begin(ctx, Call::backward);
    const Matrix<T> dx = at_.first() ? work.dx : din;
    Matrix<const T> dy = final_norm_backward(ctx, dout, dx, saved);
    for (std::size_t l = layers_.size(); l-- > 0;) {
      const Layer& layer = layers_[l];
      const bool again = run_.recompute == Recompute::full;
      const typename Layer::Saved& kept = again ? work.layer : saved.layers[l];
      if (again) layer.recompute(ctx, region_, layer_input(saved, l), kept, work.scratch);
      // A schedule that splits some backwards may leave others whole.
      layer.backward(ctx, region_, of_layer(l, dy, dx, saved), kept,
                     run_.split_backward ? saved.gradients[l] : work.gradients, work.scratch);
      dy = dx;
    }
    embedding_backward(ctx, dy, dx, saved, work);
  }

  /// The gradients of vectors, norms and embedding tables come with this half, those of matrices
  /// inside the layers with backward_weight().
  template <class Ctx>
  void backward_input(Ctx& ctx, Matrix<const T> dout, edge_type din, saved_type& saved) {
    expects_split();
    const Workspace work = begin(ctx, Call::backward);
    const Matrix<T> dx = at_.first() ? work.dx : din;
    Matrix<const T> dy = final_norm_backward(ctx, dout, dx, saved);
    for (std::size_t l = layers_.size(); l-- > 0;) {
      layers_[l].backward_input(ctx, region_, of_layer(l, dy, dx, saved), saved.layers[l],
                                saved.gradients[l], work.scratch);
      dy = dx;
    }
    embedding_backward(ctx, dy, dx, saved, work);
  }

  template <class Ctx>
  void backward_weight(Ctx& ctx, saved_type& saved) {
    expects_split();
    const Workspace work = begin(ctx, Call::backward);
    for (std::size_t l = layers_.size(); l-- > 0;)
      layers_[l].backward_weight(ctx, region_, layer_input(saved, l), saved.layers[l],
                                 saved.gradients[l], work.scratch);
  }

  /// On the last chunk; the head's weight gets its gradient here.
  template <class Ctx>
  void loss(Ctx& ctx, edge_type out_then_dout, target_type targets) {
    head_.loss(ctx, region_, out_then_dout, targets);
  }

  /// On the last chunk: out [rows, vocab] from `hidden`, what forward() gave, or any number of its
  /// rows unless rows are divided. Collective over the tensor ranks.
  template <class Ctx>
  void logits(Ctx& ctx, Matrix<const T> hidden, Matrix<T> out) {
    head_.logits(ctx, region_, hidden, out);
  }

 private:
  enum class Call : std::uint8_t { forward, backward };

  struct Workspace {
    BlockScratch<T> scratch;
    typename Layer::Saved layer;          ///< full recomputation
    typename Layer::Gradients gradients;  ///< fused backward
    Matrix<T> dx;                         ///< of the residual stream, on the first chunk
  };

  [[nodiscard]] static const TransformerRun& checked(const TransformerConfig& config,
                                                     const TransformerRun& run, StagePosition at,
                                                     int begin, int end, int tensor_degree) {
    validate<Spec>(config, run, tensor_degree, at.stages);
    const bool is_end = at.first() || at.last();
    expects(begin >= 0 && end <= config.layers && begin + (is_end ? 0 : 1) <= end, ErrorCode::usage,
            [&] {
              return sentence("stage ", at.stage, " of ", at.stages, " cannot hold layers [", begin,
                              ", ", end, ") of ", config.layers);
            });
    return run;
  }

  /// The chunk's parameters, in the order of the model.
  template <class Self, class Visit>
  static void for_each_parameter(Self& self, const Visit& visit) {
    const TransformerConfig& config = self.config_;
    const bool partial = self.region_.divides_rows();
    if (self.at_.first())
      TokenEmbedding<Spec, T>::for_each_parameter(self.embedding_, config, partial, visit);
    for (auto& layer : self.layers_) Layer::for_each_parameter(layer, config, partial, visit);
    if (!self.at_.last()) return;
    visit(replicated_vector("final_norm.weight", config.hidden, {Init::Kind::ones}, partial),
          self.final_norm_.weight);
    if constexpr (Norm::has_bias)
      visit(replicated_vector("final_norm.bias", config.hidden, {}, partial),
            self.final_norm_.bias);
    LmHead<Spec, Compute>::for_each_parameter(self.head_, config, partial, visit);
  }

  [[nodiscard]] bool selective() const noexcept { return run_.recompute == Recompute::selective; }

  [[nodiscard]] Workspace make_workspace(Arena& arena, Call call) const {
    Workspace work;
    BlockScratch<T>& scratch = work.scratch;
    scratch.frequencies = arena.take<float>(Spec::position::frequencies(config_));
    scratch.partial = arena.take<T>(region_.rows(), config_.hidden);
    if (region_.divides_rows() || selective())
      scratch.normed = arena.take<T>(region_.rows(), config_.hidden);
    if (!layers_.empty()) {
      const Layer& layer = layers_.front();
      if (selective()) scratch.core_out = arena.take<T>(region_.rows(), layer.recomputable_width());
      if (run_.recompute == Recompute::full)
        work.layer = layer.make_saved(arena, region_, config_.hidden, false);
      if (call == Call::backward) {
        scratch.dcore_out = arena.take<T>(region_.rows(), layer.core_width());
        if (!run_.split_backward) work.gradients = layer.make_gradients(arena, region_, false);
      }
    }
    if (call == Call::backward && at_.first())
      work.dx = arena.take<T>(region_.own_rows(), config_.hidden);
    return work;
  }

  template <class Ctx>
  [[nodiscard]] Workspace begin(Ctx& ctx, Call call) const {
    const Workspace work = make_workspace(ctx.arena, call);
    Spec::position::prepare(ctx.stream, work.scratch.frequencies, config_.rope);
    return work;
  }

  /// Where the residual stream behind k layers goes.
  [[nodiscard]] Matrix<T> boundary(const saved_type& saved, std::size_t k,
                                   Matrix<T> out) const noexcept {
    return k == layers_.size() && !at_.last() ? out : saved.boundaries[k];
  }
  [[nodiscard]] Matrix<const T> layer_input(const saved_type& saved, std::size_t l) const noexcept {
    return l == 0 && !at_.first() ? saved.in : saved.boundaries[l];
  }

  /// What backward of layer l takes and gives.
  [[nodiscard]] typename Layer::Backward of_layer(std::size_t l, Matrix<const T> dy, Matrix<T> dx,
                                                  const saved_type& saved) const noexcept {
    // Behind each layer stands a norm of this chunk, except where another chunk follows.
    const bool behind_norm = l + 1 < layers_.size() || at_.last();
    return {dy, dx, layer_input(saved, l), behind_norm, passing_gradient(l)};
  }
  /// Of the layer before `l`, if this chunk has one.
  [[nodiscard]] Vector<float> passing_gradient(std::size_t l) const noexcept {
    return l == 0 ? Vector<float>{} : layers_[l - 1].passing_gradient();
  }

  template <class Ctx>
  void run_layers(Ctx& ctx, Matrix<const T> x, Matrix<T> out, const saved_type& saved,
                  const Workspace& work) const {
    const auto saved_of = [&](std::size_t l) -> const typename Layer::Saved& {
      return run_.recompute == Recompute::full ? work.layer : saved.layers[l];
    };
    const std::size_t count = layers_.size();
    if (count > 0) layers_[0].enter(ctx, region_, x, saved_of(0), work.scratch);
    for (std::size_t l = 0; l < count; ++l) {
      typename Layer::Entry next;
      if (l + 1 < count) {
        next = layers_[l + 1].entry(region_, saved_of(l + 1), work.scratch);
      } else if (at_.last()) {
        next = {&final_norm_, saved.final_norm, out, config_.norm_epsilon};
      }
      const Matrix<T> y = boundary(saved, l + 1, out);
      layers_[l].forward(ctx, region_, x, y, saved_of(l), work.scratch, Pass::first,
                         next.weights == nullptr ? nullptr : &next);
      x = y;
    }
    if (count > 0 || !at_.last()) return;
    const auto span = ctx.span("final_norm");
    Norm::forward(ctx.stream, out, saved.final_norm, x, final_norm_, config_.norm_epsilon);
  }

  /// The gradient behind the layers: dout itself on all but the last chunk.
  template <class Ctx>
  [[nodiscard]] Matrix<const T> final_norm_backward(Ctx& ctx, Matrix<const T> dout, Matrix<T> dx,
                                                    const saved_type& saved) const {
    if (!at_.last()) return dout;
    const auto span = ctx.span("final_norm");
    Norm::backward(ctx.stream, dx, final_norm_, Matrix<const T>{}, dout,
                   layer_input(saved, layers_.size()), saved.final_norm,
                   passing_gradient(layers_.size()));
    return dx;
  }

  template <class Ctx>
  void embedding_backward(Ctx& ctx, Matrix<const T> dy, Matrix<T> dx, const saved_type& saved,
                          const Workspace& work) const {
    if (!at_.first()) return;
    // A chunk of the embedding alone has not written dx.
    if (layers_.empty() && !at_.last()) copy(ctx.stream, dx, dy);
    embedding_.backward(ctx, region_, dx, saved.tokens, work.scratch.partial);
  }

  void expects_split() const {
    expects(run_.split_backward, ErrorCode::usage,
            "the schedule splits the backward, but the model was laid out for a fused one; set "
            "TransformerRun::split_backward");
  }

  TransformerConfig config_;
  TransformerRun run_;
  StagePosition at_;
  Region region_;
  TokenEmbedding<Spec, T> embedding_;
  std::vector<Layer> layers_;
  NormWeights<T> final_norm_;
  LmHead<Spec, Compute> head_;
};

}  // namespace mega::inline v0::nn
