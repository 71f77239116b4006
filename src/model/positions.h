// 3-D rotary positions and tables (docs/internals/transformer.md). All of it fp32
// in the reference's order of operations: positions exceed 15 000, where one ulp is 2^-10.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attention/sequence.h"
#include "model/transformer_config.h"

namespace orrery {

// One position per axis (T, H, W).
using Positions = std::vector<std::array<float, 3>>;

Positions text_positions(int64_t count);

// A generation item's rate: fps known -> temporal positions are modulated by it.
struct ItemRate {
  double rate = 0;              // items per second of this modality; 0: unknown, integer positions
  double compression = 1;       // q: frames per token
  double base_compression = 1;  // q0
  int64_t start = 0;            // s
};
ItemRate video_rate(double fps, int64_t temporal_compression);
ItemRate sound_rate(const TransformerConfig& config);
ItemRate action_rate(double fps, int64_t temporal_compression);

// Appends the positions of a grid (frames, rows, columns), frame slowest, for a text of `text`
// tokens.
void append_item(Positions& positions, const TransformerConfig& config, int64_t text,
                 const std::array<int64_t, 3>& grid, const ItemRate& rate);

// cos and sin, each [positions, head_dim / 2] row-major.
struct RopeTable {
  std::vector<float> cos, sin;
};
RopeTable rope_table(const TransformerConfig& config, const Positions& positions);

}  // namespace orrery
