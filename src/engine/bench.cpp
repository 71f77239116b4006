#include "orrery/bench.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <sstream>

#include "backend/dry_run.h"
#include "base/error.h"
#include "base/provenance.h"
#include "engine/backends.h"
#include "engine/clock.h"
#include "engine/fidelity.h"
#include "engine/measure.h"
#include "engine/model_weights.h"
#include "engine/ranks.h"
#include "engine/run.h"
#include "model/layer_stream.h"
#include "model/presets.h"

namespace orrery {

namespace {

// The sizes of one benchmarked request, resolved as a real one would be.
Settings make_settings(const BenchOptions& options, const VaeConfig& vae) {
  Settings s;
  s.mode = options.num_frames == 1 ? Mode::text_to_image : Mode::text_to_video;
  s.height = s.canvas_height = options.height;
  s.width = s.canvas_width = options.width;
  require(options.height > 0 && options.width > 0 && options.num_frames > 0 &&
              options.num_inference_steps > 0,
          "bench: height, width, num_frames and num_inference_steps must be positive");
  require(s.height % vae.scale_factor_spatial == 0 && s.width % vae.scale_factor_spatial == 0,
          "bench: height and width must be multiples of ", vae.scale_factor_spatial);
  s.latent_frames = vae.latent_frames(options.num_frames);
  s.requested_frames = options.num_frames;
  s.frames = vae.decoded_frames(s.latent_frames);
  s.latent_height = s.height / vae.scale_factor_spatial;
  s.latent_width = s.width / vae.scale_factor_spatial;
  s.conditioning.noisy.assign(static_cast<size_t>(s.latent_frames), true);
  s.guidance_scale = options.guidance_scale;
  s.scheduler.flow_shift = 10;
  s.schedule = make_schedule(s.scheduler, static_cast<int>(options.num_inference_steps));
  return s;
}

// A mesh to be measured.
struct MeshCase {
  Mesh mesh;
  int64_t part_rows = 0;  // 0: the engine's choice

  // "tp 2 x cp 2", "cp 2, parts of 4096 rows".
  std::string name() const {
    std::string text;
    for (const auto& [axis, degree] :
         {std::pair{"tp", mesh.tp}, {"cp", mesh.cp}, {"cfg", mesh.cfg}}) {
      if (degree > 1) text += concat(text.empty() ? "" : " x ", axis, " ", degree);
    }
    return part_rows > 0 ? concat(text, ", parts of ", part_rows, " rows") : text;
  }
};

// "tp2cp2", "cp2@4096".
MeshCase parse_mesh(const std::string& text) {
  MeshCase result;
  size_t at = 0;
  // Takes the digits at `at`; 0 when there are none or too many.
  const auto number = [&] {
    const size_t end = std::min(text.find_first_not_of("0123456789", at), text.size());
    const std::string digits = text.substr(at, end - at);
    at = end;
    return digits.empty() || digits.size() > 9 ? 0 : std::stoi(digits);
  };
  bool known = !text.empty();
  while (known && at < text.size()) {
    const size_t begin = at;
    at = std::min(text.find_first_of("0123456789", at), text.size());
    const std::string axis = text.substr(begin, at - begin);
    const int degree = number();
    known = degree > 0;
    if (axis == "tp")
      result.mesh.tp = degree;
    else if (axis == "cp")
      result.mesh.cp = degree;
    else if (axis == "cfg")
      result.mesh.cfg = degree;
    else if (axis == "@")
      result.part_rows = degree;
    else
      known = false;
  }
  require(known && result.mesh.world() > 1, "bench: mesh \"", text,
          "\" is not known; it names axes and degrees, as in cp2, tp2cp2 or cp2@4096");
  return result;
}

std::vector<MeshCase> meshes_of(const BenchOptions& options, const EngineOptions& engine) {
  std::vector<MeshCase> meshes;
  std::stringstream list(options.meshes);
  for (std::string item; std::getline(list, item, ',');) meshes.push_back(parse_mesh(item));
  if (meshes.empty() && mesh_of(engine).world() > 1) meshes.push_back({mesh_of(engine)});
  return meshes;
}

using Lines = std::function<void(const std::string&)>;

struct Measurement {
  std::string name;  // of the case
  double value = 0;
  const char* unit = "s";
  double floor = 0;  // 0: none is known
  std::string peer;  // what else did the same, in the same process; empty: nothing
  double peer_value = 0;
};

Json json_line(const BenchOptions& options, const Backend& backend, const std::string& size,
               const Measurement& m) {
  const bool has_peer = !m.peer.empty();
  Json line = Json::object();
  line.set("bench", options.what)
      .set("case", m.name + ": " + size)
      .set("device", backend.description())
      .set("driver", backend.driver())
      .set("commit", measured_commit())
      .set("date", today())
      .set("command", options.command)
      .set("value", m.value)
      .set("unit", m.unit)
      .set("floor", m.floor > 0 ? Json(m.floor) : Json())
      .set("peer", has_peer ? Json(m.peer) : Json())
      .set("peer_value", has_peer ? Json(m.peer_value) : Json())
      .set("ratio", has_peer && m.value > 0 ? Json(m.peer_value / m.value) : Json());
  return line;
}

// One rank's part of a benchmark.
class Bench {
 public:
  Bench(const BenchOptions& options, const EngineOptions& engine, const Lines& line)
      : options_(options),
        line_(line),
        preset_(model_preset(options.config)),
        backend_(make_backend(engine)),
        dtype_(activation_type(engine, *backend_)),
        config_(TransformerConfig::from_json(preset_.transformer)),
        vae_config_(VaeConfig::from_json(preset_.vae)),
        offload_(offload_of(engine.offload, backend_->device())),
        replays_(engine.graphs && offload_ != Offload::layer) {
    require(offload_ != Offload::model,
            "bench: --offload model moves weights between stages only, which random weights do not "
            "show; use none or "
            "layer");
    if (options.num_layers > 0) config_.num_hidden_layers = options.num_layers;
    settings_ = make_settings(options, vae_config_);
  }

