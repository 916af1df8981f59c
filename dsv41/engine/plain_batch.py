"""Plain decoding of a fixed batch of requests: chunked prefill, then a token a step."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import ForwardBatch, KVCache
from dsv41.config import DSV41Error
from dsv41.engine.request import Request, chunk_size
from dsv41.engine.step_batch import Shape, idle_batch, step_batch
from dsv41.models import Model, image_buckets, token_bucket
from dsv41.ops.sampling import NO_TOKEN, SamplingArrays, SamplingParams, sample, sampling_arrays, step_keys

GREEDY = SamplingParams(temperature=0)

# Step shapes that a model has run, so that only the first run of each counts as compilation.
_WARM: weakref.WeakKeyDictionary[Model, set[tuple]] = weakref.WeakKeyDictionary()


@jax.jit
def _draw(logits: jax.Array, params: SamplingArrays, step: jax.Array) -> jax.Array:
    """Logits float32 [B, 1, V] and int32 [B] tokens drawn before -> int32 [B]."""
    return sample(logits[:, 0], step_keys(params.seed, step), params)


class PlainBatch:
    """The loop over steps. Row i is request i throughout; a finished row is padding.

    With `tail`, only a prompt's last so many tokens go through the decoder, and decoding waits for the last prompt: the
    windows of a step with a tail begin with it. `chunk` is no less than `tail` then, nor is the longest prompt.
    """

    def __init__(
        self,
        model: Model,
        requests: list[Request],
        sampling: list[SamplingParams],
        chunk: int,
        cache: KVCache,
        *,
        tail: int | None = None,
    ):
        self._model, self._requests, self._chunk, self._cache = model, requests, chunk, cache
        self._rows, self._tail = cache.num_slots, tail
        padding = [GREEDY] * (self._rows - len(sampling))
        self._params: SamplingArrays = jax.tree.map(jnp.asarray, sampling_arrays([*sampling, *padding]))
        self._prefill_shape, self._decode_shape = (self._rows, token_bucket(chunk)), (self._rows, 1)

    def shapes(self) -> Sequence[Shape]:
        """Of the steps that `_forward` runs."""
        return tuple(dict.fromkeys((self._prefill_shape, self._decode_shape)))

    def warm_up(self) -> None:
        """Runs every step that this model has not run yet once, without tokens; images that need a new one too."""
        images = [image for r in self._requests for image in r.images]
        for shape in self.shapes():
            prefill = shape == self._prefill_shape
            for with_images in (False, True) if images and prefill else (False,):
                for tail in self._tails() if prefill else (None,):
                    if self._is_new("forward", shape, with_images, tail):
                        self._run_idle(shape, with_images, tail)
        for image in images:
            if self._is_new("image", *image_buckets(image.plan)):
                jax.block_until_ready(self._model.encode_image(image))

    def _tails(self) -> tuple[int | None, ...]:
        """Of the prefill steps that the prompts need."""
        chunks = max(r.prompt_tokens for r in self._requests) > self._chunk
        return (0, self._tail) if self._tail and chunks else (self._tail,)

    def _run_idle(self, shape: Shape, with_images: bool, tail: int | None) -> None:
        batch = idle_batch(self._model, shape, with_images=with_images)
        if tail is not None:
            batch = dataclasses.replace(batch, tail=np.zeros(shape[0], np.int32))
        logits = self._forward(batch, tail)
        if logits is not None:
            logits = _draw(logits, self._params, np.zeros(shape[0], np.int32))
        jax.block_until_ready((logits, self._cache))

    def embed_images(self) -> None:
        """Computes what stands for the image tokens of every prompt; before the first step."""
        for r in self._requests:
            r.spans = self._model.embed_images(r.ids, r.images)

    def _is_new(self, *step) -> bool:
        """Whether this model is about to run a step for the first time; it counts as run from then on."""
        seen, key = _WARM.setdefault(self._model, set()), (type(self), *step, self._cache.page_table.shape)
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
        return self._forward_known(prompts or live)

    def _forward_known(self, rows: dict[int, Request]) -> list[tuple[int, int]]:
        prefill = any(r.waiting > 1 for r in rows.values())
        shape = self._prefill_shape if prefill else self._decode_shape
        spans = {i: r.spans for i, r in rows.items() if r.spans is not None}
        tails = {i: min(self._tail or 0, r.prompt_tokens) for i, r in rows.items()}
        taken = {i: r.take(chunk_size(r.waiting, self._chunk, tails[i])) for i, r in rows.items()}
        batch = step_batch(self._model, shape, taken, spans)
        ready = [i for i, r in rows.items() if not r.waiting]
        tail = None
        if prefill and self._tail:
            tail = self._tail if ready else 0
            counts = np.zeros(shape[0], np.int32)
            counts[ready] = [tails[i] for i in ready]
            batch = dataclasses.replace(batch, tail=counts)
        logits = self._forward(batch, tail)
        if not ready:
            return []
        drawn = np.zeros(shape[0], np.int32)
        drawn[list(rows)] = [r.new_tokens for r in rows.values()]
        ids = jax.device_get(_draw(logits, self._params, drawn))
        return [(i, self._checked(i, int(ids[i]), drawn[i])) for i in ready]

    @staticmethod
    def _checked(row: int, token: int, number: int) -> int:
        if token == NO_TOKEN:
            raise DSV41Error(
                f"prompt {row}, new token {number}: the model's logits hold NaN or infinity, nothing can be drawn"
            )
        return token
