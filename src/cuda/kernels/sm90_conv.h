// 3x3x3 convolution of two frames at a time on Hopper, bf16 in and out, f32 accumulation.
//
// Three taps in time over frames d0..d3 make the two outputs
//   y0 = d0 g0 + d1 g1 + d2 g2,  y1 = d1 g0 + d2 g1 + d3 g2
// in six products. Winograd's F(2, 3) needs four, of sums made beforehand:
//   t = d0 - d2,  d1 + d2,           d2 - d1,           d3 - d1
//   u = g0,       (g0 + g1 + g2)/2,  (g0 - g1 + g2)/2,  g2
//   y0 = t0 u0 + t1 u1 + t2 u2,  y1 = t1 u1 - t2 u2 + t3 u3
// Each product is a 3x3 convolution of one frame. Sums are of two frames or three taps, so bf16
// loses little in them; the products add up in f32.
#pragma once

#include <cstdint>

namespace orrery::cuda {

struct Sm90PairConvParams {
  const void* t = nullptr;         // bf16 [pairs, 4, rows_in, columns_in, cin]
  const void* u = nullptr;         // bf16 [4, 9, cout, cin], taps row by row
  const void* bias = nullptr;      // bf16 [cout], optional
  const void* residual = nullptr;  // bf16 [frames, rows, columns, cout], optional; may be `out`
  void* out = nullptr;             // bf16 [frames, rows, columns, cout]
  int64_t residual_stride = 0;     // elements between frames, which are dense themselves
  int64_t out_stride = 0;
  int pairs = 0;
  int frames = 0;  // 2 pairs, or one less: the last pair then makes only its first frame
  int rows_in = 0, columns_in = 0;
  int rows = 0, columns = 0;
  int pad_rows = 0, pad_columns = 0;  // output row r sees the rows from r - pad_rows on
  int cin = 0, cout = 0;
};

// nullptr when the kernel can run these parameters, else a sentence that says why not. t and u may
// be missing yet.
const char* sm90_pair_conv_supports(const Sm90PairConvParams& params);

// Enqueues the call on `stream` (a cudaStream_t). Neither allocates nor synchronises. Returns
// nullptr, or a sentence when it could not be enqueued.
const char* sm90_pair_conv(const Sm90PairConvParams& params, void* stream);

}  // namespace orrery::cuda
