#include "engine/fingerprint.h"

#include "base/error.h"
#include "engine/report.h"
#include "engine/request_fields.h"

namespace orrery {

uint64_t digest(const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 1099511628211u;
  return hash;
}

namespace {

std::string digest_of(const std::optional<Frames>& frames) {
  if (!frames) return "none";
  return concat(frames->count, "x", frames->height, "x", frames->width, " ",
                digest(frames->rgb.data(), frames->rgb.size()));
}

std::string digest_of(const std::optional<FloatTensor>& tensor) {
  if (!tensor) return "none";
  return concat(tensor->values.size(), " ",
                digest(tensor->values.data(), tensor->values.size() * sizeof(float)));
}

}  // namespace

std::string fingerprint(const Request& request, const Settings& settings,
                        const EngineOptions& options) {
  std::string text = settings_json(request, settings).dump();
  text += fields_json(options).dump();
  text += concat(" image ", digest_of(request.image), " video ", digest_of(request.video),
                 " latents ", digest_of(request.latents));
  if (request.action) text += " actions " + digest_of(request.action->raw_actions);
  if (request.transfer) {
    for (const Control& control : request.transfer->controls)
      text += " control " + digest_of(control.video);
  }
  return text;
}

}  // namespace orrery
