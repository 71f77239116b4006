// A file that appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <filesystem>

namespace orrery {

// Creates a temporary file beside the target, with the target's extension, and renames it at
// commit(). Destroyed before that, it leaves nothing behind. Errors name the target and what the
// system says.
class OutputFile {
 public:
  // Refuses a target that is a folder, or lies in a missing or unwritable one.
  explicit OutputFile(const std::filesystem::path& target);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::filesystem::path& target() const { return target_; }
  // For libraries that open files themselves.
  const std::filesystem::path& temporary() const { return temporary_; }
  void write(const void* data, size_t bytes);
  void commit();
  // The error of a failed write, also one that a library met. `code`: errno.
  [[noreturn]] void refuse(int code) const;

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
  bool committed_ = false;
};

}  // namespace orrery
