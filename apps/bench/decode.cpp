#include <algorithm>

#include "bench/measurements.h"
#include "bench/random_model.h"
#include "engine/fidelity.h"

namespace orrery {

namespace {

struct DecodeTime {
  double seconds = 0;
  double flops = 0;
};

// One decode, after another that warms up and gives `frames`.
DecodeTime time_decode(BenchRank& rank, Frames& frames) {
  RandomDecoder decoder(rank);
  decoder.decode([&](const FrameGroup& group) {
    const View& bytes = group.bytes;
    const size_t begin = frames.rgb.size();
    frames.rgb.resize(begin + static_cast<size_t>(bytes.numel()));
    rank.backend->download(make_mut_view(frames.rgb.data() + begin, bytes.shape, DType::u8), bytes);
    frames.count += bytes.dim(0);
    frames.height = bytes.dim(1);
    frames.width = bytes.dim(2);
  });
  const double seconds = rank.seconds([&] { decoder.decode([](const FrameGroup&) {}); });
  return {seconds, decoder.flops()};
}

}  // namespace

void measure_vae(BenchRank& rank) {
  RandomDecoder decoder(rank);
  const auto decode = [&] { decoder.decode([](const FrameGroup&) {}); };
  decode();
  rank.report("VAE decode", rank.seconds(decode), "s", decoder.flops() / rank.gemm_rate());
  rank.report_operations("VAE decode", rank.profile(decode), {}, 1);
  rank.report_memory();
}

Alone measure_vae_alone(BenchRank& rank) {
  Alone one;
  const DecodeTime decode = time_decode(rank, one.frames);
  one.seconds = decode.seconds;
  rank.report("VAE decode, one device", one.seconds, "s", decode.flops / rank.gemm_rate());
  rank.report_memory();
  return one;
}

void measure_vae_beside(BenchRank& rank, const Alone& one) {
  Frames frames;
  const DecodeTime decode = time_decode(rank, frames);
  const double rate = rank.gemm_rate();
  if (!rank.leads()) return;
  rank.report({"VAE decode, " + rank.mesh_name, decode.seconds, "s", decode.flops / rate,
               "one device in the same run", one.seconds});
  rank.report_memory();
  rank.report("frames against one device, " + rank.mesh_name,
              std::min(psnr(frames, one.frames), 99.0), "dB");
}

}  // namespace orrery
