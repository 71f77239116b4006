#include "compare/panels.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "base/error.h"
#include "compare/draw_text.h"
#include "io/video.h"

namespace orrery {

namespace {

constexpr int64_t kMargin = 2;  // pixels around a label's lines, at scale 1
constexpr int64_t kLabelLines = 2;
constexpr int64_t kWidthPerScale = 192;  // panels this wide get letters of the next size

int64_t scale_for(int64_t width) { return 1 + width / kWidthPerScale; }
int64_t even(int64_t size) { return size + size % 2; }

std::string figures(const StrategyOutcome& outcome) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << outcome.speed_up << "x  " << std::setprecision(0)
      << 100 * outcome.kept_share << "% kept";
  return out.str();
}

Image canvas(int64_t height, int64_t width) {
  return {height, width, std::vector<uint8_t>(static_cast<size_t>(height * width * 3))};
}

int64_t label_height(int64_t scale) { return (kLabelLines * kGlyphHeight + 2 * kMargin) * scale; }

void draw_label(Image& image, int64_t x, int64_t y, int64_t scale, int64_t width,
                const StrategyOutcome& outcome) {
  const auto letters =
      static_cast<size_t>(std::max<int64_t>(1, (width / scale - 2 * kMargin) / kGlyphWidth));
  const int64_t left = x + kMargin * scale, top = y + kMargin * scale;
  draw_text(image, left, top, scale, outcome.name.substr(0, letters));
  draw_text(image, left, top + kGlyphHeight * scale, scale, figures(outcome).substr(0, letters),
            {160, 200, 255});
}

// Copies every factor-th pixel block's mean of a frame to (x, y).
void draw_frame(Image& image, int64_t x, int64_t y, const Frames& frames, int64_t index,
                int64_t factor) {
  const uint8_t* rgb = frames.frame(index);
  for (int64_t row = 0; row < frames.height / factor; ++row) {
    for (int64_t column = 0; column < frames.width / factor; ++column) {
      for (int64_t c = 0; c < 3; ++c) {
        int64_t sum = 0;
        for (int64_t i = 0; i < factor; ++i) {
          for (int64_t j = 0; j < factor; ++j) {
            sum += rgb[((row * factor + i) * frames.width + column * factor + j) * 3 + c];
          }
        }
        const int64_t mean = (sum + factor * factor / 2) / (factor * factor);
        image.rgb[static_cast<size_t>(((y + row) * image.width + x + column) * 3 + c)] =
            static_cast<uint8_t>(mean);
      }
    }
  }
}

const Frames& check(const std::vector<StrategyOutcome>& outcomes) {
  require(!outcomes.empty(), "compare: no strategies");
  const Frames& first = outcomes.front().result.frames;
  for (const StrategyOutcome& outcome : outcomes) {
    const Frames& frames = outcome.result.frames;
    require(
        frames.count == first.count && frames.height == first.height && frames.width == first.width,
        "compare: \"", outcome.name, "\" made a clip of another size");
  }
  return first;
}

Frames as_frames(Image image) { return {1, image.height, image.width, std::move(image.rgb)}; }

}  // namespace

Frames side_by_side(const std::vector<StrategyOutcome>& outcomes, int64_t index, int64_t columns) {
  const Frames& first = check(outcomes);
  require(index >= 0 && index < first.count, "compare: frame ", index, " of ", first.count);
  require(columns >= 1, "compare: ", columns, " columns");
  const auto count = static_cast<int64_t>(outcomes.size());
  const int64_t scale = scale_for(first.width), label = label_height(scale);
  const int64_t across = std::min(columns, count), down = (count + across - 1) / across;
  Image image = canvas(even(down * (first.height + label)), even(across * first.width));
  for (int64_t i = 0; i < count; ++i) {
    const StrategyOutcome& outcome = outcomes[static_cast<size_t>(i)];
    const int64_t x = i % across * first.width, y = i / across * (first.height + label);
    draw_label(image, x, y, scale, first.width, outcome);
    draw_frame(image, x, y + label, outcome.result.frames, index, 1);
  }
  return as_frames(std::move(image));
}

Frames contact_sheet(const std::vector<StrategyOutcome>& outcomes, int64_t columns,
                     int64_t panel_width) {
  const Frames& first = check(outcomes);
  require(columns >= 1 && panel_width >= 1, "compare: ", columns, " columns of ", panel_width,
          " pixels");
  columns = std::min(columns, first.count);
  const int64_t factor = (first.width + panel_width - 1) / panel_width;
  const int64_t height = first.height / factor, width = first.width / factor;
  require(height > 0, "compare: panels of ", panel_width, " pixels are too small for ", first.width,
          "x", first.height);
  const int64_t scale = scale_for(width), label = label_height(scale);
  Image image = canvas(static_cast<int64_t>(outcomes.size()) * (height + label), columns * width);
  int64_t y = 0;
  for (const StrategyOutcome& outcome : outcomes) {
    draw_label(image, 0, y, scale, image.width, outcome);
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t index = columns == 1 ? 0 : i * (first.count - 1) / (columns - 1);
      draw_frame(image, i * width, y + label, outcome.result.frames, index, factor);
    }
    y += height + label;
  }
  return as_frames(std::move(image));
}

std::vector<uint8_t> encode_side_by_side(const std::vector<StrategyOutcome>& outcomes,
                                         const std::string& name, int crf) {
  const Frames& first = check(outcomes);
  VideoOptions options;
  const Frames frame = side_by_side(outcomes, 0);
  options.height = frame.height;
  options.width = frame.width;
  options.fps = outcomes.front().result.fps;
  options.crf = crf;
  options.metadata = outcomes.front().result.metadata;
  VideoEncoder encoder(name, options);
  for (int64_t i = 0; i < first.count; ++i) encoder.write(side_by_side(outcomes, i).rgb.data());
  return encoder.finish();
}

}  // namespace orrery
