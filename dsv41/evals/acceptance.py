"""How much speculative decoding saves on held-out code, and that it changes nothing at temperature 0."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine import GenerationResult, Speculation, generate
from dsv41.engine.speculation import SpeculationRecord
from dsv41.evals.first_tokens import first_tokens
from dsv41.evals.padded_rows import Progress
from dsv41.models import Model
from dsv41.ops.sampling import SamplingParams
from dsv41.train.corpus import Document
from dsv41.train.tokenizer import encode_text

BATCH = 8
_TOGETHER = 512  # texts that are encoded at once


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Acceptance:
    """Rounds of speculative decoding over several prompts.

    Attributes:
      temperature: that tokens were drawn at.
      new_tokens: drawn in all.
      records: of the prompts.
      identical: prompts whose tokens are those of plain decoding; None: it was not run.
    """

    temperature: float
    new_tokens: int
    records: tuple[SpeculationRecord, ...]
    identical: int | None = None

    @property
    def together(self) -> SpeculationRecord:
        """All rounds as one record."""
        names = [f.name for f in dataclasses.fields(SpeculationRecord)]
        return SpeculationRecord(**{n: np.concatenate([getattr(r, n) for r in self.records]) for n in names})

    @property
    def plain_passes(self) -> int:
        """Forward passes of plain decoding for the same tokens, request by request; a prompt's own gives the first."""
        return self.new_tokens - len(self.records)

    def describe(self) -> dict[str, object]:
        """As JSON values. `fewer_passes` is how many times fewer passes of the backbone the rounds are.

        Of `by_position`, entry k - 1 is the share of the rounds that accepted draft k, of those that verified it; null
        where none did.
        """
        rounds = self.together
        shares = [None if np.isnan(share) else float(share) for share in rounds.acceptance_by_position()]
        return {
            "temperature": self.temperature,
            "prompts": len(self.records),
            "new_tokens": self.new_tokens,
            "rounds": rounds.rounds,
            "acceptance_length": rounds.acceptance_length,
            "mean_verified_length": rounds.mean_verified,
            "by_position": shares,
            "plain_passes": self.plain_passes,
            "fewer_passes": self.plain_passes / rounds.rounds if rounds.rounds else None,
            "identical_to_plain": self.identical,
        }


def code_prompts(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    config: ModelConfig,
    *,
    count: int,
    tokens: int = 256,
    seed: int = 0,
) -> list[list[int]]:
    """Prompts of one length from the documents in turn: `<bos>`, and then what follows on a random line's begin.

    Args:
      documents: files of text; those with too few tokens are left out.
      tokenizer, config: of the model.
      count: of prompts.
      tokens: of a prompt, 2 or more.
      seed: of the places.

    Raises:
      DSV41Error: a number is out of range, or every file is too short.
    """
    if count < 1 or tokens < 2:
        raise DSV41Error(f"prompts: expected 1 or more of 2 tokens or more, got {count} of {tokens}")
    usable = list(itertools.islice(_usable(documents, tokenizer, tokens), count))
    if not usable:
        raise DSV41Error(f"prompts: none of the {len(documents)} files has {tokens} tokens")
    rng = np.random.default_rng(seed)
    begins = [_line_begins(d.text) for d in usable]
    places = []
    for document, lines in itertools.islice(itertools.cycle(zip(usable, begins, strict=True)), count):
        places.append((document, int(lines[rng.integers(len(lines))])))
    prompts = []
    for first in range(0, count, _TOGETHER):
        chosen = places[first : first + _TOGETHER]
        rests = first_tokens(tokenizer, [d.text[place:] for d, place in chosen], tokens - 1)
        for (document, _), ids in zip(chosen, rests, strict=True):
            if len(ids) < tokens - 1:  # too near to the end: the last place that has as many
                ids = encode_text(tokenizer, document.text)[1 - tokens :]
            prompts.append([config.bos_token_id, *ids])
    return prompts


def _usable(documents: Sequence[Document], tokenizer: Tokenizer, tokens: int) -> Iterator[Document]:
    """Those with as many tokens."""
    for first in range(0, len(documents), _TOGETHER):
        chosen = documents[first : first + _TOGETHER]
        begins = first_tokens(tokenizer, [d.text for d in chosen], tokens)
        yield from (d for d, ids in zip(chosen, begins, strict=True) if len(ids) == tokens)


def _line_begins(text: str) -> np.ndarray:
    """Places in the text, int64 [lines]."""
    ends = np.cumsum([len(line) for line in text.splitlines(keepends=True)])
    return np.concatenate([[0], ends[:-1]])


def measure_acceptance(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int = 128,
    batch: int = BATCH,
    seed: int = 0,
    speculation: Speculation | None = None,
    compare: bool = False,
    progress: Progress | None = None,
) -> Acceptance:
    """Continues the prompts by speculative decoding, and by plain decoding too if they are to be compared.

    Args:
      model: with its drafter.
      prompts: token ids of each, used as they are.
      temperature: of the draws; request i takes the seed plus i.
      max_new_tokens: tokens a request draws at most.
      batch: prompts that run together.
      seed: of the draws.
      speculation: how; None: every draft is verified.
      compare: also decode without drafts and count what is the same; only at temperature 0.
      progress: called with (tokens drawn, tokens that may be drawn in all); those not drawn count with their batch.

    Raises:
      DSV41Error: as `generate`, an empty batch, a comparison above temperature 0, or nothing was drafted.
    """
    if batch < 1:
        raise DSV41Error(f"acceptance: expected a batch of 1 or more, got {batch}")
    if compare and temperature:
        raise DSV41Error("acceptance: only at temperature 0 are plain and speculative decoding the same")
    ways = [Speculation() if speculation is None else speculation, *([None] if compare else [])]
    results: list[list[GenerationResult]] = [[] for _ in ways]
    done, total = 0, len(prompts) * len(ways) * max_new_tokens
    for begin in range(0, len(prompts), batch):
        chosen = prompts[begin : begin + batch]
        sampling = [SamplingParams(temperature=temperature, seed=seed + begin + i) for i in range(len(chosen))]
        for way, found in zip(ways, results, strict=True):
            drawn = itertools.count(done + 1)
            found += generate(
                model,
                chosen,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                speculate=way,
                on_token=None if progress is None else lambda *_, drawn=drawn: progress(next(drawn), total),
            )
            done += len(chosen) * max_new_tokens
            if progress is not None:
                progress(done, total)
    drafted, plain = results[0], results[-1]
    return Acceptance(
        temperature=temperature,
        new_tokens=sum(len(r.token_ids) for r in drafted),
        records=_records(drafted),
        identical=sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True)) if compare else None,
    )


def _records(drafted: Sequence[GenerationResult]) -> tuple[SpeculationRecord, ...]:
    records = tuple(r.speculation for r in drafted if r.speculation is not None)
    if len(records) != len(drafted) or not any(r.rounds for r in records):
        raise DSV41Error("acceptance: nothing was drafted")
    return records
