#include "engine/transfer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "expect_error.h"
#include "io/control_maps.h"

namespace orrery {
namespace {

Frames clip(int64_t count, int64_t height = 16, int64_t width = 16) {
  Frames frames{count, height, width, {}};
  for (int64_t i = 0; i < count; ++i) {
    frames.rgb.insert(frames.rgb.end(), static_cast<size_t>(height * width * 3),
                      static_cast<uint8_t>(i));
  }
  return frames;
}

Checkpoint checkpoint() {
  Checkpoint out;
  out.vae.scale_factor_spatial = 16;
  out.vae.scale_factor_temporal = 4;
  return out;
}

Request request_with(std::vector<Control> controls) {
  Request request;
  request.prompt = "A road.";
  request.height = 16;
  request.width = 32;
  request.transfer = TransferRequest{};
  request.transfer->controls = std::move(controls);
  return request;
}

Settings resolved(const Request& request) {
  Settings settings;
  resolve_transfer(request, checkpoint(), settings);
  settings.guidance_scale =
      request.guidance_scale.value_or(transfer_defaults(*request.transfer).guidance);
  return settings;
}

// Section 9.1.
TEST(TransferChunks, FollowTheTable) {
  struct Case {
    int64_t total, wanted, overlap, chunk, stride, count;
  };
  for (const Case& c : std::vector<Case>{{1, 93, 1, 1, 1, 1},
                                         {121, 121, 1, 121, 121, 1},
                                         {100, 100, 1, 101, 101, 1},
                                         {93, 93, 1, 93, 93, 1},
                                         {94, 93, 1, 93, 92, 2},
                                         {185, 93, 1, 93, 92, 2},
                                         {186, 93, 1, 93, 92, 3},
                                         {20, 5, 2, 5, 3, 6},
                                         {20, 6, 0, 9, 9, 3},
                                         {7, 1, 0, 1, 1, 7},
                                         {5000, 93, 5, 93, 88, 57}}) {
    const ChunkPlan plan = plan_chunks(c.total, c.wanted, c.overlap, 4);
    EXPECT_EQ(plan.chunk, c.chunk) << c.total;
    EXPECT_EQ(plan.stride, c.stride) << c.total;
    EXPECT_EQ(plan.count, c.count) << c.total;
    // Every frame is made, and none of the chunks is for nothing.
    EXPECT_GE(plan.chunk + (plan.count - 1) * plan.stride, c.total);
    EXPECT_LT(plan.chunk + (plan.count - 2) * plan.stride, c.total);
  }
  expect_error(ErrorKind::invalid_argument, {"num_conditional_frames is 5", "from 0 to 4"},
               [] { plan_chunks(20, 5, 5, 4); });
  expect_error(ErrorKind::invalid_argument, {"-1"}, [] { plan_chunks(20, 5, -1, 4); });
  EXPECT_EQ(plan_chunks(5, 5, 99, 4).count, 1);  // one chunk: nothing overlaps
}

TEST(TransferChunks, RunBackAndForthPastTheEnd) {
  using Indexes = std::vector<int64_t>;
  EXPECT_EQ(back_and_forth(3, 2), (Indexes{0, 1}));
  EXPECT_EQ(back_and_forth(3, 5), (Indexes{0, 1, 2, 2, 1}));
  // The clip that is appended next is the longer one: 0 1 2 2 1 reversed, without its last frame.
  EXPECT_EQ(back_and_forth(3, 9), (Indexes{0, 1, 2, 2, 1, 1, 2, 2, 1}));
  EXPECT_EQ(back_and_forth(1, 4), (Indexes{0, 0, 0, 0}));
  EXPECT_EQ(back_and_forth(2, 5), (Indexes{0, 1, 1, 1, 1}));
}

TEST(TransferChunks, WindowsOfTheControl) {
  Request request = request_with({{ControlHint::edge, clip(12), {}}});
  request.transfer->num_video_frames_per_chunk = 5;
  request.transfer->num_conditional_frames = 2;
  const Settings s = resolved(request);
  ASSERT_EQ(s.transfer->chunks, 4);
  using Indexes = std::vector<int64_t>;
  EXPECT_EQ(control_frames(s, 12, 0), (Indexes{0, 1, 2, 3, 4}));
  EXPECT_EQ(control_frames(s, 12, 1), (Indexes{3, 4, 5, 6, 7}));
  EXPECT_EQ(control_frames(s, 12, 3), (Indexes{9, 10, 11, 11, 10}));
  // A shorter control runs back, a longer one is cut.
  EXPECT_EQ(control_frames(s, 4, 1), (Indexes{3, 3, 2, 1, 1}));
  EXPECT_EQ(control_frames(s, 40, 3), (Indexes{9, 10, 11, 11, 10}));
  // Frames past the asked-for end are not looked at, even where the chunk is longer.
  request.num_frames = 3;
  EXPECT_EQ(control_frames(resolved(request), 40, 0), (Indexes{0, 1, 2, 2, 1}));
  // Pixels: the clip's frame i is i everywhere.
  const std::vector<float> pixels = control_pixels(request, s, 0, 3, 2);
  ASSERT_EQ(pixels.size(), 3u * 5 * 16 * 32);
  for (size_t frame = 0; frame < 5; ++frame) {
    const double want = std::array{9, 10, 11, 11, 10}[frame] / 127.5 - 1;
    for (size_t channel = 0; channel < 3; ++channel) {
      EXPECT_NEAR(pixels[(channel * 5 + frame) * 512 + 77], want, 1e-6);
    }
  }
}

// Section 9.2: the latent frames that n pixel frames fix, and how many pixel frames the causal
// encoder reads for them.
TEST(TransferChunks, ConditionedLatents) {
  const VaeConfig vae = checkpoint().vae;
  struct Case {
    int64_t frames, fixed, encoded;
  };
  for (const Case& c : std::vector<Case>{
           {0, 0, 0}, {1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {5, 2, 5}, {8, 2, 5}, {9, 3, 9}}) {
    const Conditioning out = condition_first(c.frames, 4, vae);
    EXPECT_EQ(std::count(out.noisy.begin(), out.noisy.end(), false), c.fixed) << c.frames;
    for (int64_t t = 0; t < c.fixed; ++t) EXPECT_FALSE(out.noisy[static_cast<size_t>(t)]);
    EXPECT_EQ(out.encoded_frames, c.encoded) << c.frames;
    EXPECT_LE(out.encoded_frames, c.frames);  // never a frame that is only padding
  }
}

TEST(Transfer, GuidanceIsTheFormulaOfTheTable) {
  Request request = request_with({{ControlHint::edge, clip(5), {}}});
  request.guidance_scale = 3;
  request.transfer->control_guidance = 1.5;
  request.transfer->guidance_interval = TimestepInterval{400, 1000};
  request.transfer->control_guidance_interval = TimestepInterval{0, 700};
  const Settings s = resolved(request);
  const double f = 2, n = 5, u = 11, g = 3, cg = 1.5;
  const double k = n + cg * (f - n);
  struct Case {
    double timestep, velocity;
  };
  for (const Case& c :
       std::vector<Case>{{999, u + g * (f - u)},
                         {700, u + g * (k - u)},  // both ends belong to the interval
                         {400, u + g * (k - u)},
                         {399, k},
                         {0, k}}) {
    const GuidanceFactors factors = transfer_guidance(s, c.timestep);
    EXPECT_NEAR(factors.full * f + factors.plain * n + factors.negative * u, c.velocity, 1e-12)
        << c.timestep;
  }
  // A branch that does not count is not evaluated.
  EXPECT_EQ(transfer_guidance(s, 999).plain, 0);
  EXPECT_EQ(transfer_guidance(s, 0).negative, 0);
  // Below 1 there is no guidance in transfer.
  request.guidance_scale = 0.5;
  EXPECT_EQ(transfer_guidance(resolved(request), 999).negative, 0);
  EXPECT_FALSE(resolved(request).guided());
}

TEST(Transfer, ControlsStandInTheReferencesOrderWithTheirWeights) {
  const Settings s =
      resolved(request_with({{ControlHint::seg, clip(9), 3.0}, {ControlHint::edge, clip(5), 1.0}}));
  EXPECT_EQ(s.transfer->hints, (std::vector<std::string>{"edge", "seg"}));
  EXPECT_EQ(s.transfer->order, (std::vector<size_t>{1, 0}));
  EXPECT_EQ(s.transfer->weights, (std::vector<float>{0.25f, 0.75f}));
  EXPECT_EQ(s.frames, 5);  // of the first control
  // B44: one control's weight is 1 whatever was given.
  EXPECT_EQ(resolved(request_with({{ControlHint::edge, clip(5), 0.3}})).transfer->weights,
            (std::vector<float>{1.0f}));
  Request joint = request_with({{ControlHint::seg, clip(5), {}}, {ControlHint::edge, clip(5), {}}});
  joint.transfer->attention = ControlAttention::joint;
  EXPECT_TRUE(resolved(joint).transfer->weights.empty());
}

TEST(Transfer, DefaultsComeWithTheHint) {
  const auto of = [](ControlHint hint) {
    return transfer_defaults(*request_with({{hint, clip(5), {}}}).transfer);
  };
  EXPECT_EQ(of(ControlHint::edge).guidance, 3);
  EXPECT_EQ(of(ControlHint::depth).control_guidance, 1.5);
  EXPECT_EQ(of(ControlHint::seg).control_guidance, 2);
  EXPECT_EQ(of(ControlHint::wsm).guidance, 1);
  EXPECT_EQ(of(ControlHint::wsm).control_guidance, 3);
  EXPECT_EQ(resolved(request_with({{ControlHint::seg, clip(5), {}}})).transfer->control_guidance,
            2);
  // wsm alone: chunks of 101 frames at 10 a second.
  const Request wsm = request_with({{ControlHint::wsm, clip(150), {}}});
  EXPECT_EQ(transfer_fps(wsm), 10);
  EXPECT_EQ(resolved(wsm).transfer->chunk, 101);
  EXPECT_EQ(resolved(wsm).transfer->chunks, 2);
  EXPECT_EQ(resolved(request_with({{ControlHint::wsm, clip(9), {}}})).transfer->chunk, 9);
  Request other = request_with({{ControlHint::edge, clip(150), {}}});
  EXPECT_EQ(transfer_fps(other), 24);
  EXPECT_EQ(resolved(other).transfer->chunks, 1);
  // A clip keeps the pace of the one it is made from.
  other.video = clip(5);
  other.video->fps = 30;
  EXPECT_EQ(transfer_fps(other), 30);
}

// A computed control is that of the frame as it enters the model: at its size.
TEST(Transfer, ControlsComputedFromTheVideo) {
  Request request = request_with(
      {{ControlHint::edge, {}, {}}, {ControlHint::blur, {}, {}, ControlPreset::very_low}});
  // Black, the right half white: 32 x 16 becomes 64 x 32.
  Frames halves{2, 16, 32, {}};
  for (int64_t i = 0; i < 2 * 16 * 32; ++i) {
    halves.rgb.insert(halves.rgb.end(), 3, i % 32 < 16 ? 0 : 255);
  }
  request.video = halves;
  request.height = 32;
  request.width = 64;
  const Settings s = resolved(request);
  const Image frame =
      resize_8bit({16, 32, {halves.rgb.begin(), halves.rgb.begin() + 16 * 32 * 3}}, 32, 64);
  const std::vector<float> edges = normalized(edge_map(frame, {100, 200}));
  const std::vector<float> blurred = normalized(blur_map(frame, blur_preset("very_low")));
  const std::vector<float> got_edges = control_pixels(request, s, 0, 0, 2);
  const std::vector<float> got_blurred = control_pixels(request, s, 1, 0, 1);
  const int64_t frames = s.transfer->chunk, plane = 32 * 64;
  ASSERT_EQ(frames, 5);
  ASSERT_EQ(std::ssize(got_edges), 3 * frames * plane);
  for (int64_t t = 0; t < frames; ++t) {
    for (int64_t i = 0; i < plane; ++i) {
      ASSERT_EQ(got_edges[size_t(t * plane + i)], edges[size_t(i)]) << t << " " << i;
      ASSERT_EQ(got_blurred[size_t(t * plane + i)], blurred[size_t(i)]) << t << " " << i;
    }
  }
  // One line where the halves meet, and nothing else.
  EXPECT_EQ(std::count(edges.begin(), edges.begin() + plane, 1.0f), 32);
  EXPECT_EQ(std::count(edges.begin(), edges.begin() + plane, -1.0f), plane - 32);
}

// As NVIDIA's framework takes in videos of another shape: scaled to cover, the middle kept.
TEST(Transfer, ControlsCoverTheFrameWhenAsked) {
  Request request = request_with({{ControlHint::depth, clip(1, 32, 32), {}}});  // to 32 x 16
  Frames& video = request.transfer->controls[0].video;
  for (int64_t i = 0; i < 32 * 32; ++i) {
    std::fill_n(video.rgb.begin() + i * 3, 3, static_cast<uint8_t>(i / 32 * 8));
  }
  request.video_fit = VideoFit::cover;
  const std::vector<float> covered = control_pixels(request, resolved(request), 0, 0, 1);
  request.video_fit = VideoFit::stretch;
  const std::vector<float> stretched = control_pixels(request, resolved(request), 0, 0, 1);
  for (int64_t y = 0; y < 16; ++y) {
    EXPECT_NEAR(covered[size_t(y * 32)], double((y + 8) * 8) / 127.5 - 1, 1e-6);
    // Between rows 2 y and 2 y + 1, as all that the filter sees rises evenly.
    if (y == 0 || y == 15) continue;
    EXPECT_NEAR(stretched[size_t(y * 32)], (16.0 * double(y) + 4) / 127.5 - 1, 1e-6);
  }
}

TEST(Transfer, RefusesContradictions) {
  const auto refused = [](Request request, const char* part) {
    expect_error(ErrorKind::invalid_argument, {part}, [&] { resolved(request); });
  };
  refused(request_with({}), "at least one control");
  refused(request_with({{ControlHint::edge, clip(5), {}}, {ControlHint::edge, clip(5), {}}}),
          "given twice");
  // Without a video of its own, or one to compute it from.
  refused(request_with({{ControlHint::edge, clip(0), {}}}), "no input video to compute it from");
  refused(request_with({{ControlHint::depth, {}, {}}}), "only edge and blur can be computed");
  Request computed = request_with({{ControlHint::blur, {}, {}}});
  computed.video = clip(5);
  EXPECT_EQ(resolved(computed).frames, 5);
  computed.transfer->controls[0] = {ControlHint::edge, clip(5), {}, ControlPreset::low};
  refused(computed, "a preset and a video of its own");
  // B44.
  refused(request_with({{ControlHint::edge, clip(5), 0.0}, {ControlHint::seg, clip(5), 0.0}}),
          "sum to 0");
  refused(request_with({{ControlHint::edge, clip(5), 0.0}}), "sum to 0");
  refused(request_with({{ControlHint::edge, clip(5), -0.5}}), "must not be negative");
  Request request =
      request_with({{ControlHint::edge, clip(5), 1.0}, {ControlHint::seg, clip(5), {}}});
  request.transfer->attention = ControlAttention::joint;
  refused(request, "no meaning with joint attention");

  request = request_with({{ControlHint::edge, clip(5), {}}});
  request.width = 24;
  refused(request, "multiple of 16");
  request = request_with({{ControlHint::edge, clip(5), {}}});
  request.image = clip(1);
  refused(request, "not from an image");
  request = request_with({{ControlHint::edge, clip(5), {}}});
  request.enable_sound = true;
  refused(request, "no sound");
  request = request_with({{ControlHint::edge, clip(5), {}}});
  request.action = ActionRequest{};
  refused(request, "actions");
  request = request_with({{ControlHint::edge, clip(5), {}}});
  request.video = clip(5);
  refused(request, "would have no effect");
  request = request_with({{ControlHint::edge, clip(5), {}}});
  request.transfer->num_first_chunk_conditional_frames = 2;
  refused(request, "no video");
  request.video = clip(5);
  request.condition_video_keep = VideoKeep::last;
  refused(request, "condition_video_keep");
  request = request_with({{ControlHint::edge, clip(5), {}}});
  request.transfer->guidance_interval = TimestepInterval{700, 400};
  refused(request, "[700, 400]");
  request = request_with({{ControlHint::edge, clip(20), {}}});
  request.transfer->num_video_frames_per_chunk = 5;
  request.latents = FloatTensor{};
  refused(request, "one chunk only");
  request.transfer->num_video_frames_per_chunk = 0;
  refused(request, "num_video_frames_per_chunk");
}

}  // namespace
}  // namespace orrery
