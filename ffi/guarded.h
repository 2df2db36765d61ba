// Exceptions end at the border to XLA, which is C.
#ifndef JAX_FA_GUARDED_H_
#define JAX_FA_GUARDED_H_

#include <exception>
#include <new>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_fa {

// What `operation` returns; an exception becomes an error of the call, `no_memory` if that is why.
template <typename Operation>
xla::ffi::Error Guarded(const char* no_memory, Operation operation) {
  try {
    return operation();
  } catch (const std::bad_alloc&) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted, no_memory);
  } catch (const std::exception& exception) {
    return xla::ffi::Error(xla::ffi::ErrorCode::kInternal,
                           std::string("jax_fa: ") + exception.what());
  }
}

}  // namespace jax_fa

#endif  // JAX_FA_GUARDED_H_
