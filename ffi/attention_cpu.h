// Exact attention on the CPU: blocked online softmax, forward and backward.
//
// Reading order: jax_fa/spec/problem.py (conventions), this file, attention_cpu_kernels.cc (the
// algorithm), attention_cpu_simd.h (vectors, exp2, the one matrix product), attention_cpu.cc
// (sequences, tiles, choice of instruction set).
#ifndef JAX_FA_ATTENTION_CPU_H_
#define JAX_FA_ATTENTION_CPU_H_

#include <cstdint>
#include <functional>

#include "schema.h"

namespace jax_fa {

// Runs body(i) for i in [0, count) on any threads; returns when all have finished.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

// Writes every element of out and lse. Results do not depend on the number of threads.
void AttentionForwardCpu(const FwdParams& params, const ParallelFor& parallel_for);

// Writes every element of dq, dk, dv and dsinks. Results do not depend on the number of threads.
void AttentionBackwardCpu(const BwdParams& params, const ParallelFor& parallel_for);

// Writes every element of dbias. Results do not depend on the number of threads.
void AttentionBiasGradientCpu(const DbiasParams& params, const ParallelFor& parallel_for);

// The instruction set in use: "avx512", "avx2", "neon" or "portable".
const char* CpuIsa();

// For tests: uses the named instruction set from now on. False if it is not compiled in or this
// machine lacks it. Not to be called while attention runs.
bool ForceCpuIsa(const char* name);

}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_CPU_H_
