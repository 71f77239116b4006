#include "model/positions.h"

#include <cmath>

namespace orrery {

Positions text_positions(int64_t count) {
  Positions positions;
  positions.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const auto p = static_cast<float>(i);
    positions.push_back({p, p, p});
  }
  return positions;
}

ItemRate video_rate(double fps, int64_t temporal_compression) {
  const auto q = static_cast<double>(temporal_compression);
  return {fps, q, q, 0};
}

ItemRate sound_rate(const TransformerConfig& config) { return {config.sound_latent_fps, 1, 1, 0}; }

ItemRate action_rate(double fps, int64_t temporal_compression) {
  return {fps, 1, static_cast<double>(temporal_compression), 1};
}

void append_item(Positions& positions, const TransformerConfig& config, int64_t text,
                 const std::array<int64_t, 3>& grid, const ItemRate& rate) {
  const auto [frames, rows, columns] = grid;
  const int64_t offset = text + config.temporal_margin;
  const bool modulated = config.enable_fps_modulation && rate.rate > 0 && frames > 1;
  const auto tokens_per_second = static_cast<float>(rate.rate / rate.compression);
  const auto base_tokens_per_second = static_cast<float>(config.base_fps / rate.base_compression);
  const float spatial = config.reset_spatial_ids ? 0.0f : static_cast<float>(offset);
  for (int64_t k = 0; k < frames; ++k) {
    float t;
    if (modulated) {
      // Separate statements: each quotient, product and sum is rounded to fp32 on its own.
      const float seconds = static_cast<float>(k + rate.start) / tokens_per_second;
      const float scaled = seconds * base_tokens_per_second;
      t = scaled + static_cast<float>(offset);
    } else {
      t = static_cast<float>(k + rate.start + offset);
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        positions.push_back({t, spatial + static_cast<float>(i), spatial + static_cast<float>(j)});
      }
    }
  }
}

RopeTable rope_table(const TransformerConfig& config, const Positions& positions) {
  const int64_t half = config.head_dim / 2;
  std::vector<float> frequency(static_cast<size_t>(half));
  std::vector<size_t> axis(static_cast<size_t>(half), 0);
  for (int64_t j = 0; j < half; ++j) {
    // Two roundings, as the reference: theta^e in fp32, then its reciprocal in fp32.
    const float exponent = static_cast<float>(2 * j) / static_cast<float>(config.head_dim);
    const auto power =
        static_cast<float>(std::pow(config.rope_theta, static_cast<double>(exponent)));
    frequency[static_cast<size_t>(j)] = 1.0f / power;
  }
  // Interleaved axes: H takes 1, 4, 7, ... below 3 sH, W takes 2, 5, 8, ... below 3 sW, T the rest.
  for (size_t a : {size_t{1}, size_t{2}}) {
    for (int64_t j = static_cast<int64_t>(a); j < 3 * config.rope_axes_dim[a] && j < half; j += 3) {
      axis[static_cast<size_t>(j)] = a;
    }
  }
  RopeTable table;
  table.cos.reserve(positions.size() * static_cast<size_t>(half));
  table.sin.reserve(positions.size() * static_cast<size_t>(half));
  for (const auto& position : positions) {
    for (size_t j = 0; j < frequency.size(); ++j) {
      const float angle = position[axis[j]] * frequency[j];
      table.cos.push_back(std::cos(angle));
      table.sin.push_back(std::sin(angle));
    }
  }
  return table;
}

}  // namespace orrery
