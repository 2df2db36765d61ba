// For the fuzzers: seeded hostile values, and arrays on the heap of exactly their size, so that a
// sanitizer sees every access beyond one.
#ifndef JAX_FA_FUZZ_H_
#define JAX_FA_FUZZ_H_

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

#include "schema.h"

namespace jax_fa {

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : engine_(seed) {}

  int64_t Int(int64_t lo, int64_t hi) {
    return lo + static_cast<int64_t>(engine_() % static_cast<uint64_t>(hi - lo + 1));
  }
  bool Maybe(int percent) { return Int(0, 99) < percent; }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Int(0, values.size() - 1)];
  }

  // Lengths, borders, offsets and ids that fit, and others at all ends of the type.
  int32_t HostileInt(int64_t largest_that_fits) {
    if (Maybe(60)) return static_cast<int32_t>(Int(-3, largest_that_fits + 3));
    return OneOf<int32_t>({INT32_MIN, INT32_MIN + 1, -kUnbounded - 1, -kUnbounded, -1000, -1, 0, 1,
                           1000, kUnbounded - 1, kUnbounded, kUnbounded + 1, INT32_MAX - 1,
                           INT32_MAX});
  }
  float HostileFloat() {
    return OneOf<float>({0.0f, -0.0f, 1.0f, -1.0f, 1e-45f, 1e-38f, 65504.0f, 3e38f, -3e38f,
                         INFINITY, -INFINITY, NAN});
  }
  float SmallFloat() { return static_cast<float>(Int(-1000, 1000)) / 500; }

 private:
  std::mt19937_64 engine_;
};

// Arrays that live as long as this does.
class Heap {
 public:
  template <typename T = char>
  T* Array(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    arrays_.emplace_back(std::malloc(bytes > 0 ? bytes : 1), &std::free);
    return static_cast<T*>(arrays_.back().get());
  }
  template <typename T>
  T* Copy(const std::vector<T>& values) {
    T* array = Array<T>(values.size());
    if (!values.empty()) std::memcpy(array, values.data(), values.size() * sizeof(T));
    return array;
  }
  void* Filled(int64_t bytes, unsigned char byte) {
    char* array = Array(bytes);
    std::memset(array, byte, bytes > 0 ? bytes : 1);
    return array;
  }
  // Elements of any type: small numbers, with hostile ones between them if asked for.
  void* Data(Fuzz& fuzz, DType dtype, int64_t count, bool is_hostile) {
    if (dtype == DType::kF32) {
      float* array = Array<float>(count);
      for (int64_t i = 0; i < count; ++i) {
        array[i] = is_hostile && fuzz.Maybe(15) ? fuzz.HostileFloat() : fuzz.SmallFloat();
      }
      return array;
    }
    const uint16_t sign = 0x8000, near_one = dtype == DType::kBF16 ? 0x3f00 : 0x3800;
    uint16_t* array = Array<uint16_t>(count);
    for (int64_t i = 0; i < count; ++i) {
      const bool any_bits = is_hostile && fuzz.Maybe(15);
      array[i] = any_bits ? fuzz.Int(0, 0xffff)
                          : (near_one + fuzz.Int(0, 0x7f)) | (fuzz.Maybe(50) ? sign : 0);
    }
    return array;
  }

 private:
  std::vector<std::unique_ptr<void, void (*)(void*)>> arrays_;
};

// Results of two runs, of which the first found `kPoison[0]` in every byte and the second
// `kPoison[1]`: what a kernel leaves out differs.
inline constexpr unsigned char kPoison[2] = {0xa5, 0x5a};

inline bool AreEqual(const void* a, const void* b, int64_t bytes) {
  return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

}  // namespace jax_fa

#endif  // JAX_FA_FUZZ_H_
