// The safetensors format itself: what the bytes of one file mean, and writing one.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/json.h"
#include "io/output_file.h"
#include "io/safetensors.h"

namespace orrery {

namespace {

constexpr size_t kLengthBytes = 8;  // the header's length comes first, little endian

struct StoredType {
  std::string_view name;
  int64_t bits;
  std::optional<DType> dtype;
};

constexpr StoredType kStoredTypes[] = {
    {"F32", 32, DType::f32},
    {"BF16", 16, DType::bf16},
    {"F16", 16, DType::f16},
    {"I32", 32, DType::i32},
    {"I64", 64, DType::i64},
    {"U8", 8, DType::u8},
    {"F64", 64, std::nullopt},
    {"BOOL", 8, std::nullopt},
    {"I8", 8, DType::i8},
    {"I16", 16, std::nullopt},
    {"U16", 16, std::nullopt},
    {"U32", 32, std::nullopt},
    {"U64", 64, std::nullopt},
    {"C64", 64, std::nullopt},
    {"F8_E4M3", 8, DType::f8e4m3},
    {"F8_E5M2", 8, std::nullopt},
    {"F8_E8M0", 8, std::nullopt},
    {"F8_E4M3FNUZ", 8, std::nullopt},
    {"F8_E5M2FNUZ", 8, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt},
    {"F4", 4, std::nullopt},
};

const StoredType* find_type(std::string_view name) {
  for (const StoredType& type : kStoredTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

std::string_view stored_name_of(DType dtype) {
  for (const StoredType& type : kStoredTypes) {
    if (type.dtype == dtype) return type.name;
  }
  return "?";
}

// Reads one entry of the header.
class EntryReader {
 public:
  EntryReader(const std::string& prefix, const std::string& name, const Json& entry,
              FaultList& faults)
      : where_(prefix + name), entry_(entry), faults_(faults) {}

  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };

  // False when something was wrong: then `tensor` and `range` are not to be relied on.
  bool read(StoredTensor& tensor, Range& range, int64_t data_bytes) {
    if (!entry_.is_object()) {
      return fault("header", "the entry is not an object with dtype, shape and data_offsets");
    }
    const bool typed = read_type(tensor);
    const bool shaped = read_shape(tensor.shape);
    const bool placed = read_range(range, data_bytes);
    if (!typed || !shaped || !placed) return false;
    const std::optional<int64_t> bytes = byte_count(tensor.shape);
    if (!bytes) {
      return fault("shape", tensor.stored_type, " ", tensor.shape,
                   " has no whole number of bytes that fits in 64 bits");
    }
    if (*bytes != range.end - range.begin) {
      return fault("offsets", tensor.stored_type, " ", tensor.shape, " takes ", *bytes,
                   " bytes, but data_offsets [", range.begin, ", ", range.end, "] span ",
                   range.end - range.begin);
    }
    tensor.bytes = static_cast<size_t>(*bytes);
    return true;
  }

 private:
  template <typename... Parts>
  bool fault(const char* kind, const Parts&... parts) {
    faults_.add(kind, where_, ": ", parts...);
    return false;
  }

  bool read_type(StoredTensor& tensor) {
    const Json* dtype = entry_.find("dtype");
    if (!dtype || !dtype->is_string()) return fault("header", "dtype is missing or not a string");
    type_ = find_type(dtype->as_string());
    if (!type_) return fault("dtype", "the type \"", dtype->as_string(), "\" is not known");
    tensor.stored_type = dtype->as_string();
    tensor.dtype = type_->dtype;
    return true;
  }

  bool read_shape(Shape& shape) {
    const Json* dims = entry_.find("shape");
    if (!dims || !dims->is_array()) return fault("header", "shape is missing or not an array");
    const size_t rank = dims->items().size();
    if (rank > static_cast<size_t>(kMaxRank)) {
      return fault("shape", "the shape has ", rank, " dimensions, at most ", kMaxRank,
                   " are supported");
    }
    for (const Json& dim : dims->items()) {
      if (!dim.is_integer() || dim.as_int() < 0) {
        return fault("shape", "the shape ", dims->dump(), " holds ", dim.dump(),
                     " where a whole number of 0 or more is needed");
      }
      shape.push_back(dim.as_int());
    }
    return true;
  }

  bool read_range(Range& range, int64_t data_bytes) {
    const Json* offsets = entry_.find("data_offsets");
    if (!offsets || !offsets->is_array() || offsets->items().size() != 2 ||
        !offsets->at(size_t{0}).is_integer() || !offsets->at(size_t{1}).is_integer()) {
      return fault("header", "data_offsets is missing or not two whole numbers");
    }
    range = {offsets->at(size_t{0}).as_int(), offsets->at(size_t{1}).as_int()};
    if (range.begin < 0 || range.end < range.begin) {
      return fault("offsets", "data_offsets ", offsets->dump(),
                   " are negative or end before they begin");
    }
    if (range.end > data_bytes) {
      return fault("offsets", "data_offsets ", offsets->dump(), " reach beyond the ", data_bytes,
                   " bytes of data (is the file cut short?)");
    }
    return true;
  }

  // Empty on overflow. Zeros are left out of the product, so that strides fit as well.
  std::optional<int64_t> byte_count(const Shape& shape) const {
    int64_t bits = type_->bits;
    bool is_empty = false;
    for (int i = 0; i < shape.rank(); ++i) {
      if (shape[i] == 0)
        is_empty = true;
      else if (__builtin_mul_overflow(bits, shape[i], &bits))
        return std::nullopt;
    }
    if (is_empty) return 0;
    if (bits % 8 != 0) return std::nullopt;
    return bits / 8;
  }

  std::string where_;
  const Json& entry_;
  FaultList& faults_;
  const StoredType* type_ = nullptr;
};

struct Placed {
  int64_t begin;
  int64_t end;
  const std::string* name;
};

// Tensors must cover the data exactly: no byte twice and none left over.
void check_cover(std::vector<Placed> placed, int64_t data_bytes, const std::string& prefix,
                 FaultList& faults) {
  std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::tie(a.begin, a.end, *a.name) < std::tie(b.begin, b.end, *b.name);
  });
  int64_t covered = 0;
  const std::string* last = nullptr;
  for (const Placed& tensor : placed) {
    if (tensor.begin < covered) {
      faults.add("offsets", prefix, "", *last, " and ", *tensor.name, " overlap at byte ",
                 tensor.begin, " of the data");
    } else if (tensor.begin > covered) {
      faults.add("offsets", prefix, "bytes ", covered, " to ", tensor.begin,
                 " of the data, before ", *tensor.name, ", belong to no tensor");
    }
    if (tensor.end >= covered) {
      covered = tensor.end;
      last = tensor.name;
    }
  }
  if (covered < data_bytes) {
    faults.add("offsets", prefix, "", data_bytes - covered,
               " bytes behind the last tensor belong to no tensor");
  }
}

// The header's text; empty, with a fault added, when there is none to read.
std::string_view header_text(std::span<const std::byte> bytes, const std::string& prefix,
                             FaultList& faults) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (bytes.size() < kLengthBytes) {
    faults.add("header", prefix, "", bytes.size(),
               " bytes are too few for a safetensors file (is the download complete?)");
    return {};
  }
  if (text.starts_with("version https://git-lfs")) {
    faults.add("header", prefix,
               "is a Git LFS pointer, not the file itself; fetch it with git lfs pull");
    return {};
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i)
    length |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeader)) {
    faults.add("header", prefix, "the header says it is ", length, " bytes long, at most ",
               kMaxSafetensorsHeader, " are accepted");
    return {};
  }
  if (length > bytes.size() - kLengthBytes) {
    faults.add("header", prefix, "the header says it is ", length, " bytes long, but only ",
               bytes.size() - kLengthBytes, " bytes follow (is the file cut short?)");
    return {};
  }
  const std::string_view header = text.substr(kLengthBytes, length);
  if (header.starts_with("\xef\xbb\xbf")) {
    faults.add("header", prefix,
               "the header begins with a UTF-8 byte order mark; it must begin with {");
    return {};
  }
  if (!header.starts_with('{')) {
    faults.add("header", prefix, "the header does not begin with {; this is no safetensors file");
    return {};
  }
  return header;
}

