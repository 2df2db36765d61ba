#include "checks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>

namespace jax_fa {
namespace {

std::string ToText(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Few enough that no count of bytes, rows or tiles derived from extents overflows.
constexpr int64_t kMaxElements = int64_t{1} << 50;

// Whether an array's element count can be computed: extents of 0 count as 1, since products of some
// of an array's extents are taken too.
bool IsCountable(std::initializer_list<int64_t> extents) {
  int64_t count = 1;
  for (int64_t extent : extents) {
    extent = std::max<int64_t>(extent, 1);
    if (extent > kMaxElements / count) return false;
    count *= extent;
  }
  return true;
}

Complaint CheckExtents(const Problem& p) {
  const struct {
    const char* name;
    int64_t value;
    int64_t least;
  } extents[] = {
      {"batch", p.batch, 0},
      {"number of sequences", p.num_sequences, 0},
      {"query length", p.q_len, 0},
      {"key length", p.kv_len, 0},
      {"number of query heads", p.num_q_heads, 0},
      {"number of key/value heads", p.num_kv_heads, 1},
      {"head size of q and k", p.head_dim, 1},
      {"head size of v", p.value_dim, 1},
  };
  for (const auto& extent : extents) {
    if (extent.value < extent.least) {
      return std::string(extent.name) + " should be at least " + std::to_string(extent.least) +
             ", but is " + std::to_string(extent.value);
    }
  }
  if (p.num_q_heads % p.num_kv_heads != 0) {
    return "query heads (" + std::to_string(p.num_q_heads) +
           ") should be a multiple of key/value heads (" + std::to_string(p.num_kv_heads) + ")";
  }
  const int64_t width = std::max(p.head_dim, p.value_dim);
  if (!IsCountable({p.batch, p.q_len, p.num_q_heads, width}) ||
      !IsCountable({p.batch, p.kv_len, p.num_kv_heads, width}) ||
      !IsCountable({p.num_sequences, std::max(p.num_q_heads, p.num_kv_heads)})) {
    return "the extents of each array should multiply to 2^50 at most, those of 0 counting as 1";
  }
  return std::nullopt;
}

Complaint CheckAttributes(const Problem& p) {
  if (!std::isfinite(p.scale)) return "scale should be finite, but is " + ToText(p.scale);
  if (!std::isfinite(p.soft_cap) || p.soft_cap < 0) {
    return "soft_cap should be positive and finite, or 0 for none, but is " + ToText(p.soft_cap);
  }
  const struct {
    const char* name;
    int32_t value;
  } bounds[] = {{"window_left", p.window_left}, {"window_right", p.window_right}};
  for (const auto& bound : bounds) {
    if (bound.value < -kUnbounded || bound.value > kUnbounded) {
      return std::string(bound.name) + " should be between " + std::to_string(-kUnbounded) +
             " and " + std::to_string(kUnbounded) + ", which is no bound, but is " +
             std::to_string(bound.value);
    }
  }
  return std::nullopt;
}

struct Address {
  const char* name;
  const void* pointer;
  int64_t num_elements;
};

Complaint CheckAddresses(std::initializer_list<Address> addresses) {
  for (const Address& address : addresses) {
    if (address.pointer == nullptr && address.num_elements > 0) {
      return std::string(address.name) + " should have an address, but has none";
    }
  }
  return std::nullopt;
}

// What CheckArrays of both operations have in common.
template <typename Params>
Complaint CheckInputs(const Params& params) {
  const Problem& p = params.problem;
  const Extras& extras = params.extras;
  const int64_t q_tokens = p.batch * p.q_len, kv_tokens = p.batch * p.kv_len;
  const bool is_packed = extras.cu_seqlens_q != nullptr;
  if (is_packed != (extras.cu_seqlens_k != nullptr)) {
    return "cu_seqlens_q and cu_seqlens_k should be given together";
  }
  if (is_packed && p.batch != 1) {
    return "packed sequences (cu_seqlens_q) should have a batch of 1, but it is " +
           std::to_string(p.batch);
  }
  if (!is_packed && p.num_sequences != p.batch) {
    return "without cu_seqlens_q, the number of sequences should be the batch, " +
           std::to_string(p.batch) + ", but is " + std::to_string(p.num_sequences);
  }
  if (q_tokens > 0 && kv_tokens > 0 &&
      (extras.q_segments == nullptr) != (extras.kv_segments == nullptr)) {
    return "q_segments and kv_segments should be given together";
  }
  return CheckAddresses({
      {"q", params.q, q_tokens * p.num_q_heads},
      {"k", params.k, kv_tokens},
      {"v", params.v, kv_tokens},
      {"out", params.out, q_tokens * p.num_q_heads},
      {"lse", params.lse, q_tokens * p.num_q_heads},
  });
}

// ---- Scratch: the constants and functions of jax_fa/kernels/abi.py ------------------------------

constexpr int64_t kScratchBlock = 128;
constexpr int64_t kResidentCtas = kMaxSplits;
constexpr int64_t kTurnRows = 64;
constexpr int64_t kKvSplitBlock = 128;

int64_t ScratchRows(const Problem& p) {
  return (CeilDiv(p.batch * p.q_len, kScratchBlock) + p.num_sequences) * kScratchBlock;
}

int64_t HeadSplits(const Problem& p) {
  const int64_t blocks = CeilDiv(p.batch * p.kv_len, kKvSplitBlock) + p.num_sequences - p.batch;
  const int64_t wanted = kResidentCtas / std::max<int64_t>(blocks * p.num_kv_heads, 1);
  return std::max<int64_t>(std::min(wanted, p.num_q_heads / p.num_kv_heads), 1);
}

bool HasElements(const ScratchArray& array) {
  return std::all_of(array.shape.begin(), array.shape.end(), [](int64_t x) { return x > 0; });
}

Complaint CheckScratchAddresses(const std::vector<ScratchArray>& arrays,
                                std::initializer_list<const void*> pointers) {
  auto pointer = pointers.begin();
  for (const ScratchArray& array : arrays) {
    if (const Complaint complaint =
            CheckAddresses({{array.name, *pointer++, HasElements(array)}})) {
      return complaint;
    }
  }
  return std::nullopt;
}

}  // namespace

Complaint CheckProblem(const Problem& problem) {
  if (Complaint complaint = CheckExtents(problem)) return complaint;
  return CheckAttributes(problem);
}

// Kernels count in 32 bits: bands leave room for lengths of kMaxLength (jax_fa/band.py). TMA
// descriptors describe no empty arrays: a kernel that prefetches one with an extent of 0 dies of an
// illegal instruction.
Complaint CheckGpuProblem(const Problem& p) {
  // The row maximum is taken of unscaled scores.
  if (!(p.scale > 0)) return "scale is " + ToText(p.scale) + "; GPU kernels take a positive one";
  const struct {
    const char* name;
    int64_t value;
    int64_t most = (1 << 30) - 1;
  } extents[] = {
      {"batch", p.batch},
      {"number of sequences", p.num_sequences},
      {"query length", p.q_len, kMaxLength},
      {"key length", p.kv_len, kMaxLength},
      {"query heads", p.num_q_heads},
      {"key/value heads", p.num_kv_heads},
      {"batch times query heads", p.batch * p.num_q_heads},
  };
  for (const auto& extent : extents) {
    if (extent.value < 1 || extent.value > extent.most) {
      return std::string(extent.name) + " is " + std::to_string(extent.value) +
             "; GPU kernels take 1 to " + std::to_string(extent.most);
    }
  }
  return std::nullopt;
}

Complaint CheckArrays(const FwdParams& params) { return CheckInputs(params); }

Complaint CheckArrays(const BwdParams& params) {
  if (Complaint complaint = CheckInputs(params)) return complaint;
  if ((params.dsinks == nullptr) != (params.extras.sinks == nullptr)) {
    return "dsinks should be asked for if and only if sinks is given";
  }
  const Problem& p = params.problem;
  const int64_t q_rows = p.batch * p.q_len * p.num_q_heads, kv_tokens = p.batch * p.kv_len;
  return CheckAddresses({
      {"dout", params.dout, q_rows},
      {"dq", params.dq, q_rows},
      {"dk", params.dk, kv_tokens},
      {"dv", params.dv, kv_tokens},
  });
}

std::vector<ScratchArray> ForwardScratch(const Problem& p, int64_t num_splits) {
  if (num_splits < 2) return {};
  return {{kForwardScratch[0], false, {num_splits, p.batch, p.q_len, p.num_q_heads, p.value_dim}},
          {kForwardScratch[1], false, {num_splits, p.batch, p.q_len, p.num_q_heads}}};
}

std::vector<ScratchArray> BackwardScratch(const Problem& p) {
  const int64_t rows = ScratchRows(p), splits = HeadSplits(p);
  const int64_t kv_elements = p.batch * p.kv_len * p.num_kv_heads * (p.head_dim + p.value_dim);
  return {{kBackwardScratch[0], false, {p.num_q_heads, rows, p.head_dim}},
          {kBackwardScratch[1], false, {2, p.num_q_heads, rows}},
          {kBackwardScratch[2], false, {splits > 1 ? splits : 0, kv_elements}},
          {kBackwardScratch[3], true, {p.num_q_heads, p.deterministic ? rows / kTurnRows : 0}}};
}

Complaint CheckScratch(const FwdParams& params) {
  const FwdScratch& scratch = params.scratch;
  if (scratch.num_splits < 0 || scratch.num_splits > kMaxSplits) {
    return "num_splits should be " + std::to_string(kMaxSplits) + " at most, 0 for none, but is " +
           std::to_string(scratch.num_splits);
  }
  return CheckScratchAddresses(ForwardScratch(params.problem, scratch.num_splits),
                               {scratch.out_parts, scratch.lse_parts});
}

Complaint CheckScratch(const BwdParams& params) {
  const BwdScratch& scratch = params.scratch;
  return CheckScratchAddresses(BackwardScratch(params.problem), {scratch.dq_sum, scratch.row_stats,
                                                                 scratch.dkv_sums, scratch.turns});
}

}  // namespace jax_fa
