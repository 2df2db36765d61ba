// The C++ twin of jax_fa/spec/band.py: which keys a query may see. Compared exhaustively by a test.
#ifndef JAX_FA_BAND_H_
#define JAX_FA_BAND_H_

#include <algorithm>
#include <cstdint>

namespace jax_fa {

// [lo, hi), empty when hi <= lo.
struct Range {
  int64_t lo;
  int64_t hi;
};

// The band of one sequence with everything known.
struct Window {
  int64_t shift;  // key position of query row 0's diagonal
  int64_t left;   // keys before the diagonal
  int64_t right;  // keys beyond the diagonal
  int64_t q_len;
  int64_t kv_len;

  // Keys that query `row` sees, for row < q_len.
  Range KeysOf(int64_t row) const {
    const int64_t diagonal = row + shift;
    return {std::max<int64_t>(0, diagonal - left), std::min(kv_len, diagonal + right + 1)};
  }

  // Query rows that see `key`, for key < kv_len.
  Range RowsOf(int64_t key) const {
    return {std::max<int64_t>(0, key - right - shift), std::min(q_len, key + left - shift + 1)};
  }
};

}  // namespace jax_fa

#endif  // JAX_FA_BAND_H_