  // Collective.
  void join(World& world, const MeshCase& mesh, int rank) {
    mesh.mesh.check(
        {config_.num_attention_heads, config_.num_key_value_heads, {config_.intermediate_size}},
        world.size());
    groups_ = connect(world, mesh.mesh, rank, *backend_, mesh.part_rows);
    mesh_name_ = mesh.name();
  }

  // Releases ranks that wait for this one, from any thread.
  void leave() const { abort(groups_); }

  void run() {
    if (options_.what == "layer")
      layer();
    else if (options_.what == "vae")
      vae();
    else if (options_.what == "step")
      step();
    else if (options_.what == "e2e")
      end_to_end();
    else if (options_.what == "attention")
      attention();
    else
      fail(ErrorKind::invalid_argument, "bench \"", options_.what,
           "\" is not known; it is layer, step, vae, e2e, attention, load or link");
  }

  // One device, for the meshes to be held against.
  struct Alone {
    double seconds = 0;
    std::vector<float> latents;  // where the steps led
    Frames frames;               // what was decoded
  };
  Alone alone() {
    Alone one;
    if (options_.what == "vae") {
      one.seconds = decode_of(&one.frames);
      report("VAE decode, one device", one.seconds, "s",
             decode_flops_ / gemm_ceiling(*backend_, dtype_));
      report_memory();
      return one;
    }
    one.seconds = step_of(config_, offload_, &one.latents);
    report("one step, one device" + in_turns(), one.seconds, "s",
           step_flops_ / gemm_ceiling(*backend_, dtype_));
    report_memory();
    return one;
  }
  // The same on this mesh, and how far what it made is from what one device made.
  void beside(const Alone& one) {
    if (options_.what == "link")
      link();
    else if (options_.what == "vae")
      decode_beside(one);
    else
      step_beside(one);
  }

 private:
  void decode_beside(const Alone& one) {
    Frames frames;
    const double value = decode_of(&frames);
    const double rate = gemm_ceiling(*backend_, dtype_);
    if (!groups_.leads()) return;
    report({"VAE decode, " + mesh_name_, value, "s", decode_flops_ / rate,
            "one device in the same run", one.seconds});
    report_memory();
    report("frames against one device, " + mesh_name_, std::min(psnr(frames, one.frames), 99.0),
           "dB");
  }

  void step_beside(const Alone& one) {
    std::vector<float> latents;
    const double value = step_of(config_, offload_, &latents);
    const double rate = gemm_ceiling(*backend_, dtype_);
    if (!groups_.leads()) return;
    report({"one step, " + mesh_name_ + in_turns(), value, "s", step_flops_ / rate,
            "one device in the same run", one.seconds});
    report_memory();
    report("latents against one device after the steps, " + mesh_name_,
           relative_error(latents, one.latents), "relative");
  }

