"""Which pages of a cache's pool are free and how many hold each of the others: host bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dsv41.config import DSV41Error


class PagePool:
    """Logical pages 0 .. num_pages - 1, all free at first.

    A page that was allocated has one holder; `share` adds one, `release` takes one away, and a page without holders is
    free. Holders are page table lines of sequences and indexes of prefixes. A call that fails changes nothing.

    Raises:
      DSV41Error: there is no page.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise DSV41Error(f"page pool: num_pages must be positive, got {num_pages}")
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_pages(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold a page; 0 if it is free.

        Raises:
          DSV41Error: there is no such page.
        """
        if not 0 <= page < len(self._holders):
            raise DSV41Error(f"page pool: page {page} is outside [0, {len(self._holders)})")
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages, each with the caller as its only holder. Their bytes are whatever was left there.

        Raises:
          DSV41Error: fewer are free.
        """
        if count < 0 or count > len(self._free):
            raise DSV41Error(f"page pool: {count} pages are needed, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to each page.

        Raises:
          DSV41Error: a page is free or does not exist.
        """
        pages = list(pages)
        for page in pages:
            if not self.holders(page):
                raise DSV41Error(f"page pool: page {page} is free and cannot be shared")
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Takes a holder from each page; the pages that are free after it, in the order given.

        Raises:
          DSV41Error: a page has fewer holders than times it is named, or does not exist.
        """
        pages = list(pages)
        for page, times in Counter(pages).items():
            if self.holders(page) < times:
                raise DSV41Error(f"page pool: page {page} is released more often than it is held")
        freed = []
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                freed.append(page)
        self._free.extend(reversed(freed))
        return freed

    def own(self, page: int) -> int:
        """A page that the caller, one of the holders of `page`, may write to: itself if there is no other holder, else
        a new one, to which the caller must copy the bytes before its next step writes, and for which it gave up `page`.

        Raises:
          DSV41Error: `page` is free, or a new one is needed and none is free.
        """
        if not self.holders(page):
            raise DSV41Error(f"page pool: page {page} is free and cannot be written")
        if self._holders[page] == 1:
            return page
        (copy,) = self.allocate(1)
        self._holders[page] -= 1
        return copy
