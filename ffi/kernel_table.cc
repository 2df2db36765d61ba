#include "kernel_table.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace jax_fa {
namespace {

auto Tie(const VariantKey& key) {
  return std::tie(key.operation, key.arch, key.dtype, key.head_dim, key.value_dim, key.mask,
                  key.has_soft_cap, key.is_split, key.mask_mod);
}

// How far two keys are apart: what cannot be changed weighs most, what padding or a cast can, less.
int32_t Distance(const VariantKey& a, const VariantKey& b) {
  return 100 * (a.operation != b.operation) + 100 * (a.arch != b.arch) +
         10 * (a.head_dim != b.head_dim || a.value_dim != b.value_dim) + 5 * (a.dtype != b.dtype) +
         2 * (a.has_soft_cap != b.has_soft_cap) + 2 * (a.is_split != b.is_split) +
         2 * (a.mask_mod != b.mask_mod) + (a.mask != b.mask);
}

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
  }
  return "unknown";
}

const char* Name(MaskClass mask) {
  switch (mask) {
    case MaskClass::kFull:
      return "full";
    case MaskClass::kCausal:
      return "causal";
    case MaskClass::kGeneral:
      return "general";
  }
  return "unknown";
}

VariantKey MakeKey(Operation operation, const Problem& problem, const Extras& extras, int32_t arch,
                   bool is_split) {
  return {operation,
          arch,
          problem.dtype,
          problem.head_dim,
          problem.value_dim,
          is_split ? MaskClass::kGeneral : MaskClassOf(problem, extras),
          problem.soft_cap != 0.0f,
          is_split,
          problem.mask_mod};
}

}  // namespace

MaskClass MaskClassOf(const Problem& problem, const Extras& extras) {
  const bool has_extras = extras.q_lengths != nullptr || extras.kv_lengths != nullptr ||
                          extras.cu_seqlens_q != nullptr || extras.q_segments != nullptr ||
                          extras.q_offset != nullptr;
  if (has_extras || problem.soft_cap != 0.0f || !problem.mask_mod.empty() ||
      problem.window_left != kUnbounded) {
    return MaskClass::kGeneral;
  }
  if (problem.window_right == kUnbounded) return MaskClass::kFull;
  return problem.window_right == 0 ? MaskClass::kCausal : MaskClass::kGeneral;
}

int32_t ArchOf(int32_t capability) {
  const Table& table = KernelTable();
  for (int32_t i = 0; i < table.num_capabilities; ++i) {
    if (table.capabilities[i].capability == capability) return table.capabilities[i].arch;
  }
  return 0;
}

VariantKey KeyOf(const FwdParams& params, int32_t arch) {
  return MakeKey(Operation::kForward, params.problem, params.extras, arch,
                 params.scratch.num_splits > 1);
}

VariantKey KeyOf(const BwdParams& params, int32_t arch) {
  return MakeKey(Operation::kBackward, params.problem, params.extras, arch, false);
}

const Variant* FindVariant(const VariantKey& key) {
  const Table& table = KernelTable();
  for (int32_t i = 0; i < table.num_variants; ++i) {
    if (Tie(table.variants[i].key) == Tie(key)) return &table.variants[i];
  }
  return nullptr;
}

std::string Refusal(const VariantKey& key) {
  const Table& table = KernelTable();
  std::string text = std::string("no compiled ") +
                     (key.operation == Operation::kForward ? "forward" : "backward") +
                     " kernel for sm" + std::to_string(key.arch) + ", " + Name(key.dtype) +
                     ", D = " + std::to_string(key.head_dim) +
                     ", Dv = " + std::to_string(key.value_dim) + ", " + Name(key.mask) + " mask" +
                     (key.has_soft_cap ? ", soft cap" : "") + (key.is_split ? ", split keys" : "") +
                     (key.mask_mod.empty() ? "" : ", mask_mod " + std::string(key.mask_mod)) + ". ";
  if (table.num_variants == 0) return text + "This build holds no GPU kernels.";
  std::vector<const Variant*> nearest;
  for (int32_t i = 0; i < table.num_variants; ++i) nearest.push_back(&table.variants[i]);
  std::stable_sort(nearest.begin(), nearest.end(), [&key](const Variant* a, const Variant* b) {
    return Distance(a->key, key) < Distance(b->key, key);
  });
  nearest.resize(std::min<size_t>(nearest.size(), 3));
  text += "Nearest of " + std::to_string(table.num_variants) + " compiled:";
  for (const Variant* variant : nearest) text += std::string(" ") + variant->object.name;
  return text + ".";
}

}  // namespace jax_fa
