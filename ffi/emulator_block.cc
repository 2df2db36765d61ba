#include "emulator_block.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "emulator_dot.h"

namespace jax_fa {

Interpolation ex2_table, lg2_table, rcp_table;

namespace {

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kNanBits = 0x7FFFFFFF;

template <typename To, typename From>
To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- Functions of one lane ----------------------------------------------------------------------

// Of NaN operands the first one is the result, as in numpy; compilers may exchange them.
float FirstNan(float result, float a, float b) {
  constexpr uint32_t kQuiet = 0x00400000;
  result = b != b ? Bits<float>(Bits<uint32_t>(b) | kQuiet) : result;
  return a != a ? Bits<float>(Bits<uint32_t>(a) | kQuiet) : result;
}

struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
  float operator()(float a, float b) const { return FirstNan(a + b, a, b); }
};
struct Subtract {
  template <typename T>
  T operator()(T a, T b) const {
    return a - b;
  }
  float operator()(float a, float b) const { return FirstNan(a - b, a, b); }
};
struct Multiply {
  template <typename T>
  T operator()(T a, T b) const {
    return a * b;
  }
  float operator()(float a, float b) const { return FirstNan(a * b, a, b); }
};
struct MultiplyAdd {
  template <typename T>
  T operator()(T a, T b, T c) const {
    return a * b + c;
  }
};
// Integers: of one kind to a wider one.
template <typename Wide>
struct MultiplyWide {
  template <typename T>
  Wide operator()(T a, T b) const {
    return static_cast<Wide>(a) * static_cast<Wide>(b);
  }
  template <typename T>
  Wide operator()(T a, T b, Wide c) const {
    return static_cast<Wide>(a) * static_cast<Wide>(b) + c;
  }
};
struct And {
  template <typename T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <typename T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Invert {
  template <typename T>
  T operator()(T a) const {
    return ~a;
  }
};
struct Not {
  uint8_t operator()(uint8_t a) const { return a ^ 1; }
};
struct NegateInteger {
  template <typename T>
  T operator()(T a) const {
    return T{0} - a;
  }
};
struct Minimum {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Maximum {
  template <typename T>
  T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct MinimumRelu {
  int32_t operator()(int32_t a, int32_t b) const { return std::max(std::min(a, b), 0); }
};
struct MaximumRelu {
  int32_t operator()(int32_t a, int32_t b) const { return std::max(std::max(a, b), 0); }
};
struct Divide {
  int32_t operator()(int32_t a, int32_t b) const {
    return b == 0 ? -1 : static_cast<int32_t>(int64_t{a} / b);
  }
  uint32_t operator()(uint32_t a, uint32_t b) const { return b == 0 ? ~uint32_t{0} : a / b; }
};
struct Remainder {
  int32_t operator()(int32_t a, int32_t b) const {
    return b == 0 ? a : static_cast<int32_t>(int64_t{a} % b);
  }
  uint32_t operator()(uint32_t a, uint32_t b) const { return b == 0 ? a : a % b; }
};
struct ShiftLeft {
  template <typename T>
  T operator()(T a, uint32_t amount) const {
    constexpr uint32_t width = 8 * sizeof(T);
    return amount < width ? a << (amount & (width - 1)) : T{0};
  }
};
struct ShiftRight {
  template <typename T>
  T operator()(T a, uint32_t amount) const {
    constexpr uint32_t width = 8 * sizeof(T);
    const T beyond = std::is_signed_v<T> ? static_cast<T>(a >> (width - 1)) : T{0};
    return amount < width ? static_cast<T>(a >> (amount & (width - 1))) : beyond;
  }
};
struct Select {
  template <typename T>
  T operator()(T a, T b, uint8_t takes_a) const {
    return takes_a ? a : b;
  }
};
struct Equal {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a == b;
  }
};
struct Less {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a < b;
  }
};
struct LessEqual {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a <= b;
  }
};
struct Greater {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a > b;
  }
};
struct GreaterEqual {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a >= b;
  }
};
struct NotEqual {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a != b;
  }
};
// Neither is a NaN.
struct OrderedNotEqual {
  uint8_t operator()(float a, float b) const { return a < b || a > b; }
};
template <typename To>
struct Convert {
  template <typename T>
  To operator()(T a) const {
    return static_cast<To>(a);
  }
};

