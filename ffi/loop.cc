#include "loop.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

namespace jax_fa {
namespace {

// Indices are claimed, never assigned: the calling thread alone can finish the loop, so it cannot
// deadlock when every other thread is busy (or is itself waiting here).
class Loop {
 public:
  Loop(int64_t count, const std::function<void(int64_t)>& body) : count_(count), body_(body) {}

  // Claims indices until none is left, and runs them. A helper that arrives after the end of the
  // loop claims nothing and so never touches `body_`, which the caller owns.
  void Work() noexcept {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      if (!has_failed_.load()) Run(i);
      if (done_.fetch_add(1) + 1 == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load() == count_; });
    if (first_exception_) std::rethrow_exception(first_exception_);
  }

 private:
  void Run(int64_t i) noexcept {
    try {
      body_(i);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!first_exception_) first_exception_ = std::current_exception();
      has_failed_.store(true);
    }
  }

  const int64_t count_;
  const std::function<void(int64_t)>& body_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;
  std::condition_variable finished_;
  std::exception_ptr first_exception_;
};

}  // namespace

void RunLoop(int64_t count, const std::function<void(int64_t)>& body, int64_t helpers,
             const Schedule& schedule) {
  if (count <= 0) return;
  const auto loop = std::make_shared<Loop>(count, body);
  try {
    for (int64_t i = 0; i < helpers; ++i) schedule([loop] { loop->Work(); });
  } catch (...) {
    // Out of memory for a task: this thread does what no helper was found for.
  }
  loop->Work();
  loop->Wait();
}

}  // namespace jax_fa
