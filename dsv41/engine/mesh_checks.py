"""Whether a model spread over a mesh says what it says on one device, on whatever devices there are."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from dsv41.checkpoint.load import spread_model
from dsv41.config import LayerMode
from dsv41.engine.step_profile import random_pages, step_at
from dsv41.models import Model
from dsv41.sharding import fetch, first_devices, make_mesh, parse_mesh, preset_rules


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Two runs of the same steps.

    Attributes:
      largest, mean: absolute differences of logits.
      selections: share of (query, selecting layer) whose selected sets are equal.
      experts: share of (token, layer) whose experts are equal.
    """

    largest: float
    mean: float
    selections: float
    experts: float


def on_mesh(model: Model, text: str, preset: str) -> Model:
    """A model on the first devices of this process, as many as the mesh has.

    Raises:
      DSV41Error: the mesh is malformed, has more devices than there are, or does not divide the model.
    """
    sizes = parse_mesh(text)
    mesh = make_mesh(sizes, first_devices(sizes))
    return spread_model(model, mesh, preset_rules(preset, sizes, model.config.text_config))


def agreement(one: Model, other: Model, *, rows: int, context: int, tokens: int) -> Agreement:
    """Compares a step of `rows` sequences, `tokens` new tokens each behind `context` cached ones of random contents.

    Choices are compared as they come: where sums are taken in another order, a near-tie may be decided otherwise.
    """
    found = [_logits_and_choices(model, rows, context, tokens) for model in (one, other)]
    return _agreement(one, *found)


def agreement_row_by_row(one: Model, other: Model, *, rows: int, context: int, tokens: int) -> Agreement:
    """The same, one row at a time on `one`: as many rows as a device of `other` has, so that its products have the same
    shapes and every choice should be the same."""
    alone = [_logits_and_choices(one, 1, context, tokens, row) for row in range(rows)]
    together = jax.tree.map(lambda *rows: np.concatenate(rows), *alone)
    return _agreement(one, together, _logits_and_choices(other, rows, context, tokens))


def _logits_and_choices(model: Model, rows: int, context: int, tokens: int, first_row: int = 0):
    cache = random_pages(model.init_cache(rows, context + tokens), first_slot=first_row)
    batch = step_at(model, rows, context, tokens, first_row=first_row)
    logits, _, aux = model.forward(batch, cache, logits="all", capture=("choices",))
    return fetch(logits), {name: fetch(x) for name, x in aux.items()}


def _agreement(model: Model, first, second) -> Agreement:
    (logits, choices), (other_logits, other_choices) = first, second
    difference = np.abs(logits - other_logits)
    layers = model.schedule.layers
    selecting = [n for n, layer in enumerate(layers) if layer.mode in (LayerMode.FULL, LayerMode.REINDEX)]

    def share(names: list[str]) -> float:
        same = [(np.sort(choices[n], axis=-1) == np.sort(other_choices[n], axis=-1)).all(-1).mean() for n in names]
        return float(np.mean(same)) if same else 1.0

    return Agreement(
        largest=float(difference.max()),
        mean=float(difference.mean()),
        selections=share([f"selected.{n}" for n in selecting]),
        experts=share([f"experts.{n}" for n in range(len(layers))]),
    )
