#include "io/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace orrery {

OutputFile::OutputFile(const std::filesystem::path& target) : target_(target) {
  const std::filesystem::path folder = target.has_parent_path() ? target.parent_path() : ".";
  std::error_code ignored;
  require(!target.filename().empty() && !std::filesystem::is_directory(target, ignored),
          target.string(), " is a folder; give the name of a file");
  require(std::filesystem::is_directory(folder, ignored), ErrorKind::not_found, target.string(),
          ": cannot write the file: the folder ", folder.string(), " does not exist");
  constexpr int kAttempts = 1000;
  for (int i = 0; descriptor_ < 0; ++i) {
    temporary_ = folder / concat(".orrery-", ::getpid(), "-", i, target.extension().string());
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && (errno != EEXIST || i == kAttempts)) refuse(errno);
  }
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!committed_) ::unlink(temporary_.c_str());
}

void OutputFile::write(const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse(errno);
    from += written;
    bytes -= static_cast<size_t>(written);
  }
}

void OutputFile::commit() {
  // Network file systems report a full disk only here.
  if (::close(std::exchange(descriptor_, -1)) != 0) refuse(errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) refuse(errno);
  committed_ = true;
}

void OutputFile::refuse(int code) const {
  fail(ErrorKind::invalid_argument, target_.string(),
       ": cannot write the file: ", std::generic_category().message(code));
}

}  // namespace orrery
