"""Reads PTX: whether threads hand tensor memory over as PTX asks, which no run of a kernel shows.

A missing wait or fence lets the assembler and the hardware reorder; most of the time they do not.
So the rules are checked on the text, along every path through a kernel:

1. Behind a ``tcgen05.ld`` (``st``) comes ``tcgen05.wait::ld`` (``wait::st``) before any arrival at
   an mbarrier, barrier of the CTA or the cluster, release, ``tcgen05.fence::before_thread_sync``,
   ``tcgen05.dealloc`` or ``tcgen05.mma``; behind a ``ld``, before a ``st``, too.
2. Behind a ``ld`` or ``st`` comes ``tcgen05.fence::before_thread_sync`` before an arrival that
   hands tensor memory over.
3. Behind a wait for such a barrier comes ``tcgen05.fence::after_thread_sync`` before the next
   ``ld``, ``st``, ``mma`` or ``cp``.

An mbarrier hands tensor memory over if ``before_thread_sync`` is right in front of one of its
arrivals, if ``after_thread_sync`` follows all of its waits with nothing but more waits between, or
if ``tcgen05.commit`` arrives at it and ``after_thread_sync`` or accesses follow one of its waits in
that way. Others hand over shared memory, and need no fence.

A barrier of the CTA or the cluster needs the fence in front if tensor memory is accessed anywhere
behind it: not the one in front of ``tcgen05.dealloc``, an instruction in order by itself, which
needs the completion of the loads and nothing else. It needs the fence behind if the other fence is
right in front of it, or nothing but accesses right behind. ``bar.warp.sync`` is none: instructions
on tensor memory are those of a whole warp.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

_ENTRY = re.compile(r"^(?:\.visible\s+)?\.entry\s+([\w$]+)", re.MULTILINE)
_TARGET = re.compile(r"^\.target .*$", re.MULTILINE)
_STATEMENT = re.compile(
    r"^[ \t]*(?:(?P<brace>[{}])[ \t]*$"
    r"|(?P<label>[\w$]+):"
    r"|(?:@(?P<guard>!?%?\w+)[ \t]+)?(?P<opcode>"
    r"(?:tcgen05|mbarrier|barrier|bar|red\.release|st\.release|fence\.acq_rel)\.[\w:.]+"
    r"|bra(?:\.uni)?|ret|exit|trap|add\.s32|mapa\.[\w:.]+)[ \t]*(?P<operands>[^;]*);)",
    re.MULTILINE,
)
_ADDRESS = re.compile(r"\[(%\w+)(?:\+(\d+))?\]")
_KINDS = {
    "tcgen05.ld": "ld",
    "tcgen05.st": "st",
    "tcgen05.mma": "mma",
    "tcgen05.cp": "mma",
    "tcgen05.wait::ld": "wait::ld",
    "tcgen05.wait::st": "wait::st",
    "tcgen05.fence::before_thread_sync": "before",
    "tcgen05.fence::after_thread_sync": "after",
    "tcgen05.commit": "commit",
    "tcgen05.dealloc": "dealloc",
    "mbarrier.try_wait": "wait",
    "mbarrier.test_wait": "wait",
    "mbarrier.arrive": "arrive",
    "barrier.cluster.wait": "pass",
    "barrier.cluster.arrive": "meet",
    "barrier": "sync",
    "bar": "sync",
    "red.release": "release",
    "st.release": "release",
    "fence.acq_rel": "release",
    "bra": "jump",
    "ret": "exit",
    "exit": "exit",
    "trap": "exit",
}
_ACCESSES = ("ld", "st", "mma")
_USES = frozenset(("after", *_ACCESSES))
_ON_MBARRIERS = ("wait", "arrive", "commit")
_ARRIVALS = ("arrive", "meet", "sync")


class _Event(NamedTuple):
    """An instruction that the rules are about.

    Attributes:
        kind: a value of ``_KINDS``.
        line: in the text.
        is_guarded: whether it may be skipped.
        barrier: offset of its mbarrier in shared memory; the first one's, if there are stages.
        following: events that may come next.
    """

    kind: str
    line: int
    is_guarded: bool
    barrier: int | None
    following: tuple[int, ...]


class _HandOvers(NamedTuple):
    """Events that hand tensor memory over: arrivals, and waits that have ended."""

    arrivals: frozenset[int] = frozenset()
    waits: frozenset[int] = frozenset()


class _State(NamedTuple):
    """The state at a place: for each thing open, the line that opened it, else 0.

    Attributes:
        loaded: a ld without wait::ld.
        stored: a st without wait::st.
        accessed: a ld or st without before_thread_sync.
        passed: a hand-over that was waited for without after_thread_sync.
        worked: anything since before_thread_sync.
    """

    loaded: int = 0
    stored: int = 0
    accessed: int = 0
    passed: int = 0
    worked: int = 1


_found: dict[bytes, tuple[str, ...]] = {}


def complaints(text: str) -> tuple[str, ...]:
    """Violations of the module's rules in a PTX file, by line."""
    entries = list(_ENTRY.finditer(text))
    # Texts for several targets differ in that line and in the names of entries alone.
    alike = _TARGET.sub("", text, count=1)
    for entry in entries:
        alike = alike.replace(entry[1], "")
    key = hashlib.sha256(alike.encode()).digest()
    if key not in _found:
        starts = [entry.start() for entry in entries]
        _found[key] = tuple(
            f"PTX line {line}: {what}"
            for start, end in zip(starts, [*starts[1:], len(text)], strict=True)
            if text.find("tcgen05.", start, end) >= 0
            for line, what in sorted(_complaints(_events(text, start, end)))
        )
    return _found[key]


