/// @file  Causal attention in bf16 through cuDNN's graph C API. Opt-in: needs the CUDA and cuDNN
/// headers, and cuDNN to link. Plain C++, no nvcc.
/// Source: the operation pattern that cuDNN's developer guide documents for flash attention.
#pragma once
#include <mega/core/bfloat16.hpp>
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/stream.hpp>
#include <mega/nn/attention.hpp>
#include <mega/nn/attention_shape.hpp>
#include <mega/nn/detail/shape.hpp>

#include <cudnn_graph.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace mega::inline v0::nn {

namespace detail {

inline std::string cudnn_version_name() {
  const std::size_t v = cudnnGetVersion();
  return sentence(v / 10000, ".", v / 100 % 100, ".", v % 100);
}

/// What the library says about the last call that failed on this thread.
inline std::string cudnn_last_error(cudnnStatus_t status) {
  char message[1024] = "";
  cudnnGetLastErrorString(message, sizeof message);
  return sentence(cudnnGetErrorString(status), ", ", std::string_view(message));
}

inline void check_cudnn(cudnnStatus_t status, std::string_view call,
                        SourceLocation at = SourceLocation::current()) {
  if (status == CUDNN_STATUS_SUCCESS) [[likely]]
    return;
  throw Error(ErrorCode::device,
              sentence(call, " failed with ", std::string_view(cudnn_last_error(status)), ", at ",
                       at.file_name(), ":", at.line()),
              at);
}

class CudnnHandle {
 public:
  CudnnHandle() { check_cudnn(cudnnCreate(&handle_), "cudnnCreate"); }
  CudnnHandle(const CudnnHandle&) = delete;
  CudnnHandle& operator=(const CudnnHandle&) = delete;
  ~CudnnHandle() { (void)cudnnDestroy(handle_); }

  [[nodiscard]] cudnnHandle_t native() const noexcept { return handle_; }

 private:
  cudnnHandle_t handle_ = nullptr;
};

/// Tag by which the graph API is told the type of an attribute's value; other types have none.
template <class T>
inline constexpr auto cudnn_type = nullptr;
template <>
inline constexpr auto cudnn_type<bool> = CUDNN_TYPE_BOOLEAN;
template <>
inline constexpr auto cudnn_type<float> = CUDNN_TYPE_FLOAT;
template <>
inline constexpr auto cudnn_type<std::int64_t> = CUDNN_TYPE_INT64;
template <>
inline constexpr auto cudnn_type<cudnnDataType_t> = CUDNN_TYPE_DATA_TYPE;
template <>
inline constexpr auto cudnn_type<cudnnPointwiseMode_t> = CUDNN_TYPE_POINTWISE_MODE;
template <>
inline constexpr auto cudnn_type<cudnnReduceTensorOp_t> = CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
template <>
inline constexpr auto cudnn_type<cudnnBackendHeurMode_t> = CUDNN_TYPE_HEUR_MODE;
template <>
inline constexpr auto cudnn_type<cudnnHandle_t> = CUDNN_TYPE_HANDLE;
template <>
inline constexpr auto cudnn_type<cudnnBackendDescriptor_t> = CUDNN_TYPE_BACKEND_DESCRIPTOR;

/// An object of the graph API: made, given its attributes, finalized, then read only.
class CudnnDescriptor {
 public:
  /// @param name  a literal: what an error calls it
  CudnnDescriptor(cudnnBackendDescriptorType_t type, std::string_view name) : name_(name) {
    check(cudnnBackendCreateDescriptor(type, &native_), "creating");
  }
  CudnnDescriptor(CudnnDescriptor&& other) noexcept
      : native_(std::exchange(other.native_, nullptr)), name_(other.name_) {}
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept {
    std::swap(native_, other.native_);
    std::swap(name_, other.name_);
    return *this;
  }
  ~CudnnDescriptor() {
    if (native_ != nullptr) (void)cudnnBackendDestroyDescriptor(native_);
  }

  [[nodiscard]] cudnnBackendDescriptor_t native() const noexcept { return native_; }

  template <class T>
  CudnnDescriptor& set(cudnnBackendAttributeName_t attribute, const T& value) {
    return set(attribute, cudnn_type<T>, 1, &value);
  }
  template <std::size_t N>
  CudnnDescriptor& set(cudnnBackendAttributeName_t attribute,
                       const std::array<std::int64_t, N>& values) {
    return set(attribute, CUDNN_TYPE_INT64, N, values.data());
  }
  CudnnDescriptor& set(cudnnBackendAttributeName_t attribute, cudnnBackendAttributeType_t type,
                       std::size_t count, const void* values) {
    check(cudnnBackendSetAttribute(native_, attribute, type, static_cast<std::int64_t>(count),
                                   values),
          "setting an attribute of");
    return *this;
  }

