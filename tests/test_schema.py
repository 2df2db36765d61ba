"""``schema.py`` is what every side has: C++, host entries, and the types that Python code uses."""

import inspect
from pathlib import Path

import pytest

from jax_fa.runtime import blockwise, context, sharding, strategies
from jax_fa.runtime.bindings import Saved
from jax_fa.spec import abi, schema, schema_cpp, variants
from jax_fa.spec.problem import Gradients, Operands

HEADER = Path(__file__).parent.parent / "ffi" / "schema.h"


def names(arrays):
    return [array.name for array in arrays]


def test_the_header_is_that_of_the_schema():
    written = HEADER.read_text() == schema_cpp.header()
    assert written, "run: python ffi/write_schema.py"


def test_types_have_the_fields_of_the_schema():
    assert [*Operands._fields] == names(schema.OPERANDS)
    assert [*Saved._fields] == names(schema.SAVED)
    assert [f"d{name}" for name in Gradients._fields] == names(schema.GRADIENTS)
    assert [name for name in Operands._fields if name in Operands._field_defaults] == names(
        array for array in schema.OPERANDS if array.is_optional
    )


@pytest.mark.parametrize("operation", variants.OPERATIONS)
def test_host_entries_take_every_array_once(operation):
    arrays = schema.OPERATIONS[operation]
    pointers = [p.name for p in abi.PARAMETERS[operation] if p.kind == "pointer"]
    assert sorted(pointers) == sorted(names((*arrays.operands, *arrays.results, *arrays.scratch)))


@pytest.mark.parametrize(
    "row", [schema.BY_NAME["bias"], schema.ATTRIBUTES[0]], ids=lambda x: x.name
)
@pytest.mark.parametrize(
    ("readers", "operations"),
    [
        (None, ["fwd", "bwd", "dbias"]),
        ((("cpu", "fwd"), ("cpu", "bwd"), ("sm90", "bwd")), ["bwd"]),
        ((), []),
    ],
)
def test_host_entries_lack_what_no_kernel_on_a_gpu_reads(row, readers, operations):
    row = row._replace(readers=readers)
    assert [x for x in variants.OPERATIONS if abi.is_read(row, x)] == operations


def test_every_array_of_a_caller_has_a_place_on_devices():
    for arrays in schema.OPERATIONS.values():
        call = sharding.Names(*(tuple(names(x)) for x in (arrays.operands, arrays.results)))
        for name in (*call.operands, *call.results):
            assert len(call.dimensions(name)) == len(schema.BY_NAME[name].dims.split())


def test_tokens_are_in_dimension_1():
    """So blocks of rows and devices that share a sequence take their part of any operand."""
    for array in schema.OPERANDS:
        assert not array.is_per_token or array.dims.split()[1] == array.side


@pytest.mark.parametrize("module", [blockwise, context, strategies])
def test_sharing_names_no_operand_that_a_call_may_lack(module):
    """One that is added later, with a row for each token, has its part taken without a word."""
    optional = [x.name for x in schema.OPERANDS if x.is_per_token and x.is_optional]
    text = inspect.getsource(module)
    assert len(optional) == 2 and not [name for name in optional if name in text]


def test_what_was_added_later_is_not_required():
    """Programs from before it was lack it."""
    required = [attribute.is_required for attribute in schema.ATTRIBUTES]
    assert required == sorted(required, reverse=True) and sum(required) == 6
