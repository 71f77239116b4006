#include "engine/guardrail.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/json.h"

extern char** environ;

namespace orrery {

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMaxAnswer = 1 << 20;
constexpr int kPollMilliseconds = 50;

// What goes wrong here leaves no verdict.
template <typename... Parts>
void check(bool good, const Parts&... sentence) {
  require(good, ErrorKind::guardrail, sentence...);
}

// A descriptor, closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

// A file without a name that holds `parts`, at its beginning. A pipe would need a second thread or
// a signal handler here; a file can be read at leisure, or not at all.
Descriptor input_file(std::initializer_list<std::string_view> parts) {
  std::string path = (std::filesystem::temp_directory_path() / "orrery-guardrail-XXXXXX").string();
  Descriptor file(mkostemp(path.data(), O_CLOEXEC));
  check(file.get() >= 0, "guardrail: cannot make a temporary file in ",
        std::filesystem::temp_directory_path().string(), ": ", std::strerror(errno));
  unlink(path.c_str());
  for (std::string_view part : parts) {
    while (!part.empty()) {
      const ssize_t n = write(file.get(), part.data(), part.size());
      if (n < 0 && errno == EINTR) continue;
      check(n > 0,
            "guardrail: cannot write the temporary file for the command: ", std::strerror(errno));
      part.remove_prefix(static_cast<size_t>(n));
    }
  }
  lseek(file.get(), 0, SEEK_SET);
  return file;
}

// The running command, in a process group of its own so that what it started ends with it.
class Child {
 public:
  Child(const std::string& command, const char* stage, int input, int output) {
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, input, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    posix_spawnattr_setpgroup(&attributes, 0);
    const std::string script = command + " \"$@\"";
    const std::array<const char*, 6> argv{"/bin/sh",   "-c",  script.c_str(),
                                          "guardrail", stage, nullptr};
    const int error = posix_spawn(&pid_, "/bin/sh", &files, &attributes,
                                  const_cast<char**>(argv.data()), environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (error != 0) pid_ = -1;
    check(error == 0, "guardrail: cannot start /bin/sh: ", std::strerror(error));
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(-pid_, SIGKILL);
    if (!reaped_) waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool has_ended() {
    if (!reaped_) reaped_ = waitpid(pid_, &status_, WNOHANG) == pid_;
    return reaped_;
  }
  int status() const { return status_; }

 private:
  pid_t pid_ = -1;
  int status_ = 0;
  bool reaped_ = false;
};

std::string excerpt(const std::string& text) {
  constexpr size_t kShown = 120;
  return text.size() <= kShown ? text : text.substr(0, kShown) + "...";
}

// What the command printed, once it has ended with status 0.
std::string answer_of(const std::string& command, const char* stage, const Descriptor& input,
                      double timeout, const Guardrail::Waiting& waiting) {
  std::array<int, 2> ends{};
  check(pipe2(ends.data(), O_CLOEXEC) == 0,
        "guardrail: cannot make a pipe: ", std::strerror(errno));
  Descriptor from(ends[0]), to(ends[1]);
  Child child(command, stage, input.get(), to.get());
  to.close();

  const auto start = Clock::now();
  std::string answer;
  for (bool open = true; open || !child.has_ended();) {
    waiting();
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    check(elapsed < timeout, "guardrail: the command gave no verdict on the ", stage, " within ",
          timeout, " seconds; that is no approval. Raise --guardrail-timeout or mend \"", command,
          "\"");
    if (!open) {
      poll(nullptr, 0, kPollMilliseconds);
      continue;
    }
    pollfd ready{from.get(), POLLIN, 0};
    if (poll(&ready, 1, kPollMilliseconds) <= 0) continue;
    std::array<char, 4096> buffer;
    const ssize_t n = read(from.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    open = n > 0;
    if (n > 0) answer.append(buffer.data(), static_cast<size_t>(n));
    check(answer.size() <= kMaxAnswer, "guardrail: the command's answer on the ", stage,
          " is longer than ", kMaxAnswer, " bytes; that is no verdict");
  }
  const int status = child.status();
  check(!WIFSIGNALED(status), "guardrail: the command ended by signal ", WTERMSIG(status),
        " on the ", stage, "; that is no approval (\"", command, "\")");
  check(WEXITSTATUS(status) == 0, "guardrail: the command ended with status ", WEXITSTATUS(status),
        " on the ", stage, "; that is no approval (\"", command, "\")");
  return answer;
}

void require_approval(const std::string& answer, const char* stage) {
  std::string verdict, reason;
  try {
    const Json json = Json::parse(answer, "guardrail");
    verdict = json.at("verdict").as_string();
    if (const Json* text = json.find("reason"); text != nullptr && text->is_string())
      reason = text->as_string();
  } catch (const Error& error) {
    fail(ErrorKind::guardrail, "guardrail: the command's answer on the ", stage, " is no verdict (",
         error.what(),
         "); expected {\"verdict\": \"approved\"} or {\"verdict\": \"blocked\"}, got: ",
         excerpt(answer));
  }
  if (verdict == kGuardrailApproved) return;
  check(verdict == "blocked", "guardrail: the command's verdict on the ", stage, " is \"",
        excerpt(verdict), "\"; expected approved or blocked");
  fail(ErrorKind::blocked, "guardrail: the ", stage,
       stage == std::string_view("frames") ? " are" : " is", " blocked", reason.empty() ? "" : ": ",
       reason, "; nothing was written");
}

}  // namespace

Guardrail::Guardrail(std::string command, double timeout_seconds)
    : command_(std::move(command)), timeout_seconds_(timeout_seconds) {
  require(std::isfinite(timeout_seconds) && timeout_seconds > 0,
          "guardrail: the timeout must be a positive number of "
          "seconds, got ",
          timeout_seconds);
}

void Guardrail::check_prompt(const Request& request, const Waiting& waiting) const {
  if (!is_set()) return;
  const std::string line = Json::object()
                               .set("stage", "prompt")
                               .set("prompt", request.prompt)
                               .set("negative_prompt", request.negative_prompt)
                               .dump() +
                           "\n";
  const Descriptor input = input_file({line});
  require_approval(answer_of(command_, "prompt", input, timeout_seconds_, waiting), "prompt");
}

void Guardrail::check_frames(const Frames& frames, double fps, const Waiting& waiting) const {
  if (!is_set()) return;
  const std::string line = Json::object()
                               .set("stage", "frames")
                               .set("count", frames.count)
                               .set("height", frames.height)
                               .set("width", frames.width)
                               .set("fps", fps)
                               .dump() +
                           "\n";
  const Descriptor input =
      input_file({line, {reinterpret_cast<const char*>(frames.rgb.data()), frames.rgb.size()}});
  require_approval(answer_of(command_, "frames", input, timeout_seconds_, waiting), "frames");
}

}  // namespace orrery
