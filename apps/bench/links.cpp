#include "base/error.h"
#include "bench/measurements.h"

namespace orrery {

namespace {

// One line in GB/s that leave a rank, `bytes` at a time.
void carry(BenchRank& rank, const std::string& name, int64_t ranks, int64_t bytes,
           const std::function<void()>& collective) {
  constexpr int kTimes = 20;
  collective();
  const double all = rank.seconds([&] {
    for (int i = 0; i < kTimes; ++i) collective();
  });
  rank.report(concat(name, " over ", ranks, " ranks, ", bytes, " bytes from each"),
              double(bytes) * kTimes / all * 1e-9, "GB/s");
}

// What a context group exchanges around one attention call.
void measure_exchanges(BenchRank& rank, const Sequence& sequence, Communicator& cp) {
  const int64_t rows = sequence.share(cp.rank(), cp.size()).padded_rows, ranks = cp.size();
  const HeadExchange heads(rank.config.num_attention_heads / rank.groups.mesh.tp,
                           rank.config.num_key_value_heads / rank.groups.mesh.tp, cp.size());
  const auto trade_of = [&](int64_t count) {
    const Shape shape{ranks, rows, count, rank.config.head_dim};
    return std::pair{rank.backend->allocate_tensor(shape, rank.dtype),
                     rank.backend->allocate_tensor(shape, rank.dtype)};
  };
  const auto q = trade_of(heads.q_count()), k = trade_of(heads.kv_count()),
             v = trade_of(heads.kv_count());
  const std::vector<Trade> inputs{
      {q.first.view, q.second.view}, {k.first.view, k.second.view}, {v.first.view, v.second.view}};
  const std::vector<Trade> output{{q.first.view, q.second.view}};
  for (const auto& [name, trades] :
       {std::pair{"exchange of q, k, v", inputs}, {"exchange of the output", output}}) {
    int64_t bytes = 0;
    for (const Trade& trade : trades) bytes += trade.x.bytes() / ranks * (ranks - 1);
    carry(rank, name, ranks, bytes, [&, t = trades] { cp.exchange(t); });
  }
}

}  // namespace

void measure_links(BenchRank& rank) {
  const Sequence sequence = rank.sequence();
  if (Communicator* cp = rank.groups.cp.get()) measure_exchanges(rank, sequence, *cp);
  if (Communicator* tp = rank.groups.tp.get()) {
    const int64_t rows = sequence.share(0, rank.groups.mesh.cp).padded_rows, ranks = tp->size();
    const Tensor x = rank.backend->allocate_tensor({rows, rank.config.hidden_size}, rank.dtype);
    rank.backend->fill(x.view, 0);
    // What a ring sends from each rank.
    carry(rank, "sum over ranks", ranks, 2 * x.view.bytes() / ranks * (ranks - 1),
          [&] { tp->all_reduce(x.view); });
  }
  if (Communicator* cfg = rank.groups.cfg.get()) {
    const Settings& s = rank.settings;
    const Tensor x = rank.backend->allocate_tensor(
        {rank.vae_config.z_dim, s.latent_frames, s.latent_height, s.latent_width}, DType::f32);
    carry(rank, "broadcast of a velocity", cfg->size(), x.view.bytes(),
          [&] { cfg->broadcast(x.view, 0); });
  }
}

}  // namespace orrery
