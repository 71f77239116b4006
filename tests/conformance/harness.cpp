#include "conformance/harness.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"

namespace orrery::conformance {

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> list = [] {
    std::vector<Candidate> found;
    const auto add = [&](std::string name, const std::function<std::unique_ptr<Backend>()>& make,
                         std::vector<std::string> attention, std::vector<std::string> choosy = {}) {
      Candidate candidate{std::move(name), make, "", std::move(attention), std::move(choosy)};
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
    add("cuda", [] { return cuda::make_cuda_backend(); }, {"", "reference"},
        {"native", "cudnn", "gemm"});
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

namespace {
constexpr auto kCanary = std::byte{0xff};  // a NaN in every float type
}

TestTensor::TestTensor(Backend& backend, Shape shape, DType dtype, Layout layout)
    : backend_(&backend) {
  Shape outer = shape;
  const int last = shape.rank() - 1;
  if (layout == Layout::pitched) outer[last] += 8;
  if (layout == Layout::odd) outer[last] += 7;
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
      if (extra) view = view.slice(i, layout == Layout::outer_gaps ? 0 : extra / 2, shape[i]);
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

void expect_within(TestTensor& out, const reference::Values& want, double limit) {
  EXPECT_TRUE(out.download()) << "bytes outside the output were written";
  const reference::Values got = reference::values(out.host());
  ASSERT_EQ(got.size(), want.size());
  const double error = reference::relative_error(got, want);
  EXPECT_LE(error, limit);
  for (size_t i = 0, shown = 0; !(error <= limit) && i < got.size() && shown < 4; ++i) {
    if (std::fabs(got[i] - want[i]) <= limit * (std::fabs(want[i]) + 1e-3) * 8) continue;
    ADD_FAILURE() << "element " << i << " is " << got[i] << ", expected " << want[i];
    ++shown;
  }
}

Make TestTensors::next_of(std::function<MutView(size_t)> view) const {
  return [view = std::move(view), next = size_t{0}](const Wanted&) mutable { return view(next++); };
}

Make TestTensors::on_device() {
  return [this](const Wanted& wanted) {
    tensors_.emplace_back(backend_, wanted.shape, wanted.dtype, wanted.layout);
    if (wanted.size != 0) tensors_.back().randomise(tensors_.size(), wanted.size);
    return tensors_.back().device();
  };
}

Make TestTensors::on_host() {
  return next_of([this](size_t i) { return tensors_.at(i).host_mut(); });
}

Make TestTensors::in_absolute_values() {
  return next_of([this](size_t i) {
    const View& host = tensors_.at(i).host();
    reference::Values values = reference::values(host);
    for (double& value : values) value = std::fabs(value);
    absolute_.push_back(allocate_host_tensor(host.shape, host.dtype));
    reference::store(absolute_.back().view, values);
    return absolute_.back().view;
  });
}

}  // namespace orrery::conformance
