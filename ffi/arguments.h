// Reads FwdParams, BwdParams or DbiasParams from XLA FFI call frames. schema.h lists the arrays and
// attributes in their order; an absent operand is an array [0] of its element type. On CUDA scratch
// follows the results.
#ifndef JAX_FA_ARGUMENTS_H_
#define JAX_FA_ARGUMENTS_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "schema.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa {

// The attributes of all operations: a Problem without extents. Fields are only ever added;
// programs exported earlier lack the new ones, which are then zero or empty.
struct Attributes {
  Problem problem;
};

// Where a call runs, which decides whether scratch follows its results.
enum class Platform { kCpu, kCuda };

// Checks numbers of arrays, dtypes, ranks and extents against each other, and attributes; errors
// are kInvalidArgument. Params is FwdParams, BwdParams or DbiasParams.
template <typename Params>
xla::ffi::ErrorOr<Params> Read(const xla::ffi::RemainingArgs& args,
                               const xla::ffi::RemainingRets& rets, const Attributes& attributes,
                               Platform platform);

// Names in call order, for the test that compares them with schema.py.
std::vector<std::string> OperandNames(std::string_view operation);
std::vector<std::string> AttributeNames();

}  // namespace jax_fa

template <>
struct xla::ffi::AttrDecoding<jax_fa::Attributes> {
  using Type = jax_fa::Attributes;
  static std::optional<Type> Decode(XLA_FFI_AttrType type, void* attr,
                                    DiagnosticEngine& diagnostic);
};

#endif  // JAX_FA_ARGUMENTS_H_
