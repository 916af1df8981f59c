"""Which leaf of a changing tree was used least recently."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, Protocol


class _Used(Protocol):
    last_use: Any


class LeafOrder:
    """Leaves by last use. Whoever changes the tree offers a node again whenever it becomes a leaf or is used as one;
    what was offered before and is no longer true is passed over.

    Args:
      is_leaf: whether a node is still in the tree and has no children.
    """

    def __init__(self, is_leaf: Callable[[Any], bool]):
        self._is_leaf = is_leaf
        self._heap: list[tuple[Any, int, _Used]] = []
        self._serial = itertools.count()
        self._clean_at = 64

    def _holds(self, item: tuple[Any, int, _Used]) -> bool:
        stamp, _, node = item
        return stamp == node.last_use and self._is_leaf(node)

    def offer(self, node: _Used) -> None:
        """Notes that a node is a leaf, last used at `node.last_use`."""
        heapq.heappush(self._heap, (node.last_use, next(self._serial), node))
        if len(self._heap) > self._clean_at:
            latest = {id(item[2]): item for item in self._heap if self._holds(item)}
            self._heap = sorted(latest.values())
            self._clean_at = 2 * len(self._heap) + 64

    def oldest(self, busy: Callable[[Any], bool] = lambda node: False) -> Any | None:
        """The leaf used least recently of those that are not busy, which stays in the order; None if there is none."""
        aside, found = [], None
        while self._heap:
            item = self._heap[0]
            if not self._holds(item):
                heapq.heappop(self._heap)
            elif busy(item[2]):
                aside.append(heapq.heappop(self._heap))
            else:
                found = item[2]
                break
        for item in aside:
            heapq.heappush(self._heap, item)
        return found
