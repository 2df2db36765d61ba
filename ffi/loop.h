// A parallel loop on threads of another owner, such as XLA.
#ifndef JAX_FA_LOOP_H_
#define JAX_FA_LOOP_H_

#include <cstdint>
#include <functional>

namespace jax_fa {

// Starts a task on some thread, now or later, or in the calling thread.
using Schedule = std::function<void(std::function<void()> task)>;

// Runs body(i) for i in [0, count) in this thread and in `helpers` scheduled ones, and returns when
// all that have started are done. After an exception, indices not yet begun are skipped; the first
// exception is rethrown here, whichever thread it was thrown in.
void RunLoop(int64_t count, const std::function<void(int64_t)>& body, int64_t helpers,
             const Schedule& schedule);

}  // namespace jax_fa

#endif  // JAX_FA_LOOP_H_
