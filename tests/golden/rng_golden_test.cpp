// Draws of PyTorch's generators: every tensor of the area, named device.dtype.seed.count.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/rng.h"
#include "golden/golden.h"

namespace orrery {
namespace {

struct Draw {
  RngKind kind;
  NoiseType stream;
  int64_t seed;
  std::string count;  // a number, "seq" or "big_head_tail"
};

// `bf16`: the stream that a bf16 tensor of the area is of.
Draw parse(const std::string& key, NoiseType bf16) {
  const size_t a = key.find('.'), b = key.find('.', a + 1), c = key.find('.', b + 1);
  EXPECT_NE(c, std::string::npos) << key;
  return {key.substr(0, a) == "cuda" ? RngKind::cuda : RngKind::cpu,
          key.substr(a + 1, b - a - 1) == "bf16" ? bf16 : NoiseType::fp32,
          std::stoll(key.substr(b + 1, c - b - 1)), key.substr(c + 1)};
}

std::vector<float> draw(NormalGenerator& generator, NoiseType stream, size_t n) {
  std::vector<float> values(n);
  generator.fill(values, stream);
  return values;
}

std::vector<float> reproduce(const Draw& what) {
  NormalGenerator generator(what.kind, what.seed);
  std::vector<float> values;
  const auto append = [&](const std::vector<float>& part) {
    values.insert(values.end(), part.begin(), part.end());
  };
  if (what.count == "seq") {
    for (const size_t n : {size_t{5}, size_t{20}, size_t{33}}) {
      append(draw(generator, what.stream, n));
    }
  } else if (what.count == "big_head_tail") {
    const std::vector<float> big = draw(generator, what.stream, 3000017);
    append({big.begin(), big.begin() + 64});
    append({big.begin() + (1 << 20), big.begin() + (1 << 20) + 64});
    append({big.end() - 64, big.end()});
  } else {
    append(draw(generator, what.stream, std::stoull(what.count)));
  }
  return values;
}

void expect_draws(const std::filesystem::path& path, NoiseType bf16) {
  const Safetensors file = Safetensors::open_file(path);
  const golden::Tensors tensors(path);
  size_t bf16_values = 0, bf16_flips = 0;
  for (const StoredTensor& stored : file.tensors()) {
    SCOPED_TRACE(stored.name);
    const Draw what = parse(stored.name, bf16);
    const std::vector<float> want = tensors.floats(stored.name);
    const std::vector<float> got = reproduce(what);
    ASSERT_EQ(got.size(), want.size());
    if (what.kind == RngKind::cpu) {
      EXPECT_EQ(got, want);  // the same operations in the same order: equal bits
      continue;
    }
    for (size_t i = 0; i < want.size(); ++i) {
      if (what.stream != NoiseType::fp32) {
        // One flip of the rounding where the fp32 value lies on its border.
        EXPECT_NEAR(got[i], want[i], std::max(std::abs(want[i]) * 0x1p-7f, 5e-6f)) << i;
        ++bf16_values;
        if (got[i] != want[i]) ++bf16_flips;
      } else {
        // The GPU's fast sine and cosine are up to 2.3e-6 off the accurate ones used here.
        EXPECT_NEAR(got[i], want[i], 5e-6f) << i;
      }
    }
  }
  EXPECT_LE(bf16_flips * 1000, bf16_values);
}

TEST(GoldenRng, EveryDraw) {
  ORRERY_SKIP_WITHOUT("rng");
  expect_draws(golden::directory() / "rng/tensors.safetensors", NoiseType::bf16_torch_2_11);
}

TEST(GoldenRng, Bf16OfTorch215) {
  const auto path = golden::modes_directory() / "rng_new_bf16/tensors.safetensors";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no " << path;
  expect_draws(path, NoiseType::bf16);
}

}  // namespace
}  // namespace orrery
