"""Plain decoding of a fixed batch of requests: chunked prefill, then a token a step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import ForwardBatch, KVCache
from dsv41.config import DSV41Error
from dsv41.engine.request import Request
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
    """The loop over steps. Row i is request i throughout; a finished row is padding."""

    def __init__(
        self, model: Model, requests: list[Request], sampling: list[SamplingParams], chunk: int, cache: KVCache
    ):
        self._model, self._requests, self._chunk, self._cache = model, requests, chunk, cache
        self._rows = cache.num_slots
        padding = [GREEDY] * (self._rows - len(sampling))
        self._params: SamplingArrays = jax.tree.map(jnp.asarray, sampling_arrays([*sampling, *padding]))
        self._prefill_shape, self._decode_shape = (self._rows, token_bucket(chunk)), (self._rows, 1)

    def shapes(self) -> Sequence[Shape]:
        """Of the steps that `_forward` runs."""
        return tuple(dict.fromkeys((self._prefill_shape, self._decode_shape)))

    def warm_up(self) -> None:
        """Runs every step that this model has not run yet once, without tokens; images that need a new one too."""
        steps = [(shape, False) for shape in self.shapes()]
        images = [image for r in self._requests for image in r.images]
        if images:
            steps.append((self._prefill_shape, True))
        for shape, with_images in steps:
            if self._is_new("forward", shape, with_images):
                logits = self._forward(idle_batch(self._model, shape, with_images=with_images))
                jax.block_until_ready(_draw(logits, self._params, np.zeros(shape[0], np.int32)))
        for image in images:
            if self._is_new("image", *image_buckets(image.plan)):
                jax.block_until_ready(self._model.encode_image(image))

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

    def _forward(self, batch: ForwardBatch) -> jax.Array:
        """Logits float32 [B, 1, V] of each row's last new token; the cache is advanced."""
        logits, self._cache, _ = self._model.forward(batch, self._cache)
        return logits

    def live(self) -> dict[int, Request]:
        return {i: r for i, r in enumerate(self._requests) if r.finish_reason is None}

    def step(self) -> list[tuple[int, int]]:
        """Forwards every live row by one chunk; returns (row, drawn id) of rows whose known tokens are all in."""
        return self._forward_known(self.live())

    def _forward_known(self, rows: dict[int, Request]) -> list[tuple[int, int]]:
        prefill = any(r.waiting > 1 for r in rows.values())
        shape = self._prefill_shape if prefill else self._decode_shape
        spans = {i: r.spans for i, r in rows.items() if r.spans is not None}
        taken = {i: r.take(self._chunk) for i, r in rows.items()}
        logits = self._forward(step_batch(self._model, shape, taken, spans))
        ready = [i for i, r in rows.items() if not r.waiting]
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
