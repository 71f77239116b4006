#include "io/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/json.h"

namespace orrery {

namespace {

std::string system_message(int code) { return std::generic_category().message(code); }

}  // namespace

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const auto refuse = [&](ErrorKind kind, const std::string& why) {
    fail(kind, path.string(), ": cannot open the file: ", why);
  };
  // O_NONBLOCK: a pipe must be refused below, not waited for.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) refuse(ErrorKind::not_found, system_message(errno));
  struct stat status;
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor);
    refuse(ErrorKind::invalid_argument, "it is not a regular file");
  }

  std::shared_ptr<MappedFile> file(new MappedFile);
  file->path_ = path;
  file->bytes_ = static_cast<size_t>(status.st_size);
  int code = 0;
  if (file->bytes_ > 0) {  // mmap refuses empty files
    // Shared: reading a private mapping from a device can copy page by page.
    void* data = ::mmap(nullptr, file->bytes_, PROT_READ, MAP_SHARED, descriptor, 0);
    if (data == MAP_FAILED)
      code = errno;
    else
      file->data_ = static_cast<const std::byte*>(data);
  }
  ::close(descriptor);
  require(code == 0, ErrorKind::out_of_memory, path.string(), ": ", file->bytes_,
          " bytes cannot be mapped into the address space (", system_message(code),
          "); raise the limit on it (ulimit -v)");
  return file;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), bytes_);
}

void Safetensors::add_file(std::shared_ptr<const MappedFile> file, SafetensorsContents contents) {
  for (StoredTensor& tensor : contents.tensors) tensor.file = file->path().filename().string();
  files_.push_back(std::move(file));
  tensors_.insert(tensors_.end(), std::make_move_iterator(contents.tensors.begin()),
                  std::make_move_iterator(contents.tensors.end()));
}

void Safetensors::finish(const FaultList& faults) {
  const bool only_missing = faults.count() == faults.count("missing file");
  faults.raise(only_missing ? ErrorKind::not_found : ErrorKind::corrupt, origin_.string());
  std::sort(tensors_.begin(), tensors_.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return a.name < b.name; });
}

Safetensors Safetensors::open_file(const std::filesystem::path& file) {
  Safetensors opened;
  opened.origin_ = file;
  FaultList faults;
  auto mapped = MappedFile::open(file);
  auto contents = parse_safetensors({mapped->data(), mapped->bytes()}, "", faults);
  opened.metadata_ = std::move(contents.metadata);
  opened.add_file(std::move(mapped), std::move(contents));
  opened.finish(faults);
  return opened;
}

namespace {

using ShardMap = std::map<std::string, std::vector<std::string>>;  // shard -> tensors, sorted

ShardMap read_index(const std::filesystem::path& file, FaultList& faults) {
  const Json index = Json::load(file);
  if (!index.is_object() || !index.has("weight_map") || !index.at("weight_map").is_object()) {
    fail(ErrorKind::corrupt, file.string(), ": weight_map is missing or not an object");
  }
  ShardMap shards;
  for (const auto& [tensor, shard] : index.at("weight_map").members()) {
    if (shard.is_string() && is_plain_file_name(shard.as_string())) {
      shards[shard.as_string()].push_back(tensor);
    } else {
      faults.add("shard name", file.filename().string(), ": ", tensor, " is placed in ",
                 shard.dump(), ", which is not a plain file name inside the folder");
    }
  }
  for (auto& [shard, tensors] : shards) std::sort(tensors.begin(), tensors.end());
  return shards;
}

// Every tensor must lie where the index says, and nothing else.
void check_against_index(const ShardMap& shards, const std::string& shard,
                         const std::vector<StoredTensor>& found, FaultList& faults) {
  std::vector<std::string_view> names;
  for (const StoredTensor& tensor : found) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const std::vector<std::string>& wanted = shards.at(shard);
  for (const std::string& name : wanted) {
    if (!std::binary_search(names.begin(), names.end(), name)) {
      faults.add("missing tensor", name, " is not in ", shard, ", where the index places it");
    }
  }
  for (const std::string_view name : names) {
    if (!std::binary_search(wanted.begin(), wanted.end(), name)) {
      faults.add("surplus tensor", name, " is in ", shard, ", where the index does not place it");
    }
  }
}

}  // namespace

