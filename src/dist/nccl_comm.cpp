#include "dist/nccl_comm.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstring>
#include <mutex>

#include "base/error.h"

namespace orrery {

namespace {

void check(ncclResult_t result, const char* operation) {
  if (result == ncclSuccess) return;
  fail(ErrorKind::device, operation, ": NCCL: ", ncclGetErrorString(result));
}

ncclDataType_t type_of(const char* operation, DType dtype) {
  require(dtype == DType::f32 || dtype == DType::bf16, operation, ": cannot add ", name_of(dtype));
  return dtype == DType::f32 ? ncclFloat32 : ncclBfloat16;
}

// NCCL adds in an order that depends on the topology alone: the same bytes on every rank, and again
// in the next run on the same machine.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Communicator& host, cudaStream_t stream, int device)
      : rank_(host.rank()), size_(host.size()), device_(device), stream_(stream) {
    ncclUniqueId id;
    if (rank_ == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    host.broadcast(make_mut_view(&id, {static_cast<int64_t>(sizeof id)}, DType::u8), 0);
    use_device();
    check(ncclCommInitRank(&comm_, size_, id, rank_), "ncclCommInitRank");
  }
  ~NcclCommunicator() override {
    const std::scoped_lock lock(ending_);
    if (comm_ != nullptr) ncclCommDestroy(comm_);
    cudaFree(word_);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_reduce(MutView x) override {
    const ncclDataType_t type = type_of("all_reduce", x.dtype);
    const ncclComm_t comm = ready("all_reduce", {x});
    check(ncclAllReduce(x.data, x.mut(), count(x.numel()), type, ncclSum, comm, stream_),
          "all_reduce");
  }

  void all_to_all(MutView out, View x) override {
    require(out.shape == x.shape && x.rank() > 0 && x.dim(0) % size_ == 0,
            "all_to_all: cannot cut ", x.shape, " in ", size_, " equal parts for ", out.shape);
    const ncclComm_t comm = ready("all_to_all", {out, x});
    const size_t part = count(x.bytes() / size_);
    const auto* in = static_cast<const char*>(x.data);
    auto* to = static_cast<char*>(out.mut());
    check(ncclGroupStart(), "all_to_all");
    for (int peer = 0; peer < size_; ++peer) {
      const size_t at = count(peer) * part;
      check(ncclSend(in + at, part, ncclUint8, peer, comm, stream_), "all_to_all");
      check(ncclRecv(to + at, part, ncclUint8, peer, comm, stream_), "all_to_all");
    }
    check(ncclGroupEnd(), "all_to_all");
  }

  void all_gather(MutView out, View x) override {
    require(out.bytes() == x.bytes() * size_, "all_gather: ", out.shape, " does not hold ", size_,
            " times ", x.shape);
    const ncclComm_t comm = ready("all_gather", {out, x});
    check(ncclAllGather(x.data, out.mut(), count(x.bytes()), ncclUint8, comm, stream_),
          "all_gather");
  }

  void broadcast(MutView x, int root) override {
    require(root >= 0 && root < size_, "broadcast: root ", root, " of ", size_, " ranks");
    const ncclComm_t comm = ready("broadcast", {x});
    check(ncclBroadcast(x.data, x.mut(), count(x.bytes()), ncclUint8, root, comm, stream_),
          "broadcast");
  }

  // The stream meets the other ranks', and the caller waits for that.
  void barrier() override {
    if (word_ == nullptr) {
      use_device();
      require(cudaMalloc(&word_, sizeof(float)) == cudaSuccess, ErrorKind::out_of_memory,
              "barrier: no memory for one number on CUDA device ", device_);
      cudaMemsetAsync(word_, 0, sizeof(float), stream_);
    }
    all_reduce(make_mut_view(word_, {1}, DType::f32, DeviceKind::cuda));
    require(cudaStreamSynchronize(stream_) == cudaSuccess, ErrorKind::device,
            "barrier: CUDA device ", device_, " reports an error");
  }

  // Kernels that wait for a rank that is gone end, and whoever waits for them goes on.
  void abort() override {
    const std::scoped_lock lock(ending_);
    if (comm_ != nullptr) ncclCommAbort(comm_);
    comm_ = nullptr;
  }

 private:
  static size_t count(int64_t n) { return static_cast<size_t>(n); }

  ncclComm_t ready(const char* op, std::initializer_list<View> views) {
    for (const View& x : views) {
      require(x.device == DeviceKind::cuda, op, ": NCCL ranks move device memory only");
      require(x.contiguous(), op, ": needs a contiguous tensor, has ", x.shape, " with strides ",
              x.strides);
    }
    const std::scoped_lock lock(ending_);
    require(comm_ != nullptr, ErrorKind::device, op, ": another rank of this group has failed");
    return comm_;
  }

  void use_device() const {
    require(cudaSetDevice(device_) == cudaSuccess, ErrorKind::device, "CUDA device ", device_,
            " cannot be used");
  }

  int rank_, size_, device_;
  cudaStream_t stream_;
  void* word_ = nullptr;  // what barrier() adds up
  std::mutex ending_;     // abort() comes from another thread
  ncclComm_t comm_ = nullptr;
};

}  // namespace

bool is_nccl_built() { return true; }

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, void* stream, int device) {
  return std::make_unique<NcclCommunicator>(host, static_cast<cudaStream_t>(stream), device);
}

}  // namespace orrery
