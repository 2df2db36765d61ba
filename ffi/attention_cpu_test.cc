// Checks the CPU kernels of every instruction set of this machine against a naive reference in
// double precision, and the gradients of that reference against finite differences.
#include "attention_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention_cpu_tensor.h"

namespace jax_fa {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

int passed = 0;
int failed = 0;

void Check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAILED [%s] %s\n", CpuIsa(), what.c_str());
}

ParallelFor Threads(int num_threads) {
  return [num_threads](int64_t count, const std::function<void(int64_t)>& body) {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t i = next++; i < count; i = next++) body(i);
    };
    std::vector<std::thread> threads;
    for (int t = 1; t < num_threads; ++t) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
  };
}

// ---- One problem with its operands --------------------------------------------------------------

struct Case {
  std::string name;
  Problem problem{};
  std::vector<int32_t> q_lengths, kv_lengths, cu_q, cu_k, q_segments, kv_segments, q_offset;
  std::vector<float> sinks;
  std::vector<float> dlse;
  std::vector<double> q, k, v, dout, bias;

  bool IsPacked() const { return !cu_q.empty(); }
  int64_t QTokens() const { return problem.batch * problem.q_len; }
  int64_t KvTokens() const { return problem.batch * problem.kv_len; }
  int64_t QRows() const { return QTokens() * problem.num_q_heads; }
  int64_t KvRows() const { return KvTokens() * problem.num_kv_heads; }

  Extras extras() const {
    const auto at = [](const std::vector<int32_t>& x) { return x.empty() ? nullptr : x.data(); };
    return {at(q_lengths),  at(kv_lengths),  at(cu_q),     at(cu_k),
            at(q_segments), at(kv_segments), at(q_offset), sinks.empty() ? nullptr : sinks.data(),
            nullptr,        nullptr,         nullptr};
  }
  DType BiasType() const { return problem.bias_bytes == 4 ? DType::kF32 : problem.dtype; }
  // Where the bias of a pair is.
  int64_t BiasAt(int64_t m, int64_t head, int64_t i, int64_t j) const {
    const Problem& p = problem;
    const auto index = [](int64_t extent, int64_t x) { return extent == 1 ? 0 : x; };
    const int64_t slice = index(p.bias_batch, m) * p.bias_heads + index(p.bias_heads, head);
    return (slice * p.bias_rows + index(p.bias_rows, i)) * p.bias_keys + index(p.bias_keys, j);
  }
};

struct Span {
  int64_t first;
  int64_t used;
};

Span QuerySpan(const Case& c, int64_t m) {
  const int64_t first = c.IsPacked() ? c.cu_q[m] : m * c.problem.q_len;
  const int64_t size = c.IsPacked() ? c.cu_q[m + 1] - first : c.problem.q_len;
  if (c.q_lengths.empty()) return {first, size};
  return {first, std::min<int64_t>(size, std::max(0, c.q_lengths[m]))};
}

Span KeySpan(const Case& c, int64_t m) {
  const int64_t first = c.IsPacked() ? c.cu_k[m] : m * c.problem.kv_len;
  const int64_t size = c.IsPacked() ? c.cu_k[m + 1] - first : c.problem.kv_len;
  if (c.kv_lengths.empty()) return {first, size};
  return {first, std::min<int64_t>(size, std::max(0, c.kv_lengths[m]))};
}

// The rule, written down a second time and without any cleverness.
bool Sees(const Case& c, int64_t m, int64_t i, int64_t j) {
  const Span q = QuerySpan(c, m);
  const Span kv = KeySpan(c, m);
  if (i >= q.used || j >= kv.used) return false;
  int64_t diagonal = i + (c.q_offset.empty() ? 0 : c.q_offset[m]);
  if (c.problem.bottom_right) diagonal += kv.used - q.used;
  if (c.problem.window_left != kUnbounded && j < diagonal - c.problem.window_left) return false;
  if (c.problem.window_right != kUnbounded && j > diagonal + c.problem.window_right) return false;
  return c.q_segments.empty() || c.q_segments[q.first + i] == c.kv_segments[kv.first + j];
}

struct Results {
  std::vector<double> out, lse, dq, dk, dv, dsinks, dbias;
};

double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

