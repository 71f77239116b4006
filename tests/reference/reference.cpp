#include "reference/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

namespace orrery::reference {

namespace {

double from_f16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  if (exponent == 31) return fraction ? std::nan("") : sign * INFINITY;
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

double element(const View& x, int64_t offset) {
  const auto* bytes = static_cast<const unsigned char*>(x.data) + offset * size_of(x.dtype);
  const auto half = [&] { return static_cast<uint16_t>(bytes[0] | bytes[1] << 8); };
  switch (x.dtype) {
    case DType::bf16: return to_float(bf16{half()});
    case DType::f16: return from_f16(half());
    default:
      return std::bit_cast<float>(uint32_t{half()} | uint32_t{bytes[2]} << 16 |
                                  uint32_t{bytes[3]} << 24);
  }
}

template <typename Fn>
void for_each_offset(const View& x, const Fn& fn) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    int64_t rest = i, offset = 0;
    for (int d = x.rank() - 1; d >= 0; --d) {
      offset += rest % x.dim(d) * x.stride(d);
      rest /= x.dim(d);
    }
    fn(offset);
  }
}

// The rounding a value of `dtype` suffers between two steps of an operation.
double rounded(double value, DType dtype) {
  return dtype == DType::bf16 ? double(round_to_bf16(float(value))) : double(float(value));
}

double silu(double x) { return x / (1 + std::exp(-x)); }

double normalised_square_mean(const double* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum / double(n);
}

// One row normalised and weighted, rounded inside as the kind says.
void norm_row(double* y, const double* x, const double* weight, int64_t n, const Norm& norm,
              DType dtype) {
  const double mean = normalised_square_mean(x, n);
  const double root = std::sqrt(double(n));
  for (int64_t i = 0; i < n; ++i) {
    const double w = weight ? weight[i] : 1;
    switch (norm.kind) {
      case NormKind::qwen:
        y[i] = rounded(x[i] / std::sqrt(mean + double(norm.eps)), dtype) * w;
        break;
      case NormKind::nemotron: y[i] = w * x[i] / std::sqrt(mean + double(norm.eps)); break;
      case NormKind::channel:
        y[i] = rounded(x[i] / std::max(std::sqrt(mean) * root, 1e-12), dtype) * root * w;
        break;
    }
    if (norm.silu) y[i] = silu(y[i]);
  }
}

}  // namespace

Values values(const View& x) {
  Values out;
  out.reserve(size_t(x.numel()));
  for_each_offset(x, [&](int64_t offset) { out.push_back(element(x, offset)); });
  return out;
}

void store(const MutView& out, const Values& values) {
  size_t next = 0;
  for_each_offset(out, [&](int64_t offset) {
    const auto value = float(values[next++]);
    switch (out.dtype) {
      case DType::bf16: out.as<bf16>()[offset] = to_bf16(value); break;
      case DType::f16: out.as<_Float16>()[offset] = static_cast<_Float16>(value); break;
      default: out.as<float>()[offset] = value;
    }
  });
}

double relative_error(const Values& got, const Values& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
}

Values lincomb(std::span<const Term> terms) {
  Values out(size_t(terms[0].x.numel()), 0.0);
  for (const Term& term : terms) {
    const Values x = values(term.x);
    for (size_t i = 0; i < out.size(); ++i) out[i] += double(term.factor) * x[i];
  }
  return out;
}

Values add_row(const View& x, const View& row) {
  Values out = values(x);
  const Values r = values(row);
  for (size_t i = 0; i < out.size(); ++i) out[i] += r[i % r.size()];
  return out;
}

Values activation(const View& x, Activation kind) {
  const Values in = values(x);
  if (kind == Activation::silu_gate) {
    const size_t n = size_t(x.dim(1)) / 2;
    Values out;
    for (size_t m = 0; m < size_t(x.dim(0)); ++m) {
      const double* row = in.data() + m * 2 * n;
      for (size_t i = 0; i < n; ++i) out.push_back(silu(row[i]) * row[n + i]);
    }
    return out;
  }
  Values out = in;
  for (double& value : out) {
    if (kind == Activation::silu) value = silu(value);
    if (kind == Activation::relu2) value = value > 0 ? value * value : 0;
  }
  return out;
}

