// A backend that computes nothing. Run the model through it with a measuring arena to learn peak
// memory, flops and bytes before any weight is read.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace orrery {

// `device` is what it pretends to be. allocate() hands out addresses that must not be touched and
// adds their sizes up.
class DryRunBackend : public Backend {
 public:
  explicit DryRunBackend(DeviceKind device, bool fuses_weights = false)
      : device_(device), fuses_weights_(fuses_weights) {}
  DeviceKind device() const override { return device_; }
  std::string description() const override { return "dry run"; }
  Buffer allocate(size_t bytes) override;
  bool fuses_weights() const override { return fuses_weights_; }
  bool is_dry() const override { return true; }
  size_t allocated() const { return allocated_; }
  size_t peak_allocated() const { return peak_; }

 private:
  void do_upload(MutView, View) override {}
  void do_download(MutView, View) override {}
  void do_copy(MutView, View) override {}
  void do_fill(MutView, float) override {}
  void do_lincomb(MutView, std::span<const Term>) override {}
  void do_add_row(MutView, View) override {}
  void do_activation(MutView, View, Activation) override {}
  void do_clamp(MutView, float, float) override {}
  void do_to_bytes(MutView, View) override {}
  bool do_all_finite(View) override { return true; }
  void do_gather_rows(MutView, View, std::span<const int64_t>) override {}
  Ran do_linear(const LinearArgs&) override { return {"dry run"}; }
  Ran do_gated_linear(const GatedLinearArgs&) override { return {"dry run"}; }
  void do_quantise(MutOperand, View, Scaling) override {}
  void do_dequantise(MutView, Operand) override {}
  void do_rms_norm(MutView, View, View, const Norm&) override {}
  void do_qk_norm_rope(MutView, View, View, View, View, const Norm&) override {}
  Ran do_attention(const AttentionArgs&) override { return {"dry run"}; }
  Ran do_select_blocks(const SelectBlocksArgs&) override { return {"dry run"}; }
  Ran do_conv3d(const Conv3dArgs&) override { return {"dry run"}; }
  void do_conv_transpose1d(MutView, View, View, View, int64_t, int64_t) override {}
  void do_snake(MutView, View, View, View) override {}

  DeviceKind device_;
  bool fuses_weights_;
  size_t allocated_ = 0;
  size_t peak_ = 0;
  uintptr_t next_ = uintptr_t{1} << 41;
};

}  // namespace orrery
