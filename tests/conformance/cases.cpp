#include "conformance/cases.h"

#include <utility>

namespace orrery::conformance {

std::vector<LinearCase> linear_cases(Scale scale) {
  constexpr DType f32 = DType::f32, half = DType::bf16;
  std::vector<LinearCase> cases;
  switch (scale) {
    case Scale::test:
      for (const auto& [m, n, k] : std::initializer_list<std::array<int64_t, 3>>{{1, 1, 1},
                                                                                 {1, 300, 257},
                                                                                 {5, 7, 3},
                                                                                 {6, 16, 64},
                                                                                 {7, 24, 33},
                                                                                 {96, 48, 96},
                                                                                 {97, 40, 256},
                                                                                 {100, 264, 70},
                                                                                 {13, 5, 1000},
                                                                                 {200, 17, 512}}) {
        cases.push_back({"", m, n, k, f32, f32, f32});
        cases.push_back({"", m, n, k, f32, half, f32, Layout::pitched});
        cases.push_back({"", m, n, k, half, half, half, Layout::pitched});
        cases.push_back({"", m, n, k, f32, half, f32, Layout::contiguous, true});
        cases.push_back({"", m, n, k, f32, f32, half, Layout::contiguous, true});
      }
      break;
    case Scale::cpu:
      cases = {{"bf16/pico_qkv", 576, 512, 256, f32, half, f32},
               {"bf16/pico_gate_up", 576, 1536, 256, f32, half, f32},
               {"bf16/pico_down", 576, 256, 768, f32, half, f32},
               {"bf16/nano_q", 1024, 4096, 4096, f32, half, f32},
               {"bf16/nano_gate_up", 1024, 4096, 4096, f32, half, f32},
               {"bf16/nano_down", 1024, 4096, 12288, f32, half, f32},
               {"bf16/timestep", 1, 4096, 4096, f32, half, f32},
               {"bf16/square_2048", 2048, 2048, 2048, f32, half, f32},
               {"f32/square_2048", 2048, 2048, 2048, f32, f32, f32}};
      break;
    case Scale::device:
      cases = {{"44160 x 4096 x 24576", 44160, 24576, 4096, half, half, half},
               {"44160 x 4096 x 12288", 44160, 12288, 4096, half, half, half},
               {"44160 x 12288 x 4096", 44160, 4096, 12288, half, half, half},
               {"44160 x 12288 x 4096 + residual", 44160, 4096, 12288, half, half, half,
                Layout::contiguous, false, true},
               {"44160 x 4096 x 6144", 44160, 6144, 4096, half, half, half},
               {"44160 x 4096 x 4096", 44160, 4096, 4096, half, half, half},
               {"44160 x 4096 x 4096 + residual", 44160, 4096, 4096, half, half, half,
                Layout::contiguous, false, true},
               {"f32 8192 x 4096 x 4096", 8192, 4096, 4096, f32, f32, f32},
               {"relu2 44160 x 2048 x 9216", 44160, 9216, 2048, half, half, half,
                Layout::contiguous, false, false, Activation::relu2}};
      break;
  }
  for (LinearCase& c : cases) {
    if (!c.name.empty()) continue;
    c.name = concat(c.m, " x ", c.k, " x ", c.n, ", ", name_of(c.x), " by ", name_of(c.w), " to ",
                    name_of(c.out), ", layout ", int(c.layout), c.transposed ? ", transposed" : "");
  }
  return cases;
}

std::vector<GatedLinearCase> gated_linear_cases(Scale scale) {
  constexpr DType f32 = DType::f32, half = DType::bf16;
  switch (scale) {
    case Scale::test:
      return {{300, 256, 192, half},
              {257, 128, 64, half, Layout::outer_gaps},
              {513, 384, 128, half, Layout::pitched},
              {40, 128, 64, half},
              {259, 100, 72, half},
              {33, 48, 20, f32, Layout::pitched}};
    case Scale::cpu: return {{576, 768, 256, f32}};
    case Scale::device:
      return {{44160, 12288, 4096},
              {5760, 12288, 4096},
              {2880, 12288, 4096},
              {920, 12288, 4096},
              {512, 12288, 4096}};
  }
  return {};
}

std::vector<AttentionCase> attention_cases(Scale scale) {
  std::vector<AttentionCase> cases;
  switch (scale) {
    case Scale::test:
      for (const bool causal : {false, true}) {
        cases.insert(cases.end(), {{"", 1, 1, 1, 1, 8, causal},
                                   {"", 5, 7, 2, 1, 16, causal},
                                   {"", 64, 64, 4, 2, 64, causal},
                                   {"", 100, 300, 4, 4, 40, causal},
                                   {"", 97, 263, 8, 2, 64, causal},
                                   {"", 33, 520, 2, 2, 128, causal},
                                   {"", 20, 30, 1, 1, 640, causal},
                                   {"", 17, 290, 2, 1, 1024, causal},
                                   {"", 3, 257, 3, 1, 12, causal},
                                   {"", 200, 9, 2, 2, 32, causal},
                                   {"", 100, 33, 2, 2, 64, causal},
                                   {"", 200, 200, 8, 2, 128, causal},
                                   {"", 9, 20, 2, 1, 6, causal},
                                   {"", 300, 257, 4, 4, 128, causal}});
      }
      break;
    case Scale::cpu:
      cases = {{"pico", 576, 640, 4, 2, 64},
               {"8192", 8192, 8192, 8, 2, 64},
               {"2048_128", 2048, 2048, 8, 2, 128},
               {"vae_640", 256, 256, 1, 1, 640},
               {"und_causal", 512, 512, 4, 2, 64, true}};
      break;
    case Scale::device:
      cases = {{"44160 x 44672, 32/8 heads of 128", 44160, 44672, 32, 8, 128},
               {"16384 x 16384, 32/8 heads of 128", 16384, 16384, 32, 8, 128},
               {"4096 x 4096, 32/8 heads of 128", 4096, 4096, 32, 8, 128},
               {"of the VAE 3600 x 1 x 1024", 3600, 3600, 1, 1, 1024}};
      break;
  }
  for (AttentionCase& c : cases) {
    if (!c.name.empty()) continue;
    c.name = concat(c.queries, " x ", c.keys, ", ", c.heads, "/", c.kv_heads, " heads of ", c.d,
                    c.causal ? ", causal" : "");
  }
  return cases;
}

namespace {

using Kernel = std::array<int64_t, 3>;

// A kernel that keeps height and width.
Conv3d same_size(const std::array<int64_t, 3>& kernel) {
  const std::array<int64_t, 3> pad{0, kernel[1] / 2, kernel[2] / 2};
  return {{1, 1, 1}, {1, 1, 1}, pad, pad};
}

std::vector<ConvCase> small_convolutions() {
  // Padding of a causal kernel, and of one whose earlier frames are part of x.
  const Conv3d causal{{1, 1, 1}, {1, 1, 1}, {2, 1, 1}, {0, 1, 1}};
  const Conv3d spatial{{1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0, 1, 1}};
  return {
      {"causal 3x3x3, 24 channels", {3, 9, 35, 24}, 24, {3, 3, 3}, causal},
      {"causal 3x3x3 with cached frames", {4, 6, 7, 8}, 16, {3, 3, 3}, spatial},
      {"cached frames of 64 channels", {5, 8, 8, 64}, 64, {3, 3, 3}, spatial},
      {"odd channels", {2, 5, 6, 3}, 4, {3, 3, 3}, causal},
      {"twelve to three", {1, 8, 40, 12}, 3, {3, 3, 3}, causal},
      {"padded at both ends",
       {3, 9, 10, 16},
       32,
       {3, 3, 3},
       {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}}},
      {"one channel", {1, 4, 4, 1}, 1, {1, 3, 3}, spatial},
      {"three channels", {1, 16, 16, 3}, 8, {1, 3, 3}, spatial},
      {"pointwise", {2, 5, 17, 48}, 96, {1, 1, 1}, {}},
      {"pointwise, many channels", {1, 3, 5, 400}, 330, {1, 1, 1}, {}},
      {"time only", {5, 4, 6, 16}, 32, {3, 1, 1}, {{1, 1, 1}, {1, 1, 1}, {2, 0, 0}, {0, 0, 0}}},
      {"time only, cached", {5, 6, 7, 16}, 32, {3, 1, 1}, {}},
      {"time only, stride 2",
       {5, 4, 6, 16},
       16,
       {3, 1, 1},
       {{2, 1, 1}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}}},
      {"3x3 per frame", {2, 12, 33, 40}, 40, {1, 3, 3}, spatial},
      {"stride 2, padded right and bottom",
       {2, 10, 12, 24},
       24,
       {1, 3, 3},
       {{1, 2, 2}, {1, 1, 1}, {0, 0, 0}, {0, 1, 1}}},
      {"1-D", {1, 1, 301, 20}, 28, {1, 1, 7}, {{1, 1, 1}, {1, 1, 1}, {0, 0, 3}, {0, 0, 3}}},
      {"1-D dilated",
       {1, 1, 301, 20},
       28,
       {1, 1, 7},
       {{1, 1, 1}, {1, 1, 9}, {0, 0, 27}, {0, 0, 27}}},
      {"dilated everywhere",
       {6, 7, 8, 5},
       9,
       {2, 2, 3},
       {{1, 2, 1}, {3, 2, 2}, {1, 1, 2}, {2, 1, 2}}},
      {"channels deeper than a slice", {1, 3, 4, 150}, 20, {1, 3, 3}, spatial},
      {"kernel larger than the input",
       {1, 2, 2, 8},
       8,
       {3, 5, 5},
       {{1, 1, 1}, {1, 1, 1}, {2, 2, 2}, {0, 2, 2}}},
      {"far padding", {1, 2, 2, 8}, 8, {1, 3, 3}, {{1, 1, 1}, {1, 1, 1}, {1, 5, 4}, {1, 3, 6}}},
  };
}

