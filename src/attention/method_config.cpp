#include "attention/method_config.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "attention/config_fields.h"

namespace orrery {

namespace {

constexpr int64_t kMinBlock = 16, kMaxBlock = 2048;
constexpr int64_t kMaxReuse = 1000, kMaxWindow = 1 << 20;
constexpr double kDefaultSparsity = 0.75;

// Names of other engines' kernels: each means the backend's best exact one.
constexpr std::string_view kForeign[] = {"FLASH_ATTN", "TORCH_SDPA", "CUDNN_ATTN"};
constexpr std::string_view kOwn[] = {"native", "cudnn", "reference"};
constexpr std::string_view kAuto = "auto";

std::string provider_names() {
  std::string names;
  for (std::string_view name : kForeign) names += concat(names.empty() ? "" : ", ", name);
  for (std::string_view name : kOwn) names += concat(", ", name);
  return names;
}

bool is_own(std::string_view name) {
  return std::find(std::begin(kOwn), std::end(kOwn), name) != std::end(kOwn);
}

// `provider` may be narrowed by `implementation`, which is "auto" or one of ours.
KernelChoice parse_kernel(const Json& provider, const Json* implementation) {
  KernelChoice kernel;
  kernel.provider = expect_name(provider, "a provider");
  if (is_own(kernel.provider)) {
    kernel.implementation = kernel.provider;
  } else if (std::find(std::begin(kForeign), std::end(kForeign), kernel.provider) ==
             std::end(kForeign)) {
    refuse(provider, "unknown provider; there are ", provider_names());
  }
  if (implementation == nullptr) return kernel;
  const std::string& name = expect_name(*implementation, "an implementation");
  if (name == kAuto) return kernel;
  if (!is_own(name)) refuse(*implementation, "expected auto, native, cudnn or reference");
  if (!kernel.implementation.empty() && kernel.implementation != name) {
    refuse(*implementation, "contradicts the provider ", kernel.provider);
  }
  kernel.implementation = name;
  return kernel;
}

int64_t parse_block(const Json& value, std::string_view what) {
  const int64_t block = expect_integer(value, what, kMinBlock, kMaxBlock);
  if (!std::has_single_bit(static_cast<uint64_t>(block))) {
    refuse(value, "expected ", what, " as a power of two from ", kMinBlock, " to ", kMaxBlock);
  }
  return block;
}

bool parse_share_kv_group(const Json& config) {
  const Json* share = config.find("share_kv_group");
  if (share && !share->is_boolean()) refuse(*share, "expected share_kv_group as true or false");
  return share && share->as_bool();
}

std::unique_ptr<AttentionMethod> parse_block_topk(BlockSparseOptions options, const Json& config) {
  expect_object(config, "the configuration of block_topk", {"target_sparsity", "share_kv_group"});
  double sparsity = kDefaultSparsity;
  if (const Json* value = config.find("target_sparsity")) {
    sparsity = expect_number(*value, "target_sparsity");
    if (sparsity < 0 || sparsity >= 1) refuse(*value, "expected target_sparsity in [0, 1)");
  }
  options.share_kv_group = parse_share_kv_group(config);
  return make_block_topk(std::move(options), sparsity);
}

std::unique_ptr<AttentionMethod> parse_sliding_tile(BlockSparseOptions options,
                                                    const Json& config) {
  expect_object(config, "the configuration of sliding_tile", {"window"});
  const Json& window = expect_member(config, "window");
  if (!window.is_array() || window.items().size() != 3) {
    refuse(window, "expected three odd extents in tiles: time, height, width");
  }
  std::array<int64_t, 3> extents{};
  for (size_t axis = 0; axis < 3; ++axis) {
    extents[axis] = expect_integer(window.at(axis), "an extent", 1, kMaxWindow);
    if (extents[axis] % 2 == 0) {
      refuse(window.at(axis), "expected an odd extent, so that the window has a centre");
    }
  }
  return make_sliding_tile(std::move(options), extents);
}

std::unique_ptr<AttentionMethod> parse_threshold(BlockSparseOptions options, const Json& config) {
  expect_object(config, "the configuration of threshold", {"mass", "share_kv_group"});
  const Json& value = expect_member(config, "mass");
  const double mass = expect_number(value, "mass");
  if (mass <= 0 || mass > 1) refuse(value, "expected mass in (0, 1]");
  options.share_kv_group = parse_share_kv_group(config);
  return make_threshold(std::move(options), mass);
}

std::unique_ptr<AttentionMethod> parse_block_sparse(const Json& config) {
  expect_object(config, "the configuration of block_sparse",
                {"block_size", "selection", "backend"});
  BlockSparseOptions options;
  const Json& size = expect_member(config, "block_size");
  if (!size.is_array() || size.items().size() != 2) {
    refuse(size, "expected two numbers: query rows and keys of a block");
  }
  options.block_q = parse_block(size.at(0), "query rows of a block");
  options.block_k = parse_block(size.at(1), "keys of a block");
  if (const Json* backend = config.find("backend")) {
    expect_object(*backend, "the backend of block_sparse", {"require", "implementation"});
    options.kernel =
        parse_kernel(expect_member(*backend, "require"), backend->find("implementation"));
  }

  const Json& selection = expect_member(config, "selection");
  expect_object(selection, "a selection", {"name", "config", "reuse_steps"});
  const Json& name = expect_member(selection, "name");
  const std::string& selector = expect_name(name, "a selection's name");
  const Json* reuse = selection.find("reuse_steps");
  if (reuse) {
    options.reuse_steps = static_cast<int>(expect_integer(*reuse, "reuse_steps", 1, kMaxReuse));
  }
  const Json nothing = Json::object();
  const Json* given = selection.find("config");
  // A missing configuration is an empty one, reported at the selection.
  const Json& settings = given ? *given : nothing;
  if (selector == "block_topk") return parse_block_topk(std::move(options), settings);
  require(given != nullptr || (selector != "sliding_tile" && selector != "threshold"),
          selection.where(), ": the key \"config\" is missing");
  if (selector == "threshold") return parse_threshold(std::move(options), settings);
  if (selector != "sliding_tile") {
    refuse(name, "unknown selection; there are block_topk, sliding_tile and threshold");
  }
  if (reuse) {
    refuse(*reuse, "a sliding_tile window never depends on the data: leave reuse_steps out");
  }
  return parse_sliding_tile(std::move(options), settings);
}

}  // namespace

std::unique_ptr<AttentionMethod> parse_method(const Json& method) {
  if (method.is_string()) return make_dense(parse_kernel(method, nullptr));
  if (!method.is_object()) {
    refuse(method, "expected a method: a provider's name or an object");
  }
  if (const Json* name = method.find("name")) {
    expect_object(method, "a named method", {"name", "config"});
    if (expect_name(*name, "a method's name") != "block_sparse") {
      refuse(*name,
             "unknown method; a dense one is {\"backend\": PROVIDER}, the named one is "
             "block_sparse");
    }
    return parse_block_sparse(expect_member(method, "config"));
  }
  expect_object(method, "a dense method", {"backend", "implementation"});
  return make_dense(parse_kernel(expect_member(method, "backend"), method.find("implementation")));
}

}  // namespace orrery
