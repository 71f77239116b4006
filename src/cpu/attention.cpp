// Attention by blocks of keys with a running maximum, for dense, causal and block-sparse plans
// alike: a plan is a list of stretches of keys per query block. Neighbouring key blocks of a sparse
// plan are joined first, so a plan that keeps every block runs exactly as the dense one. Keys and
// values are packed once per KV head into the panels the register tiles read; memory is that, plus
// one tile of scores per thread. Flops: 4 Sq Skv D a head; the exponentials cost about a tenth of
// that time at D = 64.
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "cpu/ops.h"
#include "cpu/packed.h"

namespace orrery::cpu {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kKeys = 256;                        // keys of one step
constexpr int64_t kMaxQueries = 96;                   // rows of one task
constexpr int64_t kPackedFloats = int64_t{16} << 20;  // of keys and values packed at a time

struct Stretch {
  int64_t begin, size;
};

// The keys that query rows of one block, from q_begin on, see in the head's list. `common` keys are
// seen by every row, `visible` by at least one: they differ in causal plans only.
void stretches_of(std::vector<Stretch>& stretches, const AttentionPlan& plan, int64_t list,
                  int64_t q_begin, int64_t common, int64_t visible, int64_t keys) {
  stretches.clear();
  if (!plan.mask) {
    if (common > 0) stretches.push_back({0, common});
    if (visible > common) stretches.push_back({common, visible - common});
    return;
  }
  const BlockMask& mask = *plan.mask;
  const int64_t row = list * mask.indices.dim(1) + q_begin / mask.block_q;
  const int32_t* blocks = mask.indices.as<int32_t>() + row * mask.indices.dim(2);
  for (int32_t i = 0; i < mask.counts.as<int32_t>()[row]; ++i) {
    const int64_t begin = blocks[i] * mask.block_k;
    const int64_t end = std::min(keys, begin + mask.block_k);
    if (!stretches.empty() && stretches.back().begin + stretches.back().size == begin) {
      stretches.back().size = end - stretches.back().begin;
    } else {
      stretches.push_back({begin, end - begin});
    }
  }
}

// Keys [panel][D, width] and values [panel of D][Skv, width] of some KV heads.
struct Packed {
  Panels key_panels, value_panels;
  int64_t depth, keys;
  float* data;

