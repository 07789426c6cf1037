// The training of mega-gpt3-cuda --precision fp32 with a process a rank instead of a thread, so
// that one of them can be killed:
//
//   for r in 0 1; do
//     RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
//       bench_headline_processes --dp 2 --data my.jsonl --save checkpoints --save-interval 4 &
//   done; wait
//
// It trains, prints the losses and saves; that program goes on from its checkpoints. Options of
// what it does not do are refused.
#include "examples/trainer/corpus.hpp"
#include "examples/trainer/gpu_plan.hpp"
#include "examples/trainer/inputs.hpp"
#include "examples/trainer/program_cuda.hpp"
#include "examples/trainer/stages.hpp"
#include <mega/ckpt/sharded_checkpoint.hpp>
#include <mega/comm/nccl_process.hpp>
#include <mega/core/error.hpp>
#include <mega/cuda/check.hpp>
#include <mega/data/batch.hpp>
#include <mega/data/sampler.hpp>
#include <mega/device.cuh>
#include <mega/mega.hpp>
#include <mega/nn/gpt3.hpp>

#include <cuda_runtime.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

namespace {

using mega::NcclProcessComm;
using trainer::Config;
using trainer::Job;

constexpr const char* program = "bench_headline_processes";
using Spec = mega::nn::Gpt3;
using Kernels = trainer::GpuKernels<float>;

struct Plan : mega::DefaultPlan {
  using device = mega::Cuda;
  using communicator = NcclProcessComm;
  using stage = mega::nn::Transformer<Spec, NcclProcessComm, Kernels>;
  using traversal = trainer::ChosenTraversal;
};
using Trainer = mega::Trainer<Plan>;

/// @throws  Error(usage)
void expects_training_alone(const Config& c) {
  const bool decides = c.schedule == trainer::Schedule::adaptive ||
                       c.schedule == trainer::Schedule::automatic || c.look_ahead > 0;
  const bool has_files = !(c.import_dir + c.load_dir + c.export_dir + c.trace_dir + c.log_json +
                           c.inject + c.gpu->algorithms_path)
                              .empty();
  mega::expects(!decides && !has_files && c.gpu->precision == trainer::Precision::fp32 &&
                    !c.gpu->graphs && c.sample_tokens == 0 && c.watch_interval == 0,
                mega::ErrorCode::usage,
                "this program trains in fp32 and saves; of the options of "
                "mega-gpt3-cuda it has those of the layout, the static schedules, the model, the "
                "optimizer, the data, --save, --save-interval and --timeout");
}

Trainer::options_type options_of(const Job& job) {
  return {.mesh = job.options.mesh,
          .chunks = job.options.chunks,
          .microbatches = job.options.microbatches,
          .traversal = job.options.traversal,
          .shard_optimizer = job.options.shard_optimizer,
          .clip_norm = job.options.clip_norm,
          .adamw = job.options.adamw,
          .seed = job.options.seed};
}

/// As the trainers write it into their checkpoints and compare it when they go on.
nlohmann::json describe_model(const mega::nn::TransformerConfig& m) {
  return {{"family", Spec::name},           {"heads", m.heads},
          {"kv_heads", m.kv_heads},         {"head_dim", m.head_dim},
          {"norm_epsilon", m.norm_epsilon}, {"rope_theta", m.rope.theta},
          {"tied_head", m.tied_head}};
}

mega::Cuda current_device() {
  int gpu = 0;
  mega::cuda::check(cudaGetDevice(&gpu), "cudaGetDevice");
  return mega::Cuda(gpu);
}

void train(const Config& config, NcclProcessComm& world) {
  const trainer::Inputs<Spec> inputs(config, world.size());
  const Job& job = inputs.job;
  const Config& c = job.config;
  trainer::expects_kernels_take(job);
  trainer::check_outputs(c);
  const trainer::Corpus corpus(c);
  const mega::data::ShuffledWindows windows(corpus.split.train, job.run.sequence, c.seed);
  const mega::Cuda device = current_device();
  Trainer trainer(world, options_of(job), trainer::StageFactory<Spec, Kernels>{job}, device);
  const mega::Mesh& mesh = job.options.mesh;
  mega::data::TokenBatch batch;
  std::int64_t consumed = 0;
  while (trainer.steps_done() < job.steps) {
    batch.fill(corpus.tokens, windows, consumed, mesh.coordinates(world.rank())[mega::Axis::data],
               mesh.data, job.options.microbatches, c.micro_batch);
    const double rate = job.learning_rate.at(trainer.steps_done());
    const double loss = trainer.step(batch, rate).loss;
    consumed += c.global_batch;
    const std::int64_t done = trainer.steps_done();
    if (world.rank() == 0)
      std::fprintf(stderr, "step %lld | loss %.6f\n", static_cast<long long>(done), loss);
    if (c.save_dir.empty() || c.save_interval == 0 || done % c.save_interval != 0) continue;
    const Trainer::Attended scope(trainer);
    mega::ckpt::TrainingState state;
    state.consumed_samples = consumed;
    state.model = describe_model(job.model);
    const std::string path =
        mega::ckpt::save_checkpoint(trainer, c.save_dir, state, c.keep, device);
    if (world.rank() == 0)
      std::fprintf(stderr, "checkpoint of step %lld is durable in %s\n",
                   static_cast<long long>(done), path.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Config config;
    config.gpu.emplace();
    config.gpu->precision = trainer::Precision::fp32;
    config.watch_interval = 0;
    if (const std::optional<int> code = trainer::read_config<Spec>(config, program, argc, argv))
      return *code;
    trainer::check_gpu_choices(config);
    expects_training_alone(config);
    if (config.dry_run) {
      const trainer::Inputs<Spec> inputs(config, 0);
      trainer::expects_kernels_take(inputs.job);
      trainer::dry_run_on_gpus<Spec>(inputs.job, trainer::plan_gpus<Spec>(inputs.job),
                                     trainer::Gpus());
      return 0;
    }
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    mega::run_nccl([&](NcclProcessComm& world) { train(config, world); },
                   {.deadline = mega::comm::Seconds(config.deadline_s)});
    return 0;
  } catch (const std::exception& e) {
    return trainer::report(program, e);
  }
}
