// A trainer in sixty lines: your own stage, a traversal, two ranks as threads, two chunks on each.
#include <mega/mega.hpp>

#include <cmath>
#include <cstdio>

using mega::Index, mega::Matrix;
constexpr Index samples = 8, width = 16;

struct Layer : mega::UniformStage {  // y = x + tanh(x W), trained on squared error
  struct saved_type {
    Matrix<const float> x;
    Matrix<float> t;
  };
  mega::StagePosition at;
  explicit Layer(mega::StagePosition position) : UniformStage{samples, width}, at(position) {}

  saved_type make_saved(mega::Arena& arena) const {
    return {{}, arena.take<float>(samples, width)};
  }
  std::vector<mega::Parameter> parameters() const {
    return {{.name = "layer" + std::to_string(at.stage),
             .shape = {width, width},
             .init = {mega::Init::Kind::normal, 0.2F}}};
  }
  void forward(auto& ctx, Matrix<const float> x, Matrix<float> y, saved_type& saved) {
    saved.x = x;
    ctx.stream.run([x, y, w = weights[0].value, t = saved.t] {
      for (Index r = 0; r < samples; ++r)
        for (Index c = 0; c < width; ++c) {
          float z = 0;
          for (Index k = 0; k < width; ++k) z += x(r, k) * w(k * width + c);
          t(r, c) = std::tanh(z);
          y(r, c) = x(r, c) + t(r, c);
        }
    });
  }
  void backward(auto& ctx, Matrix<const float> dy, Matrix<float> dx, saved_type& saved) {
    ctx.stream.run([dy, dx, w = weights[0], saved = saved] {
      for (Index r = 0; r < samples; ++r)
        for (Index k = 0; k < width; ++k) {
          float sum = dy(r, k);
          for (Index c = 0; c < width; ++c) {
            const float dz = dy(r, c) * (1 - saved.t(r, c) * saved.t(r, c));
            sum += dz * w.value(k * width + c);
            w.gradient(k * width + c) += saved.x(r, k) * dz;
          }
          if (!dx.empty()) dx(r, k) = sum;
        }
    });
  }
  void loss(auto& ctx, Matrix<float> y, Matrix<const float> target) {
    ctx.stream.run([=, sum = ctx.loss_sum, scale = ctx.loss_scale] {
      for (Index i = 0; i < y.size(); ++i) {
        const float error = y.data()[i] - target.data()[i];
        *sum += 0.5 * error * error;
        y.data()[i] = error * *scale;
      }
    });
  }
};

struct Plan : mega::DefaultPlan {
  using stage = Layer;
  using communicator = mega::comm::ThreadComm;
  using traversal = mega::dpp::ScheduleTraversal<mega::dpp::BFC>;
};

int main() {
  mega::data::FunctionBatch batch(8, samples, width, [](Index i) {
    const float x = mega::RandomKey{1}.uniform(i) - 0.5F;
    return std::pair(x, -x);
  });
  mega::comm::run_threads(2, [&](mega::comm::ThreadComm& world) {
    mega::Trainer<Plan> trainer(world, {.mesh = {.pipeline = 2}, .chunks = 2, .microbatches = 8},
                                [](auto at) { return Layer(at); });
    for (int step = 0; step < 20; ++step) {
      const auto result = trainer.step(batch, 1e-2);
      if (world.rank() == 0) std::printf("step %2d  loss %.6f\n", step, result.loss);
    }
  });
}
