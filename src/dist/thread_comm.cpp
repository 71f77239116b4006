#include "dist/thread_comm.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"

namespace orrery {

namespace {

// What one rank brings to a collective; all must bring the same operation and size.
struct Offer {
  const char* operation = "";
  const void* in = nullptr;
  void* out = nullptr;
  int64_t bytes = 0;
  int64_t step = 0;  // bytes from block to block of an exchange
};

template <typename Load, typename Store>
void sum_in_rank_order(int64_t begin, int64_t end, int ranks, const Load& load,
                       const Store& store) {
  for (int64_t i = begin; i < end; ++i) {
    float sum = load(0, i);
    for (int rank = 1; rank < ranks; ++rank) sum += load(rank, i);
    for (int rank = 0; rank < ranks; ++rank) store(rank, i, sum);
  }
}

}  // namespace

// One lock for all groups: collectives are few and long beside it.
struct ThreadWorld::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::string failure;  // not empty: some rank is gone
  ErrorKind failure_kind = ErrorKind::device;
  std::exception_ptr first;
  std::vector<bool> ended;  // ranks whose body has returned
  std::map<std::vector<int>, std::unique_ptr<Group>> groups;
  int64_t part_rows = 0;
};

class ThreadWorld::Group {
 public:
  Group(Shared& shared, std::vector<int> ranks)
      : shared_(shared), ranks_(std::move(ranks)), offers_(ranks_.size()), here_(ranks_.size()) {}

  int64_t part_rows() const { return shared_.part_rows; }
  int size() const { return static_cast<int>(ranks_.size()); }
  const Offer& offer(int member) const { return offers_[static_cast<size_t>(member)]; }

  // Publishes this member's offer and waits for all others'.
  void meet(int member, const Offer& mine) {
    offers_[static_cast<size_t>(member)] = mine;
    {
      std::unique_lock lock(shared_.mutex);
      const int64_t round = arrive(member);
      shared_.changed.wait(lock, [&] { return round_ != round || gone(); });
      if (round_ == round) {
        // Whoever comes later must not count on this member.
        here_[static_cast<size_t>(member)] = false;
        refuse(mine);
      }
    }
    for (int other = 0; other < size(); ++other) {
      const Offer& theirs = offer(other);
      require(std::strcmp(theirs.operation, mine.operation) == 0 && theirs.bytes == mine.bytes,
              ErrorKind::device, "ranks disagree: rank ", rank(member), " calls ", mine.operation,
              " of ", mine.bytes, " bytes, rank ", rank(other), " ", theirs.operation, " of ",
              theirs.bytes);
    }
  }

  // Waits until all members are done with each other's memory. They all come, whatever happens
  // elsewhere: nothing between meet() and here can fail. So no member frees memory that another one
  // reads.
  void part(int member) {
    std::unique_lock lock(shared_.mutex);
    const int64_t round = arrive(member);
    shared_.changed.wait(lock, [&] { return round_ != round; });
  }

  // What a failed run left half done.
  void reset() { here_.assign(here_.size(), false); }

 private:
  int rank(int member) const { return ranks_[static_cast<size_t>(member)]; }

  int64_t arrive(int member) {
    const int64_t round = round_;
    here_[static_cast<size_t>(member)] = true;
    if (std::all_of(here_.begin(), here_.end(), [](bool here) { return here; })) {
      here_.assign(here_.size(), false);
      ++round_;
      shared_.changed.notify_all();
    }
    return round;
  }
  // The member that will never come, if one is known.
  std::optional<int> missing() const {
    for (int member = 0; member < size(); ++member) {
      if (!here_[static_cast<size_t>(member)] && shared_.ended[static_cast<size_t>(rank(member))]) {
        return rank(member);
      }
    }
    return std::nullopt;
  }
  bool gone() const { return !shared_.failure.empty() || missing(); }
  [[noreturn]] void refuse(const Offer& mine) const {
    if (!shared_.failure.empty()) fail(shared_.failure_kind, shared_.failure);
    fail(ErrorKind::device, mine.operation, ": rank ", *missing(), " ended without taking part");
  }

  Shared& shared_;
  std::vector<int> ranks_;  // of the world
  std::vector<Offer> offers_;
  std::vector<bool> here_;
  int64_t round_ = 0;
};

