#include "io/folder_hints.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "base/error.h"

namespace orrery {

namespace {

namespace fs = std::filesystem;

// Sorted; empty when there is no such folder.
std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

// The snapshots of one repository in a cache folder of the Hub.
std::vector<fs::path> snapshots_in(const fs::path& repository) {
  std::vector<fs::path> found;
  std::error_code none;
  for (const fs::path& snapshot : entries(repository / "snapshots")) {
    if (fs::exists(snapshot / "model_index.json", none) ||
        fs::exists(snapshot / "modular_model_index.json", none))
      found.push_back(snapshot);
  }
  return found;
}

// Where huggingface_hub keeps what it downloads.
fs::path hub_cache() {
  if (const char* cache = std::getenv("HF_HUB_CACHE"); cache && *cache) return cache;
  if (const char* home = std::getenv("HF_HOME"); home && *home) return fs::path(home) / "hub";
  const char* home = std::getenv("HOME");
  return home && *home ? fs::path(home) / ".cache/huggingface/hub" : fs::path();
}

// "owner/name": two plain parts.
bool is_hub_name(const fs::path& path) {
  return !path.is_absolute() && std::distance(path.begin(), path.end()) == 2 &&
         path.begin()->string().front() != '.' && path.has_filename();
}

}  // namespace

std::string hint_without_folder(const fs::path& folder) {
  std::error_code none;
  if (fs::exists(folder, none))
    return "; checkpoints in one file cannot be read, only folders in the diffusers layout";
  if (!is_hub_name(folder)) return "";
  const std::string owner = folder.begin()->string(), name = folder.filename().string();
  const fs::path cached = hub_cache() / ("models--" + owner + "--" + name);
  const std::vector<fs::path> snapshots = snapshots_in(cached);
  if (!snapshots.empty())
    return concat("; this name on the Hugging Face Hub has been downloaded: use ",
                  snapshots.back().string());
  return concat("; if it is a name on the Hugging Face Hub, download it first: hf download ", owner,
                "/", name, " --local-dir ", name);
}

std::string hint_without_index(const fs::path& folder) {
  const std::vector<fs::path> snapshots = snapshots_in(folder);
  if (!snapshots.empty())
    return concat("; it is a cache folder of the Hugging Face Hub, use the snapshot in it: ",
                  snapshots.back().string());
  std::error_code none;
  for (const fs::path& entry : entries(folder)) {
    if (fs::exists(entry / "model_index.json", none) ||
        fs::exists(entry / "modular_model_index.json", none))
      return concat("; ", entry.string(), " does: name that folder");
    if (const auto inner = snapshots_in(entry); !inner.empty())
      return concat("; it holds a cache of the Hugging Face Hub, use ", inner.back().string());
  }
  return "";
}

std::string hint_without_weights(const fs::path& component) {
  for (const fs::path& file : entries(component)) {
    const std::string name = file.filename().string();
    if (name.find(".safetensors") != std::string::npos)
      return concat("; ", name,
                    " is there: a variant or another name, which is read when it is renamed");
    if (name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth") ||
        name.ends_with(".ckpt"))
      return concat("; ", name,
                    " is there, but it holds Python objects, which are not read: convert it to "
                    "safetensors");
  }
  return "";
}

}  // namespace orrery
