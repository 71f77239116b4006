#include "io/sha256.h"

#include <array>
#include <fstream>
#include <memory>

#include "base/error.h"

extern "C" {
#include <libavutil/mem.h>
#include <libavutil/sha.h>
}

namespace orrery {

namespace {
struct Free {
  void operator()(AVSHA* sha) const { av_free(sha); }
};
}  // namespace

std::string sha256_of_file(const std::filesystem::path& file) {
  constexpr int kBits = 256;
  std::ifstream in(file, std::ios::binary);
  require(in.good() && !std::filesystem::is_directory(file), ErrorKind::not_found, file.string(),
          ": cannot open the file");
  const std::unique_ptr<AVSHA, Free> sha(av_sha_alloc());
  require(sha != nullptr && av_sha_init(sha.get(), kBits) == 0, ErrorKind::out_of_memory,
          "SHA-256 cannot be started");
  std::array<char, 1 << 16> block;
  while (in.read(block.data(), block.size()) || in.gcount() > 0) {
    av_sha_update(sha.get(), reinterpret_cast<const uint8_t*>(block.data()),
                  static_cast<size_t>(in.gcount()));
  }
  std::array<uint8_t, kBits / 8> digest;
  av_sha_final(sha.get(), digest.data());
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace orrery