  int64_t key_floats() const { return key_panels.padded() * depth; }
  int64_t head_floats() const { return key_floats() + value_panels.padded() * keys; }
  float* key(int64_t head) const { return data + head * head_floats(); }
  float* value(int64_t head) const { return key(head) + key_floats(); }
};

void pack_heads(const Context& context, const Packed& packed, const View& k, const View& v,
                int64_t begin, int64_t count) {
  const Kernels& kernels = context.kernels;
  const int64_t panels = packed.key_panels.count();
  parallel_tasks(context, count * panels, [&](int64_t task, int) {
    const int64_t head = task / panels, panel = task % panels;
    const int64_t first = packed.key_panels.begin(panel), n = packed.key_panels.columns(panel);
    pack_columns(kernels, packed.key(head) + packed.key_panels.offset(panel, packed.depth),
                 packed.key_panels.width(panel), k.data, k.dtype,
                 first * k.stride(0) + (begin + head) * k.stride(1), k.stride(0), n, packed.depth);
    for (int64_t p = 0; p < packed.value_panels.count(); ++p) {
      const int64_t width = packed.value_panels.width(p), columns = packed.value_panels.columns(p);
      float* to = packed.value(head) + packed.value_panels.offset(p, packed.keys) + first * width;
      for (int64_t i = 0; i < n; ++i, to += width) {
        const int64_t element =
            (first + i) * v.stride(0) + (begin + head) * v.stride(1) + packed.value_panels.begin(p);
        kernels.to_f32(to, at(v.data, element, v.dtype), stored(v.dtype), columns);
        std::fill(to + columns, to + width, 0.0f);
      }
    }
  });
}

// Running softmax of one task's query rows.
struct Rows {
  int64_t begin, count;
  std::array<const float*, kMaxQueries> query;
  std::array<float, kMaxQueries> top, sum;
  float* scores;  // [count, kScorePitch]
  float* out;     // [count, padded D]
};

// One step: scores of keys [stretch], their exponentials, and the weighted values added to
// rows.out. `first_hidden(row)` is the first key the row does not see.
template <typename Fn>
void attend(const Kernels& kernels, const Packed& packed, int64_t head, const Stretch& stretch,
            Rows& rows, float scale, const Fn& first_hidden) {
  const Panels& panels = packed.key_panels;
  const int64_t step = panels.begin(1);
  const int64_t first = std::min(stretch.begin / step, panels.count() - 1);
  const int64_t last = std::min((stretch.begin + stretch.size - 1) / step, panels.count() - 1) + 1;
  const int64_t pitch = panels.begin(last - 1) + panels.width(last - 1) - panels.begin(first);
  const int64_t skipped = stretch.begin - panels.begin(first);
  multiply(kernels, rows.scores, pitch, rows.query.data(), rows.count, packed.key(head),
           packed.depth, panels, first, last, 0, packed.depth, false);

  const int64_t out_pitch = packed.value_panels.padded();
  std::array<const float*, kMaxQueries> weights;
  bool all_see_all = true;
  for (int64_t r = 0; r < rows.count; ++r) {
    float* score = rows.scores + r * pitch + skipped;
    weights[size_t(r)] = score;
    const int64_t seen = std::clamp<int64_t>(first_hidden(r) - stretch.begin, 0, stretch.size);
    all_see_all = all_see_all && seen == stretch.size;
    if (seen == 0) continue;
    float& top = rows.top[size_t(r)];
    const float new_top = std::max(top, kernels.max(score, seen) * scale);
    // Scores that are all -inf (or NaN, which must show) leave no maximum to subtract.
    const float shift = new_top == kNone ? 0.0f : new_top;
    const float kept = std::exp(top - shift);
    const float sum = kernels.exp_sum(score, scale, shift, seen);
    rows.sum[size_t(r)] = rows.sum[size_t(r)] * kept + sum;
    if (kept != 1.0f)
      kernels.scale(rows.out + r * out_pitch, rows.out + r * out_pitch, kept, out_pitch);
    top = new_top;
  }
  for (int64_t r = rows.count; r < kMaxQueries; ++r)
    weights[size_t(r)] = weights[size_t(rows.count - 1)];

  const Panels& columns = packed.value_panels;
  if (all_see_all) {
    multiply(kernels, rows.out, out_pitch, weights.data(), rows.count, packed.value(head),
             packed.keys, columns, 0, columns.count(), stretch.begin, stretch.size, true);
    return;
  }
  // On the diagonal each row stops at its own last key, so that no weight of zero meets a NaN.
  std::array<const float*, kRowStep> one;
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t seen = std::clamp<int64_t>(first_hidden(r) - stretch.begin, 0, stretch.size);
    if (seen == 0) continue;
    one.fill(weights[size_t(r)]);
    float* sums = rows.scores + kMaxQueries * (kKeys + 5 * kernels.lanes);
    multiply(kernels, sums, out_pitch, one.data(), 1, packed.value(head), packed.keys, columns, 0,
             columns.count(), stretch.begin, seen, false);
    kernels.add_scaled(rows.out + r * out_pitch, sums, 1.0f, out_pitch);
  }
}

// How the query rows of a head are cut into tasks: near-equal pieces of each block of the plan.
struct Tiles {
  int64_t queries, block, rows, per_block, count;

  int64_t begin(int64_t tile) const { return tile / per_block * block + tile % per_block * rows; }
  int64_t size(int64_t tile) const {
    const int64_t block_end = std::min(queries, (tile / per_block + 1) * block);
    return std::min(rows, block_end - begin(tile));  // may be negative
  }
};

// Wide heads take fewer rows a task: queries and outputs share the second-level cache with the
// keys. Causal rows go in a fixed number, because where the diagonal cuts the keys depends on it,
// and few, because the diagonal is slow.
Tiles tiles_of(const Context& context, const AttentionPlan& plan, const View& q) {
  const int64_t queries = q.dim(0), heads = q.dim(1);
  int64_t most = plan.causal ? kRowStep : q.dim(2) <= 128 ? kMaxQueries : kMaxQueries / 2;
  while (most > kRowStep && heads * ceil_div(queries, most) < 3 * context.threads) most /= 2;
  const int64_t block = plan.mask ? plan.mask->block_q : queries;
  const int64_t in_block = std::min(block, queries), per_block = ceil_div(in_block, most);
  return {queries, block, plan.causal ? most : ceil_div(in_block, per_block), per_block,
          ceil_div(queries, block) * per_block};
}