  // What the links between this rank's groups carry, at the sizes of this request.
  void link() {
    const int64_t hidden = config_.hidden_size, d = config_.head_dim;
    const Sequence sequence = sequence_of_request();
    if (Communicator* cp = groups_.cp.get()) {
      const int64_t rows = sequence.share(cp->rank(), cp->size()).padded_rows, ranks = cp->size();
      const HeadExchange heads(config_.num_attention_heads / groups_.mesh.tp,
                               config_.num_key_value_heads / groups_.mesh.tp, cp->size());
      const auto trade_of = [&](int64_t count) {
        const Shape shape{ranks, rows, count, d};
        return std::pair{backend_->allocate_tensor(shape, dtype_),
                         backend_->allocate_tensor(shape, dtype_)};
      };
      const auto q = trade_of(heads.q_count()), k = trade_of(heads.kv_count()),
                 v = trade_of(heads.kv_count());
      const std::vector<Trade> inputs{{q.first.view, q.second.view},
                                      {k.first.view, k.second.view},
                                      {v.first.view, v.second.view}};
      const std::vector<Trade> output{{q.first.view, q.second.view}};
      for (const auto& [name, trades] :
           {std::pair{"exchange of q, k, v", inputs}, {"exchange of the output", output}}) {
        int64_t bytes = 0;
        for (const Trade& trade : trades) bytes += trade.x.bytes() / ranks * (ranks - 1);
        carry(name, ranks, bytes, [&, t = trades] { cp->exchange(t); });
      }
    }
    if (Communicator* tp = groups_.tp.get()) {
      const int64_t rows = sequence.share(0, groups_.mesh.cp).padded_rows, ranks = tp->size();
      const Tensor x = backend_->allocate_tensor({rows, hidden}, dtype_);
      backend_->fill(x.view, 0);
      // What a ring sends from each rank.
      carry("sum over ranks", ranks, 2 * x.view.bytes() / ranks * (ranks - 1),
            [&] { tp->all_reduce(x.view); });
    }
    if (Communicator* cfg = groups_.cfg.get()) {
      const Tensor x = backend_->allocate_tensor({vae_config_.z_dim, settings_.latent_frames,
                                                  settings_.latent_height, settings_.latent_width},
                                                 DType::f32);
      carry("broadcast of a velocity", cfg->size(), x.view.bytes(),
            [&] { cfg->broadcast(x.view, 0); });
    }
  }

  // One line in GB/s that leave a rank, `bytes` at a time.
  void carry(const std::string& name, int64_t ranks, int64_t bytes,
             const std::function<void()>& collective) {
    constexpr int kTimes = 20;
    collective();
    const double all = seconds([&] {
      for (int i = 0; i < kTimes; ++i) collective();
    });
    report(concat(name, " over ", ranks, " ranks, ", bytes, " bytes from each"),
           double(bytes) * kTimes / all * 1e-9, "GB/s");
  }

  Sequence sequence_of_request() const {
    DryRunBackend dry(backend_->device(), backend_->fuses_weights());
    Transformer model(dry, config_, dtype_);
    Sequence sequence;
    sequence.grid =
        model.token_grid(settings_.latent_frames, settings_.latent_height, settings_.latent_width);
    return sequence;
  }

  Shard shard() const { return {groups_.place().tp, groups_.mesh.tp, groups_.tp.get()}; }

  double seconds(const std::function<void()>& body) {
    backend_->synchronize();
    const auto start = Clock::now();
    body();
    backend_->synchronize();
    return seconds_since(start);
  }

  // Everything a run needs, sized by a dry run of the same request.
  struct Setup {
    std::unique_ptr<Transformer> transformer;
    std::unique_ptr<Vae> vae;
    WeightStore und, gen, vae_weights;
    std::unique_ptr<LayerStream> gen_layers;
    std::optional<AttentionStrategy> strategy;
    std::optional<Arena> arena;
    std::optional<Run> run;
  };

  std::vector<std::vector<int64_t>> prompts() const {
    std::vector<std::vector<int64_t>> lists(settings_.guided() ? 2 : 1);
    for (size_t b = 0; b < lists.size(); ++b) {
      for (int64_t i = 0; i < options_.text_tokens; ++i) {
        lists[b].push_back((i * 7919 + static_cast<int64_t>(b) * 104729) % config_.vocab_size);
      }
    }
    return lists;
  }

  // A few different layers in host memory stand for all: what is copied is as much.
  std::unique_ptr<LayerStream> turning_layers(Transformer& model, Tower tower) {
    constexpr int kDistinct = 4;
    auto layers = LayerStream::random(
        *backend_, static_cast<int>(model.config().num_hidden_layers),
        [&model, tower](int i, WeightVisitor& v) { model.visit_layer(tower, i, v); }, dtype_, 4,
        kDistinct, shard());
    model.set_stream(tower, layers.get());
    return layers;
  }

  // Making what files would hold is not part of a run.
  void with_random_text(Transformer& model, const std::function<void()>& body) {
    std::optional<WeightStore> ends;
    std::unique_ptr<LayerStream> layers;
    making_ += seconds([&] {
      ends = random_weights(
          *backend_, [&](WeightVisitor& v) { model.visit_ends(Tower::und, v); }, dtype_, 1,
          shard());
      layers = turning_layers(model, Tower::und);
    });
    body();
    making_ += seconds([&] {
      model.set_stream(Tower::und, nullptr);
      layers.reset();
      ends.reset();
    });
  }

