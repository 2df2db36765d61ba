// What a call must satisfy before a kernel may see it, whoever makes it: FFI handlers and record
// mode. Kernels divide by extents, multiply them and follow pointers without looking.
#ifndef JAX_FA_CHECKS_H_
#define JAX_FA_CHECKS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"

namespace jax_fa {

// Nothing, or what is wrong and what would be right.
using Complaint = std::optional<std::string>;

// Extents and attributes, as every platform needs them.
Complaint CheckProblem(const Problem& problem);

// The limits that GPU kernels have beyond that.
Complaint CheckGpuProblem(const Problem& problem);

// That arrays with elements have addresses, and that those which belong together are all there.
Complaint CheckArrays(const FwdParams& params);
Complaint CheckArrays(const BwdParams& params);

// Memory that a GPU kernel takes beside operands and results.
inline constexpr const char* kForwardScratch[] = {"out_parts", "lse_parts"};
inline constexpr const char* kBackwardScratch[] = {"dq_sum", "row_stats", "dkv_sums", "turns"};

struct ScratchArray {
  const char* name;  // one of the above
  bool is_int32;     // else float32
  std::vector<int64_t> shape;
};

// Parts into which keys may be split: RESIDENT_CTAS in jax_fa/kernels/abi.py.
inline constexpr int64_t kMaxSplits = 132;

// The twins of forward_scratch_shapes and scratch_shapes in jax_fa/kernels/abi.py; a test compares
// them. A forward has scratch if `num_splits` is at least 2.
std::vector<ScratchArray> ForwardScratch(const Problem& problem, int64_t num_splits);
std::vector<ScratchArray> BackwardScratch(const Problem& problem);

// That scratch with elements has addresses.
Complaint CheckScratch(const FwdParams& params);
Complaint CheckScratch(const BwdParams& params);

}  // namespace jax_fa

#endif  // JAX_FA_CHECKS_H_
