"""CSA2 attention over packed rows, without a cache, with gradients (architecture.md section 3).

Weights and arithmetic are those of `dsv41.layers.Attention`; only how entries are found is another: window entries lie
in a band of the row, compressed entries are numbered through the row. One softmax over both has one maximum here, where
serving rescales block by block: the results differ by 1e-3 of their root mean square.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dsv41.layers import Attention
from dsv41.ops import compressor as compression
from dsv41.ops.rope import table_of
from dsv41.ops.straight_through import activation_fp8, einsum_bf16, index_mxfp4, main_kv_fp4, product_bf16
from dsv41.train.indexer_loss import IndexerLoss, index_loss, recall
from dsv41.train.master_weights import FULL_QAT, QAT
from dsv41.train.pack import PackedBatch
from dsv41.train.selection import Visible, explore, select
from pallas_kernels.rope import apply_rope
from pallas_kernels.rounding import round_to_bf16
from pallas_kernels.tiling import query_tile

NEVER = -1e30  # a logit of what a query does not see
# Bytes that the tiles of queries that are worked on at once may make. Every tile costs a GPU some fifty launches.
_TILE_BYTES = 2 << 30
_SHORTEST_TILE = 256  # queries, of a row that is longer
# Name of selections for policies of rematerialisation: to sort scores again costs more than to keep the best.
SELECTED = "selected"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """What layers hand to those behind them. Gradients of all readers add up in float32."""

    # of the last layer that owns KV: float32 [B, S, H] compressed KV and [B, S, C] index keys, bfloat16 values
    main: jax.Array | None = None
    index: jax.Array | None = None
    selected: jax.Array | None = None  # int32 [B, T, K] entries of the row, -1 unused
    candidates: jax.Array | None = None  # int32 [B, T, P] candidate blocks of the row, -1 unused


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How attention is trained.

    Attributes:
      qat: what is rounded as in serving.
      explored: entries drawn at random that a query attends to besides those selected.
      recall: also measure what selections have of the best entries (`recall`), by attention to everything that a query
        sees; for short held-out rows.
      kernels: implementation of what needs no derivatives (`pallas_kernels.dispatch`); `run_layers` sets the caller's.
    """

    qat: QAT = FULL_QAT
    explored: int = 0
    recall: bool = False
    kernels: str = "auto"


class SelectionMetrics(NamedTuple):
    """Of a selecting layer."""

    loss: IndexerLoss
    recall: jax.Array | None  # float32 []


def attend_packed(
    attn: Attention,
    x: jax.Array,
    pack: PackedBatch,
    shared: Shared,
    rope: tuple[jax.Array, jax.Array],
    key: jax.Array,
    options: AttentionOptions,
) -> tuple[jax.Array, Shared, SelectionMetrics | None]:
    """One attention sublayer.

    Args:
      attn: on one device, with weights of `WeightFormat.QAT` or `BF16`.
      x: bfloat16 [B, T, D], normalised.
      pack: the rows, with the window floors that this layer has.
      shared: of the layers before: what the layer reads must be there.
      rope: tables of sliding and of compressed layers, float32 [at least T, 2, r].
      key: of what is explored.
      options: see there.

    Returns:
      y bfloat16 [B, T, D], what the layers behind read, and what a selecting layer's indexer has to learn.
    """
    kind, qat = attn.kind, options.qat
    table = table_of(kind, rope)[pack.position]
    qr, q = attn.queries(x, table)
    window = apply_rope(attn.kv_norm(attn.wkv(x)), table)
    window = activation_fp8(window) if qat.window else window
    if kind.owns_kv:
        shared = _compress(attn, x, pack, shared, rope, qat)
    query = None
    if kind.selects:
        query = _index_query(attn, x, qr, table, qat)
        shared = _select(attn, query, pack, shared, key, options)
    main, selected = None, None
    if kind.is_compressed:
        main, selected = shared.main, shared.selected

    def attend(selected):
        first, sink = window_start(attn, pack), attn.attn_sink[...]
        return core_attention(q, window, first, main, selected, sink, width=attn.config.sliding_window)

    with jax.named_scope("attend"):
        o, mass = attend(selected)
    metrics = None
    if kind.selects:
        loss = index_loss(*query, shared.index, selected, mass, pack.valid)
        metrics = SelectionMetrics(loss, None)
        if options.recall:
            entry = jnp.arange(main.shape[1], dtype=jnp.int32)
            every = jnp.where(Visible.of_pack(pack, kind.ratio).mask(entry), entry, -1)
            chosen = selected[..., : selected.shape[-1] - options.explored]
            metrics = SelectionMetrics(loss, recall(chosen, attend(every)[1], pack.valid, pack.spread))
    return attn.output(apply_rope(o, table[:, :, None], inverse=True)), shared, metrics


