// Calls the FFI handlers of both platforms as XLA does, on seeded random calls, most of which have
// faults: arrays too many or too few, of another type, rank or shape, extents of 0 and of 2^40,
// attributes of another type, missing or unknown, NaN and infinity. A call is refused with a text
// of ours, or its results are written completely, with the same bits for one thread and for
// several; a call without faults is not refused on the CPU. Meant to be built with sanitizers, like
// attention_cpu_fuzz.cc, which says how to run both.
//
//   handlers_fuzz FIRST_SEED COUNT
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "ffi_call.h"
#include "fuzz.h"
#include "handlers_cpu.h"
#include "handlers_cuda.h"
#include "schema.h"

namespace jax_fa {
namespace {

constexpr auto kF32 = XLA_FFI_DataType_F32;
constexpr auto kS32 = XLA_FFI_DataType_S32;

// An array to be, without memory.
struct Shaped {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> shape;
};

int64_t BytesOf(XLA_FFI_DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_U8:
      return 1;
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_F16:
      return 2;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_F64:
      return 8;
    case XLA_FFI_DataType_C128:
      return 16;
    default:
      return 4;
  }
}

XLA_FFI_DataType TypeOf(const Array& array, XLA_FFI_DataType element) {
  if (array.element == Element::kElement || array.element == Element::kBias) return element;
  return array.element == Element::kInt32 ? kS32 : kF32;
}

// At most kManyElements, which is more than an array has here.
constexpr int64_t kManyElements = int64_t{1} << 24;

int64_t NumElements(const Shaped& array) {
  int64_t count = 1;
  for (int64_t extent : array.shape) {
    if (extent == 0) return 0;
    count = extent > kManyElements / count ? kManyElements : count * extent;
  }
  return count;
}

// What is called, before it has memory.
struct Plan {
  int operation;  // 0: forward, 1: backward, 2: gradient of a bias
  bool cuda;
  std::vector<Shaped> operands, results;
  std::map<std::string, FfiAttribute> attributes;
  std::vector<std::string> faults;
};

Plan FaultlessPlan(Fuzz& fuzz) {
  Plan plan{};
  plan.operation = static_cast<int>(fuzz.Int(0, 2));
  plan.cuda = fuzz.Maybe(25);
  const auto dtype =
      fuzz.OneOf({XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16, XLA_FFI_DataType_F16});
  const bool is_packed = plan.operation < 2 && fuzz.Maybe(40);
  const int64_t batch = is_packed ? 1 : fuzz.Int(0, 3);
  const int64_t sequences = is_packed ? fuzz.Int(0, 9) : batch;
  const int64_t q_len = fuzz.OneOf<int64_t>({0, 1, 2, 7, 33, 130});
  const int64_t kv_len = fuzz.OneOf<int64_t>({0, 1, 3, 8, 65, 200});
  const int64_t kv_heads = fuzz.Int(1, 3), heads = kv_heads * fuzz.OneOf<int64_t>({0, 1, 1, 2, 8});
  const int64_t dim = fuzz.OneOf<int64_t>({1, 3, 16, 64, 100});
  const int64_t value_dim = fuzz.OneOf<int64_t>({1, 8, 64, 100});
  Problem p{};
  p.batch = batch, p.num_sequences = sequences, p.q_len = q_len, p.kv_len = kv_len;
  p.num_q_heads = heads, p.num_kv_heads = kv_heads, p.head_dim = dim, p.value_dim = value_dim;
  const bool has_segments = fuzz.Maybe(30), has_sinks = fuzz.Maybe(30);
  const bool has_mask = !is_packed && fuzz.Maybe(30);
  if (has_mask) {
    p.mask_batch = fuzz.OneOf<int64_t>({1, batch});
    p.mask_heads = fuzz.OneOf<int64_t>({1, heads});
    p.mask_rows = fuzz.OneOf<int64_t>({1, q_len, (q_len + kMaskBlock - 1) / kMaskBlock});
    p.mask_width = fuzz.OneOf<int64_t>({1, (kv_len + 31) / 32});
  }
  const bool has_bias = plan.operation == 2 || (!is_packed && fuzz.Maybe(30));
  const bool is_bias_float32 = fuzz.Maybe(50);
  if (has_bias) {
    p.bias_batch = fuzz.OneOf<int64_t>({1, batch});
    p.bias_heads = fuzz.OneOf<int64_t>({1, heads});
    p.bias_rows = fuzz.OneOf<int64_t>({1, q_len});
    p.bias_keys = fuzz.OneOf<int64_t>({1, kv_len});
  }
  const auto is_present = [&](const Array& array) {
    const std::string name = array.name;
    if (name.find("cu_seqlens") == 0) return is_packed;
    if (name.find("segments") != std::string::npos) return has_segments;
    if (name.find("sinks") != std::string::npos) return has_sinks;
    if (name.find("mask_") == 0) return has_mask;
    if (name.find("bias") != std::string::npos) return has_bias;
    return !array.is_optional || fuzz.Maybe(40);
  };
  const auto add = [&, extents = ExtentsOf(p)](const Array& array, std::vector<Shaped>* arrays) {
    arrays->push_back({TypeOf(array, dtype), {0}});
    if (!is_present(array)) return;
    if (array.element == Element::kBias && is_bias_float32) arrays->back().dtype = kF32;
    arrays->back().shape.clear();
    for (size_t i = 0; i < array.rank; ++i) {
      arrays->back().shape.push_back(extents[array.dims[i]]);
    }
  };
  const auto add_all = [&](const auto& none) {
    using Params = std::decay_t<decltype(none)>;
    Params::Operands(none, [&](const Array& array, auto&) { add(array, &plan.operands); });
    constexpr size_t least = Params::kNumResults - Params::kNumAddedResults;
    Params::Results(none, [&](const Array& array, auto&) {
      if (plan.results.size() < least) add(array, &plan.results);  // the CPU gives no more
    });
  };
  if (plan.operation == 0) add_all(FwdParams{});
  if (plan.operation == 1) add_all(BwdParams{});
  if (plan.operation == 2) add_all(DbiasParams{});
  plan.attributes = {{"scale", fuzz.OneOf({0.125f, 1.0f, 0.0f, -1.0f, 1e-45f, 3e38f})},
                     {"soft_cap", fuzz.OneOf({0.0f, 0.0f, 30.0f, 1e-45f, 3e38f})},
                     {"window_left", fuzz.OneOf<int32_t>({kUnbounded, kUnbounded, 3, -2, 0})},
                     {"window_right", fuzz.OneOf<int32_t>({kUnbounded, 0, 0, 5, -kUnbounded})},
                     {"bottom_right", fuzz.Maybe(40)},
                     {"deterministic", fuzz.Maybe(40)},
                     {"mask_mod", std::string()}};
  return plan;
}

// Extents that agree with each other, one of them 0 and perhaps one that no memory could hold.
void SetExtents(Fuzz& fuzz, Plan* plan) {
  const int64_t huge = int64_t{1} << fuzz.OneOf({20, 27, 31, 33, 40, 62});
  int64_t batch = 1, q_len = 4, kv_len = 4, heads = 2, kv_heads = 2, dim = 8, value_dim = 8;
  switch (fuzz.Int(0, 8)) {
    case 0:
      dim = value_dim = 0;
      break;
    case 1:
      dim = 0;
      break;
    case 2:
      value_dim = 0;
      break;
    case 3:
      heads = kv_heads = 0;
      break;
    case 4:
      kv_heads = 0;
      break;
    case 5:
      q_len = kv_len = 0, batch = huge;
      break;
    case 6:
      batch = 0, q_len = huge, kv_len = huge;
      break;
    case 7:
      q_len = kv_len = 0, dim = huge, value_dim = huge;
      break;
    default:
      q_len = kv_len = 0, heads = huge, batch = huge;
  }
  const auto dtype = plan->operands.empty() ? kF32 : plan->operands[0].dtype;
  const Shaped q{dtype, {batch, q_len, heads, dim}}, k{dtype, {batch, kv_len, kv_heads, dim}};
  const Shaped v{dtype, {batch, kv_len, kv_heads, value_dim}};
  const Shaped out{dtype, {batch, q_len, heads, value_dim}}, lse{kF32, {batch, q_len, heads}};
  plan->operands = {q, k, v};
  std::vector<Shaped> optional;
  const FwdParams none{};
  FwdParams::Operands(none, [&](const Array& array, auto&) {
    if (array.is_optional) optional.push_back({TypeOf(array, dtype), {0}});
  });
  const auto added = optional.end() - FwdParams::kNumAddedOperands;
  plan->operands.insert(plan->operands.end(), optional.begin(), added);
  plan->results = {out, lse};
  if (plan->operation == 1) {
    plan->operands.insert(plan->operands.end(), {out, lse, out, lse});
    plan->results = {q, k, v, {kF32, {0}}};
  }
  if (plan->operation == 2) plan->operands.insert(plan->operands.end(), {lse, out, lse});
  plan->operands.insert(plan->operands.end(), added, optional.end());
  const Shaped bias{dtype, {batch, heads, q_len, kv_len}};
  if (plan->operation == 2 || fuzz.Maybe(30)) plan->operands.back() = bias;
  if (plan->operation == 2) plan->results = {bias};
}

FfiAttribute AnyAttribute(Fuzz& fuzz) {
  switch (fuzz.Int(0, 6)) {
    case 0:
      return fuzz.HostileFloat();
    case 1:
      return double{0.5};
    case 2:
      return fuzz.HostileInt(10);
    case 3:
      return int64_t{1} << 40;
    case 4:
      return fuzz.Maybe(50);
    case 5:
      return std::string("chunked_4");
    default:
      return std::string(5000, 'x');
  }
}

void AddFaultOfArray(Fuzz& fuzz, std::vector<Shaped>* arrays, Plan* plan) {
  const auto name = [&](const char* what) { plan->faults.push_back(what); };
  const int64_t last = static_cast<int64_t>(arrays->size()) - 1;
  if (last < 0) return;
  Shaped& array = (*arrays)[fuzz.Int(0, last)];
  const int64_t rank = static_cast<int64_t>(array.shape.size());
  switch (fuzz.Int(0, 5)) {
    case 0:
      name("rank");
      if (fuzz.Maybe(50) || rank == 0) {
        array.shape.insert(array.shape.begin(), 1);
      } else {
        array.shape.pop_back();
      }
      break;
    case 1:
      name("type");
      array.dtype =
          fuzz.OneOf({XLA_FFI_DataType_PRED, XLA_FFI_DataType_U8, kS32, kF32, XLA_FFI_DataType_S64,
                      XLA_FFI_DataType_F64, XLA_FFI_DataType_F16, XLA_FFI_DataType_BF16,
                      XLA_FFI_DataType_C128, XLA_FFI_DataType_INVALID});
      break;
    case 2:
      name("extent");
      if (rank > 0) array.shape[fuzz.Int(0, rank - 1)] = fuzz.OneOf<int64_t>({0, 1, 2, 5, 9});
      break;
    case 3:
      name("missing array");
      arrays->erase(arrays->begin() + fuzz.Int(0, last));
      break;
    case 4:
      name("extra array");
      arrays->insert(arrays->begin() + fuzz.Int(0, last + 1), {kF32, {fuzz.Int(0, 3)}});
      break;
    default:
      name("absent array");
      array.shape = {0};
  }
}

void AddFault(Fuzz& fuzz, Plan* plan) {
  switch (fuzz.Int(0, 9)) {
    case 0:
      plan->faults.push_back("attribute");
      plan->attributes[fuzz.OneOf<const char*>({"scale", "soft_cap", "window_left", "window_right",
                                                "bottom_right", "deterministic", "mask_mod",
                                                "kernel", "scale2", ""})] = AnyAttribute(fuzz);
      break;
    case 1:
      plan->faults.push_back("missing attribute");
      if (!plan->attributes.empty()) plan->attributes.erase(plan->attributes.begin());
      break;
    case 2:
    case 3:
      plan->faults.push_back("extents");
      SetExtents(fuzz, plan);
      break;
    case 4:
      plan->faults.push_back("scratch");
      for (int64_t i = fuzz.OneOf({1, 2, 4}); i > 0; --i) {
        plan->results.push_back({fuzz.OneOf({kF32, kS32}),
                                 {fuzz.Int(0, 3), fuzz.Int(0, 3), fuzz.OneOf<int64_t>({0, 256})}});
      }
      break;
    case 5:
    case 6:
      AddFaultOfArray(fuzz, &plan->results, plan);
      break;
    default:
      AddFaultOfArray(fuzz, &plan->operands, plan);
  }
}

std::vector<FfiArray> Operands(Fuzz& fuzz, Heap& heap, const Plan& plan, bool is_hostile) {
  std::vector<FfiArray> arrays;
  for (const Shaped& array : plan.operands) {
    const int64_t count = NumElements(array);
    void* data = nullptr;
    if (array.dtype == kS32) {
      int32_t* ints = heap.Array<int32_t>(count);
      for (int64_t i = 0; i < count; ++i) ints[i] = fuzz.HostileInt(200);
      data = ints;
    } else if (array.dtype == kF32) {
      data = heap.Data(fuzz, DType::kF32, count, is_hostile);
    } else if (array.dtype == XLA_FFI_DataType_BF16) {
      data = heap.Data(fuzz, DType::kBF16, count, is_hostile);
    } else if (array.dtype == XLA_FFI_DataType_F16) {
      data = heap.Data(fuzz, DType::kF16, count, is_hostile);
    } else {
      data = heap.Filled(count * BytesOf(array.dtype), 1);
    }
    arrays.push_back({array.dtype, array.shape, data});
  }
  return arrays;
}

// Whether a text is one of ours.
bool IsOurs(const FfiOutcome& outcome) {
  return outcome.message.find("jax_fa") != std::string::npos;
}

bool Run(uint64_t seed, bool* accepted) {
  Fuzz fuzz(seed);
  Heap heap;
  Plan plan = FaultlessPlan(fuzz);
  for (int64_t i = fuzz.OneOf({0, 0, 0, 1, 1, 1, 1, 2, 3}); i > 0; --i) AddFault(fuzz, &plan);
  for (const std::vector<Shaped>* arrays : {&plan.operands, &plan.results}) {
    for (const Shaped& array : *arrays) {
      if (NumElements(array) == kManyElements) return true;  // one fault gave elements to another's
    }
  }
  XLA_FFI_Handler* handlers[2][3] = {{kForwardCpu, kBackwardCpu, kBiasGradientCpu},
                                     {kForwardCuda, kBackwardCuda, kBiasGradientCuda}};
  FfiCall call;
  call.operands = Operands(fuzz, heap, plan, fuzz.Maybe(25));
  call.attributes = plan.attributes;
  std::vector<FfiArray> results[2];
  FfiOutcome outcomes[2];
  for (int run : {0, 1}) {
    for (const Shaped& array : plan.results) {
      const int64_t bytes = NumElements(array) * BytesOf(array.dtype);
      results[run].push_back({array.dtype, array.shape, heap.Filled(bytes, kPoison[run])});
    }
    call.results = results[run];
    call.num_threads = run == 0 ? 1 : 3;
    outcomes[run] = Invoke(handlers[plan.cuda][plan.operation], call);
  }
  *accepted = outcomes[0].ok();

  std::string wrong;
  if (outcomes[0].message != outcomes[1].message) wrong = "two answers to one question";
  if (!outcomes[0].ok() && !IsOurs(outcomes[0])) wrong = "a foreign text";
  if (!outcomes[0].ok() && !plan.cuda && plan.faults.empty()) wrong = "refused without a fault";
  if (outcomes[0].ok()) {
    for (size_t i = 0; i < plan.results.size(); ++i) {
      const int64_t bytes = NumElements(plan.results[i]) * BytesOf(plan.results[i].dtype);
      if (!AreEqual(results[0][i].data, results[1][i].data, bytes)) {
        wrong = "result " + std::to_string(i) + " was not written, or depends on threads";
      }
    }
  }
  if (wrong.empty()) return true;
  std::printf("FAILED seed %llu: %s", static_cast<unsigned long long>(seed), wrong.c_str());
  for (const std::string& fault : plan.faults) std::printf(", %s", fault.c_str());
  std::printf(": '%s'\n", outcomes[0].message.c_str());
  return false;
}

}  // namespace
}  // namespace jax_fa

int main(int argc, char** argv) {
  if (argc != 3) {
    std::printf("usage: handlers_fuzz FIRST_SEED COUNT\n");
    return 2;
  }
  const uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const uint64_t count = std::strtoull(argv[2], nullptr, 10);
  uint64_t failed = 0, num_accepted = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    bool accepted = false;
    failed += !jax_fa::Run(seed, &accepted);
    num_accepted += accepted;
  }
  std::printf("handlers_fuzz: %llu calls, %llu of them accepted, %llu failed\n",
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(num_accepted),
              static_cast<unsigned long long>(failed));
  return failed != 0;
}