std::vector<ConvCase> convolutions_of_a_cpu() {
  std::vector<ConvCase> cases;
  const struct {
    const char* name;
    int64_t frames, size, cin, cout;
    Kernel kernel;
  } shapes[] = {
      {"latent_96", 3, 16, 96, 96, {3, 3, 3}},    {"mid_96", 4, 32, 96, 96, {3, 3, 3}},
      {"block1_96", 6, 64, 96, 96, {3, 3, 3}},    {"block2_96_48", 6, 128, 96, 48, {3, 3, 3}},
      {"block2_48", 6, 128, 48, 48, {3, 3, 3}},   {"block3_48_24", 6, 128, 48, 24, {3, 3, 3}},
      {"block3_24", 6, 128, 24, 24, {3, 3, 3}},   {"conv_out_24_12", 6, 128, 24, 12, {3, 3, 3}},
      {"upsample_96", 4, 64, 96, 96, {1, 3, 3}},  {"upsample_48", 4, 128, 48, 48, {1, 3, 3}},
      {"time_96_192", 4, 32, 96, 192, {3, 1, 1}}, {"shortcut_96_48", 4, 128, 96, 48, {1, 1, 1}},
      {"wan_256", 4, 64, 256, 256, {3, 3, 3}},    {"wan_1024", 3, 16, 1024, 1024, {3, 3, 3}},
  };
  for (const auto& s : shapes) {
    cases.push_back(
        {s.name, {s.frames, s.size, s.size, s.cin}, s.cout, s.kernel, same_size(s.kernel)});
  }
  return cases;
}

