// Reads every byte of a model folder: orrery inspect --verify.
#include <sstream>

#include "backend/dry_run.h"
#include "base/error.h"
#include "base/parallel.h"
#include "engine/settings.h"
#include "io/checksums.h"
#include "model/sound.h"
#include "model/transformer.h"
#include "model/vae.h"
#include "orrery/engine.h"

namespace orrery {

namespace {

namespace fs = std::filesystem;

// Names and shapes against the network, then the values of all tensors, used or not. Returns the
// number of tensors with an unlikely value.
size_t check_component(const Safetensors& files, const VisitFunction& visit, LoadOptions options,
                       std::ostringstream& out) {
  options.check_finite = false;
  check_weights(files, visit, options);
  std::vector<TensorExpectation> all;
  for (const StoredTensor& tensor : files.tensors()) all.push_back({tensor.name, tensor.shape});
  const std::vector<std::string> unlikely = check_finite(files, all);
  out << "  " << files.origin().filename().string() << ": all values of " << all.size()
      << " tensors are finite";
  if (unlikely.empty()) out << " and likely";
  for (const std::string& clause : unlikely) out << "\n    " << clause;
  out << "\n";
  return unlikely.size();
}

void check_files(const fs::path& model, std::ostringstream& out) {
  const std::vector<Checksum> stated = stated_checksums(model);
  std::vector<std::string> actual(stated.size());
  parallel_for(std::ssize(stated), [&](int64_t i) {
    actual[static_cast<size_t>(i)] = actual_checksum(stated[static_cast<size_t>(i)]);
  });
  FaultList faults;
  for (size_t i = 0; i < stated.size(); ++i) {
    if (actual[i] == stated[i].hex) continue;
    faults.add("checksum", stated[i].file.lexically_relative(model).string(), " has ", actual[i],
               ", but ", stated[i].source, " says ", stated[i].hex);
  }
  faults.raise(ErrorKind::corrupt, model.string());
  if (stated.empty())
    out << "  checksums: none lie beside the files\n";
  else
    out << "  checksums: " << stated.size() << " files have the stated ones\n";
}

}  // namespace

std::string verify(const fs::path& model) {
  const Checkpoint checkpoint = read_checkpoint(model);
  const ModelFolder& folder = checkpoint.folder;
  std::ostringstream out;
  DryRunBackend dry(DeviceKind::cpu);
  Transformer transformer(dry, checkpoint.transformer, DType::f32);
  Vae vae(dry, checkpoint.vae);
  LoadOptions options;
  options.ignored = Transformer::is_unused;
  size_t unlikely = check_component(
      Safetensors::open_folder(folder.transformer.folder),
      [&](WeightVisitor& v) { transformer.visit_und(v), transformer.visit_gen(v); }, options, out);
  unlikely += check_component(
      Safetensors::open_folder(folder.vae.folder), [&](WeightVisitor& v) { vae.visit(v); }, {},
      out);
  if (checkpoint.sound) {
    SoundDecoder sound(dry, *checkpoint.sound);
    const Safetensors files = Safetensors::open_folder(folder.sound_tokenizer->folder);
    unlikely += check_component(
        files, [&](WeightVisitor& v) { sound.visit(v); }, sound_loading(sound.config(), files),
        out);
  }
  check_files(model, out);
  require(unlikely == 0, ErrorKind::numeric, model.string(), ": ", unlikely,
          " tensors hold a value that damage explains better than training\n", out.str());
  return out.str();
}

}  // namespace orrery