// One row of attention and its gradients, straight from the definitions.
void ReferenceRow(const Case& c, int64_t m, int64_t i, int64_t head, Results* r) {
  const Problem& p = c.problem;
  const int64_t D = p.head_dim, Dv = p.value_dim;
  const int64_t kv_head = head / (p.num_q_heads / p.num_kv_heads);
  const Span kv = KeySpan(c, m);
  const int64_t row = (QuerySpan(c, m).first + i) * p.num_q_heads + head;
  const auto key_row = [&](int64_t j) { return (kv.first + j) * p.num_kv_heads + kv_head; };

  std::vector<int64_t> keys;
  for (int64_t j = 0; j < kv.used; ++j) {
    const bool is_shown = c.bias.empty() || c.bias[c.BiasAt(m, head, i, j)] != -kInf;
    if (is_shown && Sees(c, m, i, j)) keys.push_back(j);
  }
  const double sink = c.sinks.empty() ? -kInf : c.sinks[m * p.num_q_heads + head];
  std::vector<double> z(keys.size()), slope(keys.size(), 1.0);
  double max = sink;
  for (size_t a = 0; a < keys.size(); ++a) {
    z[a] = p.scale * Dot(&c.q[row * D], &c.k[key_row(keys[a]) * D], D);
    if (!c.bias.empty()) z[a] += c.bias[c.BiasAt(m, head, i, keys[a])];
    if (p.soft_cap > 0) {
      const double t = std::tanh(z[a] / p.soft_cap);
      z[a] = p.soft_cap * t;
      slope[a] = 1 - t * t;
    }
    max = std::max(max, z[a]);
  }
  if (max == -kInf) return;
  double sum = std::exp(sink - max);
  for (double x : z) sum += std::exp(x - max);
  const double lse = max + std::log(sum);
  r->lse[row] = lse;
  double* out = &r->out[row * Dv];
  for (size_t a = 0; a < keys.size(); ++a) {
    for (int64_t d = 0; d < Dv; ++d) {
      out[d] += std::exp(z[a] - lse) * c.v[key_row(keys[a]) * Dv + d];
    }
  }

  const double* dout = &c.dout[row * Dv];
  const double delta = Dot(dout, out, Dv) - (c.dlse.empty() ? 0 : c.dlse[row]);
  if (!c.sinks.empty()) r->dsinks[m * p.num_q_heads + head] -= std::exp(sink - lse) * delta;
  for (size_t a = 0; a < keys.size(); ++a) {
    const int64_t key = key_row(keys[a]);
    const double prob = std::exp(z[a] - lse);
    const double dz = slope[a] * prob * (Dot(dout, &c.v[key * Dv], Dv) - delta);
    if (!c.bias.empty()) r->dbias[c.BiasAt(m, head, i, keys[a])] += dz;
    const double ds = p.scale * dz;
    for (int64_t d = 0; d < D; ++d) {
      r->dq[row * D + d] += ds * c.k[key * D + d];
      r->dk[key * D + d] += ds * c.q[row * D + d];
    }
    for (int64_t d = 0; d < Dv; ++d) r->dv[key * Dv + d] += prob * dout[d];
  }
}

Results Reference(const Case& c) {
  const Problem& p = c.problem;
  Results r;
  r.out.assign(c.QRows() * p.value_dim, 0);
  r.lse.assign(c.QRows(), -kInf);
  r.dq.assign(c.QRows() * p.head_dim, 0);
  r.dk.assign(c.KvRows() * p.head_dim, 0);
  r.dv.assign(c.KvRows() * p.value_dim, 0);
  r.dsinks.assign(c.sinks.size(), 0);
  r.dbias.assign(c.bias.size(), 0);
  for (int64_t m = 0; m < p.num_sequences; ++m) {
    for (int64_t i = 0; i < QuerySpan(c, m).used; ++i) {
      for (int64_t head = 0; head < p.num_q_heads; ++head) ReferenceRow(c, m, i, head, &r);
    }
  }
  return r;
}

// ---- Running the kernels ------------------------------------------------------------------------

// Which tokens some sequence uses; the others hold NaN when the kernels run.
std::vector<bool> Used(const Case& c, bool queries) {
  std::vector<bool> used(queries ? c.QTokens() : c.KvTokens());
  for (int64_t m = 0; m < c.problem.num_sequences; ++m) {
    const Span span = queries ? QuerySpan(c, m) : KeySpan(c, m);
    for (int64_t i = 0; i < span.used; ++i) used[span.first + i] = true;
  }
  return used;
}

