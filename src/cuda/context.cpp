#include "cuda/context.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/error.h"
#include "cuda/cuda_backend.h"
#include "cuda/kernels.h"

namespace orrery::cuda {

namespace {

std::string place(const std::source_location& where) {
  const char* slash = std::strrchr(where.file_name(), '/');
  return concat(slash ? slash + 1 : where.file_name(), ":", where.line(), ", in ",
                where.function_name());
}

std::string version(int number) { return concat(number / 1000, ".", number % 1000 / 10); }

double gib(size_t bytes) { return double(bytes) / double(size_t{1} << 30); }

// The number of usable devices, or a refusal that says why there is none.
int count_devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    fail(ErrorKind::device, "device cuda: ",
         driver == 0 ? std::string("no NVIDIA driver is installed")
                     : concat("the NVIDIA driver supports CUDA ", version(driver)),
         ", this build needs ", version(CUDART_VERSION),
         " or newer; update it, or use --device cpu");
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    fail(ErrorKind::device,
         "device cuda: the driver shows no GPU (check CUDA_VISIBLE_DEVICES and nvidia-smi); use "
         "--device cpu to run without one");
  }
  if (error != cudaSuccess) {
    fail(ErrorKind::device, "device cuda: the GPUs cannot be listed: ", cudaGetErrorString(error),
         " (", cudaGetErrorName(error), ")");
  }
  return count;
}

void require_device(int device) {
  const int count = count_devices();
  require(device >= 0 && device < count, ErrorKind::device, "device cuda:", device, ": only ",
          count, count == 1 ? " GPU is visible" : " GPUs are visible", ", numbered from 0");
}

}  // namespace

void check(int cuda_error, const std::source_location& where) {
  if (cuda_error == cudaSuccess) [[likely]]
    return;
  const auto error = static_cast<cudaError_t>(cuda_error);
  fail(ErrorKind::device, "cuda: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ", ",
       place(where), ")");
}

void check_cublas(int status, const std::source_location& where) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  const auto error = static_cast<cublasStatus_t>(status);
  fail(ErrorKind::device, "cublasLt: ", cublasLtGetStatusName(error), " (", place(where), ")");
}

void check_cudnn(int status, const std::source_location& where) {
  if (status == CUDNN_STATUS_SUCCESS) [[likely]]
    return;
  char detail[512] = "";
  cudnnGetLastErrorString(detail, sizeof detail);
  fail(ErrorKind::device, "cudnn: ", cudnnGetErrorString(static_cast<cudnnStatus_t>(status)),
       detail[0] ? ", " : "", detail, " (", place(where), ")");
}

DeviceMemory device_memory(int device) {
  require_device(device);
  check(cudaSetDevice(device));
  DeviceMemory memory;
  check(cudaMemGetInfo(&memory.free, &memory.total));
  return memory;
}

Context::Context(int device) : device_(device) {
  require_device(device);
  check(cudaSetDevice(device));
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device));
  num_multiprocessors_ = properties.multiProcessorCount;
  require(properties.major >= 8, ErrorKind::unsupported, "device cuda:", device, ": ",
          properties.name, " has compute capability ", properties.major, ".", properties.minor,
          ", 8.0 or newer is needed");
  require(kernels_run_here(), ErrorKind::unsupported, "device cuda:", device,
          ": this build has no code for ", properties.name, " (compute capability ",
          properties.major, ".", properties.minor,
          "); rebuild with -DCMAKE_CUDA_ARCHITECTURES=", properties.major, properties.minor);
  int driver = 0;
  check(cudaDriverGetVersion(&driver));
  description_ =
      concat("cuda: ", properties.name, ", ", num_multiprocessors_, " multiprocessors, ",
             int64_t(gib(properties.totalGlobalMem)), " GiB, driver for CUDA ", version(driver),
             ", cuBLASLt ", cublasLtGetVersion(), ", cuDNN ", cudnnGetVersion());
  // The kernel module tells its version where the system shows it.
  std::ifstream module("/sys/module/nvidia/version");
  if (std::string number; module >> number) driver_ = number + ", ";
  driver_ += "CUDA " + version(driver);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  check(cudaStreamCreateWithPriority(&link_, cudaStreamNonBlocking, highest));
}

Context::~Context() {
  settle();
  cudaStreamDestroy(link_);
  cudaStreamDestroy(stream_);
}

void Context::settle() const {
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_);
  cudaStreamSynchronize(link_);
}

Stream Context::stream() const {
  check(cudaSetDevice(device_));
  return stream_;
}

Buffer Context::allocate(size_t bytes) {
  require_eager("allocation");
  settle();
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes ? bytes : 1);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky: the next call must not see it
    const DeviceMemory memory = device_memory(device_);
    fail(ErrorKind::out_of_memory, "device cuda:", device_, ": ", gib(bytes), " GiB are needed, ",
         gib(memory.free), " of ", gib(memory.total),
         " GiB are free; use a smaller size, fewer frames, or --offload");
  }
  check(error);
  allocated_ += bytes;
  peak_ = std::max(peak_, allocated_);
  return Buffer(
      data, bytes, DeviceKind::cuda,
      [](void* context, void* p, size_t size) {
        auto* self = static_cast<Context*>(context);
        self->allocated_ -= size;
        if (self->on_release) self->on_release(p, size);
        self->settle();  // what uses it is done,
        cudaFree(p);     // or waits for nobody else: uploads beside the calls
      },
      this);
}

// Memory that is touched before it is registered: the pages come from this thread, large ones where
// the system has them, instead of one by one inside the driver.
Buffer Context::allocate_pinned(size_t bytes) const {
  constexpr size_t kHugePage = size_t{2} << 20, kPage = 4096;
  check(cudaSetDevice(device_));
  const size_t size = (std::max(bytes, size_t{1}) + kHugePage - 1) / kHugePage * kHugePage;
  void* data = std::aligned_alloc(kHugePage, size);
  require(data != nullptr, ErrorKind::out_of_memory, "host memory: cannot allocate ", gib(size),
          " GiB");
  madvise(data, size, MADV_HUGEPAGE);
  for (size_t at = 0; at < size; at += kPage)
    static_cast<volatile std::byte*>(data)[at] = std::byte{0};
  const cudaError_t error = cudaHostRegister(data, size, cudaHostRegisterDefault);
  if (error != cudaSuccess) {
    cudaGetLastError();  // not sticky
    std::free(data);
    fail(ErrorKind::out_of_memory, "host memory: ", gib(size),
         " GiB cannot be pinned: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
  }
  return Buffer(
      data, bytes, DeviceKind::cpu,
      [](void*, void* p, size_t) {
        cudaHostUnregister(p);  // waits for copies from it
        std::free(p);
      },
      nullptr);
}

void Context::require_eager(const char* what) const {
  require(!capturing, ErrorKind::device, "cuda: ", what,
          " cannot be part of a replayed step; move it in front of the step");
}

void* Scratch::get(size_t bytes) {
  if (blocks_.empty() || blocks_.back().bytes() < bytes) {
    if (!context_.has_graphs) blocks_.clear();
    blocks_.push_back(context_.allocate(bytes));
  }
  return blocks_.back().data();
}

MutView Scratch::tensor(Shape shape, DType dtype) {
  void* data = get(static_cast<size_t>(shape.numel() * size_of(dtype)));
  return make_mut_view(data, shape, dtype, DeviceKind::cuda);
}

}  // namespace orrery::cuda