  Setup make(TransformerConfig config, bool with_vae, Offload offload) {
    Setup out;
    const AttentionInventory inventory = inventory_of(config);
    out.strategy = strategy_from(inventory, options_.attention, nullptr);
    out.transformer = std::make_unique<Transformer>(*backend_, config, dtype_);
    out.vae =
        std::make_unique<Vae>(*backend_, vae_config_, vae_options(backend_->device(), dtype_));
    Transformer& model = *out.transformer;
    // As the engine has it: on a device the text tower is never there as a whole, and after the
    // prompts not at all.
    std::function<void(const std::function<void()>&)> with_text;
    if (backend_->device() == DeviceKind::cpu) {
      out.und = random_weights(
          *backend_, [&](WeightVisitor& v) { model.visit_und(v); }, dtype_, 1, shard());
    } else {
      with_text = [this, &model](const std::function<void()>& body) {
        with_random_text(model, body);
      };
    }
    if (offload == Offload::layer) {
      out.gen = random_weights(
          *backend_, [&](WeightVisitor& v) { model.visit_ends(Tower::gen, v); }, dtype_, 2,
          shard());
      out.gen_layers = turning_layers(model, Tower::gen);
    } else {
      out.gen = random_weights(
          *backend_, [&](WeightVisitor& v) { model.visit_gen(v); }, dtype_, 2, shard());
    }
    if (with_vae) {
      out.vae_weights = random_weights(
          *backend_, [&](WeightVisitor& v) { out.vae->visit(v); }, dtype_, 3);
    }
    const auto peak = arena_bytes(config, *out.strategy, with_vae);
    out.arena.emplace(backend_->allocate(peak));
    out.run.emplace(Networks{*out.transformer, *out.vae, nullptr, with_text}, *out.arena, settings_,
                    *out.strategy, prompts(), VaeTiling{}, &groups_);
    out.run->set_replay(replays_ && groups_.mesh.world() == 1);
    return out;
  }

  size_t arena_bytes(const TransformerConfig& config, const AttentionStrategy& strategy,
                     bool with_vae) {
    DryRunBackend dry(backend_->device(), backend_->fuses_weights());
    Transformer model(dry, config, dtype_);
    Vae autoencoder(dry, vae_config_, vae_options(dry.device(), dtype_));
    const MeshGroups absent = make_absent_groups(groups_.mesh, groups_.rank);
    place_weights(dry, [&](WeightVisitor& v) { model.visit_und(v), model.visit_gen(v); }, dtype_,
                  {absent.place().tp, absent.mesh.tp, absent.tp.get()});
    place_weights(
        dry, [&](WeightVisitor& v) { autoencoder.visit(v); }, dtype_);
    Arena arena = Arena::measuring(dry.device());
    Run run({model, autoencoder, nullptr}, arena, settings_, strategy, prompts(), {}, &absent);
    run.prefill(Run::text_on(dry.device()));
    run.start(nullptr, false, {});
    run.step(0, nullptr);
    run.start(nullptr, false, {});
    dry.reset_stats();
    run.step(0, nullptr);
    step_flops_ = total_flops(dry.stats());
    if (with_vae) run.decode([](View, View) {});
    return arena.peak();
  }

  std::string size() const {
    return concat(options_.config, " ", config_.num_hidden_layers, " layers, ", settings_.width,
                  "x", settings_.height, ", ", settings_.frames, " frames, ",
                  settings_.guided() ? 2 : 1, " x ", options_.text_tokens, " text tokens, ",
                  name_of(dtype_));
  }

  void report(const Measurement& measurement) { report(size(), measurement); }
  void report(const std::string& size, const Measurement& measurement) {
    if (groups_.leads()) line_(json_line(options_, *backend_, size, measurement).dump());
  }
  void report(const std::string& name, double value, const char* unit, double floor = 0) {
    report(Measurement{name, value, unit, floor, "", 0});
  }
  // What this rank has had on its device at once so far.
  void report_memory() {
    const int64_t peak = backend_->memory().peak;
    const std::string where = mesh_name_.empty() ? "" : ", a rank of " + mesh_name_;
    if (peak > 0) report("device memory at once" + where, static_cast<double>(peak) * 1e-9, "GB");
  }

