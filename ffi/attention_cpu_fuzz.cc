// Runs the CPU kernels on seeded random problems with hostile run-time values: borders, lengths,
// offsets and segments of any int32, NaN and infinity anywhere. Every result must be written
// completely, and have the same bits with one thread and with several. Meant to be built with
// sanitizers (JAX_FA_SANITIZE in CMakeLists.txt), which find what is read or written elsewhere.
//
//   attention_cpu_fuzz FIRST_SEED COUNT
//
// .ci/fuzz runs some with fixed seeds. Before a release, or after a change of the kernels, run
// COUNT=100000 of each under address,undefined and 3000 under thread, which takes 10 to 20 minutes:
//   .ci/fuzz 100000 3000
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "attention_cpu.h"
#include "checks.h"
#include "fuzz.h"

namespace jax_fa {
namespace {

ParallelFor Threads(int num_threads) {
  return [num_threads](int64_t count, const std::function<void(int64_t)>& body) {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t i = next++; i < count; i = next++) body(i);
    };
    std::vector<std::thread> threads;
    for (int t = 1; t < std::min<int64_t>(num_threads, count); ++t) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
  };
}

int64_t Length(Fuzz& fuzz, int64_t largest) {
  return fuzz.Int(0, fuzz.Maybe(70) ? 12 : fuzz.OneOf<int64_t>({40, largest}));
}

Problem RandomProblem(Fuzz& fuzz, bool is_packed) {
  Problem p{};
  p.dtype = fuzz.OneOf({DType::kF32, DType::kBF16, DType::kF16});
  p.batch = is_packed ? 1 : fuzz.Int(0, 3);
  p.num_sequences = is_packed ? fuzz.Int(0, 9) : p.batch;
  p.q_len = Length(fuzz, 150);
  p.kv_len = Length(fuzz, 220);
  p.num_kv_heads = fuzz.Int(1, 3);
  p.num_q_heads = p.num_kv_heads * (fuzz.Maybe(5) ? 0 : fuzz.Int(1, 5));
  p.head_dim = fuzz.Int(1, fuzz.Maybe(75) ? 40 : 140);
  p.value_dim = fuzz.Maybe(50) ? p.head_dim : fuzz.Int(1, fuzz.Maybe(75) ? 40 : 140);
  p.scale = fuzz.Maybe(60) ? 0.2f : fuzz.HostileFloat();
  p.soft_cap = fuzz.Maybe(70) ? 0.0f : fuzz.OneOf({0.5f, 20.0f, 1e-45f, 1e-38f, 3e38f});
  p.window_left = fuzz.Maybe(50) ? kUnbounded : fuzz.HostileInt(p.kv_len);
  p.window_right = fuzz.Maybe(40) ? kUnbounded : fuzz.Maybe(50) ? 0 : fuzz.HostileInt(p.kv_len);
  p.bottom_right = fuzz.Maybe(50);
  if (!is_packed && fuzz.Maybe(30)) {
    p.mask_batch = fuzz.OneOf<int64_t>({1, p.batch});
    p.mask_heads = fuzz.OneOf<int64_t>({1, p.num_q_heads});
    p.mask_rows = fuzz.OneOf<int64_t>({1, p.q_len, (p.q_len + kMaskBlock - 1) / kMaskBlock});
    p.mask_width = fuzz.OneOf<int64_t>({1, (p.kv_len + 31) / 32});
  }
  if (!is_packed && fuzz.Maybe(40)) {
    p.bias_batch = fuzz.OneOf<int64_t>({1, p.batch});
    p.bias_heads = fuzz.OneOf<int64_t>({1, p.num_q_heads});
    p.bias_rows = fuzz.OneOf<int64_t>({1, p.q_len});
    p.bias_keys = fuzz.OneOf<int64_t>({1, p.kv_len});
    p.bias_bytes = p.dtype == DType::kF32 ? 4 : fuzz.OneOf<int64_t>({2, 4});
  }
  return p;
}

