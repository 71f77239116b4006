// The loops behind one Kernels table. Included once by each kernels_<set>.cpp, which is compiled
// for that instruction set and defines before: kLanes and kTileRows. Everything is in an unnamed
// namespace and no inline function of another header is used: a function that the linker may share
// between files must not be compiled for a CPU that another file does not need.

namespace orrery::cpu {
namespace {

using Vector = float __attribute__((vector_size(kLanes * 4)));
using IntVector = int32_t __attribute__((vector_size(kLanes * 4)));
using Vector4 = float __attribute__((vector_size(16)));

// Unaligned access through a type that promises no alignment and may alias.
struct __attribute__((packed, may_alias)) AnyVector {
  Vector value;
};
struct __attribute__((packed, may_alias)) AnyVector4 {
  Vector4 value;
};
struct __attribute__((packed, may_alias)) AnyU16 {
  uint16_t value;
};
struct __attribute__((packed, may_alias)) AnyF32 {
  float value;
};

// x - 0 is x, which the compiler knows and makes a broadcast; x + 0 would lose the sign of -0.
inline Vector splat(float x) { return x - Vector{}; }
inline Vector load(const float* x) { return reinterpret_cast<const AnyVector*>(x)->value; }
inline void save(float* x, Vector value) { reinterpret_cast<AnyVector*>(x)->value = value; }
// The first n < kLanes elements, zeros after them.
inline Vector load_part(const float* x, int64_t n) {
  float all[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) all[i] = x[i];
  return load(all);
}
inline void save_part(float* x, Vector value, int64_t n) {
  float all[kLanes];
  save(all, value);
  for (int64_t i = 0; i < n; ++i) x[i] = all[i];
}
inline Vector4 load4(const float* x) { return reinterpret_cast<const AnyVector4*>(x)->value; }
inline void save4(float* x, Vector4 value) { reinterpret_cast<AnyVector4*>(x)->value = value; }
inline int32_t bits_of(float x) { return __builtin_bit_cast(int32_t, x); }
inline float float_of(int32_t x) { return __builtin_bit_cast(float, x); }

// out = fn(in...), a vector at a time; the remainder goes through the same arithmetic.
template <typename Fn, typename... In>
inline void map(float* out, int64_t n, const Fn& fn, const In*... in) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) save(out + i, fn(load(in + i)...));
  if (i < n) save_part(out + i, fn(load_part(in + i, n - i)...), n - i);
}

// In a fixed order: lanes apart, then lane by lane.
float dot(const float* x, const float* y, int64_t n) {
  Vector even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even += load(x + i) * load(y + i);
    odd += load(x + i + kLanes) * load(y + i + kLanes);
  }
  if (i + kLanes <= n) {
    even += load(x + i) * load(y + i);
    i += kLanes;
  }
  if (i < n) odd += load_part(x + i, n - i) * load_part(y + i, n - i);
  even += odd;
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += even[lane];
  return sum;
}

template <int kVectors>
void tile(float* c, int64_t ldc, const float* const* a, int64_t begin, const float* b,
          int64_t depth, bool accumulate) {
  constexpr int kRows = kTileRows[kVectors];
  Vector acc[kRows][kVectors] = {};
  const float* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = a[r] + begin;
  for (int64_t k = 0; k < depth; ++k, b += kVectors * kLanes) {
    Vector column[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) column[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector x = splat(row[r][k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] += x * column[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* out = c + r * ldc + v * kLanes;
      save(out, accumulate ? load(out) + acc[r][v] : acc[r][v]);
    }
  }
}

inline float half_to_float(uint32_t half) {
  // Normal numbers move their fields; subnormals are 2^-24 times the fraction; 31 is Inf or NaN.
  const uint32_t exponent = half & 0x7c00u, fraction = half & 0x3ffu, sign = (half & 0x8000u) << 16;
  const uint32_t normal = ((half & 0x7fffu) << 13) + (112u << 23);
  const uint32_t special = 0x7f800000u | fraction << 13;
  const float tiny = float(int32_t(fraction)) * 0x1p-24f;
  uint32_t bits = exponent == 0x7c00u ? special : normal;
  bits = exponent == 0 ? uint32_t(bits_of(tiny)) : bits;
  return float_of(int32_t(bits | sign));
}

// As to_float(f8e4m3), without branches.
inline float f8e4m3_to_float(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24, magnitude = code & 0x7fu;
  const uint32_t normal = magnitude == 0x7f ? 0x7fc00000u : (magnitude + (120u << 3)) << 20;
  const auto tiny = uint32_t(bits_of(float(int32_t(magnitude)) * 0x1p-9f));
  return float_of(int32_t(sign | (magnitude < 8 ? tiny : normal)));
}

void to_f32(float* out, const void* x, Stored type, int64_t n) {
  const auto* half = static_cast<const AnyU16*>(x);
  const auto* full = static_cast<const AnyF32*>(x);
  switch (type) {
    case Stored::bf16:
      for (int64_t i = 0; i < n; ++i) out[i] = float_of(int32_t(uint32_t{half[i].value} << 16));
      break;
    case Stored::f16:
      for (int64_t i = 0; i < n; ++i) out[i] = half_to_float(half[i].value);
      break;
    case Stored::f32:
      for (int64_t i = 0; i < n; ++i) out[i] = full[i].value;
      break;
    case Stored::f8e4m3:
      for (int64_t i = 0; i < n; ++i) out[i] = f8e4m3_to_float(static_cast<const uint8_t*>(x)[i]);
      break;
    case Stored::i8:
      for (int64_t i = 0; i < n; ++i) out[i] = float(static_cast<const int8_t*>(x)[i]);
      break;
  }
}

void to_bf16(void* out, const float* x, int64_t n) {
  auto* half = static_cast<AnyU16*>(out);
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = uint32_t(bits_of(x[i]));
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    half[i].value = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : nearest);
  }
}

