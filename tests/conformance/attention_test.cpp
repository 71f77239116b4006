#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "conformance/harness.h"

namespace orrery::conformance {
namespace {

ORRERY_CONFORMANCE(Attention);

struct Problem {
  TestTensor q, k, v;
};

Problem random_problem(Backend& backend, const AttentionCase& c, DType dtype, Layout layout) {
  Problem p{{backend, {c.queries, c.heads, c.d}, dtype, layout},
            {backend, {c.keys, c.kv_heads, c.d}, dtype, layout},
            {backend, {c.keys, c.kv_heads, c.d}, dtype, layout}};
  p.q.randomise(1);
  p.k.randomise(2);
  p.v.randomise(3);
  return p;
}

// Scores of size s are off by about eps * s * sqrt(D), and so are the weights. Sums average these
// errors.
double units(const AttentionCase& c) { return 12 + std::sqrt(double(c.d)); }

// Tensor cores take the weights in bf16, and a library's exponentials are approximate.
bool is_exact(const Backend& backend, DType dtype, const Ran& ran) {
  return backend.device() == DeviceKind::cpu || dtype == DType::f32 || ran.name == "reference";
}

class EveryAttention {
 public:
  EveryAttention(Backend& backend, const Candidate& candidate)
      : backend_(backend), candidate_(candidate) {}

  // The call by every implementation that takes it, against the same in double precision.
  void check(const AttentionCase& c, Problem& p, AttentionPlan plan, const BlockMask* device_mask) {
    const reference::Attention want =
        reference::attention(p.q.host(), p.k.host(), p.v.host(), plan);
    plan.mask = device_mask;
    std::vector<std::string> names = candidate_.attention;
    names.insert(names.end(), candidate_.choosy_attention.begin(),
                 candidate_.choosy_attention.end());
    for (size_t i = 0; i < names.size(); ++i) {
      SCOPED_TRACE(names[i]);
      run(c, p, plan, names[i], i < candidate_.attention.size(), want);
    }
  }

 private:
  void run(const AttentionCase& c, Problem& p, AttentionPlan plan, const std::string& name,
           bool takes_every_call, const reference::Attention& want) {
    const DType dtype = p.q.host().dtype;
    TestTensor out = poisoned(backend_, {c.queries, c.heads, c.d}, dtype, Layout::outer_gaps);
    TestTensor lse = poisoned(backend_, {c.heads, c.queries}, DType::f32);
    plan.implementation = name;
    plan.lse = lse.device();
    Ran ran;
    try {
      ran = backend_.attention(out.device(), p.q.device(), p.k.device(), p.v.device(), plan);
    } catch (const Error& refusal) {
      EXPECT_EQ(refusal.kind(), ErrorKind::unsupported) << refusal.what();
      EXPECT_FALSE(takes_every_call) << refusal.what();
      return;
    }
    EXPECT_EQ(ran.name, name.empty() ? ran.name : name);
    if (is_exact(backend_, dtype, ran)) {
      expect_close(out, want.out, units(c), 1, reference::Values(want.out.size(), 1.5));
      expect_close(lse, want.lse, units(c), 1, reference::Values(want.lse.size(), 4.0));
    } else {
      expect_within(out, want.out, kRoundedTwice);
      // 2e-3 of a logarithm, whatever its size.
      expect_close(lse, want.lse, 2e-3 * 0x1p24, 1, reference::Values(want.lse.size(), 1.0));
    }
  }

  Backend& backend_;
  const Candidate& candidate_;
};

TEST_P(Attention, DenseAndCausal) {
  for (const AttentionCase& c : attention_cases(Scale::test)) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      // The second scale turns the order of the scores round.
      for (float scale : {c.scale(), -0.1f}) {
        SCOPED_TRACE(concat(c.name, " ", name_of(dtype), " scale ", scale));
        AttentionPlan plan;
        plan.causal = c.causal;
        plan.scale = scale;
        Problem p = random_problem(*backend_, c, dtype, Layout::outer_gaps);
        EveryAttention(*backend_, candidate()).check(c, p, plan, nullptr);
      }
    }
  }
}

