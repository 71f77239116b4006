#include "progress.h"

#include <unistd.h>

#include <cstdio>

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
  std::fprintf(stderr, "%s\n", text.c_str());
}

void ProgressPrinter::operator()(const Progress& p) {
  if (quiet_) return;
  const bool finished = p.step >= p.total;
  const double left =
      p.step > 0 ? p.seconds / static_cast<double>(p.step) * static_cast<double>(p.total - p.step)
                 : 0;
  if (terminal_) {
    const int filled = p.total > 0 ? static_cast<int>(kBarWidth * p.step / p.total) : 0;
    std::string bar(static_cast<size_t>(filled), '#');
    bar.resize(kBarWidth, '.');
    std::fprintf(stderr, "\r\033[K%-8s [%s] %lld/%lld  %.1f s", p.stage.c_str(), bar.c_str(),
                 static_cast<long long>(p.step), static_cast<long long>(p.total), p.seconds);
    if (p.step > 0 && !finished) std::fprintf(stderr, ", %.0f s left", left);
    bar_shown_ = true;
    if (finished) {
      std::fputc('\n', stderr);
      bar_shown_ = false;
    }
    std::fflush(stderr);
    return;
  }
  const bool first = p.stage != last_stage_;
  if (first) last_line_ = 0;
  last_stage_ = p.stage;
  if (finished) {
    std::fprintf(stderr, "%s: %lld/%lld in %.2f s\n", p.stage.c_str(),
                 static_cast<long long>(p.step), static_cast<long long>(p.total), p.seconds);
  } else if (p.step > 0 && p.seconds - last_line_ >= kSecondsBetweenLines) {
    last_line_ = p.seconds;
    std::fprintf(stderr, "%s: %lld/%lld, %.0f s left\n", p.stage.c_str(),
                 static_cast<long long>(p.step), static_cast<long long>(p.total), left);
  }
}

}  // namespace orrery::cli
