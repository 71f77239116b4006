#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "orrery/output.h"

namespace orrery {

namespace fs = std::filesystem;

namespace {

// Temporary files and folders are named so; the process that writes one holds a lock on it.
constexpr std::string_view kPrefix = ".orrery-", kSuffix = ".tmp", kHexDigits = "0123456789abcdef";
constexpr size_t kRandomDigits = 16;

std::string temporary_name() {
  std::random_device random;
  std::string name(kPrefix);
  for (size_t i = 0; i < kRandomDigits; ++i) name += kHexDigits[random() % kHexDigits.size()];
  return name.append(kSuffix);
}

bool is_temporary_name(std::string_view name) {
  return name.size() == kPrefix.size() + kRandomDigits + kSuffix.size() &&
         name.starts_with(kPrefix) && name.ends_with(kSuffix) &&
         name.substr(kPrefix.size(), kRandomDigits).find_first_not_of(kHexDigits) ==
             std::string_view::npos;
}

[[noreturn]] void refuse(const fs::path& target, int code) {
  const ErrorKind kind = code == ENOENT   ? ErrorKind::not_found
                         : code == ENOMEM ? ErrorKind::out_of_memory
                                          : ErrorKind::invalid_argument;
  fail(kind, target.string(), ": cannot write the file: ", std::generic_category().message(code));
}

// Takes the lock of a new temporary file or folder. False when another process took it for a
// leftover first. Where a file system knows no locks, leftovers stay: they cannot be told from
// files in use.
bool hold(int descriptor) {
  struct stat status;
  return (::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) &&
         ::fstat(descriptor, &status) == 0 && status.st_nlink > 0;
}

// Removes temporary files and folders of this user whose writers are gone.
void remove_leftovers(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (!is_temporary_name(at->path().filename().string())) continue;
    const int descriptor =
        ::open(at->path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) continue;
    struct stat status;
    const bool is_left = ::fstat(descriptor, &status) == 0 && status.st_uid == ::geteuid() &&
                         (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode)) &&
                         ::flock(descriptor, LOCK_EX | LOCK_NB) == 0;
    std::error_code ignored;
    if (is_left) fs::remove_all(at->path(), ignored);
    ::close(descriptor);
  }
}

// A number of a descriptor of this process in "/proc/self/fd" or "/dev/fd".
std::optional<int> number_of(const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

struct Resolved {
  fs::path path;                  // no link in it, as far as it exists
  std::optional<int> descriptor;  // the target is this open descriptor
};

// Follows links. Those of open descriptors have targets that are no paths ("pipe:[7]"), or paths
// that must not be replaced behind the back of whoever holds them open.
Resolved resolve(const fs::path& target) {
  if (target == "-") return {target, STDOUT_FILENO};
  const fs::path descriptors = fs::path("/proc") / std::to_string(::getpid()) / "fd";
  std::error_code error;
  fs::path path = fs::absolute(target);
  constexpr int kMaxLinks = 40;
  for (int i = 0; i < kMaxLinks; ++i) {
    const fs::path folder = fs::weakly_canonical(path.parent_path(), error);
    if (error) refuse(target, error.value());
    path = folder / path.filename();
    if (folder == descriptors) {
      if (const auto number = number_of(path.filename().string())) return {path, number};
    }
    const fs::path link = fs::read_symlink(path, error);
    if (error) return {path, std::nullopt};
    path = link.is_absolute() ? link : folder / link;
  }
  refuse(target, ELOOP);
}

// Makes the missing folders of `folder`; returns them, outermost first.
std::vector<fs::path> make_folders(const fs::path& folder, const fs::path& target) {
  std::vector<fs::path> missing;
  for (fs::path at = folder; ::access(at.c_str(), F_OK) != 0 && errno == ENOENT;
       at = at.parent_path()) {
    missing.insert(missing.begin(), at);
  }
  std::vector<fs::path> made;
  for (const fs::path& at : missing) {
    if (::mkdir(at.c_str(), 0777) == 0) {
      made.push_back(at);
    } else if (errno != EEXIST) {
      const int code = errno;
      for (; !made.empty(); made.pop_back()) ::rmdir(made.back().c_str());
      fail(ErrorKind::invalid_argument, target.string(), ": cannot make the folder ", at.string(),
           ": ", std::generic_category().message(code));
    }
  }
  return made;
}

void flush(int descriptor, const fs::path& target) {
  // Pipes and some file systems have nothing to flush.
  if (::fsync(descriptor) != 0 && errno != EINVAL && errno != EROFS && errno != ENOTSUP) {
    refuse(target, errno);
  }
}

// The name is safe on the disk only when its folder is; the file is, whatever comes of this.
void flush_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

}  // namespace

