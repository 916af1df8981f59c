"""The drafter over blocks of packed rows, without a cache, with gradients (dspark.md sections 2 and 3.2).

Weights and arithmetic are those of `dsv41.models.Drafter`. Work does not grow with the context: a block's attention is
that of its K queries to the window before its anchor and to the block itself.

Axis letters: B rows, T tokens of a row, N anchors of a row, K drafts of a block, W window, D width, H head width.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.config import DSV41Error, ModelConfig
from dsv41.layers import DraftBlock, Residual, Sublayer, open_streams, traced_once, with_parameters
from dsv41.layers.draft_attention import DraftAttention
from dsv41.models import Params, abstract_drafter_params
from dsv41.models.drafter import Drafter
from dsv41.ops.straight_through import activation_fp8, einsum_bf16
from dsv41.train.attention import NEVER, exponentials
from dsv41.train.drafter_anchors import Anchors
from dsv41.train.experts import moe_sublayer
from dsv41.train.master_weights import FULL_QAT, QAT, forward_params
from dsv41.train.pack import PackedBatch
from dsv41.train.router_balance import count_chosen
from pallas_kernels.dispatch import kernels
from pallas_kernels.hyper_connection import ops as mhc
from pallas_kernels.rope import apply_rope
from pallas_kernels.rounding import round_to_bf16


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """How the drafter is trained.

    Attributes:
      anchors: blocks of a row, N.
      qat: what is rounded as in serving; `main` means nothing here.
      decay: g; draft k (from 0) weighs exp(-k / g) in the losses.
      ce_weight, l1_weight, confidence_weight: of the losses.
      confidence_reaches_stages: the loss of the confidences also trains what they are read from.
      rematerialize: stages are computed again in the backward pass.

    Raises:
      DSV41Error: a number is out of range; the message starts with the field.
    """

    anchors: int = 256
    qat: QAT = FULL_QAT
    decay: float = 4.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    confidence_reaches_stages: bool = True
    rematerialize: bool = True

    def __post_init__(self):
        if self.anchors < 1:
            raise DSV41Error(f"anchors: expected 1 or more, got {self.anchors}")
        if not self.decay > 0:
            raise DSV41Error(f"decay: expected a number above 0, got {self.decay}")
        for field in ("ce_weight", "l1_weight", "confidence_weight"):
            if not getattr(self, field) >= 0:
                raise DSV41Error(f"{field}: expected 0 or more, got {getattr(self, field)}")


class Blocks(NamedTuple):
    """What the stages leave of B * N blocks, block n of row b at b * N + n."""

    x: jax.Array  # bfloat16 [B * N, K, D], before the final norm
    loads: jax.Array  # int32 [stages, E] how often each expert was chosen, of blocks that are no dummies


def bind_masters(masters: Params, config: ModelConfig, qat: QAT) -> Drafter:
    """The drafter on what a forward sees of its masters {"mtp": stages}, differentiable in these."""
    params = forward_params(masters, config, qat, abstract_drafter_params(config))
    return with_parameters(Drafter(config, formats=qat.formats(config)), params)


def run_stages(
    drafter: Drafter,
    table: jax.Array,
    main_hidden: jax.Array,
    pack: PackedBatch,
    anchors: Anchors,
    rope: jax.Array,
    *,
    options: DrafterOptions,
) -> Blocks:
    """All stages over the blocks of `anchors`.

    Args:
      drafter: of `bind_masters`.
      table: float32 or bfloat16 [V, D], the backbone's embedding; frozen.
      main_hidden: bfloat16 [B, T, taps * D], as `run_layers` gives it; nothing is learnt through it.
      pack: the rows.
      anchors: their blocks.
      rope: float32 [at least T + K, 2, r], of sliding layers: blocks reach past the end of a row.
      options: static.
    """
    c = drafter.config
    b, n, k = anchors.tokens.shape
    if rope.shape[0] < pack.tokens.shape[1] + k:
        raise ValueError(f"run_stages: rope has {rope.shape[0]} positions, expected {pack.tokens.shape[1] + k} or more")
    table, main_hidden, rope = jax.lax.stop_gradient((table, main_hidden, jnp.asarray(rope)))
    tokens = jnp.full((b * n, k), c.dspark_noise_token_id, jnp.int32).at[:, 0].set(anchors.tokens[..., 0].reshape(-1))
    residual = open_streams(round_to_bf16(table[tokens]), c.hc_mult)
    position = anchors.position.reshape(-1, 1) + jnp.arange(k)
    keep = jnp.broadcast_to(anchors.keep.reshape(-1, 1), position.shape)
    first = drafter.mtp[0]
    # Kernels have no derivatives.
    with kernels("xla"):
        with jax.named_scope("draft_context"):
            main = first.main_norm(first.main_proj(main_hidden))
        loads = []
        for i, stage in enumerate(drafter.mtp):

            def run(residual, main, stage=stage):
                context = _context(stage.attn, main, pack, anchors, rope, options.qat)
                return _stage(stage, residual, context, rope[position], keep, options.qat)

            with jax.named_scope(f"draft_stage_{i}"):
                residual, load = (jax.checkpoint(run) if options.rematerialize else run)(residual, main)
            loads.append(load)
        residual = residual.complete()
        return Blocks(mhc.collapse(residual.streams, residual.pre), jnp.stack(loads))


@jax.named_scope("context")
def _context(
    attn: DraftAttention, main: jax.Array, pack: PackedBatch, anchors: Anchors, rope: jax.Array, qat: QAT
) -> tuple[jax.Array, jax.Array]:
    """Keys before each anchor, float32 [B * N, W, H] of bfloat16 values, and bool [B * N, W] those of its document.

    Every token of a row is projected once. Keys are gathered in float32, so that their gradients are added so.
    """
    window = attn.config.sliding_window
    kv = _window_kv(attn, main, rope[pack.position], qat).astype(jnp.float32)
    padded = jnp.pad(kv, ((0, 0), (window, 0), (0, 0)))

    def of_row(row: jax.Array, index: jax.Array) -> jax.Array:
        return jax.vmap(lambda i: jax.lax.dynamic_slice_in_dim(row, i, window))(index)

    context = jax.vmap(of_row)(padded, anchors.index)
    token = anchors.index[..., None] - window + jnp.arange(window)
    seen = token >= anchors.start[..., None]
    return context.reshape(-1, window, kv.shape[-1]), seen.reshape(-1, window)


def _window_kv(attn: DraftAttention, x: jax.Array, rope: jax.Array, qat: QAT) -> jax.Array:
    """bfloat16 [..., H]: `AttentionProjections.window_kv`, dequantised."""
    kv = apply_rope(attn.kv_norm(attn.wkv(x)), rope)
    return activation_fp8(kv) if qat.window else kv


def _stage(
    stage: DraftBlock,
    residual: Residual,
    context: tuple[jax.Array, jax.Array],
    rope: jax.Array,
    keep: jax.Array,
    qat: QAT,
) -> tuple[Residual, jax.Array]:
    """One stage; rope float32 [blocks, K, 2, r], keep bool [blocks, K]. Also the loads of its experts, int32 [E]."""
    with jax.named_scope("attention"):
        residual = traced_once(_attend, stage.sublayer("attn"), residual, context, rope, qat=qat)
    with jax.named_scope("moe"):
        return traced_once(_feed_forward, stage.sublayer("ffn"), residual, keep)


def _attend(sublayer: Sublayer, residual: Residual, context, rope: jax.Array, *, qat: QAT) -> Residual:
    entered, attn = sublayer.enter(residual), sublayer.inner
    keys, seen = context
    _, q = attn.queries(entered.x, rope)
    own = _window_kv(attn, entered.x, rope, qat)
    o = block_attention(q, keys.astype(jnp.bfloat16), seen, own, attn.attn_sink[...])
    return entered.leave(attn.output(apply_rope(o, rope[:, :, None], inverse=True)))


def _feed_forward(sublayer: Sublayer, residual: Residual, keep: jax.Array) -> tuple[Residual, jax.Array]:
    entered = sublayer.enter(residual)
    # Drafts are text: the image routing bias is never used here (dspark.md section 2.4).
    y, experts, _ = moe_sublayer(sublayer.inner, entered.x, keep, jnp.zeros_like(keep))
    return entered.leave(y), count_chosen(experts, keep, sublayer.inner.gate.bias[...].shape[0])


@jax.named_scope("attend")
def block_attention(q: jax.Array, context: jax.Array, seen: jax.Array, own: jax.Array, sink: jax.Array) -> jax.Array:
    """Every query of a block sees the context and the whole block, in both directions; one softmax with a sink.

    Args:
      q: bfloat16 [blocks, K, heads, H].
      context: bfloat16 [blocks, W, H], key and value at once.
      seen: bool [blocks, W] entries that exist.
      own: bfloat16 [blocks, K, H], the block's.
      sink: float32 [heads].

    Returns:
      bfloat16 [blocks, K, heads, H].
    """
    keys = jnp.concatenate([context, own], axis=1)
    seen = jnp.concatenate([seen, jnp.ones(own.shape[:2], bool)], axis=1)[:, None, None]
    logits = jnp.where(seen, einsum_bf16("bknh,bsh->bkns", q, keys) * q.shape[-1] ** -0.5, NEVER)
    (p,), total = exponentials([logits], sink)
    return round_to_bf16(einsum_bf16("bkns,bsh->bknh", round_to_bf16(p), keys) / total)
