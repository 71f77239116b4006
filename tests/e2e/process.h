// Runs the program as a user does and collects what it said.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "support/source_dir.h"

namespace orrery::e2e {

struct Outcome {
  int status = -1;  // exit status, or 128 + signal
  std::string out;
  std::string err;
};

inline std::string binary() {
  const char* path = std::getenv("ORRERY_BINARY");
  return path != nullptr ? path : "./orrery";
}

inline std::string source_folder() { return source_dir().string(); }
inline std::string pico() { return source_folder() + "/models/cosmos3-pico"; }

class Process {
 public:
  // `program` is looked up in PATH when it is a bare name.
  explicit Process(const std::vector<std::string>& arguments,
                   const std::string& program = binary()) {
    pipe(out_.data());
    pipe(err_.data());
    pid_ = fork();
    if (pid_ == 0) {
      dup2(out_[1], STDOUT_FILENO);
      dup2(err_[1], STDERR_FILENO);
      for (int fd : {out_[0], out_[1], err_[0], err_[1]}) close(fd);
      std::vector<char*> argv{const_cast<char*>(program.c_str())};
      for (const std::string& argument : arguments)
        argv.push_back(const_cast<char*>(argument.c_str()));
      argv.push_back(nullptr);
      execvp(program.c_str(), argv.data());
      _exit(127);
    }
    close(out_[1]);
    close(err_[1]);
  }

  // Blocks until the text appears on standard error.
  void wait_for(const std::string& text) {
    char buffer[256];
    while (err_text_.find(text) == std::string::npos) {
      const ssize_t n = read(err_[0], buffer, sizeof buffer);
      if (n <= 0) return;
      err_text_.append(buffer, static_cast<size_t>(n));
    }
  }
  pid_t pid() const { return pid_; }
  void signal(int number) const { kill(pid_, number); }

  Outcome finish() {
    Outcome outcome;
    outcome.err = err_text_ + drain(err_[0]);
    outcome.out = drain(out_[0]);
    int status = 0;
    waitpid(pid_, &status, 0);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
  }

 private:
  static std::string drain(int fd) {
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<size_t>(n));
    close(fd);
    return text;
  }

  std::array<int, 2> out_{}, err_{};
  pid_t pid_ = -1;
  std::string err_text_;
};

inline Outcome run(const std::vector<std::string>& arguments) {
  return Process(arguments).finish();
}

}  // namespace orrery::e2e
