// Cuts attention into tiles and runs them with the kernels of this machine's instruction set.
#include "attention_cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "attention_cpu_kernels.h"

namespace jax_fa {

Range VisibleKeys(const Sequence& sequence, int64_t row) { return sequence.window.KeysOf(row); }
Range VisibleRows(const Sequence& sequence, int64_t key) { return sequence.window.RowsOf(key); }

namespace {

// ---- Instruction set ----------------------------------------------------------------------------

// Best first; every entry is compiled in and runs on this machine.
std::vector<const CpuKernels*> SupportedKernels() {
  std::vector<const CpuKernels*> kernels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    kernels.push_back(&avx512::kKernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kernels.push_back(&avx2::kKernels);
  }
#endif
#if defined(__aarch64__)
  kernels.push_back(&neon::kKernels);
#else
  kernels.push_back(&portable::kKernels);
#endif
  return kernels;
}

std::atomic<const CpuKernels*>& ChosenKernels() {
  static std::atomic<const CpuKernels*> chosen{SupportedKernels().front()};
  return chosen;
}

// ---- Sequences ----------------------------------------------------------------------------------

// Tokens [first, first + used) of an array, within a slot that may be longer.
struct Slot {
  int64_t first;
  int64_t used;
};

// The slots of one side, one after another, in order and apart whatever borders and lengths say: a
// border counts as the largest so far, itself included, of borders clamped to the array.
class Slots {
 public:
  Slots(int64_t length, const int32_t* cu_seqlens, const int32_t* lengths)
      : length_(length), cu_seqlens_(cu_seqlens), lengths_(lengths) {}

  Slot Next() {
    const int64_t m = next_++;
    int64_t first = m * length_;
    int64_t size = length_;
    if (cu_seqlens_) {
      first = std::clamp<int64_t>(cu_seqlens_[m], border_, length_);
      border_ = std::clamp<int64_t>(cu_seqlens_[m + 1], first, length_);
      size = border_ - first;
    }
    return {first, lengths_ ? std::clamp<int64_t>(lengths_[m], 0, size) : size};
  }

 private:
  const int64_t length_;
  const int32_t* const cu_seqlens_;
  const int32_t* const lengths_;
  int64_t next_ = 0;
  int64_t border_ = 0;
};

// The sequences with query rows, in order. The others have no part in any result, and cost nothing.
std::vector<Sequence> Sequences(const Problem& problem, const Extras& extras) {
  std::vector<Sequence> sequences;
  if (problem.q_len == 0 || problem.num_q_heads == 0) return sequences;
  Slots q_slots(problem.q_len, extras.cu_seqlens_q, extras.q_lengths);
  Slots kv_slots(problem.kv_len, extras.cu_seqlens_k, extras.kv_lengths);
  for (int64_t m = 0; m < problem.num_sequences; ++m) {
    const Slot q = q_slots.Next();
    const Slot kv = kv_slots.Next();
    if (q.used == 0) continue;
    const int64_t offset = extras.q_offset ? extras.q_offset[m] : 0;
    sequences.push_back({m, q.first, kv.first, WindowOf(problem, q.used, kv.used, offset)});
  }
  return sequences;
}

Slot QuerySlot(const Sequence& sequence) { return {sequence.q_first, sequence.window.q_len}; }
Slot KeySlot(const Sequence& sequence) { return {sequence.kv_first, sequence.window.kv_len}; }

// Calls fill(first, count) for the runs of tokens that no sequence uses.
template <typename SlotOf, typename Fill>
void FillUnused(const std::vector<Sequence>& sequences, SlotOf slot_of, int64_t tokens, Fill fill) {
  int64_t end = 0;
  for (const Sequence& sequence : sequences) {
    const Slot slot = slot_of(sequence);
    if (slot.first > end) fill(end, slot.first - end);
    end = slot.first + slot.used;
  }
  if (tokens > end) fill(end, tokens - end);
}

template <typename SlotOf>
void ZeroUnused(const std::vector<Sequence>& sequences, SlotOf slot_of, int64_t tokens,
                int64_t token_bytes, void* array) {
  if (token_bytes == 0) return;
  FillUnused(sequences, slot_of, tokens, [&](int64_t first, int64_t count) {
    std::memset(static_cast<char*>(array) + first * token_bytes, 0, count * token_bytes);
  });
}

// ---- Tiles --------------------------------------------------------------------------------------

// Query tiles from the last to the first: under a causal mask the last have the most to do, and
// starting with them keeps the threads busy to the end.
std::vector<Tile> QueryTiles(const Problem& problem, const std::vector<Sequence>& sequences,
                             int64_t tile_rows) {
  const int64_t group = problem.num_q_heads / problem.num_kv_heads;
  std::vector<Tile> tiles;
  for (const Sequence& sequence : sequences) {
    const int64_t rows = sequence.window.q_len * group;
    for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
      for (int64_t first = 0; first < rows; first += tile_rows) {
        tiles.push_back({&sequence, head, first});
      }
    }
  }
  std::reverse(tiles.begin(), tiles.end());
  return tiles;
}

std::vector<Tile> KeyTiles(const Problem& problem, const std::vector<Sequence>& sequences,
                           int64_t tile_rows) {
  std::vector<Tile> tiles;
  for (const Sequence& sequence : sequences) {
    for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
      for (int64_t first = 0; first < sequence.window.kv_len; first += tile_rows) {
        tiles.push_back({&sequence, head, first});
      }
    }
  }
  return tiles;
}

