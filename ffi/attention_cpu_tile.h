// What a tile of the CPU kernels is made of: the rows of both sides, which of them see which, what
// a bias adds to their scores, and how they come and go between arrays and scratch.
//
// Everything has internal linkage (see the HAZARD in attention_cpu_kernels.h).
#ifndef JAX_FA_ATTENTION_CPU_TILE_H_
#define JAX_FA_ATTENTION_CPU_TILE_H_

#include <cstdint>
#include <cstring>

#include "attention_cpu_kernels.h"
#include "attention_cpu_simd.h"
#include "schema.h"

namespace jax_fa {
namespace {

constexpr int64_t kBlock = 96;     // walked rows of a block
constexpr int64_t kMaxPanels = 8;  // of a tile

// ---- Sides, panels, blocks ----------------------------------------------------------------------

enum class Lanes { kQueries, kKeys };

// The rows of one kv head, or of its group of query heads, within arrays [tokens, heads, width].
struct Side {
  int64_t first_token;
  int64_t first_head;
  int64_t num_heads;        // of the array
  int64_t group;            // heads of this side; 1 for keys
  int64_t count;            // used tokens * group
  const int32_t* segments;  // [tokens], or null

  int64_t Token(int64_t row) const { return first_token + row / group; }
  int64_t FlatRow(int64_t row) const { return Token(row) * num_heads + first_head + row % group; }
};

// The `group` query heads from `head` on.
Side QuerySide(const Problem& problem, const Extras& extras, const Sequence& sequence, int64_t head,
               int64_t group) {
  return {sequence.q_first, head, problem.num_q_heads, group, sequence.window.q_len * group,
          extras.q_segments};
}

Side KeySide(const Problem& problem, const Extras& extras, const Sequence& sequence,
             int64_t kv_head) {
  return {sequence.kv_first,      kv_head,           problem.num_kv_heads, 1,
          sequence.window.kv_len, extras.kv_segments};
}

// An array of one side: q, k, v, dout, ...
struct Array {
  void* data;
  int64_t width;
};

Array Input(const void* data, int64_t width) { return {const_cast<void*>(data), width}; }

// A dense mask, of one sequence and one group of query heads.
struct Dense {
  const int32_t* words;  // of head 0 of the group; null: none
  int64_t head_stride;   // strides are 0 where the mask is broadcast
  int64_t row_stride;
  int64_t word_stride;
  int64_t group;
  int64_t block;  // query rows that a row of words is about

