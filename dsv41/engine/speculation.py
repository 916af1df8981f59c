"""What a caller says about speculative decoding, and what became of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from dsv41.config import DSV41Error, ModelConfig
from dsv41.engine.confidence_calibration import ConfidenceTemperatures
from dsv41.engine.speculative_step import VerifySchedule
from dsv41.engine.throughput_table import ThroughputTable
from dsv41.models import Model
from dsv41.ops.verification import AcceptanceRule, acceptance_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """How to speculate. None of it changes the law of what is generated, nor a token at temperature 0, as far as the
    device gives a step of several tokens the bits of single ones: CPU does, others up to near-ties.

    Attributes:
      draft_tokens: drafts of a block that may be verified; None: all of them, 0: plain decoding.
      rule: how drafts are accepted. The block rule keeps as many or more on average.
      schedule: how many of the drafts a round verifies. Anything but ALL needs `throughput`. BUDGET runs narrower
        steps where they pay; GREEDY is the exact form of Algorithm 1, whose steps are as wide as ALL's.
      throughput: steps a second by tokens of a step, measured on this machine.
      temperatures: of the confidences; None: as trained.
    """

    draft_tokens: int | None = None
    rule: AcceptanceRule = AcceptanceRule.BLOCK
    schedule: VerifySchedule = VerifySchedule.ALL
    throughput: ThroughputTable | None = None
    temperatures: ConfidenceTemperatures | None = None

    def __post_init__(self):
        if self.schedule is not VerifySchedule.ALL and self.throughput is None:
            raise DSV41Error(f"speculation: schedule {self.schedule.value!r} needs a throughput table")

    def drafts(self, config: ModelConfig) -> int:
        """Drafts a round may verify, 0 for plain decoding.

        Raises:
          DSV41Error: the model has no drafter, or fewer drafts in a block than asked for, or a table was made for
            another block size.
        """
        text = config.text_config
        if self.draft_tokens == 0:
            return 0
        if not text.num_nextn_predict_layers:
            raise DSV41Error("speculation: the model has no drafter (num_nextn_predict_layers is 0)")
        block = text.dspark_block_size
        wanted = block if self.draft_tokens is None else self.draft_tokens
        if not 0 <= wanted <= block:
            raise DSV41Error(
                f"speculation: draft_tokens: expected 0 to {block}, the model's dspark_block_size, got {wanted}"
            )
        for name, table in (("throughput table", self.throughput), ("temperature table", self.temperatures)):
            if table is not None and table.block_size != block:
                raise DSV41Error(
                    f"speculation: the {name} is for blocks of {table.block_size} drafts, the model's have {block}"
                )
        if self.throughput is not None and self.throughput.draft_tokens < wanted:
            raise DSV41Error(
                f"speculation: the throughput table was measured with {self.throughput.draft_tokens} drafts a request, "
                f"{wanted} are to be verified"
            )
        return wanted


def check_drafter(model: Model) -> None:
    """Refuses to speculate with a model whose drafter was left on disk.

    Raises:
      DSV41Error: it was.
    """
    if model.drafter is None:
        raise DSV41Error("speculation: the drafter was not loaded (load(..., drafter=True))")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SpeculationRecord:
    """The rounds of one request, in order. K is the block size.

    Attributes:
      confidence: float32 [rounds, K] raw confidence logits.
      verified: int32 [rounds] drafts verified.
      accepted: int32 [rounds] drafts accepted, before a stop id or the length limit cut them.
      emitted: int32 [rounds] tokens that the round gave.
    """

    confidence: np.ndarray
    verified: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray

    @property
    def rounds(self) -> int:
        return len(self.verified)

    @property
    def acceptance_length(self) -> float | None:
        """Accepted drafts a round, and one; None without rounds."""
        return acceptance_length(int(self.accepted.sum()), self.rounds) if self.rounds else None

    @property
    def mean_verified(self) -> float | None:
        """Drafts verified a round; None without rounds."""
        return float(self.verified.mean()) if self.rounds else None

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens that a forward pass of the backbone gave, the prompt's left out; None without rounds."""
        return float(self.emitted.mean()) if self.rounds else None

    def acceptance_by_position(self) -> np.ndarray:
        """float64 [K]: of the rounds that verified draft k, the share that accepted it; NaN where none did."""
        k = np.arange(1, self.confidence.shape[1] + 1)
        reached = (self.verified[:, None] >= k).sum(axis=0)
        return np.divide(
            (self.accepted[:, None] >= k).sum(axis=0), reached, out=np.full(len(k), np.nan), where=reached > 0
        )
