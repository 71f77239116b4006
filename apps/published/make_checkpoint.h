// Checkpoints of the published sizes with random weights: the real layout, nothing to download.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <stop_token>
#include <string>

#include "orrery/result.h"

namespace orrery {

struct CheckpointOptions {
  std::string config = "nano";  // nano, super or edge
  int64_t num_layers = 0;       // 0: the config's
  int64_t seed = 0;
  // A text_tokenizer folder to copy; empty: a byte tokenizer with the special tokens is written.
  std::filesystem::path tokenizer;
  std::function<void(const std::string&)> log;  // notices, one sentence each; may be empty
};

// Writes a model folder of bf16 weights: model_index.json, transformer/ in shards with an index,
// vae/, scheduler/, text_tokenizer/. Everything goes to a folder beside `folder` that is renamed at
// the end; refuses a folder that holds something, and a disk without room. Progress counts
// megabytes.
void make_checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options,
                     const ProgressCallback& progress = {}, std::stop_token stop = {});

}  // namespace orrery