  void finalize() { check(try_finalize(), "finalizing"); }
  [[nodiscard]] cudnnStatus_t try_finalize() { return cudnnBackendFinalize(native_); }

 private:
  void check(cudnnStatus_t status, std::string_view doing) const {
    if (status != CUDNN_STATUS_SUCCESS)
      check_cudnn(status, sentence("cuDNN: ", doing, " a ", name_));
  }

  cudnnBackendDescriptor_t native_ = nullptr;
  std::string_view name_;
};

/// Extents of a tensor [batch, heads, rows, columns], and the elements from one to the next.
struct CudnnLayout {
  std::array<std::int64_t, 4> extents, strides;

  static CudnnLayout contiguous(Index batch, Index heads, Index rows, Index cols) {
    return {{batch, heads, rows, cols}, {heads * rows * cols, rows * cols, cols, 1}};
  }
  /// Heads that lie side by side in the rows, `width` elements each, of a matrix [batch * time].
  static CudnnLayout packed(Index batch, Index heads, Index time, Index head_dim, Index width) {
    return {{batch, heads, time, head_dim}, {time * width, head_dim, width, 1}};
  }
  /// The same elements with rows and columns exchanged.
  [[nodiscard]] CudnnLayout transposed() const {
    CudnnLayout out = *this;
    std::swap(out.extents[2], out.extents[3]);
    std::swap(out.strides[2], out.strides[3]);
    return out;
  }
};

/// A tensor of a graph, which owns it.
struct CudnnTensor {
  cudnnBackendDescriptor_t native;
  CudnnLayout layout;
};

/// Operations in the order in which they were asked for. Sums are fp32. All it makes, it keeps.
class CudnnGraph {
 public:
  struct Number {
    std::int64_t id;
    float value;
  };

  /// A tensor in device memory, which gets its address when the graph runs.
  CudnnTensor memory(std::int64_t id, cudnnDataType_t type, const CudnnLayout& layout) {
    return tensor(id, type, layout, Storage::memory);
  }
  /// A tensor that lives inside the kernel only.
  CudnnTensor temporary(const CudnnLayout& layout, cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    return tensor(next_id_++, type, layout, Storage::none);
  }
  /// The same number for every element.
  CudnnTensor number(float value) {
    numbers_.push_back({next_id_, value});
    return tensor(next_id_++, CUDNN_DATA_FLOAT, {{1, 1, 1, 1}, {1, 1, 1, 1}}, Storage::argument);
  }

