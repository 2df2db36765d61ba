#include "checks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>

namespace jax_fa {
namespace {

std::string ToText(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

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

// Neither of these overflows, even if nothing has bounded the extents yet: a product that has more
// than 63 bits counts as the largest that has not.
int64_t CeilDiv(int64_t extent, int64_t size) { return extent / size + (extent % size > 0); }

int64_t Product(std::initializer_list<int64_t> extents) {
  int64_t product = 1;
  for (int64_t extent : extents) {
    if (__builtin_mul_overflow(product, extent, &product)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return product;
}

// A mask has all of its extents or none, each that of the problem or 1; rows may also be of blocks.
Complaint CheckMaskExtents(const Problem& p) {
  const int64_t row_blocks = CeilDiv(p.q_len, kMaskBlock);
  const struct {
    const char* name;
    int64_t value;
    int64_t full;
    int64_t by_blocks;
  } extents[] = {
      {"batch", p.mask_batch, p.batch, 1},
      {"heads", p.mask_heads, p.num_q_heads, 1},
      {"rows", p.mask_rows, p.q_len, row_blocks},
      {"words of 32 keys", p.mask_width, CeilDiv(p.kv_len, 32), 1},
  };
  const bool is_absent = p.mask_batch == 0 && p.mask_heads == 0 && p.mask_rows == 0;
  if (is_absent && p.mask_width == 0) return std::nullopt;
  for (const auto& extent : extents) {
    if (extent.value != 1 && extent.value != extent.full && extent.value != extent.by_blocks) {
      const std::string blocks =
          extent.by_blocks == 1
              ? ""
              : ", or " + std::to_string(extent.by_blocks) + " of " + std::to_string(kMaskBlock);
      return "mask_words should have 1 or " + std::to_string(extent.full) + " " + extent.name +
             blocks + ", but has " + std::to_string(extent.value);
    }
  }
  return std::nullopt;
}

// A bias has all of its extents or none, each that of the problem or 1, and the problem's element
// type or float32.
Complaint CheckBiasExtents(const Problem& p) {
  const struct {
    const char* name;
    int64_t value;
    int64_t full;
  } extents[] = {
      {"batch", p.bias_batch, p.batch},
      {"heads", p.bias_heads, p.num_q_heads},
      {"rows", p.bias_rows, p.q_len},
      {"keys", p.bias_keys, p.kv_len},
  };
  const bool is_absent = p.bias_bytes == 0;
  if (p.bias_bytes != 0 && p.bias_bytes != 4 && (p.bias_bytes != 2 || p.dtype == DType::kF32)) {
    return "an element of the bias should have 4 bytes, or the 2 of q, but has " +
           std::to_string(p.bias_bytes);
  }
  for (const auto& extent : extents) {
    if (is_absent ? extent.value != 0 : extent.value != 1 && extent.value != extent.full) {
      const std::string full = extent.full == 1 ? "" : " or " + std::to_string(extent.full);
      const std::string expected = is_absent ? "0" : "1" + full;
      return "bias should have " + expected + " " + extent.name + ", but has " +
             std::to_string(extent.value);
    }
  }
  return std::nullopt;
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
  if (Complaint complaint = CheckMaskExtents(p)) return complaint;
  if (Complaint complaint = CheckBiasExtents(p)) return complaint;
  const int64_t width = std::max(p.head_dim, p.value_dim);
  if (!IsCountable({p.batch, p.q_len, p.num_q_heads, width}) ||
      !IsCountable({p.batch, p.kv_len, p.num_kv_heads, width}) ||
      !IsCountable({p.num_sequences, std::max(p.num_q_heads, p.num_kv_heads)}) ||
      !IsCountable({p.bias_batch, p.bias_heads, p.bias_rows, p.bias_keys})) {
    return "the extents of each array should multiply to 2^50 at most, those of 0 counting as 1";
  }
  return std::nullopt;
}

Complaint CheckAttributes(const Problem& p) {
  if (!std::isfinite(p.scale)) return "scale should be finite, but is " + ToText(p.scale);
  if (!std::isfinite(p.soft_cap) || p.soft_cap < 0) {
    return "soft_cap should be positive and finite, or 0 for none, but is " + ToText(p.soft_cap);
  }
  Complaint complaint;
  Problem::Sides(p, [&](const char* name, int32_t side) {
    if (complaint || (side >= -kUnbounded && side <= kUnbounded)) return;
    complaint = std::string(name) + " should be between " + std::to_string(-kUnbounded) + " and " +
                std::to_string(kUnbounded) + ", which is no bound, but is " + std::to_string(side);
  });
  return complaint;
}

// Complains of the first array visited that has elements and no address, though it may not be
// absent.
struct Addresses {
  Extents extents;
  Complaint complaint;

  template <typename Pointer>
  void operator()(const Array& array, const Pointer& pointer) {
    if (complaint || pointer != nullptr || array.is_optional) return;
    for (size_t i = 0; i < array.rank; ++i) {
      if (extents[array.dims[i]] == 0) return;
    }
    complaint = std::string(array.name) + " should have an address, but has none";
  }
};

// What CheckArrays of all operations have in common.
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
  // Without queries the map has no rows, while words that say the same of all have one.
  if (q_tokens > 0 && (extras.mask_words == nullptr) != (extras.mask_map == nullptr)) {
    return "mask_words and mask_map should be given together";
  }
  if (is_packed && extras.mask_words != nullptr) {
    return "a mask (mask_words) does not go with packed sequences (cu_seqlens_q)";
  }
  const bool has_bias = p.bias_batch * p.bias_heads * p.bias_rows * p.bias_keys > 0;
  if (has_bias != (extras.bias != nullptr)) {
    return has_bias ? "bias should have an address, but has none"
                    : "bias should have no address, since it has no elements";
  }
  if (is_packed && p.bias_bytes != 0) {
    return "a bias does not go with packed sequences (cu_seqlens_q)";
  }
  Addresses addresses{ExtentsOf(p), std::nullopt};
  Params::Operands(params, addresses);
  Params::Results(params, addresses);
  return addresses.complaint;
}

template <typename Params>
Complaint CheckScratchOf(const Params& params) {
  const int64_t splits = params.problem.num_splits;
  if (splits < 0 || splits > kMaxSplits) {
    return "num_splits should be " + std::to_string(kMaxSplits) + " at most, 0 for none, but is " +
           std::to_string(splits);
  }
  Addresses addresses{ExtentsOf(params.problem), std::nullopt};
  Params::Scratch(params, addresses);
  return addresses.complaint;
}

}  // namespace

Complaint CheckProblem(const Problem& problem) {
  if (Complaint complaint = CheckExtents(problem)) return complaint;
  return CheckAttributes(problem);
}

// Kernels count in 32 bits: bands leave room for lengths of kMaxLength (jax_fa/spec/band.py). TMA
// descriptors describe no empty arrays: a kernel that prefetches one with an extent of 0 dies of an
// illegal instruction.
Complaint CheckGpuProblem(const Problem& p) {
  // The row maximum is taken of unscaled scores.
  if (!(p.scale > 0)) return "scale is " + ToText(p.scale) + "; GPU kernels take a positive one";
  constexpr int64_t most_rows = (int64_t{1} << 31) - 1;
  const struct {
    const char* name;
    int64_t value;
    int64_t most = (1 << 30) - 1;
  } extents[] = {
      {"batch", p.batch},
      {"number of sequences", p.num_sequences},
      {"query length", p.q_len, kMaxLength},
      {"key length", p.kv_len, kMaxLength},
      {"query heads", p.num_q_heads, 65535},  // of a grid's second extent, in a backward
      {"key/value heads", p.num_kv_heads},
      {"batch times query length", Product({p.batch, p.q_len}), most_rows},
      {"batch times key length", Product({p.batch, p.kv_len}), most_rows},
      {"sequences times query heads times parts of the keys",
       Product({p.num_sequences, p.num_q_heads, std::max<int64_t>(p.num_splits, 1)})},
  };
  for (const auto& extent : extents) {
    if (extent.value < 1 || extent.value > extent.most) {
      return std::string(extent.name) + " is " + std::to_string(extent.value) +
             "; GPU kernels take 1 to " + std::to_string(extent.most);
    }
  }
  if (Product({p.mask_batch, p.mask_heads, p.mask_rows}) > most_rows) {
    return "the mask has more rows than the " + std::to_string(most_rows) + " of GPU kernels";
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
  const bool is_whole = p.bias_batch == p.batch && p.bias_heads == p.num_q_heads &&
                        p.bias_rows == p.q_len && p.bias_keys == p.kv_len;
  if (params.dbias != nullptr && !(is_whole && params.extras.bias != nullptr)) {
    return "dbias should be asked of a backward only where the bias is broadcast along nothing";
  }
  return std::nullopt;
}

Complaint CheckArrays(const DbiasParams& params) {
  if (params.problem.bias_bytes == 0) return "the gradient of a bias should be asked for with one";
  if (Complaint complaint = CheckInputs(params)) return complaint;
  if ((params.dbias == nullptr) != (params.extras.bias == nullptr)) {
    return "dbias should have an address if and only if bias has";
  }
  return std::nullopt;
}

Complaint CheckScratch(const FwdParams& params) { return CheckScratchOf(params); }
Complaint CheckScratch(const BwdParams& params) {
  constexpr int64_t most = 1 << 16;  // so that extents multiply
  const Problem& p = params.problem;
  if (p.dq_dim < p.head_dim || p.dq_dim > most) {
    return "dq_dim should be " + std::to_string(p.head_dim) + " to " + std::to_string(most) +
           ", but is " + std::to_string(p.dq_dim);
  }
  return CheckScratchOf(params);
}
Complaint CheckScratch(const DbiasParams& params) { return CheckScratchOf(params); }

}  // namespace jax_fa
