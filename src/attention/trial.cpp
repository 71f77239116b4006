#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "attention/describe.h"
#include "attention/method.h"
#include "base/error.h"

namespace orrery {

namespace {

constexpr int64_t kText = 20;
constexpr int64_t kGrid = 10;  // 10 x 10 x 10 video tokens
constexpr int64_t kSampledRows = 16;

// f32 inputs are exact to summation order; bf16 kernels round the probabilities to 8 bits before
// the second product, so a few times 2^-9.
double tolerance(DType dtype) { return dtype == DType::bf16 ? 1e-2 : 1e-4; }

std::vector<float> to_host(Backend& backend, View x) {
  const Tensor host = allocate_host_tensor(x.shape, x.dtype);
  backend.download(host.view, x);
  std::vector<float> values(static_cast<size_t>(x.numel()));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        x.dtype == DType::bf16 ? to_float(host.view.as<bf16>()[i]) : host.view.as<float>()[i];
  }
  return values;
}

Tensor random_tensor(Backend& backend, std::mt19937& engine, Shape shape, DType dtype) {
  std::normal_distribution<float> normal;
  const Tensor host = allocate_host_tensor(shape, dtype);
  for (int64_t i = 0; i < host.view.numel(); ++i) {
    const float value = normal(engine);
    if (dtype == DType::bf16)
      host.view.as<bf16>()[i] = to_bf16(value);
    else
      host.view.as<float>()[i] = value;
  }
  Tensor tensor = backend.allocate_tensor(shape, dtype);
  backend.upload(tensor.view, host.view);
  return tensor;
}

// The keys that query `row` of `head` sees, one flag each.
class VisibleKeys {
 public:
  VisibleKeys(Backend& backend, const std::optional<BlockMask>& mask, int64_t heads, int64_t keys)
      : mask_(mask), keys_(keys) {
    if (!mask) return;
    heads_per_list_ = mask->heads_per_list(heads);
    indices_ = allocate_host_tensor(mask->indices.shape, DType::i32);
    counts_ = allocate_host_tensor(mask->counts.shape, DType::i32);
    backend.download(indices_.view, mask->indices);
    backend.download(counts_.view, mask->counts);
  }
  std::vector<bool> of(int64_t head, int64_t row) const {
    if (!mask_) return std::vector<bool>(static_cast<size_t>(keys_), true);
    std::vector<bool> seen(static_cast<size_t>(keys_));
    const int64_t list = head / heads_per_list_ * mask_->indices.dim(1) + row / mask_->block_q;
    for (int32_t i = 0; i < counts_.view.as<int32_t>()[list]; ++i) {
      const int64_t begin =
          mask_->block_k * indices_.view.as<int32_t>()[list * mask_->indices.dim(2) + i];
      const int64_t end = std::min(keys_, begin + mask_->block_k);
      for (int64_t key = begin; key < end; ++key) seen[static_cast<size_t>(key)] = true;
    }
    return seen;
  }

