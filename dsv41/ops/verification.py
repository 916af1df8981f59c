"""Lossless verification of drafted tokens: which drafts stand, and what is drawn behind them.

Axis letters: B requests (rows), K drafts of a block, V vocabulary. d_k is draft k, counted from 1, at index k - 1;
q_k the law it was drawn from, given the drafts before it; P_k the target's law at the same place, so that P_{K+1}
is the law behind the whole block. Laws are log probabilities after temperature, top-k and top-p
(`sampling.filtered_logprobs`): -inf is impossible, NaN throughout means that there is no distribution. A greedy row
has all of its mass on one token and goes through the same formulas.

Formulas: dspark.md section 6.3. A row's length, the drafts verified, may depend on anything known before the last of
them was drawn, but never on that draft or a later one (section 6.4).
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from dsv41.config import DSV41Error
from dsv41.ops.sampling import NO_TOKEN


class AcceptanceRule(enum.Enum):
    """How drafts are accepted: each on its own until one fails, or as a block, which keeps more on average."""

    TOKEN = "token"
    BLOCK = "block"


def _log_ratios(
    target_logprobs: jax.Array, draft_logprobs: jax.Array, drafts: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log P_k(d_k)/q_k(d_k) float32 [B, K], -inf where P_k has no number, and how many drafts count, int32 [B].

    A draft that q_k cannot have drawn ends the block before it. What is left is an ordinary shorter block, with
    its next token drawn from P_k itself.
    """
    vocabulary, most = target_logprobs.shape[-1], drafts.shape[1]
    ids = jnp.clip(drafts, 0, vocabulary - 1)[..., None]
    log_p = jnp.take_along_axis(target_logprobs[:, :most], ids, axis=-1)[..., 0]
    log_q = jnp.take_along_axis(draft_logprobs, ids, axis=-1)[..., 0]
    possible = (drafts >= 0) & (drafts < vocabulary) & jnp.isfinite(log_q)
    counted = jnp.sum(jnp.cumprod(possible, axis=1, dtype=jnp.int32), axis=1)
    ratios = jnp.where(possible & ~jnp.isnan(log_p), log_p - jnp.where(possible, log_q, 0), -jnp.inf)
    return ratios, jnp.minimum(jnp.clip(lengths, 0, most), counted)


def _log_rho(ratios: jax.Array) -> jax.Array:
    """log rho_1 .. log rho_K, float32 [B, K], of rho_k = min(1, rho_{k-1} P_k/q_k)."""
    columns, rho = [], jnp.zeros_like(ratios[:, 0])
    for k in range(ratios.shape[1]):
        rho = jnp.minimum(rho + ratios[:, k], 0)
        columns.append(rho)
    return jnp.stack(columns, axis=1)


def acceptance_probabilities(
    target_logprobs: jax.Array,
    draft_logprobs: jax.Array,
    drafts: jax.Array,
    lengths: jax.Array,
    rule: AcceptanceRule,
) -> jax.Array:
    """h_k, the bound below which the uniform of draft k has to lie (`accepted_count`).

    TOKEN: min(1, P_k/q_k). BLOCK, with S_k the sum of max(rho_k P_{k+1} - q_{k+1}, 0): S_k/(S_k + 1 - rho_k), and
    rho_k for the last draft. Where P and q are the same bits h is exactly 1.

    Args:
      target_logprobs: float32 [B, K + 1, V].
      draft_logprobs: float32 [B, K, V].
      drafts: int32 [B, K].
      lengths: int32 [B], drafts of the row to verify; the rest count for nothing.
      rule: which rule.

    Returns:
      float32 [B, K] in [0, 1]; 0 from the row's length on, and from the first draft on whose own q is 0 or NaN or
      that is no id of the vocabulary. A target law of NaN is never passed: where it is reached, it becomes the law of
      the next token.
    """
    if not drafts.shape[1]:
        return jnp.zeros(drafts.shape, jnp.float32)
    ratios, counted = _log_ratios(target_logprobs, draft_logprobs, drafts, lengths)
    position = jnp.arange(1, drafts.shape[1] + 1)
    if rule is AcceptanceRule.TOKEN:
        bound = jnp.exp(jnp.minimum(ratios, 0))
    else:
        log_rho = _log_rho(ratios)
        rho = jnp.exp(log_rho)
        scaled = jnp.exp(log_rho[:, :-1, None] + target_logprobs[:, 1:-1])
        # The last place is always the end of its block and never read.
        excess = jnp.sum(jnp.maximum(scaled - jnp.exp(draft_logprobs[:, 1:]), 0), axis=-1)
        excess = jnp.pad(excess, ((0, 0), (0, 1)))
        inside = excess / jnp.where(log_rho == 0, 1, excess - jnp.expm1(log_rho))
        # rho = 1 leaves S/S, also where S is 0. A next law of NaN ends the block: the draft is kept, the law refused.
        inside = jnp.where((log_rho == 0) | (jnp.isnan(excess) & (rho > 0)), 1, jnp.nan_to_num(inside))
        bound = jnp.where(position == counted[:, None], rho, inside)
    return jnp.where(position <= counted[:, None], bound, 0)


