#include "attention/attention.h"

#include <gtest/gtest.h>

#include "attention/describe.h"
#include "attention/test_call.h"
#include "backend/dry_run.h"

namespace orrery {
namespace {

using testing::block_sparse;
using testing::call;
using testing::CallData;
using testing::CallShape;
using testing::floats;
using testing::gen_by;
using testing::generate;
using testing::host_arena;
using testing::same_bits;
using testing::strategy_of;

constexpr AttentionSite kGen{1, AttentionRole::gen};

CallShape video(int64_t text = 21) {
  CallShape shape;
  shape.sequence.grid = {6, 8, 8};
  shape.text = text;
  return shape;
}

class AttentionFacade : public ::testing::Test {
 protected:
  std::vector<float> run(const AttentionStrategy& strategy, const CallData& data, int step = 0,
                         const AttentionSite& site = kGen) {
    Attention attention(*backend_, strategy, data.shape.sequence, data.shape.head_dim);
    attention.begin_step(step, step + 1);
    return call(attention, arena_, data, site);
  }

  std::unique_ptr<Backend> backend_ = cpu::make_cpu_backend();
  Arena arena_ = host_arena();
};

std::string reusing(int steps) {
  return block_sparse(concat(R"({"name": "block_topk", "config": {"target_sparsity": 0.7}, )"
                             R"("reuse_steps": )",
                             steps, "}"));
}

std::string topk(double sparsity) {
  return block_sparse(
      concat(R"({"name": "block_topk", "config": {"target_sparsity": )", sparsity, "}}"));
}

// The facade's buffers are [text | generation]: the same as attention over joined tensors.
TEST_F(AttentionFacade, DenseReadsTextAndGeneration) {
  for (int64_t text : {0, 1, 21}) {  // B58: an empty prompt
    const CallData data(video(text));
    const std::vector<float> got = run(AttentionStrategy::dense(testing::inventory()), data);
    const int64_t keys = text + data.shape.sequence.size(), d = data.shape.head_dim;
    for (int64_t row : {0, 17, 383}) {
      for (int64_t head = 0; head < 4; ++head) {
        std::vector<double> want(static_cast<size_t>(d));
        double sum = 0;
        for (int64_t key = 0; key < keys; ++key) {
          const bool und = key < text;
          const int64_t at = ((und ? key : key - text) * 2 + head / 2) * d;
          const float* k = (und ? data.und_k : data.k).view.as<float>() + at;
          const float* v = (und ? data.und_v : data.v).view.as<float>() + at;
          double dot = 0;
          for (int64_t i = 0; i < d; ++i) {
            dot += double(data.q.view.as<float>()[(row * 4 + head) * d + i]) * double(k[i]);
          }
          const double weight = std::exp(dot / std::sqrt(double(d)));
          sum += weight;
          for (int64_t i = 0; i < d; ++i) want[size_t(i)] += weight * double(v[i]);
        }
        for (int64_t i = 0; i < d; ++i) {
          // f32 sums of 400 terms of order one.
          EXPECT_NEAR(got[size_t((row * 4 + head) * d + i)], want[size_t(i)] / sum, 2e-6);
        }
      }
    }
  }
}

// The text tower: causal, before any step, whatever the schedule; an empty prompt has nothing to
// do.
TEST_F(AttentionFacade, TextIsCausalAndNeedsNoStep) {
  const AttentionStrategy strategy = strategy_of(
      R"({"presets": {"d": "native"}, "layouts": {"a": {"default": "d"}}, )"
      R"("schedule": {"coordinate": "step_index", "phases": [{"until": null, "layout": "a"}]}})");
  const AttentionSite und{0, AttentionRole::und};
  for (int64_t text : {0, 7}) {
    CallShape shape;
    shape.sequence.sound_tokens = text;  // rows of q, k and v
    const CallData data(shape);
    Sequence sequence;
    sequence.grid = {2, 2, 2};  // another length than the text
    Attention attention(*backend_, strategy, sequence, 16);
    const std::vector<float> got = call(attention, arena_, data, und);
    ASSERT_EQ(int64_t(got.size()), text * 4 * 16);
    // The first row sees the first key alone.
    for (int64_t i = 0; text > 0 && i < 64; ++i) {
      EXPECT_FLOAT_EQ(got[size_t(i)], data.v.view.as<float>()[i / 32 * 16 + i % 16]);
    }
    // Generation needs a step.
    EXPECT_THROW(call(attention, arena_, data, kGen), Error);
  }
}

// B67: dense steps of a schedule, sparsity 0, and "nothing but protected" are the dense run, bit
// for bit.
TEST_F(AttentionFacade, DenseStepsOfAMixedRunAreTheDenseRuns) {
  const CallData data(video());
  const std::vector<float> dense = run(gen_by(R"("native")"), data);
  const AttentionStrategy mixed = strategy_of(
      R"({"presets": {"d": "native", "s": )" + topk(0.9) +
      R"(}, "layouts": {"dense": {"default": "d"}, "mixed": {"default": "d", "overrides": )"
      R"([{"attention_role": "cosmos3.gen", "layers": [1], "use": "s"}]}}, )"
      R"("schedule": {"coordinate": "step_index", "phases": [{"until": 2, "layout": "dense"}, )"
      R"({"until": null, "layout": "mixed"}]}})");
  EXPECT_TRUE(same_bits(run(mixed, data, 0), dense));
  EXPECT_TRUE(same_bits(run(mixed, data, 1), dense));
  EXPECT_FALSE(same_bits(run(mixed, data, 2), dense)) << "the sparse step must differ";
  EXPECT_TRUE(same_bits(run(mixed, data, 2, {0, AttentionRole::gen}), dense));
  EXPECT_TRUE(same_bits(run(gen_by(topk(0)), data), dense));
  EXPECT_FALSE(same_bits(run(gen_by(topk(0.9)), data), dense));

  CallShape guarded = video();
  guarded.sequence.action_tokens = guarded.sequence.video_tokens();
  guarded.sequence.grid = {0, 0, 0};
  const CallData actions(guarded);
  EXPECT_TRUE(same_bits(run(gen_by(topk(0.9)), actions), run(gen_by(R"("native")"), actions)));
}

// A block that nobody selected may hold anything: the window of the first frame ends before the
// last.
TEST_F(AttentionFacade, APoisonedBlockOutsideTheSelectionIsNeverRead) {
  const AttentionStrategy strategy =
      gen_by(block_sparse(R"({"name": "sliding_tile", "config": {"window": [3, 1, 1]}})"));
  CallData data(video(0));
  const std::vector<float> clean = run(strategy, data);
  const int64_t row = data.shape.kv_heads * data.shape.head_dim;
  for (const MutView& x : {data.k.view, data.v.view}) {
    std::fill(x.as<float>() + 5 * 64 * row, x.as<float>() + 6 * 64 * row, NAN);
  }
  const std::vector<float> poisoned = run(strategy, data);
  const size_t frame = size_t(64 * 4 * 16);
  // Frames 0 to 2 (windows 0..2 and 1..3) do not see frame 5; frame 5 does.
  for (size_t i = 0; i < 3 * frame; ++i) ASSERT_EQ(poisoned[i], clean[i]) << i;
  EXPECT_TRUE(std::isnan(poisoned[5 * frame]));
}

// The same for block_topk: values of a block that no query block of any head chose.
TEST_F(AttentionFacade, PoisonedValuesThatTopkDidNotChooseAreNeverRead) {
  CallData data(video(0));
  const int64_t d = data.shape.head_dim, row = data.shape.kv_heads * d;
  // Queries point one way; the last 32 keys point the other, so their blocks score lowest.
  for (int64_t i = 0; i < data.q.view.numel(); i += d) data.q.view.as<float>()[i] += 6;
  for (int64_t key = 352; key < 384; ++key) {
    for (int64_t g = 0; g < 2; ++g) data.k.view.as<float>()[key * row + g * d] = -40;
  }
  const AttentionStrategy strategy = gen_by(topk(0.7));
  const std::vector<float> clean = run(strategy, data);
  std::fill(data.v.view.as<float>() + 352 * row, data.v.view.as<float>() + 384 * row, NAN);
  EXPECT_TRUE(same_bits(run(strategy, data), clean));
  EXPECT_TRUE(std::isnan(run(gen_by(R"("native")"), data)[0])) << "dense reads it";
}

// Dense attention does not care in which order keys and queries lie.
TEST_F(AttentionFacade, TokenOrderChangesDenseResultsByRoundingOnly) {
  CallShape tiled = video();
  tiled.sequence.order.tile = {4, 4, 4};
  const CallData raster(video());
  CallData stored(tiled);
  const std::vector<int64_t> permutation = tiled.sequence.permutation();
  const int64_t q_row = 64, k_row = 32;
  for (size_t i = 0; i < permutation.size(); ++i) {
    for (const auto& [to, from, row] : {std::tuple{stored.q.view, raster.q.view, q_row},
                                        {stored.k.view, raster.k.view, k_row},
                                        {stored.v.view, raster.v.view, k_row}}) {
      std::copy_n(from.as<float>() + permutation[i] * row, row, to.as<float>() + int64_t(i) * row);
    }
  }
  const AttentionStrategy dense = gen_by(R"("native")");
  const std::vector<float> want = run(dense, raster), got = run(dense, stored);
  for (size_t i = 0; i < permutation.size(); ++i) {
    for (int64_t c = 0; c < q_row; ++c) {
      // Another order of 405 f32 additions.
      EXPECT_NEAR(got[i * size_t(q_row) + size_t(c)], want[size_t(permutation[i] * q_row + c)],
                  2e-6);
    }
  }
}

TEST_F(AttentionFacade, RecordsWhatRan) {
  const CallData data(video());
  const AttentionStrategy strategy = gen_by(topk(0.75));
  Attention attention(*backend_, strategy, data.shape.sequence, 16);
  attention.set_recording(true);
  attention.begin_step(3, 10);
  call(attention, arena_, data, {2, AttentionRole::gen, 1});
  call(attention, arena_, data, {2, AttentionRole::gen_multi_control});
  backend_->set_profiling(true);
  call(attention, arena_, data, {2, AttentionRole::gen});
  ASSERT_EQ(attention.records().size(), 3u);
  const DispatchRecord& sparse = attention.records()[0];
  EXPECT_EQ(sparse.step, 3);
  EXPECT_EQ(sparse.evaluation, 1);
  EXPECT_EQ(sparse.layer, 2);
  EXPECT_EQ(sparse.role, AttentionRole::gen);
  EXPECT_EQ(sparse.method, "cosmos3.gen");
  EXPECT_EQ(sparse.implementation, "native");
  // 24 query blocks, 26 key blocks, 2 of them text; 8 of 24 kept.
  EXPECT_EQ(sparse.all_blocks, 4 * 24 * 26);
  EXPECT_EQ(sparse.kept_blocks, 4 * 24 * 10);
  EXPECT_EQ(sparse.seconds, 0);
  const DispatchRecord& dense = attention.records()[1];
  EXPECT_EQ(dense.method, "default");
  EXPECT_EQ(dense.all_blocks, 0);
  EXPECT_GT(attention.records()[2].seconds, 0);
}

// B62: a kernel that was named and cannot run is an error, at the call and in the trial before.
TEST_F(AttentionFacade, ANamedKernelThatCannotRunIsAnError) {
  const CallData data(video());
  const AttentionStrategy strategy = gen_by(R"("cudnn")");
  EXPECT_THROW(run(strategy, data), Error);
  const auto trials = try_presets(strategy, *backend_, 4, 2, 16, DType::f32);
  ASSERT_EQ(trials.size(), 2u);
  EXPECT_EQ(trials[0].failure, "");
  EXPECT_EQ(trials[0].implementation, "native");
  EXPECT_LT(trials[0].relative_error, 1e-5);
  EXPECT_NE(trials[1].failure, "");
  try {
    require_presets(trials);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::unsupported);
    EXPECT_NE(std::string(error.what()).find("preset \"cosmos3.gen\" cannot run here"),
              std::string::npos);
  }
}

TEST_F(AttentionFacade, TrialsRunEveryMethodExactly) {
  for (const std::string& method :
       {topk(0.75), block_sparse(R"({"name": "threshold", "config": {"mass": 0.5}})"),
        block_sparse(R"({"name": "sliding_tile", "config": {"window": [1, 3, 3]}})"),
        std::string(R"("FLASH_ATTN")"), std::string(R"("reference")")}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      const auto trials = try_presets(gen_by(method), *backend_, 6, 2, 32, dtype);
      EXPECT_NO_THROW(require_presets(trials)) << method;
      for (const PresetTrial& trial : trials) EXPECT_GT(trial.relative_error, 0);
    }
  }
}