  /// out = a b, matrix by matrix; heads of b may be fewer, shared by as many heads of a.
  CudnnTensor multiply(CudnnTensor a, CudnnTensor b, CudnnTensor out) {
    auto& product = add(CUDNN_BACKEND_MATMUL_DESCRIPTOR, "matrix product");
    product.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT).finalize();
    const auto kind = product.native();
    operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, "matrix product's operation")
        .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, kind)
        .set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.native)
        .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.native)
        .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, out.native)
        .finalize();
    return out;
  }
  /// Over every dimension in which out has fewer elements than x.
  CudnnTensor reduce(cudnnReduceTensorOp_t op, CudnnTensor x, CudnnTensor out) {
    auto& reduction = add(CUDNN_BACKEND_REDUCTION_DESCRIPTOR, "reduction");
    reduction.set(CUDNN_ATTR_REDUCTION_OPERATOR, op)
        .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT)
        .finalize();
    const auto kind = reduction.native();
    operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, "reduction's operation")
        .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.native)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, out.native)
        .finalize();
    return out;
  }
  /// x with rows and columns exchanged.
  CudnnTensor transpose(CudnnTensor x, cudnnDataType_t type) {
    const CudnnTensor out = temporary(x.layout.transposed(), type);
    operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, "transposition")
        .set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.native)
        .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, out.native)
        .finalize();
    return out;
  }
  CudnnTensor pointwise(cudnnPointwiseMode_t mode, CudnnTensor x) {
    return convert(mode, x, temporary(x.layout));
  }
  CudnnTensor convert(cudnnPointwiseMode_t mode, CudnnTensor x, CudnnTensor out) {
    begin_pointwise(mode, CUDNN_DATA_FLOAT, x, out).finalize();
    return out;
  }
  CudnnTensor pointwise(cudnnPointwiseMode_t mode, CudnnTensor x, CudnnTensor y) {
    return pointwise(mode, x, y, temporary(x.layout));
  }
  CudnnTensor pointwise(cudnnPointwiseMode_t mode, CudnnTensor x, CudnnTensor y, CudnnTensor out,
                        cudnnDataType_t computed_in = CUDNN_DATA_FLOAT) {
    begin_pointwise(mode, computed_in, x, out)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, y.native)
        .finalize();
    return out;
  }
  /// x where the row is not before the column, minus infinity elsewhere.
  CudnnTensor mask_causal(CudnnTensor x) {
    const CudnnTensor row = position(x, 2), column = position(x, 3);
    const CudnnTensor seen = pointwise(CUDNN_POINTWISE_CMP_GE, row, column,
                                       temporary(x.layout, CUDNN_DATA_BOOLEAN), CUDNN_DATA_BOOLEAN);
    const CudnnTensor hidden = number(-std::numeric_limits<float>::infinity());
    const CudnnTensor out = temporary(x.layout);
    begin_pointwise(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, x, out)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, hidden.native)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, seen.native)
        .finalize();
    return out;
  }

  [[nodiscard]] const std::vector<cudnnBackendDescriptor_t>& operations() const {
    return operations_;
  }
  [[nodiscard]] const std::vector<Number>& numbers() const { return numbers_; }

 private:
  enum class Storage { memory, argument, none };

  CudnnDescriptor& add(cudnnBackendDescriptorType_t type, std::string_view name) {
    return kept_.emplace_back(type, name);
  }
  CudnnDescriptor& operation(cudnnBackendDescriptorType_t type, std::string_view name) {
    CudnnDescriptor& made = add(type, name);
    operations_.push_back(made.native());
    return made;
  }
  CudnnTensor tensor(std::int64_t id, cudnnDataType_t type, const CudnnLayout& layout,
                     Storage storage) {
    auto& made = add(CUDNN_BACKEND_TENSOR_DESCRIPTOR, "tensor");
    made.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id)
        .set(CUDNN_ATTR_TENSOR_DATA_TYPE, type)
        .set(CUDNN_ATTR_TENSOR_DIMENSIONS, layout.extents)
        .set(CUDNN_ATTR_TENSOR_STRIDES, layout.strides)
        .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, std::int64_t{16})
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, storage == Storage::none)
        .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, storage == Storage::argument)
        .finalize();
    return {made.native(), layout};
  }
  /// Every element's own index along one axis.
  CudnnTensor position(CudnnTensor like, std::int64_t axis) {
    const CudnnTensor out = temporary(like.layout, CUDNN_DATA_INT32);
    begin_pointwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, like, out, axis).finalize();
    return out;
  }
  CudnnDescriptor& begin_pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t computed_in,
                                   CudnnTensor x, CudnnTensor out, std::int64_t axis = -1) {
    auto& function = add(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, "pointwise function");
    function.set(CUDNN_ATTR_POINTWISE_MODE, mode).set(CUDNN_ATTR_POINTWISE_MATH_PREC, computed_in);
    if (axis >= 0) function.set(CUDNN_ATTR_POINTWISE_AXIS, axis);
    function.finalize();
    const auto kind = function.native();
    return operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "pointwise operation")
        .set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, 1.0F)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, 1.0F)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.native)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out.native);
  }

  std::vector<CudnnDescriptor> kept_;
  std::vector<cudnnBackendDescriptor_t> operations_;
  std::vector<Number> numbers_;
  std::int64_t next_id_ = 1000;  // above those of tensors in memory
};

/// A graph compiled for the device of a handle.
class CudnnPlan {
 public:
  struct Binding {
    std::int64_t id;
    const void* data;
  };

