// Record mode for Python: what a call would launch, without a GPU.
#ifndef JAX_FA_RECORD_H_
#define JAX_FA_RECORD_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

namespace jax_fa {

// Runs the variant that `call` names ("kernel"), for a GPU of compute capability `capability` (10 *
// major + minor) with `num_sms` multiprocessors, in record mode. `call` maps field names of
// Problem, Extras and FwdParams or BwdParams to numbers: pointers are addresses, which are never
// read; an absent field is 0. "dtype" is a name. Returns {"variant": name, "ptx_sha256": of its
// PTX, "launches":
// [{"kernel", "grid", "block", "cluster", "shared_bytes", "is_cooperative", "is_programmatic",
// "params"}]}, params being bytes as the kernel declares them.
nanobind::dict Record(const std::string& operation, int32_t capability, const nanobind::dict& call,
                      int32_t num_sms);

// Names of the variants in this build.
nanobind::list VariantNames();

}  // namespace jax_fa

#endif  // JAX_FA_RECORD_H_
