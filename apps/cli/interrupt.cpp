#include "interrupt.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string_view>

namespace orrery::cli {

namespace {

// All that a signal handler may touch.
volatile std::sig_atomic_t received = 0;

// The functions below run inside a signal handler: no allocation, no standard streams.

void say(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

// A line of /proc/self/maps: "begin-end perms offset device inode   path". The path, if the address
// lies in it.
std::string_view mapped_path(std::string_view line, uint64_t address) {
  uint64_t begin = 0, end = 0;
  const char* const last = line.data() + line.size();
  auto parsed = std::from_chars(line.data(), last, begin, 16);
  if (parsed.ptr == last || *parsed.ptr != '-') return {};
  parsed = std::from_chars(parsed.ptr + 1, last, end, 16);
  const size_t slash = line.find('/');
  if (address < begin || address >= end || slash == std::string_view::npos) return {};
  return line.substr(slash);
}

// The file mapped at an address, in `buffer`; empty when there is none.
std::string_view file_at(uint64_t address, char* buffer, size_t size) {
  const int maps = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (maps < 0) return {};
  std::string_view path;
  size_t held = 0;
  for (ssize_t got; path.empty() && (got = ::read(maps, buffer + held, size - held)) > 0;) {
    held += static_cast<size_t>(got);
    size_t from = 0;
    for (size_t i = 0; i < held && path.empty(); ++i) {
      if (buffer[i] != '\n') continue;
      path = mapped_path({buffer + from, i - from}, address);
      from = i + 1;
    }
    if (!path.empty() || from == 0) break;
    std::memmove(buffer, buffer + from, held - from);
    held -= from;
  }
  ::close(maps);
  return path;
}

void on_bus_error(int signal, siginfo_t* info, void*) {
  char buffer[8192];
  const std::string_view path =
      file_at(reinterpret_cast<uintptr_t>(info->si_addr), buffer, sizeof buffer);
  if (path.empty()) {  // no file's fault: as without this handler
    std::signal(signal, SIG_DFL);
    return;
  }
  say("\norrery: ");
  say(path);
  say(": the file was cut short or replaced in place while it was read; nothing was written. Run "
      "again once it is whole\n");
  ::_exit(1);
}

}  // namespace

void watch_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { received = 1; };
  action.sa_flags = SA_RESETHAND;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // as under nohup
  }
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  struct sigaction bus {};
  bus.sa_sigaction = on_bus_error;
  bus.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &bus, nullptr);
}

bool interrupted() { return received != 0; }

StopOnSignal::StopOnSignal(bool says_so)
    : watcher_([source = source_, says_so](const std::stop_token& done) mutable {
        constexpr std::chrono::milliseconds kPeriod{50};
        std::mutex mutex;
        std::condition_variable_any ended;
        std::unique_lock lock(mutex);
        while (!interrupted()) {
          ended.wait_for(lock, done, kPeriod, [] { return false; });
          if (done.stop_requested()) return;
        }
        if (says_so) std::fputs("\nstopping; once more to stop at once\n", stderr);
        source.request_stop();
      }) {}

}  // namespace orrery::cli
