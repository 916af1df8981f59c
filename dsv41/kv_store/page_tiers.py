"""Pages that are not on the device but in host memory or on disk, looked up as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsv41.config import DSV41Error
from dsv41.kv_store.host_pages import HostPages
from dsv41.kv_store.page_keys import PageId
from dsv41.kv_store.page_store import PageStore

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """What goes on after the tokens that the device has.

    Attributes:
      full: the bytes of the next full pages, in order.
      tail: the bytes of a page that agrees with the one after those at its beginning, if there is one.
      tail_tokens: for how many tokens it agrees.
      tokens: tokens of the row that device and these pages cover together.
    """

    full: tuple[Arrays, ...]
    tail: Arrays | None
    tail_tokens: int
    tokens: int


@dataclasses.dataclass
class TierCounts:
    """What a tier has delivered."""

    pages: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, tokens: int, arrays: Arrays) -> None:
        self.pages += 1
        self.tokens += tokens
        self.bytes += sum(array.nbytes for array in arrays)


class PageTiers:
    """Host memory over disk; either may be missing. One thread at a time looks things up.

    Args:
      page_tokens: tokens of a full page.
      host: pages that the device dropped.
      store: pages on disk, writable or not.
    """

    def __init__(self, page_tokens: int, *, host: HostPages | None = None, store: PageStore | None = None):
        self._page_tokens, self._host, self._store = page_tokens, host, store
        self.host_counts, self.disk_counts = TierCounts(), TierCounts()

    def find(self, pages: Sequence[PageId], have: int, limit: int) -> Found:
        """The longest beginning of a row that goes on from what the device has; reads its bytes.

        Args:
          pages: the row's, from `split_row`.
          have: tokens of it that the device has, as in `Match.tokens`.
          limit: how many of its tokens may come from a cache.

        Raises:
          DSV41Error: have is more than limit, or more than the pages hold.
        """
        if not 0 <= have <= min(limit, sum(page.count for page in pages)):
            raise DSV41Error(f"page tiers: {have} tokens on the device, more than the row or the limit of {limit}")
        size = self._page_tokens
        first = have // size
        wanted = [page for page in pages[first : limit // size] if page.count == size]
        full: list[Arrays] = []
        while len(full) < len(wanted):
            more = self._full_pages(wanted[len(full) :])
            if not more:
                break
            full += more
        covered = max(have, (first + len(full)) * size)
        number, inside = divmod(covered, size)
        tail, tail_tokens = None, 0
        if number < len(pages) and limit > covered:
            tail, tail_tokens = self._tail(pages[number].head(limit - number * size), inside)
        if tail is not None:
            covered = number * size + tail_tokens
        return Found(full=tuple(full), tail=tail, tail_tokens=tail_tokens, tokens=covered)

    def _full_pages(self, pages: Sequence[PageId]) -> list[Arrays]:
        """The first of them that one tier has, and those behind it that the same tier has."""
        found: list[Arrays] = []
        if self._host is not None:
            while len(found) < len(pages) and (arrays := self._host.get(pages[len(found)])) is not None:
                self.host_counts.add(pages[len(found)].count, arrays)
                found.append(arrays)
        if found or self._store is None:
            return found
        # Only what host memory lacks is read.
        run = next((i for i, page in enumerate(pages) if self._host is not None and page in self._host), len(pages))
        for stored in self._store.read(pages[:run]):
            self.disk_counts.add(stored.page.count, stored.arrays)
            found.append(stored.arrays)
        return found

    def _tail(self, page: PageId, have: int) -> tuple[Arrays | None, int]:
        """The best tail for a page of which the device has `have` tokens, if one agrees for more."""
        best, tokens, counts = None, have, None
        if self._host is not None and (found := self._host.get_tail(page)) is not None and found[1] > tokens:
            best, tokens, counts = *found, self.host_counts
        if tokens < page.count and self._store is not None and (read := self._store.read_tail(page)) is not None:
            stored, agreed = read
            if agreed > tokens:
                best, tokens, counts = stored.arrays, agreed, self.disk_counts
        if best is None:
            return None, 0
        counts.add(tokens, best)
        return best, tokens

    def save(self, page: PageId, arrays: Arrays) -> bool:
        """Offers a page that is complete, or the end of a sequence, to the disk; whether it was queued."""
        return self._store is not None and self._store.writable and self._store.put(page, arrays)

    def unsaved(self, pages: Sequence[PageId]) -> list[PageId]:
        """Those of a row's pages to `save`, in this order, to have the row whole on disk; none without such a disk."""
        return self._store.unsaved(pages) if self._store is not None and self._store.writable else []

    def demote(self, page: PageId, arrays: Arrays) -> bool:
        """Keeps a page that the device drops in host memory, and on disk if it is not there; whether in memory."""
        self.save(page, arrays)
        return self._host is not None and self._host.put(page, arrays)

    def touch(self, pages: Sequence[PageId]) -> None:
        """Tells the disk that pages are in use on the device, so that they do not grow old there."""
        if self._store is not None:
            self._store.touch(pages)
