"""Counters of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jax_fa.emulator.faults import EmulationError


@dataclass(frozen=True)
class Report:
    """Counters of one launch.

    Attributes:
      instructions: executed warp instructions by warp index (summed over CTAs), then opcode.
      counters: bytes by path and matrix flops.
      waits: how often each warp index blocked at a barrier.
      registers: register budget of each warp index that set one.
      findings: faults that execution survived (only without strict).
      notes: oddities at the exit of CTAs, with the number of CTAs that showed them.
      issued: asynchronous operations by the line of the PTX that issued them.
    """

    instructions: dict[int, Counter[str]]
    counters: Counter[str]
    waits: Counter[int]
    registers: dict[int, int]
    findings: tuple[EmulationError, ...]
    notes: Counter[str]
    issued: Counter[int]

    def roles(self) -> dict[tuple[int, ...], Counter[str]]:
        """Instructions by role: warps that executed the same instructions form one."""
        groups: dict[tuple, list[int]] = {}
        for warp, counts in sorted(self.instructions.items()):
            groups.setdefault(tuple(sorted(counts)), []).append(warp)
        return {
            tuple(warps): sum((self.instructions[w] for w in warps), Counter())
            for warps in groups.values()
        }

    def __str__(self) -> str:
        lines = []
        for warps, counts in self.roles().items():
            waits = sum(self.waits[w] for w in warps)
            lines.append(
                f"warps {', '.join(map(str, warps))}: {counts.total()} instructions, "
                f"{waits} barrier waits"
            )
            lines += [f"  {count:9d}  {opcode}" for opcode, count in counts.most_common(12)]
        lines += [f"{name}: {amount}" for name, amount in sorted(self.counters.items())]
        lines += [f"finding: {error}" for error in self.findings]
        lines += [f"note ({count} CTAs): {note}" for note, count in self.notes.items()]
        return "\n".join(lines)
