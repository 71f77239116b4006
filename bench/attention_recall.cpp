// What a selection of blocks keeps of the attention that really is there, on the shipped checkpoint
// at 512 x 512, 33 frames: the recall table of docs/attention.md.
//
//   attention_recall models/cosmos3-pico bench/attention_recall.json [cpu | cuda]
//       > bench/results/pico-recall.jsonl
//
// The list of strategies is an array of {"name", "attention": a file or a document}; of a schedule
// the last layout counts. Queries and keys come from one dense run: those of every generation layer
// at steps 3, 6 and 9 of 10, conditional evaluation, in the order that the strategy stores them.
// The recall of a list is the share of its queries' softmax, in all of its heads, that falls on the
// blocks it keeps; it is computed from every score, not from pooled ones. "best" is the recall of
// the lists of the same lengths and blocks, one per head, that would hold the most. "worst" is the
// least that any head of any layer and step has on average over its queries.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../tests/e2e/moving_shape.h"
#include "base/error.h"
#include "base/json.h"
#include "base/provenance.h"
#include "engine/backends.h"
#include "engine/measure.h"
#include "engine/run.h"
#include "model/weights.h"

namespace {

using namespace orrery;

constexpr int kSteps = 10;
constexpr int kShown[] = {3, 6, 9};
constexpr int64_t kCell = 16;  // divides every block size

Request request() {
  Request r;
  r.prompt = e2e::kCaptions.front().text;
  r.height = r.width = 512;
  r.num_frames = 33;
  r.num_inference_steps = kSteps;
  r.guidance_scale = 3;
  r.flow_shift = 1;
  r.seed = 3;
  return r;
}

// One generation call, tokens in raster order.
struct Call {
  int step = 0, layer = 0;
  int64_t text = 0;
  float scale = 0;
  Tensor q, k;  // [S, H, D], [text + S, KV, D]
};

Tensor copy_of(Backend& backend, View x) {
  Tensor copy = backend.allocate_tensor(x.shape, x.dtype);
  backend.copy(copy.view, x);
  return copy;
}

struct Captured {
  Sequence sequence;
  std::vector<Call> calls;
};

Captured capture(const std::string& model, const EngineOptions& options, Backend& backend) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const Tokenizer tokenizer = Tokenizer::load(checkpoint.folder.folder / "text_tokenizer");
  const Settings settings = resolve(request(), checkpoint);
  const auto ids = prompt_lists(checkpoint, tokenizer, settings);
  const AttentionStrategy dense = strategy_of(checkpoint, "dense");
  const DType dtype = activation_type(options, backend);

  Transformer transformer(backend, checkpoint.transformer, dtype);
  Vae vae(backend, checkpoint.vae, vae_options(backend.device(), dtype));
  LoadOptions load;
  if (backend.device() != DeviceKind::cpu) load.hold = dtype;
  load.ignored = Transformer::is_unused;
  const WeightStore weights = load_weights(
      backend, Safetensors::open_folder(checkpoint.folder.folder / "transformer"),
      [&](WeightVisitor& v) { transformer.visit_und(v), transformer.visit_gen(v); }, load);
  const Placement placement{backend.device(), backend.fuses_weights(), dtype, {}, {}, 0};
  const Plan plan = measure(checkpoint, settings, dense, ids, placement).plan;
  Arena arena(backend.allocate(static_cast<size_t>(plan.activation_bytes)));
  const Request asked = request();
  Run run({transformer, vae, nullptr}, arena, {settings, dense, ids, &asked});

  Captured captured;
  captured.sequence = run.attention().sequence();
  run.attention().set_probe([&](const AttentionCall& call) {
    const int step = call.moment.step;
    const bool shown = std::find(std::begin(kShown), std::end(kShown), step) != std::end(kShown);
    if (call.site.role != AttentionRole::gen || call.site.evaluation != 0 || !shown) return;
    captured.calls.push_back({step, call.site.layer, call.text, call.scale,
                              copy_of(backend, call.q), copy_of(backend, call.k)});
  });
  for (const Stage& stage : stages_of(settings)) {
    if (stage.kind != StageKind::decode) run.perform(stage);
  }
  return captured;
}

// A call in the token order of a strategy, and where its softmax lies.
struct OrderedCall {
  Sequence sequence;
  Tensor q, k;
  std::vector<float> mass;  // [H, S, cells of keys]
  int64_t cells = 0;
};