void read_metadata(const Json& value, const std::string& prefix, FaultList& faults,
                   std::map<std::string, std::string>& metadata) {
  if (!value.is_object()) {
    faults.add("header", prefix, "__metadata__ is not an object of strings");
    return;
  }
  for (const auto& [key, text] : value.members()) {
    if (text.is_string())
      metadata[key] = text.as_string();
    else
      faults.add("header", prefix, "__metadata__.", key, " is not a string");
  }
}

}  // namespace

SafetensorsContents parse_safetensors(std::span<const std::byte> bytes, const std::string& prefix,
                                      FaultList& faults) {
  SafetensorsContents contents;
  const std::string_view header = header_text(bytes, prefix, faults);
  if (header.empty()) return contents;
  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + header.size());
  const int64_t data_bytes = static_cast<int64_t>(data.size());
  bool all_placed = true;
  const auto read_entry = [&](const std::string& name, const Json& entry) {
    if (name == "__metadata__") return read_metadata(entry, prefix, faults, contents.metadata);
    StoredTensor& tensor = contents.tensors.emplace_back();
    tensor.name = name;
    EntryReader::Range range;
    if (EntryReader(prefix, name, entry, faults).read(tensor, range, data_bytes))
      tensor.data = data.data() + range.begin;
    else
      all_placed = false;
  };
  try {
    Json::parse_members(header, "header", read_entry);
  } catch (const Error& error) {
    faults.add("header", prefix, error.what());
    contents = {};
    return contents;
  }
  contents.header_read = true;
  // With an entry unread its bytes would show as a gap.
  if (!all_placed) return contents;
  std::vector<Placed> placed;
  for (const StoredTensor& tensor : contents.tensors) {
    const int64_t begin = tensor.data - data.data();
    placed.push_back({begin, begin + static_cast<int64_t>(tensor.bytes), &tensor.name});
  }
  check_cover(std::move(placed), data_bytes, prefix, faults);
  return contents;
}

