// The seam between attention_cpu.cc (compiled once, for any machine) and attention_cpu_kernels.cc
// (compiled once per instruction set): the former cuts the work into tiles, the latter does it.
//
// HAZARD: an inline function compiled for AVX-512 may be the copy that the linker keeps for the
// whole program. So nothing inline crosses this header: the kernels call only what is declared
// here, the C library, and their own functions, which have internal linkage.
#ifndef JAX_FA_ATTENTION_CPU_KERNELS_H_
#define JAX_FA_ATTENTION_CPU_KERNELS_H_

#include <cstdint>

#include "schema.h"

namespace jax_fa {

// One slot, every length resolved. Tokens are counted through the whole array: b * T + t.
struct Sequence {
  int64_t index;     // in q_lengths, sinks, ...
  int64_t q_first;   // token of query row 0
  int64_t kv_first;  // token of key 0
  Window window;     // its q_len and kv_len are the used ones
};

// The keys that a query row sees, and the query rows that see a key. Never beyond the lengths.
Range VisibleKeys(const Sequence& sequence, int64_t row);
Range VisibleRows(const Sequence& sequence, int64_t key);

// One unit of work: some rows of one sequence and one kv head with its group of query heads.
struct Tile {
  const Sequence* sequence;
  int64_t kv_head;
  int64_t first;  // packed query row (row * group + head in group), or key
};

// One unit of a bias's gradient: some rows and keys of one batch and head of it. It sums over all
// sequences, heads, rows or keys that the bias is the same for.
struct BiasTile {
  const Sequence* sequences;  // that have this batch of the bias
  int64_t num_sequences;
  int64_t batch;
  int64_t head;
  int64_t first_row;
  int64_t first_key;
};

struct CpuKernels {
  const char* name;
  int64_t (*tile_rows)(const Problem&);       // packed query rows, or keys, of one tile
  int64_t (*scratch_floats)(const Problem&);  // of one running tile; 64-byte aligned

  void (*forward)(const FwdParams&, const Tile&, float* scratch);

  // delta [B, T, N] = rowsum(dO * O) - dLSE for one query head of a sequence, and its dsink.
  void (*delta)(const BwdParams&, const Sequence&, int64_t head, float* scratch, float* delta);

  void (*backward_q)(const BwdParams&, const Tile&, const float* delta, float* scratch);
  void (*backward_kv)(const BwdParams&, const Tile&, const float* delta, float* scratch);

  int64_t (*bias_tile_rows)(const Problem&);  // of a BiasTile, which has tile_rows keys
  int64_t (*bias_scratch_floats)(const Problem&);
  void (*bias_gradient)(const DbiasParams&, const BiasTile&, float* scratch);
};

namespace portable {
extern const CpuKernels kKernels;
}
namespace avx2 {
extern const CpuKernels kKernels;
}
namespace avx512 {
extern const CpuKernels kKernels;
}
namespace neon {
extern const CpuKernels kKernels;
}

}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_CPU_KERNELS_H_