Tensor Store(const Case& c, const std::vector<double>& values, bool queries) {
  const std::vector<bool> used = Used(c, queries);
  Tensor tensor(c.problem.dtype, values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (used[i / (values.size() / used.size())]) tensor.Set(i, values[i]);
  }
  return tensor;
}

struct KernelResults {
  Tensor out, dq, dk, dv, dbias;
  std::vector<float> lse, dsinks;
};

Tensor Rounded(DType dtype, const std::vector<double>& values) {
  Tensor tensor(dtype, values.size());
  for (size_t i = 0; i < values.size(); ++i) tensor.Set(i, values[i]);
  return tensor;
}

// What the gradient of a bias takes of a backward; NaN in rows that nobody uses.
std::vector<float> Delta(const Case& c, const Tensor& out, const Tensor& dout,
                         const std::vector<float>& dlse) {
  const int64_t width = c.problem.value_dim;
  std::vector<float> delta(c.QRows(), 0.0f);
  for (int64_t row = 0; row < c.QRows(); ++row) {
    for (int64_t d = 0; d < width; ++d) delta[row] += out[row * width + d] * dout[row * width + d];
    if (!dlse.empty()) delta[row] -= dlse[row];
  }
  return delta;
}

KernelResults RunKernels(const Case& c, int num_threads = 2) {
  const Problem& p = c.problem;
  const Tensor q = Store(c, c.q, true), k = Store(c, c.k, false), v = Store(c, c.v, false);
  const Tensor dout = Store(c, c.dout, true);
  const Tensor bias = Rounded(c.BiasType(), c.bias);
  Extras extras = c.extras();
  extras.bias = c.bias.empty() ? nullptr : bias.bytes.data();
  KernelResults r = {Tensor(p.dtype, c.dout.size()),
                     Tensor(p.dtype, c.q.size()),
                     Tensor(p.dtype, c.k.size()),
                     Tensor(p.dtype, c.v.size()),
                     Tensor(c.BiasType(), c.bias.size()),
                     std::vector<float>(c.QRows(), kNan),
                     std::vector<float>(c.sinks.size(), kNan)};
  AttentionForwardCpu(
      {p, extras, q.bytes.data(), k.bytes.data(), v.bytes.data(), r.out.bytes.data(), r.lse.data()},
      Threads(num_threads));

  const std::vector<bool> used = Used(c, true);
  Tensor out = r.out;
  std::vector<float> lse = r.lse, dlse = c.dlse;
  for (int64_t row = 0; row < c.QRows(); ++row) {
    if (used[row / p.num_q_heads]) continue;
    for (int64_t d = 0; d < p.value_dim; ++d) out.Set(row * p.value_dim + d, kNan);
    lse[row] = kNan;
    if (!dlse.empty()) dlse[row] = kNan;
  }
  BwdParams backward{};
  backward.problem = p;
  backward.extras = extras;
  backward.q = q.bytes.data();
  backward.k = k.bytes.data();
  backward.v = v.bytes.data();
  backward.out = out.bytes.data();
  backward.lse = lse.data();
  backward.dout = dout.bytes.data();
  backward.dlse = dlse.empty() ? nullptr : dlse.data();
  backward.dq = r.dq.bytes.data();
  backward.dk = r.dk.bytes.data();
  backward.dv = r.dv.bytes.data();
  backward.dsinks = c.sinks.empty() ? nullptr : r.dsinks.data();
  AttentionBackwardCpu(backward, Threads(num_threads));
  if (c.bias.empty()) return r;
  const std::vector<float> delta = Delta(c, out, dout, dlse);
  DbiasParams of_bias{};
  of_bias.problem = p;
  of_bias.extras = extras;
  of_bias.q = q.bytes.data();
  of_bias.k = k.bytes.data();
  of_bias.v = v.bytes.data();
  of_bias.lse = lse.data();
  of_bias.dout = dout.bytes.data();
  of_bias.delta = delta.data();
  of_bias.dbias = r.dbias.bytes.data();
  AttentionBiasGradientCpu(of_bias, Threads(num_threads));
  return r;
}

