// Checks the choice of a variant, with a table written by hand.
#include "kernel_table.h"

#include <cstdio>
#include <string>

namespace jax_fa {
namespace {

int failed = 0;

void Check(bool ok, const char* what) {
  failed += !ok;
  if (!ok) std::printf("FAILED %s\n", what);
}

// ---- The table ----------------------------------------------------------------------------------

Object Named(const char* name) { return {name, nullptr, nullptr, nullptr, nullptr, 0}; }

constexpr VariantKey Key(int64_t dim, MaskClass mask, bool has_soft_cap = false,
                         DType dtype = DType::kBF16, bool is_split = false) {
  return {Operation::kForward, 90, dtype, dim, dim, mask, has_soft_cap, is_split};
}

const Variant variants[] = {
    {Key(64, MaskClass::kFull), Named("d64_full")},
    {Key(128, MaskClass::kFull), Named("d128_full")},
    {Key(128, MaskClass::kCausal), Named("d128_causal")},
    {Key(128, MaskClass::kGeneral), Named("d128_general")},
    {Key(128, MaskClass::kGeneral, true), Named("d128_general_cap")},
    {Key(128, MaskClass::kGeneral, false, DType::kBF16, true), Named("d128_general_split")},
};
constexpr Capability capabilities[] = {{90, 90}, {100, 100}, {103, 100}};

}  // namespace

const Table& KernelTable() {
  static const Table table{variants, 6, capabilities, 3};
  return table;
}

namespace {

// ---- Tests --------------------------------------------------------------------------------------

Problem Unmasked() {
  Problem problem{};
  problem.dtype = DType::kBF16;
  problem.head_dim = problem.value_dim = 128;
  problem.window_left = problem.window_right = kUnbounded;
  return problem;
}

void BandDecidesTheMaskClass() {
  const Extras none{};
  Problem problem = Unmasked();
  Check(MaskClassOf(problem, none) == MaskClass::kFull, "nothing masked");
  problem.window_right = 0;
  Check(MaskClassOf(problem, none) == MaskClass::kCausal, "causal");
  problem.bottom_right = true;
  Check(MaskClassOf(problem, none) == MaskClass::kCausal, "causal, aligned at the last key");
  problem.window_left = 100;
  Check(MaskClassOf(problem, none) == MaskClass::kGeneral, "causal window");
  problem = Unmasked();
  problem.window_right = 7;
  Check(MaskClassOf(problem, none) == MaskClass::kGeneral, "window ahead");
}

void OperandsAndSoftCapNeedTheGeneralMask() {
  const int32_t ints[1] = {};
  const float floats[1] = {};
  const int32_t* Extras::* const fields[] = {&Extras::q_lengths, &Extras::kv_lengths,
                                             &Extras::cu_seqlens_q, &Extras::q_segments,
                                             &Extras::q_offset};
  for (const auto field : fields) {
    Extras extras{};
    extras.*field = ints;
    Check(MaskClassOf(Unmasked(), extras) == MaskClass::kGeneral, "an operand of the mask");
  }
  Extras sinks{};
  sinks.sinks = floats;
  Check(MaskClassOf(Unmasked(), sinks) == MaskClass::kFull, "sinks do not mask");
  Problem capped = Unmasked();
  capped.soft_cap = 30.0f;
  Check(MaskClassOf(capped, Extras{}) == MaskClass::kGeneral, "soft cap");
}

void KeyOfACallFindsItsVariant() {
  FwdParams params{};
  params.problem = Unmasked();
  params.problem.soft_cap = 30.0f;
  const Variant* capped = FindVariant(KeyOf(params, 90));
  Check(capped != nullptr && std::string(capped->object.name) == "d128_general_cap", "soft cap");
  params.problem = Unmasked();
  const Variant* full = FindVariant(KeyOf(params, 90));
  Check(full != nullptr && std::string(full->object.name) == "d128_full", "no mask");
  params.scratch.num_splits = 1;
  Check(FindVariant(KeyOf(params, 90)) == full, "one part");
  params.scratch.num_splits = 2;
  const Variant* split = FindVariant(KeyOf(params, 90));
  Check(split != nullptr && std::string(split->object.name) == "d128_general_split", "split keys");
  params.scratch = {};
  Check(FindVariant(KeyOf(params, 100)) == nullptr, "another architecture");
  BwdParams backward{};
  backward.problem = Unmasked();
  Check(FindVariant(KeyOf(backward, 90)) == nullptr, "another operation");
}

void CapabilityDecidesTheArchitecture() {
  Check(ArchOf(90) == 90 && ArchOf(103) == 100, "compiled");
  Check(ArchOf(80) == 0, "not compiled");
}

void RefusalNamesTheNearest() {
  const std::string dims = Refusal(Key(80, MaskClass::kFull));
  Check(dims.find("sm90, bfloat16, D = 80, Dv = 80, full mask. ") != std::string::npos, "the key");
  Check(dims.find("Nearest of 6 compiled: d64_full d128_full d128_causal.") != std::string::npos,
        "same mask first");
  const std::string dtype = Refusal(Key(128, MaskClass::kCausal, false, DType::kF32));
  Check(dtype.find("compiled: d128_causal ") != std::string::npos, "same shape before same dtype");
}

}  // namespace
}  // namespace jax_fa

int main() {
  jax_fa::BandDecidesTheMaskClass();
  jax_fa::OperandsAndSoftCapNeedTheGeneralMask();
  jax_fa::KeyOfACallFindsItsVariant();
  jax_fa::CapabilityDecidesTheArchitecture();
  jax_fa::RefusalNamesTheNearest();
  std::printf("kernel_table_test: %d failed\n", jax_fa::failed);
  return jax_fa::failed != 0;
}