  // Where the time of a stage goes: one line an operation, each against the larger of what its
  // flops and its bytes need. `less` is taken off (another run's share), then all is divided by
  // `parts`.
  void report_operations(const std::string& name, const OpTable& table, const OpTable& less,
                         double parts) {
    const double flops = gemm_ceiling(*backend_, dtype_), bytes = copy_ceiling(*backend_);
    for (const auto& [op, total] : table) {
      OpStats stats = total;
      if (const auto it = less.find(op); it != less.end()) {
        stats.seconds -= it->second.seconds;
        stats.flops -= it->second.flops;
        stats.bytes -= it->second.bytes;
      }
      if (stats.seconds <= 0) continue;
      report(concat(name, ", ", op), stats.seconds / parts * 1e3, "ms",
             std::max(stats.flops / flops, stats.bytes / bytes) / parts * 1e3);
    }
  }

  OpTable profile(const std::function<void()>& body) {
    backend_->reset_stats();
    backend_->set_profiling(true);
    body();
    backend_->set_profiling(false);
    return backend_->stats();
  }

  // Median over steps after one that warms up.
  double step_seconds(Run& run, int steps) {
    std::vector<double> times;
    for (int i = 0; i < steps; ++i) times.push_back(seconds([&] { run.step(i, nullptr); }));
    times.erase(times.begin());
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  // One generation layer: the slope over the number of layers, one branch.
  void layer() {
    settings_.guidance_scale = 1;
    TransformerConfig few = config_, more = config_;
    few.num_hidden_layers = 1;
    more.num_hidden_layers = 4;
    double times[2];
    double flops[2];
    OpTable operations[2];
    for (int i = 0; i < 2; ++i) {
      Setup setup = make(i == 0 ? few : more, false, Offload::none);
      NormalGenerator noise(RngKind::cuda, 1);
      setup.run->prefill();
      setup.run->start(&noise, false, {});
      times[i] = step_seconds(*setup.run, 6);
      flops[i] = step_flops_;
      operations[i] = profile([&] { setup.run->step(6, nullptr); });
    }
    const double rate = gemm_ceiling(*backend_, dtype_);
    config_.num_hidden_layers = 1;
    report("one generation layer", (times[1] - times[0]) / 3 * 1e3, "ms",
           (flops[1] - flops[0]) / 3 / rate * 1e3);
    report_operations("one generation layer", operations[1], operations[0], 3);
  }

  // fn(decode) with random weights and latents in place; `decode` hands frames to a sink on the
  // leader and is collective on a mesh.
  template <typename Fn>
  void with_decoder(const Fn& fn) {
    Vae autoencoder(*backend_, vae_config_, vae_options(backend_->device(), dtype_));
    const WeightStore weights = random_weights(
        *backend_, [&](WeightVisitor& v) { autoencoder.visit(v); }, dtype_, 3);
    DryRunBackend dry(backend_->device(), backend_->fuses_weights());
    Vae model(dry, vae_config_, vae_options(dry.device(), dtype_));
    place_weights(
        dry, [&](WeightVisitor& v) { model.visit(v); }, dtype_);
    const Shape shape{vae_config_.z_dim, settings_.latent_frames, settings_.latent_height,
                      settings_.latent_width};
    Arena measuring = Arena::measuring(dry.device());
    const MeshGroups absent = make_absent_groups(groups_.mesh, groups_.rank);
    model.decode(measuring, dry.allocate_tensor(shape, DType::f32).view, {}, {}, absent.everyone());
    decode_flops_ = total_flops(dry.stats());

    Arena arena(backend_->allocate(measuring.peak()));
    const Tensor latents = normals(shape, 1);
    fn([&](const Vae::FrameSink& sink) {
      autoencoder.decode(arena, latents.view, {}, groups_.leads() ? sink : Vae::FrameSink(),
                         groups_.everyone());
    });
  }

  // Seconds, after one decode that warms up and gives `frames`.
  double decode_of(Frames* frames) {
    double value = 0;
    with_decoder([&](const auto& decode) {
      decode([&](View, View bytes) {
        const size_t begin = frames->rgb.size();
        frames->rgb.resize(begin + static_cast<size_t>(bytes.numel()));
        backend_->download(make_mut_view(frames->rgb.data() + begin, bytes.shape, DType::u8),
                           bytes);
        frames->count += bytes.dim(0);
        frames->height = bytes.dim(1);
        frames->width = bytes.dim(2);
      });
      value = seconds([&] { decode([](View, View) {}); });
    });
    return value;
  }

  void vae() {
    with_decoder([&](const auto& with_sink) {
      const auto decode = [&] { with_sink([](View, View) {}); };
      decode();
      report("VAE decode", seconds(decode), "s", decode_flops_ / gemm_ceiling(*backend_, dtype_));
      report_operations("VAE decode", profile(decode), {}, 1);
      report_memory();
    });
  }

  // A line with the operations of one layer in the middle of an evaluation, on both streams: from
  // the end of one attention call to the end of the next.
  void trace(Run& run, int step) {
    const auto observe = [&](WorkObserver* observer) {
      backend_->set_observer(observer);
      for (Communicator* group : groups_.list()) group->set_observer(observer);
    };
    const std::unique_ptr<Timeline> timeline = make_timeline(*backend_);
    observe(timeline.get());
    run.step(step, nullptr);
    observe(nullptr);
    const std::vector<Timeline::Span> spans = timeline->spans();
    std::vector<double> ends;
    for (const auto& span : spans) {
      if (span.name.starts_with("attention")) ends.push_back(span.end_ms);
    }
    const auto layers = static_cast<size_t>(config_.num_hidden_layers);
    require(layers > 1 && ends.size() >= layers, "bench step: a timeline needs 2 layers or more");
    const double from = ends[layers / 2 - 1], until = ends[layers / 2];
    Json kept = Json::array();
    for (const auto& span : spans) {
      if (span.end_ms <= from || span.begin_ms >= until) continue;
      kept.push(Json::object()
                    .set("lane", span.lane)
                    .set("name", span.name)
                    .set("begin", span.begin_ms - from)
                    .set("end", span.end_ms - from));
    }
    if (!groups_.leads()) return;
    const Measurement whole{"timeline of one layer, " + mesh_name_, until - from, "ms", 0, "", 0};
    line_(json_line(options_, *backend_, size(), whole).set("spans", std::move(kept)).dump());
  }

  void end_to_end() {
    Setup setup = make(config_, true, offload_);
    NormalGenerator noise(RngKind::cuda, 1);
    Run& run = *setup.run;
    // Warm-up at the real shapes: one step and the decoder, then everything again from the prompt
    // on.
    const Run::Text text = Run::text_on(backend_->device());
    run.prefill(text);
    run.start(&noise, false, {});
    run.step(0, nullptr);
    run.decode([](View, View) {});
    double first = 0, steps = 0, decode = 0;
    making_ = 0;
    double total = seconds([&] {
      run.prefill(text);
      run.start(&noise, false, {});
      first = seconds([&] { run.step(0, nullptr); });
      steps = seconds([&] {
        for (int i = 1; i < settings_.schedule.num_steps(); ++i) run.step(i, nullptr);
      });
      decode = seconds([&] { run.decode([](View, View) {}); });
    });
    // The prompts' text tower is brought with the first step.
    if (text == Run::Text::with_first_step) first -= making_;
    total -= making_;
    report_memory();  // of the run: measuring the ceiling takes memory, too
    const double rate = gemm_ceiling(*backend_, dtype_);
    const int others = settings_.schedule.num_steps() - 1;
    report(text == Run::Text::with_first_step ? "prompts and first denoising step"
                                              : "first denoising step",
           first, "s", step_flops_ / rate);
    if (others > 0)
      report(concat(others, " more denoising steps"), steps, "s", step_flops_ * others / rate);
    report("VAE decode in the run", decode, "s");
    report("prompt to frames", total, "s");
  }

  std::string in_turns() const { return offload_ == Offload::layer ? ", layers in turns" : ""; }

  // Seconds of one step with all layers, in turns or in place: the median. `latents`: where the
  // steps led.
  double step_of(const TransformerConfig& config, Offload offload,
                 std::vector<float>* latents = nullptr) {
    Setup setup = make(config, false, offload);
    NormalGenerator noise(RngKind::cuda, 1);
    Run& run = *setup.run;
    run.prefill();
    run.start(&noise, false, {});
    // The first two steps of a recording are slower; a strategy may change its layout later. The
    // step after is the timeline's.
    const bool traced = options_.timeline && groups_.mesh.world() > 1;
    const int steps = std::min(settings_.schedule.num_steps() - (traced ? 1 : 0), 6);
    require(steps > 3, "bench step: needs at least ", traced ? 5 : 4, " steps");
    const double value = step_seconds(run, steps);
    if (latents != nullptr) *latents = run.latents();
    if (traced) trace(run, steps);
    return value;
  }

  void step() {
    const double value = step_of(config_, offload_);
    const double floor = step_flops_ / gemm_ceiling(*backend_, dtype_);
    report("one step" + in_turns(), value, "s", floor);
    report_memory();
    const int64_t layers = config_.num_hidden_layers;
    if (offload_ == Offload::none || layers < 4) return;
    // The same arithmetic without copies: the slope over resident layers.
    TransformerConfig few = config_, more = config_;
    few.num_hidden_layers = 2;
    more.num_hidden_layers = 4;
    const double two = step_of(few, Offload::none), four = step_of(more, Offload::none);
    const double resident = two + (four - two) / 2 * static_cast<double>(layers - 2);
    report({"one step, layers in turns, against the same layers in place", value, "s", floor,
            "4 resident layers less 2, times the layers", resident});
  }

  // Every implementation of one call, dense and block-sparse.
  void attention() {
    const auto or_else = [](int64_t given, int64_t otherwise) {
      return given > 0 ? given : otherwise;
    };
    const int64_t sq = or_else(options_.query_tokens, sequence_of_request().size());
    const int64_t skv = or_else(options_.key_tokens, sq + options_.text_tokens);
    const int64_t heads = or_else(options_.heads, config_.num_attention_heads);
    const int64_t kv_heads = or_else(options_.kv_heads, config_.num_key_value_heads);
    const int64_t d = or_else(options_.head_dim, config_.head_dim);
    require(options_.sparsity > 0 && options_.sparsity < 1, "bench attention: sparsity ",
            options_.sparsity, " is not between 0 and 1");
    const std::string shape = concat(sq, " x ", skv, " tokens, ", heads, "/", kv_heads,
                                     " heads of ", d, ", ", name_of(dtype_));
    const auto random = [&](Shape of, int64_t seed) {
      const Tensor exact = normals(of, seed);
      Tensor out = backend_->allocate_tensor(of, dtype_);
      backend_->copy(out.view, exact.view);
      return out;
    };
    const Tensor q = random({sq, heads, d}, 1), k = random({skv, kv_heads, d}, 2),
                 v = random({skv, kv_heads, d}, 3);
    const Tensor out = backend_->allocate_tensor(q.view.shape, dtype_);
    AttentionPlan plan;
    plan.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));