# --------------------------------------------------------------------------------------- reading


def _events(text: str, start: int, end: int) -> list[_Event]:
    """The events of one entry, in order.

    Raises:
        ValueError: the text is laid out in a way that this reader does not know.
    """
    raw: list[tuple[re.Match[str], int, int]] = []
    scopes: list[tuple[int, dict[str, int]]] = [(0, {})]
    scope, line, at = 0, text.count("\n", 0, start) + 1, start
    sums: dict[str, tuple[str, int]] = {}
    for match in _STATEMENT.finditer(text, start, end):
        if match["opcode"] is None:
            if match["label"]:
                scopes[scope][1][match["label"]] = len(raw)
            elif match["brace"] == "{":
                scopes.append((scope, {}))
                scope = len(scopes) - 1
            else:
                scope = scopes[scope][0]
        elif match["opcode"].startswith(("add.", "mapa.")):
            target, source, *rest = re.split(r",\s*", match["operands"])
            number = rest[0] if match["opcode"].startswith("add.") else "0"
            offset = int(number) if number.lstrip("-").isdigit() else 0
            sums.setdefault(target, (source, offset))
        elif not match["opcode"].startswith("bar.warp."):
            line += text.count("\n", at, match.start("opcode"))
            at = match.start("opcode")
            raw.append((match, line, scope))
    read = sum(match["opcode"].startswith("tcgen05.") for match, _, _ in raw)
    if read != text.count("tcgen05.", start, end):
        raise ValueError(f"PTX before line {line}: a tcgen05 instruction does not begin its line")
    return [_event(number, each, scopes, sums) for number, each in enumerate(raw)]


def _event(
    number: int,
    raw: tuple[re.Match[str], int, int],
    scopes: list[tuple[int, dict[str, int]]],
    sums: dict[str, tuple[str, int]],
) -> _Event:
    match, line, scope = raw
    kind, is_guarded = _kind(match["opcode"]), match["guard"] is not None
    following = (number + 1,)
    if kind == "jump":
        target = match["operands"].strip()
        while target not in scopes[scope][1]:
            if scope == 0:
                raise ValueError(f"PTX line {line}: no label {target}")
            scope = scopes[scope][0]
        following = (scopes[scope][1][target], *([number + 1] if is_guarded else []))
    elif kind == "exit" and not is_guarded:
        following = ()
    barrier = _offset(match["operands"], sums) if kind in _ON_MBARRIERS else None
    return _Event(kind, line, is_guarded, barrier, following)


def _kind(opcode: str) -> str:
    """The value in ``_KINDS`` of the longest part of ``opcode`` that is there, or "other"."""
    parts = opcode.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((_KINDS[name] for name in names if name in _KINDS), "other")


def _offset(operands: str, sums: dict[str, tuple[str, int]]) -> int:
    """The offset from the start of shared memory; an index of a stage counts as 0."""
    match = _ADDRESS.search(operands)
    if match is None:
        return int(operands.strip("[]"), 0) if operands.strip("[]").isdigit() else 0
    register, total = match[1], int(match[2] or 0)
    seen = set()
    while register in sums and register not in seen:
        seen.add(register)
        register, offset = sums[register]
        total += offset
    return total


# ---------------------------------------------------------------------------------------- judging


def _complaints(events: list[_Event]) -> set[tuple[int, str]]:
    """(line, what is wrong) of the events of one entry."""
    handing = _hand_overs(events, _states(events, frozenset()))
    found: set[tuple[int, str]] = set()
    for number, state in _states(events, handing.waits).items():
        event, hands_over = events[number], number in handing.arrivals
        found.update((event.line, what) for what in _broken(event, state, hands_over))
    return found


