"""Host memory for window snapshots: whatever is in here may be gone at the next look, and then is computed again."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from dsv41.config import DSV41Error

DEFAULT_TTL_S = 600.0
DEFAULT_SHARE = 0.1
_CGROUP_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")


def host_memory_bytes() -> int:
    """Bytes of memory that this process can hope for: the machine's, or its container's if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # no container, or "max"
        return total
    return min(total, limit)


def default_budget(share: float = DEFAULT_SHARE) -> int:
    """Bytes that are a share, above 0 and at most 1, of the host's memory.

    Raises:
      DSV41Error: it is not.
    """
    if not 0 < share <= 1:
        raise DSV41Error(f"host memory: share: expected a number above 0 and at most 1, got {share}")
    return int(host_memory_bytes() * share)


@dataclasses.dataclass
class PoolStats:
    """Counts since a pool was made."""

    hits: int = 0
    misses: int = 0
    stored: int = 0  # entries put
    stored_bytes: int = 0
    hit_bytes: int = 0  # bytes handed out
    refused: int = 0  # larger than the whole budget
    evictions: int = 0  # dropped for room
    expirations: int = 0  # dropped for age


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """What is kept under a key.

    Attributes:
      arrays: uint8 arrays, read-only from now on.
      meta: small values that say how to read them, such as their length and format version.
    """

    arrays: tuple[np.ndarray, ...]
    meta: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclasses.dataclass(eq=False, slots=True)
class _Kept:
    snapshot: Snapshot
    last_use: float


class SnapshotPool:
    """Snapshots by key, the least recently used dropped for room and the unused ones after a while.

    Calls may come from any thread.

    Args:
      byte_budget: what all arrays together may take. None: a tenth of the host's memory.
      ttl_s: seconds after its last use that a snapshot lives.
      clock: seconds that never go back.

    Raises:
      DSV41Error: budget or lifetime is not positive.
    """

    def __init__(
        self,
        byte_budget: int | None = None,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        budget = default_budget() if byte_budget is None else byte_budget
        for name, value in (("byte_budget", budget), ("ttl_s", ttl_s)):
            if value <= 0:
                raise DSV41Error(f"snapshot pool: {name} must be positive, got {value}")
        self._budget, self._ttl, self._clock = budget, ttl_s, clock
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()  # least recently used first
        self._nbytes = 0
        self._lock = threading.Lock()
        self.stats = PoolStats()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, never above the budget."""
        return self._nbytes

    @property
    def byte_budget(self) -> int:
        return self._budget

    def put(self, key: Hashable, arrays: tuple[np.ndarray, ...], meta: Mapping[str, Any] | None = None) -> bool:
        """Keeps a snapshot in place of any other under its key. The caller no longer writes to the arrays.

        Returns:
          Whether it is kept: one larger than the budget is not.

        Raises:
          DSV41Error: an array is not uint8.
        """
        for number, array in enumerate(arrays):
            if array.dtype != np.uint8:
                raise DSV41Error(f"snapshot pool: array {number}: expected uint8, got {array.dtype}")
        snapshot = Snapshot(tuple(arrays), dict(meta or {}))
        with self._lock:
            self._drop(key)
            self._expire()
            if snapshot.nbytes > self._budget:
                self.stats.refused += 1
                return False
            while self._nbytes + snapshot.nbytes > self._budget:
                self._drop(next(iter(self._kept)))
                self.stats.evictions += 1
            self._kept[key] = _Kept(snapshot, self._clock())
            self._nbytes += snapshot.nbytes
            self.stats.stored += 1
            self.stats.stored_bytes += snapshot.nbytes
        return True

    def get(self, key: Hashable) -> Snapshot | None:
        """The snapshot under a key, which counts as a use of it."""
        with self._lock:
            self._expire()
            kept = self._kept.get(key)
            if kept is None:
                self.stats.misses += 1
                return None
            kept.last_use = self._clock()
            self._kept.move_to_end(key)
            self.stats.hits += 1
            self.stats.hit_bytes += kept.snapshot.nbytes
            return kept.snapshot

    def discard(self, key: Hashable) -> None:
        """Drops a snapshot, if it is there."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Drops all."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0

    def expire(self) -> None:
        """Gives the memory of old snapshots back now; `put` and `get` do so as well."""
        with self._lock:
            self._expire()

    def _drop(self, key: Hashable) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._nbytes -= kept.snapshot.nbytes

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.last_use > oldest:
                return
            self._drop(key)
            self.stats.expirations += 1
