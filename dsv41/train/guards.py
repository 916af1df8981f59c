"""What stops a training run: numbers that are not finite, and gradients that have run away.

The batch of the step that failed is saved, so that it can be looked at and run again:

    step, tokens, rows, metrics, pack = load_batch("run/bad_batch_00001200.safetensors")
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import write_file
from dsv41.train.pack import PackedBatch

LOSS, NORM = "loss", "grad_norm"
_VERSION = 1
_HEADER = "bad_batch"
_FIELDS = tuple(field.name for field in dataclasses.fields(PackedBatch) if not field.metadata.get("static"))
_OPTIONAL = ("engram_rows", "image_embeds")


class TrainingStopped(DSV41Error):
    """A run that must not go on as it is.

    Attributes:
      step: that failed.
      metric, value: what was wrong.
      batch: file of the step's batch; `load_batch` reads it.
    """

    def __init__(self, step: int, trouble: Trouble, batch: pathlib.Path):
        super().__init__(
            f"step {step}: {trouble.metric} is {trouble.value:g}, expected {trouble.expected}; its batch is in {batch}"
        )
        self.step, self.metric, self.value, self.batch = step, trouble.metric, trouble.value, batch


class Trouble(NamedTuple):
    """What is wrong with a step: a metric, its value, and what was expected."""

    metric: str
    value: float
    expected: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardLimits:
    """When a run stops.

    Attributes:
      spike: the gradient norm may be this many times the median of those before; None: any.
      spike_steps: but not for so many steps on end. Single ones are harmless, as the norm is clipped.
      window: steps of the median. It is not asked for before there are so many.

    Raises:
      DSV41Error: a value is out of range; the message starts with the field.
    """

    spike: float | None = None
    spike_steps: int = 3
    window: int = 64

    def __post_init__(self):
        if self.spike is not None and not self.spike > 1:
            raise DSV41Error(f"spike: expected a number above 1 or none, got {self.spike!r}")
        for field in ("spike_steps", "window"):
            if getattr(self, field) < 1:
                raise DSV41Error(f"{field}: expected a positive integer, got {getattr(self, field)!r}")


def find_trouble(
    metrics: Mapping[str, float], norms: Sequence[float] = (), limits: GuardLimits | None = None
) -> Trouble | None:
    """What is wrong with a step; None: nothing.

    Args:
      metrics: of the step, on the host; every one called a loss or a gradient norm must be finite.
      norms: gradient norms of the steps before, the last one last.
      limits: None: those of `GuardLimits`.
    """
    limits = limits or GuardLimits()
    for name, value in metrics.items():
        if (LOSS in name or "norm" in name) and not math.isfinite(value):
            return Trouble(name, float(value), "a finite number")
    if limits.spike is None or NORM not in metrics:
        return None
    course = [*norms, float(metrics[NORM])]
    before, last = course[: -limits.spike_steps][-limits.window :], course[-limits.spike_steps :]
    if len(before) < limits.window:
        return None
    limit = limits.spike * statistics.median(before)
    if min(last) <= limit:
        return None
    expected = f"at most {limit:g} once in {limits.spike_steps} steps ({limits.spike:g} times the median before)"
    return Trouble(NORM, course[-1], expected)


def check_step(
    folder: str | pathlib.Path,
    step: int,
    metrics: Mapping[str, float],
    pack: PackedBatch,
    *,
    tokens: int = 0,
    rows: Any = None,
    norms: Sequence[float] = (),
    limits: GuardLimits | None = None,
) -> list[float]:
    """Stops the run if something is wrong with a step.

    Args:
      folder: where the batch goes then.
      step, tokens, rows: number of the step, tokens seen with it, and where the data pipeline stood (JSON values).
      metrics: as in `find_trouble`.
      pack: the batch.
      norms: what this function returned at the step before.
      limits: as in `find_trouble`.

    Returns:
      Gradient norms, of this step too, as many as later steps need.

    Raises:
      TrainingStopped: something is wrong.
      DSV41Error: something is wrong and the batch cannot be written.
    """
    limits = limits or GuardLimits()
    trouble = find_trouble(metrics, norms, limits)
    if trouble is not None:
        raise TrainingStopped(step, trouble, save_bad_batch(folder, step, pack, metrics, tokens=tokens, rows=rows))
    if limits.spike is None or NORM not in metrics:
        return []
    return [*norms, float(metrics[NORM])][-(limits.window + limits.spike_steps - 1) :]


class BadBatch(NamedTuple):
    """A batch that was saved; see `check_step`."""

    step: int
    tokens: int
    rows: Any
    metrics: dict[str, float]
    pack: PackedBatch


def save_bad_batch(
    folder: str | pathlib.Path,
    step: int,
    pack: PackedBatch,
    metrics: Mapping[str, float],
    *,
    tokens: int = 0,
    rows: Any = None,
) -> pathlib.Path:
    """Writes a batch, with all that is known of its step, as one safetensors file; returns its name.

    The arrays are the fields of `PackedBatch`; the rest is JSON in the file's metadata. Each process of a job writes
    its own part of the batch.

    Raises:
      DSV41Error: the file cannot be written.
    """
    part = f".{jax.process_index()}" if jax.process_count() > 1 else ""
    path = pathlib.Path(folder) / f"bad_batch_{step:08d}{part}.safetensors"
    arrays = {name: getattr(pack, name) for name in _FIELDS if getattr(pack, name) is not None}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = {
        "format_version": _VERSION,
        "step": step,
        "tokens": tokens,
        "rows": rows,
        # JSON has no NaN.
        "metrics": {name: repr(float(value)) for name, value in metrics.items()},
        "dtypes": {name: str(array.dtype) for name, array in arrays.items()},
    }
    # The library's numpy part does not read bfloat16 back.
    stored = {name: x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x for name, x in arrays.items()}
    write_file(path, safetensors.numpy.save(stored, metadata={_HEADER: json.dumps(header, allow_nan=False)}))
    return path


def load_batch(path: str | pathlib.Path) -> BadBatch:
    """What `save_bad_batch` wrote, as numpy arrays.

    Raises:
      DSV41Error: the file is missing, or not one of these.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise DSV41Error(f"{path}: no such file")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        if header["format_version"] != _VERSION:
            raise ValueError(f"format_version: expected {_VERSION}, got {header['format_version']!r}")
        arrays = {
            name: array.view(ml_dtypes.bfloat16) if header["dtypes"][name] == "bfloat16" else array
            for name, array in arrays.items()
        }
        pack = PackedBatch(**{name: arrays.get(name) if name in _OPTIONAL else arrays[name] for name in _FIELDS})
        metrics = {name: float(value) for name, value in header["metrics"].items()}
        return BadBatch(header["step"], header["tokens"], header["rows"], metrics, pack)
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
        raise DSV41Error(f"{path}: not a batch that training saved ({type(e).__name__}: {e})") from e
