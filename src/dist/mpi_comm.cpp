#include "dist/mpi_comm.h"

#include <mpi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "base/error.h"

namespace orrery {

namespace {

// Messages are counted in int by MPI; pieces stay well below, and scratch memory small.
constexpr int64_t kPiece = int64_t{1} << 26;     // bytes
constexpr int64_t kSumPiece = int64_t{1} << 22;  // elements

void check(int code, const char* operation) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail(ErrorKind::device, operation, ": ", std::string(text, static_cast<size_t>(length)));
}

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm comm) : comm_(comm) {
    // Errors become exceptions; main ends the job.
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  ~MpiCommunicator() override {
    // Freeing may wait for the other ranks. One that has failed does not: the job is about to end.
    if (comm_ != MPI_COMM_WORLD && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  // Each rank adds up its slice of a piece in rank order and hands the sum to all: the order does
  // not depend on the MPI library, and every rank has the same bytes.
  void all_reduce(MutView x) override {
    require_host("all_reduce", x);
    require(x.dtype == DType::f32 || x.dtype == DType::bf16, "all_reduce: cannot add ",
            name_of(x.dtype));
    const int64_t total = x.numel(), width = size_of(x.dtype);
    auto* data = static_cast<std::byte*>(x.mut());
    for (int64_t begin = 0; begin < total; begin += kSumPiece) {
      sum_piece(data + begin * width, std::min(kSumPiece, total - begin), x.dtype);
    }
  }

  void exchange(std::span<const Trade> trades) override {
    for (const Trade& trade : trades) {
      check_trade(trade, size_, DeviceKind::cpu);
      const int64_t block = trade.x.bytes() / size_;
      for_shifts([&](int next, int previous) {
        if (next == rank_) return;
        send_receive("exchange", next, trade.x.select(0, next).data, block, previous,
                     trade.out.select(0, previous).mut(), block);
      });
    }
  }

  void exchange_halos(const Halos& halos) override {
    check_halos(halos, DeviceKind::cpu);
    const int previous = rank_ > 0 ? rank_ - 1 : MPI_PROC_NULL;
    const int next = rank_ + 1 < size_ ? rank_ + 1 : MPI_PROC_NULL;
    const int64_t blocks = halos.to_next.dim(0);
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t bytes = halos.to_next.bytes() / blocks;
      const auto pass_on = [&](int to, const View& sent, int from, const MutView& received) {
        send_receive("exchange_halos", to, sent.select(0, i).data, bytes, from,
                     received.select(0, i).mut(), bytes);
      };
      pass_on(next, halos.to_next, previous, halos.from_previous);
      pass_on(previous, halos.to_previous, next, halos.from_next);
    }
  }

  void all_gather(MutView out, View x) override {
    require_host("all_gather", x);
    require_host("all_gather", out);
    require(out.bytes() == x.bytes() * size_, "all_gather: ", out.shape, " does not hold ", size_,
            " times ", x.shape);
    const int64_t part = x.bytes();
    auto* to = static_cast<std::byte*>(out.mut());
    for_shifts([&](int next, int previous) {
      send_receive("all_gather", next, x.data, part, previous, to + previous * part, part);
    });
  }

  void broadcast(MutView x, int root) override {
    require_host("broadcast", x);
    require(root >= 0 && root < size_, "broadcast: root ", root, " of ", size_, " ranks");
    auto* data = static_cast<std::byte*>(x.mut());
    for (int64_t at = 0; at < x.bytes(); at += kPiece) {
      const int count = static_cast<int>(std::min(kPiece, x.bytes() - at));
      check(MPI_Bcast(data + at, count, MPI_BYTE, root, comm_), "broadcast");
    }
  }

  void barrier() override { check(MPI_Barrier(comm_), "barrier"); }

 private:
  static void require_host(const char* op, const View& x) {
    require(x.device == DeviceKind::cpu, op, ": MPI ranks move host memory only");
    require(x.contiguous(), op, ": needs a contiguous tensor, has ", x.shape, " with strides ",
            x.strides);
  }

  // Calls fn(rank to send to, rank to receive from) so that every rank meets every other once and
  // itself first.
  template <typename Fn>
  void for_shifts(const Fn& fn) const {
    for (int shift = 0; shift < size_; ++shift) {
      fn((rank_ + shift) % size_, (rank_ + size_ - shift) % size_);
    }
  }

  void send_receive(const char* op, int to, const void* send, int64_t send_bytes, int from,
                    void* receive, int64_t receive_bytes) const {
    const auto* out = static_cast<const std::byte*>(send);
    auto* in = static_cast<std::byte*>(receive);
    if (to == rank_) {
      if (in != out && send_bytes > 0) std::memcpy(in, out, static_cast<size_t>(send_bytes));
      return;
    }
    // At least one message each way, empty or not: the other side may have something to send.
    int64_t at = 0;
    do {
      const auto piece = [&](int64_t bytes) {
        return static_cast<int>(std::clamp(bytes - at, int64_t{0}, kPiece));
      };
      check(MPI_Sendrecv(out + at, piece(send_bytes), MPI_BYTE, to, 0, in + at,
                         piece(receive_bytes), MPI_BYTE, from, 0, comm_, MPI_STATUS_IGNORE),
            op);
      at += kPiece;
    } while (at < std::max(send_bytes, receive_bytes));
  }

  void sum_piece(std::byte* data, int64_t count, DType dtype) {
    const int64_t width = size_of(dtype);
    const auto begin = [&](int rank) { return count * rank / size_; };
    const auto bytes = [&](int rank) { return (begin(rank + 1) - begin(rank)) * width; };
    const int64_t mine = begin(rank_ + 1) - begin(rank_);
    scratch_.resize(static_cast<size_t>(mine * width * size_));
    for_shifts([&](int next, int previous) {
      send_receive("all_reduce", next, data + begin(next) * width, bytes(next), previous,
                   scratch_.data() + previous * mine * width, bytes(rank_));
    });
    std::byte* sums = data + begin(rank_) * width;
    for (int64_t i = 0; i < mine; ++i) {
      if (dtype == DType::f32) {
        const auto* terms = reinterpret_cast<const float*>(scratch_.data());
        float sum = terms[i];
        for (int rank = 1; rank < size_; ++rank) sum += terms[rank * mine + i];
        reinterpret_cast<float*>(sums)[i] = sum;
      } else {
        const auto* terms = reinterpret_cast<const bf16*>(scratch_.data());
        float sum = to_float(terms[i]);
        for (int rank = 1; rank < size_; ++rank) sum += to_float(terms[rank * mine + i]);
        reinterpret_cast<bf16*>(sums)[i] = to_bf16(sum);
      }
    }
    for_shifts([&](int next, int previous) {
      send_receive("all_reduce", next, sums, bytes(rank_), previous, data + begin(previous) * width,
                   bytes(previous));
    });
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::vector<std::byte> scratch_;
};

class JoinedWorld final : public MpiWorld {
 public:
  JoinedWorld() {
    int provided = 0;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    all_ = std::make_unique<MpiCommunicator>(MPI_COMM_WORLD);
    MPI_Comm machine;
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, all_->rank(), MPI_INFO_NULL,
                              &machine),
          "MPI_Comm_split_type");
    MPI_Comm_rank(machine, &local_index_);
    MPI_Comm_free(&machine);
  }
  ~JoinedWorld() override {
    all_.reset();
    MPI_Finalize();
  }
  JoinedWorld(const JoinedWorld&) = delete;
  JoinedWorld& operator=(const JoinedWorld&) = delete;

  int size() const override { return all_->size(); }
  int rank() const override { return all_->rank(); }
  int local_index() const override { return local_index_; }
  std::vector<int> local() const override { return {rank()}; }
  Communicator& all() override { return *all_; }

  std::unique_ptr<Communicator> group(int rank, const std::vector<int>& ranks) override {
    require(rank == this->rank() && std::find(ranks.begin(), ranks.end(), rank) != ranks.end(),
            "mpi ranks: rank ", rank, " is not in the group it asks for");
    MPI_Group everyone, members;
    MPI_Comm comm = MPI_COMM_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &everyone), "MPI_Comm_group");
    check(MPI_Group_incl(everyone, static_cast<int>(ranks.size()), ranks.data(), &members),
          "MPI_Group_incl");
    check(MPI_Comm_create_group(MPI_COMM_WORLD, members, 0, &comm), "MPI_Comm_create_group");
    MPI_Group_free(&members);
    MPI_Group_free(&everyone);
    return std::make_unique<MpiCommunicator>(comm);
  }

  void run(const std::function<void(int rank)>& body,
           const std::function<void()>& on_failure) override {
    try {
      body(rank());
    } catch (...) {
      if (on_failure) on_failure();
      throw;
    }
  }

  [[noreturn]] void abort(int status) override {
    MPI_Abort(MPI_COMM_WORLD, status);
    std::_Exit(status);
  }

 private:
  std::unique_ptr<MpiCommunicator> all_;
  int local_index_ = 0;
};

}  // namespace

std::unique_ptr<MpiWorld> make_mpi_world() { return std::make_unique<JoinedWorld>(); }

}  // namespace orrery
