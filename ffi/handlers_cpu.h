// FFI handlers of platform "cpu".
#ifndef JAX_FA_HANDLERS_CPU_H_
#define JAX_FA_HANDLERS_CPU_H_

#include "xla/ffi/api/c_api.h"

namespace jax_fa {

extern "C" XLA_FFI_Error* kForwardCpu(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* kBackwardCpu(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* kBiasGradientCpu(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_fa

#endif  // JAX_FA_HANDLERS_CPU_H_