// One call: what its tasks share, and memory for each thread.
class Native {
 public:
  Native(Context& context, const AttentionArgs& call)
      : context_(context),
        call_(call),
        queries_(call.q.dim(0)),
        keys_(call.k.dim(0)),
        d_(call.q.dim(2)),
        group_(call.q.dim(1) / call.k.dim(1)),
        tiles_(tiles_of(context, call.plan, call.q)),
        packed_{Panels(context.kernels, keys_), Panels(context.kernels, d_), d_, keys_, nullptr},
        stretches_(static_cast<size_t>(context.threads)) {
    const BlockMask* mask = call.plan.mask;
    if (mask) heads_per_list_ = mask->heads_per_list(call.q.dim(1));
    const int64_t most = keys_ / std::max<int64_t>(1, mask ? mask->block_k : keys_ + 1) + 2;
    for (auto& list : stretches_) list.reserve(size_t(most));
    context.per_thread.need_each(context.threads, score_floats() + kMaxQueries * (padded() + d_));
  }

  void run() {
    const int64_t kv_heads = call_.k.dim(1);
    const int64_t batch = std::clamp<int64_t>(
        kPackedFloats / std::max<int64_t>(packed_.head_floats(), 1), 1, kv_heads);
    packed_.data = context_.shared.need(packed_.head_floats() * batch);
    for (int64_t first = 0; first < kv_heads; first += batch) {
      const int64_t count = std::min(batch, kv_heads - first);
      pack_heads(context_, packed_, call_.k, call_.v, first, count);
      parallel_tasks(context_, count * group_ * tiles_.count, [&](int64_t task, int thread) {
        // Late rows of a causal plan cost most: they go first.
        const int64_t tile = tiles_.count - 1 - task % tiles_.count;
        if (tiles_.size(tile) > 0) attend_tile(tile, first, task / tiles_.count, thread);
      });
    }
  }

 private:
  int64_t padded() const { return packed_.value_panels.padded(); }
  int64_t score_floats() const {
    return kMaxQueries * (kKeys + 5 * context_.kernels.lanes) + kRowStep * padded();
  }

  // Query head `head`, counted from the first key/value head that is packed.
  void attend_tile(int64_t tile, int64_t first_kv_head, int64_t head, int thread) {
    const int64_t q_head = first_kv_head * group_ + head;
    Rows rows = load(tile, q_head, thread);
    const auto first_hidden = [&](int64_t r) {
      return call_.plan.causal ? rows.begin + r + keys_ - queries_ + 1 : keys_;
    };
    const auto seen_by = [&](int64_t r) { return std::clamp<int64_t>(first_hidden(r), 0, keys_); };
    auto& list = stretches_[size_t(thread)];
    stretches_of(list, call_.plan, q_head / heads_per_list_, rows.begin, seen_by(0),
                 seen_by(rows.count - 1), keys_);
    // A negative scale would turn maxima into minima: its sign is in the queries.
    const float scale = std::fabs(call_.plan.scale);
    for (const Stretch& whole : list) {
      for (int64_t begin = 0; begin < whole.size; begin += kKeys) {
        const Stretch part{whole.begin + begin, std::min(kKeys, whole.size - begin)};
        attend(context_.kernels, packed_, head / group_, part, rows, scale, first_hidden);
      }
    }
    finish(rows, q_head);
  }

  Rows load(int64_t tile, int64_t head, int thread) {
    const Kernels& kernels = context_.kernels;
    const View& q = call_.q;
    const float sign = call_.plan.scale < 0 ? -1.0f : 1.0f;
    const bool in_place = q.dtype == DType::f32 && sign > 0;
    Rows rows;
    rows.begin = tiles_.begin(tile);
    rows.count = tiles_.size(tile);
    rows.scores = context_.per_thread.of(thread);
    rows.out = rows.scores + score_floats();
    float* copied = rows.out + kMaxQueries * padded();
    for (int64_t r = 0; r < kMaxQueries; ++r) {
      const int64_t row = std::min(r, rows.count - 1);
      const int64_t element = (rows.begin + row) * q.stride(0) + head * q.stride(1);
      rows.query[size_t(r)] = in_place ? q.as<float>() + element : copied + row * d_;
      if (in_place || r >= rows.count) continue;
      kernels.to_f32(copied + r * d_, at(q.data, element, q.dtype), stored(q.dtype), d_);
      if (sign < 0) kernels.scale(copied + r * d_, copied + r * d_, sign, d_);
    }
    std::fill(rows.out, rows.out + rows.count * padded(), 0.0f);
    rows.top.fill(kNone);
    rows.sum.fill(0.0f);
    return rows;
  }

