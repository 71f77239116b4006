#include "attention/describe.h"

#include <algorithm>
#include <sstream>

#include "attention/method.h"
#include "base/error.h"

namespace orrery {

namespace {

std::string padded(std::string text, size_t width) {
  if (text.size() < width) text.resize(width, ' ');
  return text;
}

void describe_layout(std::ostringstream& out, const AttentionStrategy& strategy, int layout) {
  const AttentionInventory& inventory = strategy.inventory();
  out << "layout " << strategy.layout_name(layout) << '\n';
  for (AttentionRole role : inventory.roles) {
    std::string name(name_of(role));
    for (int preset = 0; preset < strategy.num_presets(); ++preset) {
      std::vector<int> layers;
      for (int layer = 0; layer < inventory.num_layers; ++layer) {
        if (strategy.preset(layout, layer, role) == preset) layers.push_back(layer);
      }
      if (layers.empty()) continue;
      out << "  " << padded(name, 26) << padded(strategy.preset_name(preset), 20) << " layers "
          << layer_ranges(layers) << '\n';
      name.clear();
    }
  }
}

}  // namespace

std::string layer_ranges(const std::vector<int>& layers) {
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t end = i + 1;
    while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
    const char* separator = text.empty() ? "" : ", ";
    if (end - i >= 3) {
      text += concat(separator, layers[i], "..", layers[end - 1]);
    } else {
      end = i + 1;
      text += concat(separator, layers[i]);
    }
    i = end;
  }
  return text;
}

std::string describe(const AttentionStrategy& strategy, const std::vector<PresetTrial>& trials,
                     int num_steps) {
  std::ostringstream out;
  const auto& tile = strategy.token_order().tile;
  out << "attention strategy from: " << strategy.source() << '\n' << "token order: ";
  if (strategy.token_order().raster()) {
    out << "raster\n";
  } else {
    out << "tiles of " << tile[0] << 'x' << tile[1] << 'x' << tile[2] << '\n';
  }
  out << "presets\n";
  for (int preset = 0; preset < strategy.num_presets(); ++preset) {
    const std::string& name = strategy.preset_name(preset);
    out << "  " << padded(name, 20) << ' ' << strategy.preset_method(preset).description();
    const auto trial = std::find_if(trials.begin(), trials.end(),
                                    [&](const PresetTrial& t) { return t.preset == name; });
    if (trial != trials.end()) {
      out << " -> " << (trial->failure.empty() ? trial->implementation : trial->failure);
    }
    out << '\n';
  }
  const std::vector<std::string> phases = strategy.phases(num_steps);
  if (!phases.empty()) out << "schedule over " << num_steps << " steps\n";
  for (const std::string& phase : phases) out << "  " << phase << '\n';
  for (int layout = 0; layout < strategy.num_layouts(); ++layout) {
    describe_layout(out, strategy, layout);
  }
  return out.str();
}

}  // namespace orrery
