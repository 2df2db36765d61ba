// The operations on platform "cpu": decode, then run the blocked kernels on XLA's own threads.
#include "handlers_cpu.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "arguments.h"
#include "attention_cpu.h"
#include "guarded.h"
#include "loop.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

ParallelFor On(ffi::ThreadPool& pool) {
  return [&pool](int64_t count, const std::function<void(int64_t)>& body) {
    RunLoop(count, body, std::min(pool.num_threads(), count) - 1,
            [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  };
}

constexpr char kNoMemory[] =
    "jax_fa: the CPU kernels found no memory for their scratch, which is a few hundred KB per "
    "thread, and for a backward 4 bytes per query row and head";

template <typename Params, void (*compute)(const Params&, const ParallelFor&)>
ffi::Error Execute(ffi::ThreadPool pool, Attributes attributes, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  return Guarded(kNoMemory, [&]() -> ffi::Error {
    const auto params = Read<Params>(args, rets, attributes, Platform::kCpu);
    if (params.has_error()) return params.error();
    compute(*params, On(pool));
    return ffi::Error::Success();
  });
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Attrs<Attributes>()
      .RemainingArgs()
      .RemainingRets();
}

constexpr auto kForward = Execute<FwdParams, AttentionForwardCpu>;
constexpr auto kBackward = Execute<BwdParams, AttentionBackwardCpu>;
constexpr auto kBiasGradient = Execute<DbiasParams, AttentionBiasGradientCpu>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kForwardCpu, kForward, Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kBackwardCpu, kBackward, Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kBiasGradientCpu, kBiasGradient, Binding());

}  // namespace jax_fa