// --- selections that several steps share ---------------------------------------------------------

class Reuse : public AttentionFacade {
 protected:
  int64_t selections() const {
    const auto it = backend_->stats().find("select_blocks");
    return it == backend_->stats().end() ? 0 : it->second.calls;
  }
};

TEST_F(Reuse, SelectsEveryThirdStepPerLayerAndEvaluation) {
  const AttentionStrategy strategy = gen_by(reusing(3));
  const CallData data(video());
  Attention attention(*backend_, strategy, data.shape.sequence, 16);
  for (int step = 0; step < 7; ++step) {
    attention.begin_step(step, 7);
    const int64_t before = selections();
    for (int evaluation : {0, 1}) {
      for (int layer : {0, 3})
        call(attention, arena_, data, {layer, AttentionRole::gen, evaluation});
    }
    EXPECT_EQ(selections() - before, step % 3 == 0 ? 4 : 0) << step;
  }
}

// The lists of step 0 serve step 1's queries: equal to a call in which only attention sees them.
TEST_F(Reuse, TheOldListsServeTheNewQueries) {
  const AttentionStrategy strategy = gen_by(reusing(2)), fresh = gen_by(reusing(1));
  const CallData first(video(), 1), second(video(), 2);
  Attention attention(*backend_, strategy, first.shape.sequence, 16);
  attention.begin_step(0, 4);
  EXPECT_TRUE(same_bits(call(attention, arena_, first, kGen), run(fresh, first)));
  attention.begin_step(1, 4);
  const std::vector<float> reused = call(attention, arena_, second, kGen);
  EXPECT_FALSE(same_bits(reused, run(fresh, second)));
  attention.begin_step(2, 4);
  EXPECT_TRUE(same_bits(call(attention, arena_, second, kGen), run(fresh, second)));
}

