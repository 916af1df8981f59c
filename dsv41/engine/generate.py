"""Text generation for a fixed batch of requests: chunked prefill and decode in one loop over the model's forward."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import KVCache, cache_bytes
from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine.step_batch import Shape, idle_batch, init_run_cache, step_batch
from dsv41.models import Model, token_bucket
from dsv41.ops.sampling import NO_TOKEN, SamplingArrays, SamplingParams, sample, sampling_arrays, step_keys

PREFILL_CHUNK = 512
GREEDY = SamplingParams(temperature=0)

OnToken = Callable[[int, int], None]
OnPrefill = Callable[[int, int], None]

# Step shapes that a model has run, so that only the first run of each counts as compilation.
_WARM: weakref.WeakKeyDictionary[Model, set[tuple]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Wall-clock seconds of one request.

    Attributes:
      compile_s: before any request started, spent on the cache and on running every step shape once without tokens;
        next to nothing if the process has run these shapes before. Shared by the requests of a batch.
      prefill_s: from then to the request's first token.
      decode_s: from the first token to the last.
      prompt_tokens, new_tokens: what the rates are taken over.
    """

    compile_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    new_tokens: int

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first one a second; None if there is only one."""
        return (self.new_tokens - 1) / self.decode_s if self.new_tokens > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What became of one request.

    Attributes:
      token_ids: the new tokens. One that ended the request is the last of them, but no part of its text.
      finish_reason: "stop" if the last token is a stop id, "length" if max_new_tokens were drawn.
      prompt_tokens: length of the prompt.
      timings: of this request.
      kv_bytes_per_token: size of the cache's page arrays over the tokens they have room for.
      window_bytes: size of the window arrays over the sequences they have room for.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    timings: Timings
    kv_bytes_per_token: float
    window_bytes: int

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The tokens whose text is the answer: without the stop token."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids


class _Request:
    """Host side of one request: ids known so far, and how many of them are in the cache."""

    def __init__(self, prompt: np.ndarray, max_new_tokens: int):
        self.prompt_tokens = len(prompt)
        self._ids = np.concatenate([prompt, np.zeros(max_new_tokens, np.int64)])
        self._known = len(prompt)
        self._committed = 0
        self.finish_reason: str | None = None
        self.first_token_at = self.last_token_at = 0.0

    @property
    def new_tokens(self) -> int:
        return self._known - self.prompt_tokens

    @property
    def waiting(self) -> int:
        """Known tokens that the cache lacks."""
        return self._known - self._committed

    @property
    def prefilled(self) -> int:
        return min(self._committed, self.prompt_tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._ids[self.prompt_tokens : self._known].tolist())

    def take(self, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """The next up to `limit` tokens to forward and those before them; the former count as committed."""
        before, self._committed = self._committed, min(self._committed + limit, self._known)
        return self._ids[before : self._committed], self._ids[:before]

    def append(self, token: int, now: float, stop: frozenset[int]) -> None:
        self._ids[self._known] = token
        self._known += 1
        if self.new_tokens == 1:
            self.first_token_at = now
        self.last_token_at = now
        if token in stop:
            self.finish_reason = "stop"
        elif self._known == len(self._ids):
            self.finish_reason = "length"


@jax.jit
def _draw(logits: jax.Array, params: SamplingArrays, step: jax.Array) -> jax.Array:
    """Logits float32 [B, 1, V] and int32 [B] tokens drawn before -> int32 [B]."""
    return sample(logits[:, 0], step_keys(params.seed, step), params)


def _check_ids(ids: Sequence[int], vocab_size: int, what: str) -> np.ndarray:
    array = np.asarray(ids)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise DSV41Error(f"{what}: expected a list of token ids, got {array.dtype} of shape {array.shape}")
    array = array.astype(np.int64).reshape(-1)
    bad = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(bad):
        raise DSV41Error(f"{what}: token {bad[0]} is {array[bad[0]]}, expected an id in [0, {vocab_size})")
    return array


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[np.ndarray]:
    """The prompts as int64 arrays.

    Raises:
      DSV41Error: as `generate`, for what the config alone decides.
    """
    text = config.text_config
    if max_new_tokens < 1:
        raise DSV41Error(f"max_new_tokens: expected 1 or more, got {max_new_tokens}")
    if not len(prompts):
        raise DSV41Error("no prompts")
    checked = []
    for i, prompt in enumerate(prompts):
        ids = _check_ids(prompt, text.vocab_size, f"prompt {i}")
        if not len(ids):
            raise DSV41Error(f"prompt {i}: empty, expected at least one token")
        if len(ids) + max_new_tokens > text.max_position_embeddings:
            raise DSV41Error(
                f"prompt {i}: {len(ids)} tokens and {max_new_tokens} new ones exceed max_position_embeddings="
                f"{text.max_position_embeddings}"
            )
        checked.append(ids)
    return checked


def _check_options(
    model: Model,
    count: int,
    sampling: SamplingParams | Sequence[SamplingParams],
    stop_ids: Sequence[int] | None,
    prefill_chunk: int,
) -> tuple[list[SamplingParams], frozenset[int]]:
    """The sampling parameters of each prompt, and the stop ids."""
    if prefill_chunk < 1:
        raise DSV41Error(f"prefill_chunk: expected 1 or more, got {prefill_chunk}")
    each = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
    if len(each) != count:
        raise DSV41Error(f"sampling: expected parameters for {count} prompts, got {len(each)}")
    stop = [model.config.eos_token_id] if stop_ids is None else stop_ids
    return each, frozenset(_check_ids(stop, model.config.text_config.vocab_size, "stop_ids").tolist())


def _warm_up(model: Model, cache: KVCache, shapes: Sequence[Shape], params: SamplingArrays) -> KVCache:
    """Runs each step shape that this model has not run yet once, without tokens."""
    seen = _WARM.setdefault(model, set())
    for shape in shapes:
        key = (shape, cache.page_table.shape)
        if key not in seen:
            logits, cache, _ = model.forward(idle_batch(model, shape), cache)
            jax.block_until_ready(_draw(logits, params, np.zeros(shape[0], np.int32)))
            seen.add(key)
    return cache


class _Batch:
    """The loop over steps. Row i is request i throughout; a finished row is padding."""

    def __init__(
        self, model: Model, requests: list[_Request], sampling: list[SamplingParams], chunk: int, cache: KVCache
    ):
        self._model, self._requests, self._chunk, self._cache = model, requests, chunk, cache
        rows = cache.num_slots
        padding = [GREEDY] * (rows - len(sampling))
        self._params = jax.tree.map(jnp.asarray, sampling_arrays([*sampling, *padding]))
        self._prefill_shape, self._decode_shape = (rows, token_bucket(chunk)), (rows, 1)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(dict.fromkeys((self._prefill_shape, self._decode_shape)))

    def warm_up(self) -> None:
        self._cache = _warm_up(self._model, self._cache, self.shapes, self._params)

    def step(self) -> list[tuple[int, int]]:
        """Forwards every live row by one chunk; returns (row, drawn id) of rows whose known tokens are all in."""
        live = {i: r for i, r in enumerate(self._requests) if r.finish_reason is None}
        prefill = any(r.waiting > 1 for r in live.values())
        shape = self._prefill_shape if prefill else self._decode_shape
        batch = step_batch(self._model, shape, {i: r.take(self._chunk) for i, r in live.items()})
        logits, self._cache, _ = self._model.forward(batch, self._cache)
        ready = [i for i, r in live.items() if not r.waiting]
        if not ready:
            return []
        drawn = np.zeros(shape[0], np.int32)
        drawn[list(live)] = [r.new_tokens for r in live.values()]
        ids = jax.device_get(_draw(logits, self._params, drawn))
        for i in ready:
            if ids[i] == NO_TOKEN:
                raise DSV41Error(
                    f"prompt {i}, new token {drawn[i]}: the model's logits hold NaN or infinity, nothing can be drawn"
                )
        return [(i, int(ids[i])) for i in ready]


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    stop_ids: Sequence[int] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    on_token: OnToken | None = None,
    on_prefill: OnPrefill | None = None,
) -> list[GenerationResult]:
    """Continues every prompt; all of them run as one batch.

    A step forwards up to `prefill_chunk` prompt tokens of each row that still has some, and the newest token of every
    other row. Two step shapes are compiled, whatever the lengths; memory depends on the chunk, not on the prompts. What
    a request draws depends on its logits, its sampling parameters and its seed, not on the other rows.

    Args:
      model: the model.
      prompts: token ids of each request, used exactly as given.
      max_new_tokens: tokens a request draws at most.
      sampling: for all requests, or one for each.
      stop_ids: drawing one of them ends a request; it stays the last of its token_ids. None: the config's eos_token_id.
      prefill_chunk: prompt tokens a row forwards in one step.
      on_token: called with (request, token id) for every new token, stop tokens included.
      on_prefill: called with (prompt tokens forwarded, prompt tokens in all) after steps that forwarded some.

    Raises:
      DSV41Error: before any work, a prompt that is empty, holds an id outside the vocabulary or does not fit into
        max_position_embeddings with its new tokens, or another argument out of range; later, a request whose logits
        are not numbers. The message names the request.
    """
    checked = check_prompts(model.config, prompts, max_new_tokens)
    each, stop = _check_options(model, len(checked), sampling, stop_ids, prefill_chunk)
    called = time.perf_counter()
    requests = [_Request(ids, max_new_tokens) for ids in checked]
    longest = max(r.prompt_tokens for r in requests)
    cache = init_run_cache(model, len(requests), longest + max_new_tokens)
    sizes = cache_bytes(cache)
    batch = _Batch(model, requests, each, min(prefill_chunk, longest), cache)
    batch.warm_up()
    started = time.perf_counter()
    _run(batch, requests, stop, on_token, on_prefill)
    return [
        GenerationResult(
            token_ids=r.token_ids,
            finish_reason=r.finish_reason,
            prompt_tokens=r.prompt_tokens,
            timings=Timings(
                compile_s=started - called,
                prefill_s=r.first_token_at - started,
                decode_s=r.last_token_at - r.first_token_at,
                prompt_tokens=r.prompt_tokens,
                new_tokens=r.new_tokens,
            ),
            kv_bytes_per_token=(sizes["main"] + sizes["index"]) / (cache.num_slots * cache.max_tokens),
            window_bytes=sizes["window"] // cache.num_slots,
        )
        for r in requests
    ]


def _run(
    batch: _Batch,
    requests: list[_Request],
    stop: frozenset[int],
    on_token: OnToken | None,
    on_prefill: OnPrefill | None,
) -> None:
    """Steps until every request has finished."""
    total, reported = sum(r.prompt_tokens for r in requests), 0
    while any(r.finish_reason is None for r in requests):
        drawn = batch.step()
        now = time.perf_counter()
        for i, token in drawn:
            requests[i].append(token, now, stop)
        done = sum(r.prefilled for r in requests)
        if on_prefill is not None and done > reported:
            on_prefill(done, total)
        reported = done
        if on_token is not None:
            for i, token in drawn:
                on_token(i, token)
