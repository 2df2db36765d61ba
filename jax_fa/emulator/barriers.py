"""The state of mbarriers, named barriers and the cluster barrier."""

from __future__ import annotations

from jax_fa.emulator.faults import BarrierError


class Mbarrier:
    """An mbarrier object.

    A phase is complete when no arrivals and no bytes are pending; then the parity flips and the
    arrivals are due again. Bytes may be negative in between: data may land before expect_tx.

    Attributes:
      published: whether a fence after mbarrier.init showed it to the asynchronous proxy.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self.pending = count
        self.bytes = 0
        self.phase = 0
        self.published = False

    def arrive(self, count: int = 1) -> None:
        """`count` arrivals."""
        if count > self.pending:
            raise BarrierError(
                f"{self}: {count} more arrivals than the phase expects ({self.pending} pending)"
            )
        self.pending -= count
        self._settle()

    def expect(self, size: int) -> None:
        """The phase shall also wait for `size` bytes."""
        self.bytes += size
        self._settle()

    def complete(self, size: int) -> None:
        """`size` bytes have landed."""
        self.bytes -= size
        self._settle()

    def passed(self, parity: int) -> bool:
        """True if the phase of this parity is over (the current one has the other parity)."""
        return self.phase & 1 != parity

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def __str__(self) -> str:
        return (
            f"mbarrier {self.name} (phase {self.phase}, {self.pending} of {self.count} "
            f"arrivals and {self.bytes} bytes pending)"
        )


class NamedBarrier:
    """One of the sixteen barriers of a CTA (bar / barrier.cta)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = 0
        self.expected: int | None = None
        self.generation = 0
        self.who: list[str] = []

    def arrive(self, threads: int, expected: int, who: str) -> None:
        """`threads` threads arrive at a barrier for `expected` of them."""
        if self.expected not in (None, expected):
            raise BarrierError(
                f"{self}: {who} arrives for {expected} threads, others for {self.expected}"
            )
        self.expected = expected
        self.arrived += threads
        self.who.append(who)
        if self.arrived > expected:
            raise BarrierError(f"{self}: more threads arrive than it is for ({self.who})")
        if self.arrived == expected:
            self.generation += 1
            self.arrived, self.expected, self.who = 0, None, []

    def __str__(self) -> str:
        return f"named barrier {self.number} ({self.arrived} of {self.expected} threads)"


class ClusterBarrier:
    """barrier.cluster: all live threads of a cluster."""

    def __init__(self) -> None:
        self.generation = 0
        self.arrived: set[tuple[int, int, int]] = set()

    def settle(self, live: int) -> None:
        """Opens the barrier when every live thread has arrived."""
        if self.arrived and len(self.arrived) >= live:
            self.generation += 1
            self.arrived.clear()