std::vector<double> Doubles(const std::vector<float>& x) { return {x.begin(), x.end()}; }

// Errors are measured against the largest element; NaN or infinity must match exactly.
void CheckClose(const Case& c, const char* what, const std::vector<double>& got,
                const std::vector<double>& want, double tolerance) {
  double largest = 1;
  for (double x : want) {
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  }
  for (size_t i = 0; i < want.size(); ++i) {
    const bool same = got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]));
    if (same || std::fabs(got[i] - want[i]) <= tolerance * largest) continue;
    char text[160];
    std::snprintf(text, sizeof(text), " %s[%zu]: got %g, want %g", what, i, got[i], want[i]);
    return Check(false, c.name + text);
  }
  Check(true, c.name);
}

void CheckCase(const Case& c) {
  const double tolerance = c.problem.dtype == DType::kF32    ? 1e-5
                           : c.problem.dtype == DType::kBF16 ? 1.5e-2
                                                             : 2e-3;
  const Results want = Reference(c);
  const KernelResults got = RunKernels(c);
  CheckClose(c, "out", Doubles(got.out), want.out, tolerance);
  CheckClose(c, "lse", Doubles(got.lse), want.lse, 1e-5);
  CheckClose(c, "dq", Doubles(got.dq), want.dq, tolerance);
  CheckClose(c, "dk", Doubles(got.dk), want.dk, tolerance);
  CheckClose(c, "dv", Doubles(got.dv), want.dv, tolerance);
  CheckClose(c, "dsinks", Doubles(got.dsinks), want.dsinks, tolerance);
  const double pairs = static_cast<double>(c.QRows()) * c.problem.kv_len;
  const double terms = std::max(1.0, pairs / std::max<size_t>(c.bias.size(), 1));
  CheckClose(c, "dbias", Doubles(got.dbias), want.dbias, tolerance * std::sqrt(terms));
}

// ---- Cases --------------------------------------------------------------------------------------

struct Random {
  std::mt19937 engine;

  explicit Random(unsigned seed) : engine(seed) {}
  int Int(int lo, int hi) { return lo + static_cast<int>(engine() % (hi - lo + 1)); }
  bool Maybe(int percent) { return Int(0, 99) < percent; }
  double Normal() { return std::normal_distribution<double>()(engine); }
  std::vector<int32_t> Ints(int64_t count, int lo, int hi) {
    std::vector<int32_t> values(count);
    for (int32_t& x : values) x = Int(lo, hi);
    return values;
  }
  // Representable in the element type, so that the reference sees what the kernels see.
  std::vector<double> Normals(DType dtype, int64_t count) {
    Tensor tensor(dtype, count);
    for (int64_t i = 0; i < count; ++i) tensor.Set(i, static_cast<float>(Normal()));
    return Doubles(tensor);
  }
};

// Full attention without extras.
Case PlainCase(DType dtype, int64_t batch, int64_t q_len, int64_t kv_len, int64_t heads,
               int64_t kv_heads, int64_t dim, int64_t value_dim) {
  Case c;
  Problem& p = c.problem;
  p.dtype = dtype;
  p.batch = batch;
  p.num_sequences = batch;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.num_q_heads = heads;
  p.num_kv_heads = kv_heads;
  p.head_dim = dim;
  p.value_dim = value_dim;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  p.window_left = kUnbounded;
  p.window_right = kUnbounded;
  p.deterministic = true;
  return c;
}

void FillOperands(Random& random, Case* c) {
  const Problem& p = c->problem;
  c->q = random.Normals(p.dtype, c->QRows() * p.head_dim);
  c->k = random.Normals(p.dtype, c->KvRows() * p.head_dim);
  c->v = random.Normals(p.dtype, c->KvRows() * p.value_dim);
  c->dout = random.Normals(p.dtype, c->QRows() * p.value_dim);
}

