#include "cuda/transfer.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

namespace orrery::cuda {

namespace {

// One thread copies 5 to 10 GB/s out of the page cache, the link takes 50: four threads, two
// buffers each, so that one fills while the other travels.
constexpr size_t kChunk = size_t{8} << 20;
constexpr int kMaxWorkers = 4;
constexpr int kSlotsPerWorker = 2;

struct Slot {
  void* memory = nullptr;
  cudaEvent_t done = nullptr;
};

int worker_count() {
  return int(std::clamp(std::thread::hardware_concurrency(), 1u, unsigned(kMaxWorkers)));
}

}  // namespace

struct Transfer::State {
  Context& context;
  std::vector<std::array<Slot, kSlotsPerWorker>> workers;

  explicit State(Context& c) : context(c) {}

  ~State() {
    for (auto& slots : workers) {
      for (Slot& slot : slots) {
        if (slot.done) cudaEventDestroy(slot.done);
        if (slot.memory) cudaFreeHost(slot.memory);
      }
    }
  }

  // Pinned memory is made at the first transfer that needs it.
  void prepare(size_t count) {
    if (workers.size() < count) context.settle();
    while (workers.size() < count) {
      workers.emplace_back();
      for (Slot& slot : workers.back()) {
        check(cudaHostAlloc(&slot.memory, kChunk, cudaHostAllocDefault));
        check(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
      }
    }
  }

  // Calls move(slot, offset, size) for every chunk, chunks dealt to workers in turn.
  template <typename Move>
  void run(size_t bytes, const Move& move) {
    const size_t chunks = (bytes + kChunk - 1) / kChunk;
    const size_t count = std::min<size_t>(size_t(worker_count()), chunks);
    prepare(count);
    std::vector<std::exception_ptr> errors(count);
    const auto work = [&](size_t worker) {
      try {
        context.stream();  // a new thread starts with device 0 current
        size_t turn = 0;
        for (size_t chunk = worker; chunk < chunks; chunk += count) {
          Slot& slot = workers[worker][turn++ % kSlotsPerWorker];
          check(cudaEventSynchronize(slot.done));  // its last use
          const size_t offset = chunk * kChunk;
          move(slot, offset, std::min(kChunk, bytes - offset));
        }
      } catch (...) {
        errors[worker] = std::current_exception();
      }
    };
    {
      std::vector<std::jthread> threads;
      for (size_t worker = 1; worker < count; ++worker) threads.emplace_back(work, worker);
      work(0);
    }
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
};

Transfer::Transfer(Context& context) : state_(std::make_unique<State>(context)) {}
Transfer::~Transfer() = default;

void Transfer::upload(void* device, const void* host, size_t bytes) {
  const Stream stream = state_->context.stream();
  state_->run(bytes, [&](Slot& slot, size_t offset, size_t size) {
    std::memcpy(slot.memory, static_cast<const std::byte*>(host) + offset, size);
    check(cudaMemcpyAsync(static_cast<std::byte*>(device) + offset, slot.memory, size,
                          cudaMemcpyHostToDevice, stream));
    check(cudaEventRecord(slot.done, stream));
  });
}

void Transfer::download(void* host, const void* device, size_t bytes) {
  const Stream stream = state_->context.stream();
  state_->run(bytes, [&](Slot& slot, size_t offset, size_t size) {
    check(cudaMemcpyAsync(slot.memory, static_cast<const std::byte*>(device) + offset, size,
                          cudaMemcpyDeviceToHost, stream));
    check(cudaEventRecord(slot.done, stream));
    check(cudaEventSynchronize(slot.done));
    std::memcpy(static_cast<std::byte*>(host) + offset, slot.memory, size);
  });
}

BesideUploads::~BesideUploads() {
  if (!stream_) return;
  context_.stream();
  cudaStreamSynchronize(stream_);
  for (const Event event : done_) {
    if (event) cudaEventDestroy(event);
  }
  if (given_) cudaEventDestroy(given_);
  cudaStreamDestroy(stream_);
}

Event BesideUploads::new_event() {
  Event event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

void BesideUploads::upload(int lane, void* device, const void* host, size_t bytes) {
  const Stream calls = context_.stream();
  if (!stream_) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  if (!given_) given_ = new_event();
  const auto at = static_cast<size_t>(lane);
  if (done_.size() <= at) done_.resize(at + 1);
  if (!done_[at]) done_[at] = new_event();
  check(cudaEventRecord(given_, calls));
  check(cudaStreamWaitEvent(stream_, given_, 0));
  check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_));
  check(cudaEventRecord(done_[at], stream_));
}

void BesideUploads::await(int lane) {
  const auto at = static_cast<size_t>(lane);
  if (at >= done_.size() || !done_[at]) return;
  check(cudaStreamWaitEvent(context_.stream(), done_[at], 0));
}

}  // namespace orrery::cuda