class ThreadWorld::Member final : public Communicator {
 public:
  Member(Group& group, int rank) : group_(group), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return group_.size(); }
  int64_t part_rows() const override { return group_.part_rows(); }
  bool shares_process() const override { return true; }

  // Each rank adds up its own slice in rank order and hands the sum to all: no slice has two
  // writers.
  void all_reduce(MutView x) override {
    check("all_reduce", x);
    require(x.dtype == DType::f32 || x.dtype == DType::bf16, "all_reduce: cannot add ",
            name_of(x.dtype));
    group_.meet(rank_, {"all_reduce", x.data, x.mut(), x.bytes()});
    const int64_t begin = x.numel() * rank_ / size(), end = x.numel() * (rank_ + 1) / size();
    if (x.dtype == DType::f32) {
      sum_in_rank_order(
          begin, end, size(), [&](int r, int64_t i) { return floats(r)[i]; },
          [&](int r, int64_t i, float sum) { floats(r)[i] = sum; });
    } else {
      sum_in_rank_order(
          begin, end, size(), [&](int r, int64_t i) { return to_float(halves(r)[i]); },
          [&](int r, int64_t i, float sum) { halves(r)[i] = to_bf16(sum); });
    }
    group_.part(rank_);
  }

  void exchange(std::span<const Trade> trades) override {
    for (const Trade& trade : trades) {
      check_trade(trade, size(), DeviceKind::cpu);
      const int64_t block = trade.x.bytes() / size(), width = size_of(trade.x.dtype);
      group_.meet(rank_, {"exchange", trade.x.data, trade.out.mut(), trade.x.bytes(),
                          trade.x.stride(0) * width});
      for (int from = 0; from < size(); ++from) {
        if (from == rank_) continue;
        copy(trade.out, from * trade.out.stride(0) * width, from, rank_ * group_.offer(from).step,
             block);
      }
      group_.part(rank_);
    }
  }

  void exchange_halos(const Halos& halos) override {
    check_halos(halos, DeviceKind::cpu);
    pass_on(halos.from_previous, halos.to_next, rank_ - 1);
    pass_on(halos.from_next, halos.to_previous, rank_ + 1);
  }

  void all_gather(MutView out, View x) override {
    check("all_gather", x);
    check("all_gather", out);
    require(out.bytes() == x.bytes() * size(), "all_gather: ", out.shape, " does not hold ", size(),
            " times ", x.shape);
    group_.meet(rank_, {"all_gather", x.data, out.mut(), x.bytes()});
    for (int from = 0; from < size(); ++from) copy(out, from * x.bytes(), from, 0, x.bytes());
    group_.part(rank_);
  }

  void broadcast(MutView x, int root) override {
    check("broadcast", x);
    require(root >= 0 && root < size(), "broadcast: root ", root, " of ", size(), " ranks");
    group_.meet(rank_, {"broadcast", x.data, x.mut(), x.bytes()});
    if (rank_ != root) copy(x, 0, root, 0, x.bytes());
    group_.part(rank_);
  }

  void barrier() override {
    group_.meet(rank_, {"barrier"});
    group_.part(rank_);
  }

 private:
  static void check(const char* op, const View& x) {
    require(x.device == DeviceKind::cpu, op, ": ranks that are threads move host memory only");
    require(x.contiguous(), op, ": needs a contiguous tensor, has ", x.shape, " with strides ",
            x.strides);
  }
  float* floats(int rank) const { return static_cast<float*>(group_.offer(rank).out); }
  bf16* halves(int rank) const { return static_cast<bf16*>(group_.offer(rank).out); }
  void copy(const MutView& out, int64_t to, int from_rank, int64_t from, int64_t bytes) const {
    char* target = static_cast<char*>(out.mut()) + to;
    const char* source = static_cast<const char*>(group_.offer(from_rank).in) + from;
    if (bytes > 0 && target != source) std::memcpy(target, source, static_cast<size_t>(bytes));
  }

  // Everyone offers `to`; the blocks of rank `source`, if there is one, become `from`.
  void pass_on(const MutView& from, const View& to, int source) const {
    const int64_t width = size_of(to.dtype), blocks = to.dim(0);
    group_.meet(rank_, {"exchange_halos", to.data, nullptr, to.bytes(), to.stride(0) * width});
    if (source >= 0 && source < size()) {
      for (int64_t i = 0; i < blocks; ++i) {
        copy(from, i * from.stride(0) * width, source, i * group_.offer(source).step,
             to.bytes() / blocks);
      }
    }
    group_.part(rank_);
  }

  Group& group_;
  int rank_;
};

ThreadWorld::ThreadWorld(int size, int64_t part_rows)
    : size_(size), shared_(std::make_unique<Shared>()) {
  require(size >= 1, "thread ranks: ", size, " ranks");
  shared_->part_rows = part_rows;
  shared_->ended.resize(static_cast<size_t>(size));
}
ThreadWorld::~ThreadWorld() = default;

std::vector<int> ThreadWorld::local() const {
  std::vector<int> ranks(static_cast<size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::unique_ptr<Communicator> ThreadWorld::group(int rank, const std::vector<int>& ranks) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank);
  require(mine != ranks.end(), "thread ranks: rank ", rank, " is not in the group it asks for");
  const std::scoped_lock lock(shared_->mutex);
  std::unique_ptr<Group>& group = shared_->groups[ranks];
  if (!group) group = std::make_unique<Group>(*shared_, ranks);
  return std::make_unique<Member>(*group, static_cast<int>(mine - ranks.begin()));
}

void ThreadWorld::run(const std::function<void(int rank)>& body,
                      const std::function<void()>& on_failure) {
  shared_->failure.clear();
  shared_->first = nullptr;
  shared_->ended.assign(static_cast<size_t>(size_), false);
  for (auto& [ranks, group] : shared_->groups) group->reset();
  const auto failed = [&](int rank, ErrorKind kind, const char* message) {
    {
      const std::scoped_lock lock(shared_->mutex);
      if (shared_->first) return;
      shared_->first = std::current_exception();
      shared_->failure = concat("rank ", rank, " failed: ", message);
      shared_->failure_kind = kind;
      shared_->changed.notify_all();
    }
    // Only now: whoever this releases fails too, and must not be taken for the first.
    if (on_failure) on_failure();
  };
  const auto live = [&](int rank, const std::function<void(int)>& life) {
    try {
      life(rank);
    } catch (const Error& error) {
      failed(rank, error.kind(), error.what());
    } catch (const std::exception& error) {
      failed(rank, ErrorKind::device, error.what());
    }
    const std::scoped_lock lock(shared_->mutex);
    shared_->ended[static_cast<size_t>(rank)] = true;
    shared_->changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < size_; ++rank) {
    try {
      threads.emplace_back(live, rank, std::cref(body));
    } catch (const std::exception&) {
      live(rank, [](int) {
        fail(
            ErrorKind::out_of_memory,
            "the system starts no thread for it (a limit on processes or memory); use fewer ranks");
      });
    }
  }
  live(0, body);
  for (std::thread& thread : threads) thread.join();
  if (shared_->first) std::rethrow_exception(shared_->first);
}

}  // namespace orrery
