// Checks the lookup of variants, with a table written by hand.
#include "kernel_table.h"

#include <cstdio>
#include <string>

#include "testing.h"

namespace jax_fa {
namespace {

// ---- The table ----------------------------------------------------------------------------------

Object Named(const char* name) { return {name, nullptr, nullptr, nullptr, nullptr, 0}; }

constexpr Takes kPlain{DType::kBF16, 128, 128, Parts::kOne, false};
constexpr Takes kSplit{DType::kBF16, 128, 128, Parts::kSeveral, false};
constexpr Takes kFew{DType::kBF16, 128, 128, Parts::kAny, false};
constexpr Takes kReader{DType::kBF16, 128, 128, Parts::kOne, true};
constexpr Takes kWriter{DType::kBF16, 128, 128, Parts::kOne, true, true};

const Variant variants[] = {
    {kPlain, Named("fwd_sm90_bf16_d128_full")},
    {kSplit, Named("fwd_sm90_bf16_d128_general_split")},
    {kPlain, Named("bwd_sm90_bf16_d128_full")},
    {kFew, Named("fwd_sm90_bf16_d128_general_few")},
    {kPlain, Named("fwd_sm103_bf16_d128_full")},
    {kFew, Named("fwd_sm100_bf16_d128_general_few")},
    {kPlain, Named("fwd_sm80_bf16_d64_full")},
    {kPlain, Named("fwd_sm80_bf16_d128_full")},
    {kPlain, Named("fwd_sm86_bf16_d128_full")},
};
constexpr Capability capabilities[] = {
    {90, "fwd", "_few", "sm90"},   {90, "fwd", "", "sm90"},   {90, "bwd", "", "sm90"},
    {100, "fwd", "", "sm100"},     {100, "bwd", "", "sm100"}, {103, "fwd", "_few", "sm100"},
    {103, "fwd", "", "sm103"},     {103, "bwd", "", "sm100"}, {80, "fwd", "", "sm80"},
    {86, "fwd", "_d128_", "sm86"}, {86, "fwd", "", "sm80"},
};

}  // namespace

const Table& KernelTable() {
  static const Table table{variants, 9, capabilities, 11};
  return table;
}

namespace {

// ---- Tests --------------------------------------------------------------------------------------

std::string Found(const char* operation, int32_t capability, const char* kernel) {
  const Lookup found = FindVariant(operation, capability, kernel);
  return found.variant == nullptr ? "" : found.variant->object.name;
}

void OperationCapabilityAndKernelNameAVariant() {
  Check(Found("fwd", 90, "bf16_d128_full") == "fwd_sm90_bf16_d128_full", "forward");
  Check(Found("bwd", 90, "bf16_d128_full") == "bwd_sm90_bf16_d128_full", "backward");
  Check(Found("fwd", 90, "bf16_d128_general_few") == "fwd_sm90_bf16_d128_general_few", "few");
  Check(Found("fwd", 100, "bf16_d128_full").empty(), "of another family alone");
  Check(Found("fwd", 90, "bf16_d128").empty(), "a part of the name");
  Check(Found("fwd", 90, "").empty(), "no name");
}

void AFamilyRunsKernelsOfAnotherByWhatTheirNamesSay() {
  Check(Found("fwd", 80, "bf16_d128_full") == "fwd_sm80_bf16_d128_full", "the lender's");
  Check(Found("fwd", 86, "bf16_d128_full") == "fwd_sm86_bf16_d128_full", "heads of its own");
  Check(Found("fwd", 86, "bf16_d64_full") == "fwd_sm80_bf16_d64_full", "heads that it borrows");
  Check(Found("fwd", 103, "bf16_d128_full") == "fwd_sm103_bf16_d128_full", "its own");
  Check(Found("fwd", 103, "bf16_d128_general_few") == "fwd_sm100_bf16_d128_general_few", "other");
  const auto complaint = [](const char* operation, int32_t capability) {
    return FindVariant(operation, capability, "bf16_d64_full").complaint;
  };
  Check(complaint("bwd", 103).find("bwd_sm100_bf16_d64_full") != std::string::npos, "backward");
  Check(complaint("fwd", 75) == "no kernels are compiled for GPUs of compute capability 7.5",
        "not compiled");
}

void ComplaintsSayWhatToDo() {
  const std::string missing = FindVariant("fwd", 90, "bf16_d80_full").complaint;
  Check(missing.find("fwd_sm90_bf16_d80_full, which is not among the 9 of this build. Lower it "
                     "again") != std::string::npos,
        missing.c_str());
  const std::string older = FindVariant("fwd", 90, "").complaint;
  Check(older.find("extension had version 1. Lower and export it again") != std::string::npos,
        older.c_str());
}

void AVariantTakesWhatItWasCompiledFor() {
  Problem problem{};
  problem.dtype = DType::kBF16;
  problem.head_dim = problem.value_dim = 128;
  Check(!Mismatch(variants[0], problem), "fits");
  problem.num_splits = 1;
  Check(!Mismatch(variants[0], problem), "one part is none");
  problem.num_splits = 2;
  Check(!Mismatch(variants[1], problem), "split keys");
  Check(!Mismatch(variants[3], problem), "keys that may be split");
  Check(Mismatch(variants[0], problem) ==
            "fwd_sm90_bf16_d128_full takes bfloat16, D = 128, Dv = 128 (or heads of 8 columns, 16, "
            "24, ... below), but is called with "
            "bfloat16, D = 128, Dv = 128, split keys",
        "splits it does not take");
  problem.num_splits = 0;
  Check(Mismatch(variants[1], problem).has_value(), "splits it needs");
  Check(!Mismatch(variants[3], problem), "splits it does not need");
  for (int64_t Problem::* const field : {&Problem::head_dim, &Problem::value_dim}) {
    Problem other = problem;
    other.*field = 136;
    Check(Mismatch(variants[0], other).has_value(), "a head size");
  }
  Problem narrow = problem;
  narrow.head_dim = 72, narrow.value_dim = 8;
  Check(!Mismatch(variants[3], narrow), "narrow heads");
  narrow.dq_dim = 128;
  Check(!Mismatch(variants[3], narrow), "scratch of the kernel's head size");
  narrow.dq_dim = 72;
  Check(Mismatch(variants[3], narrow).has_value(), "scratch of another");
  narrow.dq_dim = 0, narrow.head_dim = 68;
  Check(Mismatch(variants[3], narrow).has_value(), "heads between the steps");
  narrow.head_dim = 136;
  Check(Mismatch(variants[3], narrow).has_value(), "heads that are too large");
  problem.bias_bytes = 2;
  Check(Mismatch(variants[0], problem).has_value(), "a bias it does not read");
  const Variant reader{kReader, Named("reader")}, writer{kWriter, Named("writer")};
  Check(!Mismatch(reader, problem) && !Mismatch(writer, problem), "a bias without its gradient");
  problem.gives_dbias = true;
  Check(!Mismatch(writer, problem), "the gradient of a bias");
  Check(Mismatch(reader, problem) == "reader does not give the gradient of a bias (dbias)",
        "a gradient that it does not give");
  problem.gives_dbias = false;
  problem.bias_bytes = 0;
  problem.dtype = DType::kF16;
  Check(Mismatch(variants[0], problem).has_value(), "an element type");
}

}  // namespace
}  // namespace jax_fa

int main() {
  jax_fa::OperationCapabilityAndKernelNameAVariant();
  jax_fa::AFamilyRunsKernelsOfAnotherByWhatTheirNamesSay();
  jax_fa::ComplaintsSayWhatToDo();
  jax_fa::AVariantTakesWhatItWasCompiledFor();
  std::printf("kernel_table_test: %d failed\n", jax_fa::failed);
  return jax_fa::failed != 0;
}
