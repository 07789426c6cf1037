/// @file  Training on GPUs, as the program sees it: no kernel is included here, so the program's
/// main compiles apart from its training loops.
#pragma once
#include "corpus.hpp"
#include "hugging_face.hpp"
#include "job.hpp"
#include <mega/core/storage.hpp>

#include <cstddef>
#include <vector>

namespace trainer {

/// Runs the job to its end, rank r on GPU r of this process. Defined in gpu_run.cuh; a program has
/// one .cu file for each instantiation, since they take long to compile and so compile beside each
/// other.
/// @param start_from  weights to begin with, or null
/// @param planned     bytes of every rank
/// @throws  Error(usage) where another program holds the memory that a rank needs, and whatever
/// ends
///          the run
template <class Spec, mega::storage Element>
void train_on_gpus(const Job& job, const Corpus& corpus, const HuggingFaceModel* start_from,
                   const std::vector<std::size_t>& planned);

}  // namespace trainer