OrderedCall in_order(Backend& backend, const Call& call, Sequence sequence, TokenOrder order) {
  OrderedCall out;
  sequence.order = order;
  out.sequence = sequence;
  const View q = call.q.view, k = call.k.view;
  const int64_t rows = q.dim(0), heads = q.dim(1), d = q.dim(2), keys = k.dim(0);
  const int64_t group = heads / k.dim(1);
  std::vector<int64_t> stored = sequence.permutation();
  for (int64_t i = std::ssize(stored); i < rows; ++i) stored.push_back(i);
  std::vector<int64_t> key_rows;
  for (int64_t i = 0; i < call.text; ++i) key_rows.push_back(i);
  for (int64_t row : stored) key_rows.push_back(call.text + row);
  const auto gather = [&](View x, const std::vector<int64_t>& ids) {
    Tensor to = backend.allocate_tensor(x.shape, x.dtype);
    backend.gather_rows(to.view.reshape({x.dim(0), -1}), x.reshape({x.dim(0), -1}), ids);
    return to;
  };
  out.q = gather(q, stored);
  out.k = gather(k, key_rows);

  out.cells = (keys + kCell - 1) / kCell;
  out.mass.assign(static_cast<size_t>(heads * rows * out.cells), 0.0f);
  const Tensor one_q = backend.allocate_tensor({rows, d}, DType::f32),
               one_k = backend.allocate_tensor({keys, d}, DType::f32),
               scores = backend.allocate_tensor({rows, keys}, DType::f32),
               host = allocate_host_tensor({rows, keys}, DType::f32);
  for (int64_t head = 0; head < heads; ++head) {
    backend.copy(one_q.view, out.q.view.select(1, head));
    backend.copy(one_k.view, out.k.view.select(1, head / group));
    backend.linear(scores.view, one_q.view, one_k.view);
    backend.download(host.view, scores.view);
    for (int64_t row = 0; row < rows; ++row) {
      float* score = host.view.as<float>() + row * keys;
      float* mass = out.mass.data() + (head * rows + row) * out.cells;
      const float top = *std::max_element(score, score + keys);
      double total = 0;
      for (int64_t key = 0; key < keys; ++key) {
        score[key] = std::exp((score[key] - top) * call.scale);
        total += static_cast<double>(score[key]);
      }
      for (int64_t key = 0; key < keys; ++key) {
        mass[key / kCell] += static_cast<float>(static_cast<double>(score[key]) / total);
      }
    }
  }
  return out;
}

struct Figures {
  double recall = 0, best = 0, kept = 0, rows = 0;  // sums over `rows` rows of blocks
  double worst = 1;
};

// The lists of one call held against its softmax.
void hold(Figures& figures, Backend& backend, Arena& arena, const AttentionStrategy& strategy,
          const Call& call, const OrderedCall& in) {
  const int layout = strategy.layout_at(kSteps - 1, kSteps);
  const AttentionMethod& method = strategy.method(layout, call.layer, AttentionRole::gen);
  if (method.is_dense()) return;
  const Arena::Scope scope(arena);
  SelectionCache selections;
  const PlannedAttention planned = method.plan({{call.layer, AttentionRole::gen},
                                                {},
                                                call.text,
                                                call.scale,
                                                in.q.view,
                                                in.k.view,
                                                in.sequence,
                                                backend,
                                                arena,
                                                selections});
  const int64_t heads = in.q.view.dim(1), queries = in.q.view.dim(0);
  require(planned.mask.has_value(), "attention_recall: ", method.description(),
          " keeps every block of this call");
  const BlockMask& mask = *planned.mask;
  const Tensor indices = allocate_host_tensor(mask.indices.shape, DType::i32),
               counts = allocate_host_tensor(mask.counts.shape, DType::i32);
  backend.download(indices.view, mask.indices);
  backend.download(counts.view, mask.counts);

  const int64_t rows = mask.indices.dim(1), capacity = mask.indices.dim(2);
  const int64_t cells_a_block = mask.block_k / kCell;
  const int64_t blocks = (in.cells + cells_a_block - 1) / cells_a_block;
  std::vector<double> of_block(static_cast<size_t>(blocks));
  for (int64_t head = 0; head < heads; ++head) {
    double of_head = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t begin = row * mask.block_q, end = std::min(queries, begin + mask.block_q);
      std::fill(of_block.begin(), of_block.end(), 0.0);
      for (int64_t query = begin; query < end; ++query) {
        const float* mass = in.mass.data() + (head * queries + query) * in.cells;
        for (int64_t cell = 0; cell < in.cells; ++cell) {
          of_block[static_cast<size_t>(cell / cells_a_block)] += static_cast<double>(mass[cell]);
        }
      }
      const int64_t list = head / mask.heads_per_list(heads) * rows + row;
      const int32_t count = counts.view.as<int32_t>()[list];
      double held = 0, best = 0;
      for (int32_t i = 0; i < count; ++i) {
        held += of_block[static_cast<size_t>(indices.view.as<int32_t>()[list * capacity + i])];
      }
      std::sort(of_block.begin(), of_block.end(), std::greater<>());
      for (int32_t i = 0; i < count; ++i) best += of_block[static_cast<size_t>(i)];
      const auto length = static_cast<double>(end - begin);
      figures.recall += held / length;
      figures.best += best / length;
      figures.kept += static_cast<double>(count) / static_cast<double>(blocks);
      figures.rows += 1;
      of_head += held;
    }
    figures.worst = std::min(figures.worst, of_head / static_cast<double>(queries));
  }
}

