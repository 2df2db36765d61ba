// What jax_fa.emulator asks of the extension.
#ifndef JAX_FA_EMULATOR_BINDINGS_H_
#define JAX_FA_EMULATOR_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace jax_fa {

// Adds multiply_add, block_operations, set_interpolation, address_of and Block.
void BindEmulator(nanobind::module_& m);

}  // namespace jax_fa

#endif  // JAX_FA_EMULATOR_BINDINGS_H_
