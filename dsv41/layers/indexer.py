"""The indexer: MXFP4 keys, queries, and the selection of compressed entries (architecture.md section 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache
from dsv41.config import LayerSpec, TextConfig
from dsv41.layers.linear import Linear, RMSNorm
from dsv41.ops import selection
from dsv41.ops.block_selection import IndexQuery, select_by_blocks, select_in_blocks
from dsv41.ops.linear import WeightFormat
from pallas_kernels.indexer import ops as indexer
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.rope import apply_rope
from pallas_kernels.rounding import round_to_bf16
from pallas_kernels.tiling import map_query_tiles, query_tile

# Entries scored at a time in plain XLA: 16 pages when scanning everything visible, and as many inside a query's own
# candidate blocks.
_TILE_PAGES = 16
# Block maxima and entry scores of a tile of queries; 1M tokens of context have 512 KiB of maxima a query.
_KERNEL_TILE_BYTES = 256 << 20


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

    def write_keys(
        self,
        latent: jax.Array,
        rope: jax.Array,
        pool: jax.Array,
        page: jax.Array,
        entry: jax.Array,
        layout: IndexPageLayout,
    ) -> jax.Array:
        """The pool with the keys of latents before rotation, bfloat16 [B, G, H]; page and entry int32 [B, G]."""
        norm = self.k_norm
        return quantize.write_index(
            self.wk(latent), norm.weight[...], rope, pool, page, entry, eps=norm.eps, layout=layout
        )

    def query(self, x: jax.Array, qr: jax.Array, rope: jax.Array) -> IndexQuery:
        """Rotated queries and head weights. x bfloat16 [B, T, D]; qr bfloat16 [B, T, q rank]; rope [B, T, 2, r]."""
        c = self.config
        q = self.wq_b(qr).reshape(*x.shape[:2], c.index_n_heads, c.index_head_dim)
        factor = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        weights = round_to_bf16(self.weights_proj(x).astype(jnp.float32) * factor)
        return IndexQuery(*quantize.quantize_mxfp4(apply_rope(q, rope[:, :, None])), weights)

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
        if self.spec.reads_candidates and (state is None or state.candidates is None):
            raise ValueError(
                f"layer {self.spec.index} selects inside a candidate pool that no layer of this step built"
            )
        query = self.query(x, qr, rope)
        visible = selection.visible_entries(batch.positions(), batch.valid(), self.spec.ratio)
        candidates = None if state is None else state.candidates
        pool = cache.index[kv_index]
        num_pages = cache.page_table.shape[1] * cache.layout.pages_per_logical(self.spec.ratio)
        by_blocks = indexer.runs_kernel(
            query.values, query.weights, pool, self.config.candidate_block_size,
            num_pages=num_pages, num_blocks=max(self.config.index_topk, self.config.candidate_topk_blocks),
        )  # fmt: skip
        choose = self._by_blocks if by_blocks else self._streaming
        selected, built = choose(query, visible, candidates, cache.page_table[batch.slot], pool, cache.layout)
        return AttentionState(
            selected=selected,
            physical_entries=cache.layout.physical_entry(cache.page_table[batch.slot], selected, self.spec.ratio),
            candidates=built if self.spec.builds_candidates else candidates,
            index_source=self.spec.index,
        )

    def _by_blocks(self, query, visible, candidates, table, pool, layout) -> tuple[jax.Array, jax.Array | None]:
        """Selection by kernels; a tile of queries is as large as its block maxima allow."""
        c, size = self.config, self.config.candidate_block_size
        pages = layout.physical_pages(table, self.spec.ratio)
        if self.spec.reads_candidates:
            per_token = query.values.shape[0] * candidates.shape[-1] * size * 4

            def scan(values, scales, weights, visible, candidates):
                part = IndexQuery(values, scales, weights)
                return select_in_blocks(part, pool, pages, visible, candidates, top_k=c.index_topk, block_size=size)

            arrays = (query.values, query.scales, query.weights, visible, candidates)
            return map_query_tiles(scan, query_tile(visible.shape[1], per_token, _KERNEL_TILE_BYTES), *arrays), None

        def scan(values, scales, weights, visible):
            return select_by_blocks(
                IndexQuery(values, scales, weights), pool, pages, visible,
                top_k=c.index_topk, pool_blocks=c.candidate_topk_blocks if self.spec.builds_candidates else 0,
                block_size=size,
            )  # fmt: skip

        per_token = query.values.shape[0] * (pages.shape[1] * PAGE_ENTRIES // size + c.index_topk * size) * 4
        tile = query_tile(visible.shape[1], per_token, _KERNEL_TILE_BYTES)
        return map_query_tiles(scan, tile, query.values, query.scales, query.weights, visible)

    def _streaming(self, query, visible, candidates, table, pool, layout) -> tuple[jax.Array, jax.Array | None]:
        """Selection in plain XLA, a tile of keys at a time."""
        c, ratio, size = self.config, self.spec.ratio, self.config.candidate_block_size
        q = quantize.dequantize_mxfp4(query.values, query.scales)
        if self.spec.reads_candidates:
            tile_blocks = min(_TILE_PAGES * PAGE_ENTRIES // size, candidates.shape[-1])

            def read_blocks(blocks):
                page, entry = layout.address(table, blocks * size, ratio)
                keys = layout.index.gather_blocks(pool, jnp.maximum(page, 0), entry // size, size)
                keys = quantize.dequantize_mxfp4(*keys)
                return keys.reshape(*blocks.shape[:2], -1, keys.shape[-1])

            def scan(q, weights, visible, candidates):
                return selection.select_in_pool(
                    q, weights, visible, candidates, read_blocks,
                    tile_blocks=tile_blocks, top_k=c.index_topk, block_size=size,
                )  # fmt: skip

            per_token = q.shape[0] * tile_blocks * size * (c.index_n_heads + c.index_head_dim + 4) * 4
            tile = query_tile(q.shape[1], per_token)
            return map_query_tiles(scan, tile, q, query.weights, visible, candidates), None
        pages = min(_TILE_PAGES, table.shape[1] * layout.pages_per_logical(ratio))
        entries = pages * PAGE_ENTRIES

        def read_keys(i):
            first = i * entries + jnp.arange(pages) * PAGE_ENTRIES
            page, _ = layout.address(table, jnp.broadcast_to(first, (table.shape[0], pages)), ratio)
            keys = quantize.dequantize_mxfp4(*layout.index.read_pages(pool, jnp.maximum(page, 0)))
            return keys.reshape(keys.shape[0], entries, -1)

        def scan(q, weights, visible):
            return selection.select(
                q, weights, visible, read_keys,
                tile=entries, top_k=c.index_topk, block_size=size,
                pool_blocks=c.candidate_topk_blocks if self.spec.builds_candidates else 0,
            )  # fmt: skip

        per_token = q.shape[0] * entries * (c.index_n_heads + 4) * 4
        return map_query_tiles(scan, query_tile(q.shape[1], per_token), q, query.weights, visible)
