// Shapes and non-owning tensor views. A View reads, a MutView writes: an operation's signature says
// what it changes. Views never own; they are valid while the Buffer or Arena behind them lives.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <string>

#include "tensor/dtype.h"

namespace orrery {

inline constexpr int kMaxRank = 6;

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  int64_t& operator[](int i) { return dims_[static_cast<size_t>(i)]; }
  void push_back(int64_t dim);
  int64_t numel() const;  // product; 1 for rank 0
  bool operator==(const Shape& other) const;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Shape& shape);  // [2, 3]

enum class DeviceKind : uint8_t { cpu, cuda };

// Strides are in elements and may be 0 (broadcast) in a View that is read.
struct View {
  const void* data = nullptr;
  Shape shape;
  Shape strides;
  DType dtype = DType::f32;
  DeviceKind device = DeviceKind::cpu;

  explicit operator bool() const { return data != nullptr; }  // "no tensor" is an empty View
  int rank() const { return shape.rank(); }
  int64_t dim(int i) const { return shape[i < 0 ? i + rank() : i]; }
  int64_t stride(int i) const { return strides[i < 0 ? i + rank() : i]; }
  int64_t numel() const { return shape.numel(); }
  int64_t bytes() const { return numel() * size_of(dtype); }
  bool contiguous() const;
  bool rows_contiguous() const;  // last stride 1 (or last dim 1)

  View slice(int dim, int64_t begin, int64_t size) const;
  View select(int dim, int64_t index) const;  // drops the dimension
  View permute(std::initializer_list<int> order) const;
  View reshape(std::initializer_list<int64_t> dims)
      const;                                 // splits/merges dims that allow it; -1 infers one
  View expand(int dim, int64_t size) const;  // dim of size 1 -> stride 0
  View unsqueeze(int dim) const;

  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

struct MutView : View {
  void* mut() const { return const_cast<void*>(data); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(mut());
  }

  MutView slice(int d, int64_t begin, int64_t size) const {
    return cast(View::slice(d, begin, size));
  }
  MutView select(int d, int64_t index) const { return cast(View::select(d, index)); }
  MutView permute(std::initializer_list<int> order) const { return cast(View::permute(order)); }
  MutView reshape(std::initializer_list<int64_t> dims) const { return cast(View::reshape(dims)); }
  MutView unsqueeze(int d) const { return cast(View::unsqueeze(d)); }

  // The one place where a View becomes writable: only for memory that was handed out writable.
  static MutView cast(const View& view) {
    MutView m;
    static_cast<View&>(m) = view;
    return m;
  }
};

View make_view(const void* data, Shape shape, DType dtype, DeviceKind device = DeviceKind::cpu);
MutView make_mut_view(void* data, Shape shape, DType dtype, DeviceKind device = DeviceKind::cpu);

}  // namespace orrery
