"""One block: Engram where there is one, then attention and MoE inside single-pass mHC (architecture.md section 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache
from dsv41.config import LayerSpec, Schedule, TextConfig
from dsv41.layers.attention import Attention
from dsv41.layers.draft_attention import DraftAttention
from dsv41.layers.engram import Engram
from dsv41.layers.linear import RMSNorm, abstract
from dsv41.layers.moe import MoE
from dsv41.ops.linear import WeightFormat
from pallas_kernels.hyper_connection import ops as mhc


class ResidualBlock(nnx.Module):
    """Residual streams in, residual streams out; the mix that each sublayer predicts collapses the next one's input.

    What kind of attention runs inside is the subclass's.
    """

    def __init__(self, config: TextConfig, attention: nnx.Module, moe: MoE):
        c = config
        self.config = c
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = attention
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn = moe
        mix = (2 + c.hc_mult) * c.hc_mult
        for sublayer in ("attn", "ffn"):
            setattr(self, f"hc_{sublayer}_fn", abstract(mix, c.hc_mult * c.hidden_size, dtype=jnp.float32))
            setattr(self, f"hc_{sublayer}_base", abstract(mix, dtype=jnp.float32))
            setattr(self, f"hc_{sublayer}_scale", abstract(3, dtype=jnp.float32))

    def _mix(self, streams: jax.Array, sublayer: str) -> tuple[jax.Array, jax.Array, jax.Array]:
        fn, scale, base = (getattr(self, f"hc_{sublayer}_{part}")[...] for part in ("fn", "scale", "base"))
        c = self.config
        return mhc.mix_coefficients(
            streams, fn, scale, base, iters=c.hc_sinkhorn_iters, norm_eps=c.rms_norm_eps, hc_eps=c.hc_eps
        )

    def attention_input(self, streams: jax.Array, pre: jax.Array) -> jax.Array:
        """What the attention sublayer reads, bfloat16 [B, T, D]."""
        return self.attn_norm(mhc.collapse(streams, pre))

    def sublayers(
        self,
        streams: jax.Array,
        pre: jax.Array,
        attend: Callable[[jax.Array], tuple[jax.Array, Any]],
        valid: jax.Array,
        image_mask: jax.Array,
        forced_experts: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, Any, dict[str, jax.Array]]:
        """Attention and MoE.

        Args:
          streams: bfloat16 [B, T, R, D].
          pre: float32 [B, T, R], predicted by the sublayer before.
          attend: normalised bfloat16 [B, T, D] -> (attention output bfloat16 [B, T, D], anything else it made).
          valid, image_mask: bool [B, T].
          forced_experts: int32 [B, T, K] to use instead of the computed ones, or None.

        Returns:
          streams, the next block's pre, what else `attend` made, and what happened inside: attn_out, ffn_out bfloat16
          [B, T, D], experts int32 [B, T, K], expert_weights float32 [B, T, K].
        """
        with jax.named_scope("attention"):
            next_pre, post, comb = self._mix(streams, "attn")
            attn_out, made = attend(self.attention_input(streams, pre))
            streams, pre = mhc.update(streams, attn_out, post, comb), next_pre
        with jax.named_scope("moe"):
            next_pre, post, comb = self._mix(streams, "ffn")
            x = self.ffn_norm(mhc.collapse(streams, pre))
            ffn_out, experts, weights = self.ffn(x, valid, image_mask, forced_experts)
            streams = mhc.update(streams, ffn_out, post, comb)
        inside = {"attn_out": attn_out, "ffn_out": ffn_out, "experts": experts, "expert_weights": weights}
        return streams, next_pre, made, inside


class Block(ResidualBlock):
    """A layer of the backbone."""

    def __init__(
        self, config: TextConfig, schedule: Schedule, spec: LayerSpec, dense: WeightFormat, routed: WeightFormat
    ):
        c = config
        moe = MoE(c, dense=dense, routed=routed, experts=c.n_routed_experts, top_k=c.num_experts_per_tok)
        super().__init__(c, Attention(c, schedule, spec, dense), moe)
        self.spec = spec
        if spec.engram is not None:
            self.engram = Engram(c, dense)

    def look_up(self, streams: jax.Array, batch: ForwardBatch) -> jax.Array:
        """The streams after this block's Engram; unchanged if it has none."""
        if self.spec.engram is None:
            return streams
        with jax.named_scope("engram"):
            scales = None if batch.engram_scales is None else batch.engram_scales[:, :, self.spec.engram]
            return self.engram(streams, batch.engram_values[:, :, self.spec.engram], scales, batch.image_mask)

    def __call__(
        self,
        streams: jax.Array,
        pre: jax.Array,
        batch: ForwardBatch,
        cache: KVCache,
        state: AttentionState | None,
        forced_selected: jax.Array | None = None,
        forced_experts: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, KVCache, AttentionState | None, dict[str, jax.Array]]:
        """Attention and MoE sublayers (after `look_up`).

        Args:
          streams, pre, forced_experts: as in `sublayers`.
          batch, cache, state, forced_selected: as in `Attention`.

        Returns:
          streams, the next block's pre, cache, state, and what happened inside, as in `sublayers`.
        """

        def attend(x):
            y, new_cache, new_state = self.attn(x, batch, cache, state, forced_selected)
            return y, (new_cache, new_state)

        streams, pre, (cache, state), inside = self.sublayers(
            streams, pre, attend, batch.valid(), batch.image_mask, forced_experts
        )
        return streams, pre, cache, state, inside


class DraftBlock(ResidualBlock):
    """A stage of the drafter."""

    def __init__(self, config: TextConfig, dense: WeightFormat, routed: WeightFormat):
        c = config
        experts, top_k = c.dspark_n_routed_experts, c.dspark_num_experts_per_tok
        super().__init__(c, DraftAttention(c, dense), MoE(c, dense=dense, routed=routed, experts=experts, top_k=top_k))

    def __call__(
        self,
        streams: jax.Array,
        pre: jax.Array,
        rope: jax.Array,
        context: tuple[jax.Array, jax.Array],
        seen: jax.Array,
        active: jax.Array,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """One stage over a block.

        Args:
          streams, pre: as in `sublayers`, T being the block size.
          rope, context, seen: as in `DraftAttention`.
          active: bool [B] rows that draft at all.

        Returns:
          streams, the next stage's pre, and what happened inside, as in `sublayers`.
        """
        # Drafts are text: the image routing bias is never used here (dspark.md section 2.4).
        image_mask = jnp.zeros(streams.shape[:2], bool)
        valid = jnp.broadcast_to(active[:, None], image_mask.shape)
        streams, pre, _, inside = self.sublayers(
            streams, pre, lambda x: (self.attn(x, rope, context, seen), None), valid, image_mask, None
        )
        return streams, pre, inside