    BlockSelection rule;
    rule.target_sparsity = options_.sparsity;
    rule.protected_keys = skv - std::min(sq, skv);
    rule.scale = plan.scale;
    const BlockGrid grid = rule.grid(sq, skv);
    const Shape lists{heads, grid.rows, grid.blocks};
    const Tensor indices = backend_->allocate_tensor(lists, DType::i32);
    const Tensor counts = backend_->allocate_tensor({lists[0], lists[1]}, DType::i32);
    const auto select = [&] {
      backend_->select_blocks(indices.view, counts.view, q.view, k.view, rule);
    };
    select();
    const BlockMask mask{rule.block_q, rule.block_k, indices.view, counts.view};
    const double kept = static_cast<double>(grid.head_end + rule.budget(grid.candidates())) /
                        static_cast<double>(grid.blocks);

    const double flops =
        4.0 * static_cast<double>(sq) * static_cast<double>(skv) * static_cast<double>(heads * d);
    const double rate = gemm_ceiling(*backend_, dtype_);
    const auto each = [&](const char* kind, const BlockMask* with, double floor) {
      plan.mask = with;
      std::map<std::string, double> times;
      for (const char* name : {"cudnn", "gemm", "reference", "native"}) {
        // The naive kernels of long sequences take minutes.
        if (name == std::string("reference") && flops > kLongestReference) continue;
        plan.implementation = name;
        const auto call = [&] { backend_->attention(out.view, q.view, k.view, v.view, plan); };
        try {
          times[name] = best_seconds(call);
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::unsupported && error.kind() != ErrorKind::invalid_argument)
            throw;
          continue;  // it does not do this
        }
        Measurement m{concat(kind, ", ", name), times[name] * 1e3, "ms", floor * 1e3, "", 0};
        if (name == std::string("native")) {
          for (const char* other : {"cudnn", "gemm", "reference"}) {
            if (!times.contains(other) || !m.peer.empty()) continue;
            m.peer = other;
            m.peer_value = times[other] * 1e3;
          }
        }
        report(shape, m);
      }
    };
    each("dense attention", nullptr, flops / rate);
    report(shape, {"block selection", best_seconds(select) * 1e3, "ms", 0, "", 0});
    each("block-sparse attention", &mask, flops * kept / rate);
  }

