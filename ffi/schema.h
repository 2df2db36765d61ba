// What crosses the borders between JAX, C++ and kernels: arrays, extents and attributes of all
// operations, what the FFI handlers hand to a kernel of any platform. Written from
// jax_fa/spec/schema.py, and jax_fa/spec/band.py, by `python ffi/write_schema.py`; do not edit.
// Conventions (scale, LSE, empty rows, padding) are stated once, in jax_fa/spec/problem.py.
// clang-format off
#ifndef JAX_FA_SCHEMA_H_
#define JAX_FA_SCHEMA_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace jax_fa {

// jax_fa/spec/schema.py: VERSION.
inline constexpr int kVersion = 4;

enum class DType : int32_t { kF32, kBF16, kF16 };

// A side of the band without a bound (jax_fa/spec/band.py: UNBOUNDED).
inline constexpr int32_t kUnbounded = 1073741824;
// Rows, or keys, of a sequence on a GPU at most (jax_fa/spec/band.py: MAX_LENGTH).
inline constexpr int64_t kMaxLength = 268435456;
// Parts into which keys may be split (jax_fa/spec/division.py: RESIDENT_CTAS).
inline constexpr int64_t kMaxSplits = 132;
inline constexpr int64_t kHeadStep = 8;
// Query rows of a row of mask_words that is about a block (jax_fa/spec/division.py: MASK_BLOCK).
inline constexpr int64_t kMaskBlock = 128;
// Where aligned arrays start: at multiples of so many bytes.
inline constexpr uintptr_t kAlignmentBytes = 16;

// Static semantics and extents, shared by all operations. Arrays are dense and row-major.
struct Problem {
  DType dtype;  // of q, k, v, out and their gradients
  int64_t batch;  // B: 1 when packed
  int64_t num_sequences;  // M: B, or the number of packed sequences
  int64_t q_len;  // T: or total_q when packed
  int64_t kv_len;  // S: or total_kv when packed
  int64_t num_q_heads;  // N
  int64_t num_kv_heads;  // K: divides N
  int64_t head_dim;  // D
  int64_t value_dim;  // Dv
  int64_t mask_batch;  // Bm: 1 or B; 0 without a mask, as the following
  int64_t mask_heads;  // Nm: 1 or N
  int64_t mask_rows;  // Tm: 1, T or blocks of 128 rows
  int64_t mask_width;  // Wm: 1 or words of 32 keys
  int64_t bias_batch;  // Ba: 1 or B; 0 without a bias, as the following
  int64_t bias_heads;  // Na: 1 or N
  int64_t bias_rows;  // Ta: 1 or T
  int64_t bias_keys;  // Sa: 1 or S
  int64_t bias_bytes;  // Bb: of an element: 4, or 2
  int64_t num_splits;  // forward only: parts of the keys; 0 or 1: not split
  int64_t dq_dim;  // backward only: D that the kernel is compiled for
  bool gives_dbias;  // backward only: the gradient of the bias is a result, too
  float scale;
  float soft_cap;  // 0: none
  int32_t window_left;  // keys before the diagonal, or kUnbounded
  int32_t window_right;  // keys beyond the diagonal, or kUnbounded; causal is 0
  bool bottom_right;  // alignment of the diagonal
  bool deterministic;  // gradients are the same bits on every run
  std::string_view mask_mod;  // of older programs: a function that their kernels were compiled with; "": none
  std::string_view kernel;  // compiled kernel: its name without operation and family (jax_fa/spec/variants.py); on GPUs

