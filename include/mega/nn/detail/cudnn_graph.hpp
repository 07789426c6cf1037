/// @file  cuDNN's graph C API: descriptors that own themselves, a graph of operations, and the plan
/// that runs it. Needs the cuDNN headers, and cuDNN to link.
#pragma once
#include <mega/core/error.hpp>
#include <mega/core/view.hpp>
#include <mega/cuda/stream.hpp>

#include <cudnn_graph.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mega::inline v0::nn::detail {

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

}  // namespace mega::inline v0::nn::detail
