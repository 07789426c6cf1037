// A trainer in sixty lines: your own stage, a traversal, two ranks as threads, two chunks on each.
#include <mega/mega.hpp>

#include <cmath>
#include <cstdio>
#include <utility>

using mega::Index, mega::Matrix;
constexpr Index samples = 8, width = 16;

struct Gate : mega::UniformStage {  // y = x + tanh(w x), one weight a column, squared error
  using saved_type = Matrix<const float>;
  int number;
  explicit Gate(mega::StagePosition at) : UniformStage{samples, width}, number(at.stage) {}

  saved_type make_saved(mega::Arena&) const { return {}; }
  std::vector<mega::Parameter> parameters() const {
    return {{.name = "gate" + std::to_string(number), .shape = {width}}};
  }
  void forward(auto& ctx, Matrix<const float> x, Matrix<float> y, saved_type& saved) {
    saved = x;  // stays in its slot until the last backward call
    ctx.stream.run([x, y, w = weights[0].value] {
      for (Index r = 0; r < samples; ++r)
        for (Index c = 0; c < width; ++c) y(r, c) = x(r, c) + std::tanh(w(c) * x(r, c));
    });
  }
  void backward(auto& ctx, Matrix<const float> dy, Matrix<float> dx, saved_type& x) {
    ctx.stream.run([dy, dx, x, w = weights[0]] {
      for (Index r = 0; r < samples; ++r)
        for (Index c = 0; c < width; ++c) {
          const float t = std::tanh(w.value(c) * x(r, c)), dz = dy(r, c) * (1 - t * t);
          w.gradient(c) += dz * x(r, c);
          if (!dx.empty()) dx(r, c) = dy(r, c) + dz * w.value(c);
        }
    });
  }
  void loss(auto& ctx, Matrix<float> y, Matrix<const float> target) {
    ctx.stream.run([y, target, sum = ctx.loss_sum, scale = ctx.loss_scale] {
      for (Index i = 0; i < y.size(); ++i) {
        const float error = y.data()[i] - target.data()[i];
        *sum += 0.5 * error * error;
        y.data()[i] = error * *scale;  // the output becomes its gradient
      }
    });
  }
};

struct Plan : mega::DefaultPlan {
  using stage = Gate;
  using communicator = mega::ThreadComm;
  using traversal = mega::dpp::ScheduleTraversal<mega::dpp::BFC>;
};

int main() {
  mega::run_threads(2, [](mega::ThreadComm& world) {
    const mega::data::FunctionBatch batch(
        8, samples, width, [](Index i) { return std::pair(std::sin(i), std::sin(i) / 2); });
    mega::Trainer<Plan> trainer(world, {.mesh = {.pipeline = 2}, .chunks = 2, .microbatches = 8},
                                [](mega::StagePosition at) { return Gate(at); });
    for (int step = 0; step < 20; ++step) {
      const mega::StepResult result = trainer.step(batch, 0.05);
      if (world.rank() == 0) std::printf("step %2d  loss %.6f\n", step, result.loss);
    }
  });
}
