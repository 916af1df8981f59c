"""Running the tiny model beside its golden data, and the figures that the comparison gives."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from dsv41.models import CAPTURES, ForcedChoices, Model
from tests.golden import Golden

PROMPT = 53
STEPS = 14
CAPACITY = 128


@dataclasses.dataclass
class Run:
    """A prefill of the golden prompt and its teacher-forced decode steps."""

    prefill_logits: np.ndarray  # float32 [2, 53, V]
    prefill_aux: dict[str, np.ndarray]  # cut to the prompt
    decode_logits: np.ndarray  # float32 [14, 2, V]
    decode_aux: list[dict[str, np.ndarray]]  # one a step


def forced_choices(golden: Golden, kind: str, model: Model, step: int | None = None, pad: int = 64) -> ForcedChoices:
    """The golden selections and experts as choices to replay."""

    def read(name: str, layer: int, fill: int) -> jnp.ndarray:
        x = golden[f"{kind}.{name}.{layer}"].astype(np.int32)
        x = x[:, : min(x.shape[1], pad)] if step is None else x[step][:, None]
        want = pad if step is None else 1
        return jnp.asarray(np.pad(x, ((0, 0), (0, want - x.shape[1]), (0, 0)), constant_values=fill))

    return ForcedChoices(
        selected={s.index: read("topk", s.index, -1) for s in model.schedule.layers if s.selects},
        experts={s.index: read("moe_indices", s.index, 0) for s in model.schedule.layers},
    )


def run_golden(model: Model, golden: Golden, *, forced: bool) -> Run:
    """One-shot prefill, then one token at a time, choices forced to the golden ones or free."""
    ids = golden["input_ids"]
    cache = model.init_cache(2, CAPACITY)
    choices = forced_choices(golden, "prefill", model) if forced else None
    batch = model.make_batch(ids[:, :PROMPT])
    logits, cache, aux = model.forward(batch, cache, logits="all", capture=CAPTURES, forced=choices)
    decode_logits, decode_aux = [], []
    for step in range(STEPS):
        end = PROMPT + step
        choices = forced_choices(golden, "decode", model, step) if forced else None
        batch = model.make_batch(ids[:, end : end + 1], ids[:, :end])
        step_logits, cache, step_aux = model.forward(batch, cache, logits="all", capture=CAPTURES, forced=choices)
        decode_logits.append(np.asarray(step_logits)[:, 0])
        decode_aux.append({k: np.asarray(v)[:, 0] for k, v in step_aux.items()})
    return Run(
        prefill_logits=np.asarray(logits)[:, :PROMPT],
        prefill_aux={k: np.asarray(v)[:, :PROMPT] for k, v in aux.items()},
        decode_logits=np.stack(decode_logits),
        decode_aux=decode_aux,
    )


def same_sets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [...]: whether the last axes hold the same ids, in any order."""
    return (np.sort(a, axis=-1) == np.sort(b, axis=-1)).all(axis=-1)


def error_figures(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Largest and mean absolute difference."""
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    return float(difference.max()), float(difference.mean())


def relative_rms(actual: np.ndarray, expected: np.ndarray) -> float:
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    return float(np.sqrt(((actual - expected) ** 2).mean() / (expected**2).mean()))


def ulps_bf16(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Distance in bfloat16 steps of the larger magnitude."""
    a, b = actual.astype(np.float32), expected.astype(np.float32)
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.maximum(np.abs(a), np.abs(b)), 2.0**-100))) - 7)
    return np.abs(a - b) / step