void run(const std::string& model, const std::string& list_file, const std::string& device,
         const std::string& command) {
  EngineOptions options;
  options.device = device;
  const std::unique_ptr<Backend> backend = make_backend(options);
  const Captured captured = capture(model, options, *backend);
  const AttentionInventory inventory = inventory_of(read_checkpoint(model).transformer);

  const Json list = Json::load(list_file);
  struct Entry {
    std::string name, attention;
    AttentionStrategy strategy;
    Figures figures;
  };
  std::vector<Entry> entries;
  std::map<std::array<int64_t, 3>, std::vector<size_t>> by_order;
  for (const Json& json : list.items()) {
    const Json& attention = json.at("attention");
    std::string text = attention.is_string() ? attention.as_string() : attention.dump();
    AttentionStrategy strategy = strategy_from(inventory, text, nullptr);
    by_order[strategy.token_order().tile].push_back(entries.size());
    entries.push_back({json.at("name").as_string(), std::move(text), std::move(strategy), {}});
  }
  const Call& any = captured.calls.front();
  const int64_t keys = any.k.view.dim(0);
  // Lists of the smallest blocks.
  Arena arena(backend->allocate(
      static_cast<size_t>(any.q.view.dim(1) * (keys / kCell + 1) * (keys / kCell + 2) * 4 + 4096)));
  for (const Call& call : captured.calls) {
    for (const auto& [tile, of_order] : by_order) {
      const OrderedCall ordered = in_order(*backend, call, captured.sequence, {tile});
      for (size_t i : of_order) {
        hold(entries[i].figures, *backend, arena, entries[i].strategy, call, ordered);
      }
    }
  }
  for (const Entry& entry : entries) {
    const Figures& f = entry.figures;
    std::printf("%s\n", Json::object()
                            .set("bench", "attention_recall")
                            .set("case", entry.name)
                            .set("device", backend->description())
                            .set("driver", Json())
                            .set("commit", measured_commit())
                            .set("date", today())
                            .set("command", command)
                            .set("value", f.recall / f.rows)
                            .set("unit", "share of the softmax, mean")
                            .set("floor", Json())
                            .set("peer", "best per-head lists of the same lengths")
                            .set("peer_value", f.best / f.rows)
                            .set("ratio", f.recall / f.best)
                            .set("worst", f.worst)
                            .set("kept_share", f.kept / f.rows)
                            .set("attention", entry.attention)
                            .dump()
                            .c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fprintf(stderr, "usage: attention_recall MODEL STRATEGIES.json [cpu | cuda]\n");
    return 2;
  }
  std::string command;
  for (int i = 0; i < argc; ++i) command += concat(i > 0 ? " " : "", argv[i]);
  try {
    run(argv[1], argv[2], argc == 4 ? argv[3] : "cpu", command);
  } catch (const Error& error) {
    std::fprintf(stderr, "attention_recall: %s\n", error.what());
    return 1;
  }
}
