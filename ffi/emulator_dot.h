// Sums of products as tensor cores form them: the compiled twin of jax_fa/emulator/dot.py, which
// says what is computed and on what evidence. Both give the same bits (tests/emulator/test_dot.py).
#ifndef JAX_FA_EMULATOR_DOT_H_
#define JAX_FA_EMULATOR_DOT_H_

#include <array>
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

// Of mma.sync, and of wgmma with 16-bit factors.
constexpr DotRule kWarpRule{25, 23};

// An accumulator [a.rows, b.rows]; null values for zero.
struct DotAddend {
  const float* values;
  int64_t stride;
};

// sum [a.rows, b.rows] = addend + a^T b.
void MultiplyAdd(const DotFactors& a, const DotFactors& b, int64_t depth, const DotAddend& addend,
                 const DotRule& rule, float* sum);

constexpr int kFragmentLanes = 32;

// What a warp's mma.sync.m16n8k16 reads: registers of all lanes, in the order of its operands.
struct WarpOperands {
  std::array<const uint32_t*, 4> a;  // two 16-bit factors a register
  std::array<const uint32_t*, 2> b;
  std::array<const float*, 4> addend;
  bool is_bfloat16;  // else float16
};

// The four registers of the result, [4, kFragmentLanes].
void MultiplyFragments(const WarpOperands& operands, const DotRule& rule, float* result);

}  // namespace jax_fa

#endif  // JAX_FA_EMULATOR_DOT_H_
