"""Temperatures that turn the drafter's confidences into probabilities: fitted once a deployment, kept as a file.

Axis letters: N recorded rounds, K drafts of a block. A record is one round in which every draft was verified, at the
temperature and with the cache that are served: its raw confidence logits and how many of its drafts were accepted.
Temperatures change how many drafts are verified, never what is generated.

Method: sequential temperature scaling, dspark.md section 5.
"""

from __future__ import annotations

import dataclasses
import numbers
import pathlib
from collections.abc import Sequence

import numpy as np

from dsv41.config import DSV41Error
from dsv41.config.record_file import read_record, write_record

_VERSION = 1
_FIELDS = {"block_size": int, "samples": int, "temperatures": list, "ece_before": list, "ece_after": list}
_BINS = 15
# From 0.1 to 10; the middle one is exactly 1.
_GRID = 10.0 ** (np.arange(-20, 21) / 20)
_LARGEST = float(np.finfo(np.float32).max)


def _check(ok: bool, field: str, expected: str, value: object) -> None:
    if not ok:
        raise DSV41Error(f"{field}: expected {expected}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidenceTemperatures:
    """What confidence logits are divided by before the sigmoid.

    Attributes:
      values: the temperature of each draft of a block.
      samples: rounds that they were fitted on.
      ece_before, ece_after: the calibration error of the survivals up to each draft, without and with them, on the
        same rounds.

    Raises:
      DSV41Error: a temperature is not a finite number above 0, an error is not in [0, 1], or there are not as many of
        both; the message names the field.
    """

    values: tuple[float, ...]
    samples: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]

    def __post_init__(self):
        _check(len(self.values) > 0, "temperatures", "at least one", self.values)
        _check(isinstance(self.samples, numbers.Integral) and self.samples >= 1, "samples", "1 or more", self.samples)
        for i, value in enumerate(self.values):
            # As float32, which the device has them in.
            fits = _is_number(value) and 0 < value <= _LARGEST and np.float32(value) > 0
            _check(fits, f"temperatures[{i}]", "a finite number above 0", value)
        for name in ("ece_before", "ece_after"):
            errors = getattr(self, name)
            _check(len(errors) == self.block_size, name, f"{self.block_size} numbers", errors)
            for i, value in enumerate(errors):
                _check(_is_number(value) and 0 <= value <= 1, f"{name}[{i}]", "a number in [0, 1]", value)

    @property
    def block_size(self) -> int:
        """Drafts of a block, K."""
        return len(self.values)


def expected_calibration_error(probability: np.ndarray, outcome: np.ndarray) -> float:
    """How far probabilities are from the frequencies of what they predict, weighted by how often each is said.

    Probabilities are put into 15 bins of equal width; a bin's part is the difference of its mean probability and its
    mean outcome.

    Args:
      probability: float [N] in [0, 1].
      outcome: bool or 0 and 1, [N].

    Returns:
      In [0, 1].
    """
    probability = np.asarray(probability, np.float64)
    bins = np.minimum((probability * _BINS).astype(np.int64), _BINS - 1)
    gap = np.bincount(bins, probability - np.asarray(outcome, np.float64), minlength=_BINS)
    return min(float(np.abs(gap).sum() / len(probability)), 1.0)


