#include "io/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

#include "base/error.h"

namespace orrery {

namespace {

struct Descriptor {
  int number = -1;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

struct stat status_of(const std::filesystem::path& file, const char* what) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) {
    const int code = errno;
    require(code != ENOENT, ErrorKind::not_found, file.string(), ": there is no such file");
    fail(ErrorKind::invalid_argument, file.string(),
         ": cannot read the file: ", std::generic_category().message(code));
  }
  require(!S_ISDIR(status.st_mode), file.string(), " is a folder, not ", what);
  require(S_ISREG(status.st_mode) || S_ISFIFO(status.st_mode), file.string(),
          " is a device or a socket, not ", what);
  return status;
}

}  // namespace

void require_regular(const std::filesystem::path& file, const char* what) {
  require(S_ISREG(status_of(file, what).st_mode), file.string(), " is a pipe, not ", what,
          "; save it as a file first");
}

std::vector<uint8_t> read_input(const std::filesystem::path& file, int64_t most, const char* what) {
  const struct stat status = status_of(file, what);
  const auto require_size = [&](int64_t size) {
    require(size <= most, ErrorKind::unsupported, file.string(), " is larger than ", most >> 20,
            " MiB, too large for ", what);
  };
  if (S_ISREG(status.st_mode)) require_size(status.st_size);
  const Descriptor input{::open(file.c_str(), O_RDONLY | O_CLOEXEC)};
  const auto refuse = [&] {
    fail(ErrorKind::invalid_argument, file.string(),
         ": cannot read the file: ", std::generic_category().message(errno));
  };
  if (input.number < 0) refuse();
  std::vector<uint8_t> bytes;
  constexpr size_t kChunk = size_t{1} << 20;
  bytes.reserve(static_cast<size_t>(std::max<int64_t>(status.st_size, 0)));
  for (;;) {
    const size_t done = bytes.size();
    require_size(static_cast<int64_t>(done));
    bytes.resize(done + kChunk);
    const ssize_t got = ::read(input.number, bytes.data() + done, kChunk);
    if (got < 0 && errno != EINTR) refuse();
    bytes.resize(done + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return bytes;
  }
}

}  // namespace orrery