TEST_F(Reuse, AnotherLengthSelectsAnew) {
  const AttentionStrategy strategy = gen_by(reusing(100));
  const CallData data(video(21)), longer(video(40));
  Attention attention(*backend_, strategy, data.shape.sequence, 16);
  attention.begin_step(0, 4);
  call(attention, arena_, data, kGen);
  attention.begin_step(1, 4);
  const std::vector<float> got = call(attention, arena_, longer, kGen);
  EXPECT_EQ(selections(), 2);
  EXPECT_TRUE(same_bits(got, run(gen_by(reusing(1)), longer)));
}

// Warm-up's data must not leak into the run, and a phase starts with its own selection.
TEST_F(Reuse, WarmUpAndPhasesStartAfresh) {
  const AttentionStrategy strategy = strategy_of(
      R"({"presets": {"d": "native", "s": )" + reusing(4) +
      R"(}, "layouts": {"a": {"default": "d", "overrides": [{"attention_role": "cosmos3.gen", )"
      R"("use": "s"}]}, "b": {"default": "d", "overrides": [{"attention_role": "cosmos3.gen", )"
      R"("layers": [1], "use": "s"}]}}, "schedule": {"coordinate": "step_index", "phases": )"
      R"([{"until": 2, "layout": "a"}, {"until": null, "layout": "b"}]}})");
  const CallData data(video());
  Attention attention(*backend_, strategy, data.shape.sequence, 16);
  attention.begin_layout(0);
  call(attention, arena_, data, kGen);
  EXPECT_THROW(attention.begin_layout(2), Error);
  std::vector<int64_t> counts;
  for (int step = 0; step < 4; ++step) {
    attention.begin_step(step, 4);
    const int64_t before = selections();
    call(attention, arena_, data, kGen);
    counts.push_back(selections() - before);
  }
  EXPECT_EQ(counts, (std::vector<int64_t>{1, 0, 1, 0}));
}

