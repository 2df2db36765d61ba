// Arrays of any element type for the tests of the CPU kernels, converted one number at a time.
#ifndef JAX_FA_ATTENTION_CPU_TENSOR_H_
#define JAX_FA_ATTENTION_CPU_TENSOR_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "schema.h"

namespace jax_fa {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

float HalfToFloat(uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const int mantissa = h & 1023;
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? kNan : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

// To the nearest half, ties to even; std::nearbyint does the rounding.
uint16_t FloatToHalf(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7e00;
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent, -13);  // unit in the last place: 2^(exponent - 11)
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));
  return sign | static_cast<uint16_t>(units + ((exponent + 13) << 10));
}

// An array of the tested element type: floats here, stored bytes for the kernels.
struct Tensor {
  DType dtype = DType::kF32;
  std::vector<char> bytes;

  Tensor(DType dtype_in, int64_t count, float fill = kNan) : dtype(dtype_in) {
    bytes.resize(count * (dtype == DType::kF32 ? 4 : 2));
    for (int64_t i = 0; i < count; ++i) Set(i, fill);
  }
  int64_t size() const { return bytes.size() / (dtype == DType::kF32 ? 4 : 2); }
  void Set(int64_t i, float x) {
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[4 * i], &x, 4);
      return;
    }
    const uint32_t bits = Bits(x);
    const uint16_t bf16 = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
    const uint16_t half = dtype == DType::kBF16 ? bf16 : FloatToHalf(x);
    std::memcpy(&bytes[2 * i], &half, 2);
  }
  float operator[](int64_t i) const {
    if (dtype == DType::kF32) {
      float x;
      std::memcpy(&x, &bytes[4 * i], 4);
      return x;
    }
    uint16_t half;
    std::memcpy(&half, &bytes[2 * i], 2);
    return dtype == DType::kBF16 ? FromBits(uint32_t{half} << 16) : HalfToFloat(half);
  }
};

std::vector<double> Doubles(const Tensor& tensor) {
  std::vector<double> values(tensor.size());
  for (int64_t i = 0; i < tensor.size(); ++i) values[i] = tensor[i];
  return values;
}

}  // namespace
}  // namespace jax_fa

#endif  // JAX_FA_ATTENTION_CPU_TENSOR_H_