// A bias that is the same along some dimensions, and hides some pairs.
void AddBias(Random& random, Case* c) {
  Problem& p = c->problem;
  p.bias_batch = random.Maybe(50) ? 1 : p.batch;
  p.bias_heads = random.Maybe(50) ? 1 : p.num_q_heads;
  p.bias_rows = random.Maybe(40) ? 1 : p.q_len;
  p.bias_keys = random.Maybe(40) ? 1 : p.kv_len;
  p.bias_bytes = p.dtype == DType::kF32 || random.Maybe(40) ? 4 : 2;
  c->bias = random.Normals(c->BiasType(), p.bias_batch * p.bias_heads * p.bias_rows * p.bias_keys);
  for (double& x : c->bias) x = random.Maybe(10) ? -kInf : x;
}

// Borders of packed slots: some empty, tokens before the first and after the last in no slot.
std::vector<int32_t> Borders(Random& random, int slots, int total) {
  std::vector<int32_t> borders = random.Ints(slots + 1, 0, total);
  std::sort(borders.begin(), borders.end());
  return borders;
}

Case RandomCase(unsigned seed, int max_len) {
  Random random(seed);
  const bool is_packed = random.Maybe(25);
  const int kv_heads = random.Int(1, 2);
  const int dim = random.Int(1, 40);
  Case c = PlainCase(static_cast<DType>(random.Maybe(60) ? 0 : random.Int(1, 2)),
                     is_packed ? 1 : random.Int(1, 3), random.Int(1, max_len),
                     random.Int(1, max_len), kv_heads * random.Int(1, 3), kv_heads, dim,
                     random.Maybe(50) ? dim : random.Int(1, 40));
  Problem& p = c.problem;
  c.name = "random case " + std::to_string(seed);
  if (is_packed) {
    p.num_sequences = random.Int(1, 4);
    c.cu_q = Borders(random, p.num_sequences, p.q_len);
    c.cu_k = Borders(random, p.num_sequences, p.kv_len);
  }
  if (random.Maybe(30)) p.window_left = random.Int(0, max_len / 2);
  if (random.Maybe(50)) p.window_right = random.Maybe(60) ? 0 : random.Int(-3, max_len / 2);
  p.bottom_right = random.Maybe(30);
  if (random.Maybe(25)) p.soft_cap = 0.5f + random.Int(0, 5);
  if (random.Maybe(30)) c.q_lengths = random.Ints(p.num_sequences, -2, p.q_len + 2);
  if (random.Maybe(30)) c.kv_lengths = random.Ints(p.num_sequences, -2, p.kv_len + 2);
  if (random.Maybe(30)) c.q_offset = random.Ints(p.num_sequences, -max_len / 2, max_len / 2);
  if (random.Maybe(25)) {
    const int kinds = random.Int(0, 3);
    c.q_segments = random.Ints(c.QTokens(), 0, kinds);
    c.kv_segments = random.Ints(c.KvTokens(), 0, kinds);
    if (random.Maybe(50)) {
      std::sort(c.q_segments.begin(), c.q_segments.end());
      std::sort(c.kv_segments.begin(), c.kv_segments.end());
    }
  }
  if (random.Maybe(30)) {
    for (int i = 0; i < p.num_sequences * p.num_q_heads; ++i) {
      c.sinks.push_back(random.Maybe(10) ? -kInf : random.Normal());
    }
  }
  if (random.Maybe(40)) {
    for (int i = 0; i < c.QRows(); ++i) c.dlse.push_back(random.Normal());
  }
  if (!is_packed && random.Maybe(40)) AddBias(random, &c);
  FillOperands(random, &c);
  return c;
}

// ---- Tests --------------------------------------------------------------------------------------

void TestReferenceAgainstFiniteDifferences() {
  for (unsigned seed = 0; seed < 120; ++seed) {
    Case c = RandomCase(seed, 8);
    const auto loss = [&c] {
      const Results r = Reference(c);
      double sum = 0;
      for (size_t i = 0; i < r.out.size(); ++i) sum += r.out[i] * c.dout[i];
      for (size_t i = 0; i < c.dlse.size(); ++i) {
        if (r.lse[i] != -kInf) sum += r.lse[i] * c.dlse[i];
      }
      return sum;
    };
    const auto difference = [&loss](auto* x, double step) {
      const auto value = *x;
      *x = value + step;
      const double above = loss();
      *x = value - step;
      const double below = loss();
      *x = value;
      return (above - below) / (2 * step);
    };
    const Results r = Reference(c);
    Random random(seed);
    const auto check = [&](auto& operand, const std::vector<double>& gradient, double step) {
      for (int sample = 0; sample < 6; ++sample) {
        const int i = random.Int(0, operand.size() - 1);
        if (!std::isfinite(operand[i])) continue;
        const double want = difference(&operand[i], step);
        Check(std::fabs(want - gradient[i]) < 2e-5 * std::max(1.0, std::fabs(want)),
              c.name + ": finite difference");
      }
    };
    check(c.q, r.dq, 1e-5);
    check(c.k, r.dk, 1e-5);
    check(c.v, r.dv, 1e-5);
    if (!c.bias.empty()) check(c.bias, r.dbias, 1e-5);
    // Sinks are float32: the step must be one that float32 can take exactly.
    for (float& sink : c.sinks) sink = std::round(sink * 64) / 64;
    if (!c.sinks.empty()) check(c.sinks, Reference(c).dsinks, std::ldexp(1.0, -13));
  }
}

