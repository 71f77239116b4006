#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace orrery {
namespace {

namespace fs = std::filesystem;

int affinity_cores() {
  // The kernel refuses a mask smaller than its own, which may hold more than CPU_SETSIZE cores.
  for (int cores = CPU_SETSIZE; cores <= 1 << 20; cores *= 2) {
    std::vector<cpu_set_t> mask(static_cast<size_t>(cores / CPU_SETSIZE));
    const size_t bytes = mask.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data()) == 0) return CPU_COUNT_S(bytes, mask.data());
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Version 2 of control groups: "max 100000" or "150000 100000", in microseconds.
std::optional<double> quota_of(const fs::path& group) {
  std::ifstream in(group / "cpu.max");
  double quota = 0, period = 0;
  if (in >> quota >> period && quota > 0 && period > 0) return quota / period;
  std::ifstream first(group / "cpu.cfs_quota_us"), second(group / "cpu.cfs_period_us");
  if (first >> quota && second >> period && quota > 0 && period > 0) return quota / period;
  return std::nullopt;
}

// The least quota of the process's groups and of those above them.
std::optional<double> group_quota() {
  const fs::path root = "/sys/fs/cgroup";
  std::ifstream groups("/proc/self/cgroup");
  std::optional<double> least;
  for (std::string line; std::getline(groups, line);) {
    // "0::/a/b" or "4:cpu,cpuacct:/a/b"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_unified = controllers.empty();
    if (!is_unified && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const fs::path mount = is_unified ? root : root / controllers;
    fs::path inside = fs::path(line.substr(second + 1)).relative_path();
    for (;; inside = inside.parent_path()) {
      if (const auto quota = quota_of(mount / inside))
        least = std::min(least.value_or(1e9), *quota);
      if (inside.empty()) break;
    }
  }
  return least;
}

}  // namespace

int usable_cores() {
  int cores = std::max(1, affinity_cores());
  if (const auto quota = group_quota()) {
    cores = std::min(cores, std::max(1, static_cast<int>(std::ceil(*quota))));
  }
  return cores;
}

}  // namespace orrery
