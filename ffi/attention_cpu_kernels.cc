// The attention algorithm on one tile. Compiled once per instruction set, each into an object of
// its own, then linked together:
//
//   x86-64:   -DJAX_FA_ISA=portable
//             -DJAX_FA_ISA=avx2    -mavx2 -mfma
//             -DJAX_FA_ISA=avx512  -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
//                                  -mprefer-vector-width=512
//   aarch64:  -DJAX_FA_ISA=neon
//   others:   -DJAX_FA_ISA=portable
//   all:      -std=c++17 -O3 -ffp-contract=fast, never -ffast-math (NaN and infinities matter)
//
// A compiler optimises each object for its own machine, so every function here has internal linkage
// (attention_cpu_kernels.h says why).
//
// One row per lane
// ----------------
// A tile holds some rows of one side, the queries or the keys, as panels of kPanel rows: row i sits
// in SIMD lane i, and a panel is stored transposed, [width, kPanel]. The other side is walked in
// blocks of plain rows, [rows, width]. Written this way attention is two products, both of
// row-major data by a panel, and neither K nor V is ever transposed:
//
//   S [walked, lanes]  = X [walked, D] * lanes [D, lanes]      Product<kByRows>
//   O [Dv, lanes]     += Y [walked, Dv]^T * P [walked, lanes]  Product<kByColumns>
//
// and everything that happens to one row, its maximum, sum, mask and rescaling, happens in its
// lane, with no reduction across lanes. The forward keeps queries in the lanes. The backward runs
// twice over the same code: queries in the lanes give dQ, keys in the lanes give dK and dV. That
// costs 7 products instead of the 5 of a fused backward, and buys sums that live in one tile: no
// atomics, no partial gradients in memory, as many tasks as tiles, and the same bits with any
// number of threads.
//
// Inside, logits are in base 2. For grouped heads the query side is "packed": its row r is token
// r / group, head r % group of the group, so that a kv head is read once for its whole group.
#include "attention_cpu_kernels.h"

#include <math.h>

#include <cstdint>
#include <cstring>

#include "attention_cpu_simd.h"

#ifndef JAX_FA_ISA
#error "Define JAX_FA_ISA; the top of this file lists the values."
#endif

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

Side QuerySide(const Problem& problem, const Extras& extras, const Tile& tile) {
  const Sequence& sequence = *tile.sequence;
  const int64_t group = problem.num_q_heads / problem.num_kv_heads;
  return {sequence.q_first,
          tile.kv_head * group,
          problem.num_q_heads,
          group,
          sequence.window.q_len * group,
          extras.q_segments};
}

