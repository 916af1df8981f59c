"""Host memory for pages that had to leave the device."""

from __future__ import annotations

import threading

import numpy as np

from dsv41.config import DSV41Error
from dsv41.kv_store.page_keys import PageId
from dsv41.kv_store.prefix_tree import PrefixTree
from dsv41.kv_store.snapshot_pool import PoolStats, default_budget

Arrays = tuple[np.ndarray, ...]


def check_arrays(what: str, arrays: Arrays) -> None:
    """Raises DSV41Error unless there is at least one array and all are uint8."""
    if not arrays:
        raise DSV41Error(f"{what}: a page has at least one array")
    for number, array in enumerate(arrays):
        if array.dtype != np.uint8:
            raise DSV41Error(f"{what}: array {number}: expected uint8, got {array.dtype}")


class HostPages:
    """Pages' bytes by prefix, inside a byte budget; the least recently used page without children here goes first.

    Pages arrive as the device drops them, children before parents, and are never replaced. Calls may come from any
    thread.

    Args:
      byte_budget: what all arrays together may take. None: a tenth of the host's memory.

    Raises:
      DSV41Error: the budget is not positive.
    """

    def __init__(self, byte_budget: int | None = None):
        self._budget = default_budget() if byte_budget is None else byte_budget
        if self._budget <= 0:
            raise DSV41Error(f"host pages: byte_budget must be positive, got {self._budget}")
        self._tree: PrefixTree[Arrays] = PrefixTree()
        self._nbytes = 0
        self._lock = threading.Lock()
        self.stats = PoolStats()

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, page: PageId) -> bool:
        with self._lock:
            return self._tree.get(page.key) is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, never above the budget."""
        return self._nbytes

    def put(self, page: PageId, arrays: Arrays) -> bool:
        """Keeps a page's bytes, which the caller no longer writes to.

        Returns:
          Whether they were added: not if a page in here serves all of it already, nor if they exceed the budget.

        Raises:
          DSV41Error: an array is not uint8.
        """
        check_arrays("host pages", arrays)
        size = sum(array.nbytes for array in arrays)
        with self._lock:
            covering = self._tree.covering(page)
            if covering is not None:
                self._tree.touch([covering])
                return False
            if size > self._budget:
                self.stats.refused += 1
                return False
            shorter = self._tree.beginning(page)
            if shorter is not None:
                self._remove(shorter)
            while self._nbytes + size > self._budget:
                self._remove(self._tree.oldest_leaf())
                self.stats.evictions += 1
            self._tree.add(page, arrays)
            self._nbytes += size
            self.stats.stored += 1
            self.stats.stored_bytes += size
        return True

    def _remove(self, node) -> None:
        self._tree.remove(node)
        self._nbytes -= sum(array.nbytes for array in node.value)

    def get(self, page: PageId) -> Arrays | None:
        """The bytes of exactly this page, which counts as a use of it."""
        with self._lock:
            node = self._tree.get(page.key)
            return self._used(node)

    def get_tail(self, page: PageId) -> tuple[Arrays, int] | None:
        """Of the pages after the same parent the one that agrees longest with this one, and for how many tokens."""
        with self._lock:
            found = self._tree.tail(page)
            arrays = self._used(found[0] if found else None)
            return (arrays, found[1]) if found else None

    def _used(self, node) -> Arrays | None:
        if node is None:
            self.stats.misses += 1
            return None
        self._tree.touch([node])
        self.stats.hits += 1
        self.stats.hit_bytes += sum(array.nbytes for array in node.value)
        return node.value

    def clear(self) -> None:
        """Drops all."""
        with self._lock:
            for node in list(self._tree):
                self._remove(node)
