#include "engine/transfer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <future>
#include <map>
#include <string_view>

#include "base/error.h"
#include "io/control_maps.h"

namespace orrery {

namespace {

struct Hint {
  ControlHint hint;
  TransferDefaults defaults;
};
// In the order in which controls stand in the sequence.
constexpr std::array<Hint, 5> kHints{{{ControlHint::edge, {3, 1.5}},
                                      {ControlHint::blur, {3, 1.5}},
                                      {ControlHint::depth, {3, 1.5}},
                                      {ControlHint::seg, {3, 2}},
                                      {ControlHint::wsm, {1, 3, 10, 101}}}};

TimestepInterval checked_interval(const std::optional<TimestepInterval>& given, const char* name) {
  if (!given) return {-INFINITY, INFINITY};
  require(std::isfinite(given->begin) && std::isfinite(given->end) && given->begin <= given->end,
          name, " is [", given->begin, ", ", given->end,
          "]; the first timestep must not be above the second");
  return *given;
}

// The control that is made of a frame.
Image computed(const Control& control, const Image& frame) {
  const std::string_view preset = name_of(preset_of(control));
  if (control.hint == ControlHint::edge) return edge_map(frame, edge_preset(preset));
  return blur_map(frame, blur_preset(preset));
}

// Of a control without a video of its own.
void check_computed(const Request& request, const Control& control) {
  require(control.hint == ControlHint::edge || control.hint == ControlHint::blur, "control ",
          name_of(control.hint),
          " needs a video of its own: only edge and blur can be computed from the input video");
  require(request.video && request.video->count > 0, "control ", name_of(control.hint),
          " has no video, and there is no input video to compute it from");
}

// Every control in the reference's order, known, once, and with frames.
void resolve_controls(const Request& request, TransferSettings& out) {
  const TransferRequest& transfer = *request.transfer;
  require(!transfer.controls.empty(),
          "transfer needs at least one control video (--control HINT=FILE)");
  for (const Control& control : transfer.controls) {
    if (control.video.count == 0) check_computed(request, control);
    require(control.video.count == 0 || !control.preset, "control ", name_of(control.hint),
            " has a preset and a video of its own; a preset says how it is computed from the input "
            "video");
  }
  for (const Hint& known : kHints) {
    const std::string name(name_of(known.hint));
    for (size_t i = 0; i < transfer.controls.size(); ++i) {
      if (transfer.controls[i].hint != known.hint) continue;
      require(out.hints.empty() || out.hints.back() != name, "control ", name, " is given twice");
      out.hints.push_back(name);
      out.order.push_back(i);
    }
  }
}

void resolve_weights(const TransferRequest& transfer, TransferSettings& out) {
  const bool is_joint = transfer.attention == ControlAttention::joint;
  double sum = 0;
  for (size_t i : out.order) {
    const Control& control = transfer.controls[i];
    require(!control.weight || !is_joint, "the control weight of ", name_of(control.hint),
            " has no meaning with joint attention; leave it out or use weighted attention");
    const double weight = control.weight.value_or(1.0);
    require(std::isfinite(weight) && weight >= 0, "the control weight of ", name_of(control.hint),
            " is ", weight, "; it must not be negative");
    out.weights.push_back(static_cast<float>(weight));
    sum += weight;
  }
  require(sum > 0, "the control weights sum to 0; at least one must be positive");
  for (float& weight : out.weights) weight = static_cast<float>(static_cast<double>(weight) / sum);
  if (is_joint) out.weights.clear();
}

}  // namespace

TransferDefaults transfer_defaults(const TransferRequest& transfer) {
  if (transfer.controls.size() != 1) return {};
  const auto is_it = [&](const Hint& known) { return known.hint == transfer.controls[0].hint; };
  return std::find_if(kHints.begin(), kHints.end(), is_it)->defaults;
}

double transfer_fps(const Request& request) {
  if (request.video && request.video->fps > 0) return request.video->fps;
  return transfer_defaults(*request.transfer).fps;
}

ChunkPlan plan_chunks(int64_t total, int64_t wanted, int64_t overlap, int64_t temporal) {
  require(total >= 1 && wanted >= 1, "transfer: ", total, " frames in chunks of ", wanted);
  ChunkPlan plan;
  plan.chunk = total == 1 ? 1 : (wanted - 1 + temporal - 1) / temporal * temporal + 1;
  plan.stride = plan.chunk;
  if (total <= plan.chunk) return plan;
  plan.stride = plan.chunk - overlap;
  require(overlap >= 0 && plan.stride > 0, "num_conditional_frames is ", overlap,
          "; it must be from 0 to ", plan.chunk - 1, " for chunks of ", plan.chunk, " frames");
  plan.count = 1 + (total - plan.chunk + plan.stride - 1) / plan.stride;
  return plan;
}

std::vector<int64_t> back_and_forth(int64_t length, int64_t padded) {
  std::vector<int64_t> frames;
  for (int64_t i = 0; i < std::min(length, padded); ++i) frames.push_back(i);
  // The reference appends the reversed clip without its last frame (which was the first) until the
  // clip is long enough; a clip of one frame is repeated.
  while (static_cast<int64_t>(frames.size()) < padded) {
    const auto now = static_cast<int64_t>(frames.size());
    const int64_t count = std::min(std::max<int64_t>(now - 1, 1), padded - now);
    for (int64_t i = 0; i < count; ++i) frames.push_back(frames[static_cast<size_t>(now - 1 - i)]);
  }
  return frames;
}

std::vector<int64_t> control_frames(const Settings& s, int64_t length, int64_t index) {
  const TransferSettings& t = *s.transfer;
  const std::vector<int64_t> whole = back_and_forth(length, std::max(s.frames, t.chunk));
  const int64_t begin = index * t.stride, end = std::min(begin + t.chunk, s.frames);
  std::vector<int64_t> window;
  for (int64_t i : back_and_forth(end - begin, t.chunk))
    window.push_back(whole[static_cast<size_t>(begin + i)]);
  return window;
}

ControlPreset preset_of(const Control& control) {
  return control.preset.value_or(ControlPreset::medium);
}

const Frames& control_source(const Request& request, const Control& control) {
  return control.video.count > 0 ? control.video : request.video.value();
}

namespace {

// body(0) to body(count - 1), each on one of up to `threads` threads.
void in_parallel(size_t count, int threads, const std::function<void(size_t)>& body) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < count;) body(i);
  };
  std::vector<std::future<void>> helpers;
  for (int i = 1; i < threads && static_cast<size_t>(i) < count; ++i) {
    helpers.push_back(std::async(std::launch::async, work));
  }
  work();
  for (auto& helper : helpers) helper.get();
}

}  // namespace

