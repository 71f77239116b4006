#include "model/transformer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "base/json.h"
#include "cpu/cpu_backend.h"
#include "model/random_weights.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

// Finds the two matrices of the timestep embedder by name, once their slots are filled.
class TimeEmbedder final : public WeightVisitor {
 public:
  void tensor(View&, const std::string&, Shape, Split) override {}
  void linear(Linear& slot, const std::vector<std::string>& prefixes, const std::vector<int64_t>&,
              int64_t, Split, bool) override {
    if (prefixes.front() == "time_embedder.linear_1") first = slot;
    if (prefixes.front() == "time_embedder.linear_2") second = slot;
  }
  Linear first, second;
};

// w x + b in double precision.
std::vector<double> affine(const Linear& linear, const std::vector<double>& x) {
  const View w = linear.weights.front(), b = linear.biases.front();
  std::vector<double> out(static_cast<size_t>(w.dim(0)));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = to_float(b.as<bf16>()[i]);
    for (size_t k = 0; k < x.size(); ++k) {
      out[i] += x[k] * double(to_float(w.as<bf16>()[i * x.size() + k]));
    }
  }
  return out;
}

std::vector<double> embedding(const TimeEmbedder& embedder, double tau) {
  constexpr size_t kHalf = 128;
  std::vector<double> wave(2 * kHalf);
  for (size_t k = 0; k < kHalf; ++k) {
    const double angle = tau * std::exp(-std::log(10000.0) * double(k) / double(kHalf));
    wave[k] = std::cos(angle);
    wave[kHalf + k] = std::sin(angle);
  }
  std::vector<double> hidden = affine(embedder.first, wave);
  for (double& value : hidden) value /= 1 + std::exp(-value);
  return affine(embedder.second, hidden);
}

// B18: whatever the type of the weights, the embedding is computed in f32.
TEST(Transformer, TimestepsAreEmbeddedInF32WithHalfPrecisionWeights) {
  const auto backend = cpu::make_cpu_backend();
  const auto file = source_dir() / "models/cosmos3-pico/transformer/config.json";
  Transformer model(*backend, TransformerConfig::from_json(Json::load(file)), DType::bf16);
  const WeightStore store = random_weights(
      *backend, [&](WeightVisitor& v) { model.visit_gen(v); }, DType::bf16, 1);
  TimeEmbedder embedder;
  model.visit_gen(embedder);
  ASSERT_EQ(embedder.first.weights.size(), 1u);

  const int64_t width = model.config().hidden_size;
  const Tensor out = backend->allocate_tensor({width}, DType::f32);
  Arena arena(backend->allocate(size_t{1} << 20));
  std::vector<std::vector<float>> found;
  for (float timestep : {999.0f, 998.0f}) {
    model.embed_time(arena, out.view, timestep);
    found.emplace_back(out.view.as<float>(), out.view.as<float>() + width);
    const std::vector<double> want = embedding(embedder, timestep * model.config().timestep_scale);
    double difference = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      difference += std::pow(found.back()[i] - want[i], 2);
      size += want[i] * want[i];
    }
    EXPECT_LT(std::sqrt(difference / size), 1e-5) << timestep;  // bf16 anywhere would leave 1e-3
  }
  EXPECT_NE(found[0], found[1]);
}

}  // namespace
}  // namespace orrery
