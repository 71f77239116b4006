#include "tensor/view.h"

#include "base/error.h"

namespace orrery {

Shape::Shape(std::initializer_list<int64_t> dims) {
  for (int64_t dim : dims) push_back(dim);
}

void Shape::push_back(int64_t dim) {
  require(rank_ < kMaxRank, "shape: more than ", kMaxRank, " dimensions");
  dims_[static_cast<size_t>(rank_++)] = dim;
}

int64_t Shape::numel() const {
  int64_t count = 1;
  for (int i = 0; i < rank_; ++i) count *= (*this)[i];
  return count;
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (int i = 0; i < rank_; ++i) {
    if ((*this)[i] != other[i]) return false;
  }
  return true;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int i = 0; i < shape.rank(); ++i) out << (i ? ", " : "") << shape[i];
  return out << ']';
}

namespace {
Shape row_major(const Shape& shape) {
  Shape strides = shape;
  int64_t step = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
}
}  // namespace

bool View::contiguous() const {
  int64_t step = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

bool View::rows_contiguous() const { return rank() == 0 || dim(-1) == 1 || stride(-1) == 1; }

View View::slice(int d, int64_t begin, int64_t size) const {
  if (d < 0) d += rank();
  require(d >= 0 && d < rank() && begin >= 0 && size >= 0 && begin + size <= shape[d], "slice [",
          begin, ", +", size, ") of dimension ", d, " of ", shape);
  View out = *this;
  out.shape[d] = size;
  out.data = static_cast<const std::byte*>(data) + begin * strides[d] * size_of(dtype);
  return out;
}

View View::select(int d, int64_t index) const {
  if (d < 0) d += rank();
  View part = slice(d, index, 1);
  View out = part;
  out.shape = {};
  out.strides = {};
  for (int i = 0; i < rank(); ++i) {
    if (i == d) continue;
    out.shape.push_back(part.shape[i]);
    out.strides.push_back(part.strides[i]);
  }
  return out;
}

View View::permute(std::initializer_list<int> order) const {
  require(static_cast<int>(order.size()) == rank(), "permute: ", order.size(), " axes for ", shape);
  View out = *this;
  int to = 0;
  for (int from : order) {
    require(from >= 0 && from < rank(), "permute: axis ", from, " of ", shape);
    out.shape[to] = shape[from];
    out.strides[to] = strides[from];
    ++to;
  }
  return out;
}

View View::reshape(std::initializer_list<int64_t> dims) const {
  Shape to;
  int64_t known = 1;
  int inferred = -1;
  for (int64_t dim : dims) {
    if (dim < 0)
      inferred = to.rank();
    else
      known *= dim;
    to.push_back(dim);
  }
  if (inferred >= 0) to[inferred] = known == 0 ? 0 : numel() / known;
  require(to.numel() == numel(), "reshape: ", shape, " has ", numel(), " elements, ", to, " has ",
          to.numel());
  View out = *this;
  out.shape = to;
  if (contiguous() || numel() == 0) {
    out.strides = row_major(to);
    return out;
  }
  // Match groups of old and new dimensions with equal products; each old group must be dense.
  Shape steps = to;
  int i = 0, j = 0;
  while (j < to.rank()) {
    int64_t old_size = i < rank() ? shape[i] : 1, new_size = to[j];
    int i_end = i + (i < rank() ? 1 : 0), j_end = j + 1;
    while (old_size != new_size) {
      if (old_size < new_size)
        old_size *= shape[i_end++];
      else
        new_size *= to[j_end++];
    }
    // Each dimension must continue the one behind it; those of size 1 have no say.
    int64_t step = 1, next = -1;
    for (int d = i_end - 1; d >= i; --d) {
      if (shape[d] == 1) continue;
      if (next < 0) step = next = strides[d];
      require(strides[d] == next, "reshape: ", shape, " with strides ", strides, " cannot become ",
              to, " without a copy");
      next *= shape[d];
    }
    for (int d = j_end - 1; d >= j; --d) {
      steps[d] = step;
      step *= to[d];
    }
    i = i_end;
    j = j_end;
  }
  out.strides = steps;
  return out;
}

View View::expand(int d, int64_t size) const {
  if (d < 0) d += rank();
  require(shape[d] == 1, "expand: dimension ", d, " of ", shape, " is not 1");
  View out = *this;
  out.shape[d] = size;
  out.strides[d] = 0;
  return out;
}

View View::unsqueeze(int d) const {
  require(d >= 0 && d <= rank(), "unsqueeze: position ", d, " in ", shape);
  View out = *this;
  out.shape = {};
  out.strides = {};
  for (int i = 0; i <= rank(); ++i) {
    if (i == d) {
      out.shape.push_back(1);
      out.strides.push_back(i < rank() ? strides[i] * shape[i] : 1);
    }
    if (i < rank()) {
      out.shape.push_back(shape[i]);
      out.strides.push_back(strides[i]);
    }
  }
  return out;
}

View make_view(const void* data, Shape shape, DType dtype, DeviceKind device) {
  View view;
  view.data = data;
  view.shape = shape;
  view.strides = row_major(shape);
  view.dtype = dtype;
  view.device = device;
  return view;
}

MutView make_mut_view(void* data, Shape shape, DType dtype, DeviceKind device) {
  return MutView::cast(make_view(data, shape, dtype, device));
}

}  // namespace orrery
