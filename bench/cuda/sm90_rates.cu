// What one Hopper GPU makes of the instructions that 8-bit kernels are built from.
//
//   nvcc -std=c++20 -O3 -I src -gencode arch=compute_90a,code=sm_90a bench/cuda/sm90_rates.cu \
//       -o build/sm90_rates
//   build/sm90_rates [--seconds 10] [--json FILE] [--commit ID]
//
// Three tables: warpgroup matrix instructions, in short runs and over `--seconds` with the clock
// and the power that nvidia-smi reads meanwhile; conversions and other instructions of a softmax,
// in lanes a clock and multiprocessor; sums in the e4m3 accumulator. Operands are random.
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels/sm90.cuh"

namespace {

using namespace orrery::cuda::sm90;

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// ---- Results ----------------------------------------------------------------------------------

struct Options {
  double seconds = 10;
  std::string json, commit = "unknown";
};

class Report {
 public:
  explicit Report(const Options& options) : options_(options) {
    cudaDeviceProp properties;
    require(cudaGetDeviceProperties(&properties, 0));
    device_ = properties.name;
    std::FILE* pipe =
        popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0", "r");
    char driver[64] = "";
    if (pipe != nullptr && std::fscanf(pipe, "%63s", driver) == 1) driver_ = driver;
    if (pipe != nullptr) pclose(pipe);
  }
  void add(const std::string& name, double value, const char* unit, double clock_mhz = 0,
           double watts = 0) const {
    std::printf("%-44s %10.2f %s", name.c_str(), value, unit);
    if (watts > 0) std::printf("  at %.0f MHz, %.0f W", clock_mhz, watts);
    std::printf("\n");
    std::fflush(stdout);
    if (options_.json.empty()) return;
    std::FILE* file = std::fopen(options_.json.c_str(), "a");
    if (file == nullptr) return;
    char date[16];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
    std::fprintf(file,
                 "{\"bench\": \"rates\", \"case\": \"%s\", \"device\": \"%s\", \"driver\": \"%s\", "
                 "\"commit\": \"%s\", "
                 "\"date\": \"%s\", \"command\": \"build/sm90_rates --seconds %g\", "
                 "\"value\": %.4f, \"unit\": \"%s\"",
                 name.c_str(), device_.c_str(), driver_.c_str(), options_.commit.c_str(), date,
                 options_.seconds, value, unit);
    if (watts > 0) std::fprintf(file, ", \"clock_mhz\": %.0f, \"watts\": %.0f", clock_mhz, watts);
    std::fprintf(file, "}\n");
    std::fclose(file);
  }

