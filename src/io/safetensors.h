// Safetensors by read-only mapping: one file, or a component folder that holds one file or shards
// with an index.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/fault_list.h"
#include "tensor/tensor.h"
#include "tensor/view.h"

namespace orrery {

inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;  // bytes, as in the reference
inline constexpr std::string_view kWeightsName = "diffusion_pytorch_model.safetensors";
inline constexpr std::string_view kWeightsIndexName =
    "diffusion_pytorch_model.safetensors.index.json";

// One step below a folder and nowhere else: no separators, not "." or "..".
bool is_plain_file_name(std::string_view name);

// A shared read-only mapping of a file. Views into it are valid while it lives.
class MappedFile {
 public:
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  MappedFile() = default;
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

struct StoredTensor {
  std::string name;
  std::string stored_type;     // as in the header: "BF16", "F8_E4M3", ...
  std::optional<DType> dtype;  // empty: the stored type has no DType (F64, F8_E4M3, I8, BOOL, ...)
  Shape shape;                 // rank <= kMaxRank
  const std::byte* data = nullptr;
  size_t bytes = 0;
  std::string file;  // its name in the folder, for messages
};

// What the bytes of one safetensors file declare. When faults were added, `tensors` holds every
// name but not everything that belongs to it.
struct SafetensorsContents {
  std::vector<StoredTensor> tensors;  // in the order of the header; data points into the bytes
  std::map<std::string, std::string> metadata;
  bool header_read = false;  // false: a fault hides which tensors there are
};

// Checks a whole file held in memory. Each fault begins with `prefix`, which names the file where
// it is one of several.
SafetensorsContents parse_safetensors(std::span<const std::byte> bytes, const std::string& prefix,
                                      FaultList& faults);

// The tensors of one safetensors file or of one component folder ("transformer", "vae", ...).
class Safetensors {
 public:
  // Reads and checks every header before any tensor byte is used. All faults found are reported
  // together in one Error{corrupt} (not_found when files are all that is missing): missing shards,
  // shard names that are not plain file names inside the folder, tensors the index names but the
  // shard lacks, tensors in shards that the index does not name, duplicate keys, bad or overlapping
  // offsets, byte counts that do not match shape x dtype, overflowing or negative shapes, headers
  // larger than 100 MB or than the file, bytes that belong to no tensor. A header that is not JSON,
  // or has a key twice, is one fault.
  static Safetensors open_file(const std::filesystem::path& file);
  // `folder` holds diffusion_pytorch_model.safetensors, or ...safetensors.index.json plus shards.
  // Both at once is an error, unless the index itself names that file: they may disagree, and which
  // of them was meant cannot be told.
  static Safetensors open_folder(const std::filesystem::path& folder);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // sorted by name
  const StoredTensor* find(std::string_view name) const;
  const std::filesystem::path& origin() const { return origin_; }
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }  // of a single file
  int64_t total_bytes() const;

  // A view into the mapping. Throws Error{not_found} when the name is missing, Error{unsupported}
  // when the stored type has no DType. The view may be misaligned for its dtype: see aligned().
  View view(std::string_view name) const;
  static bool aligned(const View& view);
  // A host copy in `dtype`: f32 or bf16 from f32, bf16, f16 and F64; integers to themselves and to
  // wider ones; every type to itself. Throws Error{unsupported} otherwise.
  Tensor read(std::string_view name, DType dtype) const;

 private:
  const StoredTensor& stored(std::string_view name) const;
  void add_file(std::shared_ptr<const MappedFile> file, SafetensorsContents contents);
  void finish(const FaultList& faults);

  std::filesystem::path origin_;
  std::vector<std::shared_ptr<const MappedFile>> files_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Writes tensors (host, contiguous) to a temporary file beside `file` and renames it; on failure
// nothing is left behind. The header lists them in the order given and is padded so that the data
// starts at a multiple of 64 bytes. The format allows no gaps, so the data lies ordered by element
// size, largest first (else as given): every tensor is aligned for its type.
struct NamedTensor {
  std::string name;
  View view;
};
void write_safetensors(const std::filesystem::path& file, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// The same for tensors that no memory holds: `make(i, write)` hands over the bytes of tensors[i] in
// order, in as many pieces as it likes.
struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  int64_t bytes() const { return shape.numel() * size_of(dtype); }
};
using TensorSink = std::function<void(const void* data, size_t bytes)>;
void stream_safetensors(const std::filesystem::path& file, const std::vector<TensorSpec>& tensors,
                        const std::function<void(size_t i, const TensorSink& write)>& make,
                        const std::map<std::string, std::string>& metadata = {});

}  // namespace orrery