void TestRandomCases() {
  for (unsigned seed = 0; seed < 200; ++seed) CheckCase(RandomCase(seed, 40));
  for (unsigned seed = 1000; seed < 1030; ++seed) CheckCase(RandomCase(seed, 250));
}

void TestManyTiles() {
  Random random(1);
  for (const bool causal : {false, true}) {
    Case c = PlainCase(DType::kF32, 1, 333, 411, 4, 2, 64, 48);
    c.name = "many tiles";
    c.problem.window_right = causal ? 0 : kUnbounded;
    c.problem.bottom_right = true;
    FillOperands(random, &c);
    CheckCase(c);
    for (int i = 0; i < 4; ++i) {
      AddBias(random, &c);
      CheckCase(c);
    }
  }
  Case wide = PlainCase(DType::kBF16, 1, 70, 130, 1, 1, 320, 512);
  wide.name = "wide heads";
  FillOperands(random, &wide);
  CheckCase(wide);
}

void TestEmptyExtents() {
  Random random(2);
  const int64_t extents[][3] = {{0, 3, 3}, {2, 0, 3}, {2, 3, 0}, {1, 0, 0}};
  for (const auto& extent : extents) {
    Case c = PlainCase(DType::kF32, extent[0], extent[1], extent[2], 2, 1, 4, 4);
    c.name = "empty extents";
    c.sinks.assign(c.problem.num_sequences * 2, 0.5f);
    FillOperands(random, &c);
    CheckCase(c);
  }
}

void TestRepeatableForAnyNumberOfThreads() {
  Random random(3);
  Case c = PlainCase(DType::kF32, 2, 300, 300, 4, 2, 32, 32);
  c.problem.window_right = 0;
  c.sinks.assign(8, 0.1f);
  FillOperands(random, &c);
  AddBias(random, &c);
  const KernelResults one = RunKernels(c, 1);
  for (int num_threads : {2, 3, 7}) {
    const KernelResults many = RunKernels(c, num_threads);
    Check(one.out.bytes == many.out.bytes && one.lse == many.lse && one.dsinks == many.dsinks &&
              one.dq.bytes == many.dq.bytes && one.dk.bytes == many.dk.bytes &&
              one.dv.bytes == many.dv.bytes && one.dbias.bytes == many.dbias.bytes,
          "same bits with 1 and " + std::to_string(num_threads) + " threads");
  }
}

// p = 1 for a single key, so out = v: every 16-bit number must come back, NaN as NaN.
void TestHalvesComeBack() {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    Case c = PlainCase(dtype, 1, 1, 1, 1, 1, 1, 65536);
    Tensor v(dtype, 65536), out(dtype, 65536);
    for (int i = 0; i < 65536; ++i) {
      const uint16_t half = i;
      std::memcpy(&v.bytes[2 * i], &half, 2);
    }
    const Tensor qk(dtype, 1, 1.0f);
    float lse = 0;
    AttentionForwardCpu({c.problem, c.extras(), qk.bytes.data(), qk.bytes.data(), v.bytes.data(),
                         out.bytes.data(), &lse},
                        Threads(1));
    int wrong = 0;
    for (int i = 0; i < 65536; ++i) {
      // Accumulation starts from +0, which makes -0 a +0.
      wrong += !(out[i] == v[i] || (std::isnan(out[i]) && std::isnan(v[i])));
    }
    Check(wrong == 0, "16-bit numbers come back: " + std::to_string(wrong) + " wrong");
  }
}

