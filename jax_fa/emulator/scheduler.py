"""The seeded scheduler: which fragment runs, which asynchronous operation completes, run loop."""

from __future__ import annotations

import gc
import zlib
from collections import Counter, deque
from collections.abc import Hashable

import numpy as np

from jax_fa.emulator.cta import Cluster, Cta, Fragment, Join, Warp
from jax_fa.emulator.faults import (
    DeadlockError,
    EmulationError,
    Place,
    RunawayError,
    TrapError,
)
from jax_fa.emulator.launch import Launch
from jax_fa.emulator.machine import Machine, Options
from jax_fa.emulator.memory import Memory
from jax_fa.emulator.program import Program, Segment
from jax_fa.emulator.values import FULL, LANES

# Segments without any event after which a warp lets others run, since it may be spinning.
TURN = 500

# Finished clusters with operations that are left, each a megabyte of cyclic garbage per CTA, after
# which memory is reclaimed.
COLLECTION = 16

# Segments of a loop that only waits for memory to change.
LONGEST_SPIN = 200


class Scheduler(Machine):
    """Runs the clusters of one launch, one warp at a time."""

    def __init__(
        self, program: Program, launch: Launch, memory: Memory, seed: int, options: Options
    ) -> None:
        super().__init__(program.frame, launch, memory, seed, options)
        self.program = program
        self.budget = options.max_segments
        self.notes: Counter[str] = Counter()
        self.visits: dict[int, Counter[int]] = {}
        self.registers: dict[int, int] = {}
        clusters = tuple(g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
        self.waiting = deque(
            (x, y, z)
            for z in range(clusters[2])
            for y in range(clusters[1])
            for x in range(clusters[0])
        )
        self.resident: list[Cluster] = []
        # By warp: `progress`, and the segments that it ran since that last changed.
        self.idle: dict[Warp, tuple[int, int]] = {}
        # Warps that went round a loop without changing: `progress` at that time, the loop.
        self.spun: dict[Warp, tuple[int, frozenset[int]]] = {}
        self.retired = 0

    def run(self) -> None:
        """Runs the whole grid."""
        self._admit()
        stalled_at = -1
        while self.resident:
            if self.options.completion == "random" and self.random.chance(0.25):
                if free := self.free_pipes():
                    self.advance(self.random.choice(free))
            runnable = self._pick()
            if runnable is not None:
                self._take_turn(runnable)
            elif self.pipes:
                self.advance(self._next_pipe())
            elif not any(w.fragments for c in self.resident for w in c.all_warps):
                raise DeadlockError("a CTA has lanes that are neither running nor gone")
            elif self.progress != stalled_at and self._wake_polls():
                stalled_at = self.progress
            elif self._only_spins():
                raise DeadlockError(self._who_waits())
            self._retire()
        while self.pipes:
            self.advance(next(iter(self.pipes)))

    def _pick(self) -> Fragment | None:
        """A fragment that can run: the first one from a random place on, in a random direction.

        None also where those that can run are known to spin.
        """
        fragments = [f for c in self.resident for w in c.all_warps for f in w.fragments]
        if not fragments:
            return None
        start = int(self.random.choice(range(len(fragments))))
        order = fragments[start:] + fragments[:start]
        if self.random.chance(0.5):
            order.reverse()
        if self.options.starved is not None:
            order.sort(key=lambda fragment: fragment.warp.index == self.options.starved)
        for fragment in order:
            if fragment.wait is None or fragment.wait.ready():
                if self.spun.get(fragment.warp, (-1,))[0] != self.progress:
                    return fragment
        return None

    def _take_turn(self, fragment: Fragment) -> None:
        """Runs a fragment, and finds out whether its warp spins."""
        warp, left = fragment.warp, self.budget
        if warp in self.spun:
            self._take_round(warp)
            return
        self._run_fragment(fragment)
        since, ran = self.idle.get(warp, (-1, 0))
        ran = left - self.budget + (ran if since == self.progress else 0)
        self.idle[warp] = self.progress, ran
        if ran >= TURN and (loop := self._loop_of(warp)):
            self.spun[warp] = self.progress, loop

    def _take_round(self, warp: Warp) -> None:
        """Lets a warp that spun go round its loop again; it may leave it."""
        _, loop = self.spun.pop(warp)
        progress = self.progress
        for _ in loop:
            if not self._step(warp) or not loop.issuperset(f.segment for f in warp.fragments):
                return
        if self.progress == progress:
            self.spun[warp] = progress, loop

    def _step(self, warp: Warp) -> bool:
        """Runs one segment of every fragment of a warp that can run; whether there was one."""
        ready = [f for f in warp.fragments if f.wait is None or f.wait.ready()]
        for fragment in ready:
            if fragment in warp.fragments:
                self._run_fragment(fragment, turn=1)
        return bool(ready)

    def _loop_of(self, warp: Warp) -> frozenset[int]:
        """The segments that take a warp to where it is, with the registers it has; or none.

        While nothing changes memory it then goes round for ever.
        """
        progress, start = self.progress, warp.snapshot()
        loop: set[int] = set()
        for _ in range(LONGEST_SPIN):
            loop.update(fragment.segment for fragment in warp.fragments)
            if not self._step(warp) or self.progress != progress:
                break
            if warp.snapshot() == start:
                return frozenset(loop)
        return frozenset()

    def _next_pipe(self) -> Hashable:
        """The pipe that advances when something has to: lazily one that a warp waits for."""
        free = self.free_pipes()
        pipes = free or list(self.pipes)
        if self.options.completion == "lazy" or not free:
            fragments = [f for c in self.resident for w in c.all_warps for f in w.fragments]
            needed = set().union(*(f.wait.needs for f in fragments if f.wait is not None))
            wanted = [
                key
                for key in pipes
                if any(o in needed or not needed.isdisjoint(o.signals) for o in self.pipes[key])
            ]
            pipes = wanted or pipes
        return self.random.choice(pipes)

    def _only_spins(self) -> bool:
        """True if no warp can do more than go round a loop, and none of them changes memory."""
        progress, memory = self.progress, self._memory_digest()
        self.spun.clear()
        for warp in [w for c in self.resident for w in c.all_warps]:
            can_run = any(f.wait is None or f.wait.ready() for f in warp.fragments)
            if can_run and not self._loop_of(warp):
                return False
        return self.progress == progress and self._memory_digest() == memory

    def _memory_digest(self) -> int:
        """A checksum of global memory and of the shared memory of all resident CTAs."""
        memory = (region.data for region in self.memory.regions)
        shared = (cta.shared.data for cluster in self.resident for cta in cluster.ctas)
        digest = 0
        for data in (*memory, *shared):
            digest = zlib.crc32(data, digest)
        return digest

    def _admit(self) -> None:
        """Admits as many waiting clusters as the machine has room for."""
        while self.waiting and len(self.resident) < self.options.resident:
            self.resident.append(Cluster(self, self.waiting.popleft()))

    def _wake_polls(self) -> bool:
        """Lets every polling wait give up; whether there was one."""
        polls = [
            f
            for c in self.resident
            for w in c.all_warps
            for f in w.fragments
            if f.wait is not None and f.wait.polls
        ]
        for fragment in polls:
            wait, fragment.wait = fragment.wait, None
            if wait.resume is not None:
                wait.resume(False)
            fragment.segment = self.program.segments[fragment.segment].next
        return bool(polls)

    def _retire(self) -> None:
        """Lets finished clusters go and admits waiting ones."""
        for cluster in [c for c in self.resident if not any(w.fragments for w in c.all_warps)]:
            if any(np.count_nonzero(w.live) for w in cluster.all_warps):
                continue
            self.resident.remove(cluster)
            for warp in cluster.all_warps:
                self.idle.pop(warp, None)
                self.spun.pop(warp, None)
            for cta in cluster.ctas:
                self._tally(cta)
                self.notes.update(cta.exit_notes())
                for error in cta.check_exit():
                    self.report(error, Place(self.frame.kernel.name, cta.number, 0, 0))
            if not self.pipes:
                cluster.let_go()  # operations that are left may use their CTA
                continue
            self.retired += 1
            if self.retired % COLLECTION == 0:
                gc.collect(0)
        self._admit()

    def instructions(self) -> dict[int, Counter[str]]:
        """Executed warp instructions of finished CTAs, by warp index and opcode."""
        found: dict[int, Counter[str]] = {}
        for index, visits in self.visits.items():
            counts = found[index] = Counter()
            for number, times in visits.items():
                segment = self.program.segments[number]
                for step in segment.steps:
                    counts[step.opcode] += times
                if segment.last is not None:
                    counts[segment.last.opcode] += times
        return found

    def _tally(self, cta: Cta) -> None:
        """Adds what a finished CTA's warps ran."""
        for warp in cta.warps:
            self.visits.setdefault(warp.index, Counter()).update(warp.visits)
            if warp.registers is not None:
                self.registers[warp.index] = warp.registers

    def _who_waits(self) -> str:
        rows = []
        for cluster in self.resident:
            for warp in cluster.all_warps:
                for fragment in warp.fragments:
                    last = self.program.segments[fragment.segment].last
                    line = last.line if last else warp.line
                    lanes = int(fragment.mask.sum())
                    reason = fragment.wait.reason() if fragment.wait else "spins"
                    rows.append(
                        f"  CTA {warp.cta.number} warp {warp.index:2d} ({lanes} lanes) "
                        f"line {line}: {reason}"
                    )
                for join in warp.state.get("joins", ()):
                    if join.arrived.any():
                        line = self.program.segments[join.segment].first_line
                        rows.append(
                            f"  CTA {warp.cta.number} warp {warp.index:2d} "
                            f"({int(join.arrived.sum())} lanes) line {line}: waits for the "
                            "warp's other lanes"
                        )
        if self.waiting:
            held = self.options.resident
            rows.append(
                f"  {len(self.waiting)} clusters are not admitted before one of the "
                f"{held} resident exits (Options.resident={held})"
            )
        return (
            f"deadlock in kernel {self.frame.kernel.name[:60]}: no warp can run and no "
            "asynchronous operation is pending\n" + "\n".join(rows)
        )

    # The run loop.

    def _run_fragment(self, fragment: Fragment, turn: int = TURN) -> None:
        """Runs a fragment until it blocks, splits, exits or is preempted."""
        warp = fragment.warp
        if fragment.wait is not None:
            wait, fragment.wait = fragment.wait, None
            if wait.resume is not None:
                wait.resume(True)
            fragment.segment = self.program.segments[fragment.segment].next
        _, segments, has_wgmma = self.program
        visits, end = warp.visits, len(segments)
        for _ in range(turn):
            number = fragment.segment
            if fragment.joins and fragment.joins[-1].segment == number:
                fragment = self._arrive(fragment)
                if fragment is None:
                    return
                continue
            if number == end:
                self._exit(fragment, fragment.mask)
                return
            self.budget -= 1
            if self.budget < 0:
                raise RunawayError(
                    f"more than {self.options.max_segments} segments were run; "
                    f"raise max_segments or look for an endless loop",
                    warp.place,
                )
            segment = segments[number]
            visits[number] = visits.get(number, 0) + 1
            warp.mask = fragment.mask
            if has_wgmma:
                warp.unfenced |= segment.computed
            if segment.steps:
                self._run_steps(warp, segment)
            if segment.last is None:
                fragment.segment = segment.next
            elif self._finish(fragment, segment):
                return

    def _run_steps(self, warp: Warp, segment: Segment) -> None:
        """Runs the straight part of a segment."""
        is_full = warp.mask is FULL
        line = 0
        try:
            if segment.touched & warp.busy:
                steps = segment.all_steps(is_full)
                for step, instruction, use in zip(steps, segment.steps, segment.uses, strict=True):
                    line = instruction.line
                    warp.check_registers(instruction, use)
                    step(warp)
            else:
                for run, line in segment.fast if is_full else segment.fast_masked:  # noqa: B007
                    run(warp)
        except Exception as error:
            _blame(error, warp, line)
            raise

    def _finish(self, fragment: Fragment, segment: Segment) -> bool:
        """Runs the last instruction of a segment; True when the fragment's turn is over."""
        warp = fragment.warp
        try:
            if warp.in_flight:
                warp.check_registers(segment.last, segment.last_use)
            if segment.branch is not None:
                return not self._branch(fragment, segment)
            if segment.exits:
                return self._leave(fragment, segment)
            return self._control(fragment, segment)
        except Exception as error:
            _blame(error, warp, segment.last.line)
            raise

    def _branch(self, fragment: Fragment, segment: Segment) -> bool:
        """Takes a branch; False when the fragment was split."""
        branch, mask, warp = segment.branch, fragment.mask, fragment.warp
        if branch.guard is None:
            fragment.segment = branch.target
            return True
        register, negated = branch.guard
        taken = warp.slots[register]
        if negated:
            taken = ~taken
        if mask is not FULL:
            taken = taken & mask
        count = np.count_nonzero(taken)
        if count == 0:
            fragment.segment = branch.fall
            return True
        if count == (LANES if mask is FULL else np.count_nonzero(mask)):
            fragment.segment = branch.target
            return True
        joins = fragment.joins
        if branch.join < len(self.program.segments):
            join = Join(branch.join, mask)
            warp.state.setdefault("joins", []).append(join)
            joins += (join,)
        other = Fragment(warp, branch.target, taken, joins)
        fragment.mask, fragment.joins, fragment.segment = mask & ~taken, joins, branch.fall
        warp.fragments.append(other)
        return False

    def _arrive(self, fragment: Fragment) -> Fragment | None:
        """A fragment reaches its innermost join; the joined fragment once all are there."""
        warp, join = fragment.warp, fragment.joins[-1]
        join.arrived = join.arrived | fragment.mask
        warp.fragments.remove(fragment)
        return self._release(warp, join, fragment.joins[:-1])

    def _release(self, warp: Warp, join: Join, outer: tuple[Join, ...]) -> Fragment | None:
        join.outer = outer
        if np.count_nonzero(join.mask & warp.live & ~join.arrived):
            return None
        warp.state["joins"].remove(join)
        lanes = join.mask & warp.live
        if not np.count_nonzero(lanes):
            return None
        joined = Fragment(warp, join.segment, lanes, outer)
        warp.fragments.append(joined)
        return joined

    def _leave(self, fragment: Fragment, segment: Segment) -> bool:
        """ret, exit or trap; True when no lane is left."""
        mask, warp = fragment.mask, fragment.warp
        gone = mask
        if segment.guard is not None:
            register, negated = segment.guard
            flags = warp.slots[register]
            gone = mask & (~flags if negated else flags)
        if segment.last.opcode == "trap" and gone.any():
            raise TrapError("the program executed trap")
        fragment.segment = segment.next
        if not gone.any():
            return False
        self._exit(fragment, gone)
        return fragment not in warp.fragments

    def _exit(self, fragment: Fragment, gone: np.ndarray) -> None:
        """Lanes are done."""
        warp = fragment.warp
        warp.live = warp.live & ~gone
        left = fragment.mask & ~gone
        if left.any():
            fragment.mask = left
        else:
            warp.fragments.remove(fragment)
        self.progress += 1
        for join in list(warp.state.get("joins", ())):
            if np.count_nonzero(join.arrived):
                self._release(warp, join, join.outer)
        cluster = warp.cta.cluster
        cluster.barrier.settle(cluster.live_threads())

    def _control(self, fragment: Fragment, segment: Segment) -> bool:
        """Runs the control instruction of a segment; True when another fragment gets a turn."""
        warp, mask = fragment.warp, fragment.mask
        warp.line = segment.last.line
        if segment.guard is not None:
            register, negated = segment.guard
            flags = warp.slots[register]
            mask = mask & (~flags if negated else flags)
            if not np.count_nonzero(mask):
                fragment.segment = segment.next
                return False
        wait = segment.run(warp, mask)
        if wait is not None:
            fragment.wait = wait
            return True
        fragment.segment = segment.next
        return warp.index == self.options.starved or self.random.chance(0.25)


def _blame(error: Exception, warp: Warp, line: int) -> None:
    """Adds the place to an exception that left an instruction."""
    warp.line = line
    if not isinstance(error, EmulationError):
        error.add_note(f"while emulating {warp.place}")
    elif error.place is None:
        error.place = warp.place
