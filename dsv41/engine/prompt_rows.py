"""Engram rows of prompt chunks, fetched ahead: while the device computes a chunk, those of the next one are hashed,
read, freed of duplicates and copied to it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.engine.engram_mode import EngramMeter, StallClock
from dsv41.engine.request import Request, chunk_size
from dsv41.engine.step_batch import Known, Shape, step_rows
from dsv41.engram_store import EngramRows, Prefetcher
from dsv41.models import Model

Rows = tuple[jax.Array, jax.Array | None]  # values [B, T, L, K, D], scales [B, T, L, K, D / 32] or None
Chunks = dict[int, tuple[int, int]]  # row -> first position of its chunk and the one behind it


def prompt_chunks(requests: Sequence[Request], chunk: int, tails: Sequence[int]) -> Iterator[Chunks]:
    """What each step forwards of the prompts: a chunk of every one that is not in yet."""
    places = dict.fromkeys(range(len(requests)), 0)
    while places:
        step = {i: (at, at + chunk_size(requests[i].prompt_tokens - at, chunk, tails[i])) for i, at in places.items()}
        yield step
        places = {i: end for i, (_, end) in step.items() if end < requests[i].prompt_tokens}


class PromptRows:
    """The rows of a fixed batch's prompts, step after step."""

    def __init__(self, model: Model, requests: Sequence[Request], shape: Shape, chunks: Iterator[Chunks]):
        """`shape` is that of the steps, `chunks` as of `prompt_chunks`; nothing is fetched yet."""
        self._model, self._requests, self._shape = model, requests, shape
        self._coming = chunks
        self._plan: list[Chunks] = []
        self._step = 0
        self._thread: Prefetcher[Rows] = Prefetcher(depth=2)

    def start(self) -> None:
        """Begins with the first chunks."""
        for n in range(self._step, self._step + self._thread.depth):
            if n == len(self._plan) and (chunks := next(self._coming, None)) is not None:
                self._plan.append(chunks)
            if n < len(self._plan):
                self._thread.ask(n, functools.partial(self._fetch, self._plan[n]))

    def _fetch(self, chunks: Chunks) -> Rows:
        known: dict[int, Known] = {}
        for i, (begin, end) in chunks.items():
            ids = self._requests[i].ids
            known[i] = ids[begin:end], ids[:begin]
        rows = tuple(step_rows(self._model, self._shape, known, what="prompt"))
        # Parts of several hosts are added up by their devices, which must meet in the same order: not from this thread.
        return self._model.place_rows(rows) if self._model.engram.whole else rows

    def take(self, taken: Mapping[int, Known], work: jax.Array | None, meter: EngramMeter) -> Rows:
        """The rows of the step that is about to forward `taken` of the prompts; the next ones are begun.

        Args:
          taken: row -> (new tokens, those before them), as the plan says.
          work: an output of the step before.
          meter: counts.

        Raises:
          DSV41Error: a row cannot be read; names the prompt.
        """
        planned = self._plan[self._step] if self._step < len(self._plan) else None
        if planned != {i: (len(past), len(past) + len(new)) for i, (new, past) in taken.items()}:
            raise ValueError(f"prompt chunks: the step takes other tokens than the {planned} that were fetched ahead")
        clock = StallClock(work)
        waited: list[bool] = []

        def look() -> None:
            waited.append(True)
            clock.look()

        rows = self._thread.take(self._step, look)
        meter.stall_s += clock.stop() if waited else 0.0
        meter.prefetched += 1
        meter.prefetch_hits += not waited
        self._plan[self._step] = {}
        self._step += 1
        self.start()
        return self._model.join_rows(EngramRows(*rows))

    def close(self) -> None:
        """Ends the thread."""
        self._thread.close()


@jax.jit
def merge_rows(into: Rows, first: Rows, mask: jax.Array) -> Rows:
    """`into` [B, T, ...] with the first token of the rows in `mask` bool [B] from `first` [B, 1, ...]."""

    def merge(whole: jax.Array | None, one: jax.Array | None) -> jax.Array | None:
        if whole is None:
            return None
        chosen = jnp.where(mask.reshape(-1, *(1,) * (whole.ndim - 1)), one, whole[:, :1])
        return jnp.concatenate([chosen, whole[:, 1:]], axis=1)

    return merge(into[0], first[0]), merge(into[1], first[1])


def known_mask(rows: int, known: Mapping[int, Known]) -> np.ndarray:
    """bool [rows]: the rows in `known`."""
    mask = np.zeros(rows, bool)
    mask[list(known)] = True
    return mask
