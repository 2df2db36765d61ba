#include "emulator_dot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// One function for every instruction set, and for the best one of the machine.
#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#define JAX_FA_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define JAX_FA_CLONES
#endif

// Wide vectors are passed between functions of this file only.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace jax_fa {
namespace {

constexpr int kColumns = 16;          // of the result that are computed at a time
constexpr int kLanes = 8;             // of them that are multiplied at a time
constexpr int64_t kTerms = 16;        // significands below 4, of 25 digits, whose sum fits 32 bits
constexpr int16_t kZero = -1000;      // exponent of a factor that is zero, as in dot.py
constexpr int16_t kNotFinite = 2500;  // above all others, also in a sum with kZero
constexpr int16_t kLeast = -400;      // below the exponent of every product that is not zero
constexpr int16_t kSafe = 90;         // sums with exponents within +-kSafe stay in float32's range
constexpr uint32_t kNanBits = 0x7FFFFFFF;

// Compilers split vectors that a machine has no registers for.
typedef int16_t Vs __attribute__((vector_size(2 * kColumns)));
typedef int16_t Vh __attribute__((vector_size(2 * kLanes)));
typedef int32_t Vi __attribute__((vector_size(4 * kLanes)));
typedef float Vf __attribute__((vector_size(4 * kLanes)));
typedef int64_t Vl __attribute__((vector_size(8 * kLanes)));
typedef double Vd __attribute__((vector_size(8 * kLanes)));

template <typename Vector, typename Element>
Vector Load(const Element* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <typename Vector, typename Element>
void Store(Element* to, const Vector& vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

template <typename To, typename From>
To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

int16_t Exponent(float value, int least) {
  const int field = Bits<uint32_t>(value) >> 23 & 0xFF;
  if (value == 0) return kZero;
  return field == 0xFF ? kNotFinite : static_cast<int16_t>(std::max(field - 127, least));
}

// Rows of one operand, `depth` factors each.
struct Rows {
  std::vector<float> values;
  std::vector<int16_t> exponents;
};

// [rows, depth]: the scalars of the inner loops.
Rows ByRow(const DotFactors& factors, int64_t depth) {
  Rows rows{std::vector<float>(factors.rows * depth), std::vector<int16_t>(factors.rows * depth)};
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t row = 0; row < factors.rows; ++row) {
      const float value = factors.values[k * factors.stride + row];
      rows.values[row * depth + k] = value;
      rows.exponents[row * depth + k] = Exponent(value, factors.least_exponent);
    }
  }
  return rows;
}

// [rows / kColumns, depth, kColumns]: the vectors of the inner loops; zeros beyond the rows.
Rows ByBlock(const DotFactors& factors, int64_t depth) {
  const int64_t blocks = (factors.rows + kColumns - 1) / kColumns;
  const int64_t size = blocks * depth * kColumns;
  Rows rows{std::vector<float>(size), std::vector<int16_t>(size, kZero)};
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t row = 0; row < factors.rows; ++row) {
      const float value = factors.values[k * factors.stride + row];
      const int64_t place = (row / kColumns * depth + k) * kColumns + row % kColumns;
      rows.values[place] = value;
      rows.exponents[place] = Exponent(value, factors.least_exponent);
    }
  }
  return rows;
}

// One row of A by kColumns rows of B.
struct Block {
  const float* a;
  const int16_t* a_exponents;
  const float* b;
  const int16_t* b_exponents;
  int64_t depth;
};

// The exponents below whose `digits` terms are cut off. False if float32 does not do for the sums.
inline bool FindTop(const Block& block, const float* addend, int16_t* top) {
  for (int j = 0; j < kColumns; ++j) {
    const uint32_t bits = Bits<uint32_t>(addend[j]);
    const int field = bits >> 23 & 0xFF;
    const int own = field == 0xFF ? kNotFinite : std::max(field, 1) - 127;
    top[j] = static_cast<int16_t>(bits << 1 == 0 ? kZero : own);
  }
  Vs highest = Load<Vs>(top);
  for (int64_t k = 0; k < block.depth; ++k) {
    const Vs both = Load<Vs>(block.b_exponents + k * kColumns) + block.a_exponents[k];
    highest = both > highest ? both : highest;
  }
  highest = highest < kLeast ? Vs{} : highest;  // nothing but zeros
  Store(top, highest);
  const Vs is_far = (highest > kSafe) | (highest < static_cast<int16_t>(-kSafe));
  int64_t any[sizeof(Vs) / sizeof(int64_t)];
  Store(any, is_far);
  return (any[0] | any[1] | any[2] | any[3]) == 0;
}

inline void Near(const Block& block, const float* addend, const DotRule& rule, const int16_t* top,
                 float* sum) {
  const int64_t kept = static_cast<int64_t>(~uint64_t{0} << (29 + 23 - rule.cut));
  for (int half = 0; half < kColumns; half += kLanes) {
    const Vi exponents = __builtin_convertvector(Load<Vh>(top + half), Vi);
    const Vf scale = reinterpret_cast<Vf>((rule.digits + 127 - exponents) << 23);
    const Vf inverse = reinterpret_cast<Vf>((exponents - rule.digits + 127) << 23);
    // Cut off to whole numbers, as below: towards zero.
    const Vf own = Load<Vf>(addend + half) * scale;
    Vd total = __builtin_convertvector(__builtin_convertvector(own, Vi), Vd);
    for (int64_t first = 0; first < block.depth; first += kTerms) {
      const int64_t end = std::min(block.depth, first + kTerms);
      Vi terms{};
      for (int64_t k = first; k < end; ++k) {
        const Vf product = block.a[k] * Load<Vf>(block.b + k * kColumns + half);
        terms += __builtin_convertvector(product * scale, Vi);
      }
      total += __builtin_convertvector(terms, Vd);
    }
    total *= __builtin_convertvector(inverse, Vd);
    const Vd cut = reinterpret_cast<Vd>(reinterpret_cast<Vl>(total) & kept);
    Store(sum + half, __builtin_convertvector(cut, Vf));
  }
}

