"""One request of a fixed batch: what the host knows of it, and its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsv41.cache import KVCache, cache_bytes
from dsv41.engine.engram_mode import EngramFigures
from dsv41.engine.speculation import SpeculationRecord
from dsv41.images import PreparedImage
from dsv41.models import SpanEmbeds


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
      speculation: its rounds; None if nothing was drafted.
      engram: what Engram rows took, shared by the requests of a batch; None if the model has no Engram.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    timings: Timings
    kv_bytes_per_token: float
    window_bytes: int
    speculation: SpeculationRecord | None = None
    engram: EngramFigures | None = None

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The tokens whose text is the answer: without the stop token."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Measured on the arrays of a run's cache, as in `GenerationResult`."""

    kv_bytes_per_token: float
    window_bytes: int

    @classmethod
    def of(cls, cache: KVCache) -> CacheSizes:
        sizes = cache_bytes(cache)
        return cls(
            kv_bytes_per_token=(sizes["main"] + sizes["index"]) / (cache.num_slots * cache.max_tokens),
            window_bytes=(sizes["window"] + sizes["draft_window"]) // cache.num_slots,
        )


def chunk_size(left: int, most: int, tail: int) -> int:
    """Tokens of a prompt's next step: up to `most` of the `left` ones, but so that the last step has `tail` or more."""
    if left <= most:
        return left
    return min(most, left - tail) if left - most < tail else most


class Request:
    """Ids known so far, and how many of them are in the cache."""

    def __init__(self, prompt: np.ndarray, max_new_tokens: int, images: Sequence[PreparedImage] = ()):
        self.prompt_tokens = len(prompt)
        self.images = tuple(images)
        self.spans: SpanEmbeds | None = None  # what stands for the image tokens, once it is computed
        self._ids = np.concatenate([prompt, np.zeros(max_new_tokens, np.int64)])
        self._known = len(prompt)
        self._committed = 0
        self.finish_reason: str | None = None
        self.first_token_at = self.last_token_at = 0.0
        self.speculation: SpeculationRecord | None = None

    @property
    def new_tokens(self) -> int:
        return self._known - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens it may still get."""
        return 0 if self.finish_reason else len(self._ids) - self._known

    @property
    def ids(self) -> np.ndarray:
        """All known tokens, the prompt's included."""
        return self._ids[: self._known]

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

    def result(
        self, *, started: float, compile_s: float, sizes: CacheSizes, engram: EngramFigures | None
    ) -> GenerationResult:
        """The outcome; `started` is when the requests of its batch began, on the clock of `append`."""
        return GenerationResult(
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_tokens,
            timings=Timings(
                compile_s=compile_s,
                prefill_s=self.first_token_at - started,
                decode_s=self.last_token_at - self.first_token_at,
                prompt_tokens=self.prompt_tokens,
                new_tokens=self.new_tokens,
            ),
            kv_bytes_per_token=sizes.kv_bytes_per_token,
            window_bytes=sizes.window_bytes,
            speculation=self.speculation,
            engram=engram,
        )
