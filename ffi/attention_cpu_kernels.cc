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
#include "attention_cpu_tile.h"

#ifndef JAX_FA_ISA
#error "Define JAX_FA_ISA; the top of this file lists the values."
#endif

namespace jax_fa {
namespace {

// ---- Sums ---------------------------------------------------------------------------------------

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
      if (logits.cap_log2 != 0.0f) z = logits.Capped(z, Tanh(z));
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
  const Sequence& sequence = *tile.sequence;
  const int64_t group = problem.num_q_heads / problem.num_kv_heads;
  const int64_t head = tile.kv_head * group;
  const Side queries = QuerySide(problem, params.extras, sequence, head, group);
  const Side keys = KeySide(problem, params.extras, sequence, tile.kv_head);
  const Array q = Input(params.q, problem.head_dim);
  const Array k = Input(params.k, problem.head_dim);
  const Array v = Input(params.v, problem.value_dim);
  const Dense dense = MakeDense(problem, params.extras, sequence.index, head, group);
  const Bias bias = MakeBias(problem, params.extras, sequence.index, head, group);
  const Logits logits(problem);
  const float* sinks = params.extras.sinks;
  if (sinks) sinks += sequence.index * problem.num_q_heads + head;

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
    MakeBand<Lanes::kQueries>(sequence, queries, keys.group, first, &panel.band);
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
      if (bias.data) AddBias<Lanes::kQueries>(bias, logits.bias, panel.band, block, span, s);
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
    // lse = -inf: the row sees nothing, even the sink is -inf. All its probabilities are 0,
    // whatever its cotangents are: those of a merge of such rows by their LSE may be NaN.
    const bool is_empty = params.lse[row] == -kInf;
    delta[row] = is_empty ? 0.0f : Dot(out, dout, width) - (params.dlse ? params.dlse[row] : 0.0f);
    if (params.extras.sinks && !is_empty) {
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

void LoadStats(const float* lse, const float* delta, const Side& side, int64_t first, int64_t count,
               RowStats stats) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = side.FlatRow(first + i);
    const double log2 = lse[row] * kLog2eInDouble;
    const float rounded = static_cast<float>(log2);
    stats.lse[i] = rounded == -kInf ? kInf : rounded;
    stats.lse_rest[i] = stats.lse[i] == kInf ? 0.0f : static_cast<float>(log2 - rounded);
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
        z = logits.Capped(z, t);
        slope = 1.0f - t * t;
      }
      Vf p = Exp2(logits.Exponent((z - lse) - lse_rest));
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
  const Sequence& sequence = *tile.sequence;
  const int64_t group = problem.num_q_heads / problem.num_kv_heads;
  const int64_t head = tile.kv_head * group;
  const Side query_side = QuerySide(problem, params.extras, sequence, head, group);
  const Side key_side = KeySide(problem, params.extras, sequence, tile.kv_head);
  const Side& side = kKeyLanes ? key_side : query_side;
  const Side& walked = kKeyLanes ? query_side : key_side;
  const Dense dense = MakeDense(problem, params.extras, sequence.index, head, group);
  const Bias bias = MakeBias(problem, params.extras, sequence.index, head, group);
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
    MakeBand<kLanesAre>(sequence, side, walked.group, first, &panel.band);
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
      LoadStats(params.lse, delta, side, first, panel.band.count,
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
          LoadStats(params.lse, delta, walked, first, block.count,
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
      if (bias.data) AddBias<kLanesAre>(bias, logits.bias, panel.band, block, span, s);
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

// ---- Gradient of a bias -------------------------------------------------------------------------

// Some keys of one sequence and key/value head.
struct BiasPanel {
  Band band;  // rows that see them
  float* k;   // (D, lane)
  float* v;   // (Dv, lane)
};

// Sums of score gradients: those of a tile's rows and keys, or one for all of either.
struct BiasSums {
  float* data;  // [rows, stride]
  int64_t stride;
  int64_t first_row;
  int64_t first_key;
  bool one_row;
  bool one_key;

  // Adds ds [walked, kPanel] of a span, which it may use.
  void Add(const Band& band, const Block& block, Span span, float* ds) const {
    int64_t row = block.first + span.begin - first_row;
    if (one_row) {
      for (int64_t j = 1; j < span.count; ++j) {
        for (int64_t i = 0; i < span.lanes; ++i) ds[i] += ds[j * kPanel + i];
      }
      row = 0;
      span.count = 1;
    }
    for (int64_t j = 0; j < span.count; ++j) {
      const float* from = ds + j * kPanel;
      float* to = data + (row + j) * stride + (one_key ? 0 : band.first - first_key);
      if (!one_key) {
        for (int64_t i = 0; i < band.count; ++i) to[i] += from[i];
        continue;
      }
      float sum = 0.0f;
      for (int64_t i = 0; i < band.count; ++i) sum += from[i];
      to[0] += sum;
    }
  }
};

int64_t BiasTileRows(const Problem&) { return kBlock; }

int64_t BiasScratchFloats(const Problem& problem) {
  const int64_t width = problem.head_dim + problem.value_dim;
  const int64_t lanes = TileRows(problem);
  const int64_t block = kBlock * (width + 2 * kPanel);
  const int64_t padding = 16 * (2 * kMaxPanels + 8);
  return lanes * width + kBlock * lanes + block + width + padding;
}

// Adds what one sequence and query head has of a tile, for keys from `first_key` on, as many as a
// tile has.
void AddScoreGradients(const DbiasParams& params, const Sequence& sequence, int64_t head,
                       int64_t first_key, const BiasSums& sums, Arena arena) {
  const Problem& problem = params.problem;
  const DType dtype = problem.dtype;
  const Array q = Input(params.q, problem.head_dim);
  const Array k = Input(params.k, problem.head_dim);
  const Array v = Input(params.v, problem.value_dim);
  const Array dout = Input(params.dout, problem.value_dim);
  const int64_t kv_head = head / (problem.num_q_heads / problem.num_kv_heads);
  const Side queries = QuerySide(problem, params.extras, sequence, head, 1);
  const Side keys = KeySide(problem, params.extras, sequence, kv_head);
  const Dense dense = MakeDense(problem, params.extras, sequence.index, head, 1);
  const Bias bias = MakeBias(problem, params.extras, sequence.index, head, 1);
  const Logits logits(problem);

  float* row = arena.Take(problem.head_dim + problem.value_dim);
  float* q_block = arena.Take(kBlock * q.width);     // (row, D)
  float* dout_block = arena.Take(kBlock * v.width);  // (row, Dv)
  float* s = arena.Take(kBlock * kPanel);            // (row, lane)
  float* dp = arena.Take(kBlock * kPanel);           // (row, lane)
  float lse[kBlock];
  float lse_rest[kBlock];
  float delta[kBlock];
  int32_t segments[kBlock];
  int32_t shown[kBlock * kPanel];

  BiasPanel panels[kMaxPanels];
  int64_t num_panels = 0;
  const int64_t end_row = sums.one_row ? queries.count : sums.first_row + kBlock;
  Range visible = {INT64_MAX, 0};
  const int64_t end_key = Min(first_key + TileRows(problem), keys.count);
  for (int64_t first = first_key; first < end_key; first += kPanel) {
    BiasPanel& panel = panels[num_panels++];
    MakeBand<Lanes::kKeys>(sequence, keys, 1, first, &panel.band);
    panel.k = arena.Take(k.width * kPanel);
    panel.v = arena.Take(v.width * kPanel);
    LoadPanel(k, dtype, keys, panel.band, 1.0f, row, panel.k);
    LoadPanel(v, dtype, keys, panel.band, 1.0f, row, panel.v);
    visible = {Min(visible.lo, panel.band.any.lo), Max(visible.hi, panel.band.any.hi)};
  }
  visible = {Max(visible.lo, sums.first_row), Min(visible.hi, end_row)};

  for (int64_t first = visible.lo; first < visible.hi; first += kBlock) {
    const Block block = MakeBlock(queries, first, visible.hi, segments);
    bool is_loaded = false;
    for (int64_t i = 0; i < num_panels; ++i) {
      const BiasPanel& panel = panels[i];
      Span span = Overlap(panel.band, block);
      if (dense.words) ReadDense<Lanes::kKeys>(dense, panel.band, block, &span, shown);
      if (span.count == 0) continue;
      if (!is_loaded) {
        LoadBlock(q, dtype, queries, block, q_block);
        LoadBlock(dout, dtype, queries, block, dout_block);
        Scale(logits.scale, block.count * q.width, q_block);
        LoadStats(params.lse, params.delta, queries, first, block.count, {lse, lse_rest, delta});
        is_loaded = true;
      }
      const Mask mask = MakeMask(panel.band, block, span, dense.words ? shown : nullptr);
      const RowStats stats = {lse + span.begin, lse_rest + span.begin, delta + span.begin};
      const Matrix q_rows = {q_block + span.begin * q.width, q.width};
      const Matrix dout_rows = {dout_block + span.begin * v.width, v.width};
      Product<Left::kByRows>(span.count, q_rows, q.width, span.lanes, panel.k, nullptr, s);
      Product<Left::kByRows>(span.count, dout_rows, v.width, span.lanes, panel.v, nullptr, dp);
      AddBias<Lanes::kKeys>(bias, logits.bias, panel.band, block, span, s);
      if (span.needs_mask) {
        ScoreGradients<Lanes::kKeys, true>(logits, span, mask, stats, s, dp);
      } else {
        ScoreGradients<Lanes::kKeys, false>(logits, span, mask, stats, s, dp);
      }
      sums.Add(panel.band, block, span, dp);
    }
  }
}

void BiasGradient(const DbiasParams& params, const BiasTile& tile, float* memory) {
  const Problem& problem = params.problem;
  const int64_t tile_keys = TileRows(problem);
  Arena arena = {memory};
  const BiasSums sums = {arena.Take(kBlock * tile_keys),
                         tile_keys,
                         tile.first_row,
                         tile.first_key,
                         problem.bias_rows == 1,
                         problem.bias_keys == 1};
  memset(sums.data, 0, kBlock * tile_keys * sizeof(float));
  const int64_t first_head = problem.bias_heads == 1 ? 0 : tile.head;
  const int64_t end_head = problem.bias_heads == 1 ? problem.num_q_heads : tile.head + 1;
  for (int64_t m = 0; m < tile.num_sequences; ++m) {
    const Sequence& sequence = tile.sequences[m];
    for (int64_t head = first_head; head < end_head; ++head) {
      const int64_t end_key = sums.one_key ? sequence.window.kv_len : tile.first_key + 1;
      for (int64_t key = tile.first_key; key < end_key; key += tile_keys) {
        AddScoreGradients(params, sequence, head, key, sums, arena);
      }
    }
  }
  const int64_t num_rows = Min(kBlock, problem.bias_rows - tile.first_row);
  const int64_t num_keys = Min(tile_keys, problem.bias_keys - tile.first_key);
  const int64_t slice = tile.batch * problem.bias_heads + tile.head;
  const DType dtype = BiasType(problem);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = slice * problem.bias_rows + tile.first_row + i;
    const int64_t at = row * problem.bias_keys + tile.first_key;
    StoreRow(sums.data + i * tile_keys, dtype, 0, num_keys,
             static_cast<char*>(params.dbias) + at * BytesOf(dtype));
  }
}

}  // namespace

namespace JAX_FA_ISA {

#define JAX_FA_STRING_(x) #x
#define JAX_FA_STRING(x) JAX_FA_STRING_(x)

const CpuKernels kKernels = {
    JAX_FA_STRING(JAX_FA_ISA),
    TileRows,
    ScratchFloats,
    Forward,
    Delta,
    Backward<Lanes::kQueries>,
    Backward<Lanes::kKeys>,
    BiasTileRows,
    BiasScratchFloats,
    BiasGradient,
};

}  // namespace JAX_FA_ISA
}  // namespace jax_fa
