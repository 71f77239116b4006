// Runs one operation of a backend against its reference in double precision: inputs of any layout,
// outputs poisoned and surrounded by canaries, tolerance from the sizes of what was added up.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "conformance/cases.h"
#include "reference/reference.h"

namespace orrery::conformance {

// A backend under test, or why it cannot run here.
struct Candidate {
  std::string name;
  std::function<std::unique_ptr<Backend>()> make;
  std::string absent;                         // reason; empty when make() works
  std::vector<std::string> attention;         // implementations that take every call; "": the best
  std::vector<std::string> choosy_attention;  // those that may decline
};
// Every instruction set and linear implementation of the CPU backend, and the CUDA backend.
const std::vector<Candidate>& candidates();

// A tensor of the backend inside a larger allocation, with a copy on the host.
class TestTensor {
 public:
  TestTensor() = default;
  TestTensor(Backend& backend, Shape shape, DType dtype, Layout layout = Layout::contiguous);

  // Seeded normals times `size`, rounded to the type; the host copy follows.
  TestTensor& randomise(uint64_t seed, double size = 1);
  TestTensor& assign(const reference::Values& values);

  View host() const { return host_; }
  MutView host_mut() const { return MutView::cast(host_); }
  MutView device() const { return device_; }
  // Sends the host copy (canaries included) to the device.
  void upload();
  // Fetches the device's bytes; true when those outside the tensor are still the canaries.
  bool download();

 private:
  Backend* backend_ = nullptr;
  Tensor parent_, host_parent_;
  std::vector<std::byte> sent_;
  View host_;
  MutView device_;
};

// Output of a case: NaN everywhere, also around it.
TestTensor poisoned(Backend& backend, Shape shape, DType dtype, Layout layout = Layout::contiguous);

// Fails unless |got - want| <= units * 2^-24 * magnitude + rounding * |want| for every element, and
// the bytes around the output are untouched. rounding is half a unit in the last place of the
// output type, times `roundings`. magnitude (what was added up, in absolute values) defaults to
// |want|.
void expect_close(TestTensor& out, const reference::Values& want, double units,
                  double roundings = 1, const reference::Values& magnitude = {});

// Fails unless the relative error (Euclidean) is within `limit`, and the bytes around the output
// are untouched: where what is added up has no simple bound.
void expect_within(TestTensor& out, const reference::Values& want, double limit);
// Relative errors of sums of a few thousand terms in another order, in f32; of one rounding to
// bf16, which is at most 2^-8 of a value and 0.4 of that in the norm of many; of two.
constexpr double kExact = 3e-6;
constexpr double kRounded = 3e-3;
constexpr double kRoundedTwice = 5e-3;
inline double tolerance(DType dtype) { return dtype == DType::f32 ? kExact : kRounded; }

// The tensors of a case, made in order: on the backend, and then once more their host copies for
// the reference. The first is the output.
class TestTensors {
 public:
  explicit TestTensors(Backend& backend) : backend_(backend) {}
  Make on_device();
  Make on_host();
  Make in_absolute_values();  // of the host copies: what is added up, for expect_close()
  TestTensor& out() { return tensors_.front(); }
  TestTensor& operator[](size_t i) { return tensors_.at(i); }

 private:
  Make next_of(std::function<MutView(size_t)> view) const;
  Backend& backend_;
  std::vector<TestTensor> tensors_;
  std::vector<Tensor> absolute_;
};

class Conformance : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override;
  const Candidate& candidate() const { return candidates()[GetParam()]; }
  std::unique_ptr<Backend> backend_;
};

std::string candidate_name(const ::testing::TestParamInfo<size_t>& info);

}  // namespace orrery::conformance

#define ORRERY_CONFORMANCE(Suite)                                                               \
  class Suite : public ::orrery::conformance::Conformance {};                                   \
  INSTANTIATE_TEST_SUITE_P(                                                                     \
      Backends, Suite, ::testing::Range(size_t{0}, ::orrery::conformance::candidates().size()), \
      ::orrery::conformance::candidate_name)
