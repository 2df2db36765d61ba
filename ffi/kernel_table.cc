#include "kernel_table.h"

#include <unordered_map>

namespace jax_fa {
namespace {

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

std::string ToString(const Takes& takes) {
  return std::string(Name(takes.dtype)) + ", D = " + std::to_string(takes.head_dim) +
         ", Dv = " + std::to_string(takes.value_dim) +
         (takes.parts == Parts::kSeveral ? ", split keys" : "") +
         (takes.has_bias ? ", a bias" : "");
}

using Index = std::unordered_map<std::string_view, const Variant*>;

const Index& ByName() {
  static const Index index = [] {
    const Table& table = KernelTable();
    Index made;
    for (int32_t i = 0; i < table.num_variants; ++i) {
      made.emplace(table.variants[i].object.name, &table.variants[i]);
    }
    return made;
  }();
  return index;
}

bool Fits(int64_t head, int64_t compiled) { return head <= compiled && head % kHeadStep == 0; }

// Null if nothing is written for the device.
const char* FamilyOf(std::string_view operation, int32_t capability, std::string_view kernel) {
  const Table& table = KernelTable();
  for (int32_t i = 0; i < table.num_capabilities; ++i) {
    const Capability& row = table.capabilities[i];
    if (row.capability == capability && row.operation == operation &&
        kernel.find(row.part) != std::string_view::npos) {
      return row.family;
    }
  }
  return nullptr;
}

}  // namespace

Lookup FindVariant(const char* operation, int32_t capability, std::string_view kernel) {
  const char* family = FamilyOf(operation, capability, kernel);
  if (family == nullptr) {
    return {nullptr, "no kernels are compiled for GPUs of compute capability " +
                         std::to_string(capability / 10) + "." + std::to_string(capability % 10)};
  }
  if (kernel.empty()) {
    return {nullptr,
            "the program names no kernel: a release of jax_fa wrote it whose extension had version "
            "1. Lower and export it again with this one"};
  }
  std::string name = operation;
  ((name += '_') += family) += '_';
  name += kernel;
  const auto found = ByName().find(name);
  if (found != ByName().end()) return {found->second, ""};
  return {nullptr, "the program calls the kernel " + name + ", which is not among the " +
                       std::to_string(KernelTable().num_variants) +
                       " of this build. Lower it again with this build, or build with that kernel"};
}

std::optional<std::string> Mismatch(const Variant& variant, const Problem& p) {
  const Takes& takes = variant.takes;
  const Parts parts = p.num_splits > 1 ? Parts::kSeveral : Parts::kOne;
  const Takes got{p.dtype, p.head_dim, p.value_dim, parts, p.bias_bytes > 0, p.gives_dbias};
  if (got.gives_dbias && !takes.gives_dbias) {
    return std::string(variant.object.name) + " does not give the gradient of a bias (dbias)";
  }
  if (takes.dtype == got.dtype && Fits(got.head_dim, takes.head_dim) &&
      Fits(got.value_dim, takes.value_dim) &&
      (takes.parts == parts || takes.parts == Parts::kAny) && takes.has_bias == got.has_bias) {
    if (p.dq_dim == 0 || p.dq_dim == takes.head_dim) return std::nullopt;
    return std::string(variant.object.name) +
           " adds dQ up for D = " + std::to_string(takes.head_dim) + ", but is given scratch for " +
           std::to_string(p.dq_dim);
  }
  return std::string(variant.object.name) + " takes " + ToString(takes) + " (or heads of " +
         std::to_string(kHeadStep) + " columns, 16, 24, ... below), but is called with " +
         ToString(got);
}

}  // namespace jax_fa