Safetensors Safetensors::open_folder(const std::filesystem::path& folder) {
  std::error_code none;
  require(std::filesystem::is_directory(folder, none), ErrorKind::not_found, folder.string(),
          ": the folder does not exist");
  const auto single = folder / kWeightsName;
  const auto index = folder / kWeightsIndexName;
  const bool has_single = std::filesystem::exists(single, none);
  if (!std::filesystem::exists(index, none)) {
    require(has_single, ErrorKind::not_found, folder.string(), ": holds neither ", kWeightsName,
            " nor ", kWeightsIndexName);
    return open_file(single);
  }

  FaultList faults;
  const ShardMap shards = read_index(index, faults);
  if (has_single && !shards.contains(std::string(kWeightsName))) {
    faults.add("index", "both ", kWeightsName, " and ", kWeightsIndexName,
               " are present and may disagree; remove the one that is not meant");
  }
  Safetensors opened;
  opened.origin_ = folder;
  for (const auto& [shard, tensors] : shards) {
    const auto path = folder / shard;
    if (!std::filesystem::exists(path, none)) {
      faults.add("missing file", shard, " is missing; the index places ", tensors.size(),
                 " tensors in it");
      continue;
    }
    std::shared_ptr<const MappedFile> mapped;
    try {
      mapped = MappedFile::open(path);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::out_of_memory) throw;  // no fault of the checkpoint
      faults.add("unreadable file", error.what());
      continue;
    }
    auto contents = parse_safetensors({mapped->data(), mapped->bytes()}, shard + ": ", faults);
    if (contents.header_read) check_against_index(shards, shard, contents.tensors, faults);
    opened.add_file(std::move(mapped), std::move(contents));
  }
  opened.finish(faults);
  return opened;
}

const StoredTensor* Safetensors::find(std::string_view name) const {
  const auto at = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const StoredTensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

int64_t Safetensors::total_bytes() const {
  int64_t total = 0;
  for (const StoredTensor& tensor : tensors_) total += static_cast<int64_t>(tensor.bytes);
  return total;
}

const StoredTensor& Safetensors::stored(std::string_view name) const {
  const StoredTensor* tensor = find(name);
  if (!tensor) fail(ErrorKind::not_found, origin_.string(), ": there is no tensor ", name);
  return *tensor;
}

View Safetensors::view(std::string_view name) const {
  const StoredTensor& tensor = stored(name);
  if (!tensor.dtype) {
    fail(ErrorKind::unsupported, origin_.string(), ": ", name, " is stored as ", tensor.stored_type,
         ", which cannot be used in place");
  }
  return make_view(tensor.data, tensor.shape, *tensor.dtype);
}

bool Safetensors::aligned(const View& view) {
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(size_of(view.dtype)) == 0;
}

namespace {

// From bytes of any alignment.
template <typename From, typename To, typename Convert>
void convert_elements(const std::byte* from, To* to, int64_t count, Convert convert) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    to[i] = convert(value);
  }
}

template <typename To, typename Convert>
bool convert_floats(const StoredTensor& tensor, To* to, Convert from_float) {
  const int64_t count = tensor.shape.numel();
  if (tensor.stored_type == "F64") {
    convert_elements<double>(tensor.data, to, count,
                             [&](double value) { return from_float(static_cast<float>(value)); });
  } else if (tensor.dtype == DType::f32) {
    convert_elements<float>(tensor.data, to, count, from_float);
  } else if (tensor.dtype == DType::bf16) {
    convert_elements<bf16>(tensor.data, to, count,
                           [&](bf16 value) { return from_float(to_float(value)); });
  } else if (tensor.dtype == DType::f16) {
    convert_elements<f16>(tensor.data, to, count,
                          [&](f16 value) { return from_float(to_float(value)); });
  } else {
    return false;
  }
  return true;
}

template <typename To>
bool widen_integers(const StoredTensor& tensor, To* to) {
  const auto widen = [](auto value) { return static_cast<To>(value); };
  if (tensor.dtype == DType::u8) {
    convert_elements<uint8_t>(tensor.data, to, tensor.shape.numel(), widen);
  } else if (tensor.dtype == DType::i32) {
    convert_elements<int32_t>(tensor.data, to, tensor.shape.numel(), widen);
  } else {
    return false;
  }
  return true;
}

bool convert_tensor(const StoredTensor& tensor, MutView to) {
  switch (to.dtype) {
    case DType::f32:
      return convert_floats(tensor, to.as<float>(), [](float value) { return value; });
    case DType::bf16:
      return convert_floats(tensor, to.as<bf16>(), [](float value) { return to_bf16(value); });
    case DType::i32: return widen_integers(tensor, to.as<int32_t>());
    case DType::i64: return widen_integers(tensor, to.as<int64_t>());
    case DType::f16:
    case DType::u8:
    case DType::i8:
    case DType::f8e4m3: return false;
  }
  return false;
}

}  // namespace

Tensor Safetensors::read(std::string_view name, DType dtype) const {
  const StoredTensor& tensor = stored(name);
  Tensor copy = allocate_host_tensor(tensor.shape, dtype);
  if (tensor.dtype == dtype) {
    if (tensor.bytes > 0) std::memcpy(copy.view.mut(), tensor.data, tensor.bytes);
  } else if (!convert_tensor(tensor, copy.view)) {
    fail(ErrorKind::unsupported, origin_.string(), ": ", name, " is stored as ", tensor.stored_type,
         ", which cannot be read as ", name_of(dtype));
  }
  return copy;
}

}  // namespace orrery
