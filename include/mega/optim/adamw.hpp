/// @file  AdamW over flat buffers, with clipping by the global norm and a skip that all ranks
/// share. Source: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
#pragma once
#include <mega/core/config.hpp>
#include <mega/core/storage.hpp>
#include <mega/core/view.hpp>
#include <mega/host/stream.hpp>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace mega::inline v0::optim {

struct AdamWOptions {
  float beta1 = 0.9F;
  float beta2 = 0.95F;
  float epsilon = 1e-8F;
  float weight_decay = 0.1F;
};

/// A run of a flat buffer whose elements share their treatment.
struct Segment {
  Index begin = 0;
  Index end = 0;
  bool decay = true;
};

/// A run of a flat buffer whose squares belong to one sum.
struct SquareRange {
  Index begin = 0;
  Index end = 0;
  Index slot = 0;  ///< place of the sum
};

/// What the host gives to a step, in device memory: assigned once, before anything of the step
/// reads it, and no argument of any other call. So the calls of two steps are the same.
struct StepInputs {
  std::int64_t targets = 0;  ///< valid ones of this rank's batch, then of the global batch
  std::int64_t step = 0;     ///< steps done before this one
  float learning_rate = 0;
};

/// Written by clip_by_norm() and then correct_bias(), read by adamw_update(), all in device memory,
/// so that no step waits for the host.
struct UpdateControl {
  double norm = 0;                 ///< of the whole gradient before clipping
  float gradient_scale = 1;        ///< what the gradient is multiplied with
  std::int32_t skip = 0;           ///< 1: the norm is not finite, no parameter may change
  std::int64_t skipped_steps = 0;  ///< before this one, which the bias correction leaves out
  float loss_scale = 1;            ///< what the loss was multiplied with before the gradient
  float learning_rate = 0;
  float step_size = 0;  ///< learning rate over the first moment's bias correction
  float root = 1;       ///< of the second moment's bias correction
};

namespace detail {

/// @param squares     sum of those of the gradient of the loss times `loss_scale`
/// @param max_norm    of the gradient of the loss itself
[[nodiscard]] MEGA_HD inline UpdateControl clipped(double squares, double max_norm,
                                                   float loss_scale = 1) {
  UpdateControl control;
  control.norm = std::sqrt(squares) / static_cast<double>(loss_scale);
  control.skip = std::isfinite(control.norm) ? 0 : 1;
  const bool clips = max_norm > 0 && control.skip == 0;
  const double factor = clips ? std::fmin(1.0, max_norm / (control.norm + 1e-6)) : 1.0;
  control.gradient_scale = static_cast<float>(factor / static_cast<double>(loss_scale));
  control.loss_scale = loss_scale;
  return control;
}

[[nodiscard]] MEGA_HD inline UpdateControl bias_corrected(UpdateControl control,
                                                          const StepInputs& inputs,
                                                          const AdamWOptions& options) {
  const auto step = static_cast<double>(inputs.step + 1 - control.skipped_steps);
  const double correction1 = 1 - std::pow(static_cast<double>(options.beta1), step);
  const double correction2 = 1 - std::pow(static_cast<double>(options.beta2), step);
  control.learning_rate = inputs.learning_rate;
  control.step_size = static_cast<float>(static_cast<double>(inputs.learning_rate) / correction1);
  control.root = static_cast<float>(std::sqrt(correction2));
  return control;
}

}  // namespace detail

/// out[0] += sum of squares of `values`, in double: sixteen interleaved partial sums, then their
/// sum in order, so that the result depends on the values and their number alone.
/// @cost  reads values once   @determinism  run-to-run
template <host::host_stream S>
void add_sum_of_squares(S& stream, Vector<double> out, Vector<const float> values) {
  stream.run([=] {
    constexpr Index lanes = 16;
    double partial[lanes] = {};
    const float* x = values.data();
    const Index n = values.size(), whole = n - n % lanes;
    for (Index i = 0; i < whole; i += lanes) {
      for (Index k = 0; k < lanes; ++k) partial[k] += static_cast<double>(x[i + k]) * x[i + k];
    }
    for (Index i = whole; i < n; ++i) partial[i - whole] += static_cast<double>(x[i]) * x[i];
    double sum = 0;
    for (const double p : partial) sum += p;
    out.data()[0] += sum;
  });
}

/// out[range.slot] += sum of the squares of the range, for every range in order, each with the bits
/// of add_sum_of_squares().
/// @pre  no two ranges overlap; each lies within values
template <host::host_stream S>
void sums_of_squares(S& stream, Vector<double> out, Vector<const float> values,
                     Vector<const SquareRange> ranges) {
  stream.run([=] {
    host::Stream now;
    for (Index r = 0; r < ranges.size(); ++r) {
      const SquareRange range = ranges.data()[r];
      add_sum_of_squares(now, out.slice(range.slot, 1),
                         values.slice(range.begin, range.end - range.begin));
    }
  });
}