 private:
  std::optional<BlockMask> mask_;
  int64_t keys_, heads_per_list_ = 1;
  Tensor indices_, counts_;
};

struct Inputs {
  Tensor q, k, v, out;
};

// |out - exact| / |exact| over a sample of rows, in double precision.
double error_against_host(Backend& backend, const Inputs& in, const PlannedAttention& planned) {
  const int64_t heads = in.q.view.dim(1), d = in.q.view.dim(2), kv_heads = in.k.view.dim(1);
  const int64_t queries = in.q.view.dim(0), keys = in.k.view.dim(0);
  const std::vector<float> q = to_host(backend, in.q.view), k = to_host(backend, in.k.view),
                           v = to_host(backend, in.v.view), out = to_host(backend, in.out.view);
  const VisibleKeys visible(backend, planned.mask, heads, keys);
  double difference = 0, norm = 0;
  std::vector<double> weights(static_cast<size_t>(keys));
  for (int64_t sample = 0; sample < kSampledRows; ++sample) {
    const int64_t row = sample * (queries - 1) / (kSampledRows - 1), head = sample % heads;
    const int64_t kv = head / (heads / kv_heads);
    const std::vector<bool> seen = visible.of(head, row);
    double sum = 0;
    for (int64_t key = 0; key < keys; ++key) {
      double dot = 0;
      for (int64_t i = 0; i < d; ++i) {
        dot += double(q[size_t((row * heads + head) * d + i)]) *
               double(k[size_t((key * kv_heads + kv) * d + i)]);
      }
      // Standard normals times 1/sqrt(d): the exponent needs no shift.
      const double weight = seen[size_t(key)] ? std::exp(dot * double(planned.plan.scale)) : 0;
      weights[size_t(key)] = weight;
      sum += weight;
    }
    for (int64_t i = 0; i < d; ++i) {
      double exact = 0;
      for (int64_t key = 0; key < keys; ++key) {
        exact += weights[size_t(key)] / sum * double(v[size_t((key * kv_heads + kv) * d + i)]);
      }
      const double delta = double(out[size_t((row * heads + head) * d + i)]) - exact;
      difference += delta * delta;
      norm += exact * exact;
    }
  }
  return std::sqrt(difference / norm);
}

}  // namespace

std::vector<PresetTrial> try_presets(const AttentionStrategy& strategy, Backend& backend,
                                     int64_t heads, int64_t kv_heads, int64_t head_dim,
                                     DType dtype) {
  std::set<int> used;
  const AttentionInventory& inventory = strategy.inventory();
  for (int layout = 0; layout < strategy.num_layouts(); ++layout) {
    for (int layer = 0; layer < inventory.num_layers; ++layer) {
      for (AttentionRole role : inventory.roles) used.insert(strategy.preset(layout, layer, role));
    }
  }
  Sequence sequence;
  sequence.grid = {kGrid, kGrid, kGrid};
  sequence.order = strategy.token_order();
  std::mt19937 engine(1);
  Inputs in;
  in.q = random_tensor(backend, engine, {sequence.size(), heads, head_dim}, dtype);
  in.k = random_tensor(backend, engine, {kText + sequence.size(), kv_heads, head_dim}, dtype);
  in.v = random_tensor(backend, engine, {kText + sequence.size(), kv_heads, head_dim}, dtype);
  in.out = backend.allocate_tensor({sequence.size(), heads, head_dim}, dtype);
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  // Lists of the smallest blocks: 64 query and key blocks each.
  Arena arena(backend.allocate(static_cast<size_t>(heads * 65 * 65 * 4 + 4096)));

  std::vector<PresetTrial> trials;
  for (int preset : used) {
    PresetTrial trial;
    trial.preset = strategy.preset_name(preset);
    try {
      const Arena::Scope scope(arena);
      SelectionCache selections;
      PlannedAttention planned = strategy.preset_method(preset).plan(
          {{}, {}, kText, scale, in.q.view, in.k.view, sequence, backend, arena, selections});
      if (planned.mask) planned.plan.mask = &*planned.mask;
      trial.implementation =
          backend.attention(in.out.view, in.q.view, in.k.view, in.v.view, planned.plan).name;
      if (!backend.is_dry()) trial.relative_error = error_against_host(backend, in, planned);
      if (!(trial.relative_error <= tolerance(dtype))) {
        trial.failure = concat("its output is wrong by ", trial.relative_error, " (limit ",
                               tolerance(dtype), ")");
      }
    } catch (const Error& error) {
      trial.failure = error.what();
    }
    trials.push_back(std::move(trial));
  }
  return trials;
}

void require_presets(const std::vector<PresetTrial>& trials) {
  std::string failures;
  for (const PresetTrial& trial : trials) {
    if (trial.failure.empty()) continue;
    failures += concat(failures.empty() ? "" : "; ", "preset \"", trial.preset,
                       "\" cannot run here: ", trial.failure);
  }
  require(failures.empty(), ErrorKind::unsupported, "attention: ", failures);
}

}  // namespace orrery