  // visit(name, extent) for those that shapes tell.
  template <typename Self, typename Visit>
  static void Extents(Self& self, Visit&& visit) {
    visit("batch", self.batch);
    visit("num_sequences", self.num_sequences);
    visit("q_len", self.q_len);
    visit("kv_len", self.kv_len);
    visit("num_q_heads", self.num_q_heads);
    visit("num_kv_heads", self.num_kv_heads);
    visit("head_dim", self.head_dim);
    visit("value_dim", self.value_dim);
    visit("mask_batch", self.mask_batch);
    visit("mask_heads", self.mask_heads);
    visit("mask_rows", self.mask_rows);
    visit("mask_width", self.mask_width);
    visit("bias_batch", self.bias_batch);
    visit("bias_heads", self.bias_heads);
    visit("bias_rows", self.bias_rows);
    visit("bias_keys", self.bias_keys);
    visit("bias_bytes", self.bias_bytes);
  }
  // visit(name, value, is_required) for each.
  template <typename Self, typename Visit>
  static void Attributes(Self& self, Visit&& visit) {
    visit("scale", self.scale, true);
    visit("soft_cap", self.soft_cap, true);
    visit("window_left", self.window_left, true);
    visit("window_right", self.window_right, true);
    visit("bottom_right", self.bottom_right, true);
    visit("deterministic", self.deterministic, true);
    visit("mask_mod", self.mask_mod, false);
    visit("kernel", self.kernel, false);
  }
  // visit(name, value) for the attributes of the band.
  template <typename Self, typename Visit>
  static void Sides(Self& self, Visit&& visit) {
    visit("window_left", self.window_left);
    visit("window_right", self.window_right);
  }
};

// [lo, hi), empty when hi <= lo.
struct Range {
  int64_t lo;
  int64_t hi;
};

// The band of one sequence, everything known; jax_fa/spec/band.py explains it.
struct Window {
  int64_t shift;
  int64_t left;
  int64_t right;
  int64_t q_len;
  int64_t kv_len;

  // Keys that query `row` sees, for row < q_len.
  Range KeysOf(int64_t row) const { return {std::max<int64_t>(0, ((row + shift) - left)), std::min<int64_t>(kv_len, (((row + shift) + right) + 1))}; }
  // Query rows that see `key`, for key < kv_len.
  Range RowsOf(int64_t key) const { return {std::max<int64_t>(0, ((key - right) - shift)), std::min<int64_t>(q_len, (((key + left) - shift) + 1))}; }
  // visit(name, value) for each.
  template <typename Self, typename Visit>
  static void Fields(Self& self, Visit&& visit) {
    visit("shift", self.shift);
    visit("left", self.left);
    visit("right", self.right);
    visit("q_len", self.q_len);
    visit("kv_len", self.kv_len);
  }
};

// That of a sequence of these lengths.
inline Window WindowOf(const Problem& p, int64_t q_len, int64_t kv_len,
                       int64_t query_offset) {
  // Without a bound a side is farther than any query_offset reaches.
  const auto side = [](int32_t x) { return x >= kUnbounded ? int64_t{1} << 40 : x; };
  const int64_t shift = p.bottom_right ? ((query_offset + kv_len) - q_len) : query_offset;
  return {shift, side(p.window_left), side(p.window_right), q_len, kv_len};
}

// Letters of dimensions; jax_fa/spec/schema.py explains them.
namespace letters {
enum Letter : size_t { B, M, T, S, N, K, D, Dv, Bm, Nm, Tm, Wm, Ba, Na, Ta, Sa, Bb, M_plus_1, Tc, Wc, Z, P, R, Dq, H, E, U, x2 };
}
inline constexpr size_t kNumLetters = 28;

