// 8-bit floats against the public code's: casts to the bit, linears on the dequantised operands.
#include <gtest/gtest.h>

#include <cmath>

#include "cpu/cpu_backend.h"
#include "golden.h"
#include "tensor/quantise.h"

namespace orrery {
namespace {

// f32 sums of up to 160 products against float64, of the same operands.
constexpr double kLinear = 1e-6;

std::vector<uint8_t> codes_of(const Safetensors& files, const std::string& name) {
  const View view = files.view(name);
  const auto* codes = view.as<uint8_t>();
  return {codes, codes + view.numel()};
}

void expect_codes(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    // The sign of a NaN is free.
    const bool both_nan = (got[i] & 0x7f) == 0x7f && (want[i] & 0x7f) == 0x7f;
    EXPECT_TRUE(got[i] == want[i] || both_nan) << i << ": " << int(got[i]) << ' ' << int(want[i]);
  }
}

TEST(Fp8Golden, Casts) {
  const auto folder = golden::directory() / "fp8/casts";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no golden data for fp8/casts";
  const auto files = Safetensors::open_file(folder / "tensors.safetensors");
  const std::vector<uint8_t> codes = codes_of(files, "codes");
  const golden::Tensors tensors(folder / "tensors.safetensors");
  const std::vector<float> values = tensors.floats("values");
  for (size_t i = 0; i < codes.size(); ++i) {
    const float got = to_float(f8e4m3{codes[i]});
    EXPECT_TRUE(got == values[i] || (std::isnan(got) && std::isnan(values[i]))) << int(codes[i]);
  }
  for (const auto& [x, want] :
       {std::pair{"cast.x", "cast.saturating"}, {"cast.bf16_x", "cast.bf16_saturating"}}) {
    SCOPED_TRACE(x);
    const View view = files.view(x);
    const Shape shape{1, view.numel()};
    const auto backend = cpu::make_cpu_backend();
    Tensor input = backend->allocate_tensor(shape, view.dtype),
           out = backend->allocate_tensor(shape, DType::f8e4m3),
           scale = backend->allocate_tensor({1, 1}, DType::f32);
    backend->upload(input.view, make_view(view.data, shape, view.dtype));
    scale.view.as<float>()[0] = 1;
    backend->quantise({out.view, scale.view, {}}, input.view, Scaling::given);
    const auto* made = out.view.as<uint8_t>();
    expect_codes({made, made + view.numel()}, codes_of(files, want));
  }
}

TEST(Fp8Golden, Linears) {
  const auto folder = golden::directory() / "fp8/linears";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no golden data for fp8/linears";
  const golden::Tensors tensors(folder / "tensors.safetensors");
  const auto codes = Safetensors::open_file(folder / "tensors.safetensors");
  const auto model =
      Safetensors::open_folder(golden::directory() / "fp8/modelopt/model/transformer");
  const auto backend = cpu::make_cpu_backend();
  for (const Json& linear : Json::load(folder / "case.json").at("linears").items()) {
    const std::string name = linear.at("name").as_string();
    const std::string at = name.substr(std::string("layers.1.").size());
    SCOPED_TRACE(name);
    const View w = model.view(name + ".weight");
    const Tensor w_scale = model.read(name + ".weight_scale", DType::f32);
    const Operand weight{w, make_view(w_scale.view.data, {1, 1}, DType::f32), {}};
    std::vector<float> values = tensors.floats(at + ".x");
    const int64_t m = linear.at("M").as_int(), n = linear.at("N").as_int(),
                  k = linear.at("K").as_int();
    const View x = make_view(values.data(), {m, k}, DType::f32);
    Tensor out = allocate_host_tensor({m, n}, DType::f32);
    const auto expect = [&](const std::string& want) {
      EXPECT_LT(
          golden::relative_error({out.view.as<float>(), static_cast<size_t>(out.view.numel())},
                                 tensors.floats(at + "." + want)),
          kLinear)
          << want;
    };
    for (const char* suffix : {"", "_pow2"}) {
      const auto scale = static_cast<float>(linear.at(concat("input_scale", suffix)).as_double());
      Tensor x8 = allocate_host_tensor({m, k}, DType::f8e4m3);
      const MutOperand input{
          x8.view, make_mut_view(const_cast<float*>(&scale), {1, 1}, DType::f32), {}};
      backend->quantise(input, x, Scaling::given);
      const auto* made = x8.view.as<uint8_t>();
      expect_codes({made, made + m * k}, codes_of(codes, at + ".x8" + suffix));
      backend->linear(out.view, input, weight);
      expect(concat("y_native", suffix));
    }
    backend->linear(out.view, x, weight);
    expect("y_a16");
  }
}

}  // namespace
}  // namespace orrery
