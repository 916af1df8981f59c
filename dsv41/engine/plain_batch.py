"""Plain decoding of a fixed batch of requests: chunked prefill, then a token a step."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import ForwardBatch, KVCache
from dsv41.config import DSV41Error
from dsv41.engine.decode_steps import DecodeSteps, Flight
from dsv41.engine.engram_mode import EngramFigures, EngramMeter, EngramMode, StallClock, chosen_mode
from dsv41.engine.prompt_rows import PromptRows, known_mask, merge_rows, prompt_chunks
from dsv41.engine.request import Request, chunk_size
from dsv41.engine.step_batch import Known, idle_batch, known_tokens, step_batch, step_rows, with_rows
from dsv41.models import Model, image_buckets, token_bucket
from dsv41.ops.sampling import NO_TOKEN, SamplingArrays, SamplingParams, sample, sampling_arrays, step_keys
from dsv41.sharding import fetch

GREEDY = SamplingParams(temperature=0)

# Steps without a draw that the host starts before the first of them has ended.
_CHUNKS_AHEAD = 2

# Step shapes that a model has run, so that only the first run of each counts as compilation.
_WARM: weakref.WeakKeyDictionary[Model, set[tuple]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How a batch goes through its prompts, and where its Engram rows come from.

    Attributes:
      chunk: prompt tokens a row forwards in one step; no less than `tail`.
      tail: only a prompt's last so many tokens go through the decoder, and decoding waits for the last prompt: the
        windows of a step with a tail begin with it. No more than the longest prompt has. None: every layer sees all.
      engram: as in `EngramMode`.
    """

    chunk: int
    tail: int | None = None
    engram: EngramMode = EngramMode.AUTO


class _Drawn(NamedTuple):
    """What a step drew, still on the device."""

    ids: jax.Array  # int32 [B]
    tokens: jax.Array  # int32 [B, 1] the same as new tokens of the next step
    image_mask: jax.Array  # bool [B, 1]
    rows: list[int]  # that have drawn
    numbers: np.ndarray  # int32 [B] tokens drawn before