std::vector<float> control_pixels(const Request& request, const Settings& s, size_t which,
                                  int64_t index, int threads) {
  const Control& control = request.transfer->controls[s.transfer->order[which]];
  const Frames& source = control_source(request, control);
  const std::vector<int64_t> frames = control_frames(s, source.count, index);
  const auto count = static_cast<int64_t>(frames.size());
  const int64_t plane = s.height * s.width;
  std::vector<float> pixels(static_cast<size_t>(3 * count * plane));
  // A frame that stands in several places is made once.
  std::map<int64_t, std::vector<int64_t>> places;
  for (int64_t i = 0; i < count; ++i) places[frames[static_cast<size_t>(i)]].push_back(i);
  const std::vector<std::pair<int64_t, std::vector<int64_t>>> work(places.begin(), places.end());
  in_parallel(work.size(), threads, [&](size_t item) {
    const auto& [frame, stands_at] = work[item];
    Image image = fitted(source, frame, request.video_fit, s);
    if (control.video.count == 0) image = computed(control, image);
    const std::vector<float> planes = normalized(image);
    for (const int64_t i : stands_at) {
      for (int64_t c = 0; c < 3; ++c) {
        std::copy_n(planes.begin() + c * plane, plane, pixels.begin() + (c * count + i) * plane);
      }
    }
  });
  return pixels;
}

Conditioning condition_first(int64_t frames, int64_t latent_frames, const VaeConfig& vae) {
  Conditioning out;
  out.noisy.assign(static_cast<size_t>(latent_frames), true);
  if (frames == 0) return out;
  const int64_t fixed = vae.latent_frames(frames);
  for (int64_t t = 0; t < fixed; ++t) out.noisy[static_cast<size_t>(t)] = false;
  out.encoded_frames = vae.decoded_frames(fixed);
  return out;
}

Conditioning chunk_conditioning(const Settings& s, int64_t index, const VaeConfig& vae) {
  return index == 0 ? s.conditioning
                    : condition_first(s.transfer->conditional, s.latent_frames, vae);
}

GuidanceFactors transfer_guidance(const Settings& s, double timestep) {
  const TransferSettings& t = *s.transfer;
  const double g = s.guided() && t.guidance_interval.holds(timestep) ? s.guidance_scale : 1.0;
  const double control = t.control_guidance_interval.holds(timestep) ? t.control_guidance : 1.0;
  // k = plain + control (full - plain), then negative + g (k - negative).
  return {g * control, g * (1.0 - control), 1.0 - g};
}