// Two keys of equal weight: out = (a + b) / 2, which needs rounding.
void TestHalvesRoundToNearestEven() {
  Random random(4);
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    const int count = 20000;
    Case c = PlainCase(dtype, 1, 1, 2, 1, 1, 1, count);
    const Tensor q(dtype, 1, 0.0f), k(dtype, 2, 1.0f);
    Tensor v(dtype, 2 * count), out(dtype, count), want(dtype, count);
    for (int i = 0; i < count; ++i) {
      const int exponent = random.Int(-26, 14);
      v.Set(i, std::ldexp(static_cast<float>(random.Normal()), exponent));
      v.Set(count + i, std::ldexp(static_cast<float>(random.Normal()), exponent));
      want.Set(i, 0.5f * v[i] + 0.5f * v[count + i]);
    }
    float lse = 0;
    AttentionForwardCpu({c.problem, c.extras(), q.bytes.data(), k.bytes.data(), v.bytes.data(),
                         out.bytes.data(), &lse},
                        Threads(1));
    int wrong = 0;
    for (int i = 0; i < count; ++i) wrong += out[i] != want[i];
    Check(wrong == 0, "rounding to 16 bits: " + std::to_string(wrong) + " wrong");
  }
}

// Causal, 40 rows; row and key 20 hold NaN. What cannot see them must not change.
void TestNanStaysWhereItIsVisible() {
  Random random(5);
  Case clean = PlainCase(DType::kF32, 1, 40, 40, 1, 1, 8, 8);
  clean.problem.window_right = 0;
  FillOperands(random, &clean);
  const KernelResults want = RunKernels(clean);
  const auto is_nan = [](const Tensor& x, int row) { return std::isnan(x[row * 8]); };
  for (int operand = 0; operand < 4; ++operand) {
    Case c = clean;
    std::vector<double>* operands[] = {&c.q, &c.k, &c.v, &c.dout};
    for (int d = 0; d < 8; ++d) (*operands[operand])[20 * 8 + d] = kNan;
    const KernelResults got = RunKernels(c);
    const bool is_key = operand == 1 || operand == 2;
    bool ok = true;
    for (int row = 0; row < 40; ++row) {
      const bool tainted = is_key ? row >= 20 : row == 20;
      ok &= is_nan(got.out, row) == (tainted && operand != 3);
      ok &= is_nan(got.dq, row) == tainted;
      if (!tainted) {
        ok &= std::fabs(got.out[row * 8] - want.out[row * 8]) < 1e-5;
        ok &= std::fabs(got.dq[row * 8] - want.dq[row * 8]) < 1e-5;
      }
      // A NaN in q or dout of row 20 reaches the keys it sees; one in a key reaches the rows that
      // see it and through them all their keys.
      const bool key_tainted = is_key || row <= 20;
      ok &= is_nan(got.dk, row) == key_tainted;
      if (!key_tainted) ok &= std::fabs(got.dk[row * 8] - want.dk[row * 8]) < 1e-5;
      if (!key_tainted) ok &= std::fabs(got.dv[row * 8] - want.dv[row * 8]) < 1e-5;
    }
    Check(ok, "NaN in operand " + std::to_string(operand));
  }
}

void TestExtremeLogits() {
  Random random(6);
  for (const double size : {1e2, 1e10, 1e18}) {
    Case c = PlainCase(DType::kF32, 1, 20, 50, 1, 1, 4, 4);
    FillOperands(random, &c);
    for (double& x : c.q) x *= size;
    for (double& x : c.k) x *= size;
    const KernelResults got = RunKernels(c);
    bool finite = true;
    for (int64_t i = 0; i < got.out.size(); ++i) finite &= std::isfinite(got.out[i]);
    for (float x : got.lse) finite &= std::isfinite(x);
    Check(finite, "large logits give finite results");
  }
  // Every logit -inf: as if no key were visible. Some: as if those were not.
  Case c = PlainCase(DType::kF32, 1, 1, 2, 1, 1, 1, 1);
  c.dout = {1};
  c.q = {1};
  c.v = {2, 3};
  c.k = {-kInf, -kInf};
  const KernelResults none = RunKernels(c);
  Check(none.out[0] == 0 && none.lse[0] == -kInf, "all logits -inf");
  c.k = {0, -kInf};
  const KernelResults one = RunKernels(c);
  Check(one.out[0] == 2 && one.lse[0] == 0, "one logit -inf");
}

