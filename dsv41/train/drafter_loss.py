"""What the drafter learns from (dspark.md section 3.3), and how well it does.

Axis letters: N blocks, K drafts of a block, M = N * K drafts, V vocabulary, D width, r Markov rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.config import TextConfig
from dsv41.models import Params
from dsv41.ops.straight_through import product_bf16, product_of_master
from dsv41.train.drafter_anchors import Anchors
from dsv41.train.drafter_forward import DrafterOptions
from dsv41.train.row_parts import cut
from pallas_kernels.fixed_order import contract
from pallas_kernels.norms import rms_norm
from pallas_kernels.rounding import round_to_bf16

# Bytes of one float32 [drafts, V] array: so many drafts have their probabilities computed at a time.
_LOGIT_BYTES = 128 << 20
_EPS = 1e-6


class Heads(NamedTuple):
    """What the output heads read of every draft."""

    normed: jax.Array  # bfloat16 [M, D]
    before: jax.Array  # bfloat16 [M, r] Markov embedding of the token that the draft follows
    confidence: jax.Array  # float32 [N, K] raw logits


class Compared(NamedTuple):
    """Drafts beside the target's distribution, at temperature 1 and with the true tokens before them."""

    ce: jax.Array  # float32 [N, K] -log p(label)
    l1: jax.Array  # float32 [N, K] sum over the vocabulary of |p - t|
    agree: jax.Array  # bool [N, K] both have the same best token


def run_heads(masters: Params, x: jax.Array, tokens: jax.Array, config: TextConfig, options: DrafterOptions) -> Heads:
    """Args:
    masters: float32 {"mtp": stages}.
    x: bfloat16 [N, K, D] of `run_stages`.
    tokens: int32 [N, K] that each draft follows.
    config, options: static.
    """
    last = masters["mtp"][config.num_nextn_predict_layers - 1]
    normed = rms_norm(x, round_to_bf16(last["norm"]["weight"]), config.rms_norm_eps)
    # Gathered in float32, so that gradients of one token's row are added so.
    before = round_to_bf16(last["markov_head"]["embed"]["weight"][tokens])
    read = normed if config.dspark_confidence_input == "normed" else x
    read = jnp.concatenate([read.astype(jnp.float32), before.astype(jnp.float32)], axis=-1)
    read = read if options.confidence_reaches_stages else jax.lax.stop_gradient(read)
    proj = round_to_bf16(last["confidence_head"]["proj"]["weight"]).astype(jnp.float32)
    m = tokens.size
    return Heads(normed.reshape(m, -1), before.reshape(m, -1), contract(read, proj)[..., 0])


def draft_logits(normed: jax.Array, before: jax.Array, head: jax.Array, markov: jax.Array) -> jax.Array:
    """float32 [M, V]; head bfloat16 [V, D] is frozen, markov float32 [V, r] a master."""
    return product_bf16(normed, jax.lax.stop_gradient(head)) + product_of_master(before, markov)


