#include "engine/report.h"

#include <sys/resource.h>

#include <algorithm>
#include <map>

namespace orrery {

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

Json settings_json(const Request& request, const Settings& s) {
  Json out = Json::object();
  out.set("mode", std::string(name_of(s.mode)))
      .set("prompt", request.prompt)
      .set("negative_prompt", request.negative_prompt)
      .set("height", s.height)
      .set("width", s.width)
      .set("num_frames", s.frames)
      .set("fps", s.fps)
      .set("num_inference_steps", s.schedule.num_steps())
      .set("guidance_scale", s.guidance_scale)
      .set("seed", s.seed)
      .set("rng", request.rng)
      .set("noise_dtype", request.noise_dtype);
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
  sampler.set("sigmas", std::move(sigmas)).set("timesteps", std::move(timesteps));
  out.set("scheduler", std::move(sampler));
  if (s.action) {
    out.set("action", Json::object()
                          .set("mode", request.action->mode)
                          .set("chunk_size", s.action->chunk)
                          .set("domain_name", request.action->domain_name)
                          .set("view_point", request.action->view_point)
                          .set("resolution_tier", request.action->resolution_tier));
  }
  if (s.sound_frames > 0) out.set("sound_latent_frames", s.sound_frames);
  Json notices = Json::array();
  for (const std::string& notice : s.notices) notices.push(notice);
  return out.set("notices", std::move(notices));
}

Json metadata_json(const Request& request, const Settings& settings, const RunRecord& record) {
  Json out = settings_json(request, settings);
  if (!record.lora.empty()) {
    Json adapters = Json::array();
    for (const LoraFile& lora : record.lora) {
      adapters.push(Json::object().set("file", lora.file.filename().string()).set("scale", lora.scale));
    }
    out.set("lora", std::move(adapters));
  }
  return out.set("guardrail", record.guardrail);
}

namespace {

Json operations_json(const OpTable& table) {
  Json out = Json::object();
  for (const auto& [name, op] : table) {
    Json entry = Json::object();
    entry.set("calls", op.calls).set("flops", op.flops).set("bytes", op.bytes).set("seconds", op.seconds);
    if (op.seconds > 0) {
      entry.set("gflops_per_second", op.flops / op.seconds * 1e-9);
      entry.set("gbytes_per_second", op.bytes / op.seconds * 1e-9);
    }
    out.set(name, std::move(entry));
  }
  return out;
}

Json dispatch_json(const std::vector<DispatchRecord>& records) {
  Json out = Json::array();
  for (const DispatchRecord& r : records) {
    Json entry = Json::object();
    entry.set("step", r.step)
        .set("branch", r.branch)
        .set("layer", r.layer)
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

Json report_json(const Request& request, const Settings& settings, const RunRecord& record) {
  Json out = Json::object();
  out.set("orrery", version())
      .set("device", record.device)
      .set("dtype", record.dtype)
      .set("settings", metadata_json(request, settings, record))
      .set("tokens", Json::object()
                         .set("text", record.text_tokens)
                         .set("negative", record.negative_tokens)
                         .set("generation", record.generation_tokens))
      .set("guardrail", record.guardrail);
  Json stages = Json::array();
  double total = record.open_seconds;
  for (const StageTime& stage : record.stages) {
    Json entry = Json::object();
    entry.set("name", stage.name).set("seconds", stage.seconds).set("flops", stage.flops);
    if (stage.seconds > 0) entry.set("gflops_per_second", stage.flops / stage.seconds * 1e-9);
    stages.push(std::move(entry));
    total += stage.seconds;
  }
  Json steps = Json::array();
  for (double seconds : record.step_seconds) steps.push(seconds);
  out.set("open_seconds", record.open_seconds)
      .set("stages", std::move(stages))
      .set("step_seconds", std::move(steps))
      .set("total_seconds", total)
      .set("memory", Json::object()
                         .set("weight_bytes", record.weight_bytes)
                         .set("arena_bytes", record.arena_bytes)
                         .set("peak_resident_bytes", peak_resident_bytes()));
  out.set("attention", Json::object()
                           .set("source", record.attention_source)
                           .set("dispatch", dispatch_json(record.dispatch)));
  if (!record.operations.empty()) out.set("operations", operations_json(record.operations));
  return out;
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
      .set("stages", std::move(stages))
      .set("ceiling", plan.ceiling)
      .dump(1);
}

}  // namespace orrery