// One column of the same in float64, for exponents that float32 lacks, infinities and NaN.
float Far(const Block& block, int j, float addend, const DotRule& rule, int16_t top) {
  double plain = addend;
  for (int64_t k = 0; k < block.depth; ++k) {
    plain += static_cast<double>(block.a[k]) * block.b[k * kColumns + j];
  }
  if (std::isnan(plain)) return Bits<float>(kNanBits);
  if (std::isinf(plain)) return static_cast<float>(plain);
  const double scale = std::ldexp(1.0, rule.digits - top);
  double total = std::trunc(addend * scale);
  for (int64_t k = 0; k < block.depth; ++k) {
    total += std::trunc(static_cast<double>(block.a[k]) * block.b[k * kColumns + j] * scale);
  }
  const double exact = std::ldexp(total, top - rule.digits);
  const float nearest = static_cast<float>(exact);
  const bool is_beyond = std::abs(nearest) > std::abs(exact) && std::isfinite(nearest);
  const uint32_t kept = ~uint32_t{0} << (23 - rule.cut);
  return Bits<float>((Bits<uint32_t>(nearest) - is_beyond) & kept) + 0.0f;
}

JAX_FA_CLONES void MultiplyRows(const DotFactors& a, const DotFactors& b, int64_t depth,
                                const DotAddend& addend, const DotRule& rule, const Rows& a_rows,
                                const Rows& b_rows, float* sum) {
  for (int64_t column = 0; column < b.rows; column += kColumns) {
    const int64_t columns = std::min<int64_t>(kColumns, b.rows - column);
    for (int64_t row = 0; row < a.rows; ++row) {
      const Block block{a_rows.values.data() + row * depth, a_rows.exponents.data() + row * depth,
                        b_rows.values.data() + column * depth,
                        b_rows.exponents.data() + column * depth, depth};
      float own[kColumns] = {};
      if (addend.values != nullptr) {
        std::memcpy(own, addend.values + row * addend.stride + column, columns * sizeof(float));
      }
      float result[kColumns];
      int16_t top[kColumns];
      if (FindTop(block, own, top)) {
        Near(block, own, rule, top, result);
      } else {
        for (int j = 0; j < columns; ++j) result[j] = Far(block, j, own[j], rule, top[j]);
      }
      std::memcpy(sum + row * b.rows + column, result, columns * sizeof(float));
    }
  }
}

// A 16-bit factor; float32 holds it exactly. Without subnormal float32, which callers' threads may
// take for zero.
float FactorOf(uint32_t bits, bool is_bfloat16) {
  if (is_bfloat16) return Bits<float>(bits << 16);
  const uint32_t magnitude = bits & 0x7FFF, sign = (bits & 0x8000) << 16;
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  const uint32_t rebiased = (magnitude << 13) + ((127 - 15) << 23);
  const uint32_t special = magnitude >= 0x7C00 ? 0x7F800000 : 0;
  return Bits<float>((magnitude < 0x400 ? Bits<uint32_t>(subnormal) : rebiased | special) | sign);
}

// Puts a register's factors where they lie in [depth, rows], which has the first of them at `to`.
void PlaceFactors(const uint32_t* lanes, bool is_bfloat16, int64_t rows, float* to) {
  for (int lane = 0; lane < kFragmentLanes; ++lane) {
    float* factors = to + lane % 4 * 2 * rows + lane / 4;
    factors[0] = FactorOf(lanes[lane] & 0xFFFF, is_bfloat16);
    factors[rows] = FactorOf(lanes[lane] >> 16, is_bfloat16);
  }
}

}  // namespace

void MultiplyAdd(const DotFactors& a, const DotFactors& b, int64_t depth, const DotAddend& addend,
                 const DotRule& rule, float* sum) {
  MultiplyRows(a, b, depth, addend, rule, ByRow(a, depth), ByBlock(b, depth), sum);
}

// The transpose, b a^T: its rows of 16 elements are what is computed at a time.
void MultiplyFragments(const WarpOperands& operands, const DotRule& rule, float* result) {
  constexpr int kDepth = 16, kRows = 16, kColumns = 8;
  float a[kDepth * kRows], b[kDepth * kColumns], addend[kColumns * kRows], sum[kColumns * kRows];
  for (int i = 0; i < 4; ++i) {
    PlaceFactors(operands.a[i], operands.is_bfloat16, kRows, a + i / 2 * 8 * kRows + i % 2 * 8);
  }
  for (int i = 0; i < 2; ++i) {
    PlaceFactors(operands.b[i], operands.is_bfloat16, kColumns, b + i * 8 * kColumns);
  }
  const auto place = [](int i, int lane) {
    return (lane % 4 * 2 + i % 2) * kRows + i / 2 * 8 + lane / 4;
  };
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kFragmentLanes; ++lane) {
      addend[place(i, lane)] = operands.addend[i][lane];
    }
  }
  const int least = operands.is_bfloat16 ? -126 : -14;
  MultiplyAdd({b, kColumns, kColumns, least}, {a, kRows, kRows, least}, kDepth, {addend, kRows},
              rule, sum);
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kFragmentLanes; ++lane) {
      result[i * kFragmentLanes + lane] = sum[place(i, lane)];
    }
  }
}

}  // namespace jax_fa
