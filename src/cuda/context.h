// What the parts of one CUDA backend share: the device, its streams, error checks, scratch memory.
#pragma once

#include <cstddef>
#include <functional>
#include <source_location>
#include <string>
#include <vector>

#include "tensor/tensor.h"

struct CUstream_st;
struct CUevent_st;

namespace orrery::cuda {

using Stream = CUstream_st*;
using Event = CUevent_st*;

// Throws Error{device} with the error's name, its text and the place of the call. The argument is a
// cudaError_t, cublasStatus_t or cudnnStatus_t; zero is success.
void check(int cuda_error, const std::source_location& where = std::source_location::current());
void check_cublas(int status, const std::source_location& where = std::source_location::current());
void check_cudnn(int status, const std::source_location& where = std::source_location::current());

class Context {
 public:
  // Refuses, with what to do about it: no driver, no such device, a device this build cannot run
  // on.
  explicit Context(int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int device() const { return device_; }
  int num_multiprocessors() const { return num_multiprocessors_; }
  const std::string& description() const { return description_; }
  const std::string& driver() const { return driver_; }

  // Makes the device current for the calling thread and returns the stream of all its work.
  Stream stream() const;
  // The stream of transfers between devices, which run beside the work and ahead of it where both
  // want the same multiprocessor. Its users order it against stream().
  Stream link() const { return link_; }

  // Makes the device current and waits for both streams, errors aside. Before memory comes or goes:
  // the driver may wait for the device then with a lock held that other threads of the process need
  // to launch the very collective which the device waits for.
  void settle() const;

  Buffer allocate(size_t bytes);
  // Page-locked host memory. From any thread. Throws Error{out_of_memory}.
  Buffer allocate_pinned(size_t bytes) const;
  // The most that allocate() has had out at once.
  size_t peak_bytes() const { return peak_; }
  // Called with each range before it is freed, so that what was derived from it is forgotten.
  std::function<void(const void* data, size_t bytes)> on_release;

  // True while calls are recorded into a graph: nothing may touch the host or allocate.
  bool capturing = false;
  // True once a graph exists: it names addresses, so memory the backend keeps for itself stays.
  bool has_graphs = false;
  void require_eager(const char* what) const;

 private:
  int device_;
  int num_multiprocessors_ = 0;
  std::string description_, driver_;
  Stream stream_ = nullptr, link_ = nullptr;
  size_t allocated_ = 0, peak_ = 0;
};

// Device memory that grows to the largest request. The pointer is good until the next get() of the
// same Scratch; calls run in order, so reuse by later operations is safe. Outgrown blocks are freed
// unless a captured graph may name them.
class Scratch {
 public:
  explicit Scratch(Context& context) : context_(context) {}
  void* get(size_t bytes);
  MutView tensor(Shape shape, DType dtype);

 private:
  Context& context_;
  std::vector<Buffer> blocks_;
};

}  // namespace orrery::cuda