struct OutputFile::State {
  fs::path target;     // as given
  fs::path path;       // to be replaced; empty: written as it is
  fs::path temporary;  // empty: none
  std::vector<fs::path> made;
  int descriptor = -1;
  bool is_standard_output = false;

  explicit State(const fs::path& given) : target(given) {}
  ~State() {
    if (descriptor >= 0) ::close(descriptor);
    if (!temporary.empty()) ::unlink(temporary.c_str());
    for (; !made.empty(); made.pop_back()) ::rmdir(made.back().c_str());
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void open();
  void open_in_place(const fs::path& resolved, mode_t mode);
  void open_temporary(const struct stat* existing);
};

void OutputFile::State::open() {
  require(!target.empty(), "the name of an output file is empty");
  const Resolved resolved = resolve(target);
  if (resolved.descriptor) {
    is_standard_output = *resolved.descriptor == STDOUT_FILENO;
    descriptor = ::fcntl(*resolved.descriptor, F_DUPFD_CLOEXEC, 0);
    if (descriptor < 0) refuse(target, errno);
    return;
  }
  const bool names_folder = target.filename().empty();
  struct stat status;
  if (::stat(resolved.path.c_str(), &status) == 0) {
    require(!S_ISDIR(status.st_mode), target.string(), " is a folder; give the name of a file");
    if (!S_ISREG(status.st_mode)) return open_in_place(resolved.path, status.st_mode);
    if (::access(resolved.path.c_str(), W_OK) != 0) refuse(target, errno);
    path = resolved.path;
    return open_temporary(&status);
  }
  if (errno != ENOENT) refuse(target, errno);
  require(!names_folder, target.string(), " is a folder; give the name of a file");
  path = resolved.path;
  open_temporary(nullptr);
}

void OutputFile::State::open_in_place(const fs::path& resolved, mode_t mode) {
  require(!S_ISBLK(mode), target.string(),
          " is a block device, which would be overwritten; give the name of a file");
  require(!S_ISSOCK(mode), target.string(),
          " is a socket; give the name of a file, a pipe or a device");
  // Without O_NONBLOCK a pipe that nobody reads would be waited for here.
  descriptor = ::open(resolved.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  require(descriptor >= 0 || errno != ENXIO, target.string(),
          ": no process reads this pipe; start the reader first");
  if (descriptor < 0) refuse(target, errno);
  ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) & ~O_NONBLOCK);
}

void OutputFile::State::open_temporary(const struct stat* existing) {
  const fs::path folder = path.parent_path();
  made = make_folders(folder, target);
  remove_leftovers(folder);
  constexpr int kAttempts = 100;
  const mode_t mode = existing ? existing->st_mode & 0777 : 0666;
  for (int i = 0; temporary.empty(); ++i) {
    const fs::path name = folder / temporary_name();
    descriptor = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (descriptor < 0 && (errno != EEXIST || i == kAttempts)) refuse(target, errno);
    if (descriptor < 0) continue;
    if (hold(descriptor)) {
      temporary = name;
    } else {
      ::close(std::exchange(descriptor, -1));
      require(i < kAttempts, target.string(), ": cannot keep a temporary file in ",
              folder.string());
    }
  }
  if (!existing) return;
  // The owner can be kept by root alone; the mode without it, since chown may clear bits.
  if (::fchown(descriptor, existing->st_uid, existing->st_gid) != 0) errno = 0;
  if (::fchmod(descriptor, existing->st_mode & 07777) != 0) refuse(target, errno);
}