/// out = in, rounded to the storage of out, element by element.
template <host::host_stream S, storage T>
void to_storage(S& stream, Vector<T> out, Vector<const float> in) {
  stream.run([=] {
    for (Index i = 0; i < out.size(); ++i) out.data()[i] = T(in.data()[i]);
  });
}

/// inout += values, element by element.
template <host::host_stream S>
void accumulate(S& stream, Vector<float> inout, Vector<const float> values) {
  stream.run([=] {
    float* MEGA_RESTRICT a = inout.data();
    const float* MEGA_RESTRICT b = values.data();
    for (Index i = 0; i < inout.size(); ++i) a[i] += b[i];
  });
}

/// out[0] = value. The value is taken now, so nothing of the caller must outlive the call.
template <host::host_stream S, class T>
void assign(S& stream, Vector<T> out, std::type_identity_t<T> value) {
  stream.run([=] { out.data()[0] = value; });
}

/// out[0] = 1 / count[0], or 0 where there is nothing to count: a batch without a valid target has
/// loss and gradient zero, not NaN.
template <host::host_stream S>
void reciprocal(S& stream, Vector<float> out, Vector<const std::int64_t> count) {
  stream.run([=] {
    const std::int64_t n = count.data()[0];
    out.data()[0] = n > 0 ? static_cast<float>(1.0 / static_cast<double>(n)) : 0.0F;
  });
}

/// Global norm from the squares of all tensors, summed in the order of `squares`; the scale that
/// brings it down to `max_norm`, min(1, max_norm / (norm + 1e-6)). max_norm <= 0 means no clipping.
template <host::host_stream S>
void clip_by_norm(S& stream, Vector<UpdateControl> out, Vector<const double> squares,
                  double max_norm) {
  stream.run([=] {
    double sum = 0;
    for (Index i = 0; i < squares.size(); ++i) sum += squares.data()[i];
    out.data()[0] = detail::clipped(sum, max_norm);
  });
}

/// The learning rate and the bias corrections of the moments, of the step that `inputs` names less
/// the steps that control says were skipped.
/// @pre  control comes from clip_by_norm()
template <host::host_stream S>
void correct_bias(S& stream, Vector<UpdateControl> control, Vector<const StepInputs> inputs,
                  AdamWOptions options) {
  stream.run([=] {
    control.data()[0] = detail::bias_corrected(control.data()[0], inputs.data()[0], options);
  });
}

/// One AdamW step on `values`; moments are updated in place. All views have the same size.
/// @pre  control comes from correct_bias()
/// @cost  reads 4 and writes 3 values an element   @determinism  run-to-run, element by element
template <host::host_stream S>
void adamw_update(S& stream, Vector<float> values, Vector<float> first_moment,
                  Vector<float> second_moment, Vector<const float> gradient,
                  Vector<const Segment> segments, Vector<const UpdateControl> control,
                  AdamWOptions options) {
  stream.run([=] {
    if (control.data()->skip != 0) return;
    const float scale = control.data()->gradient_scale;
    const float learning_rate = control.data()->learning_rate;
    const float step_size = control.data()->step_size, root = control.data()->root;
    float* MEGA_RESTRICT w = values.data();
    float* MEGA_RESTRICT m = first_moment.data();
    float* MEGA_RESTRICT v = second_moment.data();
    const float* MEGA_RESTRICT g = gradient.data();
    const float b1 = options.beta1, b2 = options.beta2, eps = options.epsilon;
    for (Index s = 0; s < segments.size(); ++s) {
      const Segment run = segments.data()[s];
      const float keep = run.decay ? 1 - learning_rate * options.weight_decay : 1.0F;
      for (Index i = run.begin; i < run.end; ++i) {
        const float grad = g[i] * scale;
        m[i] = b1 * m[i] + (1 - b1) * grad;
        v[i] = b2 * v[i] + (1 - b2) * grad * grad;
        w[i] = w[i] * keep - step_size * m[i] / (std::sqrt(v[i]) / root + eps);
      }
    }
  });
}

/// The same on fp32 masters, and values = the masters rounded, as they must be before too.
template <host::host_stream S, half_storage T>
void adamw_update(S& stream, Vector<T> values, Vector<float> master, Vector<float> first_moment,
                  Vector<float> second_moment, Vector<const float> gradient,
                  Vector<const Segment> segments, Vector<const UpdateControl> control,
                  AdamWOptions options) {
  adamw_update(stream, master, first_moment, second_moment, gradient, segments, control, options);
  to_storage(stream, values, Vector<const float>(master));
}

}  // namespace mega::inline v0::optim