  bool Shows(int64_t packed_row, int64_t key) const {
    const int64_t row = packed_row / group / block;
    const int64_t head = packed_row % group;
    const int32_t word = words[head * head_stride + row * row_stride + key / 32 * word_stride];
    return (static_cast<uint32_t>(word) >> (key % 32) & 1) != 0;
  }
};

// Of sequence `index` and the `group` query heads from `head` on.
Dense MakeDense(const Problem& problem, const Extras& extras, int64_t index, int64_t head,
                int64_t group) {
  const int64_t head_words = problem.mask_rows * problem.mask_width;
  const int64_t batch_stride = problem.mask_batch == 1 ? 0 : problem.mask_heads * head_words;
  const int64_t head_stride = problem.mask_heads == 1 ? 0 : head_words;
  const int64_t first = index * batch_stride + head * head_stride;
  return {extras.mask_words ? extras.mask_words + first : nullptr,
          head_stride,
          problem.mask_rows == 1 ? 0 : problem.mask_width,
          problem.mask_width == 1 ? 0 : 1,
          group,
          problem.mask_rows == problem.q_len ? 1 : kMaskBlock};
}

// The walked rows that each lane of a panel sees.
struct Band {
  int64_t first;  // row of lane 0
  int64_t count;  // lanes in use
  int64_t lo[kPanel];
  int64_t hi[kPanel];
  int32_t segment[kPanel];  // garbage without segments
  Range any;                // rows that some lane sees, but for segments
  Range all;                // rows that every lane in use sees, but for segments
  int32_t min_segment;
  int32_t max_segment;
};

template <Lanes kLanesAre>
void MakeBand(const Sequence& sequence, const Side& side, int64_t walked_group, int64_t first,
              Band* band) {
  *band = {};
  band->first = first;
  band->count = Min(kPanel, side.count - first);
  band->any = {INT64_MAX, 0};
  band->all = {0, INT64_MAX};
  band->min_segment = INT32_MAX;
  band->max_segment = INT32_MIN;
  for (int64_t i = 0; i < band->count; ++i) {
    const int64_t token = (first + i) / side.group;
    const Range range =
        kLanesAre == Lanes::kQueries ? VisibleKeys(sequence, token) : VisibleRows(sequence, token);
    band->lo[i] = range.lo * walked_group;
    band->hi[i] = range.hi * walked_group;
    band->all = {Max(band->all.lo, band->lo[i]), Min(band->all.hi, band->hi[i])};
    if (range.lo < range.hi) {
      band->any = {Min(band->any.lo, band->lo[i]), Max(band->any.hi, band->hi[i])};
    }
    if (side.segments) {
      band->segment[i] = side.segments[side.Token(first + i)];
      if (band->segment[i] < band->min_segment) band->min_segment = band->segment[i];
      if (band->segment[i] > band->max_segment) band->max_segment = band->segment[i];
    }
  }
}

// Some walked rows.
struct Block {
  int64_t first;
  int64_t count;
  const int32_t* segments;  // [kBlock], or null
  int32_t min_segment;
  int32_t max_segment;
};

Block MakeBlock(const Side& side, int64_t first, int64_t end, int32_t* segments) {
  Block block = {first, Min(kBlock, end - first), nullptr, INT32_MAX, INT32_MIN};
  if (!side.segments) return block;
  block.segments = segments;
  for (int64_t i = 0; i < block.count; ++i) {
    segments[i] = side.segments[side.Token(first + i)];
    if (segments[i] < block.min_segment) block.min_segment = segments[i];
    if (segments[i] > block.max_segment) block.max_segment = segments[i];
  }
  return block;
}

// The part of a block that a panel has to do with, counted from the start of the block.
struct Span {
  int64_t begin;
  int64_t count;    // 0: no lane sees any row
  int64_t lanes;    // in use
  bool needs_mask;  // some lane does not see some row

  int64_t Vectors() const { return CeilDiv(lanes, kLanes); }
};

Span Overlap(const Band& band, const Block& block) {
  const Range rows = {Max(block.first, band.any.lo), Min(block.first + block.count, band.any.hi)};
  const bool is_empty =
      rows.hi <= rows.lo || (block.segments && (block.max_segment < band.min_segment ||
                                                block.min_segment > band.max_segment));
  if (is_empty) return {0, 0, 0, false};
  const bool one_segment = !block.segments || (block.min_segment == block.max_segment &&
                                               band.min_segment == band.max_segment);
  const bool in_band = band.all.lo <= rows.lo && rows.hi <= band.all.hi;
  return {rows.lo - block.first, rows.hi - rows.lo, band.count, !(one_segment && in_band)};
}

// Which lanes see a row of a span.
struct Mask {
  Vi lo[kPanelVectors];
  Vi hi[kPanelVectors];
  Vi segment[kPanelVectors];
  const int32_t* walked_segments;
  const int32_t* shown;  // [rows of the span, kPanel] -1 or 0: what a dense mask says; or null

