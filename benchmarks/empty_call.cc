// XLA FFI handlers of any operands, results and attributes, for launch.py: one that does nothing,
// which is what any custom call of so many costs, and one that launches a kernel that does nothing,
// which is what any that runs on a GPU costs.

#include <dlfcn.h>

#include <cstdint>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error DoNothing(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error::Success();
}

constexpr char kEmptyKernel[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";

// The functions of the CUDA driver that are needed; results of 0 are success.
struct Driver {
  int32_t (*StreamGetCtx)(void*, void**);
  int32_t (*CtxPushCurrent)(void*);
  int32_t (*CtxPopCurrent)(void**);
  int32_t (*ModuleLoadData)(void**, const void*);
  int32_t (*ModuleGetFunction)(void**, void*, const char*);
  int32_t (*LaunchKernel)(void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                          uint32_t, void*, void**, void**);

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const auto find = [library](const char* name, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    };
    find("cuStreamGetCtx", StreamGetCtx);
    find("cuCtxPushCurrent_v2", CtxPushCurrent);
    find("cuCtxPopCurrent_v2", CtxPopCurrent);
    find("cuModuleLoadData", ModuleLoadData);
    find("cuModuleGetFunction", ModuleGetFunction);
    find("cuLaunchKernel", LaunchKernel);
  }
};

const Driver& Cuda() {
  static const Driver driver;
  return driver;
}

void* empty_kernel = nullptr;  // on the one device that launch.py uses

ffi::Error LoadEmptyKernel(void* stream, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  if (empty_kernel != nullptr) return ffi::Error::Success();
  void *context = nullptr, *module = nullptr;
  int32_t result = Cuda().StreamGetCtx(stream, &context);
  if (result == 0) result = Cuda().CtxPushCurrent(context);
  if (result == 0) result = Cuda().ModuleLoadData(&module, kEmptyKernel);
  if (result == 0) result = Cuda().ModuleGetFunction(&empty_kernel, module, "empty");
  Cuda().CtxPopCurrent(&context);
  return result == 0 ? ffi::Error::Success() : ffi::Error::Internal("no empty kernel");
}

ffi::Error LaunchEmptyKernel(void* stream, ffi::RemainingArgs, ffi::RemainingRets,
                             ffi::Dictionary) {
  const int32_t result = Cuda().LaunchKernel(empty_kernel, 1, 1, 1, 32, 1, 1, 0, stream, nullptr,
                                             nullptr);
  return result == 0 ? ffi::Error::Success() : ffi::Error::Internal("the launch failed");
}

template <ffi::ExecutionStage stage>
auto OfAStream() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::PlatformStream<void*>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EmptyCall, DoNothing,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(InitializeEmptyKernel, LoadEmptyKernel,
                              OfAStream<ffi::ExecutionStage::kInitialize>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(EmptyKernel, LaunchEmptyKernel,
                              OfAStream<ffi::ExecutionStage::kExecute>(),
                              {ffi::Traits::kCmdBufferCompatible});