// The extent of each, of a problem that CheckProblem (checks.h) has passed.
using Extents = std::array<int64_t, kNumLetters>;
inline Extents ExtentsOf(const Problem& p) {
  const int64_t rows = ((((((p.batch * p.q_len) + 128) - 1) / 128) + p.num_sequences) * 128);
  const int64_t filling = std::max<int64_t>((132 / std::max<int64_t>((((((((p.batch * p.kv_len) + 128) - 1) / 128) + p.num_sequences) - p.batch) * p.num_kv_heads), 1)), 1);
  const int64_t filled = (std::max<int64_t>((((((((p.batch * p.kv_len) + 128) - 1) / 128) + p.num_sequences) - p.batch) * p.num_kv_heads), 1) * filling);
  const int64_t parts = std::max<int64_t>(std::min<int64_t>((filling * ((std::max<int64_t>(int64_t{p.window_left != kUnbounded || p.window_right != kUnbounded}, std::min<int64_t>(std::max<int64_t>(((((((filled * 1) + 132) - 1) / 132) * 40) - (((((filled * 4) + 132) - 1) / 132) * 11)), 0), 1)) * (std::max<int64_t>(std::min<int64_t>((528 / filled), 4), 1) - 1)) + 1)), (p.num_q_heads / p.num_kv_heads)), 1);
  const int64_t bias_parts = std::max<int64_t>(std::min<int64_t>((528 / std::max<int64_t>((((p.bias_batch * p.bias_heads) * (((p.bias_rows + 128) - 1) / 128)) * (((p.bias_keys + 128) - 1) / 128)), 1)), (((p.batch * p.num_q_heads) / std::max<int64_t>((p.bias_batch * p.bias_heads), 1)) / 4)), 1);
  return {
      p.batch,  // B
      p.num_sequences,  // M
      p.q_len,  // T
      p.kv_len,  // S
      p.num_q_heads,  // N
      p.num_kv_heads,  // K
      p.head_dim,  // D
      p.value_dim,  // Dv
      p.mask_batch,  // Bm
      p.mask_heads,  // Nm
      p.mask_rows,  // Tm
      p.mask_width,  // Wm
      p.bias_batch,  // Ba
      p.bias_heads,  // Na
      p.bias_rows,  // Ta
      p.bias_keys,  // Sa
      p.bias_bytes,  // Bb
      (p.num_sequences + 1),  // M+1
      std::min<int64_t>((std::min<int64_t>(p.mask_rows, (((p.q_len + 128) - 1) / 128)) * 8), (((p.q_len + 16) - 1) / 16)),  // Tc
      (((p.mask_width + 16) - 1) / 16),  // Wc
      ((bias_parts > 1) ? bias_parts : 0),  // Z
      ((p.num_splits > 1) ? p.num_splits : 0),  // P
      rows,  // R
      p.dq_dim,  // Dq
      ((parts > 1) ? parts : 0),  // H
      (((p.batch * p.kv_len) * p.num_kv_heads) * (p.head_dim + p.value_dim)),  // E
      (p.deterministic ? (rows / 64) : 0),  // U
      2,  // 2
  };
}

// kElement: Problem::dtype; kBias: that, or float32 if Problem::bias_bytes is 4.
enum class Element { kElement, kFloat32, kInt32, kBias };

// An array of a call, as jax_fa/spec/schema.py describes it.
struct Array {
  const char* name;
  Element element;
  bool is_optional;  // absent: no elements at the FFI, a null pointer here
  bool is_aligned;   // starts at a multiple of kAlignmentBytes on a GPU
  size_t rank;
  letters::Letter dims[5];
};

namespace arrays {
using namespace letters;
inline constexpr Array q{"q", Element::kElement, false, true, 4, {B, T, N, D}};
inline constexpr Array k{"k", Element::kElement, false, true, 4, {B, S, K, D}};
inline constexpr Array v{"v", Element::kElement, false, true, 4, {B, S, K, Dv}};
inline constexpr Array q_lengths{"q_lengths", Element::kInt32, true, false, 1, {M}};
inline constexpr Array kv_lengths{"kv_lengths", Element::kInt32, true, false, 1, {M}};
inline constexpr Array cu_seqlens_q{"cu_seqlens_q", Element::kInt32, true, false, 1, {M_plus_1}};
inline constexpr Array cu_seqlens_k{"cu_seqlens_k", Element::kInt32, true, false, 1, {M_plus_1}};
inline constexpr Array q_segments{"q_segments", Element::kInt32, true, false, 2, {B, T}};
inline constexpr Array kv_segments{"kv_segments", Element::kInt32, true, false, 2, {B, S}};
inline constexpr Array q_offset{"q_offset", Element::kInt32, true, false, 1, {M}};
inline constexpr Array sinks{"sinks", Element::kFloat32, true, false, 2, {M, N}};
inline constexpr Array mask_words{"mask_words", Element::kInt32, true, false, 4, {Bm, Nm, Tm, Wm}};
inline constexpr Array mask_map{"mask_map", Element::kInt32, true, false, 5, {Bm, Nm, x2, Tc, Wc}};
inline constexpr Array bias{"bias", Element::kBias, true, true, 4, {Ba, Na, Ta, Sa}};
inline constexpr Array out{"out", Element::kElement, false, true, 4, {B, T, N, Dv}};
inline constexpr Array lse{"lse", Element::kFloat32, false, false, 3, {B, T, N}};
inline constexpr Array out_parts{"out_parts", Element::kFloat32, false, true, 5, {P, B, T, N, Dv}};
inline constexpr Array lse_parts{"lse_parts", Element::kFloat32, false, false, 4, {P, B, T, N}};
inline constexpr Array dout{"dout", Element::kElement, false, true, 4, {B, T, N, Dv}};
inline constexpr Array dlse{"dlse", Element::kFloat32, true, false, 3, {B, T, N}};
inline constexpr Array dq{"dq", Element::kElement, false, true, 4, {B, T, N, D}};
inline constexpr Array dk{"dk", Element::kElement, false, true, 4, {B, S, K, D}};
inline constexpr Array dv{"dv", Element::kElement, false, true, 4, {B, S, K, Dv}};
inline constexpr Array dsinks{"dsinks", Element::kFloat32, true, false, 2, {M, N}};
inline constexpr Array dbias{"dbias", Element::kBias, true, true, 4, {Ba, Na, Ta, Sa}};
inline constexpr Array dq_sum{"dq_sum", Element::kFloat32, false, true, 3, {N, R, Dq}};
inline constexpr Array row_stats{"row_stats", Element::kFloat32, false, true, 3, {x2, N, R}};
inline constexpr Array dkv_sums{"dkv_sums", Element::kFloat32, false, true, 2, {H, E}};
inline constexpr Array turns{"turns", Element::kInt32, false, false, 2, {N, U}};
inline constexpr Array delta{"delta", Element::kFloat32, false, false, 3, {B, T, N}};
inline constexpr Array dbias_parts{"dbias_parts", Element::kFloat32, false, true, 5, {Z, Ba, Na, Ta, Sa}};
}  // namespace arrays