  Vi Sees(int v, int64_t row) const {
    const Vi index = Splat(static_cast<int32_t>(row));
    Vi sees = (index >= lo[v]) & (index < hi[v]);
    if (walked_segments) sees &= segment[v] == Splat(walked_segments[row]);
    if (shown) sees &= Load(shown + row * kPanel + v * kLanes);
    return sees;
  }
};

// Reads what a dense mask says of a span into shown [rows of the span, kPanel], -1 or 0. Sets in
// the span what follows from it.
template <Lanes kLanesAre>
void ReadDense(const Dense& dense, const Band& band, const Block& block, Span* span,
               int32_t* shown) {
  int64_t num_shown = 0;
  memset(shown, 0, span->count * kPanel * sizeof(int32_t));
  for (int64_t j = 0; j < span->count; ++j) {
    const int64_t walked = block.first + span->begin + j;
    for (int64_t i = 0; i < band.count; ++i) {
      const int64_t lane = band.first + i;
      const bool shows =
          kLanesAre == Lanes::kQueries ? dense.Shows(lane, walked) : dense.Shows(walked, lane);
      shown[j * kPanel + i] = shows ? -1 : 0;
      num_shown += shows;
    }
  }
  if (num_shown < span->count * band.count) span->needs_mask = true;
  if (num_shown == 0) span->count = 0;
}

Mask MakeMask(const Band& band, const Block& block, const Span& span, const int32_t* shown) {
  const int64_t first = block.first + span.begin;
  int32_t lo[kPanel];
  int32_t hi[kPanel];
  for (int i = 0; i < kPanel; ++i) {
    lo[i] = static_cast<int32_t>(Min(Max(band.lo[i] - first, 0), span.count));
    hi[i] = static_cast<int32_t>(Min(Max(band.hi[i] - first, 0), span.count));
  }
  Mask mask;
  for (int v = 0; v < kPanelVectors; ++v) {
    mask.lo[v] = Load(lo + v * kLanes);
    mask.hi[v] = Load(hi + v * kLanes);
    mask.segment[v] = Load(band.segment + v * kLanes);
  }
  mask.walked_segments = block.segments ? block.segments + span.begin : nullptr;
  mask.shown = shown;
  return mask;
}

// ---- Moving rows between arrays and scratch -----------------------------------------------------

// Hands out a tile's memory, in pieces of whole cache lines.
struct Arena {
  float* next;

