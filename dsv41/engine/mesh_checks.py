"""Whether a model spread over a mesh says what it says on one device, on whatever devices there are."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsv41.cache import ForwardBatch, KVCache, LayerCache, cache_specs, local_step
from dsv41.checkpoint.load import spread_model
from dsv41.config import LayerMode, ModelConfig
from dsv41.engine.step_profile import random_pages, step_at
from dsv41.models import Model
from dsv41.models.backbone import Backbone
from dsv41.models.sharded import on_mesh as over_devices
from dsv41.ops.block_selection import IndexQuery
from dsv41.sharding import LOCAL, ShardingRules, fetch, first_devices, make_mesh, parse_mesh, preset_rules
from pallas_kernels.fixed_order import compiler_options
from pallas_kernels.indexer.ops import entry_scores
from pallas_kernels.quantize.ops import MXFP4_GROUP


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


def selection_agreement(one: Model, other: Model, *, rows: int, context: int) -> float:
    """Share of (query, selecting layer) that select alike out of pages of the same random contents with the same random
    queries, one of each row behind `context` tokens: distinct entries with the same scores. Index scores are bfloat16,
    so that many are equal, and kernels may take any of equal ones.

    It should be 1 whatever the devices and kernels; sums that the rest of a model takes in another order do not enter.
    `one` must be on one device.
    """
    queries = _random_queries(one.config, rows)
    here, there = (_selections(model, queries, context) for model in (one, other))
    chosen = [np.stack(pair, axis=-2) for pair in zip(here, there, strict=True)]  # [B, T, 2, index_topk]
    scores = [np.sort(x, axis=-1) for x in _scores_of(one, queries, context, chosen)]
    alike = [(x[..., 0, :] == x[..., 1, :]).all(-1) for x in scores]
    distinct = [((np.diff(ids, axis=-1) > 0) | (ids[..., 1:] < 0)).all(-1) for ids in there]
    return float(np.mean([a & b for a, b in zip(alike, distinct, strict=True)]))


def _random_queries(config: ModelConfig, rows: int, seed: int = 0) -> IndexQuery:
    """One query of each row, on the host."""
    c, rng = config.text_config, np.random.default_rng(seed)
    heads = (rows, 1, c.index_n_heads)
    return IndexQuery(
        rng.integers(0, 256, (*heads, c.index_head_dim // 2), np.uint8),
        rng.integers(124, 131, (*heads, c.index_head_dim // MXFP4_GROUP), np.uint8),
        rng.normal(size=heads).astype(ml_dtypes.bfloat16),
    )


def _selections(model: Model, queries: IndexQuery, context: int) -> list[np.ndarray]:
    """What each selecting layer selects, int32 [B, T, index_topk], ascending."""
    rows = len(queries.values)
    cache, batch = random_pages(model.init_cache(rows, context + 1)), step_at(model, rows, context, 1)
    spec = model.rules.spec("batch")
    arguments = spec, spec, cache_specs(cache, model.rules)
    step = over_devices(functools.partial(_select_all, config=model.config), model.mesh, model.rules, arguments, spec)
    found = jax.jit(step, compiler_options=compiler_options())(model.place_rows(queries), batch, cache)
    return [np.sort(fetch(x), axis=-1) for x in found]


def _scores_of(one: Model, queries: IndexQuery, context: int, chosen: list[np.ndarray]) -> list[np.ndarray]:
    """Index scores float32 [B, T, ...] of each selecting layer's chosen entries; unused ones score -inf."""
    rows, c = len(queries.values), one.config.text_config
    cache, size = random_pages(one.init_cache(rows, context + 1)), c.candidate_block_size
    selecting = [layer for layer in one.schedule.layers if layer.selects]
    found = []
    for layer, ids in zip(selecting, chosen, strict=True):
        pages = cache.layout.physical_pages(cache.page_table, layer.ratio)
        visible = jnp.full((rows, 1), (context + 1) // layer.ratio, jnp.int32)
        blocks = jnp.where(ids < 0, -1, ids // size).reshape(rows, 1, -1)
        keys = LayerCache.of(cache, layer).index
        parts = (jnp.asarray(x) for x in (queries.values, queries.scales, queries.weights))
        scores = entry_scores(*parts, keys, pages, visible, blocks, block_size=size)
        scores = scores.reshape(*ids.shape, size)
        found.append(np.asarray(jnp.take_along_axis(scores, jnp.asarray(ids % size)[..., None], axis=-1)[..., 0]))
    return found


def _select_all(
    query: IndexQuery, batch: ForwardBatch, cache: KVCache, *, config: ModelConfig, rules: ShardingRules = LOCAL
) -> list[jax.Array]:
    """All selecting layers of one step, with the same queries."""
    batch, cache = local_step(batch, cache, rules)
    candidates, found = None, []
    for block in Backbone(config, rules).layers:
        if block.spec.selects:
            indexer = block.attn.indexer
            own = jax.tree.map(indexer.split(batch).queries, query)
            selected, built = indexer.select(own, batch, LayerCache.of(cache, block.spec), candidates)
            candidates = built if block.spec.builds_candidates else candidates
            found.append(selected)
    return found


def _logits_and_choices(model: Model, rows: int, context: int, tokens: int):
    cache = random_pages(model.init_cache(rows, context + tokens))
    batch = step_at(model, rows, context, tokens)
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
