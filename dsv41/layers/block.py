"""One block: Engram where there is one, then attention and MoE inside single-pass mHC (architecture.md section 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache
from dsv41.config import LayerSpec, ModelConfig, Schedule, TextConfig
from dsv41.layers.attention import Attention
from dsv41.layers.draft_attention import DraftAttention
from dsv41.layers.engram import Engram
from dsv41.layers.linear import RMSNorm, abstract
from dsv41.layers.moe import MoE
from dsv41.layers.residual import Entered, MixParameters, Residual, enter
from dsv41.ops.linear import WeightFormat
from dsv41.ops.token_split import TokenSplit
from dsv41.sharding import LOCAL, ShardingRules


@dataclasses.dataclass(frozen=True)
class BlockFormats:
    """How a block's weights are stored: those of every token, and those of routed experts."""

    dense: WeightFormat
    routed: WeightFormat

    @classmethod
    def of(cls, config: ModelConfig) -> BlockFormats:
        """As the checkpoint has them."""
        if config.quantization_config is None:
            return cls(WeightFormat.BF16, WeightFormat.BF16)
        return cls(WeightFormat.FP8_BLOCK, WeightFormat.FP4_ROW)


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

    def enter(self, residual: Residual, sublayer: str) -> Entered:
        """Input and mix of the sublayer "attn" or "ffn"."""
        mix = MixParameters(*(getattr(self, f"hc_{sublayer}_{part}")[...] for part in ("fn", "scale", "base")))
        norm = self.attn_norm if sublayer == "attn" else self.ffn_norm
        return enter(residual, mix, norm, iters=self.config.hc_sinkhorn_iters, hc_eps=self.config.hc_eps)

    def sublayers(
        self,
        residual: Residual,
        attend: Callable[[jax.Array], tuple[jax.Array, Any]],
        valid: jax.Array,
        image_mask: jax.Array,
        forced_experts: jax.Array | None,
    ) -> tuple[Residual, Any, dict[str, jax.Array]]:
        """Attention and MoE.

        Args:
          residual: what the sublayer before left.
          attend: normalised bfloat16 [B, T, D] -> (attention output bfloat16 [B, T, D], anything else it made).
          valid, image_mask: bool [B, T].
          forced_experts: int32 [B, T, K] to use instead of the computed ones, or None.

        Returns:
          the residual, what else `attend` made, and what happened inside: block_in bfloat16 [B, T, R, D], attn_out,
          ffn_out bfloat16 [B, T, D], experts int32 [B, T, K], expert_weights float32 [B, T, K].
        """
        with jax.named_scope("attention"):
            entered = self.enter(residual, "attn")
            block_in = entered.streams
            attn_out, made = attend(entered.x)
            residual = entered.leave(attn_out)
        with jax.named_scope("moe"):
            entered = self.enter(residual, "ffn")
            ffn_out, experts, weights = self.ffn(entered.x, valid, image_mask, forced_experts)
            residual = entered.leave(ffn_out)
        inside = {"block_in": block_in, "attn_out": attn_out, "ffn_out": ffn_out}
        return residual, made, inside | {"experts": experts, "expert_weights": weights}


class Block(ResidualBlock):
    """A layer of the backbone."""

    def __init__(
        self,
        config: TextConfig,
        schedule: Schedule,
        spec: LayerSpec,
        formats: BlockFormats,
        rules: ShardingRules = LOCAL,
    ):
        c, experts, top_k = config, config.n_routed_experts, config.num_experts_per_tok
        placement = rules.placements[spec.index] if rules.placements else None
        moe = MoE(
            c,
            dense=formats.dense,
            routed=formats.routed,
            experts=experts,
            top_k=top_k,
            rules=rules,
            placement=placement,
        )
        super().__init__(c, Attention(c, schedule, spec, formats.dense, rules), moe)
        self.spec, self.rules = spec, rules
        if spec.engram is not None:
            self.engram = Engram(c, formats.dense)

    def look_up(self, residual: Residual, batch: ForwardBatch) -> Residual:
        """The residual after this block's Engram; unchanged if it has none."""
        if self.spec.engram is None:
            return residual
        with jax.named_scope("engram"):
            residual = residual.complete()
            split = self._tokens(batch).split
            scales = None if batch.engram_scales is None else split(batch.engram_scales[:, :, self.spec.engram])
            values = split(batch.engram_values[:, :, self.spec.engram])
            return Residual(self.engram(residual.streams, values, scales, split(batch.image_mask)), residual.pre)

    def _tokens(self, batch: ForwardBatch) -> TokenSplit:
        return TokenSplit(*batch.tokens.shape, self.rules.heads)

    def __call__(
        self,
        residual: Residual,
        batch: ForwardBatch,
        cache: KVCache,
        state: AttentionState | None,
        forced_selected: jax.Array | None = None,
        forced_experts: jax.Array | None = None,
    ) -> tuple[Residual, KVCache, AttentionState | None, dict[str, jax.Array]]:
        """Attention and MoE sublayers (after `look_up`).

        Args:
          residual: as in `sublayers`, of this device's tokens (`TokenSplit`).
          batch, cache, state, forced_selected: as in `Attention`.
          forced_experts: int32 [B, T, K] of all tokens of the batch, or None.

        Returns:
          the residual, cache, state, and what happened inside, as in `sublayers`.
        """
        tokens = self._tokens(batch)

        def attend(x):
            y, new_cache, new_state = self.attn(x, batch, cache, state, forced_selected)
            return y, (new_cache, new_state)

        forced = None if forced_experts is None else tokens.split(forced_experts)
        valid, image_mask = tokens.split(batch.valid()), tokens.split(batch.image_mask)
        residual, (cache, state), inside = self.sublayers(residual, attend, valid, image_mask, forced)
        return residual, cache, state, inside


class DraftBlock(ResidualBlock):
    """A stage of the drafter."""

    def __init__(self, config: TextConfig, formats: BlockFormats, rules: ShardingRules = LOCAL):
        c, experts, top_k = config, config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        moe = MoE(c, dense=formats.dense, routed=formats.routed, experts=experts, top_k=top_k, rules=rules)
        super().__init__(c, DraftAttention(c, formats.dense, rules), moe)
        self.rules = rules

    def __call__(
        self,
        residual: Residual,
        rope: jax.Array,
        context: tuple[jax.Array, jax.Array],
        seen: jax.Array,
        active: jax.Array,
    ) -> tuple[Residual, dict[str, jax.Array]]:
        """One stage over a block.

        Args:
          residual: as in `sublayers`, of this device's tokens of the blocks (`TokenSplit`).
          rope, context, seen: as in `DraftAttention`.
          active: bool [B] rows that draft at all.

        Returns:
          the residual, and what happened inside, as in `sublayers`.
        """
        tokens = TokenSplit(*rope.shape[:2], self.rules.heads)
        valid = tokens.split(jnp.broadcast_to(active[:, None], rope.shape[:2]))
        # Drafts are text: the image routing bias is never used here (dspark.md section 2.4).
        image_mask = jnp.zeros_like(valid)
        residual, _, inside = self.sublayers(
            residual, lambda x: (self.attn(x, rope, context, seen), None), valid, image_mask, None
        )
        return residual, inside
