"""A model of the Blackwell forward in time: who works, who waits, and what the design buys.

Roles are played as they wait for each other in ``fwd_roles.py`` and ``fwd_softmax.py``, every piece
of work taking the cycles of ``roofline.py``. What a hand-over takes is not known without a GPU, so
it is a parameter: the slower one may be without the tensor core waiting, the better.

``python -m jax_fa.analysis.timeline`` prints the picture of ``kernels/README.md`` and compares
designs. Standard library only.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jax_fa.analysis import roofline
from jax_fa.spec.config_sm100 import blackwell_forward
from jax_fa.spec.key import KernelKey

CHUNKS = 4
RESCALE_INSTRUCTIONS = 135
"""Of a warp, to scale 128 columns of O: half of the loop of the role correction in machine code
(fwd, sm100, D = 128; DSL 4.8.1), which is for two query tiles."""
MAX_SLOTS = 0.5
"""Of the lane instructions for a score, those that look for the maximum."""


@dataclass(frozen=True)
class Design:
    """The choices that the model compares.

    Attributes:
        query_tiles: of 128 rows that a CTA works on at the same time.
        score_buffers: for each of them; with two, S of the next block is issued before PV.
        handed_over_first: of ``CHUNKS`` of P, those after which PV starts.
        rescaled_by: who scales O.
        rescales: whether every block makes it necessary, or none does.
        latency: cycles from a signal to whoever waits for it.
    """

    query_tiles: int = 2
    score_buffers: int = 1
    handed_over_first: int = 3
    rescaled_by: Literal["softmax", "correction"] = "correction"
    rescales: bool = False
    latency: float = 0.0


class Durations(NamedTuple):
    """Cycles of pieces of work on a tile of 128 x 128 scores."""

    s: float
    pv: float
    search: float
    chunk: float
    rescale: float


class Span(NamedTuple):
    """A piece of work: who did what, from when to when."""

    who: str
    what: str
    start: float
    end: float


class _Use(NamedTuple):
    """Asks for a unit; the role goes on when it is done with it."""

    unit: str
    who: str
    what: str
    cycles: float


class _Event(NamedTuple):
    """The full barrier of an edge, for a query tile and a block of keys."""

    edge: str
    tile: int
    block: int


class _Wait(NamedTuple):
    """Stops the role until an event has been signalled."""

    event: _Event


class _Signal(NamedTuple):
    """Signals an event."""

    event: _Event


_Role = Iterator[_Use | _Wait | _Signal]


def durations(key: KernelKey, gpu: roofline.Gpu) -> Durations:
    """Of the kernel for ``key``, as the roofline has them."""
    heads = (key.head_dim, key.value_dim)
    cycles = roofline.forward(gpu, heads, blackwell_forward(key).polynomials / roofline.TILE)
    search = roofline.SCORES * MAX_SLOTS / roofline.LANES
    rescale = RESCALE_INSTRUCTIONS * key.value_dim / roofline.TILE
    return Durations(
        s=cycles.mma * key.head_dim / sum(heads),
        pv=cycles.mma * key.value_dim / sum(heads),
        search=search,
        chunk=max(cycles.exp2, cycles.issue - search) / CHUNKS,
        rescale=rescale,
    )


def _mma(design: Design, took: Durations, blocks: int) -> _Role:
    ahead = design.score_buffers
    tiles = range(design.query_tiles)
    first = [("S", i, j) for j in range(ahead) for i in tiles]
    loop = [(what, i, j + ahead * (what == "S")) for j in range(blocks) for i in tiles
            for what in ("PV", "S")]  # fmt: skip
    for what, i, j in first + loop:
        if j >= blocks:
            continue
        if what == "S":
            yield _Use("tensor core", "mma", f"S{i}", took.s)
            yield _Signal(_Event("s", i, j))
            continue
        share = design.handed_over_first / CHUNKS
        yield _Wait(_Event("scaled", i, j))
        yield _Wait(_Event("p", i, j))
        yield _Use("tensor core", "mma", f"PV{i}", took.pv * share)
        yield _Wait(_Event("p_rest", i, j))
        yield _Use("tensor core", "mma", f"PV{i} rest", took.pv * (1 - share))
        yield _Signal(_Event("o", i, j))


def _softmax(design: Design, took: Durations, blocks: int, i: int) -> _Role:
    own = f"softmax{i}"
    rescales = design.rescales and design.rescaled_by == "softmax"
    for j in range(blocks):
        yield _Wait(_Event("s", i, j))
        yield _Use(own, own, "max", took.search)
        yield _Signal(_Event("stats", i, j))
        if rescales and j > 0:
            yield _Wait(_Event("o", i, j - 1))
            yield _Use(own, own, f"O{i}", took.rescale)
        if design.rescaled_by == "softmax":
            yield _Signal(_Event("scaled", i, j))
        for chunk in range(1, CHUNKS + 1):
            what = f"P{i}" if chunk == 1 else f"P{i} rest"
            yield _Use("special functions", own, what, took.chunk)
            if chunk == design.handed_over_first:
                yield _Signal(_Event("p", i, j))
        yield _Signal(_Event("p_rest", i, j))


def _correction(design: Design, took: Durations, blocks: int) -> _Role:
    for j in range(blocks):
        for i in range(design.query_tiles):
            yield _Wait(_Event("stats", i, j))
            if design.rescales and j > 0:
                yield _Wait(_Event("o", i, j - 1))
                yield _Use("correction", "correction", f"O{i}", took.rescale)
            yield _Signal(_Event("scaled", i, j))


def play(design: Design, took: Durations, blocks: int) -> list[Span]:
    """All work on ``blocks`` key blocks; a unit serves requests in the order of their times."""
    roles: list[_Role] = [_mma(design, took, blocks)]
    roles += [_softmax(design, took, blocks, i) for i in range(design.query_tiles)]
    if design.rescaled_by == "correction":
        roles.append(_correction(design, took, blocks))
    free: dict[str, float] = defaultdict(float)
    waiting: dict[_Event, int] = {}
    seen_at: dict[_Event, float] = {}
    spans = []
    due = [(0.0, number) for number in range(len(roles))]
    while due:
        now, number = heapq.heappop(due)
        for step in roles[number]:
            if isinstance(step, _Use):
                start = max(now, free[step.unit])
                free[step.unit] = start + step.cycles
                spans.append(Span(step.who, step.what, start, start + step.cycles))
                heapq.heappush(due, (start + step.cycles, number))
                break
            if isinstance(step, _Signal):
                seen_at[step.event] = now + design.latency
                if step.event in waiting:
                    heapq.heappush(due, (now + design.latency, waiting.pop(step.event)))
            elif step.event not in seen_at:
                waiting[step.event] = number
                break
            elif seen_at[step.event] > now:
                heapq.heappush(due, (seen_at[step.event], number))
                break
    return spans


def cycles_per_block(design: Design, took: Durations) -> float:
    """Of all query tiles, once the pipeline is full."""
    ends = [
        max(span.end for span in play(design, took, blocks) if span.who == "mma")
        for blocks in (16, 32)
    ]
    return (ends[1] - ends[0]) / 16


def utilization(design: Design, took: Durations) -> float:
    """Share of the time in which the tensor core works."""
    return design.query_tiles * (took.s + took.pv) / cycles_per_block(design, took)


def picture(spans: list[Span], cycles_per_character: float) -> str:
    """Spans as text, time to the right, a line for each role; dots are waiting."""
    length = round(max(span.end for span in spans) / cycles_per_character)
    lines: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        line = lines.setdefault(span.who, ["."] * length)
        start, end = (round(at / cycles_per_character) for at in (span.start, span.end))
        label = "" if span.what.endswith("rest") else span.what
        line[start:end] = label.ljust(end - start, "=")[: end - start]
    return "\n".join(f"{who:11s}{''.join(lines[who])}" for who in sorted(lines, key=_order))


def _order(who: str) -> int:
    return ("mma", "softmax0", "softmax1", "correction").index(who)


DESIGNS = (
    ("one query tile", Design(query_tiles=1)),
    ("one, two buffers for S", Design(1, score_buffers=2)),
    ("  rescaling, by correction", Design(1, score_buffers=2, rescales=True)),
    ("  rescaling, by softmax", Design(1, 2, rescales=True, rescaled_by="softmax")),
    ("two query tiles", Design()),
    ("  P handed over at once", Design(handed_over_first=4)),
    ("  P handed over at the half", Design(handed_over_first=2)),
    ("  rescaling, by correction", Design(rescales=True)),
    ("  rescaling, by softmax", Design(rescales=True, rescaled_by="softmax")),
)
LATENCIES = (0, 50, 100, 150, 200)


def comparison(key: KernelKey) -> str:
    """Share of the time that the tensor core works, by design and cycles of a hand-over."""
    took = durations(key, roofline.gpu_of("sm100"))
    title = f"D = {key.head_dim}, cycles of a hand-over:"
    lines = [f"{title:34s}" + "".join(f"{latency:6d}" for latency in LATENCIES)]
    for name, design in DESIGNS:
        shares = (utilization(replace(design, latency=each), took) for each in LATENCIES)
        lines.append(f"{name:34s}" + "".join(f"{share:6.0%}" for share in shares))
    return "\n".join(lines)


def main() -> None:
    """Prints the picture for D = 128, and designs compared for D = 64 and 128."""
    keys = [KernelKey("sm_100f", "bfloat16", d, d, "full") for d in (64, 128)]
    spans = play(Design(rescales=True), durations(keys[1], roofline.gpu_of("sm100")), blocks=3)
    print("\n\n".join([picture(spans, 64), *map(comparison, keys)]))  # noqa: T201


if __name__ == "__main__":
    main()