 private:
  const Options& options_;
  std::string device_, driver_;
};

// ---- Warpgroup matrix instructions ------------------------------------------------------------

// D registers of an m64nNk instruction as text: "{%0, %1, ...}" and operands.
#define D8(d, i)                                                                              \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
      "+r"(d[i + 6]), "+r"(d[i + 7])
#define D32(d, i) D8(d, i), D8(d, i + 8), D8(d, i + 16), D8(d, i + 24)
#define T32                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define T64                                                                                     \
  T32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
      "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define T128                                                                                       \
  T64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "    \
      "%81, "                                                                                      \
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
      "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
      "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

enum class Type { bf16, e4m3, s8, u8s8 };

// One instruction over 32 bytes of each row, both operands in shared memory or A in registers.
template <Type kType, int kN, bool kRegisters>
struct Multiply;
#define MULTIPLY(type, n, shape, tail, text, count, ...)                                        \
  template <>                                                                                   \
  struct Multiply<Type::type, n, false> {                                                       \
    __device__ static void run(uint32_t (&d)[n / 2], const uint32_t*, uint64_t a, uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned." shape " {" text "}, " count ", 1" tail ";\n" \
                   : __VA_ARGS__                                                                \
                   : "l"(a), "l"(b));                                                           \
    }                                                                                           \
  };
#define MULTIPLY_A(type, n, shape, tail, text, count, ...)                                      \
  template <>                                                                                   \
  struct Multiply<Type::type, n, true> {                                                        \
    __device__ static void run(uint32_t (&d)[n / 2], const uint32_t* a, uint64_t, uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned." shape " {" text "}, " count ", 1" tail ";\n" \
                   : __VA_ARGS__                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                       \
    }                                                                                           \
  };
#define A32 "{%32, %33, %34, %35}, %36"
#define A64 "{%64, %65, %66, %67}, %68"
MULTIPLY(bf16, 64, "m64n64k16.f32.bf16.bf16", ", 1, 1, 0, 0", T32, "%32, %33", D32(d, 0))
MULTIPLY(bf16, 128, "m64n128k16.f32.bf16.bf16", ", 1, 1, 0, 0", T64, "%64, %65", D32(d, 0),
         D32(d, 32))
MULTIPLY(bf16, 256, "m64n256k16.f32.bf16.bf16", ", 1, 1, 0, 0", T128, "%128, %129", D32(d, 0),
         D32(d, 32), D32(d, 64), D32(d, 96))
MULTIPLY(e4m3, 64, "m64n64k32.f32.e4m3.e4m3", ", 1, 1", T32, "%32, %33", D32(d, 0))
MULTIPLY(e4m3, 128, "m64n128k32.f32.e4m3.e4m3", ", 1, 1", T64, "%64, %65", D32(d, 0), D32(d, 32))
MULTIPLY(e4m3, 256, "m64n256k32.f32.e4m3.e4m3", ", 1, 1", T128, "%128, %129", D32(d, 0), D32(d, 32),
         D32(d, 64), D32(d, 96))
MULTIPLY(s8, 64, "m64n64k32.s32.s8.s8", "", T32, "%32, %33", D32(d, 0))
MULTIPLY(s8, 128, "m64n128k32.s32.s8.s8", "", T64, "%64, %65", D32(d, 0), D32(d, 32))
MULTIPLY(s8, 256, "m64n256k32.s32.s8.s8", "", T128, "%128, %129", D32(d, 0), D32(d, 32), D32(d, 64),
         D32(d, 96))
MULTIPLY_A(bf16, 128, "m64n128k16.f32.bf16.bf16", ", 1, 1, 0", T64, A64, D32(d, 0), D32(d, 32))
MULTIPLY_A(e4m3, 128, "m64n128k32.f32.e4m3.e4m3", ", 1, 1", T64, A64, D32(d, 0), D32(d, 32))
MULTIPLY_A(s8, 128, "m64n128k32.s32.s8.s8", "", T64, A64, D32(d, 0), D32(d, 32))
MULTIPLY_A(u8s8, 64, "m64n64k32.s32.u8.s8", "", T32, A32, D32(d, 0))
MULTIPLY_A(u8s8, 128, "m64n128k32.s32.u8.s8", "", T64, A64, D32(d, 0), D32(d, 32))

constexpr int kGroups = 2;             // warpgroups of a CTA
constexpr int kTileBytes = 256 * 128;  // of B; A is 64 rows a warpgroup
constexpr int kMultiplyShared = kTileBytes + kGroups * 64 * 128;

template <Type kType, int kN, bool kRegisters>
__global__ void __launch_bounds__(kGroups * 128, 1)
    multiply_kernel(const uint32_t* operands, uint32_t* sink, int rounds) {
  extern __shared__ __align__(1024) uint32_t shared[];
  for (int i = threadIdx.x; i < kMultiplyShared / 4; i += blockDim.x) shared[i] = operands[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const int group = warp_uniform(threadIdx.x / 128);
  const uint64_t b = k_major_descriptor(shared_address(shared)),
                 a = k_major_descriptor(shared_address(shared) + kTileBytes + group * 64 * 128);
  uint32_t fragment[4], d[kN / 2] = {};
  for (int i = 0; i < 4; ++i) fragment[i] = operands[threadIdx.x * 4 + i];
  for (int round = 0; round < rounds; ++round) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Multiply<kType, kN, kRegisters>::run(d, fragment, advance(a, 32 * step),
                                           advance(b, 32 * step));
    }
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
#pragma unroll
  for (uint32_t& x : d) asm volatile("" : "+r"(x)::"memory");
  uint32_t all = 0;
  for (const uint32_t x : d) all ^= x;
  if (all == 0x12345) *sink = all;
}

// Bytes that are small finite numbers of the type: N(0, 1) in bf16, in e4m3 and times 32 in s8.
std::vector<uint32_t> random_operands(Type type) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<uint32_t> words(kMultiplyShared / 4);
  for (uint32_t& word : words) {
    word = 0;
    for (int i = 0; i < 4; ++i) {
      const float x = normal(generator);
      uint32_t byte;
      if (type == Type::bf16) {  // two bytes at once
        if (i % 2 == 1) continue;
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        word |= (bits >> 16) << (8 * i);
        continue;
      }
      if (type == Type::e4m3) {
        byte = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
      } else {
        byte =
            static_cast<uint32_t>(std::lround(std::fmin(127.f, std::fmax(-127.f, 32 * x)))) & 255;
      }
      word |= byte << (8 * i);
    }
  }
  return words;
}

struct Sample {
  double clock_mhz = 0, watts = 0;
};

Sample read_sensors() {
  Sample sample;
  std::FILE* pipe =
      popen("nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -i 0", "r");
  if (pipe == nullptr) return sample;
  if (std::fscanf(pipe, "%lf, %lf", &sample.clock_mhz, &sample.watts) != 2) sample = {};
  pclose(pipe);
  return sample;
}

template <Type kType, int kN, bool kRegisters = false>
void measure_multiply(const Report& report, const std::string& name, double seconds) {
  const std::vector<uint32_t> operands = random_operands(kType);
  uint32_t *device, *sink;
  require(cudaMalloc(&device, operands.size() * 4));
  require(cudaMalloc(&sink, 4));
  require(cudaMemcpy(device, operands.data(), operands.size() * 4, cudaMemcpyHostToDevice));
  const auto kernel = multiply_kernel<kType, kN, kRegisters>;
  require(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kMultiplyShared));
  int sms;
  require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const int k = kType == Type::bf16 ? 16 : 32, rounds = 20000 * 128 / kN;
  const double operations = 2.0 * 64 * kN * k * 4 * rounds * kGroups * sms;
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin));
  require(cudaEventCreate(&end));
  const auto launch = [&](int times) {
    require(cudaEventRecord(begin));
    for (int i = 0; i < times; ++i) {
      kernel<<<sms, kGroups * 128, kMultiplyShared>>>(device, sink, rounds);
    }
    require(cudaEventRecord(end));
  };
  const auto milliseconds = [&] {
    require(cudaEventSynchronize(end));
    require(cudaGetLastError());
    float ms;
    require(cudaEventElapsedTime(&ms, begin, end));
    return double(ms);
  };
  launch(1);
  milliseconds();
  launch(3);
  const double each = milliseconds() / 3;
  if (seconds <= 0) {
    report.add(name, operations / each / 1e9, "TFLOP/s");
  } else {
    const int times = static_cast<int>(seconds * 1e3 / each) + 1;
    launch(times / 2);  // until clock and temperature have settled
    milliseconds();
    launch(times / 2);
    Sample sum;
    int samples = 0;
    while (cudaEventQuery(end) == cudaErrorNotReady) {
      const Sample s = read_sensors();
      if (cudaEventQuery(end) != cudaErrorNotReady) break;
      sum.clock_mhz += s.clock_mhz;
      sum.watts += s.watts;
      ++samples;
    }
    const double ms = milliseconds() / (times / 2);
    samples = samples > 0 ? samples : 1;
    report.add(name + " sustained", operations / ms / 1e9, "TFLOP/s", sum.clock_mhz / samples,
               sum.watts / samples);
  }
  require(cudaFree(device));
  require(cudaFree(sink));
}

// ---- Other instructions -----------------------------------------------------------------------

constexpr int kLanes = 1024;  // threads of a CTA, one an SM
constexpr int kChains = 8;    // independent ones a thread
constexpr int kRepeats = 512;

template <class Instruction>
__global__ void __launch_bounds__(kLanes, 1)
    instruction_kernel(const uint32_t* operands, uint32_t* sink, long long* clocks) {
  uint32_t x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = operands[threadIdx.x + kLanes * i];
  const uint32_t y = operands[threadIdx.x], z = operands[threadIdx.x + kLanes];
  __syncthreads();
  const long long begin = clock64();
  for (int i = 0; i < kRepeats; ++i) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) Instruction::run(x[chain], y, z);
  }
  __syncthreads();
  const long long end = clock64();
  uint32_t all = 0;
  for (const uint32_t v : x) all ^= v;
  if (all == 0x12345) *sink = all;
  if (threadIdx.x == 0) clocks[blockIdx.x] = end - begin;
}