Values gather_rows(const View& table, std::span<const int64_t> ids) {
  Values out;
  for (int64_t id : ids) {
    const Values row = values(table.select(0, id));
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

Values linear(const View& x, const View& w, const LinearOptions& options) {
  const int64_t m = x.dim(0), n = w.dim(0), k = x.dim(1);
  const Values a = values(x), b = values(w);
  const Values bias = options.bias ? values(options.bias) : Values(size_t(n), 0.0);
  Values out(size_t(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a[size_t(i * k + l)] * b[size_t(j * k + l)];
      sum += bias[size_t(j)];
      if (options.activation == Activation::silu) sum = silu(sum);
      if (options.activation == Activation::relu2) sum = sum > 0 ? sum * sum : 0;
      out[size_t(i * n + j)] = sum;
    }
  }
  if (options.residual) {
    const Values residual = values(options.residual);
    for (size_t i = 0; i < out.size(); ++i) out[i] += residual[i];
  }
  return out;
}

Values rms_norm(const View& x, const View& weight, const Norm& norm) {
  const int64_t n = x.dim(-1);
  const Values in = values(x), w = values(weight);
  Values out(in.size());
  for (size_t row = 0; row < in.size(); row += size_t(n)) {
    norm_row(out.data() + row, in.data() + row, w.data(), n, norm, x.dtype);
  }
  return out;
}

Values qk_norm_rope(const View& x, const View& weight, const View& cos, const View& sin,
                    const Norm& norm) {
  const int64_t heads = x.dim(1), d = x.dim(2), half = d / 2;
  Values out = values(x);
  const Values w = weight ? values(weight) : Values{}, c = values(cos), s = values(sin);
  for (int64_t row = 0; row < x.dim(0) * heads; ++row) {
    double* y = out.data() + row * d;
    if (weight) {
      const Values in(y, y + d);
      norm_row(y, in.data(), w.data(), d, norm, x.dtype);
      for (int64_t i = 0; i < d; ++i) y[i] = rounded(y[i], x.dtype);
    }
    for (int64_t i = 0; i < half; ++i) {
      const double co = c[size_t(row / heads * half + i)], si = s[size_t(row / heads * half + i)];
      const double x1 = y[i], x2 = y[half + i];
      y[i] = x1 * co - x2 * si;
      y[half + i] = x2 * co + x1 * si;
    }
  }
  return out;
}

Attention attention(const View& q, const View& k, const View& v, const AttentionPlan& plan) {
  const int64_t sq = q.dim(0), heads = q.dim(1), d = q.dim(2), skv = k.dim(0), kv = k.dim(1);
  const Values qs = values(q), ks = values(k), vs = values(v);
  Attention result{Values(size_t(sq * heads * d), 0.0), Values(size_t(heads * sq), -INFINITY)};
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t g = h / (heads / kv);
    for (int64_t i = 0; i < sq; ++i) {
      std::vector<int64_t> keys;
      if (plan.mask) {
        const BlockMask& mask = *plan.mask;
        const int64_t list = h * mask.indices.dim(0) / heads;
        const int64_t row = list * mask.indices.dim(1) + i / mask.block_q;
        for (int32_t b = 0; b < mask.counts.as<int32_t>()[row]; ++b) {
          const int64_t block = mask.indices.as<int32_t>()[row * mask.indices.dim(2) + b];
          const int64_t end = std::min(skv, (block + 1) * mask.block_k);
          for (int64_t j = block * mask.block_k; j < end; ++j) keys.push_back(j);
        }
      } else {
        const int64_t end = plan.causal ? std::min(skv, i + skv - sq + 1) : skv;
        for (int64_t j = 0; j < end; ++j) keys.push_back(j);
      }
      if (keys.empty()) continue;
      Values scores;
      for (int64_t j : keys) {
        double dot = 0;
        for (int64_t l = 0; l < d; ++l) {
          dot += qs[size_t((i * heads + h) * d + l)] * ks[size_t((j * kv + g) * d + l)];
        }
        scores.push_back(dot * double(plan.scale));
      }
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - top);
      result.lse[size_t(h * sq + i)] = top + std::log(sum);
      for (size_t n = 0; n < keys.size(); ++n) {
        for (int64_t l = 0; l < d; ++l) {
          result.out[size_t((i * heads + h) * d + l)] +=
              scores[n] / sum * vs[size_t((keys[n] * kv + g) * d + l)];
        }
      }
    }
  }
  return result;
}