  /// Takes the first of the library's proposals that it can build. Costs about a second.
  /// @throws  Error(device) naming `what` where it can build none
  CudnnPlan(cudnnHandle_t handle, CudnnGraph graph, std::string_view what)
      : graph_(std::move(graph)),
        operations_(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "graph"),
        config_(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "engine's configuration"),
        plan_(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "plan") {
    operations_.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle)
        .set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
             graph_.operations().size(), graph_.operations().data())
        .finalize();
    std::string reason = "it proposes no engine";
    if (!build(handle, CUDNN_HEUR_MODE_A, reason) &&
        !build(handle, CUDNN_HEUR_MODE_FALLBACK, reason))
      throw Error(ErrorCode::device,
                  sentence("cuDNN ", std::string_view(cudnn_version_name()), " has no plan for ",
                           what, ": ", std::string_view(reason)));
    std::int64_t count = 0;
    check_cudnn(cudnnBackendGetAttribute(plan_.native(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                         CUDNN_TYPE_INT64, 1, &count, &workspace_bytes_),
                "cuDNN: reading the workspace's size");
  }

  [[nodiscard]] std::size_t workspace_bytes() const noexcept {
    return static_cast<std::size_t>(workspace_bytes_);
  }

  /// @pre   every tensor of the graph that is in memory is bound; workspace has workspace_bytes()
  /// @sync  ordered on the handle's stream, which may be capturing
  void run(cudnnHandle_t handle, std::span<const Binding> bindings, void* workspace) const {
    std::array<std::int64_t, 16> ids;
    std::array<const void*, 16> data;
    std::size_t count = 0;
    const auto bind = [&](std::int64_t id, const void* at) {
      expects(count < ids.size(), ErrorCode::logic, "cuDNN: a plan has more than 16 tensors");
      ids[count] = id;
      data[count++] = at;
    };
    for (const Binding& binding : bindings) bind(binding.id, binding.data);
    for (const CudnnGraph::Number& number : graph_.numbers()) bind(number.id, &number.value);
    CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, "list of addresses");
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids.data())
        .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, data.data())
        .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace)
        .finalize();
    check_cudnn(cudnnBackendExecute(handle, plan_.native(), pack.native()), "cudnnBackendExecute");
  }

 private:
  /// Whether a plan was made of one of the configurations that the heuristic of `mode` proposes.
  bool build(cudnnHandle_t handle, cudnnBackendHeurMode_t mode, std::string& reason) {
    CudnnDescriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "heuristic");
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations_.native())
        .set(CUDNN_ATTR_ENGINEHEUR_MODE, mode);
    if (const auto status = heuristic.try_finalize(); status != CUDNN_STATUS_SUCCESS) {
      reason = cudnn_last_error(status);
      return false;
    }
    std::int64_t proposed = 0, returned = 0;
    check_cudnn(cudnnBackendGetAttribute(heuristic.native(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                         CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &proposed, nullptr),
                "cuDNN: counting a heuristic's results");
    std::vector<CudnnDescriptor> configs;
    std::vector<cudnnBackendDescriptor_t> natives;
    for (std::int64_t i = 0; i < proposed; ++i)
      natives.push_back(
          configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "engine's configuration")
              .native());
    // Engines that turn out unsupported are left out, so fewer may come than were counted.
    check_cudnn(cudnnBackendGetAttribute(heuristic.native(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                         CUDNN_TYPE_BACKEND_DESCRIPTOR, proposed, &returned,
                                         natives.data()),
                "cuDNN: reading a heuristic's results");
    for (std::size_t i = 0; i < static_cast<std::size_t>(returned); ++i) {
      CudnnDescriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "plan");
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle)
          .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i].native());
      const auto status = plan.try_finalize();
      if (status == CUDNN_STATUS_SUCCESS) {
        config_ = std::move(configs[i]);
        plan_ = std::move(plan);
        return true;
      }
      reason = cudnn_last_error(status);
    }
    return false;
  }

  CudnnGraph graph_;
  CudnnDescriptor operations_, config_, plan_;
  std::int64_t workspace_bytes_ = 0;
};

/// Tensors of attention that are in memory. `inner` is a query's inner product of out and dout,
/// `dquery_sum` the fp32 sums of dquery, to which all blocks of keys add in no fixed order.
struct CudnnAttentionId {
  enum : std::int64_t {
    query = 1,
    key,
    value,
    out,
    lse,
    dout,
    dquery,
    dkey,
    dvalue,
    inner,
    dquery_sum
  };
};

enum class CudnnAttentionPass : std::uint8_t { forward, backward, deterministic_backward };

/// The part of an attention that one plan computes: some samples, and in them some heads.
struct CudnnAttentionPart {
  AttentionShape shape;  ///< of the part
  Index qkv_width = 0;   ///< elements of a row of the whole packed matrix
  Index out_width = 0;   ///< and of the whole output
  CudnnAttentionPass pass = CudnnAttentionPass::forward;

  [[nodiscard]] std::array<Index, 8> key() const {
    return {shape.batch,    shape.time, shape.query_heads, shape.kv_heads,
            shape.head_dim, qkv_width,  out_width,         static_cast<Index>(pass)};
  }
  [[nodiscard]] float scale() const { return 1.0F / std::sqrt(static_cast<float>(shape.head_dim)); }

