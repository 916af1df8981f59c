"""The indexer: MXFP4 keys, queries, and the selection of compressed entries (architecture.md section 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import CacheLayout, ForwardBatch, LayerCache, StepPages
from dsv41.config import LayerKind, TextConfig
from dsv41.layers.linear import Linear, RMSNorm
from dsv41.ops import selection
from dsv41.ops.block_selection import IndexQuery, rank_by_blocks, rank_in_blocks
from dsv41.ops.linear import WeightFormat
from dsv41.ops.query_split import QuerySplit
from dsv41.ops.selection import Ranked, SelectionSizes
from dsv41.ops.sequence_pages import RoundRobin, gather_rows, merge_ranked
from dsv41.sharding import LOCAL, ShardingRules
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


@dataclasses.dataclass(frozen=True)
class _Here:
    """What lies on this device of the sequences whose queries it scores; entries and blocks are numbered within it.

    R counts rows of the group of devices that share pages, T queries of a row, both within this device's split.
    """

    table: jax.Array  # int32 [R, n] logical pages
    visible: jax.Array  # int32 [R, T] entries that a query sees
    newest: jax.Array | None  # int32 [R, T] block of the newest entry that it sees anywhere, -1 if it lies elsewhere
    candidates: jax.Array | None  # int32 [R, T, P] candidate blocks, ascending, -1 for those that lie elsewhere
    numberings: tuple[RoundRobin, RoundRobin]  # of entries and of blocks

    @classmethod
    def of(
        cls,
        pages: StepPages,
        split: QuerySplit,
        batch: ForwardBatch,
        layout: CacheLayout,
        ratio: int,
        sizes: SelectionSizes,
        candidates: jax.Array | None = None,
    ) -> _Here:
        """Candidates int32 [R, T, P] as numbered through their sequences."""
        token = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
        visible = selection.visible_entries(pages.start[:, None] + token, token < pages.num_new[:, None], ratio)
        visible = split.queries(visible, pages.devices)
        newest = selection.newest_block(visible, sizes.block) if sizes.pool_blocks else None
        per_page = layout.page_tokens // ratio
        entries, blocks = (pages.numbering(n) for n in (per_page, per_page // sizes.block))
        if pages.axes:
            visible = entries.count_here(visible)
            newest = None if newest is None else blocks.number_here(newest)
            candidates = None if candidates is None else blocks.number_here(candidates)
        return cls(split.rows(pages.table, pages.devices), visible, newest, candidates, (entries, blocks))

    @property
    def of_queries(self) -> tuple[jax.Array | None, ...]:
        return self.visible, self.newest, self.candidates

    def through_sequence(self, found: Sequence[Ranked]) -> list[Ranked]:
        """Entries, and blocks if there are any, as numbered through their sequences."""
        return [
            Ranked(part.scores, numbering.number_of(part.ids))
            for part, numbering in zip(found, self.numberings, strict=False)
        ]


class Indexer(nnx.Module):
    """Index queries and head weights of a selecting layer; index keys too if it owns them."""

    def __init__(self, config: TextConfig, kind: LayerKind, dense: WeightFormat, rules: ShardingRules = LOCAL):
        c = config
        self.config, self.kind, self.rules = config, kind, rules
        self.sizes = SelectionSizes(
            top_k=c.index_topk,
            pool_blocks=c.candidate_topk_blocks if kind.builds_candidates else 0,
            block=c.candidate_block_size,
        )
        self.wq_b = Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, dense)
        self.weights_proj = Linear(c.hidden_size, c.index_n_heads, WeightFormat.BF16)
        if kind.owns_kv:
            self.wk = Linear(c.head_dim, c.index_head_dim, WeightFormat.BF16)
            self.k_norm = RMSNorm(c.index_head_dim, c.rms_norm_eps)

    def keys(self, latent: jax.Array) -> jax.Array:
        """bfloat16 [B, G, C] keys before norm and rotation, of latents before rotation bfloat16 [B, G, H]."""
        return self.wk(latent)

    def write_keys(
        self,
        keys: jax.Array,
        rope: jax.Array,
        pool: jax.Array,
        page: jax.Array,
        entry: jax.Array,
        layout: IndexPageLayout,
    ) -> jax.Array:
        """The pool with what `keys` gave; page and entry int32 [B, G]."""
        norm = self.k_norm
        return quantize.write_index(keys, norm.weight[...], rope, pool, page, entry, eps=norm.eps, layout=layout)

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
        cache: LayerCache,
        candidates: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Selects entries of the layer's KV source for every query, see `select`.

        x bfloat16 [B, T, D]; qr bfloat16 [B, T, q rank]; rope float32 [B, T, 2, r]; candidates int32 [B, T, P] for a
        layer that selects inside a pool.

        Returns:
          selected int32 [B, T, index_topk], -1 unused; the candidate pool int32 [B, T, candidate_topk_blocks],
          ascending, -1 unused, if this layer builds one.
        """
        split = self.split(batch)
        query = self.query(*(split.queries(a) for a in (x, qr, rope)))
        return self.select(query, batch, cache, candidates)

    def split(self, batch: ForwardBatch) -> QuerySplit:
        """Which of a step's queries are this device's."""
        return QuerySplit.of(*batch.tokens.shape, self.rules.heads)

    def select(
        self, query: IndexQuery, batch: ForwardBatch, cache: LayerCache, candidates: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """What `query` (this device's part of the step's, see `split`) selects; the rest as of `__call__`.

        Devices that share rows have a part of the queries each. Devices that share the pages of their sequences get the
        queries of all of them, rank the entries that they have, and each merges what was found for its own rows. The
        layer's parameters are not read.
        """
        pages, split = batch.step_pages(cache.page_table, self.rules.pages), self.split(batch)
        arrays = [query.values, query.scales, query.weights]
        if self.kind.reads_candidates:
            arrays.append(split.queries(candidates))
        values, scales, weights, *inside = gather_rows(arrays, pages.axes)
        here = _Here.of(pages, split, batch, cache.layout, self.kind.ratio, self.sizes, *inside)
        query, pool = IndexQuery(values, scales, weights), cache.index
        by_blocks = indexer.runs_kernel(
            values, weights, pool, self.sizes.block,
            num_pages=here.table.shape[1] * cache.layout.pages_per_logical(self.kind.ratio),
            num_blocks=max(self.config.index_topk, self.config.candidate_topk_blocks),
        )  # fmt: skip
        found = (self._by_blocks if by_blocks else self._streaming)(query, here, pool, cache.layout)
        found = found if self.kind.builds_candidates else found[:1]
        if pages.axes:
            found = merge_ranked(here.through_sequence(found), pages.axes, ordered=not by_blocks)
        selected, *built = (split.join(part.ids) for part in found)
        return selected, selection.ascending(built[0]) if built else None

    def _kept(self, *found: Ranked) -> tuple[Ranked, ...]:
        """Without scores where nothing is merged by them."""
        return found if self.rules.pages else tuple(part._replace(scores=None) for part in found)

    def _by_blocks(self, query: IndexQuery, here: _Here, pool: jax.Array, layout: CacheLayout):
        """Selection by kernels; a tile of queries is as large as its block maxima allow."""
        c, sizes = self.config, self.sizes
        pages = layout.physical_pages(here.table, self.kind.ratio)

        def scan(values, scales, weights, visible, newest, candidates):
            part = IndexQuery(values, scales, weights)
            if candidates is None:
                return self._kept(*rank_by_blocks(part, pool, pages, visible, newest, sizes))
            return self._kept(rank_in_blocks(part, pool, pages, visible, candidates, sizes))

        blocks = pages.shape[1] * PAGE_ENTRIES // sizes.block + c.index_topk * sizes.block
        if here.candidates is not None:
            blocks = here.candidates.shape[-1] * sizes.block
        tile = query_tile(here.visible.shape[1], query.values.shape[0] * blocks * 4, _KERNEL_TILE_BYTES)
        return map_query_tiles(scan, tile, query.values, query.scales, query.weights, *here.of_queries)

    def _streaming(self, query: IndexQuery, here: _Here, pool: jax.Array, layout: CacheLayout):
        """Selection in plain XLA, a tile of keys at a time."""
        c, ratio, size = self.config, self.kind.ratio, self.sizes.block
        q = quantize.dequantize_mxfp4(query.values, query.scales)
        if here.candidates is not None:
            if self.rules.pages:
                here = dataclasses.replace(here, candidates=selection.ascending(here.candidates))
            tile_blocks = min(_TILE_PAGES * PAGE_ENTRIES // size, here.candidates.shape[-1])

            def read_blocks(blocks):
                page, entry = layout.address(here.table, blocks * size, ratio)
                keys = layout.index.gather_blocks(pool, jnp.maximum(page, 0), entry // size, size)
                keys = quantize.dequantize_mxfp4(*keys)
                return keys.reshape(*blocks.shape[:2], -1, keys.shape[-1])

            def scan(q, weights, visible, newest, candidates):
                options = {"tile_blocks": tile_blocks, "sizes": self.sizes}
                return self._kept(selection.rank_in_pool(q, weights, visible, candidates, read_blocks, **options))

            per_token = q.shape[0] * tile_blocks * size * (c.index_n_heads + c.index_head_dim + 4) * 4
        else:
            pages = min(_TILE_PAGES, here.table.shape[1] * layout.pages_per_logical(ratio))
            entries = pages * PAGE_ENTRIES

            def read_keys(i):
                first = i * entries + jnp.arange(pages) * PAGE_ENTRIES
                page, _ = layout.address(here.table, jnp.broadcast_to(first, (here.table.shape[0], pages)), ratio)
                keys = quantize.dequantize_mxfp4(*layout.index.read_pages(pool, jnp.maximum(page, 0)))
                return keys.reshape(keys.shape[0], entries, -1)

            def scan(q, weights, visible, newest, candidates):
                options = {"tile": entries, "sizes": self.sizes}
                return self._kept(*selection.rank(q, weights, visible, newest, read_keys, **options))

            per_token = q.shape[0] * entries * (c.index_n_heads + 4) * 4
        return map_query_tiles(scan, query_tile(q.shape[1], per_token), q, query.weights, *here.of_queries)