def _states(events: list[_Event], waits: frozenset[int]) -> dict[int, _State]:
    """The state in front of every event that can be reached: the union over all paths to it.

    ``waits`` are those of hand-overs.
    """
    states = {0: _State()}
    pending = [0]
    while pending:
        number = pending.pop()
        event = events[number]
        state = _behind(event, states[number], number in waits)
        for after in event.following:
            if after == len(events):
                continue
            known = states.get(after)
            joined = state if known is None else _join(known, state)
            if joined != known:
                states[after] = joined
                pending.append(after)
    return states


def _join(one: _State, other: _State) -> _State:
    return _State(*(min(a, b) or a or b for a, b in zip(one, other, strict=True)))


def _behind(event: _Event, state: _State, takes_over: bool) -> _State:
    """The state behind an event; ``takes_over`` says whether it ended a wait for a hand-over."""
    kind, line, new = event.kind, event.line, state
    if kind == "ld":
        new = state._replace(loaded=state.loaded or line, accessed=state.accessed or line)
    elif kind == "st":
        new = state._replace(stored=state.stored or line, accessed=state.accessed or line)
    elif kind == "wait::ld":
        new = state._replace(loaded=0)
    elif kind == "wait::st":
        new = state._replace(stored=0)
    elif kind == "before":
        return state if event.is_guarded else state._replace(accessed=0, worked=0)
    elif kind == "after":
        new = state._replace(passed=0)
    elif takes_over:
        new = state._replace(passed=state.passed or line)
    if kind != "jump":
        new = new._replace(worked=1)
    return _join(state, new) if event.is_guarded else new


def _hand_overs(events: list[_Event], states: dict[int, _State]) -> _HandOvers:
    """The hand-overs among the events that can be reached."""
    everything = {event.kind for event in events} - set(_ACCESSES)
    behind: dict[int | None, list[set[str]]] = {}
    mbarriers, committed, arrivals, waits = set(), set(), set(), set()
    for number, state in states.items():
        event = events[number]
        following = _next_kinds(events, number, ("wait", "jump"))
        if event.kind == "commit":
            committed.add(event.barrier)
        elif event.kind == "arrive" and not state.worked:
            mbarriers.add(event.barrier)
        elif event.kind == "wait":
            behind.setdefault(event.barrier, []).append(following)
        if event.kind in ("meet", "sync") and _next_kinds(events, number, everything):
            arrivals.add(number)
        if event.kind in ("pass", "sync") and (not state.worked or following <= _USES):
            waits.add(number)
    for barrier, each in behind.items():
        is_used = barrier in committed and any(kinds <= _USES for kinds in each)
        if is_used or all(kinds == {"after"} for kinds in each):
            mbarriers.add(barrier)
    ours = [number for number in states if events[number].barrier in mbarriers]
    arrivals.update(number for number in ours if events[number].kind == "arrive")
    waits.update(number for number in ours if events[number].kind == "wait")
    return _HandOvers(frozenset(arrivals), frozenset(waits))


def _next_kinds(events: list[_Event], number: int, between: Iterable[str]) -> set[str]:
    """Kinds of the first events behind one that are of none of the kinds ``between``."""
    pending, seen, found = list(events[number].following), {number}, set()
    while pending:
        number = pending.pop()
        if number in seen or number == len(events):
            continue
        seen.add(number)
        if events[number].kind in between:
            pending += events[number].following
        else:
            found.add(events[number].kind)
    return found


def _broken(event: _Event, state: _State, hands_over: bool) -> Iterable[str]:
    """The rules that an event breaks, given the state before it."""
    kind = event.kind
    if kind in (*_ARRIVALS, "release", "before", "dealloc", "mma"):
        for line, what in ((state.loaded, "ld"), (state.stored, "st")):
            if line:
                yield f"{kind} without tcgen05.wait::{what} behind the {what} of line {line}"
    if kind == "st" and state.loaded:
        yield f"st without tcgen05.wait::ld behind the ld of line {state.loaded}"
    if kind in _ARRIVALS and hands_over and state.accessed:
        yield (
            f"{kind} without tcgen05.fence::before_thread_sync behind the access of line "
            f"{state.accessed}"
        )
    if kind in _ACCESSES and state.passed:
        yield (
            f"{kind} without tcgen05.fence::after_thread_sync behind the wait of line "
            f"{state.passed}"
        )
