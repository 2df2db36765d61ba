// The operations on platform "CUDA": decode, look the variant up, launch it.
//
// XLA runs the initialize stage of a call before each of its executions, outside graph capture; the
// first one on a device loads the variant there, which the attributes alone tell. Execute reads the
// arrays and only launches: it may be captured into a command buffer.
#include "handlers_cuda.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "arguments.h"
#include "checks.h"
#include "driver.h"
#include "guarded.h"
#include "kernel_table.h"
#include "schema.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

// Where a call runs.
struct Place {
  int32_t ordinal;
  void* stream;
};

ffi::Error Unimplemented(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "jax_fa: " + what);
}

ffi::Error Internal(const Failure& failure) {
  return ffi::Error(ffi::ErrorCode::kInternal, "jax_fa: " + *failure);
}

// Of the arrays that kernels access 16 bytes at a time, by TMA or otherwise.
template <typename Params>
ffi::Error CheckAlignment(const Params& params) {
  bool is_aligned = true;
  const auto check = [&](const Array& array, const auto* pointer) {
    const bool fits = reinterpret_cast<uintptr_t>(pointer) % kAlignmentBytes == 0;
    is_aligned = is_aligned && (fits || !array.is_aligned);
  };
  Params::Operands(params, check);
  Params::Results(params, check);
  Params::Scratch(params, check);
  if (is_aligned) return ffi::Error::Success();
  return Unimplemented("an array starts at an address that is no multiple of " +
                       std::to_string(kAlignmentBytes) + " bytes");
}

// The variant that a program calls, for the device at hand.
template <typename Params>
ffi::ErrorOr<const Variant*> Select(std::string_view kernel, const Place& place, Device* device) {
  if (KernelTable().num_variants == 0) {
    return ffi::Unexpected(Unimplemented(
        "this build holds no GPU kernels. `python -m jax_fa` prints the command that compiles "
        "some; implementation='xla' needs none"));
  }
  if (const Failure failure = QueryDevice(place.ordinal, place.stream, device)) {
    return ffi::Unexpected(Internal(failure));
  }
  const Lookup found = FindVariant(Params::kOperation, device->capability, kernel);
  if (found.variant == nullptr) return ffi::Unexpected(Unimplemented(found.complaint));
  return found.variant;
}

constexpr char kNoMemory[] = "jax_fa: out of host memory";

template <typename Params>
ffi::Error Initialize(int32_t ordinal, void* stream, KernelName name, ffi::RemainingArgs,
                      ffi::RemainingRets) {
  return Guarded(kNoMemory, [&]() -> ffi::Error {
    Device device{};
    const auto variant = Select<Params>(name.kernel, {ordinal, stream}, &device);
    if (variant.has_error()) return variant.error();
    if (const Failure failure = Load((*variant)->object, ordinal, stream)) return Internal(failure);
    return ffi::Error::Success();
  });
}

template <typename Params>
ffi::Error Launch(int32_t ordinal, void* stream, const Attributes& attributes,
                  const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  const ffi::ErrorOr<Params> params = Read<Params>(args, rets, attributes, Platform::kCuda);
  if (params.has_error()) return params.error();
  if (ffi::Error error = CheckAlignment(*params); error.failure()) return error;
  if (const Complaint complaint = CheckGpuProblem(params->problem)) {
    return Unimplemented(*complaint);
  }
  Device device{};
  const auto variant = Select<Params>(params->problem.kernel, {ordinal, stream}, &device);
  if (variant.has_error()) return variant.error();
  if (const Complaint complaint = Mismatch(**variant, params->problem)) {
    return Unimplemented(*complaint);
  }
  Arguments arguments;
  FillArguments(*params, device, stream, &arguments);
  if (const Failure failure = Call((*variant)->object, ordinal, &arguments)) {
    return Internal(failure);
  }
  return ffi::Error::Success();
}

template <typename Params>
ffi::Error Execute(int32_t ordinal, void* stream, Attributes attributes, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  return Guarded(kNoMemory,
                 [&] { return Launch<Params>(ordinal, stream, attributes, args, rets); });
}

template <ffi::ExecutionStage stage>
auto Binding() {
  constexpr bool is_execute = stage == ffi::ExecutionStage::kExecute;
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::PlatformStream<void*>>()
      .template Attrs<std::conditional_t<is_execute, Attributes, KernelName>>()
      .RemainingArgs()
      .RemainingRets();
}

constexpr auto kInitialize = ffi::ExecutionStage::kInitialize;
constexpr auto kExecute = ffi::ExecutionStage::kExecute;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInitializeForwardCuda, Initialize<FwdParams>,
                              Binding<kInitialize>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kForwardCuda, Execute<FwdParams>, Binding<kExecute>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kInitializeBackwardCuda, Initialize<BwdParams>,
                              Binding<kInitialize>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kBackwardCuda, Execute<BwdParams>, Binding<kExecute>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kInitializeBiasGradientCuda, Initialize<DbiasParams>,
                              Binding<kInitialize>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kBiasGradientCuda, Execute<DbiasParams>, Binding<kExecute>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_fa