#define INSTRUCTION(name, text)                                                              \
  struct name {                                                                              \
    __device__ static void run(uint32_t& x, uint32_t y, uint32_t z) {                        \
      asm volatile("{\n.reg .b32 t;\n.reg .b16 h;\n" text "\n}" : "+r"(x) : "r"(y), "r"(z)); \
    }                                                                                        \
  };
INSTRUCTION(Ex2, "ex2.approx.ftz.f32 %0, %0;")
INSTRUCTION(Ex2Half2, "ex2.approx.f16x2 %0, %0;")
INSTRUCTION(IntToFloat, "cvt.rn.f32.s32 %0, %0;")
INSTRUCTION(PackHalf2, "cvt.rn.f16x2.f32 %0, %0, %1;")
INSTRUCTION(PackBf16, "cvt.rn.bf16x2.f32 %0, %0, %1;")
INSTRUCTION(PackE4m3, "cvt.rn.satfinite.e4m3x2.f32 h, %0, %1; mov.b32 %0, {h, h};")
INSTRUCTION(Permute, "prmt.b32 %0, %0, %1, 0x6420;")
INSTRUCTION(MaxFloat, "max.f32 %0, %0, %1;")
INSTRUCTION(MaxInt, "max.s32 %0, %0, %1;")
INSTRUCTION(MaxHalf2, "max.f16x2 %0, %0, %1;")
INSTRUCTION(Dot4, "dp4a.u32.u32 %0, %1, %2, %0;")
INSTRUCTION(AddHalf2, "add.rn.f16x2 %0, %0, %1;")
INSTRUCTION(FmaHalf2, "fma.rn.f16x2 %0, %0, %1, %2;")
INSTRUCTION(AddFloat, "add.rn.f32 %0, %0, %1;")
INSTRUCTION(FmaFloat, "fma.rn.f32 %0, %0, %1, %2;")
struct Max3 {
  __device__ static void run(uint32_t& x, uint32_t y, uint32_t z) {
    x = __vimax3_s32(static_cast<int>(x), static_cast<int>(y), static_cast<int>(z));
    asm volatile("" : "+r"(x));
  }
};

