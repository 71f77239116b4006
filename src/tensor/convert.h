// Element types changed in host memory.
#pragma once

#include "tensor/view.h"

namespace orrery {

// out = x rounded to out's type: f32, bf16, f16, f8e4m3 or i8 to f32 or bf16, or any type to
// itself. `out` is contiguous; `x` has contiguous rows at any pitch and may be misaligned, as in a
// mapped file. On the calling thread.
void convert(MutView out, View x);

}  // namespace orrery
