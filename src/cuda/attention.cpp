#include "cuda/attention.h"

#include <algorithm>

#include "base/error.h"
#include "cuda/kernels.h"
#include "cuda/kernels/sm90_attention.h"

namespace orrery::cuda {

namespace {

// Scores of this many bytes at a time in the two-GEMM form: large enough to fill the device.
constexpr int64_t kMaxScoreBytes = int64_t{128} << 20;
// Below this the reference kernel's one launch beats the two-GEMM form's many.
constexpr double kManyFlops = 2e8;

Sm90AttentionParams native_params(const MutView& out, const View& q, const View& k, const View& v,
                                  const AttentionPlan& plan) {
  Sm90AttentionParams p;
  p.q = q.data;
  p.k = k.data;
  p.v = v.data;
  p.out = out.mut();
  p.lse = static_cast<float*>(plan.lse.mut());
  p.sq = q.dim(0);
  p.skv = k.dim(0);
  p.hq = int(q.dim(1));
  p.hkv = int(k.dim(1));
  p.head_dim = int(q.dim(2));
  p.q_stride = q.stride(0);
  p.k_stride = k.stride(0);
  p.v_stride = v.stride(0);
  p.out_stride = out.stride(0);
  p.scale = plan.scale;
  p.causal = plan.causal;
  if (plan.mask) {
    p.indices = static_cast<const int32_t*>(plan.mask->indices.data);
    p.counts = static_cast<const int32_t*>(plan.mask->counts.data);
    p.block_q = int(plan.mask->block_q);
    p.block_k = int(plan.mask->block_k);
    p.capacity = int(plan.mask->indices.dim(2));
    p.heads_per_list = int(plan.mask->heads_per_list(q.dim(1)));
  }
  return p;
}

double flops(const View& q, const View& k) { return 4.0 * double(q.numel()) * double(k.dim(0)); }

}  // namespace

// A planned graph, or why there is none.
struct Attention::CudnnPlan {
  std::unique_ptr<CudnnGraph> graph;
  int64_t q = 0, k = 0, v = 0, out = 0, scale = 0, stats = 0;
  std::string note;
};

Attention::Attention(Context& context, CudnnHandle& handle, Gemm& gemm)
    : context_(context),
      handle_(handle),
      gemm_(gemm),
      workspace_(context),
      scores_(context),
      probabilities_(context) {
  implementations_.push_back({
      "native",
      [](const Call& c) -> std::string {
        if (c.q.dtype != DType::bf16) return "takes bf16 only";
        const char* reason = sm90_attention_supports(native_params(c.out, c.q, c.k, c.v, c.plan));
        return reason ? reason : "";
      },
      nullptr,
      [this](const Call& c) { run_native(c); },
  });
  implementations_.push_back({
      "cudnn",
      [this](const Call& c) -> std::string {
        if (c.q.dtype != DType::bf16) return "takes bf16 only";
        if (c.plan.causal || c.plan.mask) return "takes neither a causal mask nor block lists";
        if (c.k.dim(0) == 0) return "takes at least one key";
        if (!(c.plan.scale > 0)) return "takes a positive scale";
        const CudnnPlan& plan = cudnn_plan(c);
        return plan.graph ? "" : plan.note;
      },
      // Wider heads run, ten times slower than as two products.
      [](const Call& c) { return c.q.dim(2) <= 256; },
      [this](const Call& c) { run_cudnn(c); },
  });
  implementations_.push_back({
      "gemm",
      [](const Call& c) -> std::string {
        // A masked key would still be multiplied by zero, and so must not hold a NaN.
        if (c.plan.causal || c.plan.mask) return "takes neither a causal mask nor block lists";
        return c.k.dim(0) == 0 ? "takes at least one key" : "";
      },
      [](const Call& c) { return flops(c.q, c.k) > kManyFlops; },
      [this](const Call& c) { run_gemm(c); },
  });
  implementations_.push_back({
      "reference",
      [](const Call& c) -> std::string {
        return c.q.dim(2) <= kMaxReferenceHeadDim
                   ? ""
                   : concat("takes head_dim up to ", kMaxReferenceHeadDim);
      },
      nullptr,
      [this](const Call& c) {
        attention_reference(context_.stream(), c.out, c.q, c.k, c.v, c.plan);
      },
  });
}

Attention::~Attention() = default;

std::string Attention::run(MutView out, View q, View k, View v, const AttentionPlan& plan) {
  const Call call{out, q, k, v, plan};
  std::string refusals;
  for (const Implementation& implementation : implementations_) {
    if (!plan.implementation.empty() && plan.implementation != implementation.name) continue;
    if (plan.implementation.empty() && !implementation.is_automatic(call)) continue;
    const std::string reason = implementation.refusal(call);
    if (reason.empty()) {
      implementation.run(call);
      return implementation.name;
    }
    refusals += concat(refusals.empty() ? "" : "; ", implementation.name, ": ", reason);
  }
  if (refusals.empty()) {
    for (const Implementation& implementation : implementations_) {
      refusals += concat(refusals.empty() ? "this backend has " : ", ", implementation.name);
    }
  }
  fail(ErrorKind::unsupported,
       "attention: ", plan.implementation.empty() ? "no implementation" : plan.implementation,
       " cannot run q ", q.shape, " with k ", k.shape, " ", name_of(q.dtype), " (", refusals, ")");
}

void Attention::run_native(const Call& c) {
  const char* problem =
      sm90_attention(native_params(c.out, c.q, c.k, c.v, c.plan), context_.stream());
  require(problem == nullptr, ErrorKind::device, "attention: native: ", problem ? problem : "");
}

const Attention::CudnnPlan& Attention::cudnn_plan(const Call& c) {
  std::vector<int64_t> key;
  for (const View& t : {View(c.out), c.q, c.k, c.v}) {
    for (int d = 0; d < 3; ++d) {
      key.push_back(t.dim(d));
      key.push_back(t.stride(d));
    }
  }
  key.push_back(c.plan.lse ? 1 : 0);
  std::unique_ptr<CudnnPlan>& slot = cudnn_plans_[key];
  if (slot) return *slot;
  context_.require_eager("the first cudnn attention of a shape");
  slot = std::make_unique<CudnnPlan>();
  CudnnPlan& plan = *slot;
  try {
    plan.graph = std::make_unique<CudnnGraph>(handle_);
    CudnnGraph& graph = *plan.graph;
    // [S, H, D] as cuDNN's [batch, heads, S, D].
    const auto describe = [&](const View& t) {
      const int64_t row = t.dim(0) > 1 ? t.stride(0) : t.dim(1) * t.dim(2);
      return graph.tensor(
          {{1, t.dim(1), t.dim(0), t.dim(2)}, {t.dim(0) * row, t.dim(2), row, 1}, t.dtype});
    };
    plan.q = describe(c.q);
    plan.k = describe(c.k);
    plan.v = describe(c.v);
    plan.out = describe(c.out);
    plan.scale = graph.tensor({{1, 1, 1, 1}, {1, 1, 1, 1}, DType::f32, CudnnGraph::Place::host});
    if (c.plan.lse) {
      const int64_t heads = c.q.dim(1), sq = c.q.dim(0);
      plan.stats = graph.tensor({{1, heads, sq, 1}, {heads * sq, sq, 1, 1}, DType::f32});
    }
    graph.attention(plan.out, plan.q, plan.k, plan.v, plan.scale, plan.stats);
    const bool found = graph.plan(false);
    plan.note = graph.engine();
    if (!found) plan.graph.reset();
  } catch (const Error& error) {
    plan.note = error.what();
    plan.graph.reset();
  }
  return plan;
}

void Attention::run_cudnn(const Call& c) {
  const CudnnPlan& plan = cudnn_plan(c);
  std::vector<CudnnGraph::Binding> bindings{{plan.q, c.q.data},
                                            {plan.k, c.k.data},
                                            {plan.v, c.v.data},
                                            {plan.out, c.out.data},
                                            {plan.scale, &c.plan.scale}};
  if (plan.stats) bindings.push_back({plan.stats, c.plan.lse.data});
  plan.graph->run(bindings, workspace_.get(size_t(plan.graph->workspace_bytes())));
}

// Scores and values as two products per head, softmax between them, a part of the rows at a time:
// for wide heads (the VAE's single head of up to 1024) and long f32 sequences.
void Attention::run_gemm(const Call& c) {
  const int64_t sq = c.q.dim(0), skv = c.k.dim(0), group = c.q.dim(1) / c.k.dim(1);
  const int64_t step = std::clamp<int64_t>(kMaxScoreBytes / (skv * int64_t(sizeof(float))), 1, sq);
  for (int64_t head = 0; head < c.q.dim(1); ++head) {
    const View q = c.q.select(1, head), k = c.k.select(1, head / group),
               v = c.v.select(1, head / group);
    const MutView out = c.out.select(1, head);
    for (int64_t begin = 0; begin < sq; begin += step) {
      const int64_t size = std::min(step, sq - begin);
      const MutView scores = scores_.tensor({size, skv}, DType::f32);
      const MutView probabilities = probabilities_.tensor({size, skv}, q.dtype);
      gemm_.run(scores, q.slice(0, begin, size), k);
      float* lse = c.plan.lse ? c.plan.lse.as<float>() + head * sq + begin : nullptr;
      softmax_rows(context_.stream(), probabilities, scores, c.plan.scale, lse);
      gemm_.run(out.slice(0, begin, size), probabilities, v.permute({1, 0}));
    }
  }
}

}  // namespace orrery::cuda
