"""Which pages of a cache's pool are free and how many hold each of the others: host bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dsv41.config import DSV41Error


class PagePool:
    """Logical pages 0 .. num_pages - 1, all free at first.

    Where pools are spread over devices, each has an equal run of pages, a part; which part a page must come from is
    `PageOwners`' to say.

    A page that was allocated has one holder; `share` adds one, `release` takes one away, and a page without holders is
    free. Holders are page table lines of sequences and indexes of prefixes. A call that fails changes nothing.

    Raises:
      DSV41Error: there is no page.
    """

    def __init__(self, num_pages: int, parts: int = 1):
        if num_pages < 1:
            raise DSV41Error(f"page pool: num_pages must be positive, got {num_pages}")
        if parts < 1 or num_pages % parts:
            raise DSV41Error(f"page pool: num_pages={num_pages} is not a multiple of {parts} parts")
        self._part_size = num_pages // parts
        self._free = [list(range((i + 1) * self._part_size - 1, i * self._part_size - 1, -1)) for i in range(parts)]
        self._holders = [0] * num_pages

    @property
    def num_pages(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return sum(len(free) for free in self._free)

    def num_free_in(self, part: int) -> int:
        """Free pages of a part."""
        return len(self._free[part])

    def holders(self, page: int) -> int:
        """How many hold a page; 0 if it is free.

        Raises:
          DSV41Error: there is no such page.
        """
        if not 0 <= page < len(self._holders):
            raise DSV41Error(f"page pool: page {page} is outside [0, {len(self._holders)})")
        return self._holders[page]

    def allocate(self, count: int, parts: Sequence[int] | None = None) -> list[int]:
        """Takes `count` free pages, each with the caller as its only holder. Their bytes are whatever was left there.

        parts: of each page, the part it must come from; None: the pool has one.

        Raises:
          DSV41Error: fewer are free; names the part if there are several.
        """
        if parts is None and len(self._free) > 1:
            raise DSV41Error(f"page pool: the pool has {len(self._free)} parts, and none was named")
        wanted = Counter([0] * count if parts is None else parts)
        if count < 0 or wanted.total() != count:
            raise DSV41Error(f"page pool: {count} pages of {wanted.total()} parts cannot be allocated")
        for part, number in wanted.items():
            free = len(self._free[part])
            if number > free:
                where = f"part {part}'s " if len(self._free) > 1 else ""
                raise DSV41Error(f"page pool: {number} pages are needed, {free} of {where}{self._part_size} are free")
        pages = [self._free[part].pop() for part in ([0] * count if parts is None else parts)]
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
        for page in reversed(freed):
            self._free[page // self._part_size].append(page)
        return freed

    def own(self, page: int) -> int:
        """A page that the caller, one of the holders of `page`, may write to.

        Itself if there is no other holder; else a new one of the same part, to which the caller must copy the bytes
        before its next step writes, and for which it gave up `page`.

        Raises:
          DSV41Error: `page` is free, or a new one is needed and none is free.
        """
        if not self.holders(page):
            raise DSV41Error(f"page pool: page {page} is free and cannot be written")
        if self._holders[page] == 1:
            return page
        (copy,) = self.allocate(1, [page // self._part_size])
        self._holders[page] -= 1
        return copy