// Places of the operands that all operations have at the same place.
namespace places {
enum Place : size_t { q, k, v, q_lengths, kv_lengths, cu_seqlens_q, cu_seqlens_k, q_segments, kv_segments, q_offset, sinks };
}

// Operands that may be absent, of all operations: null pointers.
struct Extras {
  const int32_t* q_lengths;  // [M] used query rows of each slot
  const int32_t* kv_lengths;  // [M] used keys of each slot
  const int32_t* cu_seqlens_q;  // [M+1] slot borders of packed queries; present iff packed
  const int32_t* cu_seqlens_k;  // [M+1] slot borders of packed keys; present iff packed
  const int32_t* q_segments;  // [B, T] a query sees only keys of its own segment
  const int32_t* kv_segments;  // [B, S] present iff q_segments is
  const int32_t* q_offset;  // [M] position of query row 0, added to the diagonal
  const float* sinks;  // [M, N] one extra logit per head in the denominator
  const int32_t* mask_words;  // [Bm, Nm, Tm, Wm] bit i of word w: the row sees key 32 w + i
  const int32_t* mask_map;  // [Bm, Nm, 2, Tc, Wc] bit i of word w: 16 rows see some, all of 16 keys
  const void* bias;  // [Ba, Na, Ta, Sa] added to scale q.k; -inf hides a pair
};

// A forward on given arrays.
struct FwdParams {
  static constexpr const char* kTitle = "jax_fa forward";
  static constexpr const char* kOperation = "fwd";  // begins names of variants
  static constexpr bool kMayLackScratch = true;
  static constexpr size_t kNumOperands = 14;
  // Of these at the end, older programs lack some.
  static constexpr size_t kNumAddedOperands = 3;
  static constexpr size_t kNumResults = 2;
  // Of these at the end, calls on GPUs may lack some, and others have none.
  static constexpr size_t kNumAddedResults = 0;
  static constexpr size_t kNumScratch = 2;
  static constexpr int32_t kNumParameters = 43;

