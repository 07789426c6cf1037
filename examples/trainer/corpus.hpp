/// @file  The text of a run.
#pragma once
#include "config.hpp"
#include <mega/data/jsonl.hpp>
#include <mega/data/sampler.hpp>
#include <mega/data/token_source.hpp>

namespace trainer {

/// Opened once a process; ranks that are its threads share it.
struct Corpus {
  mega::data::ByteTokenSource tokens;
  mega::data::TokenSplit split;

  explicit Corpus(const Config& c)
      : tokens(mega::data::open_token_source(c.data_path)),
        split(mega::data::split_tokens(tokens.size(), c.valid_fraction)) {}
};

}  // namespace trainer