  Tensor normals(Shape shape, int64_t seed) {
    std::vector<float> values(static_cast<size_t>(shape.numel()));
    NormalGenerator(RngKind::cuda, seed).fill(values);
    Tensor tensor = backend_->allocate_tensor(shape, DType::f32);
    backend_->upload(tensor.view, make_view(values.data(), shape, DType::f32));
    return tensor;
  }

  // The fastest of several calls after one that warms up.
  double best_seconds(const std::function<void()>& call) {
    double best = seconds(call);
    for (int i = 0; i < 7; ++i) best = std::min(best, seconds(call));
    return best;
  }

  static constexpr double kLongestReference = 2e11;  // flops

  BenchOptions options_;
  const Lines& line_;
  ModelPreset preset_;
  std::unique_ptr<Backend> backend_;
  MeshGroups groups_;
  std::string mesh_name_;
  DType dtype_;
  TransformerConfig config_;
  VaeConfig vae_config_;
  Offload offload_;
  bool replays_;
  Settings settings_;
  double step_flops_ = 0, decode_flops_ = 0;
  double making_ = 0;  // seconds spent on random weights within a run
};

// From the files of a checkpoint to the device, both towers.
void bench_load(const BenchOptions& options, const EngineOptions& engine, const Lines& line) {
  require(!options.model.empty(),
          "bench load: name a model folder with --model (orrery make-checkpoint makes one)");
  const Checkpoint checkpoint = read_checkpoint(options.model);
  const std::unique_ptr<Backend> backend = make_backend(engine);
  const DType dtype = activation_type(engine, *backend);
  Transformer transformer(*backend, checkpoint.transformer, dtype);
  Vae vae(*backend, checkpoint.vae, vae_options(backend->device(), dtype));
  ModelWeights::Options use;
  use.offload = offload_of(engine.offload, backend->device());
  use.host_memory = available_host_memory();
  if (backend->device() != DeviceKind::cpu) use.transformer.dtype = use.vae.dtype = dtype;
  use.transformer.ignored = Transformer::is_unused;
  ModelWeights weights(*backend, transformer, vae, options.model, use);
  const std::string size =
      concat(options.model.filename().string(), ", ", checkpoint.transformer.num_hidden_layers,
             " layers, ", weights.sizes().all() / 1000000, " MB, offload ", engine.offload, ", ",
             name_of(dtype));
  const auto report = [&](const char* name, double value, const char* unit) {
    line(json_line(options, *backend, size, {name, value, unit, 0, "", 0}).dump());
  };
  const ModelWeights::LoadTime& time = weights.load_time();
  report("every header and value checked", time.check_seconds, "s");
  report("check", static_cast<double>(weights.sizes().all()) / time.check_seconds * 1e-9, "GB/s");
  if (time.bytes == 0) return;  // nothing is brought anywhere
  report("generation tower and VAE to where they stay", time.seconds, "s");
  report("upload", static_cast<double>(time.bytes) / time.seconds * 1e-9, "GB/s");

  const ModelWeights::Use text(weights, Part::text);
  const auto start = Clock::now();
  for (int i = 0; i < weights.sizes().num_layers; ++i) transformer.bring_layer(Tower::und, i);
  backend->synchronize();
  const double seconds = seconds_since(start);
  report("the text tower's layers in turn, from the mapped files", seconds, "s");
  report("upload of the text tower",
         static_cast<double>(weights.sizes().text - weights.sizes().text_ends) / seconds * 1e-9,
         "GB/s");
}

}  // namespace

