// Files that appear under their names only when they are complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "orrery/export.h"

namespace ORRERY_API orrery {

// One output. It is opened before the work that fills it, so that what cannot be written is refused
// first.
//
// A target that is absent or a regular file: bytes go to a temporary file of an unpredictable name
// in the same folder; commit() flushes it to the disk and renames it. The mode of an existing file
// is kept; a file that has several hard links is replaced under this name only. A symbolic link is
// followed, and its target is replaced. Missing folders are made. Destroyed before commit(),
// nothing is left behind; what a killed process left in the folder is removed by the next output
// there.
//
// A device, a pipe, "/dev/stdout", "/dev/fd/N" and "-" (standard output) are opened and written to.
// Block devices and sockets are refused.
//
// Errors name the target and what the system says.
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& target);
  ~OutputFile();
  OutputFile(OutputFile&&) noexcept;
  OutputFile& operator=(OutputFile&&) noexcept;

  const std::filesystem::path& target() const;  // as given
  bool is_standard_output() const;
  void write(const void* data, size_t bytes);
  void write(std::span<const uint8_t> bytes) { write(bytes.data(), bytes.size()); }
  void write(const std::string& text) { write(text.data(), text.size()); }
  void commit();

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// The same for a folder. The target must be absent or an empty folder, its parent must exist.
class OutputFolder {
 public:
  explicit OutputFolder(const std::filesystem::path& target);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return folder_; }  // to be filled; renamed at the end
  void commit();

 private:
  std::filesystem::path target_, folder_;
  int lock_ = -1;
  bool committed_ = false;
};

// The files of one run, each under the flag that names it. Refuses one file under two names, found
// by device and inode where it exists and by resolved path otherwise, before it is opened.
// Character devices may be shared.
class FileClaims {
 public:
  // An input: no output may replace it. All inputs come before the first output.
  void reads(const std::string& flag, const std::filesystem::path& file);
  OutputFile open(const std::string& flag, const std::filesystem::path& file);

 private:
  struct Claim {
    std::string flag;
    std::filesystem::path resolved;
    bool exists = false;
    uint64_t device = 0, inode = 0;
    bool is_same(const Claim& other) const;
  };
  // Nothing for a character device.
  static std::optional<Claim> claim(const std::string& flag, const std::filesystem::path& file);
  std::vector<Claim> inputs_, outputs_;
};

}  // namespace orrery
