"""One block: Engram where there is one, then attention and MoE inside single-pass mHC (architecture.md section 2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache, LayerCache
from dsv41.config import LayerMode, LayerSpec, ModelConfig, TextConfig
from dsv41.layers.attention import Attention
from dsv41.layers.draft_attention import DraftAttention
from dsv41.layers.engram import Engram
from dsv41.layers.linear import RMSNorm, abstract
from dsv41.layers.moe import MoE
from dsv41.layers.residual import Residual, Sublayer
from dsv41.layers.shared_trace import traced_once
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

    def sublayer(self, name: str) -> Sublayer:
        """The one called "attn" or "ffn"."""
        inner, norm = (self.attn, self.attn_norm) if name == "attn" else (self.ffn, self.ffn_norm)
        mix = tuple(getattr(self, f"hc_{name}_{part}") for part in ("fn", "scale", "base"))
        return Sublayer(inner, norm, mix, self.config.hc_sinkhorn_iters, self.config.hc_eps)

    def sublayers(
        self,
        residual: Residual,
        attention: tuple[Any, ...],
        valid: jax.Array,
        image_mask: jax.Array,
        forced_experts: jax.Array | None,
    ) -> tuple[Residual, Any, dict[str, jax.Array]]:
        """Attention and MoE.

        Args:
          residual: what the sublayer before left.
          attention: arguments of the attention behind its input.
          valid, image_mask: bool [B, T].
          forced_experts: int32 [B, T, K] to use instead of the computed ones, or None.

        Returns:
          the residual, what the attention returned, and what happened inside: block_in bfloat16 [B, T, R, D], attn_out,
          ffn_out bfloat16 [B, T, D], experts int32 [B, T, K], expert_weights float32 [B, T, K].
        """
        with jax.named_scope("attention"):
            residual, block_in, attended = traced_once(Sublayer.__call__, self.sublayer("attn"), residual, *attention)
        with jax.named_scope("moe"):
            residual, _, (ffn_out, experts, weights) = traced_once(
                Sublayer.__call__, self.sublayer("ffn"), residual, valid, image_mask, forced_experts
            )
        attn_out = attended[0] if isinstance(attended, tuple) else attended
        inside = {"block_in": block_in, "attn_out": attn_out, "ffn_out": ffn_out}
        return residual, attended, inside | {"experts": experts, "expert_weights": weights}


class Block(ResidualBlock):
    """A layer of the backbone."""

    def __init__(
        self,
        config: TextConfig,
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
        super().__init__(c, Attention(c, spec.kind, formats.dense, rules), moe)
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

    def compress(self, residual: Residual, batch: ForwardBatch, cache: KVCache) -> KVCache:
        """The cache with the compressed entries of a layer that owns KV; the rest of the layer is not run."""
        x = self.sublayer("attn").enter(residual).x
        return self.attn.compress(x, batch, LayerCache.of(cache, self.spec)).written_to(cache, self.spec)

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
          batch, state, forced_selected: as in `Attention`.
          cache: of all layers; this one's part is written.
          forced_experts: int32 [B, T, K] of all tokens of the batch, or None.

        Returns:
          the residual, cache, state, and what happened inside, as in `sublayers`.

        Raises:
          ValueError: the layers before have not left the selection or the candidate pool that this one reads.
        """
        spec, tokens = self.spec, self._tokens(batch)
        _check_reads(spec, state)
        source = spec.index if spec.selects or state is None else state.index_source
        # A layer with a KV source of its own begins anew, whatever those before it selected.
        known = None if state is None or spec.owns_kv else dataclasses.replace(state, index_source=None)
        forced = None if forced_experts is None else tokens.split(forced_experts)
        valid, image_mask = tokens.split(batch.valid()), tokens.split(batch.image_mask)
        attention = (batch, LayerCache.of(cache, spec), known, forced_selected)
        residual, (_, own, state), inside = self.sublayers(residual, attention, valid, image_mask, forced)
        state = None if state is None else dataclasses.replace(state, index_source=source)
        return residual, own.written_to(cache, spec), state, inside


def _check_reads(spec: LayerSpec, state: AttentionState | None) -> None:
    """Raises ValueError if the layers before have not left what this one reads."""
    if spec.mode is LayerMode.REUSE and (state is None or state.index_source != spec.index_source):
        raise ValueError(
            f"layer {spec.index} reuses the selection of layer {spec.index_source}, which has not run in this step"
        )
    if spec.reads_candidates and (state is None or state.candidates is None):
        raise ValueError(f"layer {spec.index} selects inside a candidate pool that no layer of this step built")


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
        residual, _, inside = self.sublayers(residual, (rope, context, seen), valid, image_mask, None)
        return residual, inside
