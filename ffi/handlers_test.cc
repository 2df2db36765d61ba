// Calls the FFI handlers as XLA does, and checks what they refuse, what they say, and that memory
// that runs out ends a call and not the process.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "ffi_call.h"
#include "handlers_cpu.h"
#include "handlers_cuda.h"
#include "schema.h"
#include "testing.h"

namespace {

// Aligned allocations, which only scratch of the CPU kernels is, until one fails; negative: never.
std::atomic<int> allocations_left{-1};

}  // namespace

void* operator new(size_t size, std::align_val_t alignment) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  const size_t unit = static_cast<size_t>(alignment);
  void* memory = std::aligned_alloc(unit, (size + unit - 1) / unit * unit + unit);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }

namespace jax_fa {
namespace {

constexpr auto kF32 = XLA_FFI_DataType_F32;
constexpr auto kS32 = XLA_FFI_DataType_S32;

struct Extents {
  int64_t batch = 1, q_len = 4, kv_len = 4, heads = 2, kv_heads = 2, dim = 8, value_dim = 8;
};

// A call with arrays of its own, all zero.
struct Call {
  FfiCall ffi;
  std::vector<std::vector<float>> memory;

  FfiArray Array(XLA_FFI_DataType dtype, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (int64_t extent : shape) count *= extent;
    memory.emplace_back(count);
    return {dtype, std::move(shape), memory.back().data()};
  }
  void Attributes() {
    ffi.attributes = {{"scale", 1.0f},
                      {"soft_cap", 0.0f},
                      {"window_left", 1 << 30},
                      {"window_right", 1 << 30},
                      {"bottom_right", false},
                      {"deterministic", false},
                      {"mask_mod", std::string()}};
  }
  Call(bool backward, const Extents& e, XLA_FFI_DataType dtype = kF32) {
    const std::vector<int64_t> q = {e.batch, e.q_len, e.heads, e.dim};
    const std::vector<int64_t> k = {e.batch, e.kv_len, e.kv_heads, e.dim};
    const std::vector<int64_t> v = {e.batch, e.kv_len, e.kv_heads, e.value_dim};
    const std::vector<int64_t> out = {e.batch, e.q_len, e.heads, e.value_dim};
    const std::vector<int64_t> lse = {e.batch, e.q_len, e.heads};
    ffi.operands = {Array(dtype, q), Array(dtype, k), Array(dtype, v)};
    std::vector<FfiArray> optional;
    const FwdParams none{};
    FwdParams::Operands(none, [&](const jax_fa::Array& array, auto&) {
      if (array.is_optional) {
        optional.push_back(Array(array.element == Element::kInt32 ? kS32 : kF32, {0}));
      }
    });
    const auto added = optional.end() - FwdParams::kNumAddedOperands;
    ffi.operands.insert(ffi.operands.end(), optional.begin(), added);
    if (backward) {
      ffi.operands.push_back(Array(dtype, out));
      ffi.operands.push_back(Array(kF32, lse));
      ffi.operands.push_back(Array(dtype, out));
      ffi.operands.push_back(Array(kF32, lse));
      ffi.results = {Array(dtype, q), Array(dtype, k), Array(dtype, v), Array(kF32, {0})};
    } else {
      ffi.results = {Array(dtype, out), Array(kF32, lse)};
    }
    ffi.operands.insert(ffi.operands.end(), added, optional.end());
    Attributes();
  }
  void Packed(int64_t sequences) {
    ffi.operands[places::cu_seqlens_q] = Array(kS32, {sequences + 1});
    ffi.operands[places::cu_seqlens_k] = Array(kS32, {sequences + 1});
  }
};

void Refuses(XLA_FFI_Handler* handler, const Call& call, const std::string& words) {
  const FfiOutcome outcome = Invoke(handler, call.ffi);
  Check(outcome.message.find(words) != std::string::npos,
        "'" + words + "' should be in '" + outcome.message + "'");
}

void NumbersOfArraysAreCounted() {
  Call missing(false, {});
  missing.ffi.operands.resize(9);
  Refuses(kForwardCpu, missing,
          "jax_fa forward: takes 14 operands (q, k, v, q_lengths, kv_lengths, cu_seqlens_q, "
          "cu_seqlens_k, q_segments, kv_segments, q_offset, sinks, mask_words, mask_map, "
          "bias), but got 9");
  Call extra(true, {});
  extra.ffi.operands.push_back(extra.Array(kF32, {3}));
  Refuses(kBackwardCpu, extra, "jax_fa backward: takes 18 operands");
  for (int num_results : {0, 1, 3, 5}) {
    Call call(false, {});
    call.ffi.results.resize(num_results, call.Array(kF32, {2}));
    Refuses(kForwardCpu, call,
            "jax_fa forward: gives 2 results (out, lse), but " + std::to_string(num_results) +
                " are asked for");
    Refuses(kForwardCuda, call,
            "gives 2 results (out, lse), or these and as scratch 2 more (out_parts, lse_parts)");
  }
  Call backward(true, {});
  Refuses(kBackwardCuda, backward,
          "gives 4 results (dq, dk, dv, dsinks) or 5 (also dbias) and as scratch 4 more (dq_sum, "
          "row_stats, dkv_sums, turns), but 4 are asked for");
  for (int num_results : {5, 8, 9}) {
    backward.ffi.results.resize(num_results, backward.Array(kF32, {1}));
    Refuses(kBackwardCpu, backward,
            "gives 4 results (dq, dk, dv, dsinks), but " + std::to_string(num_results) +
                " are asked for");
  }
}

// The gradient of a bias is one more result of a backward, before scratch.
void ABackwardMayGiveTheGradientOfABias() {
  const auto call = [](const std::vector<int64_t>& bias, const std::vector<int64_t>& dbias) {
    Call made(true, {});
    if (!bias.empty()) made.ffi.operands.back() = made.Array(kF32, bias);
    made.ffi.results.push_back(made.Array(kF32, dbias));
    made.ffi.results.push_back(made.Array(kF32, {2, 256, 8}));
    made.ffi.results.push_back(made.Array(kF32, {2, 2, 256}));
    made.ffi.results.push_back(made.Array(kF32, {0, 128}));
    made.ffi.results.push_back(made.Array(kS32, {2, 0}));
    return made;
  };
  const std::vector<int64_t> whole = {1, 2, 4, 4}, by_head = {1, 2, 1, 4};
  Refuses(kBackwardCuda, call(whole, whole), "this build holds no GPU kernels");
  Refuses(kBackwardCuda, call(whole, {0}), "this build holds no GPU kernels");
  Refuses(kBackwardCuda, call(whole, by_head), "dbias should be F32[1, 2, 4, 4], but is F32[1, 2");
  const char* const words = "dbias should be asked of a backward only where the bias is broadcast";
  Refuses(kBackwardCuda, call(by_head, by_head), words);
  Refuses(kBackwardCuda, call({}, whole),
          "dbias should be F32[0, 0, 0, 0], but is F32[1, 2, 4, 4]");
  Call unaligned = call(whole, whole);
  unaligned.ffi.results[4].data = static_cast<char*>(unaligned.ffi.results[4].data) + 4;
  Refuses(kBackwardCuda, unaligned, "an array starts at an address that is no multiple of 16");
  Call small = call(whole, whole);
  small.ffi.results[5].shape = {2, 128, 8};
  Refuses(kBackwardCuda, small, "dq_sum should be F32[2, 256, 8], but is F32[2, 128, 8]");
}

void ScratchIsThatOfTheKernels() {
  Call split(false, {});
  split.ffi.results.push_back(split.Array(kF32, {3, 1, 4, 2, 8}));
  split.ffi.results.push_back(split.Array(kF32, {3, 1, 4, 2}));
  Refuses(kForwardCuda, split, "this build holds no GPU kernels");
  Call one = split;
  one.ffi.results[2].shape = {1, 1, 4, 2, 8};
  Refuses(kForwardCuda, one, "out_parts should have 2 to 132 parts, but has 1");
  Call different = split;
  different.ffi.results[3].shape = {2, 1, 4, 2};
  Refuses(kForwardCuda, different, "lse_parts should be F32[3, 1, 4, 2], but is F32[2, 1, 4, 2]");

  Call backward(true, {});
  backward.ffi.results.push_back(backward.Array(kF32, {2, 256, 8}));
  backward.ffi.results.push_back(backward.Array(kF32, {2, 2, 256}));
  backward.ffi.results.push_back(backward.Array(kF32, {0, 128}));
  backward.ffi.results.push_back(backward.Array(kS32, {2, 0}));
  Refuses(kBackwardCuda, backward, "this build holds no GPU kernels");
  Call small = backward;
  small.ffi.results[4].shape = {2, 128, 8};
  Refuses(kBackwardCuda, small, "dq_sum should be F32[2, 256, 8], but is F32[2, 128, 8]");
  Call other = backward;
  other.ffi.results[7].dtype = kF32;
  Refuses(kBackwardCuda, other, "turns should be S32[2, 0], but is F32[2, 0]");
  Call ordered = backward;
  ordered.ffi.attributes["deterministic"] = true;
  Refuses(kBackwardCuda, ordered, "turns should be S32[2, 4], but is S32[2, 0]");
}

// Programs of an early version have no array for it.
void ScratchThatKernelsNeedIsMissed() {
  Call call(false, {});
  const std::vector<int64_t> rows = {4, 4, 2, 8}, floats = {4, 4, 2}, bias = {1, 1, 4, 4};
  const std::map<std::string, std::vector<int64_t>> shapes = {
      {"q", rows},    {"k", rows},       {"v", rows},   {"lse", floats},
      {"dout", rows}, {"delta", floats}, {"bias", bias}};
  call.ffi.operands.clear();
  const DbiasParams none{};
  DbiasParams::Operands(none, [&](const jax_fa::Array& array, auto&) {
    const auto found = shapes.find(array.name);
    const auto dtype = array.element == Element::kInt32 ? kS32 : kF32;
    call.ffi.operands.push_back(
        call.Array(dtype, found == shapes.end() ? std::vector<int64_t>{0} : found->second));
  });
  call.ffi.results = {call.Array(kF32, bias)};
  Refuses(kBiasGradientCuda, call, "dbias_parts should have an address, but has none");
}

void ArraysOfWideAccessesAreAligned() {
  Call call(true, {});
  call.ffi.results.push_back(call.Array(kF32, {2, 256, 8}));
  call.ffi.results.push_back(call.Array(kF32, {2, 2, 256}));
  call.ffi.results.push_back(call.Array(kF32, {0, 128}));
  call.ffi.results.push_back(call.Array(kS32, {2, 0}));
  Refuses(kBackwardCuda, call, "this build holds no GPU kernels");
  const auto moved = [&call](std::vector<FfiArray> FfiCall::* arrays, size_t index) {
    Call copy = call;
    FfiArray& array = (copy.ffi.*arrays)[index];
    array.data = static_cast<char*>(array.data) + 4;
    return copy;
  };
  const char* const words = "an array starts at an address that is no multiple of 16 bytes";
  for (size_t i : {0, 1, 2, 11, 13}) {
    Refuses(kBackwardCuda, moved(&FfiCall::operands, i), words);
  }
  for (size_t i : {0, 1, 2, 4, 5}) Refuses(kBackwardCuda, moved(&FfiCall::results, i), words);
  const Call lse = moved(&FfiCall::operands, 12);
  Refuses(kBackwardCuda, lse, "this build holds no GPU kernels");
}

void ExtentsAreThoseThatKernelsDivideBy() {
  const struct {
    Extents extents;
    const char* words;
  } cases[] = {
      {{1, 4, 4, 2, 2, 0, 0}, "head size of q and k should be at least 1, but is 0"},
      {{1, 4, 4, 2, 2, 8, 0}, "head size of v should be at least 1, but is 0"},
      {{1, 4, 4, 0, 0, 8, 8}, "number of key/value heads should be at least 1, but is 0"},
      {{1, 4, 4, 3, 2, 8, 8}, "query heads (3) should be a multiple of key/value heads (2)"},
      {{int64_t{1} << 40, 0, 0, 1 << 20, 1, 8, 8},
       "the extents of each array should multiply to 2^50"},
  };
  for (const auto& [extents, words] : cases) {
    for (XLA_FFI_Handler* handler : {kForwardCpu, kForwardCuda}) {
      Refuses(handler, Call(false, extents), std::string("jax_fa forward: ") + words);
    }
  }
  for (int64_t batch : {0, 2, 3}) {
    for (bool backward : {false, true}) {
      Extents extents;
      extents.batch = batch;
      Call call(backward, extents);
      call.Packed(5);
      Refuses(backward ? kBackwardCpu : kForwardCpu, call,
              "should have a batch of 1, but it is " + std::to_string(batch));
    }
  }
}

void AbsentOperandsHaveTheirTypeAndShape() {
  Call call(false, {});
  call.ffi.operands[3] = call.Array(kF32, {0});
  Refuses(kForwardCpu, call,
          "q_lengths should be S32[1], but is F32[0] (where there is none, S32[0])");
  call.ffi.operands[3] = call.Array(kS32, {0, 7});
  Refuses(kForwardCpu, call, "q_lengths should be S32[1], but is S32[0, 7]");
}

void AttributesAreNumbers() {
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  const struct {
    const char* name;
    FfiAttribute value;
    const char* words;
  } cases[] = {
      {"scale", nan, "scale should be finite, but is"},
      {"scale", -infinity, "scale should be finite, but is -inf"},
      {"soft_cap", infinity, "soft_cap should be positive and finite, or 0 for none, but is inf"},
      {"soft_cap", -1.0f, "soft_cap should be positive and finite, or 0 for none, but is -1"},
      {"window_left", std::numeric_limits<int32_t>::max(), "window_left should be between"},
      {"window_right", std::numeric_limits<int32_t>::min(), "window_right should be between"},
      {"scale", int32_t{1}, "jax_fa: attribute scale: Wrong scalar data type"},
      {"scale", double{1}, "jax_fa: attribute scale: Wrong scalar data type"},
      {"bottom_right", std::string("no"), "jax_fa: attribute bottom_right: "},
      {"dropout", 0.5f, "made by a newer release, whose attributes are"},
  };
  for (const auto& [name, value, words] : cases) {
    Call call(false, {});
    call.ffi.attributes[name] = value;
    Refuses(kForwardCpu, call, words);
  }
}

void MemoryThatRunsOutIsAnError() {
  for (bool backward : {false, true}) {
    // With 4 threads some allocations are those of helpers, with 1 all are the caller's.
    for (int num_threads : {1, 4}) {
      for (int allocation = 0; allocation < 12; ++allocation) {
        Extents extents;
        extents.batch = 8;
        Call call(backward, extents);
        call.ffi.num_threads = num_threads;
        allocations_left = allocation;
        const FfiOutcome outcome = Invoke(backward ? kBackwardCpu : kForwardCpu, call.ffi);
        const bool ran_out = allocations_left < 0;
        allocations_left = -1;
        Check(ran_out == (outcome.code == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED),
              "out of memory: '" + outcome.message + "'");
        Check(Invoke(backward ? kBackwardCpu : kForwardCpu, call.ffi).ok(), "and then again");
      }
    }
  }
}

// Sequences without rows cost neither memory nor time, whatever their number.
void EmptyProblemsReturnAtOnce() {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t kv_len : {0, 1}) {
    Extents extents;
    extents.batch = int64_t{1} << (kv_len == 0 ? 27 : 10);
    extents.q_len = 0;
    extents.kv_len = kv_len;
    for (bool backward : {false, true}) {
      Call call(backward, extents);
      for (std::vector<float>& array : call.memory) array.assign(array.size(), 7.0f);
      allocations_left = 1;  // delta, of no rows
      Check(Invoke(backward ? kBackwardCpu : kForwardCpu, call.ffi).ok(), "an empty problem");
      Check(allocations_left >= 0, "without scratch");
      allocations_left = -1;
      if (!backward) continue;
      bool zero = true;
      for (int result : {1, 2}) {
        const auto* gradient = static_cast<const float*>(call.ffi.results[result].data);
        for (int64_t i = 0; i < extents.batch * kv_len * 16; ++i) zero &= gradient[i] == 0;
      }
      Check(zero, "gradients without query rows are 0");
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  Check(seconds.count() < 5, "empty problems take " + std::to_string(seconds.count()) + " s");
}

}  // namespace
}  // namespace jax_fa

int main() {
  jax_fa::NumbersOfArraysAreCounted();
  jax_fa::ABackwardMayGiveTheGradientOfABias();
  jax_fa::ScratchIsThatOfTheKernels();
  jax_fa::ScratchThatKernelsNeedIsMissed();
  jax_fa::ArraysOfWideAccessesAreAligned();
  jax_fa::ExtentsAreThoseThatKernelsDivideBy();
  jax_fa::AbsentOperandsHaveTheirTypeAndShape();
  jax_fa::AttributesAreNumbers();
  jax_fa::MemoryThatRunsOutIsAnError();
  jax_fa::EmptyProblemsReturnAtOnce();
  std::printf("handlers_test: %d failed\n", jax_fa::failed);
  return jax_fa::failed != 0;
}
