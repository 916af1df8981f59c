"""Pages of the engine's sequences: found in earlier prefixes, taken from the pool, left for later prompts.

The cache is a value that every call takes and returns; bookkeeping is on the host. Pages that are shared are never
written: a sequence that goes on inside one writes to a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dsv41.cache import (
    FORMAT_VERSION,
    KVCache,
    PagePool,
    copy_page,
    read_page,
    read_rings,
    set_page_table,
    write_page,
    write_rings,
)
from dsv41.kv_store import (
    Found,
    ImageSpan,
    Match,
    PageId,
    PageTiers,
    PrefixIndex,
    Snapshot,
    SnapshotPool,
    snapshot_key,
    split_row,
    usable_hit,
)

_NOTHING = Match(full=(), tail=None, tail_tokens=0, tokens=0)


@dataclasses.dataclass(eq=False)
class SequencePages:
    """What a running request holds: its pages in order, what they are, and how many of them are in the index."""

    pages: list[int]
    page_ids: list[PageId]
    published: int
    spans: Sequence[ImageSpan]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Hit:
    """How a prompt can go on from what is there.

    Attributes:
      tokens: prompt tokens whose global KV is there and used; 0 for a cold start.
      page_ids: the prompt's pages.
      match, found: on the device, and beyond that elsewhere.
      by_tier: `tokens` by where they come from.
      snapshot: window state at `tokens`, if there is one and it can be used; else the window is replayed.
    """

    tokens: int
    page_ids: list[PageId]
    match: Match = _NOTHING
    found: Found | None = None
    by_tier: dict[str, int] = dataclasses.field(default_factory=dict)
    snapshot: Snapshot | None = None


class PrefixPages:
    """The pool, the index of prefixes in it, and the tiers behind them."""

    def __init__(
        self,
        cache: KVCache,
        root: bytes,
        *,
        window: int,
        encoder_layers: int,
        tiers: PageTiers | None,
        snapshots: SnapshotPool | None,
        poison: bool,
    ):
        layout = cache.layout
        self.size = layout.page_tokens
        num_pages = cache.main[0].shape[0] // layout.pages_per_logical(layout.ratios[0])
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(self.pool, root, self.size)
        self.tiers, self.snapshots = tiers, snapshots
        self.evicted_pages = 0
        self._ring_length = layout.window.length
        self._root, self._window, self._encoder_layers = root, window, encoder_layers
        self._multiple = int(np.lcm.reduce(layout.ratios))
        self._poison = _poison_bytes(cache) if poison else None
        self._rings: list[tuple[tuple[bytes, int], tuple[jax.Array, ...]]] = []

    def cold(self, ids: np.ndarray, spans: Sequence[ImageSpan]) -> Hit:
        """A prompt that goes on from nothing."""
        return Hit(tokens=0, page_ids=split_row(self._root, ids, self.size, spans))

    def find(self, ids: np.ndarray, spans: Sequence[ImageSpan], limit: int, *, with_snapshot: bool) -> Hit:
        """The longest usable prefix of a prompt, of up to `limit` tokens, on the device, in host memory or on disk."""
        page_ids = split_row(self._root, ids, self.size, spans)
        match = self.index.match(page_ids, limit)
        found, tokens = None, match.tokens
        before = self._disk_tokens()
        if self.tiers is not None:
            found = self.tiers.find(page_ids, match.tokens, limit)
            tokens = found.tokens
        rules = {"multiple": self._multiple, "spans": spans}
        snapshot = None
        usable = usable_hit(tokens, len(ids), window=0, **rules)
        # A shorter suffix than the window needs encoder outputs of the prefix, which only replay gives (3.3).
        if with_snapshot and self.snapshots is not None and usable and len(ids) - usable >= self._window:
            self._settle_rings()
            snapshot = self.snapshots.get(self._snapshot_key(page_ids, usable))
        if snapshot is None:
            usable = usable_hit(tokens, len(ids), window=self._window, **rules)
        on_device = min(usable, match.tokens)
        disk = min(self._disk_tokens() - before, usable - on_device)
        by_tier = {"hbm": on_device, "host": usable - on_device - disk, "ssd": disk}
        return Hit(tokens=usable, page_ids=page_ids, match=match, found=found, by_tier=by_tier, snapshot=snapshot)

    def _disk_tokens(self) -> int:
        return 0 if self.tiers is None else self.tiers.disk_counts.tokens

    def open(
        self, cache: KVCache, slot: int, hit: Hit, tokens: int, spans: Sequence[ImageSpan]
    ) -> tuple[KVCache, SequencePages | None]:
        """Pages for a sequence of `tokens` tokens in a slot that goes on from a hit; None if the pool has too few."""
        full, inside = divmod(hit.tokens, self.size)
        on_device = hit.tokens <= hit.match.tokens
        shared, source = hit.match.cut(hit.tokens, self.size) if on_device else (hit.match.full, None)
        held = shared if source is None else [*shared, source]
        self.pool.share(held)
        if self.tiers is not None:
            # What is in use here must not grow old on disk.
            self.tiers.touch(hit.page_ids[: len(held)])
        cache, own = self._take(cache, self._pages_for(tokens) - len(shared))
        if own is None:
            self.pool.release(held)
            return cache, None
        pages = [*shared, *own]
        first = len(hit.match.full)
        for number in range(len(shared), full):
            cache = write_page(cache, pages[number], hit.found.full[number - first])
        if source is not None:
            cache = copy_page(cache, source, pages[full])
            self.pool.release([source])
        elif inside:
            more = hit.found.full[full - first :]
            cache = write_page(cache, pages[full], more[0] if more else hit.found.tail)
        if hit.snapshot is not None:
            cache = write_rings(cache, slot, hit.snapshot.arrays)
        cache = set_page_table(cache, slot, pages)
        return cache, SequencePages(pages, hit.page_ids, len(shared), spans)

    def grow(self, cache: KVCache, slot: int, sequence: SequencePages, tokens: int) -> tuple[KVCache, bool]:
        """Makes room for `tokens` tokens; False, with nothing changed, if the pool has too few pages."""
        need = self._pages_for(tokens) - len(sequence.pages)
        if need <= 0:
            return cache, True
        cache, own = self._take(cache, need)
        if own is None:
            return cache, False
        sequence.pages += own
        return set_page_table(cache, slot, sequence.pages), True

    def publish(self, cache: KVCache, slot: int, sequence: SequencePages, ids: np.ndarray, *, final: bool) -> KVCache:
        """Makes the pages of committed tokens `ids` known to later prompts, and sends them to disk.

        The first who published a page stays: a sequence that computed the same prefix beside it changes over to that
        page and frees its own.
        """
        sequence.page_ids = split_row(self._root, ids, self.size, sequence.spans, known=sequence.page_ids)
        changed = False
        for i, page in enumerate(sequence.page_ids[sequence.published :], sequence.published):
            own = sequence.pages[i]
            if page.count < self.size:
                self.index.publish_tail(page, own)
                break
            number = self.index.publish(page, own)
            if number != own:
                self.pool.share([number])
                sequence.pages[i], changed = number, True
                cache = self._freed(cache, self.pool.release([own]))
            sequence.published = i + 1
        self._save(cache, sequence, sequence.page_ids if final else sequence.page_ids[: sequence.published])
        return set_page_table(cache, slot, sequence.pages) if changed else cache

    def close(self, cache: KVCache, slot: int, sequence: SequencePages) -> KVCache:
        """Gives the sequence's pages back."""
        cache = set_page_table(cache, slot, ())
        return self._freed(cache, self.pool.release(sequence.pages))

    def snapshot(self, cache: KVCache, slot: int, sequence: SequencePages, tokens: int) -> None:
        """Keeps the encoder's window after `tokens` committed tokens; `publish` has been called for them."""
        tokens -= tokens % self._multiple
        if self.snapshots is None or not tokens:
            return
        key = self._snapshot_key(sequence.page_ids, tokens)
        # Read later, so that the device need not stop for it.
        self._rings.append((key, read_rings(cache, slot, self._encoder_layers)))

    def _snapshot_key(self, page_ids: Sequence[PageId], tokens: int) -> tuple:
        """Rings of another length, as an engine with drafts has them, are other snapshots."""
        return (*snapshot_key(page_ids, tokens, self.size), self._ring_length, FORMAT_VERSION)

    def _settle_rings(self) -> None:
        rings, self._rings = self._rings, []
        for key, arrays in rings:
            self.snapshots.put(key, tuple(np.asarray(a) for a in arrays))

    def warm_up(self, cache: KVCache) -> KVCache:
        """Runs every copy once; page 0 and slot 0 must not be in use."""
        page = read_page(cache, 0)
        cache = write_page(cache, 0, [np.asarray(a) for a in page])
        cache = copy_page(cache, 0, 0)
        rings = [np.asarray(a) for a in read_rings(cache, 0, self._encoder_layers)]
        cache = write_rings(cache, 0, rings)
        return set_page_table(cache, 0, ())

    def settle(self) -> None:
        """Brings what was read off the device to its place."""
        if self.snapshots is not None:
            self._settle_rings()
            self.snapshots.expire()

    def _save(self, cache: KVCache, sequence: SequencePages, pages: Sequence[PageId]) -> None:
        """Sends what the disk lacks of a row's first pages there."""
        if self.tiers is None:
            return
        numbers = {page.key: number for page, number in zip(pages, sequence.pages, strict=False)}
        for page in self.tiers.unsaved(pages):
            if not self.tiers.save(page, tuple(np.asarray(a) for a in read_page(cache, numbers[page.key]))):
                return  # the queue is full; what follows could not be stored without this page

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _take(self, cache: KVCache, count: int) -> tuple[KVCache, list[int] | None]:
        """`count` pages, for which prefixes nobody uses are forgotten, least recently used first."""
        short = count - self.pool.num_free
        if short > 0:
            counts = self.index.counts()
            if counts.pages - counts.in_use < short:
                # Not enough even so: forget nothing for a request that has to wait.
                return cache, None
            gone = self.index.evict(short)
            self.evicted_pages += len(gone)
            for page, number in gone:
                if self.tiers is not None:
                    self.tiers.demote(page, tuple(np.asarray(a) for a in read_page(cache, number)))
            cache = self._freed(cache, [number for _, number in gone])
        if count > self.pool.num_free:
            return cache, None
        return cache, self.pool.allocate(count)

    def _freed(self, cache: KVCache, pages: Sequence[int]) -> KVCache:
        if self._poison is not None:
            for page in pages:
                cache = write_page(cache, page, self._poison)
        return cache


def _poison_bytes(cache: KVCache) -> tuple[np.ndarray, ...]:
    """A page in which every scale is NaN."""
    shapes = jax.eval_shape(lambda c: read_page(c, 0), cache)
    return tuple(np.full(s.shape, 0xFF, np.uint8) for s in shapes)
