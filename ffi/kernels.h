// The two operations as plain structs: what the FFI handlers hand to a kernel of any platform.
// Conventions (scale, LSE, empty rows, padding) are stated once, in jax_fa/problem.py.
#ifndef JAX_FA_KERNELS_H_
#define JAX_FA_KERNELS_H_

#include <cstdint>
#include <string_view>

namespace jax_fa {

enum class DType : int32_t { kF32, kBF16, kF16 };

// A side of the band without a bound (jax_fa/band.py: UNBOUNDED).
inline constexpr int32_t kUnbounded = 1 << 30;
// Rows, or keys, of a sequence on a GPU at most (jax_fa/band.py: MAX_LENGTH).
inline constexpr int64_t kMaxLength = 1 << 28;

// Static semantics and extents, shared by both operations. All arrays are dense and row-major.
struct Problem {
  DType dtype;            // of q, k, v, out and their gradients
  int64_t batch;          // B; 1 when packed
  int64_t num_sequences;  // M: B, or the number of packed sequences
  int64_t q_len;          // T, or total_q when packed
  int64_t kv_len;         // S, or total_kv when packed
  int64_t num_q_heads;    // N
  int64_t num_kv_heads;   // K, divides N
  int64_t head_dim;       // D
  int64_t value_dim;      // Dv
  float scale;
  float soft_cap;             // 0: none
  int32_t window_left;        // keys before the diagonal, or kUnbounded
  int32_t window_right;       // keys beyond the diagonal, or kUnbounded; causal is 0
  bool bottom_right;          // alignment of the diagonal
  bool deterministic;         // backward only
  std::string_view mask_mod;  // function that hides further keys (jax_fa/mask_mods.py); "": none
};

// Per-sequence and per-token operands. A null pointer means "absent".
struct Extras {
  const int32_t* q_lengths;     // [M] used query rows of each slot
  const int32_t* kv_lengths;    // [M] used keys of each slot
  const int32_t* cu_seqlens_q;  // [M + 1] slot borders of packed queries; present iff packed
  const int32_t* cu_seqlens_k;  // [M + 1] slot borders of packed keys; present iff packed
  const int32_t* q_segments;    // [B, T] a query sees only keys of its own segment
  const int32_t* kv_segments;   // [B, S] present iff q_segments is
  const int32_t* q_offset;      // [M] position of query row 0, added to the diagonal
  const float* sinks;           // [M, N] one extra logit per head in the denominator
};

// Memory of a forward whose keys are split, uninitialised; all zero if they are not, as on the CPU.
// jax_fa/kernels/abi.py: FORWARD_SCRATCH.
struct FwdScratch {
  void* out_parts;  // float32 [num_splits, B, T, N, Dv]
  void* lse_parts;  // float32 [num_splits, B, T, N]
  int64_t num_splits;
};

struct FwdParams {
  Problem problem;
  Extras extras;
  const void* q;  // [B, T, N, D]
  const void* k;  // [B, S, K, D]
  const void* v;  // [B, S, K, Dv]
  void* out;      // [B, T, N, Dv]
  float* lse;     // [B, T, N] natural log
  FwdScratch scratch;
};

// Memory of a backward that nobody reads afterwards, uninitialised: sizes and meaning are those of
// SCRATCH in jax_fa/kernels/abi.py. The CPU has none of it.
struct BwdScratch {
  void* dq_sum;
  void* row_stats;
  void* dkv_sums;
  void* turns;
};

struct BwdParams {
  Problem problem;
  Extras extras;
  const void* q;      // [B, T, N, D]
  const void* k;      // [B, S, K, D]
  const void* v;      // [B, S, K, Dv]
  const void* out;    // [B, T, N, Dv]
  const float* lse;   // [B, T, N]
  const void* dout;   // [B, T, N, Dv]
  const float* dlse;  // [B, T, N]; null: zero
  void* dq;           // [B, T, N, D]
  void* dk;           // [B, S, K, D]
  void* dv;           // [B, S, K, Dv]
  float* dsinks;      // [M, N]; null iff extras.sinks is
  BwdScratch scratch;
};

}  // namespace jax_fa

#endif  // JAX_FA_KERNELS_H_
