"""What changes over a training run, as functions of the tokens seen (training.md section 1)."""

from __future__ import annotations

import dataclasses
import math

from dsv41.config import DSV41Error


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """Learning rates and sequence length; defaults are the report's, but for `vision_factor`, which it leaves open.

    The batch has the same number of tokens throughout. Tokens count, not steps, so that a run may go on with another
    batch. They are counted with the batch of the step that asks: the first step's rate is not zero.

    Attributes:
      batch_tokens: tokens a step.
      peak, floor: base learning rate of the long constant stretch, and at the end.
      warmup_steps: full batches over which the rate rises linearly to `peak`.
      decay_from, decay_to: tokens between which it falls along half a cosine to `floor`.
      total: tokens of the run.
      vision_from: tokens from which on the vision tower trains.
      vision_factor: its rate as a part of the base rate.
      sequence, long_sequence, long_from: tokens of a sequence, first and from `long_from` tokens on.

    Raises:
      DSV41Error: the numbers contradict each other; the message starts with the field.
    """

    batch_tokens: int = 100_663_296
    peak: float = 2.6e-4
    floor: float = 2.6e-5
    warmup_steps: int = 2000
    decay_from: int = 28 * 10**12
    decay_to: int = 40 * 10**12
    total: int = 45 * 10**12
    vision_from: int = 28 * 10**12
    vision_factor: float = 0.1
    sequence: int = 65_536
    long_sequence: int = 1_048_576
    long_from: int = 34 * 10**12

    def __post_init__(self):
        lengths = (self.sequence, self.long_sequence)
        checks = (
            ("peak", self.peak > 0 and math.isfinite(self.peak), "a positive number"),
            ("floor", 0 <= self.floor <= self.peak, f"between 0 and peak={self.peak}"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("sequence", self.sequence > 0, "a positive integer"),
            ("long_sequence", self.long_sequence >= self.sequence, f"at least sequence={self.sequence}"),
            (
                "batch_tokens",
                self.batch_tokens > 0 and not any(self.batch_tokens % max(n, 1) for n in lengths),
                f"a multiple of sequence={self.sequence} and long_sequence={self.long_sequence}",
            ),
            (
                "decay_from",
                self.decay_from >= self.warmup_steps * self.batch_tokens,
                f"at least the {self.warmup_steps * self.batch_tokens} tokens of the warm-up",
            ),
            ("decay_to", self.decay_to >= self.decay_from, f"at least decay_from={self.decay_from}"),
            ("total", self.total >= self.decay_to, f"at least decay_to={self.decay_to}"),
            ("vision_from", self.vision_from >= 0, "at least 0"),
            ("vision_factor", 0 <= self.vision_factor <= 1, "between 0 and 1"),
            ("long_from", self.long_from >= 0, "at least 0"),
        )
        for field, good, expected in checks:
            if not good:
                raise DSV41Error(f"{field}: expected {expected}, got {getattr(self, field)!r}")

    def rate(self, tokens: int) -> float:
        """The base learning rate of the step that completes `tokens`."""
        warmup = self.warmup_steps * self.batch_tokens
        if tokens < warmup:
            return self.peak * tokens / warmup
        if tokens <= self.decay_from:
            return self.peak
        if tokens >= self.decay_to:
            return self.floor
        done = (tokens - self.decay_from) / (self.decay_to - self.decay_from)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * done))

    def vision_rate(self, tokens: int) -> float:
        """The same for the vision tower without its final norm: 0 as long as it is frozen."""
        return self.vision_factor * self.rate(tokens) if tokens > self.vision_from else 0.0

    def sequence_length(self, tokens: int) -> int:
        """Tokens a sequence in the step that completes `tokens`."""
        return self.long_sequence if tokens > self.long_from else self.sequence

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return -(-self.total // self.batch_tokens)
