// For tests and fuzzers: one call of an XLA FFI handler, made through the C API as XLA makes it.
#ifndef JAX_FA_FFI_CALL_H_
#define JAX_FA_FFI_CALL_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jax_fa {

struct FfiArray {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> shape;
  void* data;
};

using FfiAttribute = std::variant<float, double, int32_t, int64_t, bool, std::string>;

struct FfiCall {
  std::vector<FfiArray> operands;
  std::vector<FfiArray> results;
  std::map<std::string, FfiAttribute> attributes;
  int num_threads = 1;
};

struct FfiOutcome {
  XLA_FFI_Error_Code code;
  std::string message;

  bool ok() const { return code == XLA_FFI_Error_Code_OK; }
};

// Stage "execute" of `handler`. Device 0, stream null.
FfiOutcome Invoke(XLA_FFI_Handler* handler, const FfiCall& call);

}  // namespace jax_fa

#endif  // JAX_FA_FFI_CALL_H_
