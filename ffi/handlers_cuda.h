// FFI handlers of platform "CUDA". Always registered; without GPU kernels in the build, or without
// a GPU, they return an error that says so.
#ifndef JAX_FA_HANDLERS_CUDA_H_
#define JAX_FA_HANDLERS_CUDA_H_

#include "xla/ffi/api/c_api.h"

namespace jax_fa {

extern "C" XLA_FFI_Error* kInitializeForwardCuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* kForwardCuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* kInitializeBackwardCuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* kBackwardCuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* kInitializeBiasGradientCuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* kBiasGradientCuda(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_fa

#endif  // JAX_FA_HANDLERS_CUDA_H_
