// Closed sets of values that requests and options take. The table beside each set is the only place
// where its names are written: parsing, printing, messages, help and documentation read it.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "orrery/export.h"

namespace ORRERY_API orrery {

// A value may have several names; the first of them is printed, all are read.
template <typename E>
struct Name {
  E value;
  std::string_view name;
};

// What the networks compute in; automatic: fp32 on the CPU, bf16 on CUDA.
enum class ComputeType : uint8_t { automatic, fp32, bf16 };
constexpr auto names(ComputeType) {
  using enum ComputeType;
  return std::to_array<Name<ComputeType>>(
      {{automatic, "auto"}, {fp32, "fp32"}, {bf16, "bf16"}, {fp32, "float32"}, {bf16, "bfloat16"}});
}

// Weights that stay on a device, beside the text tower (Resident) and the sound decoder.
enum class Offload : uint8_t {
  none,   // generation tower and VAE stay
  model,  // whichever of the two is in use
  layer,  // VAE stays; the generation tower's layers take turns
};
constexpr auto names(Offload) {
  using enum Offload;
  return std::to_array<Name<Offload>>({{none, "none"}, {model, "model"}, {layer, "layer"}});
}

// Whether the text tower stays on a device between requests. Else each of its layers is uploaded in
// its turn while prompts are read, again for every request.
enum class Resident : uint8_t {
  automatic,  // when it fits beside what the request needs; never with an offload
  on,
  off,
};
constexpr auto names(Resident) {
  using enum Resident;
  return std::to_array<Name<Resident>>({{automatic, "auto"}, {on, "on"}, {off, "off"}});
}

// Running every attention layout once before the first step; automatic: on CUDA, when there is more
// than one.
enum class WarmUpMode : uint8_t { automatic, on, off };
constexpr auto names(WarmUpMode) {
  using enum WarmUpMode;
  return std::to_array<Name<WarmUpMode>>({{automatic, "auto"}, {on, "on"}, {off, "off"}});
}

// Whose generator's numbers a seed means: PyTorch's on the CPU or on CUDA.
enum class RngKind : uint8_t { cpu, cuda };
constexpr auto names(RngKind) {
  using enum RngKind;
  return std::to_array<Name<RngKind>>({{cpu, "cpu"}, {cuda, "cuda"}});
}

// Which values of that generator a draw gives.
enum class NoiseType : uint8_t {
  automatic,  // of the type the networks compute in, as the public pipeline draws
  fp32,
  // A bf16 tensor of PyTorch 2.15: the fp32 values, rounded. On the CPU the last 16 values of a
  // count that is no multiple of 16 come from the words behind the last whole block of 16.
  bf16,
  bf16_torch_2_11,  // a bf16 tensor of PyTorch 2.11: on the CPU a stream of its own
};
constexpr auto names(NoiseType) {
  using enum NoiseType;
  return std::to_array<Name<NoiseType>>({{automatic, "auto"},
                                         {fp32, "fp32"},
                                         {bf16, "bf16"},
                                         {bf16_torch_2_11, "bf16-torch-2.11"},
                                         {fp32, "float32"},
                                         {bf16, "bfloat16"}});
}

// Whose settings the sampler takes: the recommended ones where the checkpoint's own blur video, or
// the checkpoint's own whatever they are.
enum class SamplerSource : uint8_t { automatic, checkpoint };
constexpr auto names(SamplerSource) {
  using enum SamplerSource;
  return std::to_array<Name<SamplerSource>>({{automatic, "auto"}, {checkpoint, "checkpoint"}});
}

// How videos and controls of another shape come to the frame's: stretch (diffusers) or cover
// (scaled to cover it and cropped, as an image is; NVIDIA's framework and vLLM-Omni).
enum class VideoFit : uint8_t { stretch, cover };
constexpr auto names(VideoFit) {
  using enum VideoFit;
  return std::to_array<Name<VideoFit>>({{stretch, "stretch"}, {cover, "cover"}});
}

// Which end of a conditioning video is kept.
enum class VideoKeep : uint8_t { first, last };
constexpr auto names(VideoKeep) {
  using enum VideoKeep;
  return std::to_array<Name<VideoKeep>>({{first, "first"}, {last, "last"}});
}

enum class ActionMode : uint8_t { policy, forward_dynamics, inverse_dynamics };
constexpr auto names(ActionMode) {
  using enum ActionMode;
  return std::to_array<Name<ActionMode>>({{policy, "policy"},
                                          {forward_dynamics, "forward_dynamics"},
                                          {inverse_dynamics, "inverse_dynamics"}});
}

enum class ViewPoint : uint8_t { ego_view, third_person_view, wrist_view, concat_view };
constexpr auto names(ViewPoint) {
  using enum ViewPoint;
  return std::to_array<Name<ViewPoint>>({{ego_view, "ego_view"},
                                         {third_person_view, "third_person_view"},
                                         {wrist_view, "wrist_view"},
                                         {concat_view, "concat_view"}});
}

// What a control video shows, in the order in which controls stand in the sequence.
enum class ControlHint : uint8_t { edge, blur, depth, seg, wsm };
constexpr auto names(ControlHint) {
  using enum ControlHint;
  return std::to_array<Name<ControlHint>>(
      {{edge, "edge"}, {blur, "blur"}, {depth, "depth"}, {seg, "seg"}, {wsm, "wsm"}});
}

// How strong a computed control is: thresholds of edges, strength of blur.
enum class ControlPreset : uint8_t { none, very_low, low, medium, high, very_high };
constexpr auto names(ControlPreset) {
  using enum ControlPreset;
  return std::to_array<Name<ControlPreset>>({{none, "none"},
                                             {very_low, "very_low"},
                                             {low, "low"},
                                             {medium, "medium"},
                                             {high, "high"},
                                             {very_high, "very_high"}});
}

// Several controls: each attended on its own and weighted, or all in one sequence.
enum class ControlAttention : uint8_t { weighted, joint };
constexpr auto names(ControlAttention) {
  using enum ControlAttention;
  return std::to_array<Name<ControlAttention>>({{weighted, "weighted"}, {joint, "joint"}});
}

// Noise of later chunks: the generator goes on, as in diffusers, or chunk c starts from seed + c,
// as in NVIDIA's framework.
enum class ChunkNoise : uint8_t { continued, reseed };
constexpr auto names(ChunkNoise) {
  using enum ChunkNoise;
  return std::to_array<Name<ChunkNoise>>({{continued, "continue"}, {reseed, "reseed"}});
}

template <typename E>
concept Choice = std::is_enum_v<E> && requires {
  names(E{});
};

template <Choice E>
constexpr std::string_view name_of(E value) {
  for (const Name<E>& row : names(E{})) {
    if (row.value == value) return row.name;
  }
  return "?";
}

template <Choice E>
constexpr std::optional<E> value_named(std::string_view name) {
  for (const Name<E>& row : names(E{})) {
    if (row.name == name) return row.value;
  }
  return std::nullopt;
}

// "first or last", with the name that is printed of each value.
template <Choice E>
std::string list_of_names() {
  std::string list, last;
  for (const Name<E>& row : names(E{})) {
    if (name_of(row.value) != row.name) continue;
    if (!last.empty()) list += (list.empty() ? "" : ", ") + last;
    last = row.name;
  }
  return list.empty() ? last : list + " or " + last;
}

}  // namespace orrery
