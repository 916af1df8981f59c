"""The indexer: MXFP4 keys, queries, and the selection of compressed entries (architecture.md section 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache
from dsv41.config import LayerSpec, TextConfig
from dsv41.layers.linear import Linear, RMSNorm
from dsv41.ops import selection
from dsv41.ops.linear import WeightFormat
from dsv41.ops.rope import apply_rope
from dsv41.ops.tiling import map_query_tiles, query_tile
from pallas_kernels.page_layout import PAGE_ENTRIES
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.rounding import round_to_bf16

# Entries scored at a time: 16 pages when scanning everything visible, and as many inside a query's own candidate
# blocks.
_TILE_PAGES = 16


class Indexer(nnx.Module):
    """Index queries and head weights of a selecting layer; index keys too if it owns them."""

    def __init__(self, config: TextConfig, spec: LayerSpec, dense: WeightFormat):
        c = config
        self.config, self.spec = config, spec
        self.wq_b = Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, dense)
        self.weights_proj = Linear(c.hidden_size, c.index_n_heads, WeightFormat.BF16)
        if spec.owns_kv:
            self.wk = Linear(c.head_dim, c.index_head_dim, WeightFormat.BF16)
            self.k_norm = RMSNorm(c.index_head_dim, c.rms_norm_eps)

    def key(self, latent: jax.Array, rope: jax.Array) -> jax.Array:
        """Latents before rotation bfloat16 [B, G, H] -> rotated index keys bfloat16 [B, G, C], not yet quantised."""
        return apply_rope(self.k_norm(self.wk(latent)), rope)

    def query(self, x: jax.Array, qr: jax.Array, rope: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Index queries bfloat16 [B, T, N, C] after the MXFP4 round trip, and head weights bfloat16 [B, T, N]."""
        c = self.config
        q = self.wq_b(qr).reshape(*x.shape[:2], c.index_n_heads, c.index_head_dim)
        q = quantize.dequantize_mxfp4(*quantize.quantize_mxfp4(apply_rope(q, rope[:, :, None])))
        factor = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        return q, round_to_bf16(self.weights_proj(x).astype(jnp.float32) * factor)

    def __call__(
        self,
        x: jax.Array,
        qr: jax.Array,
        rope: jax.Array,
        batch: ForwardBatch,
        cache: KVCache,
        kv_index: int,
        state: AttentionState | None,
    ) -> AttentionState:
        """Selects entries of KV source number `kv_index` for every query.

        x bfloat16 [B, T, D]; qr bfloat16 [B, T, q rank]; rope float32 [B, T, 2, r]. `state` holds the candidate pool
        for a layer that reads one.
        """
        q, weights = self.query(x, qr, rope)
        visible = selection.visible_entries(batch.positions(), batch.valid(), self.spec.ratio)
        if self.spec.reads_candidates:
            if state is None or state.candidates is None:
                raise ValueError(
                    f"layer {self.spec.index} selects inside a candidate pool that no layer of this step built"
                )
            return self._select_in_pool(q, weights, visible, batch, cache, kv_index, state)
        return self._select(q, weights, visible, batch, cache, kv_index, state)

    def _select(self, q, weights, visible, batch, cache, kv_index, state) -> AttentionState:
        c, layout, ratio = self.config, cache.layout, self.spec.ratio
        table = cache.page_table[batch.slot]
        pages = min(_TILE_PAGES, table.shape[1] * layout.pages_per_logical(ratio))
        tile = pages * PAGE_ENTRIES

        def read_keys(i):
            first = i * tile + jnp.arange(pages) * PAGE_ENTRIES
            page, _ = layout.address(table, jnp.broadcast_to(first, (table.shape[0], pages)), ratio)
            keys = quantize.dequantize_mxfp4(*layout.index.read_pages(cache.index[kv_index], jnp.maximum(page, 0)))
            return keys.reshape(keys.shape[0], tile, -1)

        def scan(q, weights, visible):
            return selection.select(
                q, weights, visible, read_keys,
                tile=tile, top_k=c.index_topk, block_size=c.candidate_block_size,
                pool_blocks=c.candidate_topk_blocks if self.spec.builds_candidates else 0,
            )  # fmt: skip

        per_token = q.shape[0] * tile * (c.index_n_heads + 4) * 4
        selected, candidates = map_query_tiles(scan, query_tile(q.shape[1], per_token), q, weights, visible)
        if not self.spec.builds_candidates:
            candidates = None if state is None else state.candidates
        return AttentionState(selected=selected, candidates=candidates, index_source=self.spec.index)

    def _select_in_pool(self, q, weights, visible, batch, cache, kv_index, state) -> AttentionState:
        c, layout, size = self.config, cache.layout, self.config.candidate_block_size
        table = cache.page_table[batch.slot]
        tile_blocks = min(_TILE_PAGES * PAGE_ENTRIES // size, state.candidates.shape[-1])

        def read_blocks(blocks):
            page, entry = layout.address(table, blocks * size, self.spec.ratio)
            keys = layout.index.gather_blocks(cache.index[kv_index], jnp.maximum(page, 0), entry // size, size)
            keys = quantize.dequantize_mxfp4(*keys)
            return keys.reshape(*blocks.shape[:2], -1, keys.shape[-1])

        def scan(q, weights, visible, candidates):
            return selection.select_in_pool(
                q, weights, visible, candidates, read_blocks,
                tile_blocks=tile_blocks, top_k=c.index_topk, block_size=size,
            )  # fmt: skip

        per_token = q.shape[0] * tile_blocks * size * (c.index_n_heads + c.index_head_dim + 4) * 4
        selected = map_query_tiles(scan, query_tile(q.shape[1], per_token), q, weights, visible, state.candidates)
        return AttentionState(selected=selected, candidates=state.candidates, index_source=self.spec.index)