// A window is built once per evaluation and serves all layers and steps.
TEST_F(Reuse, WindowsAreBuiltOnce) {
  const AttentionStrategy strategy =
      gen_by(block_sparse(R"({"name": "sliding_tile", "config": {"window": [1, 1, 1]}})"));
  const CallData data(video());
  Attention attention(*backend_, strategy, data.shape.sequence, 16);
  for (int step = 0; step < 3; ++step) {
    attention.begin_step(step, 3);
    for (int layer = 0; layer < 4; ++layer) {
      call(attention, arena_, data, {layer, AttentionRole::gen});
    }
  }
  EXPECT_EQ(backend_->stats().find("upload")->second.calls, 2);  // indices and counts
}

// --- contracts -----------------------------------------------------------------------------------

TEST_F(AttentionFacade, RefusesWhatDoesNotFit) {
  const AttentionStrategy strategy = AttentionStrategy::dense(testing::inventory());
  const CallData data(video());
  Sequence other = data.shape.sequence;
  other.action_tokens = 1;
  Attention attention(*backend_, strategy, other, 16);
  EXPECT_THROW(call(attention, arena_, data, kGen), Error);
  EXPECT_THROW(Attention(*backend_, strategy, other, 0), Error);
  Attention fitting(*backend_, strategy, data.shape.sequence, 16);
  EXPECT_THROW(call(fitting, arena_, data, {4, AttentionRole::gen}), Error);
  EXPECT_THROW(fitting.inputs(arena_, 4, View{}, View{}), Error);
}