template <class Instruction>
void measure_instruction(const Report& report, const char* name) {
  std::vector<uint32_t> operands(kLanes * kChains);
  std::mt19937 generator(2);
  for (uint32_t& x : operands) x = 0x3f800000u + (generator() & 0x7fffff);
  uint32_t *device, *sink;
  long long* clocks;
  int sms;
  require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  require(cudaMalloc(&device, operands.size() * 4));
  require(cudaMalloc(&sink, 4));
  require(cudaMalloc(&clocks, sizeof(long long) * sms));
  require(cudaMemcpy(device, operands.data(), operands.size() * 4, cudaMemcpyHostToDevice));
  for (int i = 0; i < 2; ++i)
    instruction_kernel<Instruction><<<sms, kLanes>>>(device, sink, clocks);
  std::vector<long long> counted(sms);
  require(cudaMemcpy(counted.data(), clocks, sizeof(long long) * sms, cudaMemcpyDeviceToHost));
  double mean = 0;
  for (const long long c : counted) mean += double(c) / sms;
  report.add(name, double(kLanes) * kChains * kRepeats / mean, "lanes a clock and SM");
  require(cudaFree(device));
  require(cudaFree(sink));
  require(cudaFree(clocks));
}

// ---- Sums in the accumulator ------------------------------------------------------------------

// The sum of k products a x a of e4m3, in chains of `chain` that f32 adds up.
__global__ void __launch_bounds__(128, 1)
    sum_kernel(uint32_t four_codes, int k, int chain, float* result) {
  extern __shared__ __align__(1024) uint32_t shared[];
  for (int i = threadIdx.x; i < kTileBytes / 4; i += blockDim.x) shared[i] = four_codes;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const uint64_t tile = k_major_descriptor(shared_address(shared));
  float sum = 0;
  for (int done = 0; done < k; done += chain) {
    uint32_t d[32] = {};
    for (int i = 0; i < chain; i += 32) {
      wgmma_fence();
      Multiply<Type::e4m3, 64, false>::run(d, nullptr, tile, tile);
      wgmma_commit();
      wgmma_wait<0>();
    }
#pragma unroll
    for (uint32_t& x : d) asm volatile("" : "+r"(x)::"memory");
    sum += __uint_as_float(d[0]);
  }
  if (threadIdx.x == 0) *result = sum;
}

