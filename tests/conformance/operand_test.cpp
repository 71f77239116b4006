// Matrices of 8 bits: codes and scales are those of tensor/quantise.h to the bit, products those of
// the values they stand for.
#include <cmath>

#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(Operands);

// An operand in host memory and its copy on the backend.
struct TestOperand {
  Tensor codes, scales, device_codes, device_scales;
  MutOperand host, device;

  TestOperand(Backend& backend, Shape shape, DType dtype, ScaleBlock block)
      : codes(allocate_host_tensor(shape, dtype)),
        scales(allocate_host_tensor(block.shape_for(shape), DType::f32)),
        device_codes(backend.allocate_tensor(shape, dtype)),
        device_scales(backend.allocate_tensor(block.shape_for(shape), DType::f32)),
        host(codes.view, scales.view, block),
        device(device_codes.view, device_scales.view, block) {}

  void upload(Backend& backend) const {
    backend.upload(device, host);
    backend.upload(device.scales, host.scales);
  }
  // Codes and scales of the backend, one after another.
  std::vector<std::byte> bytes_of(Backend& backend) const {
    Tensor c = allocate_host_tensor(host.shape, host.dtype),
           s = allocate_host_tensor(host.scales.shape, DType::f32);
    backend.download(c.view, device);
    backend.download(s.view, device.scales);
    return joined(c.view, s.view);
  }
  std::vector<std::byte> bytes() const { return joined(host, host.scales); }
  static std::vector<std::byte> joined(const View& c, const View& s) {
    std::vector<std::byte> all(c.as<std::byte>(), c.as<std::byte>() + c.bytes());
    all.insert(all.end(), s.as<std::byte>(), s.as<std::byte>() + s.bytes());
    return all;
  }
};

constexpr ScaleBlock kBlocks[] = {{0, 0}, {1, 0}, {0, 1}, {128, 128}, {5, 3}, {1, 128}};

TEST_P(Operands, CodesAndScalesAreExact) {
  for (DType from : {DType::f32, DType::bf16}) {
    for (DType to : {DType::f8e4m3, DType::i8}) {
      for (const auto& [m, n] : {std::array<int64_t, 2>{1, 1}, {7, 33}, {130, 257}, {3, 4096}}) {
        for (const ScaleBlock& block : kBlocks) {
          for (Scaling scaling : {Scaling::amax, Scaling::given}) {
            SCOPED_TRACE(concat(name_of(from), " to ", name_of(to), ", ", m, " x ", n, ", a scale ",
                                block.rows, " x ", block.columns,
                                scaling == Scaling::given ? " given" : ""));
            TestTensor x(*backend_, {m, n}, from, Layout::pitched);
            x.randomise(uint64_t(m + n), 3);
            TestOperand out(*backend_, {m, n}, to, block);
            // Given scales lie between too small, so that values saturate, and too large.
            for (int64_t i = 0; i < out.scales.view.numel(); ++i)
              out.host.scales.as<float>()[i] = 0.001f * float(i % 13 + 1);
            out.upload(*backend_);
            orrery::quantise(out.host, x.host(), scaling);
            backend_->quantise(out.device, x.device(), scaling);
            EXPECT_EQ(out.bytes_of(*backend_), out.bytes());

            TestTensor back = poisoned(*backend_, {m, n}, DType::f32, Layout::pitched);
            backend_->dequantise(back.device(), out.device);
            Tensor want = allocate_host_tensor({m, n}, DType::f32);
            orrery::dequantise(want.view, out.host);
            const float* values = want.view.as<float>();
            expect_close(back, reference::Values(values, values + m * n), 0);
          }
        }
      }
    }
  }
}

