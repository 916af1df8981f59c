"""Text generation for a fixed batch of requests: chunked prefill, then plain or speculative decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from dsv41.cache import KVCache
from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine.engine_options import CED, FULL, check_prefill
from dsv41.engine.engram_mode import EngramMode
from dsv41.engine.plain_batch import GREEDY, BatchOptions, PlainBatch
from dsv41.engine.request import CacheSizes, GenerationResult, Request
from dsv41.engine.speculation import Speculation, check_drafter
from dsv41.engine.speculative_batch import SpeculativeBatch
from dsv41.engine.step_batch import init_run_cache
from dsv41.images import PreparedImage
from dsv41.models import Model
from dsv41.ops.sampling import SamplingParams

PREFILL_CHUNK = 512

OnToken = Callable[[int, int], None]
OnPrefill = Callable[[int, int], None]


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
) -> tuple[list[SamplingParams], frozenset[int]]:
    """The sampling parameters of each prompt, and the stop ids."""
    each = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
    if len(each) != count:
        raise DSV41Error(f"sampling: expected parameters for {count} prompts, got {len(each)}")
    stop = [model.config.eos_token_id] if stop_ids is None else stop_ids
    return each, frozenset(_check_ids(stop, model.config.text_config.vocab_size, "stop_ids").tolist())


def _requests(
    model: Model,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[PreparedImage]] | None,
    max_new_tokens: int,
) -> list[Request]:
    checked = check_prompts(model.config, prompts, max_new_tokens)
    each = [()] * len(checked) if images is None else list(images)
    if len(each) != len(checked):
        raise DSV41Error(f"images: expected a list for each of {len(checked)} prompts, got {len(each)}")
    for i, (ids, own) in enumerate(zip(checked, each, strict=True)):
        model.check_images(ids, own, what=f"prompt {i}")
    return [Request(ids, max_new_tokens, own) for ids, own in zip(checked, each, strict=True)]


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    stop_ids: Sequence[int] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    prefill: str = FULL,
    speculate: Speculation | None = None,
    engram: EngramMode = EngramMode.AUTO,
    images: Sequence[Sequence[PreparedImage]] | None = None,
    on_token: OnToken | None = None,
    on_prefill: OnPrefill | None = None,
) -> list[GenerationResult]:
    """Continues every prompt; all of them run as one batch.

    A step forwards up to `prefill_chunk` prompt tokens of each row that still has some, and the newest token of every
    other row. Two step shapes are compiled, whatever the lengths; memory depends on the chunk, not on the prompts. What
    a request draws depends on its logits, its sampling parameters and its seed, not on the other rows.

    With `speculate` a step behind the prompts is a round: the drafter proposes tokens, the model verifies them. At
    temperature 0 the same tokens come out (on CPU; elsewhere but for near-ties), above it tokens of the same law. A
    schedule that looks at the whole batch lets the other rows decide how many drafts of a request are verified, and so
    which of the equally likely draws come out.

    Args:
      model: the model.
      prompts: token ids of each request, used exactly as given.
      max_new_tokens: tokens a request draws at most.
      sampling: for all requests, or one for each.
      stop_ids: drawing one of them ends a request; it stays the last of its token_ids. None: the config's eos_token_id.
      prefill_chunk: prompt tokens a row forwards in one step; with prefill "ced" no fewer than `sliding_window`.
      prefill: "full": every layer on every prompt token; "ced": the decoder on the last `sliding_window` prompt tokens
        only, an approximation behind longer prompts (serving.md section 3), and the same bits up to there.
      speculate: how to speculate; None: plain decoding.
      engram: where Engram rows come from and who waits for them; the results are the same.
      images: for each prompt, its images in the order of their spans, which are laid out in it (`expand_images`).
      on_token: called with (request, token id) for every new token, stop tokens included.
      on_prefill: called with (prompt tokens forwarded, prompt tokens in all) after steps that forwarded some.

    Raises:
      DSV41Error: before any work, a prompt that is empty, holds an id outside the vocabulary, does not fit into
        max_position_embeddings with its new tokens, or has other image tokens than its images need, or another argument
        out of range; later, a request whose logits are not numbers. The message names the request.
    """
    requests = _requests(model, prompts, images, max_new_tokens)
    each, stop = _check_options(model, len(requests), sampling, stop_ids)
    check_prefill(prefill, model.config, prefill_chunk)
    drafts = 0 if speculate is None else speculate.drafts(model.config)
    if drafts:
        check_drafter(model)
    called, longest = time.perf_counter(), max(r.prompt_tokens for r in requests)
    cache = init_run_cache(model, len(requests), longest + max_new_tokens, draft_tokens=drafts)
    sizes = CacheSizes.of(cache)
    options = _options(model, requests, prefill, prefill_chunk, engram)
    batch = _batch(model, requests, each, cache, options, speculate if drafts else None, stop)
    started = _run(batch, requests, stop, on_token, on_prefill)
    figures = batch.engram()
    return [r.result(started=started, compile_s=started - called, sizes=sizes, engram=figures) for r in requests]


def _options(
    model: Model, requests: list[Request], prefill: str, prefill_chunk: int, engram: EngramMode
) -> BatchOptions:
    longest, window = max(r.prompt_tokens for r in requests), model.config.text_config.sliding_window
    tail = window if prefill == CED and longest > window else None
    return BatchOptions(chunk=min(max(prefill_chunk, tail or 0), longest), tail=tail, engram=engram)


def _batch(
    model: Model,
    requests: list[Request],
    sampling: list[SamplingParams],
    cache: KVCache,
    options: BatchOptions,
    speculate: Speculation | None,
    stop: frozenset[int],
) -> PlainBatch:
    arguments = (model, requests, sampling, cache, options)
    if speculate is None:
        return PlainBatch(*arguments)
    return SpeculativeBatch(*arguments, speculation=speculate, stop_ids=stop)


def _run(
    batch: PlainBatch,
    requests: list[Request],
    stop: frozenset[int],
    on_token: OnToken | None,
    on_prefill: OnPrefill | None,
) -> float:
    """Compiles, steps until every request has finished, and ends the batch; returns when the first step began."""
    try:
        batch.warm_up()
        started = time.perf_counter()
        batch.start()
        _steps(batch, requests, stop, on_token, on_prefill)
    finally:
        batch.close()
    return started


def _steps(
    batch: PlainBatch,
    requests: list[Request],
    stop: frozenset[int],
    on_token: OnToken | None,
    on_prefill: OnPrefill | None,
) -> None:
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
    if isinstance(batch, SpeculativeBatch):
        for request, record in zip(requests, batch.records(), strict=True):
            request.speculation = record