void measure_sums(const Report& report) {
  float* result;
  require(cudaMalloc(&result, 4));
  require(cudaFuncSetAttribute(reinterpret_cast<const void*>(sum_kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kTileBytes));
  for (const float a : {1.0f, 1.125f, 1.375f, 1.875f}) {
    const uint32_t code = __nv_cvt_float_to_fp8(a, __NV_SATFINITE, __NV_E4M3);
    for (const int k : {128, 512, 1024, 4096, 8192, 16384, 65536}) {
      for (const int chain : k < 1024 ? std::vector{k} : std::vector{k, 128}) {
        sum_kernel<<<1, 128, kTileBytes>>>(code * 0x01010101u, k, chain, result);
        float got;
        require(cudaMemcpy(&got, result, 4, cudaMemcpyDeviceToHost));
        char name[96];
        std::snprintf(name, sizeof name, "e4m3 sum of %d products %g^2%s", k, a,
                      chain == k ? "" : ", chains of 128");
        report.add(name, (got / (double(a) * a * k) - 1) * 100, "% off");
      }
    }
  }
  require(cudaFree(result));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--seconds") options.seconds = std::atof(argv[i + 1]);
    if (flag == "--json") options.json = argv[i + 1];
    if (flag == "--commit") options.commit = argv[i + 1];
  }
  const Report report(options);
  measure_multiply<Type::bf16, 64>(report, "wgmma bf16 n64", 0);
  measure_multiply<Type::bf16, 128>(report, "wgmma bf16 n128", 0);
  measure_multiply<Type::bf16, 256>(report, "wgmma bf16 n256", 0);
  measure_multiply<Type::bf16, 128, true>(report, "wgmma bf16 n128, A in registers", 0);
  measure_multiply<Type::e4m3, 64>(report, "wgmma e4m3 n64", 0);
  measure_multiply<Type::e4m3, 128>(report, "wgmma e4m3 n128", 0);
  measure_multiply<Type::e4m3, 256>(report, "wgmma e4m3 n256", 0);
  measure_multiply<Type::e4m3, 128, true>(report, "wgmma e4m3 n128, A in registers", 0);
  measure_multiply<Type::s8, 64>(report, "wgmma s8 n64", 0);
  measure_multiply<Type::s8, 128>(report, "wgmma s8 n128", 0);
  measure_multiply<Type::s8, 256>(report, "wgmma s8 n256", 0);
  measure_multiply<Type::s8, 128, true>(report, "wgmma s8 n128, A in registers", 0);
  measure_multiply<Type::u8s8, 64, true>(report, "wgmma u8 x s8 n64, A in registers", 0);
  measure_multiply<Type::u8s8, 128, true>(report, "wgmma u8 x s8 n128, A in registers", 0);
  measure_instruction<Ex2>(report, "ex2 f32");
  measure_instruction<Ex2Half2>(report, "ex2 f16x2");
  measure_instruction<IntToFloat>(report, "int to float");
  measure_instruction<PackHalf2>(report, "pack two floats to f16x2");
  measure_instruction<PackBf16>(report, "pack two floats to bf16x2");
  measure_instruction<PackE4m3>(report, "pack two floats to e4m3x2, and a move");
  measure_instruction<Permute>(report, "byte permute");
  measure_instruction<MaxFloat>(report, "max f32");
  measure_instruction<MaxInt>(report, "max s32");
  measure_instruction<Max3>(report, "max of three s32");
  measure_instruction<MaxHalf2>(report, "max f16x2");
  measure_instruction<Dot4>(report, "dp4a");
  measure_instruction<AddHalf2>(report, "add f16x2");
  measure_instruction<FmaHalf2>(report, "fma f16x2");
  measure_instruction<AddFloat>(report, "add f32");
  measure_instruction<FmaFloat>(report, "fma f32");
  measure_sums(report);
  if (options.seconds > 0) {
    measure_multiply<Type::bf16, 256>(report, "wgmma bf16 n256", options.seconds);
    measure_multiply<Type::e4m3, 256>(report, "wgmma e4m3 n256", options.seconds);
    measure_multiply<Type::s8, 256>(report, "wgmma s8 n256", options.seconds);
    measure_multiply<Type::u8s8, 128, true>(report, "wgmma u8 x s8 n128, A in registers",
                                            options.seconds);
  }
  return 0;
}