void transpose(float* out, int64_t width, const float* x, int64_t ldx, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r += 4) {
    const float* x0 = x + r * ldx;
    float* to = out + r;
    int64_t k = 0;
    for (; k + 4 <= n; k += 4) {
      const Vector4 a = load4(x0 + k), b = load4(x0 + ldx + k), c = load4(x0 + 2 * ldx + k),
                    d = load4(x0 + 3 * ldx + k);
      const Vector4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      const Vector4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Vector4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Vector4 cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      save4(to + k * width, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
      save4(to + (k + 1) * width, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
      save4(to + (k + 2) * width, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
      save4(to + (k + 3) * width, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
    }
    for (; k < n; ++k) {
      for (int64_t i = 0; i < 4; ++i) to[k * width + i] = x0[i * ldx + k];
    }
  }
}

// e^x to about 1e-7 relative (Cephes' polynomial on |r| <= ln 2 / 2); 0 below the smallest normal
// result, +inf above the largest, NaN for NaN.
inline Vector exponential(Vector x) {
  const Vector lowest = splat(-87.33654f), highest = splat(88.8f);
  const Vector round = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vector y = x < lowest ? lowest : x;
  y = y > highest ? highest : y;
  const Vector shifted = y * 1.44269504088896341f + round;
  const Vector n = shifted - round;
  Vector r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const auto power = Vector(((IntVector(shifted) - IntVector(round)) + 127) << 23);
  return x < lowest ? Vector{} : p * power;
}

inline Vector silu(Vector x) { return x / (1.0f + exponential(-x)); }

template <Act kAct>
inline Vector activated(Vector x) {
  if constexpr (kAct == Act::silu) return silu(x);
  if constexpr (kAct == Act::relu2) {
    const Vector positive = x < Vector{} ? Vector{} : x;
    return positive * positive;
  }
  return x;
}

template <Act kAct>
void epilogue_of(float* out, const float* x, const float* bias, const float* residual, int64_t n) {
  if (bias && residual) {
    map(
        out, n, [](Vector a, Vector b, Vector r) { return activated<kAct>(a + b) + r; }, x, bias,
        residual);
  } else if (bias) {
    map(
        out, n, [](Vector a, Vector b) { return activated<kAct>(a + b); }, x, bias);
  } else if (residual) {
    map(
        out, n, [](Vector a, Vector r) { return activated<kAct>(a) + r; }, x, residual);
  } else {
    map(
        out, n, [](Vector a) { return activated<kAct>(a); }, x);
  }
}

void epilogue(float* out, const float* x, const float* bias, const float* residual, Act act,
              int64_t n) {
  switch (act) {
    case Act::none: return epilogue_of<Act::none>(out, x, bias, residual, n);
    case Act::silu: return epilogue_of<Act::silu>(out, x, bias, residual, n);
    case Act::relu2: return epilogue_of<Act::relu2>(out, x, bias, residual, n);
  }
}

void silu_gate(float* out, const float* gate, const float* up, int64_t n) {
  map(
      out, n, [](Vector g, Vector u) { return silu(g) * u; }, gate, up);
}

void scale(float* out, const float* x, float factor, int64_t n) {
  map(
      out, n, [factor](Vector a) { return a * factor; }, x);
}

void add_scaled(float* out, const float* x, float factor, int64_t n) {
  map(
      out, n, [factor](Vector sum, Vector a) { return sum + a * factor; }, out, x);
}

void scale_weighted(float* out, const float* x, float factor, const float* weight, int64_t n) {
  map(
      out, n, [factor](Vector a, Vector w) { return a * factor * w; }, x, weight);
}

void norm_rows(float* out, int64_t out_pitch, const float* x, int64_t x_pitch, int64_t rows,
               int64_t n, const float* weight, bool mean, float eps, bool with_silu) {
  for (int64_t r = 0; r < rows; ++r, out += out_pitch, x += x_pitch) {
    const float sum = dot(x, x, n);
    const float length = __builtin_sqrtf(mean ? sum / float(n) + eps : sum);
    const float factor = 1.0f / (!mean && length < 1e-12f ? 1e-12f : length);
    if (with_silu) {
      map(
          out, n, [factor](Vector a, Vector w) { return silu(a * factor * w); }, x, weight);
    } else {
      scale_weighted(out, x, factor, weight, n);
    }
  }
}

void rotate(float* y1, float* y2, const float* x1, const float* x2, const float* cos,
            const float* sin, int64_t n) {
  // Both halves of a vector are read before either is written: y may be x.
  const auto turn = [](Vector& a, Vector& b, Vector c, Vector s) {
    const Vector turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Vector a = load(x1 + i), b = load(x2 + i);
    turn(a, b, load(cos + i), load(sin + i));
    save(y1 + i, a);
    save(y2 + i, b);
  }
  if (i < n) {
    Vector a = load_part(x1 + i, n - i), b = load_part(x2 + i, n - i);
    turn(a, b, load_part(cos + i, n - i), load_part(sin + i, n - i));
    save_part(y1 + i, a, n - i);
    save_part(y2 + i, b, n - i);
  }
}

void snake(float* out, const float* x, const float* a, const float* b, int64_t n) {
  const auto value = [](Vector x_, Vector a_, Vector b_) {
    // sin^2 has period pi: reduce to |r| <= pi / 2 in three steps, then sin's series.
    const Vector round = splat(12582912.0f);
    const Vector y = a_ * x_;
    const Vector turns = (y * 0.318309886183790672f + round) - round;
    Vector r = y - turns * 3.140625f;
    r = r - turns * 9.67502593994140625e-4f;
    r = r - turns * 1.509957990978376432e-7f;
    const Vector s = r * r;
    Vector p = s * 1.6059044e-10f - 2.5052108e-8f;
    p = p * s + 2.7557319e-6f;
    p = p * s - 1.9841270e-4f;
    p = p * s + 8.3333333e-3f;
    p = p * s - 1.6666667e-1f;
    const Vector sine = r + r * s * p;
    return x_ + sine * sine * b_;
  };
  map(out, n, value, x, a, b);
}

float max(const float* x, int64_t n) {
  constexpr float kNone = -__builtin_inff();
  Vector even = splat(kNone), odd = even;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vector a = load(x + i), b = load(x + i + kLanes);
    even = a > even ? a : even;
    odd = b > odd ? b : odd;
  }
  even = odd > even ? odd : even;
  float best = kNone;
  for (int lane = 0; lane < kLanes; ++lane) best = even[lane] > best ? even[lane] : best;
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

float exp_sum(float* x, float factor, float shift, int64_t n) {
  const auto value = [=](Vector a) { return exponential(a * factor - shift); };
  Vector even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vector a = value(load(x + i)), b = value(load(x + i + kLanes));
    save(x + i, a);
    save(x + i + kLanes, b);
    even += a;
    odd += b;
  }
  for (; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    save_part(x + i, value(load_part(x + i, count)), count);
    even += load_part(x + i, count);
  }
  even += odd;
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += even[lane];
  return sum;
}

constexpr Kernels make_kernels(const char* name, int64_t length) {
  return {{name, size_t(length)},
          kLanes,
          {0, kTileRows[1], kTileRows[2], kTileRows[3]},
          {nullptr, tile<1>, tile<2>, tile<3>},
          to_f32,
          to_bf16,
          transpose,
          epilogue,
          silu_gate,
          scale,
          add_scaled,
          scale_weighted,
          norm_rows,
          dot,
          rotate,
          snake,
          max,
          exp_sum};
}

}  // namespace
}  // namespace orrery::cpu
