"""One compiled round of speculative decoding: draft, verify, accept, commit (dspark.md sections 6 to 8).

Axis letters: B requests (rows), K drafts of a block, T tokens of the verify step, V vocabulary.

A round keeps nothing of a rejected draft: everything is addressed by position and hidden by the committed length, so
that the next round starts at a smaller position than this one wrote to, and overwrites.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dsv41.cache import ForwardBatch, KVCache, cache_specs
from dsv41.config import ModelConfig
from dsv41.engram_store import StepLookup
from dsv41.models import Draft, Params, bind_drafter, draft, forward
from dsv41.models.sharded import made_once, on_mesh, param_specs
from dsv41.ops import collectives, verification
from dsv41.ops.sampling import SamplingArrays, all_greedy, draw, filtered_logprobs, round_keys
from dsv41.ops.verification import AcceptanceRule
from dsv41.ops.verify_schedule import admit_top, admit_while_improving, survival
from dsv41.sharding import LOCAL, ShardingRules
from pallas_kernels.fixed_order import compiler_options


class VerifySchedule(enum.Enum):
    """How many drafts of each request a round verifies (dspark.md section 7).

    ALL: as many as there are. BUDGET: a number for the whole batch, chosen from older confidences, given to the drafts
    most likely to be reached by the current ones. GREEDY: Algorithm 1, from current confidences alone. None of them
    looks at a draft, or at what follows it, to decide whether to verify it, so that none changes what is generated.
    """

    ALL = "all"
    BUDGET = "budget"
    GREEDY = "greedy"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestState:
    """Where every request of a batch stands; stays on the device from round to round."""

    anchor: jax.Array  # int32 [B] newest token, known but not in the cache
    start: jax.Array  # int32 [B] its position = committed length
    history: jax.Array  # int32 [B, N - 1] committed tokens before it, newest last, -1 before the sequence start
    round: jax.Array  # int32 [B] rounds begun
    remaining: jax.Array  # int32 [B] tokens the request may still get; 0: finished or not in use
    slot: jax.Array  # int32 [B] cache slot


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundOutput:
    """What a round did; rows that were not in use have zeros."""

    tokens: jax.Array  # int32 [B, T] new tokens, -1 behind the last
    count: jax.Array  # int32 [B] how many
    verified: jax.Array  # int32 [B] drafts verified
    accepted: jax.Array  # int32 [B] drafts accepted, before a stop id or the length limit cut them
    confidence: jax.Array  # float32 [B, K] raw confidence logits
    survival: jax.Array  # float32 [B, K] calibrated probability that drafts 1 to k are all accepted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundInputs:
    """What the host decides about a round."""

    sampling: SamplingArrays
    stop_ids: jax.Array  # int32 [S] of all rows or [B, S], -1 unused
    temperatures: jax.Array  # float32 [K] of the confidences
    budget: jax.Array  # int32 [] drafts of the whole batch, for BUDGET
    steps_per_second: jax.Array | None  # float32 [N] by tokens of a batch with every row in use; only for GREEDY
    forced_drafts: jax.Array | None = None  # int32 [B, K] to verify instead of drawing drafts


def request_state(
    ids: Sequence[np.ndarray], remaining: Sequence[int], rows: int, look_back: int, slots: Sequence[int] | None = None
) -> RequestState:
    """The state of requests of which all tokens but the last are committed (numpy arrays).

    Args:
      ids: all known tokens of each request.
      remaining: new tokens each may still get; 0 for one that has finished.
      rows: B; rows beyond the requests are not in use.
      look_back: committed tokens that enter the Engram hash of a new one.
      slots: cache slot of each; None: 0, 1, ...
    """
    used = len(ids)
    state = RequestState(
        anchor=np.zeros(rows, np.int32),
        start=np.zeros(rows, np.int32),
        history=np.full((rows, look_back), -1, np.int32),
        round=np.zeros(rows, np.int32),
        remaining=np.zeros(rows, np.int32),
        slot=np.arange(rows, dtype=np.int32),
    )
    state.remaining[:used] = remaining
    if slots is not None:
        state.slot[:used] = slots
    for i, known in enumerate(ids):
        state.anchor[i], state.start[i] = known[-1], len(known) - 1
        tail = known[max(len(known) - 1 - look_back, 0) : -1]
        state.history[i, look_back - len(tail) :] = tail
    return state


def verify_widths(draft_tokens: int) -> tuple[int, ...]:
    """Tokens a row for which a round is compiled: 1, 2, 4, ... and `draft_tokens` + 1."""
    powers = (1 << i for i in range(draft_tokens.bit_length() + 1))
    return (*(p for p in powers if p <= draft_tokens), draft_tokens + 1)


def _draw_block(
    params: Params,
    drafter: Params,
    state: RequestState,
    cache: KVCache,
    inputs: RoundInputs,
    config: ModelConfig,
    rules: ShardingRules,
) -> tuple[Draft, jax.Array]:
    """The draft, and the log probabilities float32 [B, K, V] that its tokens were drawn with."""
    laws = []
    certain = all_greedy(inputs.sampling)

    def draw_one(k: int, logits: jax.Array) -> jax.Array:
        if inputs.forced_drafts is not None:
            forced = inputs.forced_drafts[:, k]
            laws.append(jnp.where(jax.nn.one_hot(forced, logits.shape[-1], dtype=bool), 0.0, -jnp.inf))
            return forced
        laws.append(filtered_logprobs(logits[:, None], inputs.sampling)[:, 0])
        token = draw(laws[-1], round_keys(inputs.sampling.seed, state.round, _DRAFTS + k), certain)
        # Broken logits leave no token; what stands for it is rejected, as its law is NaN.
        return jnp.maximum(token, 0)

    active = state.remaining > 0
    where = (state.anchor, state.start, state.slot)
    block, _ = draft(params, drafter, *where, active, cache, draw_one, config=config, rules=rules)
    return block, jnp.stack(laws, axis=1)


# Purposes of a round's random keys.
_TESTS, _NEXT, _DRAFTS = 0, 1, 2


def _lengths(
    state: RequestState,
    survivals: jax.Array,
    inputs: RoundInputs,
    schedule: VerifySchedule,
    rules: ShardingRules,
) -> jax.Array:
    """int32 [B] drafts to verify out of those whose survivals float32 [B, K] are given."""
    active = state.remaining > 0
    # The last token that a request may get is drawn, never drafted.
    caps = jnp.where(active, jnp.clip(state.remaining - 1, 0, survivals.shape[1]), 0)
    if schedule is VerifySchedule.ALL:
        return caps
    # A schedule looks at the whole batch: every device decides for all rows and keeps its own.
    rows = active.shape[0]
    active, caps, survivals = (collectives.gather(x, rules.batch) for x in (active, caps, survivals))
    if schedule is VerifySchedule.BUDGET:
        lengths = admit_top(survivals, caps, inputs.budget)
    else:
        # The step is as large as the batch, however few of its rows are in use.
        idle = active.size - jnp.sum(active)
        rates = jnp.take(inputs.steps_per_second, jnp.arange(inputs.steps_per_second.size) + idle, mode="clip")
        lengths = admit_while_improving(survivals, caps, rates, active)
    return jax.lax.dynamic_slice_in_dim(lengths, collectives.axis_index(rules.batch) * rows, rows)


def verify_batch(
    state: RequestState, drafts: jax.Array, lengths: jax.Array, lookup: StepLookup | None, config: ModelConfig
) -> ForwardBatch:
    """The anchor and the drafts as ordinary new tokens."""
    tokens = jnp.concatenate([state.anchor[:, None], drafts], axis=1)
    num_new = jnp.where(state.remaining > 0, 1 + lengths, 0)
    valid = jnp.arange(tokens.shape[1]) < num_new[:, None]
    values, scales = (None, None) if lookup is None else lookup.rows(tokens, state.history, valid)
    return ForwardBatch(
        tokens=tokens,
        num_new=num_new,
        start=state.start,
        slot=state.slot,
        image_mask=tokens == config.image_token_id,
        engram_values=values,
        engram_scales=scales,
    )


def speculative_round(
    params: Params,
    drafter: Params,
    state: RequestState,
    cache: KVCache,
    inputs: RoundInputs,
    lookup: StepLookup | None,
    *,
    config: ModelConfig,
    rule: AcceptanceRule,
    schedule: VerifySchedule,
    width: int,
    rules: ShardingRules = LOCAL,
) -> tuple[RequestState, KVCache, RoundOutput]:
    """Drafts a block for every request, verifies part of it, and commits what stands.

    Args:
      params, drafter: of the backbone and of the drafter.
      state: where the requests stand.
      cache: with the drafter's rings filled up to each anchor; made with `draft_tokens` of at least width - 1.
      inputs: what the host decides.
      lookup: Engram rows of the drafted tokens; None if the model has no Engram.
      config, rule, schedule, rules: static; `rules` as in `dsv41.models.forward`.
      width: T, static; at most `dspark_block_size` + 1. A row verifies at most T - 1 drafts.

    Returns:
      the state and cache after the round, and what it did.
    """
    block, draft_laws = _draw_block(params, drafter, state, cache, inputs, config, rules)
    most = width - 1
    drafts, draft_laws = block.tokens[:, :most], draft_laws[:, :most]
    survivals = survival(block.confidence, inputs.temperatures)
    lengths = _lengths(state, survivals[:, :most], inputs, schedule, rules) if most else jnp.zeros_like(state.start)
    batch = verify_batch(state, drafts, lengths, lookup, config)
    options = {"config": config, "rules": rules}
    logits, cache, aux = forward(params, batch, cache, logits="all", capture=("taps",), **options)
    with jax.named_scope("accept"):
        laws = filtered_logprobs(logits, inputs.sampling)
        bounds = verification.acceptance_probabilities(laws, draft_laws, drafts, lengths, rule)
        keys = round_keys(inputs.sampling.seed, state.round, _TESTS)
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, (most,)))(keys)
        accepted = verification.accepted_count(bounds, uniforms, lengths, rule)
        law = verification.next_token_logits(laws, draft_laws, drafts, accepted, lengths, rule)
        certain = all_greedy(inputs.sampling)
        following = draw(law, round_keys(inputs.sampling.seed, state.round, _NEXT), certain)
        tokens, count, stopped = verification.emitted_tokens(
            drafts, accepted, following, inputs.stop_ids, state.remaining
        )
    active = state.remaining > 0
    committed = dataclasses.replace(batch, num_new=jnp.where(active, 1 + accepted, 0))
    cache = bind_drafter(config, drafter, rules).remember(aux["main_hidden"], committed, cache)
    output = RoundOutput(
        tokens=tokens,
        count=count,
        verified=lengths,
        accepted=jnp.where(active, accepted, 0),
        confidence=jnp.where(active[:, None], block.confidence, 0),
        survival=jnp.where(active[:, None], survivals, 0),
    )
    return advance(state, batch.tokens, tokens, count, stopped), cache, output


def advance(
    state: RequestState, verified: jax.Array, tokens: jax.Array, count: jax.Array, stopped: jax.Array
) -> RequestState:
    """The state behind a round that gave `count` of `tokens` after verifying `verified` int32 [B, T]."""
    active = state.remaining > 0
    finished = stopped | (count >= state.remaining)
    past = jnp.concatenate([state.history, verified], axis=1)
    reach = state.history.shape[1]
    # Not the newest token: it has no state yet.
    history = jnp.take_along_axis(past, count[:, None] + jnp.arange(reach), axis=1)
    newest = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return RequestState(
        anchor=jnp.where(count > 0, newest, state.anchor),
        start=state.start + count,
        history=history,
        round=state.round + active,
        remaining=jnp.where(finished, 0, state.remaining - count),
        slot=state.slot,
    )


def remember_prompt(
    params: Params,
    drafter: Params,
    batch: ForwardBatch,
    cache: KVCache,
    *,
    config: ModelConfig,
    tail: int | None = None,
    rules: ShardingRules = LOCAL,
) -> tuple[jax.Array | None, KVCache]:
    """A prefill step that also fills the drafter's rings: logits float32 [B, 1, V] of each row's last token, cache.

    `tail` and `rules` as in `dsv41.models.forward`; if `tail` is 0, there are no logits and the rings stay as they are.
    """
    if tail == 0:
        _, cache, _ = forward(params, batch, cache, config=config, tail=tail, rules=rules)
        return None, cache
    logits, cache, aux = forward(params, batch, cache, config=config, capture=("taps",), tail=tail, rules=rules)
    seen = batch if tail is None else batch.tail_batch(tail)
    return logits, bind_drafter(config, drafter, rules).remember(aux["main_hidden"], seen, cache)


def model_specs(config: ModelConfig, rules: ShardingRules, drafter: Params | None) -> tuple[Params, Params | None]:
    """How the parameters of backbone and drafter are spread."""
    return param_specs(config, rules), None if drafter is None else param_specs(config, rules, "drafter")


def input_specs(inputs: RoundInputs, rules: ShardingRules) -> RoundInputs:
    """How what the host decides about a round is spread: by rows where it is a row's own."""
    rows, everywhere = rules.spec("batch"), PartitionSpec()
    return RoundInputs(
        sampling=rows,
        stop_ids=rows if inputs.stop_ids.ndim == 2 else everywhere,
        temperatures=everywhere,
        budget=everywhere,
        steps_per_second=None if inputs.steps_per_second is None else everywhere,
        forced_drafts=None if inputs.forced_drafts is None else rows,
    )


