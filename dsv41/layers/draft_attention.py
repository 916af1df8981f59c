"""Attention of a drafter stage: committed context and the whole block, in both directions (dspark.md section 2.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsv41.layers.projections import AttentionProjections
from dsv41.ops.token_split import TokenSplit
from pallas_kernels.formats import e4m3_to_byte
from pallas_kernels.page_layout import WindowLayout
from pallas_kernels.sparse_attention.ops import sparse_attention


class DraftAttention(AttentionProjections):
    """Every block query sees all context entries and all block entries; there is no causal mask inside the block."""

    def __call__(
        self, x: jax.Array, rope: jax.Array, context: tuple[jax.Array, jax.Array], seen: jax.Array
    ) -> jax.Array:
        """One attention sublayer over a block.

        Args:
          x: bfloat16 [B, K, D], normalised draft inputs; of this device's tokens (`TokenSplit`), and so is the result.
          rope: float32 [B, K, 2, r] at the block's positions.
          context: float8_e4m3fn [B, W, H] and scales uint8 [B, W, H / 32], projected from committed positions with
            this stage's weights.
          seen: bool [B, W] context entries that exist.

        Returns:
          bfloat16 [B, K, D]. The block's own entries are scratch; nothing is kept.
        """
        b, k = rope.shape[:2]
        x = TokenSplit(b, k, self.rules.heads).join(x)
        _, q = self.queries(x, rope)
        own = self.window_kv(x, rope)
        values, scales = (jnp.concatenate(pair, axis=1) for pair in zip(context, own, strict=True))
        layout = WindowLayout(self.config.head_dim, values.shape[1])
        seen = jnp.concatenate([seen, jnp.ones((b, k), bool)], axis=1)
        index = jnp.where(seen, jnp.arange(values.shape[1], dtype=jnp.int32), -1)
        with jax.named_scope("attend"):
            o = sparse_attention(
                q, layout.pack(e4m3_to_byte(values), scales), jnp.arange(b, dtype=jnp.int32),
                jnp.broadcast_to(index[:, None], (b, k, values.shape[1])), None, None, self.attn_sink[...], rope,
                scale=self.config.head_dim**-0.5, window_layout=layout,
            )  # fmt: skip
        return self.output(o)