def window_start(attn: Attention, pack: PackedBatch) -> jax.Array:
    """int32 [B, T]: the first token of the row in each query's window, itself the last.

    In decoder layers the window of a replayed token begins with the replay (training.md section 7.2).
    """
    first = jnp.maximum(pack.position - attn.config.sliding_window + 1, pack.window_floor)
    return pack.start + jnp.maximum(first, 0)


@jax.named_scope("compress")
def _compress(attn: Attention, x, pack: PackedBatch, shared: Shared, rope, qat: QAT) -> Shared:
    """Main KV and index keys of every group of the row; those behind a document's last whole group are never seen."""
    kind, part = attn.kind, attn.compressor
    if kind.ratio == 1:
        latent = part.norm(part.wkv(x))
    else:
        value, gate = product_bf16(x, part.wkv.weight[...]), product_bf16(x, part.wgate.weight[...])
        group = jnp.arange(x.shape[1], dtype=jnp.int32).reshape(1, -1, kind.ratio)
        group = jnp.broadcast_to(group, (x.shape[0], *group.shape[1:]))
        latent = compression.pool_groups(value, gate, group, part.norm.weight[...], attn.config.rms_norm_eps)
    table = table_of(kind, rope)[pack.position[:, :: kind.ratio]]
    indexer = attn.indexer
    # The model does not learn from the indexer's loss, nor the indexer from the model's (training.md section 4.2).
    index = apply_rope(indexer.k_norm(indexer.keys(jax.lax.stop_gradient(latent))), table)
    main = apply_rope(latent, table)
    if qat.main:
        index, main = index_mxfp4(index), main_kv_fp4(main)
    return dataclasses.replace(shared, main=main.astype(jnp.float32), index=index.astype(jnp.float32))


def _index_query(attn: Attention, x, qr, table, qat: QAT) -> tuple[jax.Array, jax.Array]:
    """Rotated index queries bfloat16 [B, T, N, C] and head weights bfloat16 [B, T, N], of detached inputs."""
    c, indexer = attn.config, attn.indexer
    x, qr = jax.lax.stop_gradient((x, qr))
    q = apply_rope(indexer.wq_b(qr).reshape(*x.shape[:2], c.index_n_heads, c.index_head_dim), table[:, :, None])
    factor = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
    weights = round_to_bf16(indexer.weights_proj(x).astype(jnp.float32) * factor)
    return index_mxfp4(q) if qat.main else q, weights


@jax.named_scope("select")
def _select(attn: Attention, query, pack: PackedBatch, shared: Shared, key, options: AttentionOptions) -> Shared:
    kind = attn.kind
    visible = Visible.of_pack(pack, kind.ratio)
    candidates = shared.candidates if kind.reads_candidates else None
    keys = shared.index.astype(jnp.bfloat16)
    selected, built = select(*query, keys, visible, attn.indexer.sizes, candidates, implementation=options.kernels)
    if options.explored:
        selected = explore(key, selected, visible, options.explored, pack.spread)
    candidates = built if kind.builds_candidates else shared.candidates
    selected, candidates = checkpoint_name((selected, candidates), SELECTED)
    return dataclasses.replace(shared, selected=selected, candidates=candidates)


