#include "io/checksums.h"

extern "C" {
#include <libavutil/mem.h>
#include <libavutil/sha.h>
}

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>

#include "base/error.h"

namespace orrery {

namespace {

namespace fs = std::filesystem;

constexpr size_t kSha256Digits = 64, kSha1Digits = 40;

// The hexadecimal number at the front of a text, in small letters, when it is a checksum.
std::string checksum_in(std::string text) {
  size_t digits = 0;
  while (digits < text.size() && std::isxdigit(static_cast<unsigned char>(text[digits]))) ++digits;
  const bool ends = digits == text.size() || std::isspace(static_cast<unsigned char>(text[digits]));
  if (!ends || (digits != kSha256Digits && digits != kSha1Digits)) return "";
  text.resize(digits);
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// The nth line of a file, counted from 0; "" when there is none.
std::string line_of(const fs::path& file, int n) {
  std::ifstream in(file);
  std::string line;
  for (int i = 0; i <= n; ++i) {
    if (!std::getline(in, line)) return "";
  }
  return line;
}

// A quoted etag has the number between its quotes.
std::string unquoted(std::string text) {
  std::erase(text, '"');
  return text;
}

Checksum checksum_of(const fs::path& folder, const fs::path& file) {
  std::error_code none;
  const fs::path side = file.string() + ".sha256";
  if (const std::string hex = checksum_in(line_of(side, 0)); hex.size() == kSha256Digits)
    return {file, hex, side.filename().string()};
  const fs::path metadata = folder / ".cache/huggingface/download" /
                            (file.lexically_relative(folder).string() + ".metadata");
  if (const std::string hex = checksum_in(unquoted(line_of(metadata, 1))); !hex.empty())
    return {file, hex, "the Hub's metadata"};
  const fs::path target = fs::canonical(file, none);
  if (!none && target.parent_path().filename() == "blobs") {
    if (const std::string hex = checksum_in(target.filename().string()); !hex.empty())
      return {file, hex, "its name in the Hub's cache"};
  }
  return {file, "", ""};
}

}  // namespace

std::vector<Checksum> stated_checksums(const fs::path& folder) {
  std::vector<Checksum> found;
  std::error_code none;
  for (auto entry = fs::recursive_directory_iterator(folder, none);
       entry != fs::recursive_directory_iterator(); entry.increment(none)) {
    if (entry->is_directory(none)) {
      if (entry->path().filename().string().starts_with('.')) entry.disable_recursion_pending();
      continue;
    }
    if (!entry->is_regular_file(none)) continue;
    Checksum checksum = checksum_of(folder, entry->path());
    if (!checksum.hex.empty()) found.push_back(std::move(checksum));
  }
  std::sort(found.begin(), found.end(),
            [](const Checksum& a, const Checksum& b) { return a.file < b.file; });
  return found;
}

std::string actual_checksum(const Checksum& stated) {
  const bool is_git = stated.hex.size() == kSha1Digits;
  const std::unique_ptr<AVSHA, decltype(&av_free)> sha(av_sha_alloc(), &av_free);
  require(sha != nullptr, ErrorKind::out_of_memory, "no memory for a checksum");
  av_sha_init(sha.get(), is_git ? 160 : 256);
  const auto update = [&](const char* data, size_t bytes) {
    av_sha_update(sha.get(), reinterpret_cast<const uint8_t*>(data), bytes);
  };
  std::error_code none;
  if (is_git) {
    const std::string head = concat("blob ", fs::file_size(stated.file, none));
    update(head.c_str(), head.size() + 1);  // with its NUL
  }
  std::ifstream in(stated.file, std::ios::binary);
  require(in.good(), ErrorKind::not_found, stated.file.string(), ": cannot open the file");
  std::vector<char> piece(size_t{1} << 20);
  while (in.read(piece.data(), std::ssize(piece)), in.gcount() > 0)
    update(piece.data(), static_cast<size_t>(in.gcount()));
  std::array<uint8_t, kSha256Digits / 2> digest{};
  av_sha_final(sha.get(), digest.data());
  constexpr char kHex[] = "0123456789abcdef";
  std::string hex;
  for (size_t i = 0; i < stated.hex.size() / 2; ++i) {
    hex += kHex[digest[i] >> 4];
    hex += kHex[digest[i] & 15];
  }
  return hex;
}

}  // namespace orrery
