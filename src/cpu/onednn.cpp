#include "cpu/onednn.h"

#include <oneapi/dnnl/dnnl.h>

#include "base/error.h"

namespace orrery::cpu {

void Calls::check(const char* operation) const {
  const int status = status_;
  if (status == dnnl_out_of_memory) {
    fail(ErrorKind::out_of_memory, operation,
         ": oneDNN found no memory for its working copies; use fewer threads or free memory");
  }
  require(status == dnnl_success, operation, ": oneDNN failed with status ", status);
}

std::vector<float> bias_row(const Kernels& kernels, const View& bias) {
  std::vector<float> row;
  if (!bias) return row;
  row.resize(size_t(bias.dim(0)));
  const float* values =
      read_row(kernels, row.data(), bias.data, bias.dtype, 0, bias.dim(0), bias.stride(0));
  if (values != row.data()) std::copy(values, values + bias.dim(0), row.data());
  return row;
}

void Finish::row(const Kernels& kernels, const MutView& out, int64_t out_element,
                 const View& residual, int64_t residual_element, const float* c, int64_t first,
                 int64_t n) const {
  alignas(64) float residual_buffer[kChunk], buffer[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i), column = first + i;
    const float* add = nullptr;
    if (residual) {
      add = read_row(kernels, residual_buffer, residual.data, residual.dtype,
                     residual_element + column, count);
    }
    float* y = result_row(buffer, out.mut(), out.dtype, out_element + column);
    kernels.epilogue(y, c + i, bias.empty() ? nullptr : bias.data() + column, add, act, count);
    finish_row(kernels, y, out.mut(), out.dtype, out_element + column, count);
  }
}

}  // namespace orrery::cpu
