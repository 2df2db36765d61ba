"""``python -m jax_fa.analysis.backward_ledger``: the Blackwell backward's memory, and its bounds.

Its plan: ``jax_fa/kernels/sm100/plan_bwd.py``.
"""

from __future__ import annotations

from jax_fa.analysis import roofline
from jax_fa.analysis.plan_ledger import ledger
from jax_fa.kernels.sm100.plan_bwd import backward_plan
from jax_fa.spec.config_sm100 import blackwell_backward
from jax_fa.spec.key import KernelKey


def main() -> None:
    """Prints the ledgers of bfloat16 kernels: one CTA, a pair, two sweeps; and what bounds them."""
    gpu = roofline.gpu_of("sm100")
    for head_dim in (96, 128, 256):
        key = KernelKey("sm_100f", "bfloat16", head_dim, head_dim, "causal")
        config, heads = blackwell_backward(key), (key.head_dim, key.value_dim)
        shared = {"ctas": config.ctas, "sweeps": config.sweeps}
        smem = roofline.backward_smem_cycles(gpu, heads, config.staged, **shared)
        bound = roofline.backward(gpu, heads, config.staged, **shared)
        lines = [f"{count:6.0f}  {what}" for what, count in smem.items()]
        sums = f"{bound.smem:6.0f}  of smem, {bound.mma:.0f} of MMA per 128 x 128 tile (model)"
        text = [f"D = {head_dim}", ledger(backward_plan(key, config)), *lines, sums]
        print("\n".join(text), end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main()
