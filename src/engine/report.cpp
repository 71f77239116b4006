#include "engine/report.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <map>
#include <sstream>

#include "engine/request_fields.h"
#include "engine/transfer.h"
#include "orrery/version.h"

namespace orrery {

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

double seconds_since_process_start() {
  std::ifstream file("/proc/self/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(stat.substr(name_end + 1));
  constexpr int kFieldsBefore = 19;  // state to itrealvalue
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; ++i) fields >> skipped;
  double ticks = 0;
  if (!(fields >> ticks)) return 0;
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec) -
         ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

namespace {

// What was resolved of fields that were not given.
void set_resolved(Json& out, const Settings& s) {
  const auto set = [&](const char* name, Json value) {
    if (!out.has(name)) out.set(name, std::move(value));
  };
  set("height", s.height);
  set("width", s.width);
  set("num_frames", s.frames);
  set("fps", s.fps);
  set("num_inference_steps", s.schedule.num_steps());
  set("guidance_scale", s.guidance_scale);
  if (s.transfer) {
    set("control_guidance", s.transfer->control_guidance);
    set("num_video_frames_per_chunk", s.transfer->chunk);
  }
}

Json sampler_json(const Settings& s) {
  Json sampler = Json::object();
  const bool unipc = s.scheduler.kind == SchedulerConfig::Kind::unipc;
  sampler.set("class", unipc ? "UniPCMultistepScheduler" : "FlowMatchEulerDiscreteScheduler")
      .set("solver_order", s.scheduler.solver_order)
      .set("use_karras_sigmas", s.scheduler.use_karras_sigmas)
      .set("flow_shift", s.scheduler.flow_shift)
      .set("native_schedule", s.scheduler.native_schedule)
      .set("reason", s.scheduler_note);
  Json sigmas = Json::array(), timesteps = Json::array();
  for (float sigma : s.schedule.sigmas) sigmas.push(static_cast<double>(sigma));
  for (float t : s.schedule.timesteps) timesteps.push(static_cast<double>(t));
  return sampler.set("sigmas", std::move(sigmas)).set("timesteps", std::move(timesteps));
}

// What follows from the fields of structural control.
Json transfer_json(const Request& request, const TransferSettings& t) {
  Json controls = Json::array();
  for (size_t i = 0; i < t.hints.size(); ++i) {
    Json control = Json::object().set("hint", t.hints[i]);
    if (!t.weights.empty()) control.set("weight", static_cast<double>(t.weights[i]));
    const Control& given = request.transfer->controls[t.order[i]];
    if (given.video.count == 0) control.set("computed", std::string(name_of(preset_of(given))));
    controls.push(std::move(control));
  }
  return Json::object()
      .set("controls", std::move(controls))
      .set("chunk", t.chunk)
      .set("chunks", t.chunks)
      .set("stride", t.stride);
}

Json list_of(const std::vector<std::string>& words) {
  Json list = Json::array();
  for (const std::string& word : words) list.push(word);
  return list;
}

}  // namespace

Json engine_json(const std::filesystem::path& model, const EngineOptions& options) {
  // Options of where and how fast, and a command that would be shown to who gets the file.
  const auto left_out = {"threads", "warm_up", "guardrail", "guardrail_timeout", "profile"};
  const Json untouched = fields_json(EngineOptions{});
  Json out = Json::object().set("model", model.string());
  const Json all = fields_json(options);
  for (const auto& [name, value] : all.members()) {
    const Json* usual = untouched.find(name);
    if (std::find(left_out.begin(), left_out.end(), name) != left_out.end()) continue;
    if (usual == nullptr || usual->dump() != value.dump()) out.set(name, value);
  }
  // A file may be another one tomorrow.
  const std::string& attention = options.attention;
  if (!attention.empty() && attention != "dense" && attention.find('{') == std::string::npos)
    out.set("attention", Json::load(attention).dump());
  return out;
}

Json settings_json(const Request& request, const Settings& s) {
  Json out = fields_json(request);
  set_resolved(out, s);
  out.set("given", list_of(given_fields(request)))
      .set("inputs", inputs_json(request))
      .set("mode", std::string(name_of(s.mode)))
      .set("frames", s.frames)
      .set("scheduler", sampler_json(s));
  if (s.transfer) out.set("transfer", transfer_json(request, *s.transfer));
  if (s.sound_frames > 0) out.set("sound_latent_frames", s.sound_frames);
  return out.set("notices", list_of(s.notices));
}

Json metadata_json(const Request& request, const Settings& settings, const RunRecord& record) {
  Json out = settings_json(request, settings);
  if (request.noise_dtype == NoiseType::automatic)
    out.set("noise_dtype", record.dtype == name_of(DType::bf16) ? "bf16" : "fp32");
  if (!record.lora.empty()) {
    Json adapters = Json::array();
    for (const LoraFile& lora : record.lora) {
      adapters.push(
          Json::object().set("file", lora.file.filename().string()).set("scale", lora.scale));
    }
    out.set("lora", std::move(adapters));
  }
  return out.set("engine", record.engine).set("guardrail", record.guardrail);
}

namespace {

Json operations_json(const OpTable& table) {
  Json out = Json::object();
  for (const auto& [name, op] : table) {
    Json entry = Json::object();
    entry.set("calls", op.calls).set("flops", op.flops).set("bytes", op.bytes);
    if (op.seconds > 0) {
      entry.set("seconds", op.seconds)
          .set("gflops_per_second", op.flops / op.seconds * 1e-9)
          .set("gbytes_per_second", op.bytes / op.seconds * 1e-9);
    }
    Json implementations = Json::object();
    for (const auto& [who, share] : op.implementations) {
      Json part = Json::object().set("calls", share.calls);
      if (share.seconds > 0) part.set("seconds", share.seconds);
      implementations.set(who, std::move(part));
    }
    if (!op.implementations.empty()) entry.set("implementations", std::move(implementations));
    out.set(name, std::move(entry));
  }
  return out;
}

// Generation calls name their evaluation, text calls the field of the request that they read.
Json dispatch_json(const RunRecord& run) {
  Json out = Json::array();
  for (const DispatchRecord& r : run.dispatch) {
    Json entry = Json::object();
    entry.set("step", r.step < 0 ? Json() : Json(r.step));
    if (is_invariant(r.role))
      entry.set("text", r.branch == 0 ? "prompt" : "negative_prompt");
    else
      entry.set("evaluation", run.evaluations.at(static_cast<size_t>(r.evaluation)));
    entry.set("layer", r.layer)
        .set("role", std::string(name_of(r.role)))
        .set("method", r.method)
        .set("implementation", r.implementation)
        .set("kept_blocks", r.kept_blocks)
        .set("all_blocks", r.all_blocks);
    if (r.seconds > 0) entry.set("seconds", r.seconds);
    out.push(std::move(entry));
  }
  return out;
}

}  // namespace

Json warm_up_json(const WarmUp& warm_up, const AttentionStrategy& strategy) {
  Json layouts = Json::array();
  for (const WarmUp::Entry& entry : warm_up.entries()) {
    Json layout = Json::object();
    layout.set("layout", strategy.layout_name(entry.target.layout))
        .set("role", std::string(name_of(entry.target.role)))
        .set("exercised", entry.exercised);
    if (!entry.failure.empty()) layout.set("failure", entry.failure);
    layouts.push(std::move(layout));
  }
  return Json::object().set("summary", warm_up.summary()).set("layouts", std::move(layouts));
}

std::vector<AttentionUse> attention_use(const std::vector<DispatchRecord>& records) {
  std::vector<AttentionUse> uses;
  for (const DispatchRecord& r : records) {
    if (is_invariant(r.role)) continue;
    auto use = std::find_if(uses.begin(), uses.end(), [&](const AttentionUse& u) {
      return u.preset == r.method && u.implementation == r.implementation;
    });
    if (use == uses.end()) {
      uses.push_back({r.method, r.implementation, 0, 0, 0, 0, 0});
      use = uses.end() - 1;
    }
    ++use->calls;
    if (r.all_blocks == 0) ++use->dense_calls;
    use->kept_blocks += r.kept_blocks;
    use->all_blocks += r.all_blocks;
    use->seconds += r.seconds;
  }
  return uses;
}

StageTime Times::stage(std::string_view name) const {
  StageTime sum;
  sum.name = name;
  for (const StageTime& one : stages) {
    if (one.name != name) continue;
    sum.seconds += one.seconds;
    sum.processor_seconds += one.processor_seconds;
    sum.flops += one.flops;
  }
  return sum;
}

double Times::total_seconds() const {
  double total = open_seconds;
  for (const StageTime& stage : stages) total += stage.seconds;
  return total;
}

double kept_share(const std::vector<AttentionUse>& uses) {
  double calls = 0, kept = 0;
  for (const AttentionUse& use : uses) {
    const auto sparse = static_cast<double>(use.calls - use.dense_calls);
    calls += static_cast<double>(use.calls);
    kept += static_cast<double>(use.dense_calls);
    if (use.all_blocks > 0) {
      kept += sparse * static_cast<double>(use.kept_blocks) / static_cast<double>(use.all_blocks);
    }
  }
  return calls > 0 ? kept / calls : 1;
}

std::string to_text(const AttentionUse& use) {
  std::ostringstream out;
  out << std::fixed << use.preset << " (" << use.implementation << "): " << use.calls << " calls, ";
  if (use.all_blocks == 0) {
    out << "every block kept";
  } else {
    out << use.kept_blocks << " of " << use.all_blocks << " blocks kept (" << std::setprecision(1)
        << 100.0 * static_cast<double>(use.kept_blocks) / static_cast<double>(use.all_blocks)
        << "%)";
  }
  if (use.seconds > 0) out << std::setprecision(2) << ", " << use.seconds << " s";
  return out.str();
}

namespace {

Json load_json(const ModelWeights::LoadTime& load) {
  Json out = Json::object();
  out.set("check_seconds", load.check_seconds)
      .set("seconds", load.seconds)
      .set("bytes", load.bytes);
  if (load.bytes > 0)
    out.set("gbytes_per_second", static_cast<double>(load.bytes) / load.seconds * 1e-9);
  return out;
}

Json memory_json(const RunRecord& record) {
  const MemoryUse& memory = record.memory;
  Json out = Json::object();
  out.set("offload", record.offload)
      .set("weight_bytes", memory.weights)
      .set("resident_weight_bytes", memory.resident_weights)
      .set("text_stays", memory.text_stays)
      .set("pinned_bytes", memory.pinned)
      .set("arena_bytes", memory.arena)
      .set("peak_resident_bytes", memory.peak_resident);
  if (memory.device_total > 0) {
    out.set("device_peak_bytes", memory.device_peak)
        .set("device_free_bytes", memory.device_free)
        .set("device_total_bytes", memory.device_total);
  }
  return out;
}

}  // namespace

Json report_json(const Request& request, const Settings& settings, const RunRecord& record) {
  Json out = Json::object();
  out.set("orrery", version())
      .set("ranks", Json::object()
                        .set("tp", record.mesh.tp)
                        .set("cp", record.mesh.cp)
                        .set("cfg", record.mesh.cfg))
      .set("device", record.device)
      .set("dtype", record.dtype)
      .set("settings", metadata_json(request, settings, record))
      .set("tokens", Json::object()
                         .set("text", record.text_tokens)
                         .set("negative", record.negative_tokens)
                         .set("generation", record.generation_tokens))
      .set("guardrail", record.guardrail);
  const Times& times = record.times;
  Json stages = Json::array();
  for (const StageTime& stage : times.stages) {
    Json entry = Json::object();
    entry.set("name", stage.name)
        .set("chunk", stage.chunk)
        .set("seconds", stage.seconds)
        .set("processor_seconds", stage.processor_seconds)
        .set("flops", stage.flops);
    if (stage.seconds > 0) entry.set("gflops_per_second", stage.flops / stage.seconds * 1e-9);
    stages.push(std::move(entry));
  }
  Json steps = Json::array();
  for (double seconds : times.step_seconds) steps.push(seconds);
  out.set("open_seconds", times.open_seconds)
      .set("stages", std::move(stages))
      .set("step_seconds", std::move(steps))
      .set("total_seconds", times.total_seconds())
      .set("first_step_after_start_seconds", times.first_step_after_start_seconds)
      .set("load", load_json(record.load))
      .set("memory", memory_json(record));
  out.set("attention", Json::object()
                           .set("source", record.attention_source)
                           .set("kept_share", kept_share(attention_use(record.dispatch)))
                           .set("warm_up", record.warm_up)
                           .set("dispatch", dispatch_json(record)));
  return out.set("operations", operations_json(record.operations));
}

std::string to_json(const Plan& plan) {
  Json stages = Json::array();
  for (const Plan::Stage& stage : plan.stages) {
    stages.push(Json::object()
                    .set("name", stage.name)
                    .set("calls", stage.calls)
                    .set("flops", stage.flops)
                    .set("bytes", stage.bytes)
                    .set("floor_seconds", stage.floor_seconds));
  }
  return Json::object()
      .set("summary", plan.summary)
      .set("generation_tokens", plan.tokens)
      .set("text_tokens", plan.text_tokens)
      .set("weight_bytes", plan.weight_bytes)
      .set("activation_bytes", plan.activation_bytes)
      .set("state_bytes", plan.state_bytes)
      .set("resident_weight_bytes", plan.resident_weight_bytes)
      .set("pinned_bytes", plan.pinned_bytes)
      .set("peak_bytes", plan.peak_bytes)
      .set("stages", std::move(stages))
      .set("ceiling", plan.ceiling)
      .dump(1);
}

}  // namespace orrery