DType BiasType(const Problem& p) { return p.bias_bytes == 4 ? DType::kF32 : p.dtype; }

const int32_t* Ints(Fuzz& fuzz, Heap& heap, int64_t count, int64_t largest, bool is_sorted) {
  std::vector<int32_t> values(count);
  for (int32_t& x : values) x = fuzz.HostileInt(largest);
  if (is_sorted) std::sort(values.begin(), values.end());
  return heap.Copy(values);
}

Extras RandomExtras(Fuzz& fuzz, Heap& heap, const Problem& p, bool is_packed) {
  const int64_t sequences = p.num_sequences;
  Extras extras{};
  if (fuzz.Maybe(40)) extras.q_lengths = Ints(fuzz, heap, sequences, p.q_len, false);
  if (fuzz.Maybe(40)) extras.kv_lengths = Ints(fuzz, heap, sequences, p.kv_len, false);
  if (fuzz.Maybe(40)) extras.q_offset = Ints(fuzz, heap, sequences, p.kv_len, false);
  if (is_packed) {
    const bool is_sorted = fuzz.Maybe(50);
    extras.cu_seqlens_q = Ints(fuzz, heap, sequences + 1, p.q_len, is_sorted);
    extras.cu_seqlens_k = Ints(fuzz, heap, sequences + 1, p.kv_len, is_sorted);
  }
  if (fuzz.Maybe(30)) {
    const bool is_sorted = fuzz.Maybe(50);
    extras.q_segments = Ints(fuzz, heap, p.batch * p.q_len, 2, is_sorted);
    extras.kv_segments = Ints(fuzz, heap, p.batch * p.kv_len, 2, is_sorted);
  }
  const int64_t words = p.mask_batch * p.mask_heads * p.mask_rows * p.mask_width;
  if (words > 0) {
    std::vector<int32_t> values(words);
    for (int32_t& x : values) x = static_cast<int32_t>(fuzz.Int(INT32_MIN, INT32_MAX));
    extras.mask_words = heap.Copy(values);
    extras.mask_map = heap.Copy(std::vector<int32_t>{0});  // the CPU does without
  }
  const int64_t biases = p.bias_batch * p.bias_heads * p.bias_rows * p.bias_keys;
  if (biases > 0) extras.bias = heap.Data(fuzz, BiasType(p), biases, fuzz.Maybe(50));
  if (fuzz.Maybe(30)) {
    extras.sinks = static_cast<const float*>(
        heap.Data(fuzz, DType::kF32, sequences * p.num_q_heads, fuzz.Maybe(50)));
  }
  return extras;
}

// A result of both runs.
struct Result {
  const char* name;
  int64_t bytes;
  void* runs[2];

  Result(Heap& heap, const char* name, int64_t bytes)
      : name(name),
        bytes(bytes),
        runs{heap.Filled(bytes, kPoison[0]), heap.Filled(bytes, kPoison[1])} {}
  bool IsSame() const { return AreEqual(runs[0], runs[1], bytes); }
};

