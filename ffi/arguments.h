// From XLA FFI call frames to FwdParams / BwdParams: the one place that knows operand order,
// attribute names and shapes. jax_fa/bindings.py is the other side of this agreement (a test
// compares them).
//
// Operands of both operations, in order; an absent one is an array [0] of its element type:
//   q k v  q_lengths kv_lengths  cu_seqlens_q cu_seqlens_k  q_segments kv_segments  q_offset sinks
// forward returns  out lse;  backward takes in addition  out lse dout dlse  and returns  dq dk dv
// dsinks.  On CUDA scratch follows, whose shapes checks.h knows:  out_parts lse_parts  of a forward
// whose keys are split;  dq_sum row_stats dkv_sums turns  of a backward.
#ifndef JAX_FA_ARGUMENTS_H_
#define JAX_FA_ARGUMENTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa {

// The attributes of both operations. Fields are only ever added, and a program that was exported
// before one was keeps its meaning: absent attributes are zero or empty.
struct Attributes {
  float scale;
  float soft_cap;        // 0: none
  int32_t window_left;   // kUnbounded: none
  int32_t window_right;  // kUnbounded: none; causal is 0
  bool bottom_right;
  bool deterministic;
  std::string_view mask_mod;  // empty: none
};

// Where a call runs, which decides whether scratch follows its results.
enum class Platform { kCpu, kCuda };

// Checks numbers of arrays, dtypes, ranks and extents against each other, and attributes; errors
// are kInvalidArgument.
xla::ffi::ErrorOr<FwdParams> ForwardParams(const xla::ffi::RemainingArgs& args,
                                           const xla::ffi::RemainingRets& rets,
                                           const Attributes& attributes, Platform platform);
xla::ffi::ErrorOr<BwdParams> BackwardParams(const xla::ffi::RemainingArgs& args,
                                            const xla::ffi::RemainingRets& rets,
                                            const Attributes& attributes, Platform platform);

// Names in call order, for the test that compares them with bindings.py.
std::vector<std::string> OperandNames(bool backward);
std::vector<std::string> AttributeNames();

}  // namespace jax_fa

template <>
struct xla::ffi::AttrDecoding<jax_fa::Attributes> {
  using Type = jax_fa::Attributes;
  static std::optional<Type> Decode(XLA_FFI_AttrType type, void* attr,
                                    DiagnosticEngine& diagnostic);
};

#endif  // JAX_FA_ARGUMENTS_H_
