// The compiled GPU kernels as data. `python -m jax_fa.aot` writes the definition of KernelTable()
// to kernel_table.gen.cc; kernel_table_empty.cc stands in where no GPU kernels are built.
// jax_fa/spec/variants.py is the list behind both, and jax_fa/spec/arch.py says which GPUs run
// what.
//
// Which kernel serves a call is decided where the call is lowered (jax_fa/runtime/dispatch.py);
// here it is looked up by name.
#ifndef JAX_FA_KERNEL_TABLE_H_
#define JAX_FA_KERNEL_TABLE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "driver.h"
#include "schema.h"

namespace jax_fa {

// Parts into which a forward may split the keys of a query tile.
enum class Parts { kOne, kSeveral, kAny };

// Constants that a variant was compiled with and cannot check: with other values it would access
// memory outside its arrays.
struct Takes {
  DType dtype;
  int64_t head_dim;  // and less, in steps of kHeadStep, as value_dim
  int64_t value_dim;
  Parts parts;
  bool has_bias;
  bool gives_dbias = false;  // a backward that may be asked for the gradient of the bias
};

struct Variant {
  Takes takes;
  Object object;
  const char* ptx_sha256 = "";  // of the PTX that the object was assembled from
};

// The family whose kernels a GPU runs, by what their names say of kind and heads
// (jax_fa/spec/arch.py).
struct Capability {
  int32_t capability;  // 10 * major + minor
  const char* operation;
  const char* part;    // of their names; "" for those of no earlier row
  const char* family;  // as names of variants spell it
};

struct Table {
  const Variant* variants;
  int32_t num_variants;
  const Capability* capabilities;
  int32_t num_capabilities;
};

const Table& KernelTable();

// The variant of `operation` ("fwd", "bwd" or "dbias") named `kernel` that a device runs, or a
// complaint: why there is none, and what to do about it.
struct Lookup {
  const Variant* variant;
  std::string complaint;
};
Lookup FindVariant(const char* operation, int32_t capability, std::string_view kernel);

// The difference between a call and those that a variant takes, or nothing.
std::optional<std::string> Mismatch(const Variant& variant, const Problem& problem);

// The parameter list of an operation (jax_fa/spec/abi.py), the same for all its variants.
// Params is FwdParams, BwdParams or DbiasParams, whose extents must fit 32 bits.
template <typename Params>
void FillArguments(const Params& params, const Device& device, void* stream, Arguments* arguments) {
  static_assert(Params::kNumParameters <= Arguments::kMax);
  params.Parameters(device.num_sms, stream, [&](auto value) { arguments->Add(value); });
}

}  // namespace jax_fa

#endif  // JAX_FA_KERNEL_TABLE_H_