// A mask on the device with random, sorted lists.
struct TestMask {
  TestMask(Backend& backend, int64_t lists, int64_t queries, int64_t keys, int64_t block_q,
           int64_t block_k, double keep, uint64_t seed) {
    const int64_t rows = (queries + block_q - 1) / block_q, blocks = (keys + block_k - 1) / block_k;
    std::mt19937_64 engine(seed);
    std::vector<int32_t> ids(size_t(lists * rows * blocks), -1), counts;
    for (int64_t row = 0; row < lists * rows; ++row) {
      int32_t count = 0;
      for (int64_t b = 0; b < blocks; ++b) {
        const bool last = b + 1 == blocks && count == 0;
        if (last || std::uniform_real_distribution<>(0, 1)(engine) < keep) {
          ids[size_t(row * blocks + count++)] = int32_t(b);
        }
      }
      counts.push_back(count);
    }
    const auto place = [&](const std::vector<int32_t>& values, Shape shape, Tensor& here,
                           Tensor& there) {
      here = allocate_host_tensor(shape, DType::i32);
      std::memcpy(here.view.mut(), values.data(), values.size() * 4);
      there = backend.allocate_tensor(shape, DType::i32);
      backend.upload(there.view, here.view);
    };
    place(ids, {lists, rows, blocks}, host_ids, device_ids);
    place(counts, {lists, rows}, host_counts, device_counts);
    host = {block_q, block_k, host_ids.view, host_counts.view};
    device = {block_q, block_k, device_ids.view, device_counts.view};
  }
  Tensor host_ids, host_counts, device_ids, device_counts;
  BlockMask host, device;
};

TEST_P(Attention, BlockSparse) {
  const int64_t blocks[][2] = {{64, 64}, {16, 32}, {128, 64}, {32, 256}, {48, 40}};
  for (const auto& [block_q, block_k] : blocks) {
    for (const AttentionCase& c : {AttentionCase{"", 130, 333, 4, 2, 32},
                                   {"", 70, 600, 2, 2, 24},
                                   {"", 64, 256, 2, 1, 64},
                                   {"", 200, 330, 4, 2, 128}}) {
      for (int64_t lists : {c.heads, c.kv_heads, int64_t{1}}) {
        for (DType dtype : {DType::f32, DType::bf16}) {
          SCOPED_TRACE(concat("blocks ", block_q, " x ", block_k, ", keys ", c.keys, ", ", lists,
                              " lists for ", c.heads, "/", c.kv_heads, " heads ", name_of(dtype)));
          Problem p = random_problem(*backend_, c, dtype, Layout::contiguous);
          const TestMask mask(*backend_, lists, c.queries, c.keys, block_q, block_k, 0.4, 7);
          AttentionPlan plan;
          plan.scale = c.scale();
          plan.mask = &mask.host;
          EveryAttention(*backend_, candidate()).check(c, p, plan, &mask.device);
        }
      }
    }
  }
}

// Lists that cut a key/value head's group apart unevenly, or span several groups, are refused.
TEST_P(Attention, ListsThatDoNotFitTheHeadsAreRefused) {
  const AttentionCase c{"", 64, 256, 8, 4, 16};
  Problem p = random_problem(*backend_, c, DType::f32, Layout::contiguous);
  TestTensor out = poisoned(*backend_, {c.queries, c.heads, c.d}, DType::f32);
  for (int64_t lists : {2, 3, 5, 16}) {
    const TestMask mask(*backend_, lists, c.queries, c.keys, 64, 64, 0.4, 7);
    AttentionPlan plan;
    plan.scale = 0.25f;
    plan.mask = &mask.device;
    try {
      backend_->attention(out.device(), p.q.device(), p.k.device(), p.v.device(), plan);
      ADD_FAILURE() << "accepted " << lists << " lists";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("block lists for 8 query heads"), std::string::npos)
          << error.what();
    }
  }
}