OutputFile::OutputFile(const fs::path& target) : state_(std::make_unique<State>(target)) {
  state_->open();  // what it made before it fails is undone
}
OutputFile::~OutputFile() = default;
OutputFile::OutputFile(OutputFile&&) noexcept = default;
OutputFile& OutputFile::operator=(OutputFile&&) noexcept = default;

const fs::path& OutputFile::target() const { return state_->target; }
bool OutputFile::is_standard_output() const { return state_->is_standard_output; }

void OutputFile::write(const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(state_->descriptor, from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse(state_->target, errno);
    from += written;
    bytes -= static_cast<size_t>(written);
  }
}

void OutputFile::commit() {
  State& state = *state_;
  flush(state.descriptor, state.target);
  if (!state.temporary.empty()) {
    if (::rename(state.temporary.c_str(), state.path.c_str()) != 0) refuse(state.target, errno);
    state.temporary.clear();
    state.made.clear();
    flush_folder(state.path.parent_path());
  }
  // Held until now, for the lock.
  if (::close(std::exchange(state.descriptor, -1)) != 0) refuse(state.target, errno);
}

OutputFolder::OutputFolder(const fs::path& target) : target_(target) {
  const fs::path parent = target_.parent_path();
  remove_leftovers(parent);
  constexpr int kAttempts = 100;
  for (int i = 0; lock_ < 0; ++i) {
    require(i < kAttempts, target_.string(), ": cannot keep a temporary folder in ",
            parent.string());
    folder_ = parent / temporary_name();
    if (::mkdir(folder_.c_str(), 0777) != 0) {
      if (errno != EEXIST) refuse(target_, errno);
      continue;
    }
    lock_ = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (lock_ >= 0 && !hold(lock_)) ::close(std::exchange(lock_, -1));
  }
}

OutputFolder::~OutputFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(folder_, ignored);
  ::close(lock_);
}

void OutputFolder::commit() {
  // An empty folder of that name gives way.
  if (::rename(folder_.c_str(), target_.c_str()) != 0) refuse(target_, errno);
  committed_ = true;
  flush_folder(target_.parent_path());
}

std::optional<FileClaims::Claim> FileClaims::claim(const std::string& flag, const fs::path& file) {
  Claim claim;
  claim.flag = flag;
  const Resolved resolved = resolve(file);
  claim.resolved = resolved.path;
  struct stat status;
  claim.exists = (resolved.descriptor ? ::fstat(*resolved.descriptor, &status)
                                      : ::stat(resolved.path.c_str(), &status)) == 0;
  if (!claim.exists) return claim;
  if (S_ISCHR(status.st_mode)) return std::nullopt;
  claim.device = status.st_dev;
  claim.inode = status.st_ino;
  return claim;
}

bool FileClaims::Claim::is_same(const Claim& other) const {
  return resolved == other.resolved ||
         (exists && other.exists && device == other.device && inode == other.inode);
}

void FileClaims::reads(const std::string& flag, const fs::path& file) {
  if (file.empty() || file == "-") return;
  if (auto input = claim(flag, file)) inputs_.push_back(std::move(*input));
}

OutputFile FileClaims::open(const std::string& flag, const fs::path& file) {
  require(!file.empty(), flag, ": the file name is empty");
  if (auto output = claim(flag, file)) {
    for (const Claim& other : outputs_) {
      require(!output->is_same(other), flag, " and ", other.flag, " name the same file, ",
              file.string(), "; give each a file of its own");
    }
    for (const Claim& other : inputs_) {
      require(!output->is_same(other), flag, ": ", file.string(), " is the input of ", other.flag,
              " and would be overwritten; give another name");
    }
    outputs_.push_back(std::move(*output));
  }
  try {
    return OutputFile(file);
  } catch (const Error& error) {
    fail(error.kind(), flag, ": ", error.what());
  }
}

}  // namespace orrery