// Signs are bits: the sign of a NaN changes too.
struct Negate {
  float operator()(float a) const { return Bits<float>(Bits<uint32_t>(a) ^ kSign); }
};
struct Absolute {
  float operator()(float a) const { return Bits<float>(Bits<uint32_t>(a) & ~kSign); }
};
// The product is exact.
struct Fma {
  float operator()(float a, float b, float c) const {
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const float sum = FirstNan(static_cast<float>(product + static_cast<double>(c)), c, c);
    return FirstNan(product != product ? static_cast<float>(product) : sum, a, b);
  }
};
struct Fms {
  float operator()(float a, float b, float c) const { return Fma{}(a, b, Negate{}(c)); }
};
struct Fnma {
  float operator()(float a, float b, float c) const { return Fma{}(Negate{}(a), b, c); }
};
// A NaN gives way to a number; of zeros with different signs the second is taken.
struct MaximumNumber {
  float operator()(float a, float b) const { return b != b ? a : a > b ? a : b; }
  float operator()(float a, float b, float c) const { return (*this)((*this)(a, b), c); }
};
struct MinimumNumber {
  float operator()(float a, float b) const { return b != b ? a : a < b ? a : b; }
  float operator()(float a, float b, float c) const { return (*this)((*this)(a, b), c); }
};
struct AddDown {
  float operator()(float a, float b) const {
    const double exact = static_cast<double>(a) + static_cast<double>(b);
    const float nearest = FirstNan(static_cast<float>(exact), a, b);
    return nearest > exact ? std::nextafter(nearest, -std::numeric_limits<float>::infinity())
                           : nearest;
  }
};