// A dry run through a measuring arena finds exactly the memory that the real call takes.
TEST_F(AttentionFacade, DryRunFindsThePeak) {
  const CallData data(video());
  for (const std::string& method :
       {std::string(R"("native")"), topk(0.9), reusing(2),
        block_sparse(R"({"name": "threshold", "config": {"mass": 0.5}})"),
        block_sparse(R"({"name": "sliding_tile", "config": {"window": [1, 1, 1]}})")}) {
    const AttentionStrategy strategy = gen_by(method);
    DryRunBackend dry(DeviceKind::cpu);
    Arena measuring = Arena::measuring(DeviceKind::cpu);
    const auto drive = [&](Backend& backend, Arena& arena) {
      Attention attention(backend, strategy, data.shape.sequence, 16);
      attention.begin_step(0, 1);
      const Arena::Scope scope(arena);
      generate(attention, arena, data.q.view, data.k.view, data.v.view, data.und_k.view,
               data.und_v.view, kGen);
    };
    drive(dry, measuring);
    Arena exact(allocate_host(measuring.peak()));
    drive(*backend_, exact);
    EXPECT_EQ(exact.peak(), measuring.peak()) << method;
  }
}

// Runs a step twice, then claims to have launched it.
class Replaying final : public DryRunBackend {
 public:
  Replaying() : DryRunBackend(DeviceKind::cpu) {}

 private:
  void do_replay(const std::string& key, const std::function<void()>& fn) override {
    if (++calls_[key] <= 2) fn();
  }
  void do_forget_replays() override { calls_.clear(); }
  std::map<std::string, int> calls_;
};

// What a recording did is listed and counted as if it had run.
TEST_F(AttentionFacade, ReplaysAreRecordedLikeRuns) {
  const CallData data(video());
  const auto drive = [&](Backend& backend, const AttentionStrategy& strategy, bool replays) {
    Attention attention(backend, strategy, data.shape.sequence, 16);
    attention.set_recording(true);
    int runs = 0;
    for (int step = 0; step < 5; ++step) {
      attention.begin_step(step, 5);
      for (int evaluation = 0; evaluation < 2; ++evaluation) {
        const auto work = [&] {
          ++runs;
          Arena arena = Arena::measuring(DeviceKind::cpu);
          for (int layer = 0; layer < 2; ++layer) {
            generate(attention, arena, data.q.view, data.k.view, data.v.view, data.und_k.view,
                     data.und_v.view, {layer, AttentionRole::gen, evaluation});
          }
        };
        if (replays)
          attention.replay(concat("evaluation ", evaluation), work);
        else
          work();
      }
    }
    std::vector<std::string> lines;
    for (const DispatchRecord& r : attention.records()) {
      lines.push_back(concat(r.step, " ", r.evaluation, " ", r.layer, " ", r.method, " ",
                             r.implementation, " ", r.kept_blocks, " ", r.all_blocks));
    }
    return std::pair{runs, lines};
  };
  for (const std::string& method : {topk(0.7), std::string(R"("native")")}) {
    const AttentionStrategy strategy = gen_by(method);
    DryRunBackend plain(DeviceKind::cpu);
    Replaying recording;
    const auto want = drive(plain, strategy, false), got = drive(recording, strategy, true);
    EXPECT_EQ(want.first, 10);
    EXPECT_EQ(got.first, 4) << method;  // two of each evaluation
    EXPECT_EQ(got.second, want.second) << method;
    for (const auto& [op, stats] : plain.stats()) {
      EXPECT_EQ(recording.stats().at(op).calls, stats.calls) << op;
      EXPECT_EQ(recording.stats().at(op).flops, stats.flops) << op;
      EXPECT_EQ(recording.stats().at(op).bytes, stats.bytes) << op;
    }
  }
  // Selections that are used again are chosen on the host, the lengths of others are read back.
  for (const std::string& method :
       {reusing(2), block_sparse(R"({"name": "threshold", "config": {"mass": 0.5}})")}) {
    Replaying recording;
    EXPECT_EQ(drive(recording, gen_by(method), true).first, 10) << method;
  }
}

}  // namespace
}  // namespace orrery
