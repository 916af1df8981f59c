"""CSA2 attention in its four roles (architecture.md section 3)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, LayerCache
from dsv41.config import LayerKind, TextConfig
from dsv41.layers.indexer import Indexer
from dsv41.layers.linear import Linear, RMSNorm
from dsv41.layers.projections import AttentionProjections
from dsv41.ops import compressor as compression
from dsv41.ops.linear import WeightFormat
from dsv41.ops.rope import table_of
from dsv41.ops.sequence_pages import gather_rows
from dsv41.ops.token_split import TokenSplit
from dsv41.sharding import LOCAL, ShardingRules
from pallas_kernels.fixed_order import contract
from pallas_kernels.formats import e4m3_to_byte
from pallas_kernels.page_layout import WindowLayout, drop_index
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.sparse_attention.ops import sparse_attention


class _Compressor(nnx.Module):
    def __init__(self, config: TextConfig, ratio: int):
        self.wkv = Linear(config.hidden_size, config.head_dim, WeightFormat.BF16)
        if ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, WeightFormat.BF16)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class Attention(AttentionProjections):
    """Window attention plus, by role, compressed entries that this layer or one before it owns and selects."""

    def __init__(
        self,
        config: TextConfig,
        kind: LayerKind,
        dense: WeightFormat,
        rules: ShardingRules = LOCAL,
    ):
        super().__init__(config, dense, rules)
        self.kind = kind
        if kind.owns_kv:
            self.compressor = _Compressor(config, kind.ratio)
        if kind.selects:
            self.indexer = Indexer(config, kind, dense, rules)

    def __call__(
        self,
        x: jax.Array,
        batch: ForwardBatch,
        cache: LayerCache,
        state: AttentionState | None,
        forced: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache, AttentionState | None]:
        """One attention sublayer.

        Args:
          x: bfloat16 [B, T, D], normalised; of this device's tokens (`TokenSplit`), and so is y.
          batch, cache: the step and what is remembered; the cache is written before it is read.
          state: selection of the layers before; required by Reuse layers.
          forced: int32 [B, T, index_topk] entries to attend to instead of the selected ones.

        Returns:
          y bfloat16 [B, T, D], the cache with this step's entries, the selection for the layers behind.
        """
        x = self._joined(x, batch)
        rope = table_of(self.kind, cache.rope)[jnp.clip(batch.positions(), 0, cache.max_tokens - 1)]
        qr, q = self.queries(x, rope)
        if self.kind.owns_kv:
            cache = self._compress(x, batch, cache)
        if self.kind.selects:
            with jax.named_scope("select"):
                state = self._select(x, qr, rope, batch, cache, state, forced)
        with jax.named_scope("attend"):
            o, ring = self._attend(q, x, rope, batch, cache, state)
        return self.output(o), dataclasses.replace(cache, window=ring), state

    def _select(self, x, qr, rope, batch, cache, state, forced) -> AttentionState:
        """The selection of this layer, or `forced`, and where its entries lie; see `__call__`."""
        kind = self.kind
        known = None if state is None else state.candidates
        selected, built = self.indexer(x, qr, rope, batch, cache, known)
        selected = selected if forced is None else forced
        pages = batch.step_pages(cache.page_table, self.rules.pages)
        pool = None
        if pages.axes:
            held = None if state is None or kind.owns_kv else state.pool
            pool, entries = pages.fetch(cache.main, selected, cache.layout, kind.ratio, held)
        else:
            entries = cache.layout.physical_entry(pages.table, selected, kind.ratio)
        return AttentionState(
            selected=selected,
            physical_entries=entries,
            candidates=built if kind.builds_candidates else known,
            index_source=None,
            pool=pool,
        )

    def compress(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> LayerCache:
        """Writes main KV and index keys of every group that this step completes; the rest of the layer is not run.

        x, batch, cache as in `__call__`. Groups that begin below `batch.write_from` keep their stored bytes.
        """
        return self._compress(self._joined(x, batch), batch, cache)

    def _joined(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        return TokenSplit(*batch.tokens.shape, self.rules.heads).join(x)

    @jax.named_scope("compress")
    def _compress(self, x: jax.Array, batch: ForwardBatch, cache: LayerCache) -> LayerCache:
        """`compress` of all tokens of the batch."""
        ratio, pending = self.kind.ratio, cache.pending
        if ratio == 1:
            latent = self.compressor.norm(self.compressor.wkv(x))
        else:
            # In float32 on both sides: bf16 inputs have exact products, so accumulating in float32 is the float32
            # product.
            new = jnp.stack(
                [contract(x, self.compressor.wkv.weight[...]), contract(x, self.compressor.wgate.weight[...])], axis=2
            )
            ring = pending.shape[1]
            before = batch.start[:, None] - ratio + 1 + jnp.arange(ratio - 1)
            rows = jnp.concatenate([pending[batch.slot[:, None], before % ring], new], axis=1)
            _, _, row = compression.group_window(batch.start, batch.num_new, x.shape[1], ratio)
            latent = compression.pool_groups(
                rows[:, :, 0], rows[:, :, 1], row, self.compressor.norm.weight[...], self.config.rms_norm_eps
            )
            slot, index = batch.ring_address(ring, pending.shape[0])
            pending = pending.at[slot, index].set(new, mode="drop")
        # Every device of a group writes what lies in its pages of the latents of all.
        pages = batch.step_pages(cache.page_table, self.rules.pages)
        latent, keys = gather_rows([latent, self.indexer.keys(latent)], pages.axes)
        group, complete, _ = compression.group_window(pages.start, pages.num_new, x.shape[1], ratio)
        rope = table_of(self.kind, cache.rope)[jnp.clip(group * ratio, 0, cache.max_tokens - 1)]
        page, entry = pages.address(cache.layout, group, ratio)
        if pages.write_from is not None:
            complete = complete & (group * ratio >= pages.write_from[:, None])
        page = drop_index(page, complete & (page >= 0), cache.main.shape[0])
        main = quantize.write_main(latent, rope, cache.main, page, entry, layout=cache.layout.main)
        index = self.indexer.write_keys(keys, rope, cache.index, page, entry, cache.layout.index)
        return dataclasses.replace(cache, main=main, index=index, pending=pending)

    def _attend(self, q, x, rope, batch: ForwardBatch, cache: LayerCache, state: AttentionState | None):
        """bfloat16 [B, T, N, H], one softmax over window and selected entries of each query, and the layer's new ring.

        Where the ring has room for the step behind every query's window, the step is written first and all is read from
        the ring; else queries read a copy of the ring with the step's entries behind it.
        """
        layout, window, ring = cache.layout, self.config.sliding_window, cache.window
        ring_layout, tokens = layout.window, q.shape[1]
        slot, index = batch.ring_address(ring_layout.length, ring.shape[0])
        key = batch.positions()[..., None] - window + 1 + jnp.arange(window, dtype=jnp.int32)
        floor = 0 if batch.window_floor is None else jnp.maximum(batch.window_floor[:, None, None], 0)
        valid = batch.valid()[..., None]
        if tokens <= ring_layout.length - window + 1:
            ring = self.write_window(x, rope, ring, slot, index, ring_layout)
            read, read_slot, read_layout = ring, batch.slot, ring_layout
            where = key % ring_layout.length
        else:
            new = self.window_kv(x, rope)
            old = ring_layout.read(ring, batch.slot)
            both = [jnp.concatenate(pair, axis=1) for pair in zip(old, (e4m3_to_byte(new[0]), new[1]), strict=True)]
            read_layout = WindowLayout(ring_layout.head_dim, ring_layout.length + tokens)
            read, read_slot = read_layout.pack(*both), jnp.arange(q.shape[0], dtype=jnp.int32)
            start = batch.start[:, None, None]
            where = jnp.where(key >= start, ring_layout.length + key - start, key % ring_layout.length)
            ring = ring_layout.write(ring, slot, index, e4m3_to_byte(new[0]), new[1])
        pool, entries = None, None
        if state is not None and self.kind.is_compressed:
            pool = cache.main if state.pool is None else state.pool
            entries = jnp.where(valid, state.physical_entries, -1)
        o = sparse_attention(
            q, read, read_slot, jnp.where((key >= floor) & valid, where, -1), pool, entries, self.attn_sink[...], rope,
            scale=self.config.head_dim**-0.5, window_layout=read_layout,
        )  # fmt: skip
        return o, ring