  [[nodiscard]] CudnnLayout query() const { return in_rows(shape.query_heads, qkv_width); }
  [[nodiscard]] CudnnLayout key_or_value() const { return in_rows(shape.kv_heads, qkv_width); }
  [[nodiscard]] CudnnLayout out() const { return in_rows(shape.query_heads, out_width); }
  /// [.., time, time], [.., time, 1] and [.., time, head_dim] of the query heads.
  [[nodiscard]] CudnnLayout scores() const { return contiguous(shape.time); }
  [[nodiscard]] CudnnLayout per_query() const { return contiguous(1); }
  [[nodiscard]] CudnnLayout heads() const { return contiguous(shape.head_dim); }

 private:
  [[nodiscard]] CudnnLayout in_rows(Index heads, Index width) const {
    return CudnnLayout::packed(shape.batch, heads, shape.time, shape.head_dim, width);
  }
  [[nodiscard]] CudnnLayout contiguous(Index cols) const {
    return CudnnLayout::contiguous(shape.batch, shape.query_heads, shape.time, cols);
  }
};

/// The engines recognise the graph by its pattern: order and types of the operations are theirs.
inline CudnnGraph attention_forward_graph(const CudnnAttentionPart& part) {
  using Id = CudnnAttentionId;
  constexpr auto bf16 = CUDNN_DATA_BFLOAT16;
  CudnnGraph g;
  const auto query = g.memory(Id::query, bf16, part.query());
  const auto key = g.memory(Id::key, bf16, part.key_or_value().transposed());
  const auto value = g.memory(Id::value, bf16, part.key_or_value());
  const auto out = g.memory(Id::out, bf16, part.out());
  const auto lse = g.memory(Id::lse, CUDNN_DATA_FLOAT, part.per_query());

  auto score = g.multiply(query, key, g.temporary(part.scores()));
  score = g.pointwise(CUDNN_POINTWISE_MUL, score, g.number(part.scale()));
  score = g.mask_causal(score);
  const auto largest = g.reduce(CUDNN_REDUCE_TENSOR_MAX, score, g.temporary(part.per_query()));
  const auto shifted = g.pointwise(CUDNN_POINTWISE_SUB, score, largest);
  const auto weight = g.pointwise(CUDNN_POINTWISE_EXP, shifted);
  const auto sum = g.reduce(CUDNN_REDUCE_TENSOR_ADD, weight, g.temporary(part.per_query()));
  g.pointwise(CUDNN_POINTWISE_ADD, largest, g.pointwise(CUDNN_POINTWISE_LOG, sum), lse);
  const auto probability =
      g.pointwise(CUDNN_POINTWISE_DIV, weight, sum, g.temporary(part.scores(), bf16));
  g.multiply(probability, value, out);
  return g;
}

/// Ordinary: blocks of keys add to dquery_sum as they finish. Deterministic: the engine stores the
/// scores' gradients, of which one product makes dquery.
inline CudnnGraph attention_backward_graph(const CudnnAttentionPart& part) {
  using Id = CudnnAttentionId;
  constexpr auto bf16 = CUDNN_DATA_BFLOAT16;
  constexpr auto fp32 = CUDNN_DATA_FLOAT;
  CudnnGraph g;
  const auto query = g.memory(Id::query, bf16, part.query());
  const auto key = g.memory(Id::key, bf16, part.key_or_value().transposed());
  const auto value = g.memory(Id::value, bf16, part.key_or_value().transposed());
  const auto out = g.memory(Id::out, bf16, part.out());
  const auto dout = g.memory(Id::dout, bf16, part.out());
  const auto lse = g.memory(Id::lse, fp32, part.per_query());
  const auto dquery = g.memory(Id::dquery, bf16, part.query());
  const auto dkey = g.memory(Id::dkey, bf16, part.key_or_value());
  const auto dvalue = g.memory(Id::dvalue, bf16, part.key_or_value());
  const auto inner = g.memory(Id::inner, fp32, part.per_query());
  const auto scale = g.number(part.scale());
  // to = weights^T rows, summed over the query heads of a group.
  const auto add_over_queries = [&](CudnnTensor weights, CudnnTensor rows, CudnnTensor to) {
    const auto transposed = g.transpose(weights, bf16);
    if (part.shape.group() == 1)
      g.multiply(transposed, rows, to);
    else
      g.reduce(CUDNN_REDUCE_TENSOR_ADD,
               g.multiply(transposed, rows, g.temporary(part.heads(), bf16)), to);
  };

  const auto products = g.pointwise(CUDNN_POINTWISE_MUL, dout, out, g.temporary(part.heads()));
  const auto sums = g.reduce(CUDNN_REDUCE_TENSOR_ADD, products, g.temporary(part.per_query()));
  // The pattern has a factor here, which dropout would use.
  g.pointwise(CUDNN_POINTWISE_MUL, sums, g.number(1.0F), inner);

  auto score = g.multiply(query, key, g.temporary(part.scores()));
  score = g.pointwise(CUDNN_POINTWISE_MUL, score, scale);
  score = g.pointwise(CUDNN_POINTWISE_SUB, score, lse);
  score = g.mask_causal(score);
  const auto probability = g.pointwise(CUDNN_POINTWISE_EXP, score);
  add_over_queries(probability, dout, dvalue);

  auto dscore = g.multiply(dout, value, g.temporary(part.scores()));
  dscore = g.pointwise(CUDNN_POINTWISE_SUB, dscore, inner);
  dscore = g.pointwise(CUDNN_POINTWISE_MUL, dscore, probability);
  dscore = g.pointwise(CUDNN_POINTWISE_MUL, dscore, scale);
  add_over_queries(dscore, query, dkey);

  const auto keys = g.transpose(key, bf16);
  if (part.pass == CudnnAttentionPass::deterministic_backward) {
    g.multiply(dscore, keys, dquery);
  } else {
    const auto sum = g.memory(Id::dquery_sum, fp32, part.heads());
    g.multiply(dscore, keys, sum);
    g.convert(CUDNN_POINTWISE_IDENTITY, sum, dquery);
  }
  return g;
}

