// An XLA FFI handler that does nothing, of any operands, results and attributes: what any custom
// call of so many costs (launch.py).

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error DoNothing(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EmptyCall, DoNothing,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});
