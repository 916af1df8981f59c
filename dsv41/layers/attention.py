"""CSA2 attention in its four roles (architecture.md section 3)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache, read_window, write_window
from dsv41.config import LayerMode, LayerSpec, Schedule, TextConfig
from dsv41.layers.indexer import Indexer
from dsv41.layers.linear import Linear, RMSNorm
from dsv41.layers.projections import AttentionProjections
from dsv41.ops import compressor as compression
from dsv41.ops.linear import WeightFormat
from dsv41.ops.rope import apply_rope, table_of
from dsv41.ops.tiling import map_query_tiles, query_tile
from pallas_kernels.fixed_order import contract
from pallas_kernels.page_layout import drop_index
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.sparse_attention.ops import attend


class _Compressor(nnx.Module):
    def __init__(self, config: TextConfig, ratio: int):
        self.wkv = Linear(config.hidden_size, config.head_dim, WeightFormat.BF16)
        if ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, WeightFormat.BF16)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class Attention(AttentionProjections):
    """Window attention plus, by role, compressed entries that this layer or one before it owns and selects."""

    def __init__(self, config: TextConfig, schedule: Schedule, spec: LayerSpec, dense: WeightFormat):
        super().__init__(config, dense)
        self.spec = spec
        self.kv_index = None if spec.kv_source is None else [s.index for s in schedule.kv_sources].index(spec.kv_source)
        if spec.owns_kv:
            self.compressor = _Compressor(config, spec.ratio)
        if spec.selects:
            self.indexer = Indexer(config, spec, dense)

    def __call__(
        self, x: jax.Array, batch: ForwardBatch, cache: KVCache, state: AttentionState | None, forced: jax.Array | None
    ) -> tuple[jax.Array, KVCache, AttentionState | None]:
        """One attention sublayer.

        Args:
          x: bfloat16 [B, T, D], normalised.
          batch, cache: the step and what is remembered; the cache is written before it is read.
          state: selection of the layers before; required by Reuse layers.
          forced: int32 [B, T, index_topk] entries to attend to instead of the selected ones.

        Returns:
          y bfloat16 [B, T, D], the cache with this step's entries, the selection for the layers behind.

        Raises:
          ValueError: a Reuse or Reindex layer was reached without the selection it depends on.
        """
        rope = table_of(self.spec, cache.rope)[jnp.clip(batch.positions(), 0, cache.max_tokens - 1)]
        qr, q = self.queries(x, rope)
        new_kv = self.window_kv(x, rope)
        if self.spec.owns_kv:
            cache = self.compress(x, batch, cache)
        if self.spec.selects:
            with jax.named_scope("select"):
                state = self.indexer(x, qr, rope, batch, cache, self.kv_index, state)
                if forced is not None:
                    state = dataclasses.replace(state, selected=forced)
        elif self.spec.mode is LayerMode.REUSE and (state is None or state.index_source != self.spec.index_source):
            raise ValueError(
                f"layer {self.spec.index} reuses the selection of layer {self.spec.index_source}, which has not run "
                "in this step"
            )
        with jax.named_scope("attend"):
            o = self._attend(q, new_kv, batch, cache, state)
        cache = self._write_window(new_kv, batch, cache)
        return self.output(o, rope), cache, state

    def compress(self, x: jax.Array, batch: ForwardBatch, cache: KVCache) -> KVCache:
        """Writes main KV and index keys of every group that this step completes; the rest of the layer is not run.

        x, batch, cache as in `__call__`. Groups that begin below `batch.write_from` keep their stored bytes.
        """
        with jax.named_scope("compress"):
            return self._compress(x, batch, cache)

    def _compress(self, x: jax.Array, batch: ForwardBatch, cache: KVCache) -> KVCache:
        ratio, k = self.spec.ratio, self.kv_index
        pending = cache.pending[k]
        if ratio == 1:
            latent = self.compressor.norm(self.compressor.wkv(x))
            group, complete = batch.positions(), batch.valid()
        else:
            # In float32 on both sides: bf16 inputs have exact products, so accumulating in float32 is the float32
            # product.
            new = jnp.stack(
                [contract(x, self.compressor.wkv.weight[...]), contract(x, self.compressor.wgate.weight[...])], axis=2
            )
            ring = pending.shape[1]
            before = batch.start[:, None] - ratio + 1 + jnp.arange(ratio - 1)
            rows = jnp.concatenate([pending[batch.slot[:, None], before % ring], new], axis=1)
            group, complete, row = compression.group_window(batch.start, batch.num_new, x.shape[1], ratio)
            latent = compression.pool_groups(
                rows[:, :, 0], rows[:, :, 1], row, self.compressor.norm.weight[...], self.config.rms_norm_eps
            )
            slot, index = batch.ring_address(ring, pending.shape[0])
            pending = pending.at[slot, index].set(new, mode="drop")
        table = table_of(self.spec, cache.rope)
        rope = table[jnp.clip(group * ratio, 0, cache.max_tokens - 1)]
        page, entry = cache.layout.address(cache.page_table[batch.slot], group, ratio)
        if batch.write_from is not None:
            complete = complete & (group * ratio >= batch.write_from[:, None])
        page = drop_index(page, complete & (page >= 0), cache.main[k].shape[0])
        main = cache.layout.main.write(cache.main[k], page, entry, *quantize.quantize_kv_fp4(apply_rope(latent, rope)))
        index_key = quantize.quantize_mxfp4(self.indexer.key(latent, rope))
        index = cache.layout.index.write(cache.index[k], page, entry, *index_key)
        return dataclasses.replace(
            cache,
            main=_replaced(cache.main, k, main),
            index=_replaced(cache.index, k, index),
            pending=_replaced(cache.pending, k, pending),
        )

    def _attend(self, q, new_kv, batch: ForwardBatch, cache: KVCache, state: AttentionState | None) -> jax.Array:
        """bfloat16 [B, T, N, H], still rotated: one softmax over window and selected entries of each query."""
        layout, window = cache.layout, self.config.sliding_window
        ring = cache.window[self.spec.index]
        old_values, old_scales = read_window(layout, ring, batch.slot)
        values = jnp.concatenate([old_values, new_kv[0]], axis=1)
        window_kv = quantize.dequantize_fp8(values, jnp.concatenate([old_scales, new_kv[1]], axis=1))
        length, rows = layout.window.length, jnp.arange(q.shape[0])[:, None, None]
        selected = jnp.zeros((*q.shape[:2], 0), jnp.int32) if state is None else state.selected

        floor = 0 if batch.window_floor is None else batch.window_floor[:, None, None]

        def tile(q, position, valid, selected):
            key = position[..., None] - window + 1 + jnp.arange(window)
            start = batch.start[:, None, None]
            index = jnp.where(key >= start, length + key - start, key % length)
            kv = window_kv[rows, index]
            seen = (key >= jnp.maximum(floor, 0)) & valid[..., None]
            if selected.shape[-1]:
                page, entry = layout.address(cache.page_table[batch.slot], selected, self.spec.ratio)
                main = layout.main.gather(cache.main[self.kv_index], jnp.maximum(page, 0), entry)
                kv = jnp.concatenate([kv, quantize.dequantize_kv_fp4(*main)], axis=2)
                seen = jnp.concatenate([seen, (page >= 0) & valid[..., None]], axis=2)
            return attend(q, kv, seen, self.attn_sink[...], self.config.head_dim**-0.5)

        per_token = q.shape[0] * (window + selected.shape[-1]) * self.config.head_dim * 4
        return map_query_tiles(tile, query_tile(q.shape[1], per_token), q, batch.positions(), batch.valid(), selected)

    def _write_window(self, new_kv, batch: ForwardBatch, cache: KVCache) -> KVCache:
        ring = cache.window[self.spec.index]
        ring = write_window(cache.layout, ring, batch, *new_kv)
        return dataclasses.replace(cache, window=_replaced(cache.window, self.spec.index, ring))


def _replaced(items: tuple, index: int, value) -> tuple:
    return (*items[:index], value, *items[index + 1 :])