// The sequences that have batch `index` of a bias.
Slot SequencesOf(const Problem& problem, const std::vector<Sequence>& sequences, int64_t index) {
  if (problem.bias_batch == 1) return {0, static_cast<int64_t>(sequences.size())};
  const auto found =
      std::lower_bound(sequences.begin(), sequences.end(), index,
                       [](const Sequence& one, int64_t number) { return one.index < number; });
  if (found == sequences.end() || found->index != index) return {0, 0};
  return {found - sequences.begin(), 1};
}

std::vector<BiasTile> BiasTiles(const Problem& p, const std::vector<Sequence>& sequences,
                                int64_t tile_rows, int64_t tile_keys) {
  std::vector<BiasTile> tiles;
  if (p.bias_rows == 0 || p.bias_keys == 0) return tiles;  // of any number of batches and heads
  for (int64_t batch = 0; batch < p.bias_batch; ++batch) {
    const Slot found = SequencesOf(p, sequences, batch);
    const Sequence* first = sequences.data() + found.first;
    for (int64_t head = 0; head < p.bias_heads; ++head) {
      for (int64_t row = 0; row < p.bias_rows; row += tile_rows) {
        for (int64_t key = 0; key < p.bias_keys; key += tile_keys) {
          tiles.push_back({first, found.used, batch, head, row, key});
        }
      }
    }
  }
  return tiles;
}

class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t count)
      : data_(static_cast<float*>(::operator new(count * sizeof(float), kAlignment))) {}
  ~AlignedFloats() { ::operator delete(data_, kAlignment); }
  AlignedFloats(const AlignedFloats&) = delete;
  AlignedFloats& operator=(const AlignedFloats&) = delete;
  float* get() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  float* data_;
};

}  // namespace

const char* CpuIsa() { return ChosenKernels().load()->name; }

bool ForceCpuIsa(const char* name) {
  for (const CpuKernels* kernels : SupportedKernels()) {
    if (std::strcmp(kernels->name, name) != 0) continue;
    ChosenKernels() = kernels;
    return true;
  }
  return false;
}