  Problem problem;
  Extras extras;
  const void* q;  // [B, T, N, D]
  const void* k;  // [B, S, K, D]
  const void* v;  // [B, S, K, Dv]
  void* out;  // [B, T, N, Dv]
  float* lse;  // [B, T, N] natural log
  // Memory of GPU kernels that nobody reads afterwards, uninitialised; else null.
  struct {
    float* out_parts;  // [P, B, T, N, Dv] what out would be if a part's keys were all, not rounded
    float* lse_parts;  // [P, B, T, N] likewise lse; -inf where a part shows nothing
  } scratch;

  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Operands(Self& self, Visit&& visit) {
    visit(arrays::q, self.q);
    visit(arrays::k, self.k);
    visit(arrays::v, self.v);
    visit(arrays::q_lengths, self.extras.q_lengths);
    visit(arrays::kv_lengths, self.extras.kv_lengths);
    visit(arrays::cu_seqlens_q, self.extras.cu_seqlens_q);
    visit(arrays::cu_seqlens_k, self.extras.cu_seqlens_k);
    visit(arrays::q_segments, self.extras.q_segments);
    visit(arrays::kv_segments, self.extras.kv_segments);
    visit(arrays::q_offset, self.extras.q_offset);
    visit(arrays::sinks, self.extras.sinks);
    visit(arrays::mask_words, self.extras.mask_words);
    visit(arrays::mask_map, self.extras.mask_map);
    visit(arrays::bias, self.extras.bias);
  }
  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Results(Self& self, Visit&& visit) {
    visit(arrays::out, self.out);
    visit(arrays::lse, self.lse);
  }
  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Scratch(Self& self, Visit&& visit) {
    visit(arrays::out_parts, self.scratch.out_parts);
    visit(arrays::lse_parts, self.scratch.lse_parts);
  }
  // visit(argument) for each parameter of a host entry, in order (spec/abi.py).
  // Extents must fit 32 bits.
  template <typename Visit>
  void Parameters(int32_t num_sms, void* stream, Visit&& visit) const {
    const FwdParams& self = *this;
    visit(static_cast<const void*>(self.q));
    visit(static_cast<const void*>(self.k));
    visit(static_cast<const void*>(self.v));
    visit(static_cast<const void*>(self.out));
    visit(static_cast<const void*>(self.lse));
    visit(static_cast<const void*>(self.scratch.out_parts));
    visit(static_cast<const void*>(self.scratch.lse_parts));
    visit(static_cast<int32_t>(self.problem.num_splits));
    visit(static_cast<const void*>(self.extras.q_lengths));
    visit(static_cast<const void*>(self.extras.kv_lengths));
    visit(static_cast<const void*>(self.extras.cu_seqlens_q));
    visit(static_cast<const void*>(self.extras.cu_seqlens_k));
    visit(static_cast<const void*>(self.extras.q_segments));
    visit(static_cast<const void*>(self.extras.kv_segments));
    visit(static_cast<const void*>(self.extras.q_offset));
    visit(static_cast<const void*>(self.extras.sinks));
    visit(static_cast<const void*>(self.extras.mask_words));
    visit(static_cast<const void*>(self.extras.mask_map));
    visit(static_cast<const void*>(self.extras.bias));
    visit(static_cast<int32_t>(self.problem.batch));
    visit(static_cast<int32_t>(self.problem.num_sequences));
    visit(static_cast<int32_t>(self.problem.q_len));
    visit(static_cast<int32_t>(self.problem.kv_len));
    visit(static_cast<int32_t>(self.problem.num_q_heads));
    visit(static_cast<int32_t>(self.problem.num_kv_heads));
    visit(static_cast<int32_t>(self.problem.head_dim));
    visit(static_cast<int32_t>(self.problem.value_dim));
    visit(static_cast<int32_t>(self.problem.mask_batch));
    visit(static_cast<int32_t>(self.problem.mask_heads));
    visit(static_cast<int32_t>(self.problem.mask_rows));
    visit(static_cast<int32_t>(self.problem.mask_width));
    visit(static_cast<int32_t>(self.problem.bias_batch));
    visit(static_cast<int32_t>(self.problem.bias_heads));
    visit(static_cast<int32_t>(self.problem.bias_rows));
    visit(static_cast<int32_t>(self.problem.bias_keys));
    visit(static_cast<int32_t>(self.problem.bias_bytes));
    visit(static_cast<float>(self.problem.scale));
    visit(static_cast<float>(self.problem.soft_cap));
    visit(static_cast<int32_t>(self.problem.window_left));
    visit(static_cast<int32_t>(self.problem.window_right));
    visit(static_cast<int32_t>(self.problem.bottom_right));
    visit(num_sms);
    visit(static_cast<const void*>(stream));
  }
};

