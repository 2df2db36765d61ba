"""``python -m jax_fa.analysis.plan_ledger NAME...``: the plan of kernels as text.

Names are those that ``python -m jax_fa.aot --list`` shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jax_fa.analysis import audit
from jax_fa.kernels.edges import SMEM_CAPACITY_BYTES, Plan, arrivals
from jax_fa.spec import variants

OF_ONE_CTA, OF_A_PAIR = "fwd_sm100_bf16_d128_causal", "fwd_sm100_bf16_d128_full"


def ledger(plan: Plan, smem_capacity: int = SMEM_CAPACITY_BYTES) -> str:
    """The plan as text: roles, edges with their arrive counts, memory, barriers.

    Double arrows cross the pair. A CTA may have ``smem_capacity`` bytes of shared memory.
    """
    width = max(len(role.name) for role in plan.roles)
    lines = [
        f"{role.name:{width}s}  warps {role.warps.start}-{role.warps.stop - 1}"
        + f"  {role.registers} registers"
        + (f"  first of {plan.ctas} CTAs only" if role.leader_only else "")
        for role in plan.roles
    ]
    for edge in plan.edges:
        full, empty = arrivals(plan, edge, "full"), arrivals(plan, edge, "empty")
        size = f" x {edge.stage_bytes} bytes" if edge.stage_bytes else ""
        drained = f"  empty({empty}): {edge.empty}" if edge.empty else ""
        between, consumers = "=>" if plan.crosses(edge) else "->", " and ".join(edge.consumers)
        lines.append(
            f"{edge.data:4s} {edge.producer} {between} {consumers}  {edge.stages}{size}  "
            f"full({full}): {edge.full}{drained}"
        )
    for buffer in plan.buffers:
        where = f" over {buffer.alias_of}: {buffer.why}" if buffer.alias_of else ""
        lines.append(f"smem {buffer.name} {buffer.size_bytes} bytes{where}")
    for cols in plan.tmem:
        where = f" over {cols.alias_of}: {cols.why}" if cols.alias_of else ""
        lines.append(f"tmem {cols.name} columns {cols.start} to {cols.end - 1}{where}")
    lines += [f"barrier {b.index} {b.name} ({b.threads}): {b.meaning}" for b in plan.barriers]
    lines.append(f"smem {plan.smem_bytes} of {smem_capacity} bytes")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the ledgers of variants."""
    parser = argparse.ArgumentParser("python -m jax_fa.analysis.plan_ledger", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", default=[OF_ONE_CTA, OF_A_PAIR])
    names: list[str] = parser.parse_args(argv).names
    if unknown := [name for name in names if name not in variants.BY_NAME]:
        raise SystemExit(
            f"no variant is named {unknown[0]}; `python -m jax_fa.aot --list` shows them"
        )
    chosen = [variants.BY_NAME[name] for name in names]
    texts = [ledger(audit.plan_of(variant), audit.smem_capacity(variant)) for variant in chosen]
    print("\n\n".join(texts))  # noqa: T201


if __name__ == "__main__":
    main()
