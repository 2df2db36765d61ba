// Checks sums whose bits follow from the rule by hand; tests/emulator/test_dot.py compares many
// more with numpy's.
#include "emulator_dot.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace jax_fa {
namespace {

constexpr int64_t kDepth = 16;
constexpr int kBFloat16 = -126;  // its least exponent
constexpr DotRule kRule{25, 23};

int failed = 0;

void Check(float got, uint32_t bits, const char* what) {
  uint32_t found;
  std::memcpy(&found, &got, sizeof(found));
  if (found == bits) return;
  ++failed;
  std::printf("FAILED %s: %08x instead of %08x\n", what, found, bits);
}

// addend + the sum of first[k] * second[k], as the last element of a matrix of 3 x 19.
float Sum(std::vector<float> first, std::vector<float> second, float addend, DotRule rule = kRule) {
  constexpr int64_t kRows = 3, kColumns = 19;
  std::vector<float> a(kDepth * kRows, 1.0f), b(kDepth * kColumns, 1.0f), c(kRows * kColumns, 1.0f);
  for (int64_t k = 0; k < kDepth; ++k) {
    const bool is_given = k < static_cast<int64_t>(first.size());
    a[k * kRows + kRows - 1] = is_given ? first[k] : 0.0f;
    b[k * kColumns + kColumns - 1] = is_given ? second[k] : 0.0f;
  }
  c.back() = addend;
  std::vector<float> sum(kRows * kColumns);
  MultiplyAdd({a.data(), kRows, kRows, kBFloat16}, {b.data(), kColumns, kColumns, kBFloat16},
              kDepth, {c.data(), kColumns}, rule, sum.data());
  Check(sum.front(), 0x41880000, "17 in another element");
  return sum.back();
}

void TestSums() {
  const float inf = INFINITY;
  Check(Sum({}, {}, 0.0f), 0, "nothing");
  Check(Sum({}, {}, -0.0f), 0, "no negative zero");
  Check(Sum({1.5f, 2.0f}, {2.0f, -3.0f}, 0.5f), 0xC0200000, "3 - 6 + 0.5");
  Check(Sum({1.0f, 0x1p-13f}, {1.0f, 0x1p-12f}, 0.0f), 0x3F800000, "2^-25 is cut off the result");
  Check(Sum({0x1p13f, 1.0f}, {0x1p13f, 1.0f}, -0x1p26f), 0, "2^-26 of the largest is cut off");
  Check(Sum({0x1p13f, 1.0f}, {0x1p12f, 1.0f}, -0x1p25f), 0x3F800000, "2^-25 of it is not");
  Check(Sum({-1.0f, -0x1p-13f}, {1.0f, 0x1p-12f}, 0.0f), 0xBF800000, "towards zero");
  Check(Sum({1.0f, 0x1p-13f}, {1.0f, 1.0f}, 0.0f, {13, 13}), 0x3F800400, "digits of 8-bit types");
  Check(Sum({0x1p100f}, {0x1p100f}, 0.0f), 0x7F800000, "overflow");
  Check(Sum({0x1p-70f}, {0x1p-70f}, 0.0f), 0x00000200, "a subnormal result");
  Check(Sum({inf}, {1.0f}, 1.0f), 0x7F800000, "an infinite factor");
  Check(Sum({-inf}, {0.0f}, 1.0f), 0x7FFFFFFF, "infinity times zero");
  Check(Sum({1.0f}, {1.0f}, -inf), 0xFF800000, "an infinite addend");
  Check(Sum({std::nanf("")}, {0.0f}, 1.0f), 0x7FFFFFFF, "a NaN");
}

}  // namespace
}  // namespace jax_fa

int main() {
  jax_fa::TestSums();
  std::printf("%s\n", jax_fa::failed == 0 ? "all passed" : "some failed");
  return jax_fa::failed != 0;
}
