// The two operations on platform "cpu": decode, then run the blocked kernels on XLA's own threads.
#include "handlers_cpu.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "arguments.h"
#include "attention_cpu.h"

namespace jax_fa {
namespace {

namespace ffi = ::xla::ffi;

// One parallel loop. Indices are claimed, never assigned: the calling thread alone can finish the
// loop, so it cannot deadlock when every pool thread is busy (or is itself waiting here).
class Loop {
 public:
  Loop(int64_t count, const std::function<void(int64_t)>& body) : count_(count), body_(body) {}

  // Claims and runs indices until none is left. A helper that arrives after the end of the loop
  // claims nothing and so never touches `body_`, which the caller owns.
  void Work() {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      body_(i);
      if (done_.fetch_add(1) + 1 == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load() == count_; });
  }

 private:
  const int64_t count_;
  const std::function<void(int64_t)>& body_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

ParallelFor On(ffi::ThreadPool& pool) {
  return [&pool](int64_t count, const std::function<void(int64_t)>& body) {
    if (count <= 0) return;
    const auto loop = std::make_shared<Loop>(count, body);
    const int64_t helpers = std::min(pool.num_threads(), count) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->Work(); });
    loop->Work();
    loop->Wait();
  };
}

ffi::Error CheckProblem(const Problem& problem) {
  if (problem.mask_mod.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "jax_fa: CPU kernels take no mask_mod such as '" +
                        std::string(problem.mask_mod) + "'; use implementation='xla'");
}

ffi::Error ForwardCpu(ffi::ThreadPool pool, Attributes attributes, ffi::RemainingArgs args,
                      ffi::RemainingRets rets) {
  const auto params = ForwardParams(args, rets, attributes);
  if (params.has_error()) return params.error();
  if (ffi::Error error = CheckProblem(params->problem); error.failure()) return error;
  AttentionForwardCpu(*params, On(pool));
  return ffi::Error::Success();
}

ffi::Error BackwardCpu(ffi::ThreadPool pool, Attributes attributes, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  const auto params = BackwardParams(args, rets, attributes);
  if (params.has_error()) return params.error();
  if (ffi::Error error = CheckProblem(params->problem); error.failure()) return error;
  AttentionBackwardCpu(*params, On(pool));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kForwardCpu, ForwardCpu,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attrs<Attributes>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kBackwardCpu, BackwardCpu,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attrs<Attributes>().RemainingArgs().RemainingRets());

}  // namespace jax_fa
