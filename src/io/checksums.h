// Checksums that lie beside downloaded files, and whether the files still have them.
//
//   FILE.sha256                                  "HEX" or "HEX  NAME", as sha256sum writes it
//   .cache/huggingface/download/FILE.metadata    of `hf download --local-dir`: the second line
//   blobs/HEX                                    what a snapshot of the Hub's cache links to
//
// The Hub names large files by their SHA-256 and small ones by git's SHA-1 of a blob.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace orrery {

struct Checksum {
  std::filesystem::path file;
  std::string hex;     // 64 digits: SHA-256; 40: SHA-1 of the git blob
  std::string source;  // what states it
};

// Of every regular file below `folder`, hidden folders left out, that has one.
std::vector<Checksum> stated_checksums(const std::filesystem::path& folder);

// The file's own, of the kind `hex` is. Throws Error{not_found} when it cannot be read.
std::string actual_checksum(const Checksum& stated);

}  // namespace orrery
