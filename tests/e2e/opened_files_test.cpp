// Which files an entry point opens, as the kernel tells.
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "orrery/engine.h"
#include "support/source_dir.h"

namespace orrery {
namespace {

namespace fs = std::filesystem;

// Watches the files of a folder whose names end in `ending`.
class OpenedFiles {
 public:
  OpenedFiles(const fs::path& folder, const std::string& ending)
      : watch_(inotify_init1(IN_NONBLOCK)) {
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (!entry.path().string().ends_with(ending)) continue;
      const int id = inotify_add_watch(watch_, entry.path().c_str(), IN_OPEN);
      names_.resize(std::max(names_.size(), static_cast<size_t>(id + 1)));
      names_[static_cast<size_t>(id)] = fs::relative(entry.path(), folder).string();
    }
  }
  ~OpenedFiles() { close(watch_); }

  // Those opened since the last call.
  std::set<std::string> take() const {
    std::set<std::string> opened;
    alignas(inotify_event) char events[4096];
    for (ssize_t size; (size = read(watch_, events, sizeof(events))) > 0;) {
      for (ssize_t at = 0; at < size;) {
        const auto* event = reinterpret_cast<const inotify_event*>(events + at);
        if (event->wd >= 0) opened.insert(names_[static_cast<size_t>(event->wd)]);
        at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
      }
    }
    return opened;
  }

 private:
  int watch_;
  std::vector<std::string> names_;  // by watch
};

// A plan is made from configurations alone, also of a model with sound; the engine, which loads the
// weights, shows that the watch sees them opened. What a request needs beside the weights does not
// contain the sound decoder again: it is one of the weights.
TEST(OpenedFiles, APlanOpensNoWeights) {
  const fs::path model = source_dir() / "tests/golden/data/pipeline/model";
  EngineOptions options;
  options.num_threads = 1;
  Request silent;
  silent.prompt = "A small red circle moves left on a black background.";
  silent.num_inference_steps = 1;
  silent.height = silent.width = 64;
  silent.num_frames = 5;
  Request loud = silent;
  loud.enable_sound = true;

  const OpenedFiles opened(model, ".safetensors");
  const Plan plan = plan_request(model, loud, options);
  EXPECT_EQ(opened.take(), std::set<std::string>{});
  const Plan without = plan_request(model, silent, options);
  EXPECT_EQ(plan.weight_bytes, without.weight_bytes);
  const auto decoder = static_cast<int64_t>(
      fs::file_size(model / "sound_tokenizer/diffusion_pytorch_model.safetensors"));
  EXPECT_LT(plan.state_bytes - without.state_bytes, decoder / 2);

  Engine engine = Engine::open(model, options);
  EXPECT_TRUE(opened.take().contains("sound_tokenizer/diffusion_pytorch_model.safetensors"));
  engine.generate(loud);
  EXPECT_EQ(opened.take(), std::set<std::string>{});
}

}  // namespace
}  // namespace orrery