def _round_on(mesh: Mesh | None, rules: ShardingRules, params, drafter, state, cache, inputs, lookup, **static):
    rows, caches = rules.spec("batch"), cache_specs(cache, rules)
    arguments = (*model_specs(static["config"], rules, drafter), rows, caches, input_specs(inputs, rules))
    step = functools.partial(speculative_round, **static)
    step = on_mesh(step, mesh, rules, (*arguments, lookup and lookup.specs()), (rows, caches, rows))
    return step(params, drafter, state, cache, inputs, lookup)


def _prefill_on(mesh: Mesh | None, rules: ShardingRules, params, drafter, batch, cache, **static):
    rows, caches = rules.spec("batch"), cache_specs(cache, rules)
    arguments = (*model_specs(static["config"], rules, drafter), rows, caches)
    step = on_mesh(functools.partial(remember_prompt, **static), mesh, rules, arguments, (rows, caches))
    return step(params, drafter, batch, cache)


@made_once
def compiled_round(mesh: Mesh | None, rules: ShardingRules):
    """`speculative_round`, compiled once a shape for all models; state and cache are updated in place."""
    return jax.jit(
        functools.partial(_round_on, mesh, rules),
        static_argnames=("config", "rule", "schedule", "width"),
        donate_argnames=("state", "cache"),
        compiler_options=compiler_options(),
    )


@made_once
def compiled_prefill(mesh: Mesh | None, rules: ShardingRules):
    """`remember_prompt`, compiled once a shape for all models; the cache is updated in place."""
    return jax.jit(
        functools.partial(_prefill_on, mesh, rules),
        static_argnames=("config", "tail"),
        donate_argnames=("cache",),
        compiler_options=compiler_options(),
    )
