// Vectors, elementary functions, element types and the matrix product of the CPU kernels.
//
// Written once with the vector extensions of GCC and Clang; the width follows the compiler flags.
// Everything has internal linkage (see the HAZARD in attention_cpu_kernels.h).
#ifndef JAX_FA_ATTENTION_CPU_SIMD_H_
#define JAX_FA_ATTENTION_CPU_SIMD_H_

#include <cstdint>

#include "schema.h"

namespace jax_fa {
namespace {

// kProductRows x 2 accumulators, 2 operands and a broadcast fill the registers of each machine.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kProductRows = 12;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kProductRows = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kProductRows = 12;
#else
constexpr int kLanes = 4;
constexpr int kProductRows = 6;
#endif

// A panel is a matrix [rows, kPanel] in scratch: two vectors wide, contiguous.
constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;

typedef float Vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t Vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Vh __attribute__((vector_size(2 * kLanes)));

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr double kLog2eInDouble = 1.44269504088896341;
constexpr double kLn2InDouble = 0.693147180559945309;

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Vf Load(const float* from) {
  Vf x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
inline Vi Load(const int32_t* from) {
  Vi x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
inline void Store(float* to, Vf x) { __builtin_memcpy(to, &x, sizeof(x)); }
inline Vf Splat(float x) { return x - Vf{}; }
inline Vi Splat(int32_t x) { return x - Vi{}; }

// A NaN in b is passed over.
inline Vf Max(Vf a, Vf b) { return b > a ? b : a; }

// 2^x to about 1 ulp. Below 2^-126 it is 0, exactly; NaN stays NaN.
inline Vf Exp2(Vf x) {
  x = x < -127.0f ? Splat(-127.0f) : x;
  x = x > 128.0f ? Splat(128.0f) : x;
  // Adding 1.5 * 2^23 leaves round(x) in the low bits of the mantissa.
  const Vf rounded = x + 12582912.0f;
  const Vf f = x - (rounded - 12582912.0f);
  // Minimax polynomial of 2^f for |f| <= 1/2, relative error 2e-9 before rounding.
  Vf y = Splat(1.5353362e-4f);
  y = y * f + 1.3398875e-3f;
  y = y * f + 9.61843692e-3f;
  y = y * f + 5.55033237e-2f;
  y = y * f + 2.40226477e-1f;
  y = y * f + 6.93147182e-1f;
  y = y * f + 1.0f;
  const Vu power = ((Vu)rounded << 23) + (127u << 23);
  return y * (Vf)power;
}

// tanh to about 2 ulp.
inline Vf Tanh(Vf x) {
  const Vf magnitude = (Vf)((Vu)x & 0x7fffffffu);
  // Minimax polynomial for |x| <= 0.625, where 1 - 2 / (e^2x + 1) would cancel.
  const Vf x2 = x * x;
  Vf y = Splat(-5.70498733e-3f);
  y = y * x2 + 2.0639088e-2f;
  y = y * x2 - 5.37397154e-2f;
  y = y * x2 + 1.33314416e-1f;
  y = y * x2 - 3.33332807e-1f;
  const Vf small = y * x2 * x + x;
  const Vf large = 1.0f - 2.0f / (Exp2(magnitude * (2.0f * kLog2e)) + 1.0f);
  const Vf signed_large = (Vf)((Vu)large | ((Vu)x & 0x80000000u));
  return magnitude < 0.625f ? small : signed_large;
}

// ---- Element types ------------------------------------------------------------------------------

inline int64_t BytesOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

inline Vf Bf16ToFloat(Vu h) { return (Vf)(h << 16); }

inline Vu FloatToBf16(Vf x) {
  const Vu bits = (Vu)x;
  const Vu nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? nearest_even : (bits >> 16) | 0x40u;
}

// Neither direction computes with float32 denormals, which the caller's thread may flush to zero.
inline Vf HalfToFloat(Vu h) {
  const Vu magnitude = (h & 0x7fffu) << 13;
  const Vu exponent = magnitude & (0x7c00u << 13);
  const Vu normal = magnitude + (112u << 23);
  const Vu special = normal + (112u << 23);
  const Vf smallest_normal = (Vf)(Vu{} + (113u << 23));
  const Vu denormal = (Vu)((Vf)(magnitude + (113u << 23)) - smallest_normal);
  Vu bits = exponent == 0u ? denormal : normal;
  bits = exponent == (0x7c00u << 13) ? special : bits;
  return (Vf)(bits | (h & 0x8000u) << 16);
}

inline Vu FloatToHalf(Vf x) {
  const Vu magnitude = (Vu)x & 0x7fffffffu;
  const Vu normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // The last bit of 0.5 is worth the smallest half denormal: the addition rounds.
  const Vu denormal = (Vu)((Vf)magnitude + 0.5f) - (126u << 23);
  Vu bits = magnitude < (113u << 23) ? denormal : normal;
  bits = magnitude >= (143u << 23) ? Vu{} + 0x7c00u : bits;
  bits = x == x ? bits : Vu{} + 0x7e00u;
  return bits | ((Vu)x & 0x80000000u) >> 16;
}

inline Vf Widen(Vh raw, DType dtype) {
  const Vu wide = __builtin_convertvector(raw, Vu);
  return dtype == DType::kBF16 ? Bf16ToFloat(wide) : HalfToFloat(wide);
}

inline Vh Narrow(Vf x, DType dtype) {
  const Vu wide = dtype == DType::kBF16 ? FloatToBf16(x) : FloatToHalf(x);
  return __builtin_convertvector(wide, Vh);
}

// Row `row` of a matrix [rows, width] of any element type, as float32.
inline void LoadRow(const void* matrix, DType dtype, int64_t row, int64_t width, float* to) {
  const char* from = static_cast<const char*>(matrix) + row * width * BytesOf(dtype);
  if (dtype == DType::kF32) {
    __builtin_memcpy(to, from, width * sizeof(float));
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Vh raw;
    __builtin_memcpy(&raw, from + 2 * i, sizeof(raw));
    Store(to + i, Widen(raw, dtype));
  }
  if (i < width) {
    Vh raw = {};
    __builtin_memcpy(&raw, from + 2 * i, 2 * (width - i));
    const Vf tail = Widen(raw, dtype);
    __builtin_memcpy(to + i, &tail, sizeof(float) * (width - i));
  }
}

inline void StoreRow(const float* from, DType dtype, int64_t row, int64_t width, void* matrix) {
  char* to = static_cast<char*>(matrix) + row * width * BytesOf(dtype);
  if (dtype == DType::kF32) {
    __builtin_memcpy(to, from, width * sizeof(float));
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vh raw = Narrow(Load(from + i), dtype);
    __builtin_memcpy(to + 2 * i, &raw, sizeof(raw));
  }
  if (i < width) {
    Vf tail = {};
    __builtin_memcpy(&tail, from + i, sizeof(float) * (width - i));
    const Vh raw = Narrow(tail, dtype);
    __builtin_memcpy(to + 2 * i, &raw, 2 * (width - i));
  }
}

inline float SumOfLanes(Vf x) {
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
  return sum;
}

inline float Dot(const float* a, const float* b, int64_t count) {
  Vf sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += Load(a + i) * Load(b + i);
  float sum = SumOfLanes(sums);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

inline bool AllFinite(const float* x, int64_t count) {
  Vf poison = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) poison += Load(x + i) * 0.0f;
  float sum = SumOfLanes(poison);
  for (; i < count; ++i) sum += x[i] * 0.0f;
  return sum == 0.0f;
}

// ---- Product ------------------------------------------------------------------------------------

// How a product reads its left operand: A(m, k) is a[m * stride + k], or a[k * stride + m].
enum class Left { kByRows, kByColumns };

struct Matrix {
  const float* data;
  int64_t stride;
};

// C [kRows, kPanel] = A [kRows, depth] B [depth, kPanel] + C * rescale (null: + 0), for the first
// kVectors vectors of every row of B and C.
template <Left kLeft, int kVectors, int kRows>
inline void ProductTile(Matrix a, int64_t depth, const float* b, const float* rescale, float* c) {
  Vf sum[kRows][kVectors] = {};
  if (rescale) {
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kVectors; ++v) {
        sum[m][v] = Load(c + m * kPanel + v * kLanes) * Load(rescale + v * kLanes);
      }
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    for (int m = 0; m < kRows; ++m) {
      const float x = kLeft == Left::kByRows ? a.data[m * a.stride + k] : a.data[k * a.stride + m];
      for (int v = 0; v < kVectors; ++v) sum[m][v] += x * Load(b + k * kPanel + v * kLanes);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kVectors; ++v) Store(c + m * kPanel + v * kLanes, sum[m][v]);
  }
}

// The last rows of a product, kRows or fewer.
template <Left kLeft, int kVectors, int kRows>
inline void ProductTail(int64_t rows, Matrix a, int64_t depth, const float* b, const float* rescale,
                        float* c) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return ProductTile<kLeft, kVectors, kRows>(a, depth, b, rescale, c);
    ProductTail<kLeft, kVectors, kRows - 1>(rows, a, depth, b, rescale, c);
  }
}

template <Left kLeft, int kVectors>
inline void ProductOfVectors(int64_t rows, Matrix a, int64_t depth, const float* b,
                             const float* rescale, float* c) {
  const int64_t step = kLeft == Left::kByRows ? a.stride : 1;
  for (; rows > 0; rows -= kProductRows) {
    if (rows >= kProductRows) {
      ProductTile<kLeft, kVectors, kProductRows>(a, depth, b, rescale, c);
    } else {
      ProductTail<kLeft, kVectors, kProductRows - 1>(rows, a, depth, b, rescale, c);
    }
    a.data += kProductRows * step;
    c += kProductRows * kPanel;
  }
}

// C [rows, kPanel] = A [rows, depth] B [depth, kPanel] + C * rescale [kPanel] (null: + 0).
// Lanes at or beyond `lanes` need not be computed.
template <Left kLeft>
inline void Product(int64_t rows, Matrix a, int64_t depth, int64_t lanes, const float* b,
                    const float* rescale, float* c) {
  // Half a panel in use saves half the time: decoding has one row per head.
  if (lanes <= kLanes) {
    ProductOfVectors<kLeft, 1>(rows, a, depth, b, rescale, c);
  } else {
    ProductOfVectors<kLeft, kPanelVectors>(rows, a, depth, b, rescale, c);
  }
}

}  // namespace
}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_CPU_SIMD_H_