uint32_t BFloat16(float a) {
  const uint32_t bits = Bits<uint32_t>(a);
  return a != a ? 0x7FFF : (bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16;
}
struct ToBFloat16 {
  uint16_t operator()(float a) const { return static_cast<uint16_t>(BFloat16(a)); }
};
struct ToBFloat16Pair {
  uint32_t operator()(float high, float low) const { return BFloat16(high) << 16 | BFloat16(low); }
};
struct FromBFloat16 {
  float operator()(uint16_t a) const { return Bits<float>(uint32_t{a} << 16); }
};

// float32 -> float16 bits, to nearest even; a NaN keeps the leading bits of its payload.
uint32_t Half(float a) {
  const uint32_t bits = Bits<uint32_t>(a), sign = bits >> 16 & 0x8000, size = bits & ~kSign;
  if (size > 0x7F800000) {
    const uint32_t payload = size >> 13 & 0x3FF;
    return sign | 0x7C00 | (payload == 0 ? 1 : payload);
  }
  if (size >= 0x47800000) return sign | 0x7C00;
  if (size < 0x38800000) {
    // In units of the least subnormal float16: adding 2 ** 23 of them rounds to a whole number.
    const float unit = Bits<float>(size) + 0.5f;
    return sign | (Bits<uint32_t>(unit) - 0x3F000000);
  }
  return sign | ((size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}
struct ToHalfPair {
  uint32_t operator()(float high, float low) const { return Half(high) << 16 | Half(low); }
};
struct FromHalf {
  float operator()(uint16_t a) const {
    const uint32_t sign = uint32_t{a & 0x8000u} << 16, size = a & 0x7FFF;
    const float subnormal = static_cast<float>(size) * 0x1p-24f;
    const uint32_t usual = (size << 13) + 0x38000000, special = (size << 13) + 0x70000000;
    const uint32_t bits = size < 0x400    ? Bits<uint32_t>(subnormal)
                          : size < 0x7C00 ? usual
                                          : special;
    return Bits<float>(sign | bits);
  }
};

// Special functions, as in mufu.py.
constexpr int32_t kFraction = (1 << 23) - 1;

struct Exp2 {
  float operator()(float x) const {
    if (x != x) return Bits<float>(kNanBits);
    const int32_t cut = static_cast<int32_t>(std::min(std::max(x, -200.0f), 200.0f) * 0x1p23f);
    const int32_t fixed = cut - (cut < 0 && (cut & kFraction) != 0);
    if (fixed >= 128 << 23) return std::numeric_limits<float>::infinity();
    if (fixed < -126 * (1 << 23)) return 0.0f;
    const int32_t fraction = fixed & kFraction;
    const int64_t value = ex2_table(fraction) >> ex2_table.bits;
    return Bits<float>(static_cast<int32_t>(fixed - fraction + (127 << 23) + value));
  }
};
struct Log2 {
  float operator()(float x) const {
    const float tiny = std::numeric_limits<float>::min();
    const float infinity = std::numeric_limits<float>::infinity();
    if (x <= -tiny || x != x) return Bits<float>(kNanBits);
    if (x == infinity) return x;
    if (std::abs(x) < tiny) return -infinity;
    if (x == 1) return 0.0f;
    const int64_t bits = Bits<uint32_t>(x);
    int64_t value = lg2_table(bits & kFraction) >> (lg2_table.bits - 13);
    value += ((bits >> 23) - 127) * (int64_t{1} << 36);
    const double size = static_cast<double>(value < 0 ? ~value : value);
    const double cut = Bits<double>(Bits<uint64_t>(size) & ~uint64_t{0} << 29);
    return static_cast<float>(std::copysign(cut * 0x1p-36, static_cast<double>(value)));
  }
};
struct Reciprocal {
  float operator()(float x) const {
    if (x != x) return Bits<float>(kNanBits);
    const int64_t bits = Bits<uint32_t>(x), exponent = bits >> 23 & 0xFF;
    const int64_t fraction = bits & kFraction;
    const int64_t mantissa = fraction == 0 ? 1 << 24 : rcp_table(fraction) >> rcp_table.bits;
    int64_t size = ((252 - exponent) * (1 << 23)) + mantissa;
    if (size < 1 << 23) size = 0;
    if (exponent == 0) size = int64_t{0xFF} << 23;
    if (exponent == 0xFF) size = 0;
    return Bits<float>(static_cast<uint32_t>(size | (bits & kSign)));
  }
};

struct Join {
  uint64_t operator()(uint32_t low, uint32_t high) const { return uint64_t{high} << 32 | low; }
  uint32_t operator()(uint16_t low, uint16_t high) const { return uint32_t{high} << 16 | low; }
};
struct High {
  uint32_t operator()(uint64_t a) const { return static_cast<uint32_t>(a >> 32); }
  uint16_t operator()(uint32_t a) const { return static_cast<uint16_t>(a >> 16); }
};

// ---- All lanes ----------------------------------------------------------------------------------

template <typename T>
using Values = std::array<T, kWarpLanes>;

template <typename T>
Values<T> Load(const char* from) {
  Values<T> values;
  std::memcpy(values.data(), from, sizeof(values));
  return values;
}

template <typename Function, typename Result, typename... Operands, std::size_t... I>
inline void Apply(const BlockStep& step, char* scratch, std::index_sequence<I...>) {
  const std::tuple<Values<Operands>...> in{Load<Operands>(scratch + step.from[I])...};
  Values<Result> out;
  for (int lane = 0; lane < kWarpLanes; ++lane) out[lane] = Function{}(std::get<I>(in)[lane]...);
  std::memcpy(scratch + step.to, out.data(), sizeof(out));
}

template <typename Function, typename Result, typename... Operands>
void Lanes(const BlockStep& step, char* scratch) {
  Apply<Function, Result, Operands...>(step, scratch, std::index_sequence_for<Operands...>());
}

// ---- Between lanes ------------------------------------------------------------------------------

// The lane that shfl takes, as the PTX ISA defines it; `lane` itself, and false, beyond its
// segment.
enum class Shuffle { kUp, kDown, kButterfly, kIndex };

template <Shuffle mode>
std::pair<int, bool> SourceOf(int lane, uint32_t shift, uint32_t limit) {
  const int segment = limit >> 8 & 31, clamp = limit & 31, b = shift & 31;
  const int low = lane & segment, high = low | (clamp & ~segment & 31);
  int source = low | (b & ~segment & 31);
  if (mode == Shuffle::kUp) source = lane - b;
  if (mode == Shuffle::kDown) source = lane + b;
  if (mode == Shuffle::kButterfly) source = lane ^ b;
  const bool is_inside = mode == Shuffle::kUp ? source >= high : source <= high;
  return {is_inside ? source : lane, is_inside};
}

template <Shuffle mode>
void Shuffled(const BlockStep& step, char* scratch) {
  const auto values = Load<uint32_t>(scratch + step.from[0]);
  const auto shift = Load<uint32_t>(scratch + step.from[1]);
  const auto limit = Load<uint32_t>(scratch + step.from[2]);
  Values<uint32_t> out;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    out[lane] = values[SourceOf<mode>(lane, shift[lane], limit[lane]).first];
  }
  std::memcpy(scratch + step.to, out.data(), sizeof(out));
}

template <Shuffle mode>
void IsInside(const BlockStep& step, char* scratch) {
  const auto shift = Load<uint32_t>(scratch + step.from[0]);
  const auto limit = Load<uint32_t>(scratch + step.from[1]);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    scratch[step.to + lane] = SourceOf<mode>(lane, shift[lane], limit[lane]).second;
  }
}

// mma.sync.m16n8k16 with a float32 result: four registers of A, two of B, four of the addend.
template <bool is_bfloat16>
void Multiplied(const BlockStep& step, char* scratch) {
  WarpOperands operands;
  operands.is_bfloat16 = is_bfloat16;
  const auto words = [&](int i) { return reinterpret_cast<uint32_t*>(scratch + step.from[i]); };
  for (int i = 0; i < 4; ++i) operands.a[i] = words(i);
  for (int i = 0; i < 2; ++i) operands.b[i] = words(4 + i);
  for (int i = 0; i < 4; ++i) {
    operands.addend[i] = reinterpret_cast<float*>(scratch + step.from[6 + i]);
  }
  MultiplyFragments(operands, kWarpRule, reinterpret_cast<float*>(scratch + step.to));
}

// ---- Loads from shared memory -------------------------------------------------------------------

// Consecutive items of every lane, whose address is a multiple of their size.
template <typename Item>
bool LoadItems(const BlockStep& step, char* scratch, const SharedView& shared) {
  const auto addresses = Load<uint32_t>(scratch + step.from[0]);
  const int count = step.from[1];
  Item items[4];
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const uint32_t offset = addresses[lane] + step.from[2] - shared.base;
    if (!shared.Load(offset, count * sizeof(Item), reinterpret_cast<char*>(items))) return false;
    for (int i = 0; i < count; ++i) {
      std::memcpy(scratch + step.to + (i * kWarpLanes + lane) * sizeof(Item), &items[i],
                  sizeof(Item));
    }
  }
  return true;
}

