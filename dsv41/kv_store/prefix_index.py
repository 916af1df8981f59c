"""Which pages of the device pool hold which prefixes, and how much of a hit is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from dsv41.cache import PagePool
from dsv41.config import DSV41Error
from dsv41.kv_store.page_keys import KEY_BYTES, ImageSpan, PageId
from dsv41.kv_store.prefix_tree import Node, PrefixTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """The longest beginning of a row that the pool holds.

    Attributes:
      full: pool pages of the full pages, in order.
      tail: pool page that agrees with the row's next page at its beginning, if there is one. It may hold other tokens
        behind; whoever goes on from there copies it first.
      tail_tokens: for how many tokens it agrees.
      tokens: tokens of the row that are covered, tail included.
    """

    full: tuple[int, ...]
    tail: int | None
    tail_tokens: int
    tokens: int

    def cut(self, tokens: int, page_tokens: int) -> tuple[tuple[int, ...], int | None]:
        """For a hit shortened to `tokens`: the pages to share, and the page to copy and go on in, if it ends inside."""
        number = tokens // page_tokens
        if tokens > self.tokens:
            raise DSV41Error(f"prefix match: {tokens} tokens of a match of {self.tokens}")
        if not tokens % page_tokens:
            return self.full[:number], None
        return self.full[:number], self.full[number] if number < len(self.full) else self.tail


class Evicted(NamedTuple):
    """A page that left the index: what it is, and the pool page that still has its bytes until it is written to."""

    page: PageId
    number: int


class IndexCounts(NamedTuple):
    """Pages in the index, how many of them are tails, and how many have holders beside the index."""

    pages: int
    tails: int
    in_use: int


class PrefixIndex:
    """Pages of a pool by prefix.

    The index is one of the holders of each page in it; sequences are others. It never changes a page and never
    replaces one: the first who publishes a prefix stays, so that nobody's context changes under way. Index and pool
    belong to one thread.

    Args:
      pool: the pages' holders.
      root: parent of first pages, from `cache_fingerprint`.
      page_tokens: tokens of a full page.

    Raises:
      DSV41Error: the root is no key.
    """

    def __init__(self, pool: PagePool, root: bytes, page_tokens: int):
        if len(root) != KEY_BYTES:
            raise DSV41Error(f"prefix index: root: expected {KEY_BYTES} bytes, got {len(root)}")
        self._pool, self._root, self._page_tokens = pool, root, page_tokens
        self._tree: PrefixTree[int] = PrefixTree()
        self._numbers: set[int] = set()

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, page: PageId) -> bool:
        return self._tree.get(page.key) is not None

    def match(self, pages: Sequence[PageId], limit: int) -> Match:
        """The longest beginning of a row in the index: full pages, then the page that agrees longest with the next.

        It counts as a use of those pages but holds none of them: `PagePool.share` does, before anything is evicted.

        Args:
          pages: the row's, from `split_row`.
          limit: how many of its tokens may come from the index; a prompt's length less one.
        """
        nodes: list[Node[int]] = []
        tail, tail_tokens = None, 0
        for page in pages:
            left = limit - len(nodes) * self._page_tokens
            node = self._tree.get(page.key) if page.count == self._page_tokens <= left else None
            if node is None:
                if left > 0 and page.parent == (nodes[-1].page.key if nodes else self._root):
                    tail, tail_tokens = self._tree.tail(page.head(left)) or (None, 0)
                break
            nodes.append(node)
        self._tree.touch([*nodes, tail] if tail else nodes)
        return Match(
            full=tuple(node.value for node in nodes),
            tail=tail.value if tail else None,
            tail_tokens=tail_tokens,
            tokens=len(nodes) * self._page_tokens + tail_tokens,
        )

    def publish(self, page: PageId, number: int) -> int:
        """Makes a full page known whose tokens are all committed.

        Args:
          page: what it holds; the page before it is in the index.
          number: the caller's pool page with its bytes.

        Returns:
          The pool page of that prefix. If it is not `number`, somebody was first: the caller shares that page instead
          and releases its own.

        Raises:
          DSV41Error: the page is not full, or its parent is not in the index, or `number` is free or there as another
            page.
        """
        if page.count != self._page_tokens:
            raise DSV41Error(f"prefix index: a full page has {self._page_tokens} tokens, got {page.count}")
        node = self._tree.get(page.key)
        if node is None:
            node = self._add(page, number)
        else:
            self._tree.touch([node])
        return node.value

    def publish_tail(self, page: PageId, number: int) -> bool:
        """Makes the last, unfinished page of a sequence known. Nobody but the caller may write to it then, and only
        behind those tokens.

        Returns:
          Whether it was added: not if a page in the index already serves all of it.

        Raises:
          DSV41Error: the page is full, or as for `publish`.
        """
        if page.count >= self._page_tokens:
            raise DSV41Error(f"prefix index: a tail has fewer than {self._page_tokens} tokens, got {page.count}")
        node = self._tree.covering(page)
        if node is None:
            self._add(page, number)
            return True
        self._tree.touch([node])
        return False

    def _add(self, page: PageId, number: int) -> Node[int]:
        parent = self._tree.get(page.parent)
        if page.parent != self._root and (parent is None or parent.page.count != self._page_tokens):
            raise DSV41Error(f"prefix index: the parent of page {number} is not in the index")
        if not self._pool.holders(number):
            raise DSV41Error(f"prefix index: page {number} is free")
        shorter = self._tree.beginning(page)
        if number in self._numbers and (shorter is None or shorter.value != number):
            raise DSV41Error(f"prefix index: page {number} is already there as another page")
        self._pool.share([number])
        if shorter is not None:
            self._remove(shorter)
        self._numbers.add(number)
        return self._tree.add(page, number)

    def _remove(self, node: Node[int]) -> None:
        self._tree.remove(node)
        self._numbers.discard(node.value)
        self._pool.release([node.value])

    def evict(self, count: int) -> list[Evicted]:
        """Frees up to `count` pool pages, least recently used first.

        A page that anybody else holds stays, and so does one with children in the index.

        Returns:
          The pages that are free now, fewer if no more can be had. Read what is to be kept before the next step.
        """
        gone = []
        while len(gone) < count:
            node = self._tree.oldest_leaf(busy=lambda node: self._pool.holders(node.value) > 1)
            if node is None:
                break
            self._remove(node)
            gone.append(Evicted(node.page, node.value))
        return gone

    def clear(self) -> None:
        """Forgets everything, as after a change of weights. Pages of sequences stay theirs."""
        for node in list(self._tree):
            self._remove(node)

    def counts(self) -> IndexCounts:
        """How many pages there are; looks at each."""
        nodes = list(self._tree)
        return IndexCounts(
            pages=len(nodes),
            tails=sum(node.page.count < self._page_tokens for node in nodes),
            in_use=sum(self._pool.holders(node.value) > 1 for node in nodes),
        )


def usable_hit(
    hit: int,
    prompt_tokens: int,
    *,
    window: int,
    min_gain: int = 1,
    multiple: int = 2,
    spans: Sequence[ImageSpan] = (),
) -> int:
    """How many tokens of a hit a prompt goes on from.

    * At least one token is left to compute, for the logits.
    * The result is a multiple of every compression ratio, so that no group is half in the hit.
    * It is not inside an image span: the end of an image would have to be computed without its beginning. (Rows that
      are replayed before it may be inside one and need the image's embeddings.)
    * Replay computes `window` tokens again, so that a hit of no more than that gains nothing and is not used.

    Args:
      hit: tokens of the prompt whose global KV is there.
      prompt_tokens: its length.
      window: tokens that replay computes; 0 if the window state at the result is at hand.
      min_gain: tokens that must be saved, at least 1.
      multiple: of the result; least common multiple of the ratios.
      spans: the prompt's images, ascending.

    Returns:
      Tokens, 0 if the hit is not used.
    """
    usable = max(min(hit, prompt_tokens - 1), 0)
    usable -= usable % multiple
    for span in reversed(spans):
        if span.start < usable < span.end:
            usable = span.start - span.start % multiple
    return usable if usable - window >= max(min_gain, 1) else 0