def compare(
    heads: Heads, head: jax.Array, markov: jax.Array, hidden: jax.Array, labels: jax.Array, *, logit_bytes: int = 0
) -> Compared:
    """Probabilities of drafts and target, a part of the drafts at a time, computed again in the backward pass.

    Args:
      heads: of `run_heads`.
      head: float32 or bfloat16 [V, D], the backbone's; frozen.
      markov: float32 [V, r].
      hidden: bfloat16 [M, D], the backbone's final normalised state where the draft is verified; nothing is learnt
        through it.
      labels: int32 [N, K].
      logit_bytes: static, of a part; 0: the default.
    """
    head, hidden = jax.lax.stop_gradient((round_to_bf16(head), hidden))
    m = labels.size
    part = max((logit_bytes or _LOGIT_BYTES) // (4 * head.shape[0]), 1)

    @jax.checkpoint
    def one(args):
        normed, before, target, label = args
        logits = draft_logits(normed, before, head, markov)
        wanted = product_bf16(target, head)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        ce = -jnp.take_along_axis(log_p, label[:, None], axis=-1)[:, 0]
        l1 = jnp.abs(jnp.exp(log_p) - jax.nn.softmax(wanted, axis=-1)).sum(axis=-1)
        return ce, l1, jnp.argmax(logits, axis=-1) == jnp.argmax(wanted, axis=-1)

    with jax.named_scope("draft_head"):
        found = jax.lax.map(one, cut((heads.normed, heads.before, hidden, labels.reshape(-1)), part))
    return Compared(*(x.reshape(-1)[:m].reshape(labels.shape) for x in found))


def target_states(hidden: jax.Array, anchors: Anchors) -> jax.Array:
    """bfloat16 [M, D]: of hidden [B, T, D] those at each block's tokens p + k, whose head verifies draft k."""
    at = jnp.minimum(anchors.slots(anchors.tokens.shape[2]), hidden.shape[1] - 1)
    taken = jnp.take_along_axis(hidden, at.reshape(at.shape[0], -1, 1), axis=1)
    return taken.reshape(-1, hidden.shape[-1])


class DrafterSums(NamedTuple):
    """Sums over blocks; those of two batches add up. A whole block has all K drafts valid."""

    weight: jax.Array  # float32 [] of all valid drafts
    ce: jax.Array  # float32 [] weighted
    l1: jax.Array  # float32 [] weighted
    confidence: jax.Array  # float32 [] weighted
    drafts: jax.Array  # float32 [K] valid ones
    accepted: jax.Array  # float32 [K] their probability to be accepted, 1 - l1 / 2
    agreed: jax.Array  # float32 [K]
    confidence_error: jax.Array  # float32 [] of valid drafts, |said - accepted|
    confidence_bias: jax.Array  # float32 [] of valid drafts, said - accepted
    blocks: jax.Array  # float32 [] whole ones
    length: jax.Array  # float32 [] of whole blocks, tokens that a round is expected to give at temperature 1
    agreed_length: jax.Array  # float32 [] of whole blocks, tokens up to the first draft that is not the target's best
    cumulative_bias: jax.Array  # float32 [] of whole blocks, what is said of the drafts up to k minus what holds, mean


def weighted_sums(
    compared: Compared, confidence: jax.Array, valid: jax.Array, options: DrafterOptions
) -> tuple[jax.Array, DrafterSums]:
    """The loss that is to be divided by the weight of everything that one step sees, and what it is made of.

    Args:
      compared, confidence: [N, K] of `compare` and `run_heads`.
      valid: bool [N, K].
      options: weights of the losses; static.
    """
    k = jnp.arange(valid.shape[1])
    weight = jnp.where(valid, jnp.exp(-k / options.decay), 0.0)
    accepted = acceptance(compared)
    # BCE with logits of sigma(z) against the acceptance probability.
    bce = jax.nn.softplus(confidence) - accepted * confidence
    ce, l1, conf = ((weight * x).sum() for x in (compared.ce, compared.l1, bce))
    total = options.ce_weight * ce + options.l1_weight * l1 + options.confidence_weight * conf
    said, whole = jax.nn.sigmoid(confidence), valid.all(axis=1)
    of_whole = [jnp.cumprod(x, axis=1).sum(axis=1) for x in (accepted, compared.agree.astype(jnp.float32), said)]
    length, agreed_length, said_length = (jnp.where(whole, x, 0.0).sum() for x in of_whole)
    blocks = whole.sum().astype(jnp.float32)
    sums = DrafterSums(
        weight=weight.sum(), ce=ce, l1=l1, confidence=conf,
        drafts=valid.sum(axis=0).astype(jnp.float32),
        accepted=jnp.where(valid, accepted, 0.0).sum(axis=0),
        agreed=(valid & compared.agree).sum(axis=0).astype(jnp.float32),
        confidence_error=jnp.where(valid, jnp.abs(said - accepted), 0.0).sum(),
        confidence_bias=jnp.where(valid, said - accepted, 0.0).sum(),
        blocks=blocks, length=blocks + length, agreed_length=blocks + agreed_length,
        cumulative_bias=(said_length - length) / valid.shape[1],
    )  # fmt: skip
    return total, jax.lax.stop_gradient(sums)


def acceptance(compared: Compared) -> jax.Array:
    """float32 [N, K]: the probability that a draft is accepted, c* = 1 - ||p - t|| / 2, without gradient."""
    return jax.lax.stop_gradient(jnp.clip(1 - 0.5 * compared.l1, 0.0, 1.0))


def drafter_metrics(sums: DrafterSums, options: DrafterOptions) -> dict[str, jax.Array]:
    """Float32 scalars: loss, ce, l1, confidence_loss (weighted means), accept_k and agree_k of draft k from 1 on,
    expected_tokens and agreed_tokens a round (the target's own token among them), confidence_error, confidence_bias,
    confidence_cumulative_bias, drafts."""
    weight, drafts = sums.weight + _EPS, jnp.maximum(sums.drafts.sum(), 1)
    blocks = jnp.maximum(sums.blocks, 1)
    ce, l1, conf = sums.ce / weight, sums.l1 / weight, sums.confidence / weight
    loss = options.ce_weight * ce + options.l1_weight * l1 + options.confidence_weight * conf
    metrics = {"loss": loss, "ce": ce, "l1": l1, "confidence_loss": conf}
    metrics |= {"expected_tokens": sums.length / blocks, "agreed_tokens": sums.agreed_length / blocks}
    for i in range(sums.drafts.shape[0]):
        count = jnp.maximum(sums.drafts[i], 1)
        metrics |= {f"accept_{i + 1}": sums.accepted[i] / count, f"agree_{i + 1}": sums.agreed[i] / count}
    return metrics | {
        "confidence_error": sums.confidence_error / drafts,
        "confidence_bias": sums.confidence_bias / drafts,
        "confidence_cumulative_bias": sums.cumulative_bias / blocks,
        "drafts": sums.drafts.sum(),
    }


def mean_loss(total: jax.Array, sums: DrafterSums) -> jax.Array:
    """float32 []: the weighted mean over everything that `sums` are of."""
    return total / (sums.weight + _EPS)