/// One stream's handle and plans.
class CudnnAttentionPlans {
 public:
  explicit CudnnAttentionPlans(const cuda::Stream& stream) {
    check_cudnn(cudnnSetStream(handle(), stream.native()), "cudnnSetStream");
  }

  [[nodiscard]] cudnnHandle_t handle() const noexcept { return handle_.native(); }

  /// Built at the first request. @pre  at that one, the stream is not capturing
  [[nodiscard]] const CudnnPlan& plan(const CudnnAttentionPart& part) {
    const auto key = part.key();
    for (const Known& known : known_)
      if (known.key == key) return *known.plan;
    const bool forward = part.pass == CudnnAttentionPass::forward;
    const AttentionShape& s = part.shape;
    known_.push_back(
        {key,
         std::make_unique<CudnnPlan>(
             handle(), forward ? attention_forward_graph(part) : attention_backward_graph(part),
             sentence(forward ? "attention_forward" : "attention_backward", " of batch ", s.batch,
                      ", time ", s.time, ", query heads ", s.query_heads, ", kv heads ", s.kv_heads,
                      ", head dim ", s.head_dim))});
    return *known_.back().plan;
  }

 private:
  struct Known {
    std::array<Index, 8> key;
    std::unique_ptr<const CudnnPlan> plan;
  };
  CudnnHandle handle_;
  std::vector<Known> known_;  // few, so searched in turn
};

