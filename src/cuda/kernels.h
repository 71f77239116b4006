// Launchers of the kernels in kernels/*.cu. Each enqueues on a stream and returns; none allocates,
// synchronises or reads host memory later, so every one can be recorded into a graph. Arguments are
// as the contracts of backend.h leave them.
#pragma once

#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "cuda/context.h"
#include "tensor/quantise.h"

namespace orrery::cuda {

// Whether the device has code for these kernels.
bool kernels_run_here();

void copy(Stream stream, MutView out, View x);
void fill(Stream stream, MutView out, float value);
// As Backend::quantise and dequantise.
void quantise(Stream stream, MutOperand out, View x, Scaling scaling);
void dequantise(Stream stream, MutView out, const orrery::Operand& x);
void lincomb(Stream stream, MutView out, std::span<const Term> terms);

// As Backend::clamp and to_bytes. found becomes 1 when a value of x is NaN or infinite.
void clamp(Stream stream, MutView x, float low, float high);
void to_bytes(Stream stream, MutView out, View x);
void find_non_finite(Stream stream, int32_t* found, View x);

// out [M, N] = activation(x + bias) + residual; x [M, N], or [M, 2N] for silu_gate. bias, residual
// optional.
void epilogue(Stream stream, MutView out, View x, View bias, View residual, Activation kind);
void gather_rows(Stream stream, MutView out, View table, std::span<const int64_t> ids);
void snake(Stream stream, MutView out, View x, View alpha, View beta);

void rms_norm(Stream stream, MutView out, View x, View weight, const Norm& norm);
void qk_norm_rope(Stream stream, MutView out, View x, View weight, View cos, View sin,
                  const Norm& norm);

// Any head_dim up to kMaxReferenceHeadDim, f32 or bf16, causal, block lists, LSE.
inline constexpr int64_t kMaxReferenceHeadDim = 4096;
void attention_reference(Stream stream, MutView out, View q, View k, View v,
                         const AttentionPlan& plan);

// probabilities [M, N] = softmax(scale * scores) of each row, scores f32; lse [M] optional.
void softmax_rows(Stream stream, MutView probabilities, View scores, float scale, float* lse);

// Means of 16-token cells, times factor, rounded once: pooled [heads, cells, D] of x's type, x [S,
// heads, D].
void pool_cells(Stream stream, MutView pooled, View x, float factor);
// scores [rows, blocks] f32 from cell products t [rows * cells_q, cells] f32: natural log-sum-exp
// of t ln 2 over the cells of each block pair. cells_q, cells_k: cells in a block.
void score_blocks(Stream stream, MutView scores, View t, int64_t cells_q, int64_t cells_k);
// ranks (+)= the softmax of each row of natural-log scores; ranks are written when `first`, else
// added to. Both f32 [rows, blocks].
void add_shares(Stream stream, MutView ranks, View scores, bool first);
// Fills the lists of consecutive rows of blocks from their ranks, as BlockSelection says. Without
// ranks every row keeps every block.
struct TopBlocks {
  BlockGrid grid;
  int64_t first_row = 0;  // of the grid, where indices, counts and ranks begin
  int64_t budget = 0;     // when mass is 0
  float mass = 0;         // of the ranks of a row
};
void top_blocks(Stream stream, MutView indices, MutView counts, View ranks, const TopBlocks& top);

// out[n - begin, :] = bias + sum over t s + i - padding = n of columns[t - first, :, i]; columns
// f32 [T, Cout * k], out [rows, Cout].
struct Fold {
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t taps = 1;
  int64_t begin = 0;  // output row of out's first row
  int64_t first = 0;  // input row of columns' first row
};
void fold(Stream stream, MutView out, View columns, View bias, const Fold& fold);

// t [pairs, 4, rows, W, C] of x [D, H, W, C], bf16, C a multiple of 8: the sums of frames first + 2
// p + {0 .. 3} that sm90_conv.h names, rows from first_row on, which x has. Frames outside of x are
// zeros.
void pair_frames(Stream stream, MutView t, View x, int64_t first, int64_t first_row);

// Convolution without a library: any sizes, f32 or bf16, exact f32 arithmetic. w [Cout, kd, kh, kw,
// Cin].
void conv_direct(Stream stream, MutView out, View x, View w, View bias, const Conv3d& conv,
                 View residual);

}  // namespace orrery::cuda
