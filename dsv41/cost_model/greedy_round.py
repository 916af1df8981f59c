"""A speculative round at temperature 0 as one program: verify, commit, draft the next block.

An engine's round drafts first and draws from laws (`dsv41.engine`). Here the drafts come with the step, as the Engram
rows of drafted tokens do where tables are on the host, which cannot know them earlier.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv41.cache import ForwardBatch, KVCache, cache_specs
from dsv41.config import ModelConfig
from dsv41.models import Params, bind_drafter, draft, forward
from dsv41.models.sharded import on_mesh, param_specs
from dsv41.sharding import LOCAL, ShardingRules
from pallas_kernels.fixed_order import compiler_options


def greedy_round(
    params: Params,
    drafter: Params,
    batch: ForwardBatch,
    cache: KVCache,
    *,
    config: ModelConfig,
    rules: ShardingRules = LOCAL,
) -> tuple[jax.Array, jax.Array, jax.Array, KVCache]:
    """Verifies the drafts in a batch and drafts the next ones.

    Args:
      params, drafter: of the backbone and of the drafter.
      batch: of each row the newest token and behind it its drafts; `num_new` counts both.
      cache: with the drafter's rings filled up to each newest token.
      config, rules: static; as in `dsv41.models.forward`.

    Returns:
      the best token behind each one, int32 [B, T]; how many drafts stand, int32 [B]: a row's new tokens are that many
      of the best ones and one; the next drafts int32 [B, K]; the cache.
    """
    options = {"config": config, "rules": rules}
    logits, cache, aux = forward(params, batch, cache, logits="all", capture=("taps",), **options)
    with jax.named_scope("accept"):
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        real = jnp.arange(1, best.shape[1]) < batch.num_new[:, None]
        accepted = jnp.cumprod((best[:, :-1] == batch.tokens[:, 1:]) & real, axis=1).sum(axis=1)
    active = batch.num_new > 0
    committed = dataclasses.replace(batch, num_new=jnp.where(active, 1 + accepted, 0))
    cache = bind_drafter(config, drafter, rules).remember(aux["main_hidden"], committed, cache)
    anchor = jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
    start = batch.start + committed.num_new
    block, _ = draft(params, drafter, anchor, start, batch.slot, active, cache, **options)
    return best, accepted, block.tokens, cache


def _round_on(mesh: Mesh, rules: ShardingRules, params, drafter, batch, cache, *, config: ModelConfig):
    rows, caches = rules.spec("batch"), cache_specs(cache, rules)
    arguments = (param_specs(config, rules), param_specs(config, rules, "drafter"), rows, caches)
    step = on_mesh(functools.partial(greedy_round, config=config), mesh, rules, arguments, (rows, rows, rows, caches))
    return step(params, drafter, batch, cache)


@functools.cache
def compiled_greedy_round(mesh: Mesh, rules: ShardingRules) -> Callable[..., Any]:
    """`greedy_round` on a mesh, compiled once a shape; the cache is updated in place."""
    return jax.jit(
        functools.partial(_round_on, mesh, rules),
        static_argnames=("config",),
        donate_argnames=("cache",),
        compiler_options=compiler_options(),
    )
