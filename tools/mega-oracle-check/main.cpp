// mega-oracle-check: how far a layout's numbers are from those of an oracle directory, as JSON.
#include "oracle_check.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <exception>
#include <map>
#include <string>

int main(int argc, char** argv) {
  std::string directory;
  oracle::Layout layout;
  CLI::App app{
      "Runs a Transformer in one process, a thread a rank, on the model of an oracle directory\n"
      "(config.json, model.safetensors, io.safetensors, grads.safetensors, expect.json) and "
      "prints\n"
      "its distance from the expected logits, loss, gradients and AdamW losses."};
  app.add_option("--dir", directory, "oracle directory")->required();
  app.add_option("--tp", layout.tensor, "tensor-parallel degree")->check(CLI::PositiveNumber);
  app.add_option("--pp", layout.pipeline, "pipeline degree")->check(CLI::PositiveNumber);
  app.add_option("--dp", layout.data, "data-parallel degree")->check(CLI::PositiveNumber);
  app.add_option("--vpp", layout.chunks, "model chunks a pipeline rank")
      ->check(CLI::PositiveNumber);
  app.add_flag("--sequence-parallel", layout.sequence_parallel,
               "divide the rows of the residual stream over the tensor ranks");
  app.add_flag("--zero1", layout.zero1, "divide the optimizer over the data-parallel ranks");
  using mega::nn::Recompute;
  const std::map<std::string, Recompute> modes{
      {"none", Recompute::none}, {"selective", Recompute::selective}, {"full", Recompute::full}};
  std::string mode = "none";
  app.add_option("--recompute", mode, "what backward computes again")->check(CLI::IsMember(modes));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  layout.recompute = modes.at(mode);
  try {
    const oracle::Report r = oracle::check(directory, layout);
    const nlohmann::ordered_json out = {
        {"logits_max_abs", r.logits_max_abs},     {"loss_rel", r.loss_rel},
        {"grad_worst_rel", r.grad_worst_rel},     {"grad_worst_name", r.grad_worst_name},
        {"key_bias_max_abs", r.key_bias_max_abs}, {"adamw_worst_rel", r.adamw_worst_rel}};
    std::printf("%s\n", out.dump(2).c_str());
    return 0;
  } catch (const mega::Error& error) {
    std::fprintf(stderr, "mega-oracle-check: %s\n", error.what());
    return mega::exit_code(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mega-oracle-check: %s\n", error.what());
    return 2;
  }
}
