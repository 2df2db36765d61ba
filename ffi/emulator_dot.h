// Sums of products as tensor cores form them: the compiled twin of jax_fa/emulator/dot.py, which
// says what is computed and on what evidence. Both give the same bits (tests/emulator/test_dot.py).
#ifndef JAX_FA_EMULATOR_DOT_H_
#define JAX_FA_EMULATOR_DOT_H_

#include <cstdint>

namespace jax_fa {

// One operand of a multiply, [depth, rows].
struct DotFactors {
  const float* values;
  int64_t stride;  // elements from one plane of `rows` to the next
  int64_t rows;
  int least_exponent;  // of the element type
};

// How an instruction adds; its result is a float32.
struct DotRule {
  int digits;  // binary digits kept below the largest exponent
  int cut;     // binary digits of the result
};

// An accumulator [a.rows, b.rows]; null values for zero.
struct DotAddend {
  const float* values;
  int64_t stride;
};

// sum [a.rows, b.rows] = addend + a^T b.
void MultiplyAdd(const DotFactors& a, const DotFactors& b, int64_t depth, const DotAddend& addend,
                 const DotRule& rule, float* sum);

}  // namespace jax_fa

#endif  // JAX_FA_EMULATOR_DOT_H_
