"""Records speculative rounds to fit confidence temperatures on (dspark.md section 5).

Axis letters: N rounds, K drafts of a block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine.generate import PREFILL_CHUNK, check_prompts, generate
from dsv41.engine.speculation import Speculation, SpeculationRecord, check_drafter
from dsv41.models import Model, check_images
from dsv41.ops.sampling import SamplingParams
from dsv41.ops.verification import AcceptanceRule


def full_rounds(records: Iterable[SpeculationRecord]) -> tuple[np.ndarray, np.ndarray]:
    """The rounds in which all K drafts were verified; only they say how far the target would have gone.

    Which rounds these are is decided by the request's length limit, never by a draft, so that leaving the others out
    does not favour an outcome.

    Args:
      records: of one model, made with the schedule ALL.

    Returns:
      (raw confidence logits float32 [N, K], drafts accepted int32 [N]), as `fit_temperatures` takes them.

    Raises:
      DSV41Error: there are no records, or no such rounds.
    """
    records = list(records)
    if not records:
        raise DSV41Error("calibration: no recorded rounds")
    confidence = np.concatenate([r.confidence for r in records])
    block = confidence.shape[1]
    full = np.concatenate([r.verified for r in records]) == block
    if not full.any():
        raise DSV41Error(f"calibration: of {len(full)} rounds none verified all {block} drafts of its block")
    return confidence[full], np.concatenate([r.accepted for r in records])[full]


def check_calibration(
    config: ModelConfig, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch: int
) -> None:
    """Finds out what `record_rounds` would refuse, as far as the config decides it.

    Raises:
      DSV41Error: no drafter, a prompt that `generate` refuses without images, too few new tokens for a round in which a
        whole block is verified, or an empty batch.
    """
    block = Speculation().drafts(config)
    if batch < 1:
        raise DSV41Error(f"batch: expected 1 or more, got {batch}")
    # The first token comes with the prompt, and the last that a request may get is never drafted.
    if max_new_tokens < block + 2:
        raise DSV41Error(
            f"max_new_tokens: expected {block + 2} or more, so that some round verifies all {block} drafts of its "
            f"block, got {max_new_tokens}"
        )
    for i, ids in enumerate(check_prompts(config, prompts, max_new_tokens)):
        check_images(config, ids, (), what=f"prompt {i}")


def record_rounds(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch: int = 8,
    sampling: SamplingParams | None = None,
    rule: AcceptanceRule = AcceptanceRule.BLOCK,
    stop_ids: Sequence[int] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> list[SpeculationRecord]:
    """Continues the prompts, verifying all drafts of every round, and returns what the rounds did.

    Args:
      model: with its drafter.
      prompts: token ids of each request, used exactly as given.
      max_new_tokens: tokens a request draws at most.
      batch: prompts that run together.
      sampling: how tokens are drawn; request i takes its seed plus i. None: temperature 1. It and `rule` should be
        those that are served, because acceptance depends on both.
      rule: how drafts are accepted.
      stop_ids, prefill_chunk: as for `generate`.
      progress: called with (tokens drawn, tokens that may be drawn in all); a request that stops early counts as whole
        when its batch is done.

    Returns:
      the record of each prompt.

    Raises:
      DSV41Error: as `check_calibration` and `generate`, or the drafter was not loaded.
    """
    check_calibration(model.config, prompts, max_new_tokens=max_new_tokens, batch=batch)
    check_drafter(model)
    sampling = SamplingParams() if sampling is None else sampling
    records: list[SpeculationRecord] = []
    total = len(prompts) * max_new_tokens

    def report(done: int) -> None:
        if progress is not None:
            progress(done, total)

    for begin in range(0, len(prompts), batch):
        chosen = prompts[begin : begin + batch]
        seeds = [(sampling.seed + begin + i) % 2**32 for i in range(len(chosen))]
        drawn = itertools.count(begin * max_new_tokens + 1)
        results = generate(
            model,
            chosen,
            max_new_tokens=max_new_tokens,
            sampling=[dataclasses.replace(sampling, seed=seed) for seed in seeds],
            stop_ids=stop_ids,
            prefill_chunk=prefill_chunk,
            speculate=Speculation(rule=rule),
            on_token=lambda *_, drawn=drawn: report(next(drawn)),
        )
        records += [result.speculation for result in results]
        report((begin + len(chosen)) * max_new_tokens)
    return records