// ldmatrix: lane 8 j + r addresses row r of matrix j.
template <bool is_transposed>
bool LoadMatrices(const BlockStep& step, char* scratch, const SharedView& shared) {
  constexpr int kRows = 8, kRowBytes = 16;
  const auto addresses = Load<uint32_t>(scratch + step.from[0]);
  for (int matrix = 0; matrix < step.from[1]; ++matrix) {
    uint16_t rows[kRows][kRowBytes / 2];
    for (int row = 0; row < kRows; ++row) {
      const uint32_t offset = addresses[kRows * matrix + row] + step.from[2] - shared.base;
      if (!shared.Load(offset, kRowBytes, reinterpret_cast<char*>(rows[row]))) return false;
    }
    uint16_t columns[kRows][kRowBytes / 2];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kRows; ++j) columns[i][j] = rows[j][i];
    }
    std::memcpy(scratch + step.to + matrix * kRows * kRowBytes, is_transposed ? columns : rows,
                sizeof(rows));
  }
  return true;
}

struct Operation {
  const char* name;
  void (*run)(const BlockStep&, char*);
  bool (*load)(const BlockStep&, char*, const SharedView&) = nullptr;
};

using U1 = uint8_t;
using U2 = uint16_t;
using U4 = uint32_t;
using U8 = uint64_t;
using I1 = int8_t;
using I2 = int16_t;
using I4 = int32_t;
using I8 = int64_t;
using Flag = uint8_t;

