#include "conformance/harness.h"

#include <cmath>
#include <cstring>
#include <sstream>

#include "base/error.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"

namespace orrery::conformance {

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> list = [] {
    std::vector<Candidate> found;
    const auto add = [&](std::string name, const std::function<std::unique_ptr<Backend>()>& make,
                         std::vector<std::string> attention) {
      Candidate candidate{std::move(name), make, "", std::move(attention)};
      try {
        make();
      } catch (const Error& error) {
        candidate.absent = error.what();
      }
      found.push_back(candidate);
    };
    const auto add_cpu = [&](const char* name, const cpu::CpuOptions& options) {
      add(concat("cpu_", name), [options] { return cpu::make_cpu_backend(options); },
          {"native", "reference"});
    };
    for (const char* kernels : {"generic", "avx2", "avx512"})
      add_cpu(kernels, {.num_threads = 2, .kernels = kernels});
    add_cpu("reference", {.num_threads = 2, .kernels = "generic", .linear = "reference"});
    add_cpu("avx2_reference", {.num_threads = 2, .kernels = "avx2", .linear = "reference"});
    add("cuda", [] { return cuda::make_cuda_backend(); }, {"", "reference"});
    return found;
  }();
  return list;
}

void Conformance::SetUp() {
  if (!candidate().absent.empty()) GTEST_SKIP() << candidate().absent;
  backend_ = candidate().make();
}

std::string candidate_name(const testing::TestParamInfo<size_t>& info) {
  return candidates()[info.param].name;
}

std::string describe(const Shape& shape) {
  std::ostringstream text;
  text << shape;
  return text.str();
}

namespace {
constexpr auto kCanary = std::byte{0xff};  // a NaN in every float type
}

TestTensor::TestTensor(Backend& backend, Shape shape, DType dtype, Layout layout)
    : backend_(&backend) {
  Shape outer = shape;
  const int last = shape.rank() - 1;
  if (layout == Layout::pitched) outer[last] += 8;
  if (layout == Layout::outer_gaps) outer[shape.rank() > 1 ? 1 : 0] += 1;
  // Canaries in front and behind whatever the layout.
  constexpr int64_t kMargin = 32;
  const Shape flat{outer.numel() + 2 * kMargin};
  parent_ = backend.allocate_tensor(flat, dtype);
  host_parent_ = allocate_host_tensor(flat, dtype);
  std::memset(host_parent_.view.mut(), int(kCanary), size_t(host_parent_.view.bytes()));
  const auto inside = [&](const View& parent) {
    View view = make_view(static_cast<const std::byte*>(parent.data) + kMargin * size_of(dtype),
                          outer, dtype, parent.device);
    for (int i = 0; i <= last; ++i) {
      const int64_t extra = outer[i] - shape[i];
      if (extra) view = view.slice(i, layout == Layout::pitched ? extra / 2 : 0, shape[i]);
    }
    return view;
  };
  host_ = inside(host_parent_.view);
  device_ = MutView::cast(inside(parent_.view));
  upload();
}

TestTensor& TestTensor::randomise(uint64_t seed, double size) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0, size);
  reference::Values values(size_t(host_.numel()));
  for (double& value : values) value = normal(engine);
  return assign(values);
}

TestTensor& TestTensor::assign(const reference::Values& values) {
  reference::store(host_mut(), values);
  upload();
  return *this;
}

void TestTensor::upload() {
  backend_->upload(parent_.view, host_parent_.view);
  const auto* bytes = host_parent_.view.as<std::byte>();
  sent_.assign(bytes, bytes + host_parent_.view.bytes());
}

bool TestTensor::download() {
  backend_->download(host_parent_.view, parent_.view);
  backend_->synchronize();
  // Put the tensor's own elements back as they were sent: what remains different is a stray write.
  std::vector<std::byte> got(host_parent_.view.as<std::byte>(),
                             host_parent_.view.as<std::byte>() + host_parent_.view.bytes());
  const auto size = size_t(size_of(host_.dtype));
  const auto base =
      size_t(static_cast<const std::byte*>(host_.data) - host_parent_.view.as<std::byte>());
  for (int64_t i = 0; i < host_.numel(); ++i) {
    int64_t rest = i, offset = 0;
    for (int d = host_.rank() - 1; d >= 0; --d) {
      offset += rest % host_.dim(d) * host_.stride(d);
      rest /= host_.dim(d);
    }
    const size_t at = base + size_t(offset) * size;
    std::copy_n(sent_.begin() + int64_t(at), size, got.begin() + int64_t(at));
  }
  return got == sent_;
}

TestTensor poisoned(Backend& backend, Shape shape, DType dtype, Layout layout) {
  return TestTensor(backend, shape, dtype, layout);  // canaries are NaN
}

void expect_close(TestTensor& out, const reference::Values& want, double units, double roundings,
                  const reference::Values& magnitude) {
  EXPECT_TRUE(out.download()) << "bytes outside the output were written";
  const reference::Values got = reference::values(out.host());
  ASSERT_EQ(got.size(), want.size());
  const double half_ulp = out.host().dtype == DType::bf16 ? 0x1p-9 : 0x1p-25;
  double worst = -1;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double size = magnitude.empty() ? std::fabs(want[i]) : magnitude[i];
    const double allowed =
        units * 0x1p-24 * size + 2 * roundings * half_ulp * std::fabs(want[i]) + 1e-37;
    double excess = std::fabs(got[i] - want[i]) - allowed;
    if (std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]) excess = -1;
    if (std::isnan(excess)) excess = INFINITY;
    if (excess > worst) {
      worst = excess;
      at = i;
    }
  }
  EXPECT_LE(worst, 0) << "element " << at << " is " << got[at] << ", expected " << want[at]
                      << ", magnitude "
                      << (magnitude.empty() ? std::fabs(want[at]) : magnitude[at]);
}

TestTensor absolute(Backend& backend, const TestTensor& x) {
  reference::Values values = reference::values(x.host());
  for (double& value : values) value = std::fabs(value);
  TestTensor result(backend, x.host().shape, x.host().dtype);
  result.assign(values);
  return result;
}

}  // namespace orrery::conformance