constexpr Index round_up(Index n, Index multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// Bytes of the stored gradients of the scores of one key head's group, as the engine pads them.
constexpr Index stored_score_bytes(const AttentionShape& s) {
  return 2 * s.group() * round_up(s.time, 64) * round_up(s.time, 128);
}

/// Shape of the largest part that one backward plan computes: all, unless scores' gradients are
/// stored; then samples, and if need be key heads of one sample, in even parts of at most 1 GiB.
/// A length that is not a multiple of 4 is not split, since parts of lse would not be aligned.
constexpr AttentionShape backward_part(AttentionShape shape, bool deterministic) {
  if (!deterministic || shape.rows() == 0 || shape.time % 4 != 0) return shape;
  const auto even = [](Index total, Index most) {
    const Index parts = (total + most - 1) / most;
    return (total + parts - 1) / parts;
  };
  const Index most = std::max<Index>(1, (Index{1} << 30) / stored_score_bytes(shape));
  AttentionShape part = shape;
  part.batch = even(shape.batch, std::max<Index>(1, most / shape.kv_heads));
  part.kv_heads = even(shape.kv_heads, most);
  part.query_heads = part.kv_heads * shape.group();
  return part;
}

/// Places of what a backward pass needs beside its operands, each aligned to 256 bytes.
struct CudnnBackwardScratch {
  std::size_t inner = 0, dquery_sum, workspace, bytes;

  constexpr CudnnBackwardScratch(const AttentionShape& part, bool deterministic,
                                 std::size_t workspace_bytes)
      : dquery_sum(after(0, 4 * part.rows() * part.query_heads)),
        workspace(deterministic
                      ? dquery_sum
                      : after(dquery_sum, 4 * part.rows() * part.query_heads * part.head_dim)),
        bytes(workspace + workspace_bytes) {}

 private:
  static constexpr std::size_t after(std::size_t place, Index bytes) {
    return place + static_cast<std::size_t>(round_up(bytes, 256));
  }
};

/// @param operands  addresses with their names
inline void expects_aligned(
    std::string_view op, std::initializer_list<std::pair<std::string_view, const void*>> operands) {
  for (const auto& [operand, data] : operands) {
    const std::uintptr_t beyond = reinterpret_cast<std::uintptr_t>(data) % 16;
    expects(beyond == 0, ErrorCode::logic, [&, op_name = op, name = operand] {
      return sentence(op_name, ": ", name, " must be aligned to 16 bytes for cuDNN, it lies ",
                      beyond, " beyond");
    });
  }
}

inline void cudnn_attention_forward(cuda::Stream& stream, Bfloat16* out, float* lse,
                                    const Bfloat16* qkv, const AttentionShape& shape) {
  using Id = CudnnAttentionId;
  expects_aligned("attention_forward", {{"out", out}, {"lse", lse}, {"qkv", qkv}});
  auto& plans = stream.resource<CudnnAttentionPlans>();
  const CudnnPlan& plan = plans.plan(
      {shape, shape.width(), shape.query_heads * shape.head_dim, CudnnAttentionPass::forward});
  const CudnnPlan::Binding bindings[] = {{Id::query, qkv + shape.query_column(0)},
                                         {Id::key, qkv + shape.key_column(0)},
                                         {Id::value, qkv + shape.value_column(0)},
                                         {Id::out, out},
                                         {Id::lse, lse}};
  plan.run(plans.handle(), bindings, stream.scratch(plan.workspace_bytes()));
}

inline void cudnn_attention_backward(cuda::Stream& stream, Bfloat16* dqkv, const Bfloat16* dout,
                                     const Bfloat16* qkv, const Bfloat16* out, const float* lse,
                                     const AttentionShape& shape, bool deterministic) {
  using Id = CudnnAttentionId;
  expects_aligned("attention_backward",
                  {{"dqkv", dqkv}, {"dout", dout}, {"qkv", qkv}, {"out", out}, {"lse", lse}});
  const Index out_width = shape.query_heads * shape.head_dim;
  const AttentionShape largest = backward_part(shape, deterministic);
  auto& plans = stream.resource<CudnnAttentionPlans>();
  for (Index sample = 0; sample < shape.batch; sample += largest.batch)
    for (Index head = 0; head < shape.kv_heads; head += largest.kv_heads) {
      AttentionShape part = largest;
      part.batch = std::min(largest.batch, shape.batch - sample);
      part.kv_heads = std::min(largest.kv_heads, shape.kv_heads - head);
      part.query_heads = part.kv_heads * shape.group();
      const CudnnPlan& plan = plans.plan({part, shape.width(), out_width,
                                          deterministic ? CudnnAttentionPass::deterministic_backward
                                                        : CudnnAttentionPass::backward});
      const CudnnBackwardScratch place(part, deterministic, plan.workspace_bytes());
      auto* const scratch = static_cast<std::byte*>(stream.scratch(place.bytes));
      const Index query_head = head * shape.group();
      const Index in_packed = sample * shape.time * shape.width();
      const Index in_out = sample * shape.time * out_width + query_head * shape.head_dim;
      const Index query = in_packed + shape.query_column(query_head);
      const Index key = in_packed + shape.key_column(head);
      const Index value = in_packed + shape.value_column(head);
      const CudnnPlan::Binding bindings[] = {
          {Id::query, qkv + query},
          {Id::key, qkv + key},
          {Id::value, qkv + value},
          {Id::out, out + in_out},
          {Id::lse, lse + (sample * shape.query_heads + query_head) * shape.time},
          {Id::dout, dout + in_out},
          {Id::dquery, dqkv + query},
          {Id::dkey, dqkv + key},
          {Id::dvalue, dqkv + value},
          {Id::inner, scratch + place.inner},
          {Id::dquery_sum, scratch + place.dquery_sum}};
      // The deterministic graph has no sums, and what a graph lacks may not be bound.
      plan.run(plans.handle(), std::span(bindings).first(std::size(bindings) - deterministic),
               scratch + place.workspace);
    }
}

}  // namespace detail

/// Attention of bf16 through cuDNN. What it does not support, float included, goes to the library's
/// own operation on the stream, which the caller has included. A shape's plans are built at its
/// first use on a stream, about a second each, and kept with the stream; from then on forward and
/// backward may be captured.
/// @tparam Deterministic  whether backward gives the same bits run to run on one kind of GPU, as
///         forward always does. It then stores the scores' gradients, in parts of up to 1 GiB of
///         scratch (more where the query heads of one key head alone need more, or where time is no
///         multiple of 4), and is slower.
/// @throws  Error(device) with cuDNN's own words
template <bool Deterministic = false>
struct CudnnAttention {
  static constexpr std::string_view name = "cudnn";

