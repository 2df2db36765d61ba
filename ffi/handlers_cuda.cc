// The two operations on platform "CUDA": decode, find the variant, launch it.
//
// XLA runs the initialize stage of a call before each of its executions, outside graph capture; the
// first one on a device loads the variant there. Execute only launches: it may be captured into a
// command buffer.
#include "handlers_cuda.h"

#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "checks.h"
#include "driver.h"
#include "kernel_table.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

constexpr uintptr_t kAlignment = 16;  // jax_fa/kernels/abi.py: ALIGNMENT_BYTES

// Where a call runs.
struct Place {
  int32_t ordinal;
  void* stream;
};

// A call with the variant that serves it.
struct Selection {
  const Variant* variant;
  Device device;
};

ffi::Error Unimplemented(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "jax_fa: " + what);
}

ffi::Error Internal(const Failure& failure) {
  return ffi::Error(ffi::ErrorCode::kInternal, "jax_fa: " + *failure);
}

// The arrays that TMA descriptors point at, or that are accessed 16 bytes at a time.
std::vector<const void*> AlignedArrays(const FwdParams& p) {
  return {p.q, p.k, p.v, p.out, p.scratch.out_parts};
}

std::vector<const void*> AlignedArrays(const BwdParams& p) {
  return {p.q, p.k, p.v, p.out, p.dout, p.dq, p.dk, p.dv};
}

template <typename Params>
ffi::Error CheckAlignment(const Params& params) {
  for (const void* array : AlignedArrays(params)) {
    if (reinterpret_cast<uintptr_t>(array) % kAlignment != 0) {
      return Unimplemented("an array starts at an address that is no multiple of " +
                           std::to_string(kAlignment) + " bytes");
    }
  }
  return ffi::Error::Success();
}

template <typename Params>
ffi::ErrorOr<Selection> Select(const Params& params, const Place& place) {
  if (const Complaint complaint = CheckGpuProblem(params.problem)) {
    return ffi::Unexpected(Unimplemented(*complaint));
  }
  if (KernelTable().num_variants == 0) {
    return ffi::Unexpected(Unimplemented(
        "this build holds no GPU kernels. `python -m jax_fa` prints the command that compiles "
        "some; implementation='xla' needs none"));
  }
  Selection selection{};
  if (const Failure failure = QueryDevice(place.ordinal, place.stream, &selection.device)) {
    return ffi::Unexpected(Internal(failure));
  }
  const int32_t capability = selection.device.capability;
  const int32_t arch = ArchOf(capability);
  if (arch == 0) {
    return ffi::Unexpected(Unimplemented("no kernels are compiled for GPUs of compute capability " +
                                         std::to_string(capability / 10) + "." +
                                         std::to_string(capability % 10)));
  }
  const VariantKey key = KeyOf(params, arch);
  selection.variant = FindVariant(key);
  if (selection.variant == nullptr) return ffi::Unexpected(Unimplemented(Refusal(key)));
  return selection;
}

template <typename Params>
ffi::Error Initialize(const ffi::ErrorOr<Params>& params, const Place& place) {
  if (params.has_error()) return params.error();
  const ffi::ErrorOr<Selection> selection = Select(*params, place);
  if (selection.has_error()) return selection.error();
  if (const Failure failure = Load(selection->variant->object, place.ordinal, place.stream)) {
    return Internal(failure);
  }
  return ffi::Error::Success();
}

template <typename Params>
ffi::Error Execute(const ffi::ErrorOr<Params>& params, const Place& place) {
  if (params.has_error()) return params.error();
  if (ffi::Error error = CheckAlignment(*params); error.failure()) return error;
  const ffi::ErrorOr<Selection> selection = Select(*params, place);
  if (selection.has_error()) return selection.error();
  Arguments arguments;
  FillArguments(*params, selection->device, place.stream, &arguments);
  if (const Failure failure = Call(selection->variant->object, place.ordinal, &arguments)) {
    return Internal(failure);
  }
  return ffi::Error::Success();
}

ffi::Error InitializeForward(int32_t ordinal, void* stream, Attributes attributes,
                             ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Initialize(ForwardParams(args, rets, attributes, Platform::kCuda), {ordinal, stream});
}

ffi::Error ExecuteForward(int32_t ordinal, void* stream, Attributes attributes,
                          ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Execute(ForwardParams(args, rets, attributes, Platform::kCuda), {ordinal, stream});
}

ffi::Error InitializeBackward(int32_t ordinal, void* stream, Attributes attributes,
                              ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Initialize(BackwardParams(args, rets, attributes, Platform::kCuda), {ordinal, stream});
}

ffi::Error ExecuteBackward(int32_t ordinal, void* stream, Attributes attributes,
                           ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Execute(BackwardParams(args, rets, attributes, Platform::kCuda), {ordinal, stream});
}

template <ffi::ExecutionStage stage>
auto Binding() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::PlatformStream<void*>>()
      .template Attrs<Attributes>()
      .RemainingArgs()
      .RemainingRets();
}

constexpr auto kInitialize = ffi::ExecutionStage::kInitialize;
constexpr auto kExecute = ffi::ExecutionStage::kExecute;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kInitializeForwardCuda, InitializeForward, Binding<kInitialize>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kForwardCuda, ExecuteForward, Binding<kExecute>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kInitializeBackwardCuda, InitializeBackward, Binding<kInitialize>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kBackwardCuda, ExecuteBackward, Binding<kExecute>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_fa
