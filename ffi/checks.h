// Checks that every call must pass before it reaches a kernel, from FFI handlers and record mode
// alike. Kernels divide by extents, multiply them and follow pointers without checking.
#ifndef JAX_FA_CHECKS_H_
#define JAX_FA_CHECKS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "schema.h"

namespace jax_fa {

// Nothing, or what is wrong and what would be right.
using Complaint = std::optional<std::string>;

// Extents and attributes, as every platform needs them.
Complaint CheckProblem(const Problem& problem);

// The limits that GPU kernels have beyond that.
Complaint CheckGpuProblem(const Problem& problem);

// Arrays with elements must have addresses, and those that belong together must all be present.
Complaint CheckArrays(const FwdParams& params);
Complaint CheckArrays(const BwdParams& params);
Complaint CheckArrays(const DbiasParams& params);

// Scratch with elements must have addresses, and the number of key parts must be a valid one.
Complaint CheckScratch(const FwdParams& params);
Complaint CheckScratch(const BwdParams& params);
Complaint CheckScratch(const DbiasParams& params);

}  // namespace jax_fa

#endif  // JAX_FA_CHECKS_H_
