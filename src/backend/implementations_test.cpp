// The list of who computes an operation, tried by adding a toy implementation (docs/internals/
// extending.md): a product for one row, in front of one for any.
#include "backend/implementations.h"

#include <gtest/gtest.h>

#include <vector>

#include "backend/dry_run.h"

namespace orrery {
namespace {

float dot(const View& x, int64_t row, const View& w, int64_t column) {
  float sum = 0;
  for (int64_t k = 0; k < x.dim(1); ++k) {
    sum += x.as<float>()[row * x.stride(0) + k] * w.as<float>()[column * w.stride(0) + k];
  }
  return sum;
}

Answer any_rows(const LinearArgs& call) {
  for (int64_t i = 0; i < call.out.numel(); ++i) {
    const int64_t n = call.w.dim(0);
    call.out.as<float>()[i] = dot(call.x, i / n, call.w, i % n);
  }
  return {};
}

// Step 1: a function that runs a call, or says why not before it writes.
Answer one_row(const LinearArgs& call) {
  if (call.options.bias) return decline("has no bias");
  if (call.x.dim(0) != 1) return decline("takes one row");
  for (int64_t n = 0; n < call.out.numel(); ++n) {
    call.out.as<float>()[n] = dot(call.x, 0, call.w, n);
  }
  return {.note = "a toy"};
}

class ToyBackend : public DryRunBackend {
 public:
  explicit ToyBackend(std::string wanted = "")
      : DryRunBackend(DeviceKind::cpu), wanted_(std::move(wanted)) {}
  bool is_recording = false;

 private:
  Ran do_linear(const LinearArgs& call) override { return list_.run(call, wanted_); }
  void do_replay(const std::string&, const std::function<void()>& fn) override {
    if (!is_recording) fn();
  }

  std::string wanted_;
  // Step 2: its place in the list.
  Implementations<LinearArgs> list_{"linear", {{"one row", one_row}, {"any rows", any_rows}}};
};

// x [rows, 3] times w [2, 3], each element its index.
struct Product {
  explicit Product(int64_t rows) : x(size_t(rows * 3)), w(6), out(size_t(rows * 2), -1) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(i);
    for (size_t i = 0; i < w.size(); ++i) w[i] = float(i);
    out_view = make_mut_view(out.data(), {rows, 2}, DType::f32);
    x_view = make_view(x.data(), {rows, 3}, DType::f32);
    w_view = make_view(w.data(), {2, 3}, DType::f32);
  }
  Ran run(Backend& backend) const { return backend.linear(out_view, x_view, w_view); }
  std::vector<float> x, w, out;
  MutView out_view;
  View x_view, w_view;
};

// Step 3: a case that it takes, beside one that it declines.
TEST(Implementations, TheFirstThatAcceptsRuns) {
  ToyBackend backend;
  const Product one(1), two(2);
  const Ran toy = one.run(backend);
  EXPECT_EQ(toy.name, "one row");
  EXPECT_EQ(toy.note, "a toy");
  EXPECT_EQ(toy.declined, "");
  EXPECT_EQ(one.out, (std::vector<float>{5, 14}));
  const Ran other = two.run(backend);
  EXPECT_EQ(other.name, "any rows");
  EXPECT_EQ(other.declined, "one row: takes one row");
  EXPECT_EQ(two.out, (std::vector<float>{5, 14, 14, 50}));
}

TEST(Implementations, TheOneThatIsNamedRunsOrSaysWhyNot) {
  ToyBackend by_name("any rows"), toy("one row"), unknown("three rows");
  EXPECT_EQ(Product(1).run(by_name).name, "any rows");
  const auto refusal = [](ToyBackend& backend) {
    try {
      Product(2).run(backend);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::unsupported);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal(toy),
            "linear: one row cannot run x [2, 3] f32 with w [2, 3] f32 to f32 "
            "(one row: takes one row)");
  EXPECT_EQ(refusal(unknown),
            "linear: three rows cannot run x [2, 3] f32 with w [2, 3] f32 to f32 "
            "(this backend has one row, any rows)");
}

TEST(Implementations, NobodyTakesTheCall) {
  const Implementations<LinearArgs> list("linear", {{"one row", one_row}});
  const Product two(2);
  try {
    list.run({two.out_view, two.x_view, two.w_view});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "linear: no implementation can run x [2, 3] f32 with w [2, 3] f32 to f32 "
                 "(one row: takes one row)");
  }
}

// Counters name who ran, and a replayed step counts as what was recorded.
TEST(Implementations, CountersNameWhoRan) {
  ToyBackend backend;
  const Product one(1), two(2);
  const auto step = [&] {
    one.run(backend);
    two.run(backend);
    two.run(backend);
  };
  step();
  EXPECT_TRUE(backend.replay("step", step));
  backend.is_recording = true;
  EXPECT_FALSE(backend.replay("step", step));
  const OpStats& stats = backend.stats().find("linear")->second;
  EXPECT_EQ(stats.calls, 9);
  EXPECT_EQ(stats.implementations.at("one row").calls, 3);
  EXPECT_EQ(stats.implementations.at("any rows").calls, 6);
  EXPECT_EQ(stats.implementations.size(), 2u);
}

TEST(Implementations, ProfiledCallsReturnTheirTime) {
  ToyBackend backend;
  const Product one(1);
  EXPECT_EQ(one.run(backend).seconds, 0);
  backend.set_profiling(true);
  const double seconds = one.run(backend).seconds;
  EXPECT_GT(seconds, 0);
  const OpStats& stats = backend.stats().find("linear")->second;
  EXPECT_EQ(stats.seconds, seconds);
  EXPECT_EQ(stats.implementations.at("one row").seconds, seconds);
}

}  // namespace
}  // namespace orrery
