"""One block: Engram where there is one, then attention and MoE inside single-pass mHC (architecture.md section 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache
from dsv41.config import LayerSpec, Schedule, TextConfig
from dsv41.layers.attention import Attention
from dsv41.layers.engram import Engram
from dsv41.layers.linear import RMSNorm, abstract
from dsv41.layers.moe import MoE
from dsv41.ops.linear import WeightFormat
from pallas_kernels.hyper_connection import ops as mhc


class Block(nnx.Module):
    """Residual streams in, residual streams out; the mix that each sublayer predicts collapses the next one's input."""

    def __init__(
        self, config: TextConfig, schedule: Schedule, spec: LayerSpec, dense: WeightFormat, routed: WeightFormat
    ):
        c = config
        self.config, self.spec = config, spec
        if spec.engram is not None:
            self.engram = Engram(c, dense)
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, schedule, spec, dense)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn = MoE(c, dense=dense, routed=routed, experts=c.n_routed_experts, top_k=c.num_experts_per_tok)
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
          streams: bfloat16 [B, T, R, D].
          pre: float32 [B, T, R], predicted by the sublayer before.
          batch, cache, state: as in `Attention`.
          forced_selected, forced_experts: choices to use instead of the computed ones.

        Returns:
          streams, the next block's pre, cache, state, and what happened inside: attn_out, ffn_out bfloat16 [B, T, D],
          experts int32 [B, T, K], expert_weights float32 [B, T, K].
        """
        with jax.named_scope("attention"):
            next_pre, post, comb = self._mix(streams, "attn")
            x = self.attn_norm(mhc.collapse(streams, pre))
            attn_out, cache, state = self.attn(x, batch, cache, state, forced_selected)
            streams, pre = mhc.update(streams, attn_out, post, comb), next_pre
        with jax.named_scope("moe"):
            next_pre, post, comb = self._mix(streams, "ffn")
            x = self.ffn_norm(mhc.collapse(streams, pre))
            ffn_out, experts, weights = self.ffn(x, batch.valid(), batch.image_mask, forced_experts)
            streams = mhc.update(streams, ffn_out, post, comb)
        inside = {"attn_out": attn_out, "ffn_out": ffn_out, "experts": experts, "expert_weights": weights}
        return streams, next_pre, cache, state, inside