// Logits of some hundreds: what the LSE loses by being float32 moves all probabilities of its row,
// by 0.9e-5 (root mean square) at |lse| = 256 to 512. Nothing else may move them as much.
void TestLargeLogitsLoseLittleMoreThanTheirLse() {
  Random random(9);
  Case c = PlainCase(DType::kF32, 1, 96, 160, 2, 2, 64, 64);
  c.problem.scale = 12.5f;
  FillOperands(random, &c);
  const std::vector<double> want = Reference(c).dv, got = Doubles(RunKernels(c).dv);
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(got[i] - want[i], 2);
    size += std::pow(want[i], 2);
  }
  char text[80];
  std::snprintf(text, sizeof text, "large logits: dv is off by %.2g", std::sqrt(error / size));
  Check(std::sqrt(error / size) < 1.2e-5, text);
}

// An LSE of -1e9 has units of 64. What that does to probabilities must stay below 1.
void TestRowsOfVeryLowBiasKeepFiniteGradients() {
  Random random(11);
  Case c = PlainCase(DType::kF32, 1, 40, 60, 2, 1, 16, 16);
  FillOperands(random, &c);
  c.problem.bias_batch = c.problem.bias_heads = c.problem.bias_rows = c.problem.bias_keys = 1;
  c.problem.bias_bytes = 4;
  for (const double low : {-1e9, -3e9, -1.7e38}) {
    c.bias = {low};
    const KernelResults r = RunKernels(c);
    bool is_small = true;
    for (const Tensor* x : {&r.dq, &r.dk, &r.dv, &r.dbias}) {
      for (double value : Doubles(*x)) is_small = is_small && std::fabs(value) < 1e5;
    }
    Check(is_small, "gradients of rows with a very low bias");
  }
}

void TestUnboundedSidesIgnoreOffset() {
  Random random(7);
  Case c = PlainCase(DType::kF32, 1, 3, 5, 1, 1, 4, 4);
  FillOperands(random, &c);
  c.problem.window_right = 0;
  c.q_offset = {std::numeric_limits<int32_t>::max()};
  CheckCase(c);
}

void TestBrokenBordersStayInBounds() {
  Random random(8);
  Case c = PlainCase(DType::kF32, 1, 6, 6, 1, 1, 2, 2);
  FillOperands(random, &c);
  c.problem.num_sequences = 3;
  const Case ordered = c;
  std::vector<float> out(12, kNan), lse(6, kNan);
  const int32_t borders[] = {-5, 4, 2, 99};
  Extras extras = ordered.extras();
  extras.cu_seqlens_q = extras.cu_seqlens_k = borders;
  const Tensor q = Store(c, c.q, true);
  AttentionForwardCpu(
      {c.problem, extras, q.bytes.data(), q.bytes.data(), q.bytes.data(), out.data(), lse.data()},
      Threads(1));
  bool written = true;
  for (float x : out) written &= !std::isnan(x);
  for (float x : lse) written &= !std::isnan(x);
  Check(written, "borders out of order");
}

int Main() {
  TestReferenceAgainstFiniteDifferences();
  for (const char* isa : {"avx512", "avx2", "neon", "portable"}) {
    if (!ForceCpuIsa(isa)) continue;
    Check(std::strcmp(CpuIsa(), isa) == 0, "forced instruction set");
    TestRandomCases();
    TestManyTiles();
    TestEmptyExtents();
    TestRepeatableForAnyNumberOfThreads();
    TestHalvesComeBack();
    TestHalvesRoundToNearestEven();
    TestNanStaysWhereItIsVisible();
    TestExtremeLogits();
    TestLargeLogitsLoseLittleMoreThanTheirLse();
    TestRowsOfVeryLowBiasKeepFiniteGradients();
    TestUnboundedSidesIgnoreOffset();
    TestBrokenBordersStayInBounds();
    std::printf("tested %s\n", isa);
  }
  Check(!ForceCpuIsa("abacus"), "unknown instruction set");
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_fa

int main() { return jax_fa::Main(); }
