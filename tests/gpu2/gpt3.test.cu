// GPT-3 on two GPUs against one GPU.
#include "tests/gpu2/layouts.cuh"

TEST_CASE("two gpus: small GPT-3 with a tied head, every layout of two ranks") {
  two_gpus::compare<mega::nn::Gpt3>("gpt3 small", grid::gpt(), true);
}
TEST_CASE("two gpus: GPT-3 with dropout, every layout of two ranks") {
  grid::Model model = two_gpus::large(true);
  model.config.dropout = {0.1F, 0.1F, 0.1F};
  two_gpus::compare<mega::nn::Gpt3>("gpt3 dropout", model, false);
}
