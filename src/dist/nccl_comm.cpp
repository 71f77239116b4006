#include "dist/nccl_comm.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"

namespace orrery {

namespace {

// Tickets that can be told apart. Waiting for one that has been lapped waits for a later one: the
// link runs in order.
constexpr size_t kTickets = 32;
// How soon a broken connection is noticed.
constexpr std::chrono::milliseconds kWatchPeriod{250};
// A call into NCCL that has not returned after this is waiting for the rank that failed.
constexpr std::chrono::seconds kCallPatience{1};

void check(ncclResult_t result, const char* operation) {
  if (result == ncclSuccess) return;
  fail(ErrorKind::device, operation, ": NCCL: ", ncclGetErrorString(result), " (",
       ncclGetLastError(nullptr), ")");
}

void check(cudaError_t error, const char* operation) {
  require(error == cudaSuccess, ErrorKind::device, operation,
          ": cuda: ", cudaGetErrorString(error));
}

size_t count(int64_t n) { return static_cast<size_t>(n); }

// NCCL adds in an order that depends on the topology alone: the same bytes on every rank, and again
// in the next run on the same machine.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> host, const NcclDevice& device)
      : host_(std::move(host)),
        rank_(host_->rank()),
        size_(host_->size()),
        device_(device),
        compute_(static_cast<cudaStream_t>(device.compute)),
        link_(static_cast<cudaStream_t>(device.link)) {
    // What can fail on one rank alone comes first: the others then hear of it from `host`.
    use_device("communicator");
    check(cudaMalloc(&word_, sizeof(float)), "communicator");
    check(cudaEventCreateWithFlags(&made_, cudaEventDisableTiming), "communicator");
    for (cudaEvent_t& event : arrived_) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "communicator");
    }
    begin();
  }

  ~NcclCommunicator() override {
    stop_watching();
    cudaSetDevice(device_.device);
    // Leaving in good order waits for the others. A rank that has failed does not.
    if (const ncclComm_t comm = comm_) {
      if (std::uncaught_exceptions() > 0)
        ncclCommAbort(comm);
      else
        ncclCommDestroy(comm);
    }
    for (cudaEvent_t event : arrived_) cudaEventDestroy(event);
    cudaEventDestroy(made_);
    cudaFree(word_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int64_t part_rows() const override { return device_.part_rows; }
  bool shares_process() const override { return host_->shares_process(); }
  void set_observer(WorkObserver* observer) override { observer_ = observer; }

  void all_reduce(MutView x) override { finish(start_all_reduce(x)); }
  void exchange(std::span<const Trade> trades) override { finish(start_exchange(trades)); }

  Ticket start_all_reduce(MutView x) override {
    require(x.dtype == DType::f32 || x.dtype == DType::bf16, "all_reduce: cannot add ",
            name_of(x.dtype));
    check_view("all_reduce", x);
    const ncclDataType_t type = x.dtype == DType::f32 ? ncclFloat32 : ncclBfloat16;
    return launch("all_reduce", [&](ncclComm_t comm) {
      check(ncclAllReduce(x.data, x.mut(), count(x.numel()), type, ncclSum, comm, link_),
            "all_reduce");
    });
  }

  // One group of sends and receives: a single kernel that fills every link at once.
  Ticket start_exchange(std::span<const Trade> trades) override {
    for (const Trade& trade : trades) check_trade(trade, size_, DeviceKind::cuda);
    return launch("exchange", [&](ncclComm_t comm) {
      check(ncclGroupStart(), "exchange");
      for (const Trade& trade : trades) {
        const size_t bytes = count(trade.x.bytes() / size_);
        for (int peer = 0; peer < size_; ++peer) {
          if (peer == rank_ || bytes == 0) continue;
          check(ncclSend(trade.x.select(0, peer).data, bytes, ncclUint8, peer, comm, link_),
                "exchange");
          check(ncclRecv(trade.out.select(0, peer).mut(), bytes, ncclUint8, peer, comm, link_),
                "exchange");
        }
      }
      check(ncclGroupEnd(), "exchange");
    });
  }

  void exchange_halos(const Halos& halos) override {
    check_halos(halos, DeviceKind::cuda);
    const int64_t blocks = halos.to_next.dim(0);
    if (blocks == 0) return;
    const size_t bytes = count(halos.to_next.bytes() / blocks);
    finish(launch("exchange_halos", [&](ncclComm_t comm) {
      const auto swap_with = [&](int peer, const View& sent, const MutView& received) {
        if (peer < 0 || peer >= size_) return;
        for (int64_t i = 0; i < blocks; ++i) {
          check(ncclSend(sent.select(0, i).data, bytes, ncclUint8, peer, comm, link_),
                "exchange_halos");
          check(ncclRecv(received.select(0, i).mut(), bytes, ncclUint8, peer, comm, link_),
                "exchange_halos");
        }
      };
      check(ncclGroupStart(), "exchange_halos");
      swap_with(rank_ - 1, halos.to_previous, halos.from_previous);
      swap_with(rank_ + 1, halos.to_next, halos.from_next);
      check(ncclGroupEnd(), "exchange_halos");
    }));
  }

  void finish(Ticket ticket) override {
    use_device("finish");
    check(cudaStreamWaitEvent(compute_, arrived_[static_cast<size_t>(ticket) % kTickets], 0),
          "finish");
  }

  void all_gather(MutView out, View x) override {
    require(out.bytes() == x.bytes() * size_, "all_gather: ", out.shape, " does not hold ", size_,
            " times ", x.shape);
    check_view("all_gather", out);
    check_view("all_gather", x);
    finish(launch("all_gather", [&](ncclComm_t comm) {
      check(ncclAllGather(x.data, out.mut(), count(x.bytes()), ncclUint8, comm, link_),
            "all_gather");
    }));
  }

  void broadcast(MutView x, int root) override {
    require(root >= 0 && root < size_, "broadcast: root ", root, " of ", size_, " ranks");
    check_view("broadcast", x);
    finish(launch("broadcast", [&](ncclComm_t comm) {
      check(ncclBroadcast(x.data, x.mut(), count(x.bytes()), ncclUint8, root, comm, link_),
            "broadcast");
    }));
  }

  // The stream meets the other ranks', and the caller waits for that.
  void barrier() override {
    use_device("barrier");
    check(cudaMemsetAsync(word_, 0, sizeof(float), compute_), "barrier");
    all_reduce(make_mut_view(word_, {1}, DType::f32, DeviceKind::cuda));
    check(cudaStreamSynchronize(compute_), "barrier");
  }

  // Kernels that wait for a rank that is gone end, and whoever waits for them goes on.
  void abort() override {
    const std::scoped_lock lock(ending_);
    end("another rank of this group has failed");
  }

  void renew() override {
    if (comm_ != nullptr) return;
    stop_watching();
    use_device("renew");
    begin();
  }

 private:
  void begin() {
    ncclUniqueId id{};
    if (rank_ == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    host_->broadcast(make_mut_view(&id, {static_cast<int64_t>(sizeof id)}, DType::u8), 0);
    host_->barrier();
    ncclComm_t comm = nullptr;
    check(ncclCommInitRank(&comm, size_, id, rank_), "ncclCommInitRank");
    comm_ = comm;
    leaving_ = false;
    watcher_ = std::thread([this] { watch(); });
  }

  void stop_watching() {
    {
      const std::scoped_lock lock(ending_);
      leaving_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) watcher_.join();
  }

  void check_view(const char* op, const View& x) const {
    require(x.device == DeviceKind::cuda, op, ": NCCL ranks move device memory only");
    require(x.contiguous(), op, ": needs a contiguous tensor, has ", x.shape, " with strides ",
            x.strides);
  }

  void use_device(const char* op) const { check(cudaSetDevice(device_.device), op); }

  template <typename Fn>
  Ticket launch(const char* op, const Fn& fn) {
    use_device(op);
    {
      const std::scoped_lock lock(calling_);
      const ncclComm_t comm = comm_;
      require(comm != nullptr, ErrorKind::device, op, ": ", reason_);
      check(cudaEventRecord(made_, compute_), op);
      check(cudaStreamWaitEvent(link_, made_, 0), op);
      if (observer_ != nullptr) observer_->begin(op, link_);
      fn(comm);
      if (observer_ != nullptr) observer_->end(link_);
      ++ticket_;
      check(cudaEventRecord(arrived_[static_cast<size_t>(ticket_) % kTickets], link_), op);
    }
    // Threads of one process share locks of the driver. A thread that waits inside it (for memory,
    // for a kernel to be loaded) while its device waits for a collective which another thread can
    // no longer launch would wait for ever: so none goes on before all have launched.
    if (host_->shares_process()) host_->barrier();
    return ticket_;
  }

  // With ending_ held. Sets the flag that waiting kernels look at, then frees the communicator,
  // which no call may be using unless that call itself waits for a rank that is gone.
  void end(const std::string& reason) {
    const ncclComm_t comm = comm_;
    if (comm == nullptr) return;
    std::unique_lock call(calling_, kCallPatience);
    reason_ = reason;
    comm_ = nullptr;
    ncclCommAbort(comm);
    changed_.notify_all();
  }

  // Connections break without a call that could say so: kernels just wait.
  void watch() {
    std::unique_lock lock(ending_);
    while (!changed_.wait_for(lock, kWatchPeriod, [&] { return leaving_ || comm_ == nullptr; })) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
      if (asked == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) continue;
      end(concat("NCCL: ", ncclGetErrorString(asked == ncclSuccess ? state : asked)));
    }
  }

  std::unique_ptr<Communicator> host_;
  int rank_, size_;
  NcclDevice device_;
  cudaStream_t compute_, link_;
  cudaEvent_t made_ = nullptr;  // what `compute` has been given is done
  std::array<cudaEvent_t, kTickets> arrived_{};
  Ticket ticket_ = 0;
  void* word_ = nullptr;  // what barrier() adds up
  WorkObserver* observer_ = nullptr;

  std::atomic<ncclComm_t> comm_{nullptr};  // null once it has ended
  std::string reason_;                     // why it has; written before comm_
  std::timed_mutex calling_;               // held by calls into NCCL
  std::mutex ending_;                      // held by whoever watches or ends it
  std::condition_variable changed_;
  bool leaving_ = false;
  std::thread watcher_;
};

}  // namespace

bool is_nccl_built() { return true; }

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host,
                                                     const NcclDevice& device) {
  return std::make_unique<NcclCommunicator>(std::move(host), device);
}

}  // namespace orrery
