"""Global, shared, local and parameter memory, with what is known about every byte of it.

A 64-bit generic address is a global address as registered, or lies in one of the windows below.
A 32-bit shared address is `rank << 24 | offset`, rank being the CTA's rank in its cluster, so
the same address means the same byte to every CTA of the cluster.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_fa.emulator import native
from jax_fa.emulator.dot import Factors
from jax_fa.emulator.faults import (
    AsyncHazardError,
    OutOfBoundsError,
    ProxyFenceError,
    UninitializedReadError,
)
from jax_fa.emulator.values import DTYPES, UNSIGNED

PARAM_WINDOW = 1 << 60
SHARED_WINDOW = 1 << 61
LOCAL_WINDOW = 1 << 62
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
CHUNK = 16
WORD = 4
_WRITTEN = np.uint64(0x0101010101010101)


class Region(NamedTuple):
    """A registered piece of global memory; `data` aliases the caller's array."""

    base: int
    name: str
    data: np.ndarray

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.base + len(self.data)


class Memory:
    """Device global memory as a set of registered arrays."""

    def __init__(self, buffers: Mapping[str, np.ndarray] | None = None) -> None:
        self._regions: list[Region] = []
        self._bases: list[int] = []
        self._next = 0x7000_0000_0000
        self._core = native.core and native.core.GlobalCore()
        for name, array in (buffers or {}).items():
            self.add(name, array)

    def add(self, name: str, array: np.ndarray, address: int | None = None) -> int:
        """Registers an array; stores of the kernel go straight into it.

        Args:
          name: used in messages.
          array: C-contiguous and writeable.
          address: the device address it shall have, as found in a recorded launch; None picks
            a fresh one that is a multiple of 2 MiB.

        Returns:
          The device address.

        Raises:
          ValueError: the array is not contiguous, or the address range is taken.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"memory: {name} is not C-contiguous; pass a contiguous copy")
        data = array.reshape(-1).view(np.uint8)
        if address is None:
            address = self._next
            self._next += -(-len(data) // (1 << 21)) * (1 << 21) + (1 << 21)
        index = bisect.bisect_right(self._bases, address)
        before = self._regions[index - 1] if index else None
        after = self._regions[index] if index < len(self._regions) else None
        if before and before.end > address or after and address + len(data) > after.base:
            raise ValueError(f"memory: {name} at {address:#x} overlaps another buffer")
        self._regions.insert(index, Region(address, name, data))
        self._bases.insert(index, address)
        if self._core is not None:
            self._core.add(address, data, data.flags.writeable)
        return address

    @property
    def regions(self) -> tuple[Region, ...]:
        """Every registered array, by address."""
        return tuple(self._regions)

    def region(self, low: int, high: int) -> Region:
        """The region that holds [low, high).

        Raises:
          OutOfBoundsError: names the nearest buffer.
        """
        index = bisect.bisect_right(self._bases, low) - 1
        if index >= 0 and high <= self._regions[index].end:
            return self._regions[index]
        near = "no buffer lies below it"
        if index >= 0:
            region = self._regions[index]
            near = (
                f"{low - region.base} bytes into {region.name!r}, which has "
                f"{len(region.data)} bytes at {region.base:#x}"
            )
        raise OutOfBoundsError(f"global address {low:#x}..{high - 1:#x} is not registered: {near}")

    def load(self, addresses: np.ndarray, size: int, count: int = 1) -> np.ndarray:
        """`count` elements of `size` bytes (unsigned) at each address: (addresses, count)."""
        if self._core is not None:
            found = np.empty((len(addresses), count), DTYPES[UNSIGNED[size]])
            if self._core.load(addresses, size * count, found):
                return found
        elements, index = self._elements(addresses, size, count)
        if elements is not None:
            return elements[index]
        return np.concatenate(
            [self.load(addresses[i : i + 1], size, count) for i in range(len(addresses))]
        )

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Stores values of shape (addresses, count)."""
        width = values.dtype.itemsize * values.shape[1]
        if self._core is not None and self._core.store(addresses, width, values):
            return
        elements, index = self._elements(addresses, values.dtype.itemsize, values.shape[1])
        if elements is not None:
            elements[index] = values
            return
        for lane in range(len(addresses)):
            self.store(addresses[lane : lane + 1], values[lane : lane + 1])

    def _elements(
        self, addresses: np.ndarray, size: int, count: int
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """The region that holds all addresses as (n, count) elements, and the indices in it.

        (None, ...) when several regions are addressed at once.
        """
        width = size * count
        low = int(np.minimum.reduce(addresses))
        high = int(np.maximum.reduce(addresses)) + width
        index = bisect.bisect_right(self._bases, low) - 1
        if len(addresses) > 1 and (index < 0 or high > self._regions[index].end):
            return None, addresses
        region = self.region(low, high)
        offset = (addresses - np.uint64(region.base)).astype(np.int64)
        if width > 1 and int(np.bitwise_or.reduce(offset)) & (width - 1):
            raise OutOfBoundsError(f"misaligned {width}-byte access at {low:#x} in {region.name!r}")
        usable = len(region.data) // width * width
        elements = region.data[:usable].view(DTYPES[UNSIGNED[size]]).reshape(-1, count)
        return elements, offset // width


class Claim:
    """Chunks of a shared memory that an asynchronous operation may still read or write.

    With access "write words" they are 4-byte words: cp.async writes less than a chunk.
    """

    __slots__ = ("chunks", "access", "who")

    def __init__(self, chunks: np.ndarray, access: str, who: str) -> None:
        self.chunks = chunks
        self.access = access
        self.who = who


def words_of(offsets: np.ndarray, width: int) -> np.ndarray:
    """Numbers of the 4-byte words that accesses of `width` bytes at the offsets touch."""
    first = offsets.astype(np.int64) // WORD
    return (first[:, None] + np.arange(-(-width // WORD))).reshape(-1)


def _words_of_chunks(chunks: np.ndarray) -> np.ndarray:
    """Numbers of the 4-byte words of chunks."""
    return words_of(np.asarray(chunks) * CHUNK, CHUNK)


class SharedMemory:
    """One CTA's shared memory, and what is known about every 16-byte chunk of it.

    Attributes:
      written: per byte, whether anything was ever stored there.
      owner: per chunk, 1 + the warp with a generic store that no proxy fence published yet.
      reads, writes: per chunk, how many asynchronous operations may still read or write it.
      word_writes: per 4-byte word, how many may still write it that write less than its chunk.
      word_claims: how many such operations there are.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        size = -(-size // 128) * 128
        self.base = rank << RANK_SHIFT
        self.data = np.full(size, 0xFF, dtype=np.uint8)
        self.views = {s: self.data.view(DTYPES[UNSIGNED[s]]) for s in (1, 2, 4, 8)}
        self.wide = self.data.view(np.uint64).reshape(-1, 2)
        self.written = np.zeros(size, dtype=np.uint8)
        self.written_chunks = self.written.view(np.uint64).reshape(-1, 2)
        self.owner = np.zeros(size // CHUNK, dtype=np.uint16)
        self.reads = np.zeros(size // CHUNK, dtype=np.uint16)
        self.writes = np.zeros(size // CHUNK, dtype=np.uint16)
        self.word_writes = np.zeros(size // WORD, dtype=np.uint16)
        self.claims: dict[Claim, None] = {}
        self.word_claims = 0
        self.core = native.core and native.core.SharedCore(
            self.size,
            self.base,
            (self.data, self.written),
            (self.owner, self.reads, self.writes),
            self.word_writes,
        )
        # Decoded matrix operands, valid while `version` does not change.
        self.version = self.cache_version = 0
        self.cache: dict[tuple, Factors] = {}
        self.touched: dict[int, list[np.ndarray]] = {}

    def _index(self, offsets: np.ndarray, width: int) -> np.ndarray:
        """Numbers of the `width`-byte units at the offsets, which must be aligned and inside."""
        high = int(np.maximum.reduce(offsets))
        if high + width > self.size:
            raise OutOfBoundsError(
                f"shared offset {high} + {width} bytes lies beyond the CTA's {self.size} bytes"
            )
        if width > 1 and int(np.bitwise_or.reduce(offsets)) & (width - 1):
            raise OutOfBoundsError(
                f"misaligned {width}-byte access at shared offset {int(offsets[0])}"
            )
        return offsets // np.uint32(width)

    def load(self, offsets: np.ndarray, size: int, count: int = 1) -> np.ndarray:
        """`count` elements of `size` bytes at each offset, which something must have written."""
        width = size * count
        if self.core is not None:
            found = np.empty((len(offsets), count), DTYPES[UNSIGNED[size]])
            if self.core.load(offsets, width, found):
                return found
        index = self._index(offsets, width)
        if self.claims:
            chunks = offsets >> np.uint32(4)
            if np.count_nonzero(self.writes[chunks]):
                self._hazard("is read", chunks, "write")
            self._check_words("is read", words_of, offsets, width)
        known = self.written.reshape(-1, width)[index]
        if np.count_nonzero(known) != known.size:
            bad = int(offsets[~known.all(axis=1)][0])
            raise UninitializedReadError(f"shared offset {bad} is read and was never written")
        return self.views[size].reshape(-1, count)[index]

    def store(self, offsets: np.ndarray, values: np.ndarray, warp: int) -> None:
        """Generic store by a warp of values of shape (offsets, count)."""
        width = values.dtype.itemsize * values.shape[1]
        chunks = offsets >> np.uint32(4)
        if self.core is not None and self.core.store(offsets, width, values, warp):
            self.version += 1
            self.touched.setdefault(warp, []).append(chunks)
            return
        index = self._index(offsets, width)
        if self.claims:
            if np.count_nonzero(self.writes[chunks]):
                self._hazard("is overwritten", chunks, "write")
            if np.count_nonzero(self.reads[chunks]):
                self._hazard("is overwritten", chunks, "read")
            self._check_words("is overwritten", words_of, offsets, width)
        self.version += 1
        self.views[values.dtype.itemsize].reshape(-1, values.shape[1])[index] = values
        self.written.reshape(-1, width)[index] = 1
        self.mark_generic(chunks, warp)

    def mark_generic(self, chunks: np.ndarray, warp: int) -> None:
        """Generic writes of a warp, which a proxy fence must publish."""
        self.owner[chunks] = warp + 1
        self.touched.setdefault(warp, []).append(chunks)

    def publish(self, warp: int) -> None:
        """fence.proxy.async of a warp: its generic stores become visible to the async proxy."""
        for chunks in self.touched.pop(warp, ()):
            mine = chunks[self.owner[chunks] == warp + 1]
            self.owner[mine] = 0

    def begin_read(self, chunks: np.ndarray, who: str, used: np.ndarray | None = None) -> Claim:
        """An asynchronous operation is issued that will read the chunks.

        `used` are those whose contents matter and must have been written; by default all.
        """
        if used is None:
            if self.core is not None and self.core.begin_read(chunks):
                return self._claim(chunks, "read", who)
            used = chunks
        if np.count_nonzero(self.owner[chunks]):
            bad = int(chunks[self.owner[chunks] != 0][0])
            raise ProxyFenceError(
                f"{who} reads shared offset {bad * CHUNK}, stored by warp "
                f"{int(self.owner[bad]) - 1} of the CTA without a later fence.proxy.async"
            )
        if np.count_nonzero(self.writes[chunks]):
            self._hazard(f"is read by {who}", chunks, "write")
        self._check_words(f"is read by {who}", _words_of_chunks, chunks)
        complete = self.written_chunks[used] == _WRITTEN
        if not complete.all():
            unwritten = ~complete.all(axis=-1)
            raise UninitializedReadError(
                f"{who} reads shared offset {int(used[unwritten][0]) * CHUNK}, never written"
            )
        self.reads[chunks] += 1
        return self._claim(chunks, "read", who)

    def begin_write(self, chunks: np.ndarray, who: str) -> Claim:
        """An asynchronous operation is issued that will overwrite the chunks."""
        if np.count_nonzero(self.writes[chunks]):
            self._hazard(f"is overwritten by {who}", chunks, "write")
        if np.count_nonzero(self.reads[chunks]):
            self._hazard(f"is overwritten by {who}", chunks, "read")
        self._check_words(f"is overwritten by {who}", _words_of_chunks, chunks)
        self.writes[chunks] += 1
        return self._claim(chunks, "write", who)

    def begin_word_write(self, words: np.ndarray, who: str) -> Claim:
        """`begin_write` of 4-byte words; others of their chunks may be used meanwhile."""
        chunks = words // (CHUNK // WORD)
        if np.count_nonzero(self.writes[chunks]):
            self._hazard(f"is overwritten by {who}", chunks, "write")
        if np.count_nonzero(self.reads[chunks]):
            self._hazard(f"is overwritten by {who}", chunks, "read")
        self._check_words(f"is overwritten by {who}", np.asarray, words)
        self.word_writes[words] += 1
        self.word_claims += 1
        return self._claim(words, "write words", who)

    def end(self, claim: Claim) -> None:
        """The operation no longer needs the chunks; what it wrote has landed."""
        del self.claims[claim]
        if claim.access == "read":
            if self.core is None or not self.core.end_read(claim.chunks):
                self.reads[claim.chunks] -= 1
        elif claim.access == "write words":
            self.version += 1
            self.word_claims -= 1
            self.word_writes[claim.chunks] -= 1
            self.written.reshape(-1, WORD)[claim.chunks] = 1
        else:
            self.version += 1
            self.writes[claim.chunks] -= 1
            self.owner[claim.chunks] = 0
            self.written_chunks[claim.chunks] = _WRITTEN

    def chunks(self, offset: int, size: int) -> np.ndarray:
        """Chunk numbers of a contiguous range."""
        if offset + size > self.size:
            raise OutOfBoundsError(
                f"shared range {offset} + {size} lies beyond the CTA's {self.size} bytes"
            )
        return np.arange(offset // CHUNK, (offset + size + CHUNK - 1) // CHUNK)

    def _claim(self, chunks: np.ndarray, access: str, who: str) -> Claim:
        claim = Claim(chunks, access, who)
        self.claims[claim] = None
        return claim

    def _check_words(self, what: str, words_of: Callable, *place: Any) -> None:
        """Refuses the use of 4-byte words that a small copy may still write."""
        if not self.word_claims:
            return
        words = words_of(*place)
        busy = words[self.word_writes[words] != 0]
        if len(busy):
            bad = int(busy[0])
            who = next(c.who for c in self.claims if c.access == "write words" and bad in c.chunks)
            raise AsyncHazardError(
                f"shared offset {bad * WORD} {what} while {who} may still write it"
            )

    def _hazard(self, what: str, chunks: np.ndarray, access: str) -> None:
        counts = self.writes if access == "write" else self.reads
        chunks = np.asarray(chunks)
        bad = int(chunks[counts[chunks] != 0].reshape(-1)[0])
        who = next(c.who for c in self.claims if c.access == access and bad in c.chunks)
        raise AsyncHazardError(
            f"shared offset {bad * CHUNK} {what} while {who} may still {access} it"
        )
