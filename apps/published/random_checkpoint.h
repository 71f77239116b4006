// A model folder with random weights of any configuration.
#pragma once

#include "published/make_checkpoint.h"
#include "published/presets.h"

namespace orrery {

// As make_checkpoint(); `preset` stands for options.config and options.num_layers.
void write_random_checkpoint(const std::filesystem::path& folder, const ModelPreset& preset,
                             const CheckpointOptions& options, const ProgressCallback& progress,
                             std::stop_token stop);

}  // namespace orrery