def core_attention(
    q: jax.Array,
    window: jax.Array,
    first: jax.Array,
    main: jax.Array | None,
    selected: jax.Array | None,
    sink: jax.Array,
    *,
    width: int,
) -> tuple[jax.Array, jax.Array | None]:
    """One softmax over a band of window entries, selected entries and a sink, some tiles of queries at a time.

    Args:
      q: bfloat16 [B, T, N, H].
      window: bfloat16 [B, T, H], key and value of each token.
      first: int32 [B, T], the first token that each query sees, at most `width` - 1 before it.
      main: float32 [B, S, H], compressed entries; None: none.
      selected: int32 [B, T, K] entries of each query, -1 unused.
      sink: float32 [N].
      width: static, of the window.

    Returns:
      o bfloat16 [B, T, N, H]; float32 [B, T, K], the probabilities of the selected entries summed over heads, without
      gradient.
    """
    b, t, n, h = q.shape
    k = 0 if selected is None else selected.shape[2]
    # A tile much longer than the window masks most of its band; a short one leaves a GPU with launches and little work.
    most = min(t, 1 << (max(width, _SHORTEST_TILE) - 1).bit_length())
    bytes_per_token = b * (n * (most + width + k) * 8 + k * h * 6)
    tile = query_tile(most, bytes_per_token, _TILE_BYTES)
    tiles = -(-t // tile)
    at_once = query_tile(tiles, bytes_per_token * tile, _TILE_BYTES)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, tiles * tile - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, tiles, tile, *x.shape[2:]), 1, 0)

    # Each tile's keys: those of its own tokens and of the width - 1 before them.
    token = jnp.arange(tiles)[:, None] * tile - width + 1 + jnp.arange(tile + width - 1)
    band = jnp.moveaxis(window[:, jnp.clip(token, 0, t - 1)], 1, 0)
    parts = (cut(q), band, token, cut(first), None if selected is None else cut(selected))

    @jax.checkpoint
    def one(part):
        return _attend_tile(*part, main, sink, width)

    o, mass = jax.lax.map(one, parts, batch_size=at_once)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(b, tiles * tile, *x.shape[3:])[:, :t]

    return join(o), None if mass is None else join(mass)


def _attend_tile(q, band, token, first, selected, main, sink, width: int):
    """q [B, t, N, H], band [B, w, H], token [w], first [B, t], selected [B, t, K]; see `core_attention`."""
    scale = q.shape[-1] ** -0.5
    own = token[width - 1 :]
    seen = (token[None, None] >= first[..., None]) & (token <= own[:, None])
    logits = [jnp.where(seen[:, :, None], einsum_bf16("btnh,bsh->btns", q, band) * scale, NEVER)]
    if selected is not None:
        # Gathered in float32, so that their gradients are added so.
        rows = jnp.take_along_axis(main, jnp.maximum(selected, 0).reshape(q.shape[0], -1, 1), axis=1)
        rows = rows.reshape(*selected.shape, -1).astype(jnp.bfloat16)
        used = (selected >= 0)[:, :, None]
        logits.append(jnp.where(used, einsum_bf16("btnh,btkh->btnk", q, rows) * scale, NEVER))
    p, total = exponentials(logits, sink)
    o = einsum_bf16("btns,bsh->btnh", round_to_bf16(p[0]), band)
    if selected is None:
        return round_to_bf16(o / total), None
    o = o + einsum_bf16("btnk,btkh->btnh", round_to_bf16(p[1]), rows)
    return round_to_bf16(o / total), jax.lax.stop_gradient((p[1] / total).sum(axis=2))


def exponentials(logits: Sequence[jax.Array], sink: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """The softmax over all of `logits` and a sink before its division: numerators, and what they are divided by.

    Args:
      logits: float32 [..., N, entries] each, `NEVER` where an entry is not seen.
      sink: float32 [N].

    Returns:
      float32 arrays of the shapes of `logits`; float32 [..., N, 1].
    """
    top = jax.lax.stop_gradient(jnp.concatenate(logits, axis=-1).max(axis=-1, keepdims=True))
    p = [jnp.where(x > NEVER, jnp.exp(x - top), 0.0) for x in logits]
    return p, sum(x.sum(axis=-1, keepdims=True) for x in p) + jnp.exp(jnp.minimum(sink[:, None] - top, 80.0))