Selection select_blocks(const View& q, const View& k, const BlockSelection& s) {
  const int64_t heads = q.dim(1), d = q.dim(2), kv = k.dim(1), cell = s.cells();
  const auto cells = [&](int64_t length) { return (length + cell - 1) / cell; };
  // [heads, cells, d]: means in f32, the query side times scale * log2(e), one rounding.
  const auto pool = [&](const View& x, float factor) {
    const Values in = values(x);
    Values out;
    for (int64_t h = 0; h < x.dim(1); ++h) {
      for (int64_t c = 0; c < cells(x.dim(0)); ++c) {
        const int64_t begin = c * cell, end = std::min(x.dim(0), begin + cell);
        for (int64_t l = 0; l < d; ++l) {
          float sum = 0;
          for (int64_t i = begin; i < end; ++i)
            sum += float(in[size_t((i * x.dim(1) + h) * d + l)]);
          out.push_back(rounded(double(sum / float(end - begin) * factor), x.dtype));
        }
      }
    }
    return out;
  };
  const Values qp = pool(q, s.scale * float(1 / std::log(2.0))), kp = pool(k, 1);
  const int64_t rows = (q.dim(0) + s.block_q - 1) / s.block_q;
  const int64_t blocks = (k.dim(0) + s.block_k - 1) / s.block_k;
  // Natural logarithm of the softmax weight of a head's block pair.
  const auto score = [&](int64_t h, int64_t r, int64_t b) {
    Values t;
    for (int64_t qc = r * s.block_q / cell;
         qc < std::min(cells(q.dim(0)), (r + 1) * s.block_q / cell); ++qc) {
      for (int64_t kc = b * s.block_k / cell;
           kc < std::min(cells(k.dim(0)), (b + 1) * s.block_k / cell); ++kc) {
        double dot = 0;
        for (int64_t l = 0; l < d; ++l) {
          dot += qp[size_t((h * cells(q.dim(0)) + qc) * d + l)] *
                 kp[size_t((h / (heads / kv) * cells(k.dim(0)) + kc) * d + l)];
        }
        t.push_back(dot * std::log(2.0));
      }
    }
    const double top = *std::max_element(t.begin(), t.end());
    double sum = 0;
    for (double value : t) sum += std::exp(value - top);
    return top + std::log(sum);
  };
  const auto is_protected = [&](int64_t b) {
    return b * s.block_k < s.protected_keys ||
           std::min(k.dim(0), (b + 1) * s.block_k) > k.dim(0) - s.protected_tail_keys;
  };
  Selection result;
  for (int64_t list = 0; list < heads / s.heads_per_list; ++list) {
    for (int64_t r = 0; r < rows; ++r) {
      Values ranks(size_t(blocks), 0.0);
      for (int64_t h = list * s.heads_per_list; h < (list + 1) * s.heads_per_list; ++h) {
        Values scores;
        for (int64_t b = 0; b < blocks; ++b) scores.push_back(score(h, r, b));
        if (s.heads_per_list == 1 && s.mass == 0) {
          ranks = scores;
          continue;
        }
        const double top = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double value : scores) sum += std::exp(value - top);
        for (int64_t b = 0; b < blocks; ++b) {
          ranks[size_t(b)] += std::exp(scores[size_t(b)] - top) / sum;
        }
      }
      std::vector<int32_t> order;
      double held = 0;
      for (int64_t b = 0; b < blocks; ++b) {
        if (is_protected(b))
          held += ranks[size_t(b)];
        else
          order.push_back(int32_t(b));
      }
      const auto budget = size_t(s.budget(int64_t(order.size())));
      const bool finite = std::all_of(order.begin(), order.end(),
                                      [&](int32_t b) { return std::isfinite(ranks[size_t(b)]); });
      if (finite) {
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return ranks[size_t(a)] > ranks[size_t(b)]; });
      }
      const bool dense =
          r * s.block_q < s.protected_head_queries ||
          std::min(q.dim(0), (r + 1) * s.block_q) > q.dim(0) - s.protected_tail_queries;
      if (!dense && s.mass == 0) {
        order.resize(budget);
      } else if (!dense && finite) {
        size_t count = 0;
        while (count < order.size() && held < s.mass * double(s.heads_per_list)) {
          held += ranks[size_t(order[count++])];
        }
        order.resize(count);
      }
      for (int64_t b = 0; b < blocks; ++b) {
        if (is_protected(b)) order.push_back(int32_t(b));
      }
      std::sort(order.begin(), order.end());
      result.indices.push_back(order);
      result.scores.insert(result.scores.end(), ranks.begin(), ranks.end());
    }
  }
  return result;
}