// A backward on given arrays.
struct BwdParams {
  static constexpr const char* kTitle = "jax_fa backward";
  static constexpr const char* kOperation = "bwd";  // begins names of variants
  static constexpr bool kMayLackScratch = false;
  static constexpr size_t kNumOperands = 18;
  // Of these at the end, older programs lack some.
  static constexpr size_t kNumAddedOperands = 3;
  static constexpr size_t kNumResults = 5;
  // Of these at the end, calls on GPUs may lack some, and others have none.
  static constexpr size_t kNumAddedResults = 1;
  static constexpr size_t kNumScratch = 4;
  static constexpr int32_t kNumParameters = 52;

  Problem problem;
  Extras extras;
  const void* q;  // [B, T, N, D]
  const void* k;  // [B, S, K, D]
  const void* v;  // [B, S, K, Dv]
  const void* out;  // [B, T, N, Dv]
  const float* lse;  // [B, T, N] natural log
  const void* dout;  // [B, T, N, Dv]
  const float* dlse;  // [B, T, N] null: zero
  void* dq;  // [B, T, N, D]
  void* dk;  // [B, S, K, D]
  void* dv;  // [B, S, K, Dv]
  float* dsinks;  // [M, N]
  void* dbias;  // [Ba, Na, Ta, Sa]
  // Memory of GPU kernels that nobody reads afterwards, uninitialised; else null.
  struct {
    float* dq_sum;  // [N, R, Dq] dQ before scale and rounding, in the kernels' own order
    float* row_stats;  // [2, N, R] log2-sum-exp2, then delta, of every query row
    float* dkv_sums;  // [H, E] dK, then dV, before rounding, by part of a group of heads
    int32_t* turns;  // [N, U] key blocks that have added to each query block
  } scratch;

  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Operands(Self& self, Visit&& visit) {
    visit(arrays::q, self.q);
    visit(arrays::k, self.k);
    visit(arrays::v, self.v);
    visit(arrays::q_lengths, self.extras.q_lengths);
    visit(arrays::kv_lengths, self.extras.kv_lengths);
    visit(arrays::cu_seqlens_q, self.extras.cu_seqlens_q);
    visit(arrays::cu_seqlens_k, self.extras.cu_seqlens_k);
    visit(arrays::q_segments, self.extras.q_segments);
    visit(arrays::kv_segments, self.extras.kv_segments);
    visit(arrays::q_offset, self.extras.q_offset);
    visit(arrays::sinks, self.extras.sinks);
    visit(arrays::out, self.out);
    visit(arrays::lse, self.lse);
    visit(arrays::dout, self.dout);
    visit(arrays::dlse, self.dlse);
    visit(arrays::mask_words, self.extras.mask_words);
    visit(arrays::mask_map, self.extras.mask_map);
    visit(arrays::bias, self.extras.bias);
  }
  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Results(Self& self, Visit&& visit) {
    visit(arrays::dq, self.dq);
    visit(arrays::dk, self.dk);
    visit(arrays::dv, self.dv);
    visit(arrays::dsinks, self.dsinks);
    visit(arrays::dbias, self.dbias);
  }
  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Scratch(Self& self, Visit&& visit) {
    visit(arrays::dq_sum, self.scratch.dq_sum);
    visit(arrays::row_stats, self.scratch.row_stats);
    visit(arrays::dkv_sums, self.scratch.dkv_sums);
    visit(arrays::turns, self.scratch.turns);
  }
  // visit(argument) for each parameter of a host entry, in order (spec/abi.py).
  // Extents must fit 32 bits.
  template <typename Visit>
  void Parameters(int32_t num_sms, void* stream, Visit&& visit) const {
    const BwdParams& self = *this;
    visit(static_cast<const void*>(self.q));
    visit(static_cast<const void*>(self.k));
    visit(static_cast<const void*>(self.v));
    visit(static_cast<const void*>(self.out));
    visit(static_cast<const void*>(self.lse));
    visit(static_cast<const void*>(self.dout));
    visit(static_cast<const void*>(self.dlse));
    visit(static_cast<const void*>(self.dq));
    visit(static_cast<const void*>(self.dk));
    visit(static_cast<const void*>(self.dv));
    visit(static_cast<const void*>(self.dsinks));
    visit(static_cast<const void*>(self.dbias));
    visit(static_cast<const void*>(self.scratch.dq_sum));
    visit(static_cast<const void*>(self.scratch.row_stats));
    visit(static_cast<const void*>(self.scratch.dkv_sums));
    visit(static_cast<const void*>(self.scratch.turns));
    visit(static_cast<const void*>(self.extras.q_lengths));
    visit(static_cast<const void*>(self.extras.kv_lengths));
    visit(static_cast<const void*>(self.extras.cu_seqlens_q));
    visit(static_cast<const void*>(self.extras.cu_seqlens_k));
    visit(static_cast<const void*>(self.extras.q_segments));
    visit(static_cast<const void*>(self.extras.kv_segments));
    visit(static_cast<const void*>(self.extras.q_offset));
    visit(static_cast<const void*>(self.extras.sinks));
    visit(static_cast<const void*>(self.extras.mask_words));
    visit(static_cast<const void*>(self.extras.mask_map));
    visit(static_cast<const void*>(self.extras.bias));
    visit(static_cast<int32_t>(self.problem.batch));
    visit(static_cast<int32_t>(self.problem.num_sequences));
    visit(static_cast<int32_t>(self.problem.q_len));
    visit(static_cast<int32_t>(self.problem.kv_len));
    visit(static_cast<int32_t>(self.problem.num_q_heads));
    visit(static_cast<int32_t>(self.problem.num_kv_heads));
    visit(static_cast<int32_t>(self.problem.head_dim));
    visit(static_cast<int32_t>(self.problem.value_dim));
    visit(static_cast<int32_t>(self.problem.mask_batch));
    visit(static_cast<int32_t>(self.problem.mask_heads));
    visit(static_cast<int32_t>(self.problem.mask_rows));
    visit(static_cast<int32_t>(self.problem.mask_width));
    visit(static_cast<int32_t>(self.problem.bias_batch));
    visit(static_cast<int32_t>(self.problem.bias_heads));
    visit(static_cast<int32_t>(self.problem.bias_rows));
    visit(static_cast<int32_t>(self.problem.bias_keys));
    visit(static_cast<int32_t>(self.problem.bias_bytes));
    visit(static_cast<float>(self.problem.scale));
    visit(static_cast<float>(self.problem.soft_cap));
    visit(static_cast<int32_t>(self.problem.window_left));
    visit(static_cast<int32_t>(self.problem.window_right));
    visit(static_cast<int32_t>(self.problem.bottom_right));
    visit(num_sms);
    visit(static_cast<int32_t>(self.problem.deterministic));
    visit(static_cast<const void*>(stream));
  }
};

