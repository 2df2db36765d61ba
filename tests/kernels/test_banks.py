"""The kernels access shared memory without bank conflicts: what they do, not what is listed."""

from dataclasses import replace

import jax
import pytest
from helpers.cases import BY_NAME
from helpers.harness import attend, data, run
from helpers.texts import is_distinct

from jax_fa.analysis import banks
from jax_fa.emulator import emulate, memory
from jax_fa.runtime import bindings
from jax_fa.runtime.dispatch import Emulation
from jax_fa.spec import variants

FORWARD = [
    variants.BY_NAME[name]
    for name in sorted(bindings.compiled())
    if name.startswith("fwd_") and name.endswith("_full") and "_bf16_" in name
]


def backward_of(forward):
    """Its backward, if compiled and not run as that of another target."""
    name = forward.name.replace("fwd", "bwd")
    found = variants.BY_NAME[name] if name in bindings.compiled() else None
    return found if found and is_distinct(found) else None


DISTINCT = [forward for forward in FORWARD if is_distinct(forward) or backward_of(forward)]


@pytest.fixture
def accesses(monkeypatch):
    """(passes, fewest passes) of every generic access to shared memory, as lanes ask for them."""
    seen = []

    def note(offsets, size):
        addresses = [int(offset) for offset in offsets]
        seen.append((banks.passes(addresses, size), banks.fewest_passes(len(addresses), size)))

    def load(self, offsets, size, count=1, real=memory.SharedMemory.load):
        note(offsets, size * count)
        return real(self, offsets, size, count)

    def store(self, offsets, values, warp, real=memory.SharedMemory.store):
        note(offsets, values.dtype.itemsize * values.shape[1])
        return real(self, offsets, values, warp)

    monkeypatch.setattr("jax_fa.emulator.emulate", emulate)  # None is remembered.
    monkeypatch.setattr(memory.SharedMemory, "load", load)
    monkeypatch.setattr(memory.SharedMemory, "store", store)
    return seen


@pytest.mark.parametrize("variant", DISTINCT, ids=lambda variant: variant.name)
def test_no_access_to_shared_memory_has_a_bank_conflict(variant, accesses):
    """Forward, and backward where there is one."""
    key, emulation = variant.key, Emulation(variant.arch)
    case = replace(BY_NAME["one_block"], head_dim=key.head_dim, value_dim=key.value_dim)
    compute = run if backward_of(variant) else attend
    jax.block_until_ready(compute(case, data(case, "bfloat16"), emulation))
    assert accesses and all(passes <= fewest for passes, fewest in accesses)
