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

void native(Context& context, MutView out, View q, View k, View v, const AttentionPlan& plan) {
  const Kernels& kernels = context.kernels;
  const int64_t queries = q.dim(0), heads = q.dim(1), d = q.dim(2), keys = k.dim(0),
                kv_heads = k.dim(1);
  Packed packed{Panels(kernels, keys), Panels(kernels, d), d, keys, nullptr};
  const int64_t batch =
      std::clamp<int64_t>(kPackedFloats / std::max<int64_t>(packed.head_floats(), 1), 1, kv_heads);
  packed.data = context.shared.need(packed.head_floats() * batch);

  // Wide heads take fewer rows a task: queries and outputs share the second-level cache with the
  // keys. Causal rows go in a fixed number, because where the diagonal cuts the keys depends on it,
  // and few, because the diagonal is slow.
  int64_t rows_a_task = plan.causal ? kRowStep : d <= 128 ? kMaxQueries : kMaxQueries / 2;
  const int64_t block = plan.mask ? plan.mask->block_q : queries;
  const int64_t heads_per_list = plan.mask ? plan.mask->heads_per_list(heads) : 1;
  while (rows_a_task > kRowStep &&
         heads * ((queries + rows_a_task - 1) / rows_a_task) < 3 * context.threads) {
    rows_a_task /= 2;
  }
  const int64_t tasks_a_block = (std::min(block, queries) + rows_a_task - 1) / rows_a_task;
  const int64_t blocks = (queries + block - 1) / block, tasks = blocks * tasks_a_block;
  // Near-equal tasks within a block.
  const int64_t rows =
      plan.causal ? rows_a_task : (std::min(block, queries) + tasks_a_block - 1) / tasks_a_block;

  // A negative scale would turn maxima into minima: it goes into the queries instead.
  const float scale = std::fabs(plan.scale), sign = plan.scale < 0 ? -1.0f : 1.0f;
  const bool in_place = q.dtype == DType::f32 && sign > 0;

  const int64_t padded = packed.value_panels.padded();
  const int64_t scores = kMaxQueries * (kKeys + 5 * kernels.lanes) + kRowStep * padded;
  context.per_thread.need_each(context.threads, scores + kMaxQueries * padded + kMaxQueries * d);
  std::vector<std::vector<Stretch>> stretches(static_cast<size_t>(context.threads));
  for (auto& list : stretches)
    list.reserve(
        size_t(keys / std::max<int64_t>(1, plan.mask ? plan.mask->block_k : keys + 1) + 2));

  const int64_t group = heads / kv_heads;
  for (int64_t kv_begin = 0; kv_begin < kv_heads; kv_begin += batch) {
    const int64_t kv_count = std::min(batch, kv_heads - kv_begin);
    pack_heads(context, packed, k, v, kv_begin, kv_count);
    parallel_tasks(context, kv_count * group * tasks, [&](int64_t task, int thread) {
      // Late rows of a causal plan cost most: they go first.
      const int64_t tile = tasks - 1 - task % tasks, head = kv_begin * group + task / tasks;
      Rows state;
      state.begin = tile / tasks_a_block * block + tile % tasks_a_block * rows;
      const int64_t block_end = std::min(queries, (tile / tasks_a_block + 1) * block);
      state.count = std::min(rows, block_end - state.begin);
      if (state.count <= 0) return;
      state.scores = context.per_thread.of(thread);
      state.out = state.scores + scores;
      float* copied = state.out + kMaxQueries * padded;
      for (int64_t r = 0; r < kMaxQueries; ++r) {
        const int64_t element =
            (state.begin + std::min(r, state.count - 1)) * q.stride(0) + head * q.stride(1);
        state.query[size_t(r)] =
            in_place ? q.as<float>() + element : copied + std::min(r, state.count - 1) * d;
        if (in_place || r >= state.count) continue;
        kernels.to_f32(copied + r * d, at(q.data, element, q.dtype), stored(q.dtype), d);
        if (sign < 0) kernels.scale(copied + r * d, copied + r * d, sign, d);
      }
      std::fill(state.out, state.out + state.count * padded, 0.0f);
      state.top.fill(kNone);
      state.sum.fill(0.0f);

      const auto first_hidden = [&](int64_t r) {
        return plan.causal ? state.begin + r + keys - queries + 1 : keys;
      };
      auto& list = stretches[size_t(thread)];
      const auto seen_by = [&](int64_t r) { return std::clamp<int64_t>(first_hidden(r), 0, keys); };
      stretches_of(list, plan, head / heads_per_list, state.begin, seen_by(0),
                   seen_by(state.count - 1), keys);
      for (const Stretch& whole : list) {
        for (int64_t begin = 0; begin < whole.size; begin += kKeys) {
          const Stretch part{whole.begin + begin, std::min(kKeys, whole.size - begin)};
          attend(kernels, packed, head / group - kv_begin, part, state, scale, first_hidden);
        }
      }
      for (int64_t r = 0; r < state.count; ++r) {
        const float sum = state.sum[size_t(r)];
        float* row = state.out + r * padded;
        kernels.scale(row, row, sum == 0 ? 0.0f : 1.0f / sum, d);
        finish_row(kernels, row, out.mut(), out.dtype,
                   (state.begin + r) * out.stride(0) + head * out.stride(1), d);
        if (plan.lse) {
          plan.lse.as<float>()[head * queries + state.begin + r] =
              sum == 0 ? kNone : state.top[size_t(r)] + std::log(sum);
        }
      }
    });
  }
}

// One row at a time, in double precision.
void reference(Context& context, MutView out, View q, View k, View v, const AttentionPlan& plan) {
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

struct Implementation {
  const char* name;
  void (*run)(Context&, MutView, View, View, View, const AttentionPlan&);
};
// Best first.
constexpr std::array kImplementations{Implementation{"native", native},
                                      Implementation{"reference", reference}};

}  // namespace

std::string attention(Context& context, MutView out, View q, View k, View v,
                      const AttentionPlan& plan) {
  std::string names;
  for (const Implementation& implementation : kImplementations) {
    if (plan.implementation.empty() || plan.implementation == implementation.name) {
      implementation.run(context, out, q, k, v, plan);
      return implementation.name;
    }
    names += names.empty() ? "" : ", ";
    names += implementation.name;
  }
  fail(ErrorKind::unsupported, "attention: the CPU backend has no implementation \"",
       plan.implementation, "\"; it has ", names);
}

}  // namespace orrery::cpu
