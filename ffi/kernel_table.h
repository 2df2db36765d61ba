// The compiled GPU kernels as data. `python -m jax_fa.aot` writes the definitions of KernelTable()
// and FillArguments() to kernel_table.gen.cc; kernel_table_empty.cc stands in where no GPU kernels
// are built. jax_fa/variants.py is the list behind both.
#ifndef JAX_FA_KERNEL_TABLE_H_
#define JAX_FA_KERNEL_TABLE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "driver.h"
#include "kernels.h"

namespace jax_fa {

enum class Operation : int32_t { kForward, kBackward };
enum class MaskClass : int32_t { kFull, kCausal, kGeneral };

// Everything fixed at compile time: `Variant` in jax_fa/variants.py.
struct VariantKey {
  Operation operation;
  int32_t arch;  // 90: compiled for sm90
  DType dtype;
  int64_t head_dim;
  int64_t value_dim;
  MaskClass mask;
  bool has_soft_cap;
  bool is_split;  // of forwards: several CTAs share the keys of a query tile
  std::string_view mask_mod;
};

struct Variant {
  VariantKey key;
  Object object;
  const char* ptx_sha256 = "";  // of the PTX that the object was assembled from
};

// Which family's kernels a GPU runs.
struct Capability {
  int32_t capability;  // 10 * major + minor
  int32_t arch;
};

struct Table {
  const Variant* variants;
  int32_t num_variants;
  const Capability* capabilities;
  int32_t num_capabilities;
};

const Table& KernelTable();

// The parameter list of an operation (jax_fa/kernels/abi.py), the same for all its variants.
// Extents must fit 32 bits.
void FillArguments(const FwdParams& params, const Device& device, void* stream,
                   Arguments* arguments);
void FillArguments(const BwdParams& params, const Device& device, void* stream,
                   Arguments* arguments);

// The cheapest mask class that serves a call; its Python twin is variants.mask_class.
MaskClass MaskClassOf(const Problem& problem, const Extras& extras);

// The family of a device, or 0 if none is compiled for it.
int32_t ArchOf(int32_t capability);

VariantKey KeyOf(const FwdParams& params, int32_t arch);
VariantKey KeyOf(const BwdParams& params, int32_t arch);

// The variant for `key`, or null.
const Variant* FindVariant(const VariantKey& key);

// What was asked for and what is compiled that comes closest, for error messages.
std::string Refusal(const VariantKey& key);

}  // namespace jax_fa

#endif  // JAX_FA_KERNEL_TABLE_H_