// B63, B67: a plan that keeps every block is the dense plan, bit for bit, ragged tails included.
TEST_P(Attention, AllBlocksKeptIsDenseBitForBit) {
  for (const std::string& name : candidate().attention) {
    for (int64_t keys : {320, 321, 383}) {
      for (int64_t block_k : {16, 64, 128}) {
        const AttentionCase c{"", 70, keys, 2, 1, 32};
        Problem p = random_problem(*backend_, c, DType::f32, Layout::contiguous);
        const TestMask mask(*backend_, 1, c.queries, keys, 64, block_k, 2.0, 1);
        AttentionPlan plan;
        plan.scale = 0.125f;
        plan.implementation = name;
        TestTensor dense = poisoned(*backend_, p.q.host().shape, DType::f32);
        TestTensor sparse = poisoned(*backend_, p.q.host().shape, DType::f32);
        backend_->attention(dense.device(), p.q.device(), p.k.device(), p.v.device(), plan);
        plan.mask = &mask.device;
        backend_->attention(sparse.device(), p.q.device(), p.k.device(), p.v.device(), plan);
        ASSERT_TRUE(dense.download());
        ASSERT_TRUE(sparse.download());
        EXPECT_EQ(reference::values(dense.host()), reference::values(sparse.host()))
            << name << ", " << keys << " keys in blocks of " << block_k;
      }
    }
  }
}

// Blocks that are not selected are not part of the computation, whatever they hold.
TEST_P(Attention, UnselectedBlocksMayHoldNan) {
  for (const std::string& name : candidate().attention) {
    const AttentionCase c{"", 64, 200, 2, 1, 32};
    Problem p = random_problem(*backend_, c, DType::f32, Layout::contiguous);
    reference::Values k = reference::values(p.k.host()), v = reference::values(p.v.host());
    // Block 1 (keys 64 to 127) is poison; so are the odd blocks of 16 inside for the finer mask.
    for (int64_t i = 64 * 32; i < 128 * 32; ++i) k[size_t(i)] = v[size_t(i)] = NAN;
    p.k.assign(k);
    p.v.assign(v);
    TestMask mask(*backend_, 1, 64, 200, 64, 64, 2.0, 1);
    auto* ids = mask.host_ids.view.as<int32_t>();
    ids[1] = 2;
    ids[2] = 3;
    mask.host_counts.view.as<int32_t>()[0] = 3;
    backend_->upload(mask.device_ids.view, mask.host_ids.view);
    backend_->upload(mask.device_counts.view, mask.host_counts.view);
    AttentionPlan plan;
    plan.scale = 0.2f;
    plan.implementation = name;
    plan.mask = &mask.device;
    TestTensor out = poisoned(*backend_, {64, 2, 32}, DType::f32);
    backend_->attention(out.device(), p.q.device(), p.k.device(), p.v.device(), plan);
    plan.mask = &mask.host;
    const reference::Attention want =
        reference::attention(p.q.host(), p.k.host(), p.v.host(), plan);
    expect_close(out, want.out, units(c), 1, reference::Values(want.out.size(), 1.5));
  }
}

TEST_P(Attention, FutureKeysMayHoldNan) {
  for (const std::string& name : candidate().attention) {
    const AttentionCase c{"", 40, 40, 2, 2, 16};
    Problem p = random_problem(*backend_, c, DType::f32, Layout::contiguous);
    reference::Values k = reference::values(p.k.host()), v = reference::values(p.v.host());
    for (int64_t i = 30 * 32; i < 40 * 32; ++i) k[size_t(i)] = v[size_t(i)] = NAN;
    p.k.assign(k);
    p.v.assign(v);
    AttentionPlan plan;
    plan.scale = 0.25f;
    plan.causal = true;
    plan.implementation = name;
    TestTensor out = poisoned(*backend_, {40, 2, 16}, DType::f32);
    backend_->attention(out.device(), p.q.device(), p.k.device(), p.v.device(), plan);
    ASSERT_TRUE(out.download());
    const reference::Values got = reference::values(out.host());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(std::isnan(got[i]), i >= 30 * 32) << "row " << i / 32 << " of " << name;
    }
  }
}

TEST_P(Attention, NanInASelectedKeyShows) {
  for (const std::string& name : candidate().attention) {
    const AttentionCase c{"", 3, 300, 1, 1, 16};
    Problem p = random_problem(*backend_, c, DType::f32, Layout::contiguous);
    reference::Values k = reference::values(p.k.host());
    k[270 * 16] = NAN;
    p.k.assign(k);
    AttentionPlan plan;
    plan.scale = 0.25f;
    plan.implementation = name;
    TestTensor out = poisoned(*backend_, {3, 1, 16}, DType::f32);
    backend_->attention(out.device(), p.q.device(), p.k.device(), p.v.device(), plan);
    ASSERT_TRUE(out.download());
    EXPECT_TRUE(std::isnan(reference::values(out.host())[0])) << name;  // B14
  }
}