Values conv3d(const View& x, const View& w, const View& bias, const Conv3d& conv,
              const View& residual) {
  const Values in = values(x), weight = values(w);
  const Values shift = bias ? values(bias) : Values(size_t(w.dim(0)), 0.0);
  std::array<int64_t, 3> size{};
  for (int a = 0; a < 3; ++a) {
    const auto i = size_t(a);
    size[i] = (x.dim(a) + conv.pad_before[i] + conv.pad_after[i] -
               conv.dilation[i] * (w.dim(2 + a) - 1) - 1) /
                  conv.stride[i] +
              1;
  }
  const int64_t cin = x.dim(3), cout = w.dim(0), kd = w.dim(2), kh = w.dim(3), kw = w.dim(4);
  Values out;
  for (int64_t od = 0; od < size[0]; ++od) {
    for (int64_t oh = 0; oh < size[1]; ++oh) {
      for (int64_t ow = 0; ow < size[2]; ++ow) {
        for (int64_t o = 0; o < cout; ++o) {
          double sum = shift[size_t(o)];
          for (int64_t a = 0; a < kd; ++a) {
            const int64_t d = od * conv.stride[0] + a * conv.dilation[0] - conv.pad_before[0];
            for (int64_t b = 0; b < kh; ++b) {
              const int64_t h = oh * conv.stride[1] + b * conv.dilation[1] - conv.pad_before[1];
              for (int64_t c = 0; c < kw; ++c) {
                const int64_t v = ow * conv.stride[2] + c * conv.dilation[2] - conv.pad_before[2];
                if (d < 0 || h < 0 || v < 0 || d >= x.dim(0) || h >= x.dim(1) || v >= x.dim(2)) {
                  continue;
                }
                for (int64_t i = 0; i < cin; ++i) {
                  sum += in[size_t(((d * x.dim(1) + h) * x.dim(2) + v) * cin + i)] *
                         weight[size_t((((o * cin + i) * kd + a) * kh + b) * kw + c)];
                }
              }
            }
          }
          out.push_back(sum);
        }
      }
    }
  }
  if (residual) {
    const Values r = values(residual);
    for (size_t i = 0; i < out.size(); ++i) out[i] += r[i];
  }
  return out;
}

Values conv_transpose1d(const View& x, const View& w, const View& bias, int64_t stride,
                        int64_t padding) {
  const Values in = values(x), weight = values(w);
  const int64_t cin = x.dim(1), cout = w.dim(1), taps = w.dim(2), length = stride * x.dim(0);
  const Values shift = bias ? values(bias) : Values(size_t(cout), 0.0);
  Values out;
  for (int64_t n = 0; n < length; ++n) out.insert(out.end(), shift.begin(), shift.end());
  for (int64_t t = 0; t < x.dim(0); ++t) {
    for (int64_t i = 0; i < taps; ++i) {
      const int64_t n = t * stride + i - padding;
      if (n < 0 || n >= length) continue;
      for (int64_t o = 0; o < cout; ++o) {
        for (int64_t c = 0; c < cin; ++c) {
          out[size_t(n * cout + o)] +=
              in[size_t(t * cin + c)] * weight[size_t((c * cout + o) * taps + i)];
        }
      }
    }
  }
  return out;
}

Values snake(const View& x, const View& alpha, const View& beta) {
  Values out = values(x);
  const Values a = values(alpha), b = values(beta);
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t c = i % a.size();
    const double wave = std::sin(std::exp(a[c]) * out[i]);
    out[i] += wave * wave / (std::exp(b[c]) + 1e-9);
  }
  return out;
}

}  // namespace orrery::reference