void resolve_transfer(const Request& request, const Checkpoint& checkpoint, Settings& s) {
  const TransferRequest& transfer = *request.transfer;
  const VaeConfig& vae = checkpoint.vae;
  require(!request.action, "transfer and actions cannot be combined");
  require(!request.enable_sound, "transfer makes no sound; leave enable_sound out");
  require(!request.image, "transfer takes its first frames from a video, not from an image");
  TransferSettings out;
  resolve_controls(request, out);
  resolve_weights(transfer, out);
  out.control_guidance = transfer.control_guidance.value_or(
      checkpoint.folder.is_distilled() ? 1.0 : transfer_defaults(transfer).control_guidance);
  require(std::isfinite(out.control_guidance) && std::abs(out.control_guidance) <= 1e4,
          "control_guidance is ", out.control_guidance, "; it must be a number of at most 10000");
  out.reseeds = transfer.chunk_noise == ChunkNoise::reseed;
  out.guidance_interval = checked_interval(transfer.guidance_interval, "guidance_interval");
  out.control_guidance_interval =
      checked_interval(transfer.control_guidance_interval, "control_guidance_interval");

  const int64_t available = control_source(request, transfer.controls[out.order.front()]).count;
  require(!request.num_frames || *request.num_frames >= 1, "num_frames must be at least 1, got ",
          *request.num_frames);
  s.frames = std::min(available, request.num_frames.value_or(available));
  require(s.frames <= kMaxFrames, "the first control has ", available, " frames; the limit is ",
          kMaxFrames, ", set num_frames to take fewer");
  if (request.num_frames && *request.num_frames > s.frames) {
    s.notices.push_back(concat("num_frames ", *request.num_frames, " is more than the ", available,
                               " frames of the ", out.hints.front(), " control: ", s.frames,
                               " are made"));
  }
  s.requested_frames = s.frames;
  s.height =
      checked_side("height", request.height.value_or(kDefaultHeight), vae.scale_factor_spatial);
  s.width = checked_side("width", request.width.value_or(kDefaultWidth), vae.scale_factor_spatial);

  const int64_t most = transfer_defaults(transfer).chunk;
  const int64_t wanted =
      transfer.num_video_frames_per_chunk.value_or(most > 0 ? std::min(most, s.frames) : s.frames);
  require(wanted >= 1, "num_video_frames_per_chunk must be at least 1, got ", wanted);
  require(wanted <= kMaxFrames, "num_video_frames_per_chunk is ", wanted, "; the limit is ",
          kMaxFrames);
  const ChunkPlan plan =
      plan_chunks(s.frames, wanted, transfer.num_conditional_frames, vae.scale_factor_temporal);
  out.chunk = plan.chunk;
  out.stride = plan.stride;
  out.chunks = plan.count;
  out.conditional = transfer.num_conditional_frames;
  const int64_t first = transfer.num_first_chunk_conditional_frames;
  require(first >= 0, "num_first_chunk_conditional_frames must not be negative, got ", first);
  require(first == 0 || request.video, "num_first_chunk_conditional_frames is ", first,
          ", but there is no video to take them from");
  const bool is_source =
      std::any_of(transfer.controls.begin(), transfer.controls.end(),
                  [](const Control& control) { return control.video.count == 0; });
  require(first > 0 || is_source || !request.video,
          "the video would have no effect: no control is computed from it, and "
          "num_first_chunk_conditional_frames says how many of its frames are kept");
  require(!request.video || request.condition_video_keep == VideoKeep::first,
          "transfer keeps the first frames of a video; condition_video_keep cannot be \"",
          name_of(request.condition_video_keep), "\"");
  require(!request.video || request.video->count > 0, "the conditioning video has no frames");
  if (request.video) out.first_conditional = std::min({first, request.video->count, out.chunk});
  require(!request.latents || out.chunks == 1,
          "latents can be given for one chunk only; this request has ", out.chunks);

  s.mode = Mode::transfer;
  s.latent_frames = vae.latent_frames(out.chunk);
  s.latent_height = s.height / vae.scale_factor_spatial;
  s.latent_width = s.width / vae.scale_factor_spatial;
  s.canvas_height = s.height;
  s.canvas_width = s.width;
  s.conditioning = condition_first(out.first_conditional, s.latent_frames, vae);
  s.transfer = std::move(out);
}

}  // namespace orrery