constexpr Operation kOperations[] = {
    {"add.u4", Lanes<Add, U4, U4, U4>},
    {"add.u8", Lanes<Add, U8, U8, U8>},
    {"sub.u4", Lanes<Subtract, U4, U4, U4>},
    {"sub.u8", Lanes<Subtract, U8, U8, U8>},
    {"mul.u4", Lanes<Multiply, U4, U4, U4>},
    {"mul.u8", Lanes<Multiply, U8, U8, U8>},
    {"mad.u4", Lanes<MultiplyAdd, U4, U4, U4, U4>},
    {"mad.u8", Lanes<MultiplyAdd, U8, U8, U8, U8>},
    {"mulwide.u4", Lanes<MultiplyWide<U8>, U8, U4, U4>},
    {"mulwide.i4", Lanes<MultiplyWide<I8>, I8, I4, I4>},
    {"neg.u4", Lanes<NegateInteger, U4, U4>},
    {"and.u4", Lanes<And, U4, U4, U4>},
    {"and.u8", Lanes<And, U8, U8, U8>},
    {"or.u4", Lanes<Or, U4, U4, U4>},
    {"or.u8", Lanes<Or, U8, U8, U8>},
    {"xor.u4", Lanes<Xor, U4, U4, U4>},
    {"xor.u8", Lanes<Xor, U8, U8, U8>},
    {"not.u4", Lanes<Invert, U4, U4>},
    {"and.pred", Lanes<And, Flag, Flag, Flag>},
    {"or.pred", Lanes<Or, Flag, Flag, Flag>},
    {"xor.pred", Lanes<Xor, Flag, Flag, Flag>},
    {"not.pred", Lanes<Not, Flag, Flag>},
    {"min.u4", Lanes<Minimum, U4, U4, U4>},
    {"min.i4", Lanes<Minimum, I4, I4, I4>},
    {"max.u4", Lanes<Maximum, U4, U4, U4>},
    {"max.i4", Lanes<Maximum, I4, I4, I4>},
    {"minrelu.i4", Lanes<MinimumRelu, I4, I4, I4>},
    {"maxrelu.i4", Lanes<MaximumRelu, I4, I4, I4>},
    {"div.u4", Lanes<Divide, U4, U4, U4>},
    {"div.i4", Lanes<Divide, I4, I4, I4>},
    {"rem.u4", Lanes<Remainder, U4, U4, U4>},
    {"rem.i4", Lanes<Remainder, I4, I4, I4>},
    {"shl.u4", Lanes<ShiftLeft, U4, U4, U4>},
    {"shl.u8", Lanes<ShiftLeft, U8, U8, U4>},
    {"shr.u4", Lanes<ShiftRight, U4, U4, U4>},
    {"shr.u8", Lanes<ShiftRight, U8, U8, U4>},
    {"shr.i4", Lanes<ShiftRight, I4, I4, U4>},
    {"shr.i8", Lanes<ShiftRight, I8, I8, U4>},
    {"select.u4", Lanes<Select, U4, U4, U4, Flag>},
    {"select.u8", Lanes<Select, U8, U8, U8, Flag>},
    {"eq.u4", Lanes<Equal, Flag, U4, U4>},
    {"eq.u8", Lanes<Equal, Flag, U8, U8>},
    {"eq.f4", Lanes<Equal, Flag, float, float>},
    {"ne.u4", Lanes<NotEqual, Flag, U4, U4>},
    {"ne.u8", Lanes<NotEqual, Flag, U8, U8>},
    {"neu.f4", Lanes<NotEqual, Flag, float, float>},
    {"ne.f4", Lanes<OrderedNotEqual, Flag, float, float>},
    {"lt.u4", Lanes<Less, Flag, U4, U4>},
    {"lt.i4", Lanes<Less, Flag, I4, I4>},
    {"lt.u8", Lanes<Less, Flag, U8, U8>},
    {"lt.i8", Lanes<Less, Flag, I8, I8>},
    {"lt.f4", Lanes<Less, Flag, float, float>},
    {"le.u4", Lanes<LessEqual, Flag, U4, U4>},
    {"le.i4", Lanes<LessEqual, Flag, I4, I4>},
    {"le.u8", Lanes<LessEqual, Flag, U8, U8>},
    {"le.i8", Lanes<LessEqual, Flag, I8, I8>},
    {"le.f4", Lanes<LessEqual, Flag, float, float>},
    {"gt.u4", Lanes<Greater, Flag, U4, U4>},
    {"gt.i4", Lanes<Greater, Flag, I4, I4>},
    {"gt.u8", Lanes<Greater, Flag, U8, U8>},
    {"gt.i8", Lanes<Greater, Flag, I8, I8>},
    {"gt.f4", Lanes<Greater, Flag, float, float>},
    {"ge.u4", Lanes<GreaterEqual, Flag, U4, U4>},
    {"ge.i4", Lanes<GreaterEqual, Flag, I4, I4>},
    {"ge.u8", Lanes<GreaterEqual, Flag, U8, U8>},
    {"ge.i8", Lanes<GreaterEqual, Flag, I8, I8>},
    {"ge.f4", Lanes<GreaterEqual, Flag, float, float>},
    {"add.f4", Lanes<Add, float, float, float>},
    {"sub.f4", Lanes<Subtract, float, float, float>},
    {"mul.f4", Lanes<Multiply, float, float, float>},
    {"fma.f4", Lanes<Fma, float, float, float, float>},
    {"fms.f4", Lanes<Fms, float, float, float, float>},
    {"fnma.f4", Lanes<Fnma, float, float, float, float>},
    {"neg.f4", Lanes<Negate, float, float>},
    {"abs.f4", Lanes<Absolute, float, float>},
    {"max.f4", Lanes<MaximumNumber, float, float, float>},
    {"max3.f4", Lanes<MaximumNumber, float, float, float, float>},
    {"min.f4", Lanes<MinimumNumber, float, float, float>},
    {"min3.f4", Lanes<MinimumNumber, float, float, float, float>},
    {"adddown.f4", Lanes<AddDown, float, float, float>},
    {"ex2.f4", Lanes<Exp2, float, float>},
    {"lg2.f4", Lanes<Log2, float, float>},
    {"rcp.f4", Lanes<Reciprocal, float, float>},
    {"bf16.f4", Lanes<ToBFloat16, U2, float>},
    {"bf16x2.f4", Lanes<ToBFloat16Pair, U4, float, float>},
    {"f16x2.f4", Lanes<ToHalfPair, U4, float, float>},
    {"f4.bf16", Lanes<FromBFloat16, float, U2>},
    {"f4.f16", Lanes<FromHalf, float, U2>},
    {"f4.i4", Lanes<Convert<float>, float, I4>},
    {"f4.u4", Lanes<Convert<float>, float, U4>},
    {"u8.u4", Lanes<Convert<U8>, U8, U4>},
    {"i8.i4", Lanes<Convert<I8>, I8, I4>},
    {"u4.u8", Lanes<Convert<U4>, U4, U8>},
    {"u4.u2", Lanes<Convert<U4>, U4, U2>},
    {"u2.u4", Lanes<Convert<U2>, U2, U4>},
    {"join.u2", Lanes<Join, U4, U2, U2>},
    {"join.u4", Lanes<Join, U8, U4, U4>},
    {"high.u4", Lanes<High, U2, U4>},
    {"high.u8", Lanes<High, U4, U8>},
    {"add.u2", Lanes<Add, U2, U2, U2>},
    {"sub.u2", Lanes<Subtract, U2, U2, U2>},
    {"and.u2", Lanes<And, U2, U2, U2>},
    {"or.u2", Lanes<Or, U2, U2, U2>},
    {"xor.u2", Lanes<Xor, U2, U2, U2>},
    {"shl.u2", Lanes<ShiftLeft, U2, U2, U4>},
    {"shr.u2", Lanes<ShiftRight, U2, U2, U4>},
    {"shr.i2", Lanes<ShiftRight, I2, I2, U4>},
    {"mulwide.i2", Lanes<MultiplyWide<I4>, I4, I2, I2>},
    {"mulwide.u2", Lanes<MultiplyWide<U4>, U4, U2, U2>},
    {"i4.i2", Lanes<Convert<I4>, I4, I2>},
    {"i2.i1", Lanes<Convert<I2>, I2, I1>},
    {"i1.i4", Lanes<Convert<I1>, I1, I4>},
    {"u1.u2", Lanes<Convert<U1>, U1, U2>},
    {"u2.u1", Lanes<Convert<U2>, U2, U1>},
    {"shfl.up", Shuffled<Shuffle::kUp>},
    {"shfl.down", Shuffled<Shuffle::kDown>},
    {"shfl.bfly", Shuffled<Shuffle::kButterfly>},
    {"shfl.idx", Shuffled<Shuffle::kIndex>},
    {"inside.up", IsInside<Shuffle::kUp>},
    {"inside.down", IsInside<Shuffle::kDown>},
    {"inside.bfly", IsInside<Shuffle::kButterfly>},
    {"inside.idx", IsInside<Shuffle::kIndex>},
    {"mma.bf16", Multiplied<true>},
    {"mma.f16", Multiplied<false>},
    {"load.u2", nullptr, LoadItems<U2>},
    {"load.u4", nullptr, LoadItems<U4>},
    {"load.u8", nullptr, LoadItems<U8>},
    {"ldmatrix", nullptr, LoadMatrices<false>},
    {"ldmatrix.trans", nullptr, LoadMatrices<true>},
};

}  // namespace

const std::vector<std::string>& BlockOperations() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    for (const Operation& operation : kOperations) found.emplace_back(operation.name);
    return found;
  }();
  return names;
}

bool SharedView::Load(int64_t first, int64_t width, char* to) const {
  const int64_t last = first + width - 1;
  if (first % width != 0 || last >= size) return false;
  if (std::memchr(written + first, 0, width) != nullptr) return false;
  for (int64_t n = first / 16; n <= last / 16; ++n) {
    if (chunk_writes[n] != 0) return false;
  }
  for (int64_t n = first / 4; n <= last / 4; ++n) {
    if (word_writes[n] != 0) return false;
  }
  std::memcpy(to, data + first, width);
  return true;
}

bool RunBlock(const std::vector<BlockStep>& steps, char* scratch, const SharedView* shared) {
  for (const BlockStep& step : steps) {
    const Operation& operation = kOperations[step.operation];
    if (operation.run != nullptr) {
      operation.run(step, scratch);
    } else if (shared == nullptr || !operation.load(step, scratch, *shared)) {
      return false;
    }
  }
  return true;
}

}  // namespace jax_fa
