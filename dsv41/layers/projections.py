"""What every attention sublayer has: queries, window KV and the grouped output (architecture.md section 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.config import TextConfig
from dsv41.layers.linear import Linear, RMSNorm, abstract
from dsv41.ops.linear import WeightFormat, grouped_linear
from dsv41.ops.token_split import TokenSplit
from dsv41.sharding import LOCAL, ShardingRules
from pallas_kernels.page_layout import WindowLayout
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.rope import apply_rope
from pallas_kernels.rounding import round_to_bf16


class AttentionProjections(nnx.Module):
    """The weights that layers of the backbone and stages of the drafter have in common."""

    def __init__(self, config: TextConfig, dense: WeightFormat, rules: ShardingRules = LOCAL):
        c = config
        self.config, self.rules = c, rules
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, dense)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(c.q_lora_rank, c.num_attention_heads * c.head_dim, dense, axes=("heads",))
        self.wkv = Linear(c.hidden_size, c.head_dim, dense)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.attn_sink = abstract(c.num_attention_heads, dtype=jnp.float32, axes=("heads",))
        group_in = c.num_attention_heads // c.o_groups * c.head_dim
        self.wo_a = Linear(group_in, c.o_groups * c.o_lora_rank, dense, axes=("heads",))
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.hidden_size, dense, axes=(None, "heads"))

    def queries(self, x: jax.Array, rope: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x bfloat16 [B, T, D], rope float32 [B, T, 2, r] -> latents bfloat16 [B, T, q rank], rotated queries
        bfloat16 [B, T, N, H] of this device's heads."""
        with jax.named_scope("query"):
            qr = self.q_norm(self.wq_a(x))
            q = self.wq_b(qr).reshape(*x.shape[:2], -1, self.config.head_dim)
            return qr, apply_rope(q, rope[:, :, None])

    def window_kv(self, x: jax.Array, rope: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotated window entries: float8_e4m3fn [B, T, H] and E8M0 scales uint8 [B, T, H / 32]."""
        with jax.named_scope("window_kv"):
            return quantize.quantize_fp8(apply_rope(self.kv_norm(self.wkv(x)), rope))

    def write_window(
        self,
        x: jax.Array,
        rope: jax.Array,
        rings: jax.Array,
        slot: jax.Array,
        index: jax.Array,
        layout: WindowLayout,
    ) -> jax.Array:
        """The rings with the entries of `window_kv` at slot, index int32 [B, T]."""
        with jax.named_scope("window_kv"):
            norm = self.kv_norm
            return quantize.write_window(
                self.wkv(x), norm.weight[...], rope, rings, slot, index, eps=norm.eps, layout=layout
            )

    def output(self, o: jax.Array) -> jax.Array:
        """Attention output of this device's heads, rotated back, bfloat16 [B, T, N, H] -> bfloat16 [B, T, D], of this
        device's tokens (`TokenSplit`)."""
        c = self.config
        with jax.named_scope("output"):
            # Heads are spread by whole groups, so that a group's inputs are all here.
            grouped = o.reshape(*o.shape[:2], -1, c.num_attention_heads // c.o_groups * c.head_dim)
            y = self.wo_b.partial(grouped_linear(grouped, self.wo_a.stored).reshape(*o.shape[:2], -1))
            return round_to_bf16(TokenSplit(*o.shape[:2], self.rules.heads).split_total(y))
