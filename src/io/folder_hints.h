// What to do about a model folder that is not one: the rest of a sentence that begins with what is
// missing, or "" when nothing that is there helps.
#pragma once

#include <filesystem>
#include <string>

namespace orrery {

// `folder` is a file or does not exist: a single-file checkpoint, or a name on the Hugging Face
// Hub.
std::string hint_without_folder(const std::filesystem::path& folder);
// `folder` has no index: a cache folder of the Hub above its snapshots.
std::string hint_without_index(const std::filesystem::path& folder);
// A component without weights under the names that are read: variants, pickled weights.
std::string hint_without_weights(const std::filesystem::path& component);

}  // namespace orrery
