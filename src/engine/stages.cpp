#include "engine/stages.h"

#include <algorithm>

namespace orrery {

std::string_view name_of(StageKind kind) {
  switch (kind) {
    case StageKind::check_prompt:
    case StageKind::check_frames: return "guardrail";
    case StageKind::prompt: return "prompt";
    case StageKind::encode: return "encode";
    case StageKind::noise: return "noise";
    case StageKind::load: return "load";
    case StageKind::warm_up: return "warm-up";
    case StageKind::denoise: return "denoise";
    case StageKind::decode: return "decode";
    case StageKind::sound: return "sound";
  }
  return "";
}

int64_t repeated_frames(const Settings& settings, int64_t chunk) {
  return settings.transfer && chunk > 0 ? settings.transfer->conditional : 0;
}

int64_t fresh_frames(const Settings& settings, int64_t chunk) {
  if (!settings.transfer) return settings.frames;
  const TransferSettings& transfer = *settings.transfer;
  const int64_t begin = chunk * transfer.stride + repeated_frames(settings, chunk);
  return std::min(transfer.chunk - repeated_frames(settings, chunk), settings.frames - begin);
}

std::vector<Stage> stages_of(const Settings& settings, const StageOptions& options) {
  std::vector<Stage> stages;
  const auto add = [&](StageKind kind, int64_t chunk, int64_t count = 1) {
    stages.push_back({kind, chunk, 0, count});
  };
  if (options.guardrail) add(StageKind::check_prompt, 0);
  add(StageKind::prompt, 0);
  const int64_t last = settings.chunks() - 1;
  for (int64_t chunk = 0; chunk <= last; ++chunk) {
    if (settings.transfer || settings.conditioning.encoded_frames > 0)
      add(StageKind::encode, chunk);
    add(StageKind::noise, chunk);
    if (options.loads) add(StageKind::load, chunk);
    if (options.warms_up && chunk == 0) add(StageKind::warm_up, chunk);
    add(StageKind::denoise, chunk, settings.schedule.num_steps());
    add(StageKind::decode, chunk, fresh_frames(settings, chunk));
  }
  if (settings.sound_frames > 0) add(StageKind::sound, last);
  if (options.guardrail) add(StageKind::check_frames, last);
  return stages;
}

}  // namespace orrery
