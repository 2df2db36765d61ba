// Checks that a loop runs every index once, and that what its bodies throw arrives at its caller.
#include "loop.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "testing.h"

namespace jax_fa {
namespace {

// Threads of a pool that outlive each loop.
struct Threads {
  std::vector<std::thread> threads;

  Schedule Start() {
    return [this](std::function<void()> task) { threads.emplace_back(std::move(task)); };
  }
  ~Threads() {
    for (std::thread& thread : threads) thread.join();
  }
};

void EveryIndexRunsOnce() {
  for (int helpers : {0, 1, 5}) {
    Threads threads;
    std::vector<std::atomic<int>> runs(1000);
    RunLoop(1000, [&](int64_t i) { ++runs[i]; }, helpers, threads.Start());
    bool once = true;
    for (const std::atomic<int>& count : runs) once &= count == 1;
    Check(once, "every index runs once");
  }
}

// Whose turn it is to throw: a helper while the caller works, or the caller while helpers do.
void ExceptionsArriveAtTheCaller(bool caller_throws) {
  Threads threads;
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> has_thrown{false}, has_returned{false}, ran_after_return{false};
  std::atomic<int> working{0};
  bool caught = false;
  try {
    RunLoop(
        64,
        [&](int64_t) {
          if (has_returned) ran_after_return = true;
          if ((std::this_thread::get_id() == caller) == caller_throws) {
            has_thrown = true;
            throw std::bad_alloc();
          }
          ++working;
          while (!has_thrown) std::this_thread::yield();
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          --working;
        },
        3, threads.Start());
  } catch (const std::bad_alloc&) {
    caught = true;
  }
  has_returned = true;
  Check(caught, caller_throws ? "what the caller throws" : "what a helper throws");
  Check(working == 0, "all that began have ended");
  Check(!ran_after_return, "nothing begins afterwards");
}

void TheFirstExceptionIsKept() {
  std::string caught;
  try {
    RunLoop(8, [](int64_t i) { throw std::to_string(i); }, 0, [](std::function<void()>) {});
  } catch (const std::string& text) {
    caught = text;
  }
  Check(caught == "0", "the first exception is kept");
}

void HelpersThatCannotBeFoundAreDoneWithout() {
  int64_t sum = 0;
  RunLoop(
      10, [&](int64_t i) { sum += i; }, 3, [](std::function<void()>) { throw std::bad_alloc(); });
  Check(sum == 45, "a loop without helpers");
}

}  // namespace
}  // namespace jax_fa

int main() {
  jax_fa::EveryIndexRunsOnce();
  jax_fa::ExceptionsArriveAtTheCaller(true);
  jax_fa::ExceptionsArriveAtTheCaller(false);
  jax_fa::TheFirstExceptionIsKept();
  jax_fa::HelpersThatCannotBeFoundAreDoneWithout();
  std::printf("loop_test: %d failed\n", jax_fa::failed);
  return jax_fa::failed != 0;
}