// Forward, backward and the gradient of a bias of one problem, each with one thread and with
// several. False if a result is not what it has to be.
bool Run(uint64_t seed) {
  Fuzz fuzz(seed);
  Heap heap;
  const char* isa = fuzz.OneOf({"avx512", "avx2", "neon", "portable"});
  ForceCpuIsa(isa);
  const bool is_packed = fuzz.Maybe(50);
  const Problem p = RandomProblem(fuzz, is_packed);
  if (CheckProblem(p)) return true;  // no kernel ever sees it
  const bool is_hostile = fuzz.Maybe(25);
  const int64_t element = p.dtype == DType::kF32 ? 4 : 2;
  const int64_t q_rows = p.batch * p.q_len * p.num_q_heads;
  const int64_t kv_rows = p.batch * p.kv_len * p.num_kv_heads;
  const int threads[2] = {1, static_cast<int>(fuzz.Int(2, 4))};

  FwdParams forward{};
  forward.problem = p;
  forward.extras = RandomExtras(fuzz, heap, p, is_packed);
  forward.q = heap.Data(fuzz, p.dtype, q_rows * p.head_dim, is_hostile);
  forward.k = heap.Data(fuzz, p.dtype, kv_rows * p.head_dim, is_hostile);
  forward.v = heap.Data(fuzz, p.dtype, kv_rows * p.value_dim, is_hostile);
  const Result out(heap, "out", q_rows * p.value_dim * element);
  const Result lse(heap, "lse", q_rows * 4);
  for (int run : {0, 1}) {
    forward.out = out.runs[run];
    forward.lse = static_cast<float*>(lse.runs[run]);
    AttentionForwardCpu(forward, Threads(threads[run]));
  }

  BwdParams backward{};
  backward.problem = p;
  backward.extras = forward.extras;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = forward.out;
  backward.lse =
      fuzz.Maybe(70)
          ? forward.lse
          : static_cast<const float*>(heap.Data(fuzz, DType::kF32, q_rows, fuzz.Maybe(50)));
  backward.dout = heap.Data(fuzz, p.dtype, q_rows * p.value_dim, is_hostile);
  if (fuzz.Maybe(50)) {
    backward.dlse = static_cast<const float*>(heap.Data(fuzz, DType::kF32, q_rows, is_hostile));
  }
  const Result dq(heap, "dq", q_rows * p.head_dim * element);
  const Result dk(heap, "dk", kv_rows * p.head_dim * element);
  const Result dv(heap, "dv", kv_rows * p.value_dim * element);
  const bool has_sinks = backward.extras.sinks != nullptr;
  const Result dsinks(heap, "dsinks", has_sinks ? p.num_sequences * p.num_q_heads * 4 : 0);
  for (int run : {0, 1}) {
    backward.dq = dq.runs[run];
    backward.dk = dk.runs[run];
    backward.dv = dv.runs[run];
    backward.dsinks = has_sinks ? static_cast<float*>(dsinks.runs[run]) : nullptr;
    AttentionBackwardCpu(backward, Threads(threads[run]));
  }

  DbiasParams of_bias{};
  of_bias.problem = p;
  of_bias.extras = forward.extras;
  of_bias.q = forward.q;
  of_bias.k = forward.k;
  of_bias.v = forward.v;
  of_bias.lse = backward.lse;
  of_bias.dout = backward.dout;
  of_bias.delta = static_cast<const float*>(heap.Data(fuzz, DType::kF32, q_rows, is_hostile));
  const int64_t biases = p.bias_batch * p.bias_heads * p.bias_rows * p.bias_keys;
  const Result dbias(heap, "dbias", biases * p.bias_bytes);
  for (int run : {0, 1}) {
    of_bias.dbias = dbias.runs[run];
    if (p.bias_bytes > 0) AttentionBiasGradientCpu(of_bias, Threads(threads[run]));
  }

  bool ok = true;
  for (const Result* result : {&out, &lse, &dq, &dk, &dv, &dsinks, &dbias}) {
    if (result->IsSame()) continue;
    std::printf("FAILED seed %llu [%s]: %s was not written completely, or depends on threads\n",
                static_cast<unsigned long long>(seed), CpuIsa(), result->name);
    ok = false;
  }
  return ok;
}

}  // namespace
}  // namespace jax_fa

int main(int argc, char** argv) {
  if (argc != 3) {
    std::printf("usage: attention_cpu_fuzz FIRST_SEED COUNT\n");
    return 2;
  }
  const uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const uint64_t count = std::strtoull(argv[2], nullptr, 10);
  uint64_t failed = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) failed += !jax_fa::Run(seed);
  std::printf("attention_cpu_fuzz: %llu problems, %llu failed\n",
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(failed));
  return failed != 0;
}
