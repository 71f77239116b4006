#include "progress.h"

#include <unistd.h>

#include <array>
#include <cstdio>

#include "printable.h"

namespace orrery::cli {

namespace {
constexpr int kBarWidth = 30;
constexpr double kSecondsBetweenLines = 5;
}  // namespace

ProgressPrinter::ProgressPrinter(bool quiet)
    : quiet_(quiet), terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressPrinter::~ProgressPrinter() { clear(); }

void ProgressPrinter::clear() {
  if (bar_shown_) std::fputs("\r\033[K", stderr);
  bar_shown_ = false;
}

void ProgressPrinter::line(const std::string& text) {
  if (quiet_) return;
  clear();
  std::fprintf(stderr, "%s\n", printable(text).c_str());
}

void ProgressPrinter::operator()(const Progress& p) {
  if (quiet_) return;
  const bool finished = p.step >= p.total;
  const auto step = static_cast<long long>(p.step), total = static_cast<long long>(p.total);
  std::string name = p.stage;
  if (p.chunks > 1) name += " " + std::to_string(p.chunk + 1) + " of " + std::to_string(p.chunks);
  std::string left;  // of the whole request
  if (p.seconds_left && !finished) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), ", %.0f s left", *p.seconds_left);
    left = text.data();
  }
  if (terminal_) {
    const int filled = p.total > 0 ? static_cast<int>(kBarWidth * p.step / p.total) : 0;
    std::string bar(static_cast<size_t>(filled), '#');
    bar.resize(kBarWidth, '.');
    std::fprintf(stderr, "\r\033[K%-8s [%s] %lld/%lld  %.1f s%s", name.c_str(), bar.c_str(), step,
                 total, p.seconds, left.c_str());
    bar_shown_ = true;
    if (finished) {
      std::fputc('\n', stderr);
      bar_shown_ = false;
    }
    std::fflush(stderr);
    return;
  }
  if (p.step == 0) last_line_ = 0;
  if (finished) {
    std::fprintf(stderr, "%s: %lld/%lld in %.2f s\n", name.c_str(), step, total, p.seconds);
  } else if (p.step > 0 && p.seconds - last_line_ >= kSecondsBetweenLines) {
    last_line_ = p.seconds;
    std::fprintf(stderr, "%s: %lld/%lld%s\n", name.c_str(), step, total, left.c_str());
  }
}

}  // namespace orrery::cli
