"""CSA2 attention in its four roles (architecture.md section 3)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.cache import AttentionState, ForwardBatch, KVCache
from dsv41.config import LayerMode, LayerSpec, Schedule, TextConfig
from dsv41.layers.indexer import Indexer
from dsv41.layers.linear import Linear, RMSNorm, abstract
from dsv41.ops import compressor as compression
from dsv41.ops.linear import WeightFormat, grouped_linear
from dsv41.ops.rope import apply_rope, table_of
from dsv41.ops.tiling import map_query_tiles, query_tile
from pallas_kernels.fixed_order import contract
from pallas_kernels.formats import byte_to_e4m3, e4m3_to_byte
from pallas_kernels.page_layout import drop_index
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.sparse_attention.ops import attend


class _Compressor(nnx.Module):
    def __init__(self, config: TextConfig, ratio: int):
        self.wkv = Linear(config.hidden_size, config.head_dim, WeightFormat.BF16)
        if ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim, WeightFormat.BF16)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class Attention(nnx.Module):
    """Window attention plus, by role, compressed entries that this layer or one before it owns and selects."""

    def __init__(self, config: TextConfig, schedule: Schedule, spec: LayerSpec, dense: WeightFormat):
        c = config
        self.config, self.spec = config, spec
        self.kv_index = None if spec.kv_source is None else [s.index for s in schedule.kv_sources].index(spec.kv_source)
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, dense)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(c.q_lora_rank, c.num_attention_heads * c.head_dim, dense)
        self.wkv = Linear(c.hidden_size, c.head_dim, dense)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.attn_sink = abstract(c.num_attention_heads, dtype=jnp.float32)
        group_in = c.num_attention_heads // c.o_groups * c.head_dim
        self.wo_a = Linear(group_in, c.o_groups * c.o_lora_rank, dense)
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.hidden_size, dense)
        if spec.owns_kv:
            self.compressor = _Compressor(c, spec.ratio)
        if spec.selects:
            self.indexer = Indexer(c, spec, dense)

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
        c, b, t = self.config, *x.shape[:2]
        rope = table_of(self.spec, cache.rope)[jnp.clip(batch.positions(), 0, cache.max_tokens - 1)]
        with jax.named_scope("query"):
            qr = self.q_norm(self.wq_a(x))
            q = apply_rope(self.wq_b(qr).reshape(b, t, c.num_attention_heads, c.head_dim), rope[:, :, None])
        with jax.named_scope("window_kv"):
            new_kv = quantize.quantize_fp8(apply_rope(self.kv_norm(self.wkv(x)), rope))
        if self.spec.owns_kv:
            with jax.named_scope("compress"):
                cache = self._compress(x, batch, cache)
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
        with jax.named_scope("output"):
            o = apply_rope(o, rope[:, :, None], inverse=True)
            grouped = o.reshape(b, t, c.o_groups, -1)
            weight = self.wo_a.stored.dequantize().reshape(c.o_groups, c.o_lora_rank, -1)
            return self.wo_b(grouped_linear(grouped, weight).reshape(b, t, -1)), cache, state

    def _compress(self, x: jax.Array, batch: ForwardBatch, cache: KVCache) -> KVCache:
        """Writes main KV and index keys of every group that this step completes."""
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
            slot, index = _ring_address(batch, ring, pending.shape[0])
            pending = pending.at[slot, index].set(new, mode="drop")
        table = table_of(self.spec, cache.rope)
        rope = table[jnp.clip(group * ratio, 0, cache.max_tokens - 1)]
        page, entry = cache.layout.address(cache.page_table[batch.slot], group, ratio)
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
        old_values, old_scales = layout.window.read(ring, batch.slot)
        values = jnp.concatenate([byte_to_e4m3(old_values), new_kv[0]], axis=1)
        window_kv = quantize.dequantize_fp8(values, jnp.concatenate([old_scales, new_kv[1]], axis=1))
        length, rows = layout.window.length, jnp.arange(q.shape[0])[:, None, None]
        selected = jnp.zeros((*q.shape[:2], 0), jnp.int32) if state is None else state.selected

        def tile(q, position, valid, selected):
            key = position[..., None] - window + 1 + jnp.arange(window)
            start = batch.start[:, None, None]
            index = jnp.where(key >= start, length + key - start, key % length)
            kv = window_kv[rows, index]
            seen = (key >= 0) & valid[..., None]
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
        slot, index = _ring_address(batch, cache.layout.window.length, ring.shape[0])
        ring = cache.layout.window.write(ring, slot, index, e4m3_to_byte(new_kv[0]), new_kv[1])
        return dataclasses.replace(cache, window=_replaced(cache.window, self.spec.index, ring))


def _replaced(items: tuple, index: int, value) -> tuple:
    return (*items[:index], value, *items[index + 1 :])


def _ring_address(batch: ForwardBatch, length: int, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """slot, index int32 [B, T] of the step's rows in a ring by position, dropping rows that a later one overwrites."""
    t = jnp.arange(batch.tokens.shape[1])
    last = (t < batch.num_new[:, None]) & (t >= batch.num_new[:, None] - length)
    slot = drop_index(jnp.broadcast_to(batch.slot[:, None], last.shape), last, num_slots)
    return slot, batch.positions() % length