  float* Take(int64_t floats) {
    float* taken = next;
    next += CeilDiv(floats, 16) * 16;
    return taken;
  }
};

void LoadBlock(Array array, DType dtype, const Side& side, const Block& block, float* to) {
  // Rows of one head lie far apart, which hardware prefetchers do not follow.
  constexpr int64_t kRowsAhead = 16;
  const int64_t row_bytes = array.width * BytesOf(dtype);
  for (int64_t i = 0; i < block.count; ++i) {
    const int64_t ahead = Min(block.first + i + kRowsAhead, side.count - 1);
    const char* next = static_cast<const char*>(array.data) + side.FlatRow(ahead) * row_bytes;
    for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(next + byte);
    LoadRow(array.data, dtype, side.FlatRow(block.first + i), array.width, to + i * array.width);
  }
}

// panel [width, kPanel] = scale * rows of the band; 0 in lanes not in use.
void LoadPanel(Array array, DType dtype, const Side& side, const Band& band, float scale,
               float* row, float* panel) {
  memset(panel, 0, array.width * kPanel * sizeof(float));
  for (int64_t i = 0; i < band.count; ++i) {
    LoadRow(array.data, dtype, side.FlatRow(band.first + i), array.width, row);
    for (int64_t d = 0; d < array.width; ++d) panel[d * kPanel + i] = row[d] * scale;
  }
}

// Rows of the band = panel [width, kPanel] * scale [kPanel].
void StorePanel(const float* panel, const float* scale, DType dtype, const Side& side,
                const Band& band, float* row, Array array) {
  for (int64_t i = 0; i < band.count; ++i) {
    for (int64_t d = 0; d < array.width; ++d) row[d] = panel[d * kPanel + i] * scale[i];
    StoreRow(row, dtype, side.FlatRow(band.first + i), array.width, array.data);
  }
}

void Scale(float factor, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

void Fill(float x, float* lanes) {
  for (int i = 0; i < kPanel; ++i) lanes[i] = x;
}

// ---- Logits -------------------------------------------------------------------------------------

// q . k with q already multiplied by `scale` gives base-2 logits, or what the soft cap is taken of;
// a bias multiplied by `bias` is added before that.
struct Logits {
  float scale;
  float rest;  // scale * rest is the scale of the problem
  float bias;
  float cap_log2;  // 0: none
  bool is_biased;

  explicit Logits(const Problem& problem)
      : scale(problem.soft_cap > 0.0f ? problem.scale / problem.soft_cap : problem.scale * kLog2e),
        rest(problem.soft_cap > 0.0f ? problem.soft_cap : kLn2),
        bias(problem.soft_cap > 0.0f ? 1.0f / problem.soft_cap : kLog2e),
        cap_log2(problem.soft_cap * kLog2e),
        is_biased(problem.bias_bytes > 0) {}

  // What the soft cap leaves of raw scores, given their tanh. A bias of -inf hides all the same.
  Vf Capped(Vf raw, Vf tanh) const {
    const Vf capped = cap_log2 * tanh;
    if (!is_biased) return capped;
    return raw == -kInf ? Splat(-kInf) : capped;
  }
  // The exponent of a probability, given how far its logit is above the LSE. What rounding leaves
  // of an LSE of 1e9, as of a row whose bias is -1e9 throughout, is off by some tens.
  Vf Exponent(Vf above) const {
    if (!is_biased) return above;
    return above > 0.0f ? Vf{} : above;
  }
};

// What is added to the scores of one sequence and a group of query heads.
struct Bias {
  const char* data;  // of head 0 of the group; null: nothing
  DType dtype;
  int64_t head_stride;  // strides count elements, and are 0 where the bias is broadcast
  int64_t row_stride;
  int64_t key_stride;
  int64_t group;

  bool IsSameForRows() const { return head_stride == 0 && row_stride == 0; }

  // What a packed query row has for `count` keys.
  void Read(int64_t packed_row, int64_t first_key, int64_t count, float* to) const {
    const int64_t row = packed_row / group * row_stride + packed_row % group * head_stride;
    const char* from = data + (row + first_key * key_stride) * BytesOf(dtype);
    LoadRow(from, dtype, 0, key_stride == 0 ? 1 : count, to);
    for (int64_t i = 1; key_stride == 0 && i < count; ++i) to[i] = to[0];
  }
};

DType BiasType(const Problem& problem) {
  return problem.bias_bytes == 4 ? DType::kF32 : problem.dtype;
}

// Of sequence `index` and the `group` query heads from `head` on.
Bias MakeBias(const Problem& problem, const Extras& extras, int64_t index, int64_t head,
              int64_t group) {
  const DType dtype = BiasType(problem);
  const int64_t per_head = problem.bias_rows * problem.bias_keys;
  const int64_t batch_stride = problem.bias_batch == 1 ? 0 : problem.bias_heads * per_head;
  const int64_t head_stride = problem.bias_heads == 1 ? 0 : per_head;
  const int64_t first = index * batch_stride + head * head_stride;
  const char* data = static_cast<const char*>(extras.bias);
  return {data ? data + first * BytesOf(dtype) : nullptr,
          dtype,
          head_stride,
          problem.bias_rows == 1 ? 0 : problem.bias_keys,
          problem.bias_keys == 1 ? 0 : 1,
          group};
}

// Adds a bias to the raw scores s [walked, kPanel] of a span. Where it is -inf so is the score,
// whatever that was.
template <Lanes kLanesAre>
void AddBias(const Bias& bias, float factor, const Band& band, const Block& block, const Span& span,
             float* s) {
  static_assert(kPanel <= kBlock);
  const int64_t first = block.first + span.begin;
  float line[kBlock] = {};
  if (kLanesAre == Lanes::kKeys) {
    for (int64_t j = 0; j < span.count; ++j) {
      bias.Read(first + j, band.first, band.count, line);
      for (int v = 0; v < span.Vectors(); ++v) {
        float* at = s + j * kPanel + v * kLanes;
        const Vf b = Load(line + v * kLanes);
        Store(at, b == -kInf ? Splat(-kInf) : Load(at) + b * factor);
      }
    }
    return;
  }
  const int64_t num_lines = bias.IsSameForRows() ? 1 : band.count;
  for (int64_t i = 0; i < num_lines; ++i) {
    bias.Read(band.first + i, first, span.count, line);
    for (int64_t j = 0; j < span.count; ++j) {
      const float b = line[j];
      if (!bias.IsSameForRows()) {
        float* at = s + j * kPanel + i;
        *at = b == -kInf ? -kInf : *at + b * factor;
        continue;
      }
      for (int v = 0; v < span.Vectors(); ++v) {
        float* at = s + j * kPanel + v * kLanes;
        Store(at, b == -kInf ? Splat(-kInf) : Load(at) + b * factor);
      }
    }
  }
}

}  // namespace
}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_CPU_TILE_H_
