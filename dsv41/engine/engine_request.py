"""One request of the engine: what the host knows of it, and its result."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from dsv41.engine.metrics import RequestMetrics
from dsv41.engine.prefix_pages import SequencePages
from dsv41.engine.request import chunk_size
from dsv41.images import PreparedImage
from dsv41.kv_store import ImageSpan
from dsv41.models import SpanEmbeds
from dsv41.ops.sampling import SamplingParams


class Status(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """What a step did for a request.

    Attributes:
      request: its id.
      token_ids: new tokens.
      finish_reason: "stop", "length", "abort" or "error" if it is done, else None.
    """

    request: int
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineResult:
    """What became of a request.

    Attributes:
      token_ids: the new tokens; one that ended the request is the last of them, but no part of its text.
      finish_reason: "stop": the last token is a stop id; "length": max_new_tokens were drawn; "abort"; "error".
      error: what went wrong; None unless finish_reason is "error".
      prompt_tokens: length of the prompt.
      metrics: times and counts.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    error: str | None
    prompt_tokens: int
    metrics: RequestMetrics


@dataclasses.dataclass(eq=False)
class EngineRequest:
    """A request under way. `ids` has all known tokens; while it is decoded, all but the last are in the cache."""

    id: int
    buffer: np.ndarray  # int64 [prompt + max_new_tokens]
    prompt_tokens: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    reuse: bool
    images: Sequence[PreparedImage]
    spans: Sequence[ImageSpan]
    metrics: RequestMetrics
    known: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: str | None = None
    embeds: SpanEmbeds | None = None
    row: int = -1
    order: int = -1  # of admission
    pages: SequencePages | None = None
    cursor: int = 0  # next prompt token to forward
    target: int = 0  # tokens to forward before the next one is drawn
    floor: int = 0  # the window of this prefill begins here
    write_from: int = 0  # pages hold what is before

    @property
    def ids(self) -> np.ndarray:
        return self.buffer[: self.known]

    @property
    def new_tokens(self) -> int:
        return self.known - self.prompt_tokens

    @property
    def remaining(self) -> int:
        return len(self.buffer) - self.known

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.buffer[self.prompt_tokens : self.known].tolist())

    def append(self, token: int) -> None:
        self.buffer[self.known] = token
        self.known += 1
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif self.known == len(self.buffer):
            self.finish_reason = "length"

    def chunk(self, most: int, tail: int) -> int:
        """Tokens of the next prefill step: up to `most`, but so that the last step has at least `tail`."""
        return chunk_size(self.target - self.cursor, most, min(tail, self.target - self.floor))

    def result(self) -> EngineResult:
        return EngineResult(
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            error=self.error,
            prompt_tokens=self.prompt_tokens,
            metrics=self.metrics,
        )