  /// Whether cuDNN computes this: no dropout, head_dim a multiple of 8 up to 128, time above 1, and
  /// for the loaded version: 9.14 or later, before 9.15.1 only a time that is a multiple of 128.
  [[nodiscard]] static bool supports(const AttentionShape& shape, const AttentionDropout& dropout) {
    const std::size_t version = cudnnGetVersion();
    return dropout.probability == 0.0F && shape.batch > 0 && shape.time > 1 &&
           shape.head_dim % 8 == 0 && shape.head_dim <= 128 && version >= 91400 &&
           (shape.time % 128 == 0 || version >= 91501);
  }

  /// As attention_forward of nn/attention.hpp: lse is exactly that of the library's own operations.
  /// @pre   out does not overlap qkv; operands are aligned to 16 bytes   @sync  ordered on stream
  template <class T>
  static void forward(cuda::Stream& stream, Matrix<T> out, View<float, 3> lse,
                      Matrix<const std::type_identity_t<T>> qkv, const AttentionShape& shape,
                      const AttentionDropout& dropout = {}) {
    constexpr auto op = "attention_forward";
    detail::expects_valid(op, shape, dropout);
    detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
    detail::expects_shape(op, "out", out, shape.rows(), shape.query_heads * shape.head_dim);
    detail::expects_shape(op, "lse", lse.matrix(), shape.batch * shape.query_heads, shape.time);
    if constexpr (std::is_same_v<T, Bfloat16>)
      if (supports(shape, dropout))
        return detail::cudnn_attention_forward(stream, out.data(), lse.data(), qkv.data(), shape);
    attention_forward(stream, out, lse, qkv, shape, dropout);
  }

  /// As attention_backward of nn/attention.hpp. Probabilities and gradients of scores are rounded
  /// to bf16 before they are multiplied.
  /// @pre   the operands of the forward pass, unchanged; dqkv overlaps none of the inputs; operands
  ///        are aligned to 16 bytes   @sync  ordered on stream
  /// @determinism  not bitwise unless Deterministic: sums of dquery are added in any order
  template <class T>
  static void backward(cuda::Stream& stream, Matrix<T> dqkv,
                       Matrix<const std::type_identity_t<T>> dout,
                       Matrix<const std::type_identity_t<T>> qkv,
                       Matrix<const std::type_identity_t<T>> out, View<const float, 3> lse,
                       const AttentionShape& shape, const AttentionDropout& dropout = {}) {
    constexpr auto op = "attention_backward";
    const Index out_width = shape.query_heads * shape.head_dim;
    detail::expects_valid(op, shape, dropout);
    detail::expects_shape(op, "qkv", qkv, shape.rows(), shape.width());
    detail::expects_shape(op, "dqkv", dqkv, shape.rows(), shape.width());
    detail::expects_shape(op, "out", out, shape.rows(), out_width);
    detail::expects_shape(op, "dout", dout, shape.rows(), out_width);
    detail::expects_shape(op, "lse", lse.matrix(), shape.batch * shape.query_heads, shape.time);
    if constexpr (std::is_same_v<T, Bfloat16>)
      if (supports(shape, dropout))
        return detail::cudnn_attention_backward(stream, dqkv.data(), dout.data(), qkv.data(),
                                                out.data(), lse.data(), shape, Deterministic);
    attention_backward(stream, dqkv, dout, qkv, out, lse, shape, dropout);
  }

  /// Scratch of the stream that both passes of a supported bf16 shape need at most: without a
  /// device, for the memory plan. What cuDNN itself takes is a rule found by asking version 9.19.
  /// @param compute_capability  of the GPU, 80 to 90; engines before 90 hold sums of dquery again
  [[nodiscard]] static constexpr std::size_t workspace_bytes(const AttentionShape& shape,
                                                             int compute_capability = 90) {
    const AttentionShape part = detail::backward_part(shape, Deterministic);
    const Index of_a_row = 4 * part.query_heads * part.head_dim;
    Index of_cudnn = 4096;
    if (shape.group() > 1) of_cudnn += part.rows() * of_a_row;
    if (Deterministic)
      of_cudnn += part.batch * part.kv_heads * detail::stored_score_bytes(part);
    else if (compute_capability < 90)
      of_cudnn += part.batch * detail::round_up(part.time, 64) * of_a_row;
    return detail::CudnnBackwardScratch(part, Deterministic, static_cast<std::size_t>(of_cudnn))
        .bytes;
  }
};

}  // namespace mega::inline v0::nn
