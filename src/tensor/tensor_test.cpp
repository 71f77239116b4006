#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

#include "expect_error.h"

namespace orrery {
namespace {

uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

TEST(Buffer, ReleasesOnce) {
  int released = 0;
  char byte;
  const auto make = [&] {
    return Buffer(
        &byte, 1, DeviceKind::cpu, [](void* count, void*, size_t) { ++*static_cast<int*>(count); },
        &released);
  };
  {
    Buffer first = make();
    Buffer second = std::move(first);
    EXPECT_EQ(first.data(), nullptr);
    EXPECT_EQ(second.data(), &byte);
    second = make();  // releases what it held
    EXPECT_EQ(released, 1);
    second.reset();
    second.reset();
    EXPECT_EQ(released, 2);
  }
  EXPECT_EQ(released, 2);
}

TEST(HostMemory, IsAlignedAndRefusesWhatDoesNotFit) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{257}, size_t{1} << 20}) {
    const Buffer buffer = allocate_host(bytes);
    EXPECT_EQ(address(buffer.data()) % 256, 0u);
    EXPECT_GE(buffer.bytes(), bytes);
  }
  expect_error(ErrorKind::out_of_memory, {"cannot allocate 18446744073709551615 bytes"},
               [] { allocate_host(SIZE_MAX); });
  const Tensor tensor = allocate_host_tensor({3, 5}, DType::bf16);
  EXPECT_EQ(tensor.view.bytes(), 30);
  EXPECT_TRUE(static_cast<bool>(tensor));
  EXPECT_FALSE(static_cast<bool>(Tensor{}));
}

TEST(Arena, BumpsAndComesBack) {
  Arena arena(allocate_host(2048));
  const MutView first = arena.make({100}, DType::u8);
  {
    const Arena::Scope scope(arena);
    const MutView inner = arena.make({3, 100}, DType::f32);
    EXPECT_EQ(address(inner.data), address(first.data) + 256);
    EXPECT_EQ(address(inner.data) % 256, 0u);
    EXPECT_EQ(arena.used(), 256u + 1280u);
  }
  EXPECT_EQ(arena.used(), 256u);
  EXPECT_EQ(arena.peak(), 256u + 1280u);
  EXPECT_EQ(address(arena.make({1}, DType::u8).data), address(first.data) + 256);
}

TEST(Arena, RefusesBeyondItsCapacity) {
  Arena arena(allocate_host(1024));
  arena.make({512}, DType::u8);
  expect_error(ErrorKind::out_of_memory, {"[129] f32", "needs 768 bytes", "512 of 1024 are left"},
               [&] { arena.make({129}, DType::f32); });
  EXPECT_EQ(arena.make({128}, DType::f32).numel(), 128);  // an exact fit
}

TEST(Arena, MeasuringFindsTheSizeThatARealOneNeeds) {
  const auto work = [](Arena& arena) {
    arena.make({7}, DType::f32);
    for (int64_t i = 1; i < 4; ++i) {
      const Arena::Scope scope(arena);
      arena.make({i, 1000}, DType::bf16);
      arena.make({5}, DType::i64);
    }
  };
  Arena measuring = Arena::measuring(DeviceKind::cuda);
  work(measuring);
  EXPECT_TRUE(measuring.is_measuring());
  EXPECT_EQ(measuring.make({1}, DType::f32).device, DeviceKind::cuda);
  Arena enough(allocate_host(measuring.peak()));
  work(enough);
  EXPECT_EQ(enough.peak(), measuring.peak());
  Arena little(allocate_host(measuring.peak() - 256));
  expect_error(ErrorKind::out_of_memory, {"arena"}, [&] { work(little); });
}

}  // namespace
}  // namespace orrery