namespace {

std::string make_header(const std::vector<TensorSpec>& tensors, const std::vector<int64_t>& begins,
                        const std::map<std::string, std::string>& metadata) {
  std::vector<Json::Member> members;
  if (!metadata.empty()) {
    std::vector<Json::Member> entries;
    for (const auto& [key, value] : metadata) entries.emplace_back(key, value);
    members.emplace_back("__metadata__", Json::object(std::move(entries)));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& tensor = tensors[i];
    Json shape = Json::array();
    for (int d = 0; d < tensor.shape.rank(); ++d) shape.push(tensor.shape[d]);
    members.emplace_back(
        tensor.name,
        Json::object({{"dtype", std::string(stored_name_of(tensor.dtype))},
                      {"shape", std::move(shape)},
                      {"data_offsets", Json::array({begins[i], begins[i] + tensor.bytes()})}}));
  }
  std::string header = Json::object(std::move(members)).dump();
  constexpr size_t kAlignment = 64;
  const size_t data_at = kLengthBytes + header.size();
  header.append((kAlignment - data_at % kAlignment) % kAlignment, ' ');
  return header;
}

void refuse_tensor(const std::filesystem::path& file, const std::string& tensor, const char* why) {
  fail(ErrorKind::invalid_argument, file.string(), ": the tensor ", tensor, " ", why);
}

void check_names(const std::filesystem::path& file, const std::vector<TensorSpec>& tensors) {
  std::vector<std::string_view> names;
  for (const TensorSpec& tensor : tensors) {
    if (tensor.name == "__metadata__") {
      refuse_tensor(file, tensor.name, "cannot have that name, which the format reserves");
    }
    if (!is_utf8(tensor.name)) refuse_tensor(file, tensor.name, "has a name that is not UTF-8");
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    fail(ErrorKind::invalid_argument, file.string(), ": two tensors are named ", *twice);
  }
}

}  // namespace

void stream_safetensors(const std::filesystem::path& file, const std::vector<TensorSpec>& tensors,
                        const std::function<void(size_t i, const TensorSink& write)>& make,
                        const std::map<std::string, std::string>& metadata) {
  check_names(file, tensors);
  std::vector<size_t> layout(tensors.size());
  for (size_t i = 0; i < layout.size(); ++i) layout[i] = i;
  std::stable_sort(layout.begin(), layout.end(), [&](size_t a, size_t b) {
    return size_of(tensors[a].dtype) > size_of(tensors[b].dtype);
  });
  std::vector<int64_t> begins(tensors.size());
  int64_t end = 0;
  for (const size_t i : layout) {
    begins[i] = end;
    end += tensors[i].bytes();
  }

  const std::string header = make_header(tensors, begins, metadata);
  std::byte length[kLengthBytes];
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<std::byte>(uint64_t{header.size()} >> (8 * i));
  }
  OutputFile out(file);
  out.write(length, sizeof length);
  out.write(header.data(), header.size());
  for (const size_t i : layout) {
    size_t written = 0;
    make(i, [&](const void* data, size_t bytes) {
      out.write(data, bytes);
      written += bytes;
    });
    require(static_cast<int64_t>(written) == tensors[i].bytes(), file.string(), ": the tensor ",
            tensors[i].name, " has ", tensors[i].bytes(), " bytes, but ", written, " were made");
  }
  out.commit();
}

void write_safetensors(const std::filesystem::path& file, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, view] : tensors) {
    if (view.device != DeviceKind::cpu) refuse_tensor(file, name, "is not in host memory");
    if (!view.contiguous()) refuse_tensor(file, name, "is not contiguous");
    specs.push_back({name, view.dtype, view.shape});
  }
  stream_safetensors(
      file, specs,
      [&](size_t i, const TensorSink& write) {
        const View& view = tensors[i].view;
        write(view.data, static_cast<size_t>(view.bytes()));
      },
      metadata);
}

}  // namespace orrery
