"""What an engine is made with."""

from __future__ import annotations

import dataclasses

from dsv41.config import DSV41Error, ModelConfig, layer_schedule
from dsv41.engine.speculation import Speculation

CED, FULL = "ced", "full"


def check_prefill(prefill: str, config: ModelConfig | None = None, chunk: int = 1) -> None:
    """Refuses a kind of prefill that there is not, or that does not fit the model, and chunks of no tokens.

    Raises:
      DSV41Error: it says which.
    """
    if prefill not in (CED, FULL):
        raise DSV41Error(f"prefill: expected {CED!r} or {FULL!r}, got {prefill!r}")
    if chunk < 1:
        raise DSV41Error(f"prefill_chunk: expected 1 or more, got {chunk}")
    problem = layer_schedule(config.text_config).tail_problem if config is not None else None
    if prefill == CED and problem:
        raise DSV41Error(f"prefill 'ced' does not fit this model: {problem}; use 'full'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes and modes of an engine; all memory is taken when it starts.

    Attributes:
      max_requests: requests that are decoded at once; others wait.
      max_tokens: tokens that a request may reach, prompt included.
      num_pages: pages of the pool. None: enough for every request at its longest. Fewer share better and may make a
        request wait, or be set back and computed again, but never fail. A request that was set back goes on behind a
        prefill of its tokens: the same ones with prefill "full" and without reuse and drafts above temperature 0,
        otherwise within what replay and the tail approximate.
      prefill: "ced", as deployed: the decoder runs on a prompt's last `sliding_window` tokens only, an approximation
        (serving.md section 3); "full": every layer on every token.
      prefill_chunk: prompt tokens of a request that a step forwards at most.
      prefill_rows: requests whose prompts a step forwards side by side.
      speculation: how to speculate; None: plain decoding.
      reuse: whether a prompt may go on from pages that an earlier request left. Behind them the window is replayed, an
        approximation (serving.md section 4). A request can turn it off for itself.
      stop_ids: stop ids that a request may have.
      poison: fill pages with bytes that decode to NaN when they become free, to find whoever reads them; for tests.
    """

    max_requests: int = 8
    max_tokens: int = 4096
    num_pages: int | None = None
    prefill: str = CED
    prefill_chunk: int = 512
    prefill_rows: int = 1
    speculation: Speculation | None = None
    reuse: bool = True
    stop_ids: int = 8
    poison: bool = False

    def __post_init__(self):
        for name in ("max_requests", "max_tokens", "num_pages", "prefill_chunk", "prefill_rows", "stop_ids"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DSV41Error(f"engine: {name}: expected 1 or more, got {value}")
        check_prefill(self.prefill)

    def check(self, config: ModelConfig) -> None:
        """Refuses what the model rules out.

        Raises:
          DSV41Error: the message names the option.
        """
        text = config.text_config
        if self.max_tokens > text.max_position_embeddings:
            raise DSV41Error(
                f"engine: max_tokens={self.max_tokens} exceeds max_position_embeddings={text.max_position_embeddings}"
            )
        check_prefill(self.prefill, config)
        if self.speculation is not None:
            self.speculation.drafts(config)
