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
#include "reference/reference.h"

namespace orrery::conformance {

// A backend under test, or why it cannot run here.
struct Candidate {
  std::string name;
  std::function<std::unique_ptr<Backend>()> make;
  std::string absent;                  // reason; empty when make() works
  std::vector<std::string> attention;  // the implementations it has
};
// Every instruction set and linear implementation of the CPU backend, and the CUDA backend.
const std::vector<Candidate>& candidates();

// How a tensor lies in memory.
enum class Layout {
  contiguous,
  pitched,     // rows of the last dimension in longer rows, not at their start
  outer_gaps,  // gaps between slices of the first dimension only
};

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

// Absolute values, to run a reference on for the magnitude of its sums.
TestTensor absolute(Backend& backend, const TestTensor& x);

std::string describe(const Shape& shape);

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