// B58: no keys at all, and the rows of a causal plan that come before the first key.
TEST_P(Attention, RowsWithoutKeysAreZero) {
  const double none = -std::numeric_limits<double>::infinity();
  for (const std::string& name : candidate().attention) {
    AttentionPlan plan;
    plan.scale = 0.25f;
    plan.implementation = name;
    TestTensor q(*backend_, {5, 2, 8}, DType::f32), k(*backend_, {3, 1, 8}, DType::f32),
        v(*backend_, {3, 1, 8}, DType::f32);
    q.randomise(1);
    k.randomise(2);
    v.randomise(3);
    {
      TestTensor out = poisoned(*backend_, {5, 2, 8}, DType::f32),
                 lse = poisoned(*backend_, {2, 5}, DType::f32);
      plan.lse = lse.device();
      backend_->attention(out.device(), q.device(), View(k.device()).slice(0, 0, 0),
                          View(v.device()).slice(0, 0, 0), plan);
      expect_close(out, reference::Values(80, 0.0), 0);
      expect_close(lse, reference::Values(10, none), 0);
    }
    TestTensor out = poisoned(*backend_, {5, 2, 8}, DType::f32),
               lse = poisoned(*backend_, {2, 5}, DType::f32);
    plan.lse = lse.device();
    plan.causal = true;  // rows 0 and 1 see nothing
    backend_->attention(out.device(), q.device(), k.device(), v.device(), plan);
    const reference::Attention want = reference::attention(q.host(), k.host(), v.host(), plan);
    EXPECT_EQ(want.lse[1], none);
    expect_close(out, want.out, 12, 1, reference::Values(80, 1.5));
    expect_close(lse, want.lse, 12, 1, reference::Values(10, 2.0));
    EXPECT_EQ(reference::values(out.host())[0], 0);
  }
}

// Scores of several hundred: only differences may matter.
TEST_P(Attention, LargeScores) {
  for (const std::string& name : candidate().attention) {
    TestTensor q(*backend_, {2, 1, 8}, DType::f32), k(*backend_, {600, 1, 8}, DType::f32),
        v(*backend_, {600, 1, 8}, DType::f32);
    q.assign(reference::Values(16, 32.0));
    reference::Values keys;
    for (int i = 0; i < 4800; ++i) keys.push_back(double(i / 8) / 256);  // scores up to 600, exact
    k.assign(keys);
    v.randomise(4);
    AttentionPlan plan;
    plan.scale = 1;
    plan.implementation = name;
    TestTensor out = poisoned(*backend_, {2, 1, 8}, DType::f32);
    backend_->attention(out.device(), q.device(), k.device(), v.device(), plan);
    const reference::Attention want = reference::attention(q.host(), k.host(), v.host(), plan);
    expect_close(out, want.out, 12, 1, reference::Values(16, 1.0));
  }
}

// B62: an explicitly named implementation that is not there is an error that lists those that are.
TEST_P(Attention, UnknownImplementationIsRefused) {
  TestTensor q(*backend_, {1, 1, 8}, DType::f32), out = poisoned(*backend_, {1, 1, 8}, DType::f32);
  q.randomise(1);
  AttentionPlan plan;
  plan.scale = 1;
  plan.implementation = "fa9";
  try {
    backend_->attention(out.device(), q.device(), q.device(), q.device(), plan);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("fa9"), std::string::npos) << error.what();
    for (const std::string& name : candidate().attention) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

TEST_P(Attention, TheBestImplementationIsNamed) {
  if (backend_->device() != DeviceKind::cpu) GTEST_SKIP() << "depends on the shape on this backend";
  TestTensor q(*backend_, {1, 1, 8}, DType::f32), out = poisoned(*backend_, {1, 1, 8}, DType::f32);
  q.randomise(1);
  AttentionPlan plan;
  plan.scale = 1;
  EXPECT_EQ(backend_->attention(out.device(), q.device(), q.device(), q.device(), plan).name,
            "native");
}

}  // namespace
}  // namespace orrery::conformance
