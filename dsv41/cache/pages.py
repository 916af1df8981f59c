"""Which pages are free: host bookkeeping of a cache's page pool."""

from __future__ import annotations

from dsv41.cache.kv_cache import KVCache, assign_pages
from dsv41.config import DSV41Error


class PageAllocator:
    """Hands pages of one `KVCache` to its slots as sequences grow.

    The cache must have been made with `num_pages`, so that all pages start free.
    """

    def __init__(self, num_pages: int, page_tokens: int):
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}
        self._page_tokens = page_tokens

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_of(self, slot: int) -> tuple[int, ...]:
        return tuple(self._owned.get(slot, ()))

    def reserve(self, cache: KVCache, slot: int, tokens: int) -> KVCache:
        """Gives `slot` the pages it lacks to hold `tokens` tokens; takes none if they do not suffice.

        Raises:
          DSV41Error: too few free pages, or more tokens than a sequence may have.
        """
        owned = self._owned.setdefault(slot, [])
        need = -(-tokens // self._page_tokens) - len(owned)
        if need <= 0:
            return cache
        if need > len(self._free):
            raise DSV41Error(
                f"slot {slot} needs {need} more cache pages for {tokens} tokens, {len(self._free)} are free"
            )
        pages = self._free[-need:][::-1]
        cache = assign_pages(cache, slot, len(owned), pages)
        del self._free[-need:]
        owned.extend(pages)
        return cache

    def release(self, cache: KVCache, slot: int) -> KVCache:
        """Takes all pages of `slot` back."""
        owned = self._owned.pop(slot, [])
        if owned:
            cache = assign_pages(cache, slot, 0, [-1] * len(owned))
        self._free.extend(reversed(owned))
        return cache
