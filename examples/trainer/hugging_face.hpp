/// @file  Moves whole models between a trainer's shards and a Hugging Face folder.
#pragma once
#include <mega/ckpt/hugging_face.hpp>
#include <mega/comm/concepts.hpp>
#include <mega/core/parameter.hpp>
#include <mega/core/view.hpp>
#include <mega/nn/transformer_config.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace trainer {

using HuggingFaceModel = mega::ckpt::HuggingFaceModel<mega::nn::TransformerConfig>;

template <class Spec>
inline constexpr mega::ckpt::HuggingFaceFamily family_of =
    Spec::position::has_table ? mega::ckpt::HuggingFaceFamily::gpt2
                              : mega::ckpt::HuggingFaceFamily::llama;

/// Fills the values that this rank holds.
template <class Trainer>
void import_weights(Trainer& trainer, const HuggingFaceModel& model) {
  auto& store = trainer.parameters();
  const auto position = store.table().position();
  std::vector<float> piece;
  for (const auto& e : store.table().entries()) {
    if (e.alias) continue;
    mega::Parameter source = e.parameter;
    if (!source.tied_to.empty()) source.name = source.tied_to;
    piece.resize(static_cast<std::size_t>(e.size));
    const mega::Vector<float> view(piece.data(), e.size);
    model.load(source, position.tensor, position.tensor_degree, view);
    store.load(trainer.compute(), e, view);
  }
}

/// One whole parameter on every rank. Collective over the trainer's world. Ranks add integers, of
/// which all but the owner's are zero, so that every bit arrives, signs of zeros too.
/// @param memory  of the device, for the pieces of the exchange
template <class Trainer>
void gather_parameter(Trainer& trainer, mega::Vector<std::int32_t> memory, const std::string& name,
                      std::span<float> out) {
  const auto& store = trainer.parameters();
  const auto position = store.table().position();
  std::vector<std::int32_t> bits(out.size(), 0);
  std::vector<float> piece;
  for (const auto& e : store.table().entries()) {
    if (e.parameter.name != name || !e.counted || position.data != 0) continue;
    piece.resize(static_cast<std::size_t>(e.size));
    store.read(trainer.compute(), e, {piece.data(), e.size});
    for (const mega::ShardRun& run :
         mega::shard_runs(e.parameter, position.tensor, position.tensor_degree)) {
      std::memcpy(bits.data() + run.global, piece.data() + run.local,
                  static_cast<std::size_t>(run.count) * sizeof(float));
    }
  }
  const mega::Vector<std::int32_t> whole(bits.data(), static_cast<mega::Index>(bits.size()));
  for (mega::Index first = 0; first < whole.size(); first += memory.size()) {
    const mega::Index count = std::min(memory.size(), whole.size() - first);
    const mega::Vector<std::int32_t> host = whole.slice(first, count);
    const mega::Vector<std::int32_t> shared = memory.slice(0, count);
    upload(trainer.compute(), shared, mega::Vector<const std::int32_t>(host));
    trainer.world().all_reduce(trainer.compute(), shared, mega::comm::Reduce::sum);
    download(trainer.compute(), host, mega::Vector<const std::int32_t>(shared));
    trainer.synchronize();
  }
  std::memcpy(out.data(), bits.data(), out.size_bytes());
}

/// Elements of a parameter that ranks exchange at once.
inline constexpr mega::Index exchanged_elements = mega::Index{4} << 20;

/// Rank 0 writes, all ranks hand over what they hold. @param device  of the trainer
template <class Spec, class Trainer>
void export_weights(Trainer& trainer, typename Trainer::device_type device,
                    const mega::nn::TransformerConfig& config, const std::string& directory) {
  const auto memory =
      device.allocate(static_cast<std::size_t>(exchanged_elements) * sizeof(std::int32_t));
  const mega::Vector<std::int32_t> shared(reinterpret_cast<std::int32_t*>(memory.data()),
                                          exchanged_elements);
  const auto gather = [&](const std::string& name, std::span<float> out) {
    gather_parameter(trainer, shared, name, out);
  };
  if (trainer.world().rank() == 0) {
    mega::ckpt::export_hugging_face(directory, family_of<Spec>, config, gather);
    return;
  }
  auto parameters = mega::ckpt::hugging_face_parameters(family_of<Spec>, config);
  if (config.tied_head) parameters.pop_back();
  std::vector<float> whole;
  for (const auto& p : parameters) {
    mega::Index size = 1;
    for (const mega::Index extent : p.shape) size *= extent;
    whole.resize(static_cast<std::size_t>(size));
    gather(p.name, whole);
  }
}

}  // namespace trainer