  void finish(const Rows& rows, int64_t head) {
    const MutView& out = call_.out;
    for (int64_t r = 0; r < rows.count; ++r) {
      const float sum = rows.sum[size_t(r)];
      float* row = rows.out + r * padded();
      context_.kernels.scale(row, row, sum == 0 ? 0.0f : 1.0f / sum, d_);
      finish_row(context_.kernels, row, out.mut(), out.dtype,
                 (rows.begin + r) * out.stride(0) + head * out.stride(1), d_);
      if (!call_.plan.lse) continue;
      call_.plan.lse.as<float>()[head * queries_ + rows.begin + r] =
          sum == 0 ? kNone : rows.top[size_t(r)] + std::log(sum);
    }
  }

  Context& context_;
  const AttentionArgs& call_;
  int64_t queries_, keys_, d_, group_;
  int64_t heads_per_list_ = 1;
  Tiles tiles_;
  Packed packed_;
  std::vector<std::vector<Stretch>> stretches_;  // by thread
};

// One row at a time, in double precision.
void reference(Context& context, const AttentionArgs& call) {
  const View &q = call.q, &k = call.k, &v = call.v;
  const MutView& out = call.out;
  const AttentionPlan& plan = call.plan;
  const Kernels& kernels = context.kernels;
  const int64_t queries = q.dim(0), heads = q.dim(1), d = q.dim(2), keys = k.dim(0);
  const int64_t group = heads / k.dim(1);
  const int64_t heads_per_list = plan.mask ? plan.mask->heads_per_list(heads) : 1;
  std::vector<std::vector<double>> weights(static_cast<size_t>(context.threads),
                                           std::vector<double>(size_t(keys)));
  std::vector<std::vector<double>> sums(static_cast<size_t>(context.threads),
                                        std::vector<double>(size_t(d)));
  std::vector<std::vector<Stretch>> stretches(static_cast<size_t>(context.threads));
  context.per_thread.need_each(context.threads, 2 * d);
  parallel_tasks(context, heads * queries, [&](int64_t task, int thread) {
    const int64_t head = task / queries, i = task % queries;
    float* query_row = context.per_thread.of(thread);
    float* key_row = query_row + d;
    const float* query =
        read_row(kernels, query_row, q.data, q.dtype, i * q.stride(0) + head * q.stride(1), d);
    auto& list = stretches[size_t(thread)];
    auto& weight = weights[size_t(thread)];
    auto& sum = sums[size_t(thread)];
    const int64_t visible =
        plan.causal ? std::clamp<int64_t>(i + keys - queries + 1, 0, keys) : keys;
    stretches_of(list, plan, head / heads_per_list, i, visible, visible, keys);
    const auto each_key = [&](const View& x, const auto& fn) {
      for (const Stretch& s : list) {
        for (int64_t j = s.begin; j < s.begin + s.size; ++j) {
          fn(j, read_row(kernels, key_row, x.data, x.dtype,
                         j * x.stride(0) + head / group * x.stride(1), d));
        }
      }
    };
    double top = -std::numeric_limits<double>::infinity(), total = 0;
    each_key(k, [&](int64_t j, const float* key) {
      double dot = 0;
      for (int64_t l = 0; l < d; ++l) dot += double(query[l]) * double(key[l]);
      weight[size_t(j)] = dot * double(plan.scale);
      top = std::max(top, weight[size_t(j)]);
    });
    const double shift = std::isinf(top) && top < 0 ? 0 : top;
    std::fill(sum.begin(), sum.end(), 0.0);
    each_key(v, [&](int64_t j, const float* value) {
      const double e = std::exp(weight[size_t(j)] - shift);
      total += e;
      for (int64_t l = 0; l < d; ++l) sum[size_t(l)] += e * double(value[l]);
    });
    for (int64_t l = 0; l < d; ++l) query_row[l] = float(total == 0 ? 0 : sum[size_t(l)] / total);
    finish_row(kernels, query_row, out.mut(), out.dtype, i * out.stride(0) + head * out.stride(1),
               d);
    if (plan.lse)
      plan.lse.as<float>()[head * queries + i] = total == 0 ? kNone : float(top + std::log(total));
  });
}

}  // namespace

Implementations<AttentionArgs> attention_implementations(Context& context) {
  const auto native = [&context](const AttentionArgs& call) {
    Native(context, call).run();
    return Answer{};
  };
  const auto in_double = [&context](const AttentionArgs& call) {
    reference(context, call);
    return Answer{};
  };
  return {"attention", {{"native", native}, {"reference", in_double}}};
}

}  // namespace orrery::cpu