// Every value halfway between two codes, and one ulp beside it; the ends of the range.
TEST_P(Operands, TiesAndEnds) {
  std::vector<double> values{0.0, -0.0, 448, 449, 464, 1e30, -1e30, 0x1p-9, 0x1p-10, 0x1p-149};
  for (int code = 0; code < 0x7e; ++code) {
    const float low = to_float(f8e4m3{uint8_t(code)}), high = to_float(f8e4m3{uint8_t(code + 1)});
    const float tie = (low + high) / 2;
    for (float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 1e9f), low})
      values.insert(values.end(), {double(value), -double(value)});
  }
  const auto n = int64_t(values.size());
  TestTensor x(*backend_, {1, n}, DType::f32);
  x.assign(values);
  TestOperand out(*backend_, {1, n}, DType::f8e4m3, {});
  out.host.scales.as<float>()[0] = 1;
  out.upload(*backend_);
  orrery::quantise(out.host, x.host(), Scaling::given);
  backend_->quantise(out.device, x.device(), Scaling::given);
  EXPECT_EQ(out.bytes_of(*backend_), out.bytes());
}

TEST_P(Operands, ProductsOfEveryGranularity) {
  for (DType dtype : {DType::f8e4m3, DType::i8}) {
    for (const ScaleBlock& w_block : kBlocks) {
      for (int narrow_x = 0; narrow_x < 2; ++narrow_x) {
        for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 16, 32}, {37, 300, 259}}) {
          SCOPED_TRACE(concat(name_of(dtype), ", a scale ", w_block.rows, " x ", w_block.columns,
                              ", ", m, " x ", n, " x ", k, narrow_x ? ", both" : ""));
          TestTensor x(*backend_, {m, k}, DType::f32), w(*backend_, {n, k}, DType::f32);
          x.randomise(1);
          w.randomise(2);
          TestOperand x8(*backend_, {m, k}, dtype, {1, 0}), w8(*backend_, {n, k}, dtype, w_block);
          orrery::quantise(x8.host, x.host(), Scaling::amax);
          orrery::quantise(w8.host, w.host(), Scaling::amax);
          x8.upload(*backend_);
          w8.upload(*backend_);
          // What the operands stand for.
          Tensor x_wide = allocate_host_tensor({m, k}, DType::f32),
                 w_wide = allocate_host_tensor({n, k}, DType::f32);
          orrery::dequantise(x_wide.view, x8.host);
          orrery::dequantise(w_wide.view, w8.host);
          const View x_value = narrow_x ? View(x_wide.view) : x.host();
          TestTensor out = poisoned(*backend_, {m, n}, DType::f32);
          backend_->linear(out.device(), narrow_x ? Operand(x8.device) : Operand(x.device()),
                           w8.device);
          expect_within(out, reference::linear(x_value, w_wide.view, {}), kExact);
          if (n % 2 != 0) continue;
          TestTensor gated = poisoned(*backend_, {m, n / 2}, DType::f32);
          backend_->gated_linear(gated.device(),
                                 narrow_x ? Operand(x8.device) : Operand(x.device()), w8.device);
          reference::Values both = reference::linear(x_value, w_wide.view, {}), want;
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n / 2; ++j) {
              const double gate = both[size_t(i * n + j)];
              want.push_back(gate / (1 + std::exp(-gate)) * both[size_t(i * n + n / 2 + j)]);
            }
          }
          expect_within(gated, want, 2 * kExact);
        }
      }
    }
  }
}

TEST_P(Operands, RefusesBitsWithoutScales) {
  TestOperand w(*backend_, {16, 32}, DType::f8e4m3, {1, 0});
  TestTensor x(*backend_, {4, 32}, DType::f32), out(*backend_, {4, 16}, DType::f32);
  EXPECT_ANY_THROW(backend_->linear(out.device(), x.device(), View(w.device)));
  MutOperand wrong = w.device;
  wrong.block = {0, 0};
  EXPECT_ANY_THROW(backend_->linear(out.device(), x.device(), wrong));
  EXPECT_ANY_THROW(backend_->linear(out.device(), x.device(),
                                    Operand(View(x.device()), w.device.scales, {1, 0})));
  EXPECT_ANY_THROW(backend_->quantise(
      View(w.device).dtype == DType::f8e4m3 ? MutOperand(MutView(w.device)) : MutOperand(),
      x.device(), Scaling::given));
}

}  // namespace
}  // namespace orrery::conformance