// A gradient of a bias on given arrays.
struct DbiasParams {
  static constexpr const char* kTitle = "jax_fa gradient of a bias";
  static constexpr const char* kOperation = "dbias";  // begins names of variants
  static constexpr bool kMayLackScratch = true;
  static constexpr size_t kNumOperands = 17;
  // Of these at the end, older programs lack some.
  static constexpr size_t kNumAddedOperands = 0;
  static constexpr size_t kNumResults = 1;
  // Of these at the end, calls on GPUs may lack some, and others have none.
  static constexpr size_t kNumAddedResults = 0;
  static constexpr size_t kNumScratch = 1;
  static constexpr int32_t kNumParameters = 43;

  Problem problem;
  Extras extras;
  const void* q;  // [B, T, N, D]
  const void* k;  // [B, S, K, D]
  const void* v;  // [B, S, K, Dv]
  const float* lse;  // [B, T, N] natural log
  const void* dout;  // [B, T, N, Dv]
  const float* delta;  // [B, T, N] rowsum(dout * out) - dlse
  void* dbias;  // [Ba, Na, Ta, Sa]
  // Memory of GPU kernels that nobody reads afterwards, uninitialised; else null.
  struct {
    float* dbias_parts;  // [Z, Ba, Na, Ta, Sa] what dbias would be of a part of what shares it
  } scratch;

  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Operands(Self& self, Visit&& visit) {
    visit(arrays::q, self.q);
    visit(arrays::k, self.k);
    visit(arrays::v, self.v);
    visit(arrays::q_lengths, self.extras.q_lengths);
    visit(arrays::kv_lengths, self.extras.kv_lengths);
    visit(arrays::cu_seqlens_q, self.extras.cu_seqlens_q);
    visit(arrays::cu_seqlens_k, self.extras.cu_seqlens_k);
    visit(arrays::q_segments, self.extras.q_segments);
    visit(arrays::kv_segments, self.extras.kv_segments);
    visit(arrays::q_offset, self.extras.q_offset);
    visit(arrays::sinks, self.extras.sinks);
    visit(arrays::lse, self.lse);
    visit(arrays::dout, self.dout);
    visit(arrays::delta, self.delta);
    visit(arrays::mask_words, self.extras.mask_words);
    visit(arrays::mask_map, self.extras.mask_map);
    visit(arrays::bias, self.extras.bias);
  }
  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Results(Self& self, Visit&& visit) {
    visit(arrays::dbias, self.dbias);
  }
  // visit(array, pointer) for each, in call order.
  template <typename Self, typename Visit>
  static void Scratch(Self& self, Visit&& visit) {
    visit(arrays::dbias_parts, self.scratch.dbias_parts);
  }
  // visit(argument) for each parameter of a host entry, in order (spec/abi.py).
  // Extents must fit 32 bits.
  template <typename Visit>
  void Parameters(int32_t num_sms, void* stream, Visit&& visit) const {
    const DbiasParams& self = *this;
    visit(static_cast<const void*>(self.q));
    visit(static_cast<const void*>(self.k));
    visit(static_cast<const void*>(self.v));
    visit(static_cast<const void*>(self.lse));
    visit(static_cast<const void*>(self.dout));
    visit(static_cast<const void*>(self.delta));
    visit(static_cast<const void*>(self.dbias));
    visit(static_cast<const void*>(self.scratch.dbias_parts));
    visit(static_cast<const void*>(self.extras.q_lengths));
    visit(static_cast<const void*>(self.extras.kv_lengths));
    visit(static_cast<const void*>(self.extras.cu_seqlens_q));
    visit(static_cast<const void*>(self.extras.cu_seqlens_k));
    visit(static_cast<const void*>(self.extras.q_segments));
    visit(static_cast<const void*>(self.extras.kv_segments));
    visit(static_cast<const void*>(self.extras.q_offset));
    visit(static_cast<const void*>(self.extras.sinks));
    visit(static_cast<const void*>(self.extras.mask_words));
    visit(static_cast<const void*>(self.extras.mask_map));
    visit(static_cast<const void*>(self.extras.bias));
    visit(static_cast<int32_t>(self.problem.batch));
    visit(static_cast<int32_t>(self.problem.num_sequences));
    visit(static_cast<int32_t>(self.problem.q_len));
    visit(static_cast<int32_t>(self.problem.kv_len));
    visit(static_cast<int32_t>(self.problem.num_q_heads));
    visit(static_cast<int32_t>(self.problem.num_kv_heads));
    visit(static_cast<int32_t>(self.problem.head_dim));
    visit(static_cast<int32_t>(self.problem.value_dim));
    visit(static_cast<int32_t>(self.problem.mask_batch));
    visit(static_cast<int32_t>(self.problem.mask_heads));
    visit(static_cast<int32_t>(self.problem.mask_rows));
    visit(static_cast<int32_t>(self.problem.mask_width));
    visit(static_cast<int32_t>(self.problem.bias_batch));
    visit(static_cast<int32_t>(self.problem.bias_heads));
    visit(static_cast<int32_t>(self.problem.bias_rows));
    visit(static_cast<int32_t>(self.problem.bias_keys));
    visit(static_cast<int32_t>(self.problem.bias_bytes));
    visit(static_cast<float>(self.problem.scale));
    visit(static_cast<float>(self.problem.soft_cap));
    visit(static_cast<int32_t>(self.problem.window_left));
    visit(static_cast<int32_t>(self.problem.window_right));
    visit(static_cast<int32_t>(self.problem.bottom_right));
    visit(num_sms);
    visit(static_cast<const void*>(stream));
  }
};

}  // namespace jax_fa

#endif  // JAX_FA_SCHEMA_H_