def reliability(probability: np.ndarray, outcome: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What probabilities say against what happens, in the bins of `expected_calibration_error`.

    Args:
      probability: float [N] in [0, 1].
      outcome: bool or 0 and 1, [N].

    Returns:
      (mean probability float64 [15], mean outcome float64 [15], samples int64 [15]) of each bin; NaN where it is empty.
    """
    probability, outcome = np.asarray(probability, np.float64), np.asarray(outcome, np.float64)
    bins = np.minimum((probability * _BINS).astype(np.int64), _BINS - 1)
    samples = np.bincount(bins, minlength=_BINS)
    sums = (np.bincount(bins, x, minlength=_BINS) for x in (probability, outcome))
    means = [np.divide(x, samples, out=np.full(_BINS, np.nan), where=samples > 0) for x in sums]
    return means[0], means[1], samples


def calibrated_survival(logits: np.ndarray, temperatures: Sequence[float] | None = None) -> np.ndarray:
    """The probability that drafts 1 to k are all accepted, as the confidences have it.

    Args:
      logits: float [N, K], raw confidence logits.
      temperatures: of each draft; None: 1.

    Returns:
      float64 [N, K].
    """
    logits = np.asarray(logits, np.float64)
    return np.cumprod(_sigmoid(logits / np.asarray(1.0 if temperatures is None else temperatures)), axis=1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> ConfidenceTemperatures:
    """Fits the temperatures from the first draft to the last, each with those before it fixed.

    Temperature k is the one of 41 between 0.1 and 10 with the least calibration error of the survival up to draft k;
    of equal ones the nearest to 1.

    Args:
      logits: float [N, K], raw confidence logits of rounds in which all K drafts were verified.
      accepted: int [N], drafts accepted, before a stop token or a length limit cut the round.

    Raises:
      DSV41Error: there are no rounds, the shapes do not fit, a logit is not finite or a count not in [0, K].
    """
    logits, accepted = np.asarray(logits, np.float64), np.asarray(accepted)
    shaped = logits.ndim == 2 and logits.size > 0 and accepted.shape == logits.shape[:1]
    _check(shaped, "shapes", "logits [N, K] and accepted [N], neither empty", (logits.shape, accepted.shape))
    bad = np.argwhere(~np.isfinite(logits))
    _check(not len(bad), "logits", "finite numbers", bad[:1].tolist())
    whole = accepted.dtype.kind in "iu" and ((accepted >= 0) & (accepted <= logits.shape[1])).all()
    _check(bool(whole), "accepted", f"integers in [0, {logits.shape[1]}]", np.unique(accepted)[:8].tolist())

    nearest_to_1 = np.argsort(np.abs(np.log(_GRID)), kind="stable")
    before, fitted = np.ones(len(logits)), np.ones(len(logits))
    temperatures, ece_before, ece_after = [], [], []
    for k in range(logits.shape[1]):
        outcome = accepted > k
        trials = fitted * _sigmoid(logits[:, k] / _GRID[nearest_to_1, None])
        errors = [expected_calibration_error(p, outcome) for p in trials]
        best = int(np.argmin(errors))
        before, fitted = before * _sigmoid(logits[:, k]), trials[best]
        temperatures.append(float(_GRID[nearest_to_1[best]]))
        ece_before.append(expected_calibration_error(before, outcome))
        ece_after.append(errors[best])
    return ConfidenceTemperatures(
        values=tuple(temperatures),
        samples=len(logits),
        ece_before=tuple(ece_before),
        ece_after=tuple(ece_after),
    )


def save_temperatures(temperatures: ConfidenceTemperatures, path: str | pathlib.Path) -> None:
    """Writes them as JSON; `load_temperatures` reads back an equal object.

    Raises:
      DSV41Error: the file cannot be written; what was there before is untouched.
    """
    fields = dataclasses.asdict(temperatures)
    write_record(
        path, _VERSION, {"block_size": temperatures.block_size, "temperatures": fields.pop("values"), **fields}
    )


def load_temperatures(path: str | pathlib.Path, block_size: int) -> ConfidenceTemperatures:
    """Reads temperatures of blocks of `block_size` drafts.

    Raises:
      DSV41Error: the file is missing, not such a file or of another block size; the message names file and field.
    """
    data = read_record(path, _VERSION, _FIELDS)
    found, values = data["block_size"], tuple(data["temperatures"])
    try:
        _check(found == block_size, "block_size", str(block_size), found)
        _check(len(values) == found, "temperatures", f"{found} numbers", values)
        return ConfidenceTemperatures(
            values=values,
            samples=data["samples"],
            ece_before=tuple(data["ece_before"]),
            ece_after=tuple(data["ece_after"]),
        )
    except DSV41Error as e:
        raise DSV41Error(f"{path}: {e}") from e
