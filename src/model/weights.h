// A model's tensors, listed once. Each network has one function visit(weights, config, visitor)
// that names every tensor with its slot and shape; checking, loading, sharding, sizing and random
// initialisation are visitors over that list.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"

namespace orrery {

class Communicator;

// How tensor parallelism cuts a tensor: by output rows, by input columns, or not at all.
enum class Split : uint8_t { none, rows, columns };

// One or several weight matrices that are applied to the same input and whose outputs lie side by
// side: [N_i, K] each. A backend that fuses weights holds them as one part.
struct Linear {
  std::vector<View> weights;
  std::vector<View> biases;  // empty, or one per weight
  // Set when the input dimension was cut (Split::columns): the output is summed over this group.
  Communicator* reduce = nullptr;
  int64_t out_features() const;
  int64_t in_features() const;
};

// out = activation(x . w^T + b) + residual. `out` spans the parts side by side; `residual` may be
// `out` itself. With `reduce`, bias and residual are added once, to the first rank's part of the
// sum.
void apply(Backend& backend, MutView out, View x, const Linear& linear, View residual = {},
           Activation activation = Activation::none);

class WeightVisitor {
 public:
  virtual ~WeightVisitor() = default;
  // One tensor of the checkpoint; `slot` is its place in the weights struct.
  virtual void tensor(View& slot, const std::string& name, Shape shape,
                      Split split = Split::none) = 0;
  // A matrix of which a call takes a few rows (Backend::gather_rows): it need not leave host
  // memory.
  virtual void table(View& slot, const std::string& name, Shape shape) {
    tensor(slot, name, shape);
  }
  // Matrices [out[i], in] named prefixes[i] + ".weight" (and ".bias" [out[i]] when has_bias), all
  // split the same way. A bias is cut with Split::rows and whole with Split::columns.
  virtual void linear(Linear& slot, const std::vector<std::string>& prefixes,
                      const std::vector<int64_t>& out, int64_t in, Split split, bool has_bias) = 0;
};

using VisitFunction = std::function<void(WeightVisitor&)>;

// Which slice of every split tensor this rank holds, and the group that sums partial outputs.
struct Shard {
  int index = 0;
  int count = 1;
  Communicator* group = nullptr;
};

// Keeps alive whatever the views of a loaded weights struct point into: mappings or buffers.
class WeightStore {
 public:
  int64_t bytes() const { return bytes_; }  // held in memory by this rank, mapped pages included
  void release();                           // the views into it dangle afterwards

 private:
  friend class WeightLoader;
  friend class RandomWeights;
  std::optional<Safetensors> files_;
  std::vector<Buffer> buffers_;
  int64_t bytes_ = 0;
};

// What a listed tensor is made of in the files.
struct StoredAs {
  std::vector<TensorExpectation> parts;
  // The listed tensor, made from its parts; empty: the one part itself, in the listed shape.
  std::function<Tensor(const Safetensors& files)> make;
};
// How a kind of files stores the tensors of a list.
using Dialect =
    std::function<StoredAs(const Safetensors& files, const std::string& name, const Shape& shape)>;
// One stored tensor for each listed one, under its name or with a leading "model.".
StoredAs stored_as_listed(const Safetensors& files, const std::string& name, const Shape& shape);

struct LoadOptions {
  Dialect dialect = stored_as_listed;
  // Type of the weights on the device; empty: as stored (the CPU reads the mapping in place).
  std::optional<DType> dtype;
  Shard shard;
  // Names in the files that no slot asks for and that are no fault.
  std::function<bool(std::string_view)> ignored;
  // A changed host copy of a stored tensor, same shape, its type or f32, or an empty Tensor to take
  // it as it is.
  std::function<Tensor(const std::string& name, const View& stored)> adapt;
  bool check_finite = true;  // of this rank's slices
};

// Names, shapes, types and, when asked, finite values of everything: one Error lists all faults.
// Returns what check_finite() does.
std::vector<std::string> check_weights(const Safetensors& files, const VisitFunction& visit,
                                       const LoadOptions& options);

// Fills the slots. The files have been checked.
WeightStore fill_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options);

// Both, for a network whose tensors come and go together.
WeightStore load_weights(Backend& backend, Safetensors files, const VisitFunction& visit,
                         const LoadOptions& options);

// Memory that weights are laid into one after another, each at a multiple of 256 bytes. What is
// written at `write` is read at `read`, the same places of two blocks, or of one.
struct WeightBlock {
  std::byte* write = nullptr;
  std::byte* read = nullptr;
  DeviceKind write_device = DeviceKind::cpu, read_device = DeviceKind::cpu;
  size_t capacity = 0;
  size_t used = 0;
};

// As fill_weights(), into `block`; nothing else holds the weights. The block lies on this backend,
// or its `write` side in host memory, which is then filled by the calling thread.
void fill_block(Backend& backend, const Safetensors& files, const VisitFunction& visit,
                const LoadOptions& options, WeightBlock& block);

// Bytes that fill_block() lays out. `dtype_of` says how a tensor is held.
int64_t block_bytes(const VisitFunction& visit,
                    const std::function<DType(const std::string& name)>& dtype_of,
                    const Shard& shard);
// The type a tensor of these files is held in.
DType held_type(const Safetensors& files, const LoadOptions& options, const std::string& name);

// Fills the slots with addresses of the right shapes that must not be touched; returns the bytes a
// rank would hold. For dry runs.
int64_t place_weights(Backend& dry, const VisitFunction& visit, DType dtype,
                      const Shard& shard = {});

// The values of random weights: vectors named like norms are 1, all others are cut from one block
// of normals, each at another offset, with a deviation that keeps activations of order one.
class RandomCuts {
 public:
  static constexpr int64_t kBlock = int64_t{1} << 22;
  static constexpr float kDeviation = 0.02f;
  static bool is_ones(std::string_view name);
  // kBlock standard normals.
  static std::vector<float> normals(uint64_t seed);
  // Calls piece(at, from, count) for each run of a tensor's `count` values, elements [from, from +
  // count) of the block.
  void next(int64_t count,
            const std::function<void(int64_t at, int64_t from, int64_t count)>& piece);

 private:
  int64_t next_ = 0;
};

// Random weights in place of files, made on the backend. A rank's slice has the values that the
// whole has there. For benchmarks.
WeightStore random_weights(Backend& backend, const VisitFunction& visit, DType dtype, uint64_t seed,
                           const Shard& shard = {});

// As random_weights(), into a block whose `write` side lies in host memory; without one the slots
// are set and nothing is written.
void random_block(const Backend& backend, const VisitFunction& visit, DType dtype, uint64_t seed,
                  const Shard& shard, WeightBlock& block);

struct ListedTensor {
  std::string name;
  Shape shape;
};
std::vector<ListedTensor> list_tensors(const VisitFunction& visit);

}  // namespace orrery
