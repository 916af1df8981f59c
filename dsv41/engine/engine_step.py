"""The compiled programs of the engine: a prefill chunk, a plain decoding round, a change of one row's state."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsv41.cache import ForwardBatch, KVCache, cache_specs
from dsv41.config import ModelConfig
from dsv41.engine.speculative_step import (
    RequestState,
    RoundInputs,
    RoundOutput,
    advance,
    input_specs,
    model_specs,
    remember_prompt,
    verify_batch,
)
from dsv41.engram_store import StepLookup
from dsv41.models import Params, forward
from dsv41.models.sharded import made_once, on_mesh, param_specs
from dsv41.ops.sampling import SamplingArrays, sample, step_keys
from dsv41.ops.verification import emitted_tokens
from dsv41.sharding import LOCAL, ShardingRules
from pallas_kernels.fixed_order import compiler_options


def prefill_chunk(
    params: Params,
    drafter: Params | None,
    batch: ForwardBatch,
    cache: KVCache,
    sampling: SamplingArrays,
    drawn: jax.Array,
    *,
    config: ModelConfig,
    tail: int | None,
    rules: ShardingRules = LOCAL,
) -> tuple[jax.Array | None, KVCache]:
    """A chunk of prompts, and for each row the token that follows it.

    Args:
      params, drafter: of the backbone and of the drafter; None: nothing will be drafted.
      batch, cache, tail: as in `dsv41.models.forward`.
      sampling: of the rows.
      drawn: int32 [B] tokens drawn for the row's request before.
      config, rules: static; `rules` as in `dsv41.models.forward`.

    Returns:
      int32 [B] ids, of meaning only for rows whose prompt ends with this chunk; None if `tail` is 0. The cache.
    """
    if drafter is None:
        logits, cache, _ = forward(params, batch, cache, config=config, tail=tail, rules=rules)
    else:
        logits, cache = remember_prompt(params, drafter, batch, cache, config=config, tail=tail, rules=rules)
    if logits is None:
        return None, cache
    return sample(logits[:, 0], step_keys(sampling.seed, drawn), sampling), cache


def plain_round(
    params: Params,
    state: RequestState,
    cache: KVCache,
    inputs: RoundInputs,
    lookup: StepLookup | None,
    *,
    config: ModelConfig,
    rules: ShardingRules = LOCAL,
) -> tuple[RequestState, KVCache, RoundOutput]:
    """A round without drafts: every request in use gets one token. Arguments and results as of `speculative_round`."""
    rows = state.anchor.shape[0]
    none = jnp.zeros(rows, jnp.int32)
    drafts = jnp.zeros((rows, 0), jnp.int32)
    batch = verify_batch(state, drafts, none, lookup, config)
    logits, cache, _ = forward(params, batch, cache, config=config, rules=rules)
    # The first token was drawn with the prompt.
    following = sample(logits[:, 0], step_keys(inputs.sampling.seed, state.round + 1), inputs.sampling)
    tokens, count, stopped = emitted_tokens(drafts, none, following, inputs.stop_ids, state.remaining)
    empty = jnp.zeros((rows, 0), jnp.float32)
    output = RoundOutput(tokens=tokens, count=count, verified=none, accepted=none, confidence=empty, survival=empty)
    return advance(state, batch.tokens, tokens, count, stopped), cache, output


def set_row(state: RequestState, row: jax.Array, new: RequestState) -> RequestState:
    """The state with row `row` replaced by the only row of `new`; its slot stays."""
    replaced = jax.tree.map(lambda old, value: old.at[row].set(value[0]), state, new)
    return dataclasses.replace(replaced, slot=state.slot)


def _chunk_on(mesh: Mesh | None, rules: ShardingRules, params, drafter, batch, cache, sampling, drawn, **static):
    rows, caches = rules.spec("batch"), cache_specs(cache, rules)
    arguments = (*model_specs(static["config"], rules, drafter), rows, caches, rows, rows)
    step = on_mesh(functools.partial(prefill_chunk, **static), mesh, rules, arguments, (rows, caches))
    return step(params, drafter, batch, cache, sampling, drawn)


def _round_on(mesh: Mesh | None, rules: ShardingRules, params, state, cache, inputs, lookup, *, config):
    rows, caches = rules.spec("batch"), cache_specs(cache, rules)
    arguments = (param_specs(config, rules), rows, caches, input_specs(inputs, rules), lookup and lookup.specs())
    step = on_mesh(functools.partial(plain_round, config=config), mesh, rules, arguments, (rows, caches, rows))
    return step(params, state, cache, inputs, lookup)


@made_once
def compiled_prefill_chunk(mesh: Mesh | None, rules: ShardingRules):
    """`prefill_chunk`, compiled once a shape for all models; the cache is updated in place."""
    return jax.jit(
        functools.partial(_chunk_on, mesh, rules),
        static_argnames=("config", "tail"),
        donate_argnames=("cache",),
        compiler_options=compiler_options(),
    )


@made_once
def compiled_plain_round(mesh: Mesh | None, rules: ShardingRules):
    """`plain_round`, compiled once a shape for all models; state and cache are updated in place."""
    return jax.jit(
        functools.partial(_round_on, mesh, rules),
        static_argnames=("config",),
        donate_argnames=("state", "cache"),
        compiler_options=compiler_options(),
    )


@functools.cache
def compiled_set_row():
    """`set_row`, compiled once; the state is updated in place."""
    return jax.jit(set_row, donate_argnames=("state",))
