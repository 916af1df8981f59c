"""The engine without a model: a numpy cache, and steps whose next token is a hash of what they read back from it.

A record of a page and an entry of a window hold the hash of the whole row up to there, so that what belongs to another
row, position or prefix is recognised wherever it is read. Whoever reads such a thing gets no token but an error.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from dsv41.config import ModelConfig
from dsv41.engine import engine, prefix_pages
from dsv41.engine.engine_options import CED, EngineOptions
from dsv41.engine.engine_runner import EngineRunner
from dsv41.engine.round_plan import RoundPlan
from dsv41.engine.speculative_step import RoundOutput, request_state
from dsv41.models import Model, token_bucket
from dsv41.ops.sampling import NO_TOKEN

PAGE = 16
DECODER_START = 1  # of two layers
_PENDING = 8
_RATIOS = (2, 1)


def row_hashes(ids) -> np.ndarray:
    """int64 [n]: of every beginning of a row; equal for equal beginnings only."""
    ids = np.asarray(ids, np.uint64)
    position = np.arange(1, len(ids) + 1, dtype=np.uint64)
    mixed = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + position * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.cumsum(mixed ^ (mixed >> np.uint64(32)), dtype=np.uint64).astype(np.int64)


def next_token(whole: int, seed: int) -> int:
    """What follows a row of that hash."""
    return 3 + (int(whole) ^ (seed * 0x5851F42D)) % 497


def expected_tokens(prompt, count: int, seed: int, stop_ids=()) -> tuple[int, ...]:
    """What a request must get, computed from its own tokens alone."""
    row = list(prompt)
    while len(row) < len(prompt) + count:
        row.append(next_token(row_hashes(row)[-1], seed))
        if row[-1] in stop_ids:
            break
    return tuple(row[len(prompt) :])


class FakeCache:
    """Page arrays uint8 [pages, records, 16 bytes] of (hash, token), windows and raw rows by slot."""

    def __init__(self, slots: int, max_tokens: int, num_pages: int, ring: int):
        window = SimpleNamespace(length=ring)
        self.layout = SimpleNamespace(
            page_tokens=PAGE, ratios=_RATIOS, window=window, pages_per_logical=lambda ratio: 1
        )
        self.main = tuple(np.zeros((num_pages, PAGE // ratio, 16), np.uint8) for ratio in _RATIOS)
        self.window = [np.zeros((slots, ring), np.int64) for _ in range(2)]
        self.pending = np.zeros((slots, _PENDING), np.int64)
        self.page_table = np.full((slots, -(-max_tokens // PAGE)), -1, np.int32)
        self.published = dict  # gives: tokens that others may read, by page

    def records(self, source: int, slot: int, count: int) -> np.ndarray:
        """int64 [count, 2] the first records of a slot's row; -1 where it has no page."""
        table, size = self.page_table[slot], PAGE // _RATIOS[source]
        pages = table[: -(-count // size)]
        found = self.main[source][np.maximum(pages, 0)].view(np.int64)
        found = np.where(pages[:, None, None] >= 0, found, -1)
        return found.reshape(-1, 2)[:count]

    def write(self, source: int, slot: int, entry: np.ndarray, values: np.ndarray) -> None:
        size = PAGE // _RATIOS[source]
        page = self.page_table[slot, np.minimum(entry // size, self.page_table.shape[1] - 1)]
        there = (page >= 0) & (entry < size * self.page_table.shape[1])
        shared = self.published()
        for number, inside in zip(page[there], entry[there] % size, strict=True):
            assert inside >= shared.get(number, 0) // _RATIOS[source], "a write to what others read"
        self.main[source].view(np.int64)[page[there], entry[there] % size] = values[there]


def _write_page(cache, page, arrays):
    for pool, array in zip(cache.main, arrays, strict=True):
        pool[page] = array
    return cache


def _copy_page(cache, source, target):
    return _write_page(cache, target, [pool[source] for pool in cache.main])


def _set_page_table(cache, slot, pages):
    cache.page_table[slot] = -1
    cache.page_table[slot, : len(pages)] = pages
    return cache


def _write_rings(cache, slot, rings):
    for window, ring in zip(cache.window, rings, strict=False):
        window[slot] = ring.view(np.int64)
    return cache


_PAGE_IO = {
    "read_page": lambda cache, page: tuple(pool[page].copy() for pool in cache.main),
    "write_page": _write_page,
    "copy_page": _copy_page,
    "set_page_table": _set_page_table,
    "read_rings": lambda cache, slot, layers: tuple(w[slot].copy().view(np.uint8) for w in cache.window[:layers]),
    "write_rings": _write_rings,
    "_poison_bytes": lambda cache: tuple(np.full(pool.shape[1:], 0xFF, np.uint8) for pool in cache.main),
}


class FakeRunner(EngineRunner):
    """`EngineRunner` with its host side as it is, and numpy where it calls compiled steps."""

    def __init__(self, model: Model, options: EngineOptions):
        self._model, self._options = model, options
        self.rows, self._window = options.max_requests, model.config.text_config.sliding_window
        self._plan = RoundPlan(model.config, options.speculation, self.rows)
        pages = options.num_pages or self.rows * -(-options.max_tokens // PAGE)
        self.cache = FakeCache(self.rows, options.max_tokens, pages, self._window + self._plan.drafts)
        self.chunk = token_bucket(max(options.prefill_chunk, self._window))
        self._look_back = 0
        self._ahead = None  # no Engram, nothing to fetch ahead
        self._state = request_state([], [], self.rows, 0)
        self._sampling, self._stop = [None] * self.rows, np.full((self.rows, options.stop_ids), -1, np.int32)
        self._flying = engine.collections.deque()
        self.computed = 0  # rows forwarded

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def _set_row(self, row, new):
        for field in ("anchor", "start", "round", "remaining"):
            getattr(self._state, field)[row] = getattr(new, field)[0]

    def _round_inputs(self):
        return None

    def _forward(self, batch, params, drawn, ends):
        tail = (self._window if ends else 0) if self._options.prefill == CED else None
        ids = np.full(len(batch.num_new), NO_TOKEN)
        for i in np.flatnonzero(batch.num_new):
            count, start = int(batch.num_new[i]), int(batch.start[i])
            floor, deep = int(batch.window_floor[i]), count
            decoder_floor = floor
            if tail is not None:
                deep = int(batch.tail[i])
                assert deep <= min(count, tail), "a tail has rows that are not in the step"
                decoder_floor = start + count - deep
            floors, write_from = (floor, decoder_floor), int(batch.write_from[i])
            whole = self._row(int(batch.slot[i]), batch.tokens[i, :count], start, floors, write_from, deep)
            if whole is not None:
                ids[i] = next_token(whole, params[i].seed)
        return ids

    def _row(self, slot: int, tokens, start: int, floors=(0, 0), write_from: int = 0, deep: int = 1) -> int | None:
        """Forwards tokens of a row, the last `deep` of them through both layers; its hash, None if anything is off."""
        cache, end = self.cache, start + len(tokens)
        self.computed += len(tokens)
        # What is there before the step begins, as far as it may be read.
        below = cache.records(1, slot, max(start, min(write_from, end)))
        hashes = row_hashes(np.concatenate([below[:start, 1], tokens]) & 0xFFFF)
        good = np.array_equal(hashes[: len(below)], below[:, 0])
        good &= bool((cache.page_table[slot, : -(-end // PAGE)] >= 0).all())
        pairs = cache.records(0, slot, len(below) // 2)
        good &= np.array_equal(pairs[:, 0], hashes[1 : len(below) // 2 * 2 : 2])
        for ring, first, floor in zip(cache.window, (start, end - deep), floors, strict=True):
            seen = np.arange(max(floor, first - self._window + 1), first)
            good &= np.array_equal(ring[slot, seen % ring.shape[1]], hashes[seen])
            keep = np.arange(max(first, end - ring.shape[1]), end)
            ring[slot, keep % ring.shape[1]] = hashes[keep] if good else -2
        self._write_pages(slot, tokens, start, write_from, hashes if good else np.full(end, -2))
        return int(hashes[-1]) if good else None

    def _write_pages(self, slot: int, tokens, start: int, write_from: int, hashes: np.ndarray) -> None:
        cache, end = self.cache, start + len(tokens)
        at = np.arange(start, end)
        new = at >= write_from
        cache.write(1, slot, at[new], np.stack([hashes[start:], tokens], axis=1)[new])
        # A pair is written by its second token; the first one's row is kept until then.
        before = np.where(at > start, hashes[at - 1], cache.pending[slot, (at - 1) % _PENDING])
        fits = np.where(before == hashes[at - 1], hashes[at], -3)
        closes = new & (at % 2 == 1)
        cache.write(0, slot, at[closes] // 2, np.stack([fits, tokens], axis=1)[closes])
        keep = at[-_PENDING:]
        cache.pending[slot, keep % _PENDING] = hashes[keep]

    def _run_round(self, width, inputs):
        state, tokens = self._state, np.full((self.rows, width), -1, np.int32)
        count, verified, accepted = (np.zeros(self.rows, np.int32) for _ in range(3))
        for row in np.flatnonzero(state.remaining):
            remaining, start = int(state.remaining[row]), int(state.start[row])
            drawn, whole = [], self._row(row, state.anchor[row : row + 1], start)
            verified[row] = min(self._plan.drafts, remaining - 1)
            accepted[row] = 0 if whole is None else whole % int(verified[row] + 1)
            for step in range(accepted[row] + 1):
                drawn.append(NO_TOKEN if whole is None else next_token(whole, self._sampling[row].seed))
                if whole is None or drawn[-1] in self._stop[row] or len(drawn) == remaining:
                    break
                if step < accepted[row]:
                    whole = self._row(row, np.array(drawn[-1:]), start + step + 1)
            # Drafts that are not accepted leave what must never be read.
            for position in range(start + len(drawn), start + verified[row] + 1):
                self._leave_garbage(row, position)
            tokens[row, : len(drawn)], count[row] = drawn, len(drawn)
            stopped = drawn[-1] in self._stop[row] or len(drawn) == remaining
            state.anchor[row], state.start[row] = drawn[-1], start + len(drawn)
            state.remaining[row] = 0 if stopped else remaining - len(drawn)
        none = np.zeros((self.rows, 0), np.float32)
        return RoundOutput(tokens, count, verified, accepted, none, none)

    def _leave_garbage(self, row: int, position: int) -> None:
        cache, at = self.cache, np.array([position])
        assert cache.page_table[row, position // PAGE] >= 0, "a draft has no page"
        cache.write(1, row, at, np.array([[-4, 5]]))
        cache.write(0, row, at // 2, np.array([[-4, 5]]))
        for ring in cache.window:
            ring[row, position % ring.shape[1]] = -4
        cache.pending[row, position % _PENDING] = -4


def fake_engine(monkeypatch, config: ModelConfig, options: EngineOptions, **tiers) -> engine.Engine:
    """An engine over the numpy cache. `config` gives vocabulary and window."""
    for name, function in _PAGE_IO.items():
        monkeypatch.setattr(prefix_pages, name, function)
    monkeypatch.setattr(engine, "EngineRunner", FakeRunner)
    model = Model(config=config, params={}, drafter={})
    # Two layers, the second of which is the decoder.
    made = engine.Engine(model, options, checkpoint="none", **tiers)
    made._prefix._encoder_layers = DECODER_START
    made._run.cache.published = lambda: {node.value: node.page.count for node in made._prefix.index._tree}
    return made
