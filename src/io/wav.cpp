#include "io/wav.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "base/error.h"

namespace orrery {
namespace {

constexpr int64_t kHeader = 44, kSampleBytes = 2, kFormatBytes = 16;

// Little-endian fields one after the other.
struct Bytes {
  std::string data;
  void text(std::string_view four) { data += four; }
  void number(int64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) data += static_cast<char>(value >> (8 * i) & 0xff);
  }
};

}  // namespace

std::string encode_wav(const std::vector<std::vector<float>>& channels, int64_t sampling_rate,
                       const std::string& name) {
  const auto count = std::ssize(channels);
  require(count >= 1 && count <= 2, name, ": the sound has ", count,
          " channels; one or two can be written");
  const int64_t samples = std::ssize(channels[0]), bytes = samples * count * kSampleBytes;
  require(bytes <= INT64_C(0xffffffff) - kHeader, name, ": ", bytes,
          " bytes of sound do not fit into a WAV file");
  require(sampling_rate > 0 && sampling_rate <= 384000, name, ": a sampling rate of ",
          sampling_rate, " cannot be written");
  for (const auto& channel : channels) {
    require(std::ssize(channel) == samples, name, ": the channels of the sound differ in length (",
            samples, " and ", channel.size(), " samples)");
    require(std::all_of(channel.begin(), channel.end(), [](float x) { return std::isfinite(x); }),
            ErrorKind::numeric, name, ": the sound holds NaN or infinite samples");
  }
  Bytes out;
  out.data.reserve(static_cast<size_t>(kHeader + bytes));
  out.text("RIFF");
  out.number(kHeader - 8 + bytes, 4);
  out.text("WAVEfmt ");
  out.number(kFormatBytes, 4);
  out.number(1, 2);  // PCM
  out.number(count, 2);
  out.number(sampling_rate, 4);
  out.number(sampling_rate * count * kSampleBytes, 4);
  out.number(count * kSampleBytes, 2);
  out.number(8 * kSampleBytes, 2);
  out.text("data");
  out.number(bytes, 4);
  for (size_t i = 0; i < static_cast<size_t>(samples); ++i) {
    for (const auto& channel : channels) {
      out.number(std::lround(std::clamp(channel[i], -1.0f, 1.0f) * 32767.0f), kSampleBytes);
    }
  }
  return std::move(out.data);
}

}  // namespace orrery
