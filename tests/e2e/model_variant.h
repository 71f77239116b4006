// Model folders made from the shipped checkpoint, or another one, by changing a few of its files;
// the rest are links.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "process.h"
#include "scratch_folder.h"

namespace orrery::e2e {

class ModelVariant {
 public:
  explicit ModelVariant(const std::string& model = pico()) {
    namespace fs = std::filesystem;
    for (const auto& entry : fs::recursive_directory_iterator(model)) {
      const fs::path to = path() / fs::relative(entry.path(), model);
      if (entry.is_directory())
        fs::create_directories(to);
      else
        fs::create_symlink(fs::canonical(entry.path()), to);
    }
  }
  std::filesystem::path path() const { return folder_.path(); }
  // Puts a file in place of the link, or a new one.
  void write(const std::string& name, std::string_view content) const {
    std::filesystem::remove(path() / name);
    folder_.write(name, content);
  }
  void remove(const std::string& name) const { std::filesystem::remove(path() / name); }

 private:
  ScratchFolder folder_;
};

}  // namespace orrery::e2e
