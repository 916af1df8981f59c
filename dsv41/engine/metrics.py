"""What an engine counts."""

from __future__ import annotations

import dataclasses

from dsv41.ops.verification import acceptance_length


@dataclasses.dataclass
class RequestMetrics:
    """Of one request. Times are on the engine's clock, in seconds.

    Attributes:
      added, admitted, first_token, finished: when; None if not yet.
      fresh_tokens: prompt tokens computed because they were nowhere. Of a request that was set back, its new tokens are
        part of the prompt that it comes back with, and all of it is counted again; `cached_tokens` likewise.
      cached_tokens: prompt tokens whose global KV was there, by where it came from.
      replayed_tokens: of these, those that went through the encoder again to rebuild the window.
      window_hit: whether the window came from a snapshot instead.
      preemptions: times it was set back to free pages.
      rounds, verified, accepted: of its decoding.
    """

    added: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    fresh_tokens: int = 0
    cached_tokens: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(("hbm", "host", "ssd"), 0))
    replayed_tokens: int = 0
    window_hit: bool = False
    preemptions: int = 0
    rounds: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.added

    @property
    def acceptance_length(self) -> float | None:
        """Accepted drafts a round, and one; None without rounds."""
        return acceptance_length(self.accepted, self.rounds) if self.rounds else None


@dataclasses.dataclass
class EngineMetrics:
    """Since the engine started."""

    requests: int = 0  # added
    finished: int = 0
    aborted: int = 0
    failed: int = 0  # ended by an error
    preemptions: int = 0
    prompt_tokens: int = 0  # of admitted requests
    fresh_tokens: int = 0
    cached_tokens: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(("hbm", "host", "ssd"), 0))
    replayed_tokens: int = 0
    window_hits: int = 0  # prompts that went on from a window snapshot
    new_tokens: int = 0
    prefill_steps: int = 0
    rounds: int = 0
    request_rounds: int = 0  # requests in use, summed over rounds
    verified: int = 0
    accepted: int = 0
    evicted_pages: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens whose global KV was there; None without prompts."""
        return sum(self.cached_tokens.values()) / self.prompt_tokens if self.prompt_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Accepted drafts a round and request, and one; None without rounds."""
        return acceptance_length(self.accepted, self.request_rounds) if self.request_rounds else None