@jax.jit
def _draw(
    logits: jax.Array, params: SamplingArrays, step: jax.Array, image_token_id: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits float32 [B, 1, V] and int32 [B] tokens drawn before -> ids, tokens, image_mask as in `_Drawn`."""
    ids = sample(logits[:, 0], step_keys(params.seed, step), params)
    tokens = jnp.maximum(ids, 0)[:, None]
    return ids, tokens, tokens == image_token_id


class PlainBatch:
    """The loop over steps. Row i is request i throughout; a finished row is padding. To be closed after use."""

    def __init__(
        self,
        model: Model,
        requests: list[Request],
        sampling: list[SamplingParams],
        cache: KVCache,
        options: BatchOptions,
    ):
        self._model, self._requests, self._cache = model, requests, cache
        self._rows, self._chunk, self._tail = cache.num_slots, options.chunk, options.tail
        padding = [GREEDY] * (self._rows - len(sampling))
        self._params: SamplingArrays = jax.tree.map(jnp.asarray, sampling_arrays([*sampling, *padding]))
        self._prefill_shape, self._decode_shape = (self._rows, token_bucket(self._chunk)), (self._rows, 1)
        self._mode = chosen_mode(model, options.engram)
        self._meter = None if self._mode is None else EngramMeter(self._mode, model.engram)
        self._decoding = DecodeSteps(model, self._mode, self._rows, self._meter)
        self._flight: Flight | None = None
        self._behind: collections.deque[jax.Array | None] = collections.deque()  # logits of prompt steps
        self._prompts: PromptRows | None = None
        if self._mode is EngramMode.OVERLAP:
            chunks = prompt_chunks(requests, self._chunk, [self._tail_of(r) for r in requests])
            self._prompts = PromptRows(model, requests, self._prefill_shape, chunks)

    def start(self) -> None:
        """Before the first step: embeds the images of every prompt, and has the first chunks' rows fetched."""
        if self._meter is not None:
            self._meter.restart()
        if self._prompts is not None:
            self._prompts.start()
        for r in self._requests:
            r.spans = self._model.embed_images(r.ids, r.images)

    def close(self) -> None:
        """Ends the threads; the batch cannot go on."""
        if self._prompts is not None:
            self._prompts.close()

    def engram(self) -> EngramFigures | None:
        """What Engram rows took so far; None if the model has no Engram."""
        return None if self._meter is None else self._meter.figures()

    def warm_up(self) -> None:
        """Runs every step that this model has not run yet once, without tokens; images that need a new one too."""
        images = [image for r in self._requests for image in r.images]
        for with_images in (False, True) if images else (False,):
            for tail in self._tails():
                if self._is_new("forward", self._prefill_shape, with_images, tail):
                    self._warm_up_prefill(with_images, tail)
        if any(r.remaining > 1 for r in self._requests):
            self._warm_up_decoding()
        for image in images:
            if self._is_new("image", *image_buckets(image.plan)):
                jax.block_until_ready(self._model.encode_image(image))

    def _tails(self) -> tuple[int | None, ...]:
        """Of the prefill steps that the prompts need."""
        chunks = max(r.prompt_tokens for r in self._requests) > self._chunk
        return (0, self._tail) if self._tail and chunks else (self._tail,)

    def _warm_up_prefill(self, with_images: bool, tail: int | None) -> None:
        batch = idle_batch(self._model, self._prefill_shape, with_images=with_images)
        batch = with_rows(batch, self._prompt_rows({}, {}))
        if tail is not None:
            batch = dataclasses.replace(batch, tail=np.zeros(self._rows, np.int32))
        logits = self._forward(batch, tail)
        jax.block_until_ready((self._cache, None if logits is None else self._drawn(logits, [])))

    def _warm_up_decoding(self) -> None:
        if self._is_new("decode"):
            batch = idle_batch(self._model, self._decode_shape)
            flight = self._opened(batch, self._model.look_back([], self._rows))
            logits, self._cache = self._decoding.finish(flight, {}, self._cache)
            jax.block_until_ready((self._cache, self._drawn(logits, [])))

    def _is_new(self, *step) -> bool:
        """Whether this model is about to run a step for the first time; it counts as run from then on."""
        seen, key = _WARM.setdefault(self._model, set()), (type(self), self._mode, *step, self._cache.page_table.shape)
        if key in seen:
            return False
        seen.add(key)
        return True

    def _forward(self, batch: ForwardBatch, tail: int | None) -> jax.Array | None:
        """Logits float32 [B, 1, V] of each row's last new token, none if `tail` is 0; the cache is advanced."""
        logits, self._cache, _ = self._model.forward(batch, self._cache, tail=tail)
        return logits

    def live(self) -> dict[int, Request]:
        return {i: r for i, r in enumerate(self._requests) if r.finish_reason is None}

    def step(self) -> list[tuple[int, int]]:
        """Forwards every live row by one chunk; returns (row, drawn id) of rows whose known tokens are all in."""
        live = self.live()
        prompts = {i: r for i, r in live.items() if not r.new_tokens} if self._tail else {}
        rows = prompts or live
        in_prompt = any(r.prefilled < r.prompt_tokens for r in rows.values())
        drawn = self._forward_known(rows) if in_prompt else self._decode(rows)
        if drawn is None:
            return []
        if drawn.rows == list(live) and self._decoding.early:
            self._feed(drawn)
        return self._fetched(drawn)

    def _tail_of(self, request: Request) -> int:
        return min(self._tail or 0, request.prompt_tokens)

    def _forward_known(self, rows: dict[int, Request]) -> _Drawn | None:
        """A step with prompt tokens; None if no row has all of its tokens in."""
        shape, tails = self._prefill_shape, {i: self._tail_of(r) for i, r in rows.items()}
        spans = {i: r.spans for i, r in rows.items() if r.spans is not None}
        prompts = {i for i, r in rows.items() if r.prefilled < r.prompt_tokens}
        taken = {i: r.take(chunk_size(r.waiting, self._chunk, tails[i])) for i, r in rows.items()}
        batch = step_batch(self._model, shape, taken, spans, engram=False)
        parts = {i: known for i, known in taken.items() if i in prompts}
        batch = with_rows(batch, self._prompt_rows(parts, {i: k for i, k in taken.items() if i not in prompts}))
        ready = [i for i, r in rows.items() if not r.waiting]
        tail = None
        if self._tail:
            tail = self._tail if ready else 0
            counts = np.zeros(shape[0], np.int32)
            counts[ready] = [tails[i] for i in ready]
            batch = dataclasses.replace(batch, tail=counts)
        logits = self._forward(batch, tail)
        if ready:
            return self._drawn(logits, ready)
        # The host would otherwise be many chunks ahead, and the device hold the rows of all of them.
        self._behind.append(logits)
        if len(self._behind) > _CHUNKS_AHEAD:
            jax.block_until_ready(self._behind.popleft())
        return None

    def _prompt_rows(self, prompts: dict[int, Known], others: dict[int, Known]) -> tuple | None:
        """Engram rows of a step with prompt tokens `prompts` and single tokens `others`; None without Engram."""
        model, shape = self._model, self._prefill_shape
        known = prompts | others
        if self._mode is None:
            return None
        if self._mode is EngramMode.DEVICE:
            return self._decoding.device_rows(*known_tokens(model, shape, known))
        if self._mode is EngramMode.BLOCKING or not prompts:
            clock = StallClock(self._cache.window[0])
            rows = model.place_rows(model.join_rows(step_rows(model, shape, known)))
            self._meter.stall_s += clock.stop()
        else:
            rows = self._prompts.take(prompts, self._cache.window[0], self._meter)
        if self._mode is EngramMode.OVERLAP and (others or not prompts):
            clock = StallClock(self._cache.window[0])
            first = model.place_rows(model.join_rows(step_rows(model, self._decode_shape, others)))
            rows = merge_rows(rows, first, known_mask(self._rows, others))
            self._meter.stall_s += clock.stop()
        return rows

    def _decode(self, rows: dict[int, Request]) -> _Drawn:
        """A step with one token of every row."""
        taken = {i: r.take(1) for i, r in rows.items()}
        flight, self._flight = self._flight, None
        if flight is None:
            batch = step_batch(self._model, self._decode_shape, taken, engram=False)
            flight = self._opened(batch, known_tokens(self._model, self._decode_shape, taken)[1])
        logits, self._cache = self._decoding.finish(flight, taken, self._cache)
        return self._drawn(logits, list(rows))

    def _opened(self, batch: ForwardBatch, history: np.ndarray) -> Flight:
        flight = Flight(batch, history.astype(np.int32))
        self._cache = self._decoding.open(flight, self._cache)
        return flight

    def _feed(self, drawn: _Drawn) -> None:
        """Starts the next step with the tokens just drawn, which the host has not seen.

        A token that ends its request is forwarded for nothing: it is written behind what is committed.
        """
        going = {i: r for i, r in self.live().items() if r.remaining > 1}
        if not going:
            return
        num_new, start = np.zeros(self._rows, np.int32), np.zeros(self._rows, np.int32)
        history = self._model.look_back([], self._rows)
        num_new[list(going)] = 1
        start[list(going)] = [len(r.ids) for r in going.values()]
        history[list(going)] = self._model.look_back([r.ids for r in going.values()], len(going))
        batch = ForwardBatch(
            tokens=drawn.tokens,
            num_new=num_new,
            start=start,
            slot=np.arange(self._rows, dtype=np.int32),
            image_mask=drawn.image_mask,
            engram_values=None,
            engram_scales=None,
        )
        self._flight = self._opened(batch, history)

    def _drawn(self, logits: jax.Array, rows: list[int]) -> _Drawn:
        numbers = np.zeros(self._rows, np.int32)
        for i, r in self.live().items():
            numbers[i] = r.new_tokens
        return _Drawn(*_draw(logits, self._params, numbers, self._model.config.image_token_id), rows, numbers)

    def _fetched(self, drawn: _Drawn) -> list[tuple[int, int]]:
        ids = fetch(drawn.ids).tolist()
        return [(i, self._checked(i, ids[i], drawn.numbers[i])) for i in drawn.rows]

    @staticmethod
    def _checked(row: int, token: int, number: int) -> int:
        if token == NO_TOKEN:
            raise DSV41Error(
                f"prompt {row}, new token {number}: the model's logits hold NaN or infinity, nothing can be drawn"
            )
        return token
