// The executable specification of every backend operation: double precision, no blocking, no
// threads. Inputs are views of any strides; results are row-major doubles, not yet rounded to the
// output type. Where the contract rounds inside an operation the rounding is done here too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace orrery::reference {

using Values = std::vector<double>;

// Elements of a view in row-major order.
Values values(const View& x);
// Rounds each value once to out's type.
void store(const MutView& out, const Values& values);
// |got - want| / |want|, Euclidean.
double relative_error(const Values& got, const Values& want);

Values lincomb(std::span<const Term> terms);
Values add_row(const View& x, const View& row);
Values activation(const View& x, Activation kind);
Values gather_rows(const View& table, std::span<const int64_t> ids);
Values linear(const View& x, const View& w, const LinearOptions& options);
Values rms_norm(const View& x, const View& weight, const Norm& norm);
Values qk_norm_rope(const View& x, const View& weight, const View& cos, const View& sin,
                    const Norm& norm);

struct Attention {
  Values out;  // [Sq, H, D]
  Values lse;  // [H, Sq]
};
// plan.lse is not written.
Attention attention(const View& q, const View& k, const View& v, const AttentionPlan& plan);

struct Selection {
  Values scores;                              // [lists, nq, nk]: the ranks of BlockSelection
  std::vector<std::vector<int32_t>> indices;  // [lists * nq] lists
};
// Equal scores are left in index order here: a backend's own rule for ties is tested apart.
Selection select_blocks(const View& q, const View& k, const BlockSelection& selection);

Values conv3d(const View& x, const View& w, const View& bias, const Conv3d& conv,
              const View& residual);
Values conv_transpose1d(const View& x, const View& w, const View& bias, int64_t stride,
                        int64_t padding);
Values snake(const View& x, const View& alpha, const View& beta);

}  // namespace orrery::reference
