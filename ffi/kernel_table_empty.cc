// The kernel table of a build without GPU kernels, in the place of kernel_table.gen.cc.
#ifndef JAX_FA_HAS_GPU_KERNELS

#include "kernel_table.h"

namespace jax_fa {

const Table& KernelTable() {
  static const Table table{nullptr, 0, nullptr, 0};
  return table;
}

}  // namespace jax_fa

#endif  // JAX_FA_HAS_GPU_KERNELS