void run_bench(const BenchOptions& options, const EngineOptions& engine, const Lines& line) {
  const std::vector<MeshCase> meshes = meshes_of(options, engine);
  if (options.what == "link") {
    require(!meshes.empty(), "bench link: needs ranks; give --meshes, or a degree above 1");
  } else if (meshes.empty()) {
    return options.what == "load" ? bench_load(options, engine, line)
                                  : Bench(options, engine, line).run();
  }
  require(options.what == "step" || options.what == "link" || options.what == "vae", "bench ",
          options.what, " runs on one device; step, vae and link take meshes");
  std::optional<Bench::Alone> one;  // of rank 0
  for (const MeshCase& mesh : meshes) {
    EngineOptions of_mesh = engine;
    of_mesh.tp_degree = mesh.mesh.tp;
    of_mesh.cp_degree = mesh.mesh.cp;
    of_mesh.cfg_degree = mesh.mesh.cfg;
    const std::shared_ptr<World> world = make_world(of_mesh);
    const std::vector<int> local = world->local();
    std::vector<std::unique_ptr<Bench>> ranks(local.size());
    const auto place = [&](int rank) { return static_cast<size_t>(rank - local.front()); };
    world->run([&](int rank) {
      const EngineOptions mine = options_of_rank(of_mesh, *world, rank);
      if (rank == 0 && !one && options.what != "link") one = Bench(options, mine, line).alone();
      auto bench = std::make_unique<Bench>(options, mine, line);
      bench->join(*world, mesh, rank);
      ranks[place(rank)] = std::move(bench);
    });
    world->run(
        [&](int rank) { ranks[place(rank)]->beside(rank == 0 && one ? *one : Bench::Alone{}); },
        [&] {
          for (const auto& bench : ranks) bench->leave();
        });
    // Each on its own thread: ranks on devices part in good order only together.
    world->run([&](int rank) { ranks[place(rank)].reset(); });
  }
}

}  // namespace orrery
