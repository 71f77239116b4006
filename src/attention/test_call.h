// For tests of this layer: random attention inputs, and attention in double precision on the host.
#pragma once

#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/method.h"
#include "base/error.h"
#include "cpu/cpu_backend.h"

namespace orrery::testing {

struct CallShape {
  Sequence sequence;
  int64_t text = 0;
  int64_t heads = 4, kv_heads = 2, head_dim = 16;
};

inline Tensor random_tensor(std::mt19937& engine, Shape shape) {
  std::normal_distribution<float> normal;
  Tensor tensor = allocate_host_tensor(shape, DType::f32);
  for (int64_t i = 0; i < tensor.view.numel(); ++i) tensor.view.as<float>()[i] = normal(engine);
  return tensor;
}

// One call's inputs, the same for the same shape and seed.
struct CallData {
  explicit CallData(const CallShape& s, unsigned seed = 1) : shape(s) {
    std::mt19937 engine(seed);
    q = random_tensor(engine, {s.sequence.size(), s.heads, s.head_dim});
    k = random_tensor(engine, {s.sequence.size(), s.kv_heads, s.head_dim});
    v = random_tensor(engine, {s.sequence.size(), s.kv_heads, s.head_dim});
    und_k = random_tensor(engine, {s.text, s.kv_heads, s.head_dim});
    und_v = random_tensor(engine, {s.text, s.kv_heads, s.head_dim});
  }
  CallShape shape;
  Tensor q, k, v, und_k, und_v;
};

inline Arena host_arena(size_t bytes = size_t{64} << 20) { return Arena(allocate_host(bytes)); }

inline std::vector<float> floats(View x) { return {x.as<float>(), x.as<float>() + x.numel()}; }

// Equal bits, NaN included.
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The rows of `from` [rows, heads, D] that a rank makes, into the slots that the facade hands out.
inline void fill(Backend& backend, const std::vector<AttentionInputs::Slot>& slots, View from) {
  for (const AttentionInputs::Slot& slot : slots) {
    backend.copy(slot.rows, from.slice(1, slot.head, slot.rows.dim(1)));
  }
}

// One generation call as the model makes it, of this rank's rows of q, k and v with padding.
inline View generate(Attention& attention, Arena& arena, View q, View k, View v, View und_k,
                     View und_v, const AttentionSite& site) {
  AttentionInputs in = attention.inputs(arena, q.dim(1), und_k, und_v);
  fill(attention.backend(), in.q, q);
  fill(attention.backend(), in.k, k);
  fill(attention.backend(), in.v, v);
  for (const RowRange& part : in.parts) attention.send(in, part);
  attention.run(arena, in, site);
  for (const RowRange& part : in.parts) attention.output(in, part);
  return in.out;
}

// One call of the facade on one rank.
inline std::vector<float> call(Attention& attention, Arena& arena, const CallData& data,
                               const AttentionSite& site = {}) {
  const Arena::Scope scope(arena);
  const View q = data.q.view, k = data.k.view, v = data.v.view;
  if (is_invariant(site.role)) {
    const MutView out = arena.make(q.shape, DType::f32);
    attention.run_text(arena, {out, q, k, v}, site.layer, site.branch);
    return floats(out);
  }
  return floats(generate(attention, arena, q, k, v, data.und_k.view, data.und_v.view, site));
}

inline AttentionInventory inventory(int layers = 4) {
  AttentionInventory all;
  all.num_layers = layers;
  all.roles = {AttentionRole::und, AttentionRole::gen, AttentionRole::gen_multi_control};
  return all;
}

inline AttentionStrategy strategy_of(const std::string& document, int layers = 4) {
  const Json json = Json::parse(document, "strategy.json");
  return AttentionStrategy::resolve(inventory(layers), &json, nullptr);
}

// Text and several controls dense, cosmos3.gen by `method` (JSON).
inline AttentionStrategy gen_by(const std::string& method, int layers = 4) {
  return strategy_of(R"({"per_role": {"cosmos3.gen": )" + method + "}}", layers);
}

inline std::string block_sparse(const std::string& selection, const std::string& backend = "native",
                                int block_q = 16, int block_k = 16) {
  return concat(R"({"name": "block_sparse", "config": {"block_size": [)", block_q, ", ", block_k,
                R"(], "selection": )", selection, R"(, "backend": {"require": ")", backend,
                "\"}}}");
}

}  // namespace orrery::testing
