// orrery: the command line.
#include <cstdio>
#include <optional>

#include "commands.h"
#include "parse.h"
#include "printable.h"

namespace orrery::cli {

int exit_status(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument:
    case ErrorKind::not_found:
    case ErrorKind::corrupt:
    case ErrorKind::unsupported:
    case ErrorKind::numeric: return 2;
    case ErrorKind::blocked: return 3;
    case ErrorKind::guardrail: return 4;
    case ErrorKind::cancelled: return 130;
    case ErrorKind::out_of_memory:
    case ErrorKind::device: return 1;
  }
  return 1;
}

namespace {

int run(int argc, char** argv, Job& job) {
  Call call{{}, job, {}};
  Answer answer;
  const Command* command = nullptr;
  for (int i = 0; i < argc; ++i) call.line += (i ? " " : "") + std::string(argv[i]);
  // All ranks of a job must be given the same.
  job.agree([&] {
    command = &parse(argc, argv, call.flags, answer);
    return call.line;
  });
  if (!answer.text.empty()) {
    if (job.rank() == 0) std::fputs(answer.text.c_str(), stdout);
    return 0;
  }
  if (job.size() > 1 && !command->runs_on_ranks) {
    throw Error(ErrorKind::invalid_argument,
                "only generate and bench run on several ranks; start this command without mpirun");
  }
  return command->run(call);
}

}  // namespace

}  // namespace orrery::cli

int main(int argc, char** argv) {
  std::optional<orrery::Job> job;
  // A rank that fails ends all, unless all have failed of the same: then rank 0 tells.
  const auto ended = [&](const char* message, int status) {
    const int rank = job ? job->rank() : 0;
    const bool together = job && job->failed_together();
    if (rank == 0)
      std::fprintf(stderr, "orrery: %s\n", orrery::cli::printable(message).c_str());
    else if (!together)
      std::fprintf(stderr, "orrery: rank %d: %s\n", rank, orrery::cli::printable(message).c_str());
    if (job && !together) job->abort(status);
    return status;
  };
  try {
    job.emplace(orrery::Job::join());
    return orrery::cli::run(argc, argv, *job);
  } catch (const orrery::Error& error) {
    return ended(error.what(), orrery::cli::exit_status(error.kind()));
  } catch (const std::exception& error) {
    return ended(error.what(), 1);
  }
}
