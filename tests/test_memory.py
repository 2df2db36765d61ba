"""Memory grows with T, not with T x S: measured as the high-water mark of a new process."""

import json

import pytest
from helpers.harness import in_new_process

LIMIT_MB = 64

MEASURE = """
import json, re, jax, jax.numpy as jnp, jax_fa

def status(key):
    with open("/proc/self/status") as text:
        return int(re.search(key + r":\\\\s+(\\\\d+)", text.read()).group(1)) / 1024

def total(q, k, v):
    return jnp.sum(jax_fa.attention(q, k, v, is_causal=True).astype(jnp.float32))

dtype, backward, length = jnp.dtype({dtype!r}), {backward}, {length}
function = jax.value_and_grad(total, (0, 1, 2)) if backward else (
    lambda q, k, v: jax_fa.attention(q, k, v, is_causal=True))
keys = jax.random.split(jax.random.key(0), 3)
qkv = [jax.block_until_ready(jax.random.normal(x, (1, length, 8, 64), dtype)) for x in keys]
compiled = jax.jit(function).lower(*qkv).compile()
small = [x[:, :128] for x in qkv]
jax.block_until_ready(jax.jit(function)(*small))  # threads and code are there
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
before = status("VmRSS")
results = jax.block_until_ready(compiled(*qkv))
peak = status("VmHWM")
outputs = sum(x.nbytes for x in jax.tree.leaves(results)) / 2**20
print(json.dumps(peak - before - outputs))
"""


def excess_mb(dtype, backward, length):
    code = MEASURE.format(dtype=dtype, backward=backward, length=length).replace("\\\\", "\\")
    return json.loads(in_new_process(code, XLA_FLAGS=""))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_above_inputs_and_outputs_stays_below_64_mb(dtype, backward):
    """B = 1, T = S = 4096, N = 8, D = 64. The backward's own share holds out, LSE and dout."""
    assert excess_mb(dtype, backward, 4096) < LIMIT_MB


def test_the_measurement_sees_a_score_matrix():
    """The guard itself: jax.nn needs the T x S matrix of every head."""
    code = MEASURE.format(dtype="float32", backward=False, length=2048).replace("\\\\", "\\")
    code = code.replace("jax_fa.attention(", "jax.nn.dot_product_attention(")
    assert json.loads(in_new_process(code, XLA_FLAGS="")) > 2 * LIMIT_MB
