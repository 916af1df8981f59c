"""A tree of pages by prefix: the longest stored beginning of a row, and what to drop first."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from dsv41.kv_store.leaf_order import LeafOrder
from dsv41.kv_store.page_keys import PageId, agreement

V = TypeVar("V")


@dataclasses.dataclass(eq=False, slots=True)
class Node(Generic[V]):
    """A page in the tree and what is kept for it."""

    page: PageId
    value: V
    last_use: int


class PrefixTree(Generic[V]):
    """Pages by key and by parent.

    A page may be added before its parent or outlive it; it is then found only by those who reached its parent
    elsewhere. Of the children of one parent none is a beginning of another: the longer one serves whoever asks for the
    shorter.
    """

    def __init__(self):
        self._nodes: dict[bytes, Node[V]] = {}
        # By parent, sorted by identity: the child that agrees longest with a row is next to where the row would be.
        self._children: dict[bytes, list[Node[V]]] = {}
        self._leaves = LeafOrder(lambda node: self._nodes.get(node.page.key) is node and not self.has_children(node))
        self._ticks = itertools.count()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node[V]]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node[V] | None:
        return self._nodes.get(key)

    def has_children(self, node: Node[V]) -> bool:
        return node.page.key in self._children

    def _neighbours(self, page: PageId) -> list[Node[V]]:
        siblings = self._children.get(page.parent, [])
        at = bisect.bisect_left(siblings, page.identity, key=lambda node: node.page.identity)
        return siblings[max(at - 1, 0) : at + 1]

    def covering(self, page: PageId) -> Node[V] | None:
        """The node that is this page or goes on after its tokens."""
        return next((n for n in self._neighbours(page) if agreement(n.page, page) == page.count), None)

    def beginning(self, page: PageId) -> Node[V] | None:
        """The node that is a real beginning of this page."""
        return next((n for n in self._neighbours(page) if agreement(n.page, page) == n.page.count < page.count), None)

    def add(self, page: PageId, value: V) -> Node[V]:
        """Adds a page that nothing covers and no node begins."""
        node = Node(page, value, next(self._ticks))
        if page.parent in self._nodes:
            self._nodes[page.parent].last_use = node.last_use
        siblings = self._children.setdefault(page.parent, [])
        bisect.insort_left(siblings, node, key=lambda node: node.page.identity)
        self._nodes[page.key] = node
        self._leaves.offer(node)
        return node

    def remove(self, node: Node[V]) -> None:
        """Takes a node out. Its children, if any, stay."""
        page = node.page
        del self._nodes[page.key]
        siblings = self._children[page.parent]
        at = bisect.bisect_left(siblings, page.identity, key=lambda node: node.page.identity)
        del siblings[siblings.index(node, at)]
        if not siblings:
            del self._children[page.parent]
            if page.parent in self._nodes:
                self._leaves.offer(self._nodes[page.parent])

    def touch(self, nodes: Sequence[Node[V]]) -> None:
        """Marks nodes as just used."""
        tick = next(self._ticks)
        for node in nodes:
            node.last_use = tick
            if not self.has_children(node):
                self._leaves.offer(node)

    def tail(self, page: PageId) -> tuple[Node[V], int] | None:
        """Of the children of the page's parent the one that agrees longest with it, and for how many tokens."""
        found = [(agreement(node.page, page), node) for node in self._neighbours(page)]
        tokens, node = max(found, key=lambda pair: pair[0], default=(0, None))
        return (node, tokens) if tokens else None

    def oldest_leaf(self, busy: Callable[[Node[V]], bool] = lambda node: False) -> Node[V] | None:
        """The leaf used least recently of those that are not busy."""
        return self._leaves.oldest(busy)
