#include "orrery/job.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "engine/fingerprint.h"
#include "engine/job_state.h"

namespace orrery {

namespace {

// What a rank tells the others, of one size.
struct Verdict {
  int64_t kind = -1;  // an ErrorKind, or -1: all is well
  uint64_t digest = 0;
  char message[4096] = {};
};

Verdict verdict_of(const std::function<std::string()>& check) {
  Verdict verdict;
  const auto failed = [&](ErrorKind kind, const char* message) {
    verdict.kind = static_cast<int64_t>(kind);
    std::strncpy(verdict.message, message, sizeof verdict.message - 1);
  };
  try {
    const std::string text = check();
    verdict.digest = digest(text.data(), text.size());
  } catch (const Error& error) {
    failed(error.kind(), error.what());
  } catch (const std::exception& error) {
    failed(ErrorKind::device, error.what());
  }
  return verdict;
}

}  // namespace

Job::Job(std::unique_ptr<State> state) : state_(std::move(state)) {}
Job::Job(Job&&) noexcept = default;
Job& Job::operator=(Job&&) noexcept = default;
Job::~Job() = default;

Job Job::join() {
  auto state = std::make_unique<State>();
  if (mpi_job_size() > 1) state->world = make_mpi_world();
  return Job(std::move(state));
}

int Job::rank() const { return state_->world ? state_->world->rank() : 0; }
int Job::size() const { return state_->world ? state_->world->size() : 1; }
bool Job::failed_together() const { return state_->failed_together; }

void Job::agree(const std::function<std::string()>& check) {
  if (!state_->world) {
    check();
    return;
  }
  Verdict mine = verdict_of(check);
  std::vector<Verdict> all(static_cast<size_t>(size()));
  constexpr auto kSize = static_cast<int64_t>(sizeof(Verdict));
  state_->world->all().all_gather(make_mut_view(all.data(), {size(), kSize}, DType::u8),
                                  make_view(&mine, {kSize}, DType::u8));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].kind < 0) continue;
    state_->failed_together = true;
    const std::string where = rank == 0 ? "" : concat("rank ", rank, ": ");
    fail(static_cast<ErrorKind>(all[rank].kind), where, all[rank].message);
  }
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].digest == all[0].digest) continue;
    state_->failed_together = true;
    fail(ErrorKind::invalid_argument, "rank ", rank,
         " was given another request than rank 0; start every rank with the same flags, files and "
         "environment");
  }
}

void Job::abort(int status) {
  if (state_->world) state_->world->abort(status);
}

}  // namespace orrery
