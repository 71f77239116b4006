// Processes that a launcher (mpirun) started together, as the ranks of one request.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "orrery/export.h"

namespace ORRERY_API orrery {

class Job {
 public:
  // Joins the job that this process was started for; a process without a launcher is alone: rank 0
  // of 1. Once per process, before anything else; the job must outlive every engine. Throws Error
  // when the launcher started several processes and this build has no MPI.
  static Job join();
  Job(Job&&) noexcept;
  Job& operator=(Job&&) noexcept;
  ~Job();

  int rank() const;
  int size() const;

  // Every rank calls this with its own checks, which return a text that must be the same
  // everywhere. When a check fails on any rank, or the texts differ, all ranks throw the same Error
  // (of the lowest rank that failed) and failed_together() is true from then on.
  void agree(const std::function<std::string()>& check);
  bool failed_together() const;

  // Ends all processes of the job with this status. Returns when this process is alone.
  void abort(int status);

  struct State;
  const State& state() const { return *state_; }

 private:
  explicit Job(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace orrery