void AttentionForwardCpu(const FwdParams& params, const ParallelFor& parallel_for) {
  const CpuKernels& kernels = *ChosenKernels().load();
  const Problem& problem = params.problem;
  const std::vector<Sequence> sequences = Sequences(problem, params.extras);
  const int64_t element_bytes = problem.dtype == DType::kF32 ? 4 : 2;
  const int64_t heads = problem.num_q_heads;
  const int64_t q_tokens = problem.batch * problem.q_len;

  ZeroUnused(sequences, QuerySlot, q_tokens, heads * problem.value_dim * element_bytes, params.out);
  FillUnused(sequences, QuerySlot, q_tokens, [&](int64_t first, int64_t count) {
    std::fill_n(params.lse + first * heads, count * heads, -__builtin_inff());
  });

  const std::vector<Tile> tiles = QueryTiles(problem, sequences, kernels.tile_rows(problem));
  parallel_for(static_cast<int64_t>(tiles.size()), [&](int64_t i) {
    const AlignedFloats scratch(kernels.scratch_floats(problem));
    kernels.forward(params, tiles[i], scratch.get());
  });
}

void AttentionBackwardCpu(const BwdParams& params, const ParallelFor& parallel_for) {
  const CpuKernels& kernels = *ChosenKernels().load();
  const Problem& problem = params.problem;
  const std::vector<Sequence> sequences = Sequences(problem, params.extras);
  const int64_t element_bytes = problem.dtype == DType::kF32 ? 4 : 2;
  const int64_t q_heads = problem.num_q_heads;
  const int64_t kv_heads = problem.num_kv_heads;
  const int64_t q_tokens = problem.batch * problem.q_len;
  const int64_t kv_tokens = problem.batch * problem.kv_len;

  ZeroUnused(sequences, QuerySlot, q_tokens, q_heads * problem.head_dim * element_bytes, params.dq);
  ZeroUnused(sequences, KeySlot, kv_tokens, kv_heads * problem.head_dim * element_bytes, params.dk);
  ZeroUnused(sequences, KeySlot, kv_tokens, kv_heads * problem.value_dim * element_bytes,
             params.dv);
  if (params.dsinks) std::fill_n(params.dsinks, problem.num_sequences * q_heads, 0.0f);
  if (sequences.empty()) return;

  const int64_t scratch_floats = kernels.scratch_floats(problem);
  const AlignedFloats delta(q_tokens * q_heads);
  const int64_t num_heads = static_cast<int64_t>(sequences.size()) * q_heads;
  parallel_for(num_heads, [&](int64_t i) {
    const AlignedFloats scratch(scratch_floats);
    kernels.delta(params, sequences[i / q_heads], i % q_heads, scratch.get(), delta.get());
  });

  const int64_t tile_rows = kernels.tile_rows(problem);
  const std::vector<Tile> q_tiles = QueryTiles(problem, sequences, tile_rows);
  const std::vector<Tile> kv_tiles = KeyTiles(problem, sequences, tile_rows);
  const int64_t num_q_tiles = static_cast<int64_t>(q_tiles.size());
  const int64_t num_tiles = num_q_tiles + static_cast<int64_t>(kv_tiles.size());
  parallel_for(num_tiles, [&](int64_t i) {
    const AlignedFloats scratch(scratch_floats);
    if (i < num_q_tiles) {
      kernels.backward_q(params, q_tiles[i], delta.get(), scratch.get());
    } else {
      kernels.backward_kv(params, kv_tiles[i - num_q_tiles], delta.get(), scratch.get());
    }
  });
}

void AttentionBiasGradientCpu(const DbiasParams& params, const ParallelFor& parallel_for) {
  const CpuKernels& kernels = *ChosenKernels().load();
  const Problem& problem = params.problem;
  const std::vector<Sequence> sequences = Sequences(problem, params.extras);
  const std::vector<BiasTile> tiles =
      BiasTiles(problem, sequences, kernels.bias_tile_rows(problem), kernels.tile_rows(problem));
  parallel_for(static_cast<int64_t>(tiles.size()), [&](int64_t i) {
    const AlignedFloats scratch(kernels.bias_scratch_floats(problem));
    kernels.bias_gradient(params, tiles[i], scratch.get());
  });
}

}  // namespace jax_fa