Side KeySide(const Problem& problem, const Extras& extras, const Tile& tile) {
  const Sequence& sequence = *tile.sequence;
  return {sequence.kv_first,      tile.kv_head,      problem.num_kv_heads, 1,
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

Dense MakeDense(const Problem& problem, const Extras& extras, const Tile& tile) {
  const int64_t group = problem.num_q_heads / problem.num_kv_heads;
  const int64_t head_words = problem.mask_rows * problem.mask_width;
  const int64_t batch_stride = problem.mask_batch == 1 ? 0 : problem.mask_heads * head_words;
  const int64_t head_stride = problem.mask_heads == 1 ? 0 : head_words;
  const int64_t first = tile.sequence->index * batch_stride + tile.kv_head * group * head_stride;
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

// ---- Logits and sums ----------------------------------------------------------------------------

// q . k with q already multiplied by `scale` gives base-2 logits, or what the soft cap is taken of.
struct Logits {
  float scale;
  float rest;      // scale * rest is the scale of the problem
  float cap_log2;  // 0: none

  explicit Logits(const Problem& problem)
      : scale(problem.soft_cap > 0.0f ? problem.scale / problem.soft_cap : problem.scale * kLog2e),
        rest(problem.soft_cap > 0.0f ? problem.soft_cap : kLn2),
        cap_log2(problem.soft_cap * kLog2e) {}
};

// C [width, lanes] = C * rescale + Y^T P for the rows of a span.
//
// A masked probability is 0, but 0 * NaN is not: where rows that some lane may not see hold NaN or
// infinity, lanes must be kept from touching them.
void Accumulate(const Span& span, const Mask& mask, bool all_finite, const float* rows,
                int64_t width, const float* p, const float* rescale, float* c) {
  const Matrix y = {rows + span.begin * width, width};
  if (!span.needs_mask || all_finite) {
    Product<Left::kByColumns>(width, y, span.count, span.lanes, p, rescale, c);
    return;
  }
  for (int64_t d = 0; d < width; ++d) {
    for (int v = 0; v < span.Vectors(); ++v) {
      float* at = c + d * kPanel + v * kLanes;
      Vf sum = Load(at) * Load(rescale + v * kLanes);
      for (int64_t j = 0; j < span.count; ++j) {
        const Vf term = y.data[j * width + d] * Load(p + j * kPanel + v * kLanes);
        sum += mask.Sees(v, j) ? term : Vf{};
      }
      Store(at, sum);
    }
  }
}

// ---- Forward ------------------------------------------------------------------------------------

// Per lane: the running maximum of the logits and the sum of 2^(logit - max).
struct RunningSoftmax {
  float max[kPanel];
  float sum[kPanel];
};

// A sink is a logit without a value: the softmax starts from it instead of from nothing.
void StartSoftmax(const float* sinks, const Side& side, const Band& band, RunningSoftmax* state) {
  for (int64_t i = 0; i < kPanel; ++i) {
    const bool has_sink = sinks && i < band.count;
    state->max[i] = has_sink ? sinks[(band.first + i) % side.group] * kLog2e : -kInf;
    state->sum[i] = state->max[i] == -kInf ? 0.0f : 1.0f;
  }
}

// Turns the raw scores s [walked, kPanel] of a span into 2^(logit - max), updates max and sum, and
// leaves in rescale [kPanel] what everything summed up so far must be multiplied by.
template <bool kNeedsMask>
void OnlineSoftmax(const Logits& logits, const Span& span, const Mask& mask, float* s,
                   RunningSoftmax* state, float* rescale) {
  for (int v = 0; v < span.Vectors(); ++v) {
    float* column = s + v * kLanes;
    const Vf old_max = Load(state->max + v * kLanes);
    Vf max = old_max;
    for (int64_t j = 0; j < span.count; ++j) {
      Vf z = Load(column + j * kPanel);
      if (logits.cap_log2 != 0.0f) z = logits.cap_log2 * Tanh(z);
      if (kNeedsMask) z = mask.Sees(v, j) ? z : Splat(-kInf);
      max = Max(max, z);
      Store(column + j * kPanel, z);
    }
    // A lane that has seen nothing, or only logits of -inf, must not compute inf - inf.
    const Vf base = max == -kInf ? Vf{} : max;
    const Vf factor = Exp2(old_max - base);
    Vf sum = Load(state->sum + v * kLanes) * factor;
    for (int64_t j = 0; j < span.count; ++j) {
      const Vf p = Exp2(Load(column + j * kPanel) - base);
      sum += p;
      Store(column + j * kPanel, p);
    }
    Store(state->max + v * kLanes, max);
    Store(state->sum + v * kLanes, sum);
    Store(rescale + v * kLanes, factor);
  }
}

struct ForwardPanel {
  Band band;
  RunningSoftmax softmax;
  float* q;    // (D, lane), scaled
  float* out;  // (Dv, lane), before the division by the sum
};

// Divides a panel by its sums, and stores its rows of out and lse.
void StoreOutput(const FwdParams& params, const Side& side, const ForwardPanel& panel, float* row) {
  float inverse[kPanel];
  for (int64_t i = 0; i < panel.band.count; ++i) {
    const float sum = panel.softmax.sum[i];
    inverse[i] = sum == 0.0f ? 0.0f : 1.0f / sum;
    const double lse = panel.softmax.max[i] * kLn2InDouble + static_cast<double>(logf(sum));
    params.lse[side.FlatRow(panel.band.first + i)] = sum == 0.0f ? -kInf : static_cast<float>(lse);
  }
  StorePanel(panel.out, inverse, params.problem.dtype, side, panel.band, row,
             {params.out, params.problem.value_dim});
}

int64_t TileRows(const Problem& problem) {
  // The panels of a tile should stay in L2: 4 arrays of 128 rows at D = Dv = 128 are 256 KB.
  const int64_t panels = 32768 / (problem.head_dim + problem.value_dim) / kPanel;
  return kPanel * Max(1, Min(panels, Min(kMaxPanels, 128 / kPanel)));
}

int64_t ScratchFloats(const Problem& problem) {
  const int64_t width = problem.head_dim + problem.value_dim;
  const int64_t panels = 2 * width * TileRows(problem);
  const int64_t block = kBlock * (width + 2 * kPanel + 3);
  const int64_t padding = 16 * (4 * kMaxPanels + 16);
  return panels + block + width + padding;
}

void Forward(const FwdParams& params, const Tile& tile, float* memory) {
  const Problem& problem = params.problem;
  const Side queries = QuerySide(problem, params.extras, tile);
  const Side keys = KeySide(problem, params.extras, tile);
  const Array q = Input(params.q, problem.head_dim);
  const Array k = Input(params.k, problem.head_dim);
  const Array v = Input(params.v, problem.value_dim);
  const Dense dense = MakeDense(problem, params.extras, tile);
  const Logits logits(problem);
  const float* sinks = params.extras.sinks;
  if (sinks) sinks += tile.sequence->index * problem.num_q_heads + queries.first_head;

  Arena arena = {memory};
  float* row = arena.Take(problem.head_dim + problem.value_dim);
  float* k_block = arena.Take(kBlock * k.width);  // (key, D)
  float* v_block = arena.Take(kBlock * v.width);  // (key, Dv)
  float* s = arena.Take(kBlock * kPanel);         // (key, lane)
  int32_t segments[kBlock];
  int32_t shown[kBlock * kPanel];
  float rescale[kPanel];

  ForwardPanel panels[kMaxPanels];
  int64_t num_panels = 0;
  Range visible = {INT64_MAX, 0};
  const int64_t end = Min(tile.first + TileRows(problem), queries.count);
  for (int64_t first = tile.first; first < end; first += kPanel) {
    ForwardPanel& panel = panels[num_panels++];
    MakeBand<Lanes::kQueries>(*tile.sequence, queries, keys.group, first, &panel.band);
    StartSoftmax(sinks, queries, panel.band, &panel.softmax);
    panel.q = arena.Take(q.width * kPanel);
    panel.out = arena.Take(v.width * kPanel);
    LoadPanel(q, problem.dtype, queries, panel.band, logits.scale, row, panel.q);
    memset(panel.out, 0, v.width * kPanel * sizeof(float));
    visible = {Min(visible.lo, panel.band.any.lo), Max(visible.hi, panel.band.any.hi)};
  }

  for (int64_t first = visible.lo; first < visible.hi; first += kBlock) {
    const Block block = MakeBlock(keys, first, visible.hi, segments);
    bool is_loaded = false;
    bool v_finite = false;
    for (int64_t i = 0; i < num_panels; ++i) {
      ForwardPanel& panel = panels[i];
      Span span = Overlap(panel.band, block);
      if (dense.words) ReadDense<Lanes::kQueries>(dense, panel.band, block, &span, shown);
      if (span.count == 0) continue;
      if (!is_loaded) {
        LoadBlock(k, problem.dtype, keys, block, k_block);
        LoadBlock(v, problem.dtype, keys, block, v_block);
        v_finite = AllFinite(v_block, block.count * v.width);
        is_loaded = true;
      }
      const Mask mask = MakeMask(panel.band, block, span, dense.words ? shown : nullptr);
      const Matrix k_rows = {k_block + span.begin * k.width, k.width};
      Product<Left::kByRows>(span.count, k_rows, k.width, span.lanes, panel.q, nullptr, s);
      if (span.needs_mask) {
        OnlineSoftmax<true>(logits, span, mask, s, &panel.softmax, rescale);
      } else {
        OnlineSoftmax<false>(logits, span, mask, s, &panel.softmax, rescale);
      }
      Accumulate(span, mask, v_finite, v_block, v.width, s, rescale, panel.out);
    }
  }
  for (int64_t i = 0; i < num_panels; ++i) StoreOutput(params, queries, panels[i], row);
}

// ---- Backward -----------------------------------------------------------------------------------

void Delta(const BwdParams& params, const Sequence& sequence, int64_t head, float* memory,
           float* delta) {
  const Problem& problem = params.problem;
  const int64_t width = problem.value_dim;
  Arena arena = {memory};
  float* out = arena.Take(width);
  float* dout = arena.Take(width);
  const int64_t sink = sequence.index * problem.num_q_heads + head;
  double dsink = 0.0;
  for (int64_t i = 0; i < sequence.window.q_len; ++i) {
    const int64_t row = (sequence.q_first + i) * problem.num_q_heads + head;
    LoadRow(params.out, problem.dtype, row, width, out);
    LoadRow(params.dout, problem.dtype, row, width, dout);
    delta[row] = Dot(out, dout, width) - (params.dlse ? params.dlse[row] : 0.0f);
    // lse = -inf: even the sink is -inf, and its share is 0.
    if (params.extras.sinks && params.lse[row] != -kInf) {
      dsink -= expf(params.extras.sinks[sink] - params.lse[row]) * delta[row];
    }
  }
  if (params.dsinks) params.dsinks[sink] = static_cast<float>(dsink);
}

// Per query row: the base-2 LSE in two parts, and delta. A row that sees nothing has lse = +inf, so
// that its probabilities are 0.
//
// Every rounding of an LSE of some hundreds changes all probabilities of its row by as much as all
// other roundings together. So base 2 is left and entered in double precision, and one rounding
// remains, that of the stored LSE. For the same reason both passes of the backward take scores of
// scaled q and plain k, like the forward: their bits are those that the LSE was taken of.
struct RowStats {
  float* lse;
  float* lse_rest;
  float* delta;
};

void LoadStats(const BwdParams& params, const float* delta, const Side& side, int64_t first,
               int64_t count, RowStats stats) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = side.FlatRow(first + i);
    const double lse = params.lse[row] * kLog2eInDouble;
    const float rounded = static_cast<float>(lse);
    stats.lse[i] = rounded == -kInf ? kInf : rounded;
    stats.lse_rest[i] = stats.lse[i] == kInf ? 0.0f : static_cast<float>(lse - rounded);
    stats.delta[i] = delta[row];
  }
}

// From the raw scores s and dp = dO . V, both [walked, kPanel], to the probabilities (in s) and the
// gradients of q . k but for the scale (in dp). Stats are those of lanes, or of walked rows.
template <Lanes kLanesAre, bool kNeedsMask>
void ScoreGradients(const Logits& logits, const Span& span, const Mask& mask, RowStats stats,
                    float* s, float* dp) {
  for (int64_t j = 0; j < span.count; ++j) {
    for (int v = 0; v < span.Vectors(); ++v) {
      constexpr bool kPerLane = kLanesAre == Lanes::kQueries;
      const Vf lse = kPerLane ? Load(stats.lse + v * kLanes) : Splat(stats.lse[j]);
      const Vf lse_rest = kPerLane ? Load(stats.lse_rest + v * kLanes) : Splat(stats.lse_rest[j]);
      const Vf delta = kPerLane ? Load(stats.delta + v * kLanes) : Splat(stats.delta[j]);
      const int64_t at = j * kPanel + v * kLanes;
      Vf z = Load(s + at);
      Vf slope = Splat(1.0f);
      if (logits.cap_log2 != 0.0f) {
        const Vf t = Tanh(z);
        z = logits.cap_log2 * t;
        slope = 1.0f - t * t;
      }
      Vf p = Exp2((z - lse) - lse_rest);
      Vf ds = p * (Load(dp + at) - delta) * slope;
      if (kNeedsMask) {
        const Vi sees = mask.Sees(v, j);
        p = sees ? p : Vf{};
        ds = sees ? ds : Vf{};
      }
      Store(s + at, p);
      Store(dp + at, ds);
    }
  }
}

struct BackwardPanel {
  Band band;
  float lse[kPanel];  // with queries in the lanes
  float lse_rest[kPanel];
  float delta[kPanel];
  float* x;   // (D, lane): scaled q, or k
  float* y;   // (Dv, lane): dout or v
  float* dx;  // (D, lane): dq before the scale, or dk before what the scaled q lack of it
  float* dy;  // (Dv, lane): dv, with keys in the lanes
};

template <Lanes kLanesAre>
void StoreGradients(const BwdParams& params, const Side& side, const BackwardPanel& panel,
                    float* row) {
  constexpr bool kKeyLanes = kLanesAre == Lanes::kKeys;
  const Problem& problem = params.problem;
  float scale[kPanel];
  Fill(kKeyLanes ? Logits(problem).rest : problem.scale, scale);
  const Array dx = {kKeyLanes ? params.dk : params.dq, problem.head_dim};
  StorePanel(panel.dx, scale, problem.dtype, side, panel.band, row, dx);
  if (kKeyLanes) {
    Fill(1.0f, scale);
    const Array dv = {params.dv, problem.value_dim};
    StorePanel(panel.dy, scale, problem.dtype, side, panel.band, row, dv);
  }
}

// Queries in the lanes: x, y = q, dout of the tile; keys are walked; writes dq.
// Keys in the lanes: x, y = k, v of the tile; packed query rows are walked; writes dk and dv.
template <Lanes kLanesAre>
void Backward(const BwdParams& params, const Tile& tile, const float* delta, float* memory) {
  constexpr bool kKeyLanes = kLanesAre == Lanes::kKeys;
  const Problem& problem = params.problem;
  const DType dtype = problem.dtype;
  const Array q = Input(params.q, problem.head_dim);
  const Array k = Input(params.k, problem.head_dim);
  const Array v = Input(params.v, problem.value_dim);
  const Array dout = Input(params.dout, problem.value_dim);
  const Side query_side = QuerySide(problem, params.extras, tile);
  const Side key_side = KeySide(problem, params.extras, tile);
  const Side& side = kKeyLanes ? key_side : query_side;
  const Side& walked = kKeyLanes ? query_side : key_side;
  const Dense dense = MakeDense(problem, params.extras, tile);
  const Logits logits(problem);

  Arena arena = {memory};
  float* row = arena.Take(problem.head_dim + problem.value_dim);
  float* x_block = arena.Take(kBlock * q.width);  // (walked, D)
  float* y_block = arena.Take(kBlock * v.width);  // (walked, Dv)
  float* s = arena.Take(kBlock * kPanel);         // (walked, lane)
  float* dp = arena.Take(kBlock * kPanel);        // (walked, lane)
  float block_lse[kBlock];
  float block_lse_rest[kBlock];
  float block_delta[kBlock];
  int32_t segments[kBlock];
  int32_t shown[kBlock * kPanel];
  float ones[kPanel];
  Fill(1.0f, ones);

  BackwardPanel panels[kMaxPanels];
  int64_t num_panels = 0;
  Range visible = {INT64_MAX, 0};
  const int64_t end = Min(tile.first + TileRows(problem), side.count);
  for (int64_t first = tile.first; first < end; first += kPanel) {
    BackwardPanel& panel = panels[num_panels++];
    MakeBand<kLanesAre>(*tile.sequence, side, walked.group, first, &panel.band);
    panel.x = arena.Take(q.width * kPanel);
    panel.y = arena.Take(v.width * kPanel);
    panel.dx = arena.Take(q.width * kPanel);
    panel.dy = kKeyLanes ? arena.Take(v.width * kPanel) : nullptr;
    LoadPanel(kKeyLanes ? k : q, dtype, side, panel.band, kKeyLanes ? 1.0f : logits.scale, row,
              panel.x);
    LoadPanel(kKeyLanes ? v : dout, dtype, side, panel.band, 1.0f, row, panel.y);
    memset(panel.dx, 0, q.width * kPanel * sizeof(float));
    if (kKeyLanes) memset(panel.dy, 0, v.width * kPanel * sizeof(float));
    if (!kKeyLanes) {
      Fill(0.0f, panel.lse);
      Fill(0.0f, panel.lse_rest);
      Fill(0.0f, panel.delta);
      LoadStats(params, delta, side, first, panel.band.count,
                {panel.lse, panel.lse_rest, panel.delta});
    }
    visible = {Min(visible.lo, panel.band.any.lo), Max(visible.hi, panel.band.any.hi)};
  }

  for (int64_t first = visible.lo; first < visible.hi; first += kBlock) {
    const Block block = MakeBlock(walked, first, visible.hi, segments);
    bool is_loaded = false;
    bool all_finite = false;
    for (int64_t i = 0; i < num_panels; ++i) {
      BackwardPanel& panel = panels[i];
      Span span = Overlap(panel.band, block);
      if (dense.words) ReadDense<kLanesAre>(dense, panel.band, block, &span, shown);
      if (span.count == 0) continue;
      if (!is_loaded) {
        LoadBlock(kKeyLanes ? q : k, dtype, walked, block, x_block);
        LoadBlock(kKeyLanes ? dout : v, dtype, walked, block, y_block);
        if (kKeyLanes) {
          Scale(logits.scale, block.count * q.width, x_block);
          LoadStats(params, delta, walked, first, block.count,
                    {block_lse, block_lse_rest, block_delta});
        }
        all_finite =
            AllFinite(x_block, block.count * q.width) && AllFinite(y_block, block.count * v.width);
        is_loaded = true;
      }
      const Mask mask = MakeMask(panel.band, block, span, dense.words ? shown : nullptr);
      const RowStats stats = kKeyLanes
                                 ? RowStats{block_lse + span.begin, block_lse_rest + span.begin,
                                            block_delta + span.begin}
                                 : RowStats{panel.lse, panel.lse_rest, panel.delta};
      const Matrix x_rows = {x_block + span.begin * q.width, q.width};
      const Matrix y_rows = {y_block + span.begin * v.width, v.width};
      Product<Left::kByRows>(span.count, x_rows, q.width, span.lanes, panel.x, nullptr, s);
      Product<Left::kByRows>(span.count, y_rows, v.width, span.lanes, panel.y, nullptr, dp);
      if (span.needs_mask) {
        ScoreGradients<kLanesAre, true>(logits, span, mask, stats, s, dp);
      } else {
        ScoreGradients<kLanesAre, false>(logits, span, mask, stats, s, dp);
      }
      Accumulate(span, mask, all_finite, x_block, q.width, dp, ones, panel.dx);
      if (kKeyLanes) Accumulate(span, mask, all_finite, y_block, v.width, s, ones, panel.dy);
    }
  }

  for (int64_t i = 0; i < num_panels; ++i) StoreGradients<kLanesAre>(params, side, panels[i], row);
}

}  // namespace

namespace JAX_FA_ISA {

#define JAX_FA_STRING_(x) #x
#define JAX_FA_STRING(x) JAX_FA_STRING_(x)

const CpuKernels kKernels = {
    JAX_FA_STRING(JAX_FA_ISA), TileRows, ScratchFloats, Forward, Delta, Backward<Lanes::kQueries>,
    Backward<Lanes::kKeys>,
};

}  // namespace JAX_FA_ISA
}  // namespace jax_fa