std::vector<ConvCase> convolutions_of_a_device() {
  std::vector<ConvCase> cases;
  const struct {
    Shape x;
    int64_t cout;
    Kernel kernel;
    bool pads = true;
  } shapes[] = {
      {{3, 45, 80, 1024}, 1024, {3, 3, 3}},         {{4, 90, 160, 1024}, 1024, {3, 3, 3}},
      {{6, 180, 320, 1024}, 1024, {3, 3, 3}},       {{6, 180, 320, 1024}, 512, {3, 3, 3}},
      {{6, 360, 640, 512}, 512, {3, 3, 3}},         {{6, 360, 640, 512}, 256, {3, 3, 3}},
      {{6, 360, 640, 256}, 256, {3, 3, 3}},         {{6, 360, 640, 256}, 12, {3, 3, 3}},
      {{4, 360, 640, 512}, 512, {1, 3, 3}},         {{4, 180, 320, 1024}, 1024, {1, 3, 3}},
      {{8, 180, 320, 512}, 2048, {1, 2, 2}},        {{4, 90, 160, 1024}, 4096, {1, 2, 2}},
      {{8, 180, 320, 512}, 512, {1, 2, 2}},         {{8, 182, 322, 512}, 2048, {1, 2, 2}, false},
      {{8, 181, 321, 512}, 2048, {1, 2, 2}, false}, {{8, 180, 320, 512}, 2048, {1, 3, 3}},
      {{8, 180, 320, 2048}, 2048, {1, 1, 1}},       {{4, 90, 160, 1024}, 2048, {3, 1, 1}},
      {{4, 360, 640, 512}, 256, {1, 1, 1}},
  };
  for (const auto& s : shapes) {
    cases.push_back(
        {concat(s.x, " to ", s.cout, " by ", s.kernel[0], "x", s.kernel[1], "x", s.kernel[2]), s.x,
         s.cout, s.kernel, s.pads ? same_size(s.kernel) : Conv3d{}});
  }
  return cases;
}

}  // namespace

std::vector<ConvCase> conv_cases(Scale scale) {
  switch (scale) {
    case Scale::test: return small_convolutions();
    case Scale::cpu: return convolutions_of_a_cpu();
    case Scale::device: return convolutions_of_a_device();
  }
  return {};
}

}  // namespace orrery::conformance