def accepted_count(bounds: jax.Array, uniforms: jax.Array, lengths: jax.Array, rule: AcceptanceRule) -> jax.Array:
    """How many drafts stand: TOKEN, those before the first u_k >= h_k; BLOCK, the largest k with u_k < h_k.

    Args:
      bounds: float32 [B, K] from `acceptance_probabilities`.
      uniforms: float32 [B, K] in [0, 1), independent of each other and of everything drawn before.
      lengths: int32 [B], as given to `acceptance_probabilities`.
      rule: which rule.

    Returns:
      int32 [B], at most the row's length.
    """
    position = jnp.arange(1, bounds.shape[1] + 1)
    passed = (uniforms < bounds) & (position <= lengths[:, None])
    if rule is AcceptanceRule.TOKEN:
        return jnp.sum(jnp.cumprod(passed, axis=1, dtype=jnp.int32), axis=1)
    return jnp.max(jnp.where(passed, position, 0), axis=1, initial=0).astype(jnp.int32)


def next_token_logits(
    target_logprobs: jax.Array,
    draft_logprobs: jax.Array,
    drafts: jax.Array,
    accepted: jax.Array,
    lengths: jax.Array,
    rule: AcceptanceRule,
) -> jax.Array:
    """The law of the token behind the accepted drafts, for `sampling.draw`.

    P_{m+1} if all m drafts of the row stand, else max(rho_m P_{m+1} - q_{m+1}, 0), with rho_m = 1 for TOKEN. P_{m+1}
    as well if nothing is left of the difference.

    Args:
      target_logprobs: float32 [B, K + 1, V].
      draft_logprobs: float32 [B, K, V].
      drafts: int32 [B, K].
      accepted: int32 [B] from `accepted_count`.
      lengths: int32 [B], as given to `acceptance_probabilities`.
      rule: which rule.

    Returns:
      float32 [B, V], log probabilities up to a constant a row; NaN where the target's law is NaN.
    """
    law = jnp.take_along_axis(target_logprobs, accepted[:, None, None], axis=1)[:, 0]
    most = drafts.shape[1]
    if not most:
        return law
    ratios, counted = _log_ratios(target_logprobs, draft_logprobs, drafts, lengths)
    scaled = law
    if rule is AcceptanceRule.BLOCK:
        log_rho = jnp.pad(_log_rho(ratios), ((0, 0), (1, 0)))
        scaled = law + jnp.take_along_axis(log_rho, accepted[:, None], axis=1)
    refused = jnp.minimum(accepted, most - 1)[:, None, None]
    log_q = jnp.take_along_axis(draft_logprobs, refused, axis=1)[:, 0]
    # log(a - b) = log a + log(1 - b/a), which keeps small differences exact. A NaN compares as not above.
    above = scaled > log_q
    rest = jnp.where(above, scaled + jnp.log(-jnp.expm1(jnp.where(above, log_q - scaled, -1))), -jnp.inf)
    whole = (accepted >= counted) | ~jnp.any(rest > -jnp.inf, axis=-1)
    return jnp.where(whole[:, None], law, rest)


def emitted_tokens(
    drafts: jax.Array, accepted: jax.Array, next_token: jax.Array, stop_ids: jax.Array, remaining: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a round adds to its requests: the accepted drafts and the next token, up to the first stop token.

    Args:
      drafts: int32 [B, K].
      accepted: int32 [B].
      next_token: int32 [B]; `NO_TOKEN` is handed on for the host to refuse.
      stop_ids: int32 [S] of S stop ids for all rows, or [B, S]; -1 is an unused place.
      remaining: int32 [B], tokens the request may still get; 0 in a row that is not in use.

    Returns:
      (tokens int32 [B, K + 1], -1 behind the last; their number int32 [B]; bool [B], the last of them is a stop id).
    """
    position = jnp.arange(drafts.shape[1] + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(position == accepted[:, None], next_token[:, None], padded)
    is_stop = (
        jnp.any(tokens[..., None] == jnp.atleast_2d(stop_ids)[:, None], axis=-1)
        & (tokens >= 0)
        & (position <= accepted[:, None])
    )
    # Beyond every row where there is none.
    until_stop = jnp.where(jnp.any(is_stop, axis=1), jnp.argmax(is_stop, axis=1) + 1, position.size + 1)
    count = jnp.minimum(jnp.minimum(accepted + 1, until_stop), jnp.maximum(remaining, 0)).astype(jnp.int32)
    tokens = jnp.where(position < count[:, None], tokens, NO_TOKEN).astype(jnp.int32)
    return tokens, count, until_stop <= count


def acceptance_length(accepted: int, rounds: int) -> float:
    """Tokens a round on average, counting the one that every round adds to its accepted drafts.

    Raises:
      DSV41Error: rounds is below 1, or accepted below 0.
    """
    if rounds < 1 or accepted < 0:
        raise DSV41Error(
            f"acceptance length: expected 1 round or more and 0 drafts or more, got {rounds} and {accepted}"
        )
    return 1 + accepted / rounds
