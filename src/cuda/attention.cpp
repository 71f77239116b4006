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

Sm90AttentionParams native_params(const AttentionArgs& call) {
  const auto& [out, q, k, v, plan] = call;
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

double flops(const AttentionArgs& call) {
  return 4.0 * double(call.q.numel()) * double(call.k.dim(0));
}

// Whether the choice is ours: one that is slower at a size runs when it is named.
bool is_unasked(const AttentionArgs& call) { return call.plan.implementation.empty(); }

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
      probabilities_(context),
      list_("attention", {{"native", [this](const AttentionArgs& c) { return native(c); }},
                          {"cudnn", [this](const AttentionArgs& c) { return cudnn(c); }},
                          {"gemm", [this](const AttentionArgs& c) { return this->gemm(c); }},
                          {"reference", [this](const AttentionArgs& c) { return reference(c); }}}) {
}

Attention::~Attention() = default;

Answer Attention::native(const AttentionArgs& c) {
  if (c.q.dtype != DType::bf16) return decline("takes bf16 only");
  const Sm90AttentionParams params = native_params(c);
  if (const char* reason = sm90_attention_supports(params)) return decline(reason);
  const char* problem = sm90_attention(params, context_.stream());
  require(problem == nullptr, ErrorKind::device, "attention: native: ", problem ? problem : "");
  return {};
}

const Attention::CudnnPlan& Attention::cudnn_plan(const AttentionArgs& c) {
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

Answer Attention::cudnn(const AttentionArgs& c) {
  if (is_unasked(c) && c.q.dim(2) > 256) return decline("wide heads run ten times faster as gemm");
  if (c.q.dtype != DType::bf16) return decline("takes bf16 only");
  if (c.plan.causal || c.plan.mask) return decline("takes neither a causal mask nor block lists");
  if (c.k.dim(0) == 0) return decline("takes at least one key");
  if (!(c.plan.scale > 0)) return decline("takes a positive scale");
  const CudnnPlan& plan = cudnn_plan(c);
  if (!plan.graph) return decline(plan.note);
  std::vector<CudnnGraph::Binding> bindings{{plan.q, c.q.data},
                                            {plan.k, c.k.data},
                                            {plan.v, c.v.data},
                                            {plan.out, c.out.data},
                                            {plan.scale, &c.plan.scale}};
  if (plan.stats) bindings.push_back({plan.stats, c.plan.lse.data});
  plan.graph->run(bindings, workspace_.get(size_t(plan.graph->workspace_bytes())));
  return {.note = plan.note};
}

// Scores and values as two products per head, softmax between them, a part of the rows at a time:
// for wide heads (the VAE's single head of up to 1024) and long f32 sequences.
Answer Attention::gemm(const AttentionArgs& c) {
  if (is_unasked(c) && flops(c) <= kManyFlops) return decline("few products: many launches");
  // A masked key would still be multiplied by zero, and so must not hold a NaN.
  if (c.plan.causal || c.plan.mask) return decline("takes neither a causal mask nor block lists");
  if (c.k.dim(0) == 0) return decline("takes at least one key");
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
      gemm_.run({scores, q.slice(0, begin, size), k});
      float* lse = c.plan.lse ? c.plan.lse.as<float>() + head * sq + begin : nullptr;
      softmax_rows(context_.stream(), probabilities, scores, c.plan.scale, lse);
      gemm_.run({out.slice(0, begin, size), probabilities, v.permute({1, 0})});
    }
  }
  return {};
}

Answer Attention::reference(const AttentionArgs& c) {
  if (c.q.dim(2) > kMaxReferenceHeadDim)
    return decline(concat("takes head_dim up to ", kMaxReferenceHeadDim));
  attention_reference(context_.stream(), c.out, c.q, c.k, c.v, c.plan);
  return {};
}

}  // namespace orrery::cuda
