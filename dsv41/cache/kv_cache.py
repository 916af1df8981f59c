"""The cache of a batch of sequences and the arrays that travel with a step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dsv41.cache.layout import CacheLayout
from dsv41.cache.page_owners import ONE_DEVICE, PageOwners
from dsv41.cache.step_pages import StepPages
from dsv41.config import DSV41Error, TextConfig
from dsv41.ops.rope import layer_frequencies, rope_table
from dsv41.sharding import LOCAL, MeshAxes, ShardingRules, place, zeros
from pallas_kernels.formats import byte_to_e4m3
from pallas_kernels.page_layout import drop_index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Everything a model remembers of its sequences, addressed by absolute position.

    There is no length in here: a step says where its tokens start, and whatever lies at or beyond that position is
    invisible and will be overwritten. Rolling back up to `draft_tokens` rejected tokens is therefore only a smaller
    `start` in the next step; without `draft_tokens` a ring is as long as the window, and nothing may be rolled back.
    """

    main: tuple[jax.Array, ...]  # per KV source: uint8 [pages, rows, 4, 128] main KV
    index: tuple[jax.Array, ...]  # per KV source: uint8 [pages, rows, 4, 128] index keys
    window: tuple[jax.Array, ...]  # per layer: uint8 [slots, rows, 4, 128] window KV
    pending: tuple[
        jax.Array | None, ...
    ]  # per KV source of ratio > 1: float32 [slots, ring, 2, head_dim] raw value and gate
    # per drafter stage: uint8 [slots, rows, 4, 128] its KV of committed positions; empty without `draft_tokens`
    draft_window: tuple[jax.Array, ...]
    page_table: jax.Array  # int32 [slots, max_pages] logical pages, -1 where none is assigned
    rope: tuple[jax.Array, jax.Array]  # float32 [max_tokens, 2, rope_dim / 2]: sliding layers, compressed layers
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        return self.page_table.shape[0]

    @property
    def max_tokens(self) -> int:
        """Tokens one sequence can hold."""
        return self.rope[0].shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """The new tokens of one step: prefill chunk, decode or verify, of any sequences at any positions."""

    tokens: jax.Array  # int32 [B, T]; padding anything in the vocabulary
    num_new: jax.Array  # int32 [B] real tokens of the row, 0 for a padding row
    start: jax.Array  # int32 [B] position of the row's first token = committed length so far
    slot: jax.Array  # int32 [B] cache slot of the row
    image_mask: jax.Array  # bool [B, T] tokens inside an image span
    engram_values: jax.Array | None  # float8_e4m3fn or bfloat16 [B, T, engram layers, orders * heads, dim] table rows
    engram_scales: jax.Array | None  # uint8 [B, T, engram layers, orders * heads, dim / 32]; None for bfloat16 tables
    # bfloat16 [B, T, D] embeddings where image_mask is set; None: no token of the step has any
    image_embeds: jax.Array | None = None
    # int32 [B] window entries of positions below it are invisible, as if the sequence began there; None: 0
    window_floor: jax.Array | None = None
    # int32 [B] pages hold the entries of positions below it already, which are not written again; None: 0
    write_from: jax.Array | None = None
    # int32 [B] the last so many new tokens go through the decoder, where a step runs it on a tail; None elsewhere
    tail: jax.Array | None = None
    # where the pages of its sequences lie, inside a step on several devices (`local_step`); None: in the page tables
    pages: StepPages | None = None

    def positions(self) -> jax.Array:
        """int32 [B, T] absolute positions."""
        return self.start[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    def valid(self) -> jax.Array:
        """bool [B, T] real tokens."""
        return jnp.arange(self.tokens.shape[1]) < self.num_new[:, None]

    def step_pages(self, page_table: jax.Array, axes: MeshAxes) -> StepPages:
        """Where the pages of its sequences lie, if these are spread over `axes`.

        page_table: int32 [slots, max_pages], the cache's.

        Raises:
          ValueError: the step was not prepared for these axes (`local_step`).
        """
        pages = StepPages.of(self, page_table, ()) if self.pages is None else self.pages
        if pages.axes != axes:
            raise ValueError(f"pages of a step are spread over {pages.axes}, the layers expect {axes}")
        return pages

    def tail_batch(self, width: int) -> ForwardBatch:
        """The last `tail` tokens of each row as a step of `width`: it writes no pages, its windows begin with it."""
        first = self.num_new - self.tail

        def cut(x: jax.Array) -> jax.Array:
            return take_rows(x, first, width)

        begin = self.start + first
        return ForwardBatch(
            tokens=cut(self.tokens),
            num_new=self.tail,
            start=begin,
            slot=self.slot,
            image_mask=cut(self.image_mask),
            engram_values=None,
            engram_scales=None,
            window_floor=begin,
            write_from=jnp.full_like(begin, jnp.iinfo(jnp.int32).max),
            pages=None if self.pages is None else self.pages.of_tail(),
        )

    def ring_address(self, length: int, num_slots: int) -> tuple[jax.Array, jax.Array]:
        """slot, index int32 [B, T] of the tokens in a ring by position, dropping rows that a later one overwrites."""
        t = jnp.arange(self.tokens.shape[1])
        last = (t < self.num_new[:, None]) & (t >= self.num_new[:, None] - length)
        slot = drop_index(jnp.broadcast_to(self.slot[:, None], last.shape), last, num_slots)
        return slot, self.positions() % length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionState:
    """What selecting layers hand to the layers behind them within one step; never kept between steps."""

    selected: jax.Array  # int32 [B, T, index_topk] compressed entries each query attends to, -1 unused
    physical_entries: jax.Array  # int32 [B, T, index_topk] where these lie in the pool: page * 128 + entry, -1 unused
    candidates: jax.Array | None  # int32 [B, T, candidate_topk_blocks] candidate blocks, ascending, -1 unused
    # layer that made `selected`; None inside of a layer, which is the same for all of its kind
    index_source: int | None = dataclasses.field(metadata={"static": True})
    # uint8 [pages, rows, 4, 128] pages of main KV that `physical_entries` names, where they were brought here from
    # other devices; None: those of the cache
    pool: jax.Array | None = None


def abstract_cache(
    config: TextConfig, layout: CacheLayout, *, num_slots: int, max_tokens: int, num_pages: int
) -> KVCache:
    """The cache as shapes and dtypes (`jax.ShapeDtypeStruct`), without memory."""
    u8 = jnp.uint8

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = [num_pages * layout.pages_per_logical(r) for r in layout.ratios]
    max_pages = layout.pages_for(max_tokens)
    table = struct((max_pages * layout.page_tokens, 2, config.qk_rope_head_dim // 2), jnp.float32)
    pending = struct((num_slots, layout.pending_rows, 2, config.head_dim), jnp.float32)
    return KVCache(
        main=tuple(struct(layout.main.shape(p), u8) for p in pages),
        index=tuple(struct(layout.index.shape(p), u8) for p in pages),
        window=tuple(struct(layout.window.shape(num_slots), u8) for _ in range(layout.num_layers)),
        draft_window=tuple(struct(layout.window.shape(num_slots), u8) for _ in range(layout.num_draft_stages)),
        pending=tuple(pending if r > 1 else None for r in layout.ratios),
        page_table=struct((num_slots, max_pages), jnp.int32),
        rope=(table, table),
        layout=layout,
    )


def init_cache(
    config: TextConfig,
    *,
    num_slots: int,
    max_tokens: int,
    num_pages: int | None = None,
    draft_tokens: int = 0,
    mesh: Mesh | None = None,
    rules: ShardingRules = LOCAL,
) -> KVCache:
    """An empty cache.

    Args:
      config: the model's text config.
      num_slots: sequences that can be live at once.
      max_tokens: tokens one sequence may reach; rounded up to whole pages.
      num_pages: logical pages in the pool, handed out later with `assign_pages`. None: enough for every slot, all
        assigned.
      draft_tokens: tokens a step may write that are rejected afterwards; above 0 there are rings for the drafter too.
      mesh, rules: over which devices it is spread, and how; no device has more than its part at any time.

    Raises:
      DSV41Error: a count is not positive, max_tokens exceeds `max_position_embeddings`, or slots or pages cannot be
        spread equally.
    """
    for name, value in (("num_slots", num_slots), ("max_tokens", max_tokens), ("num_pages", num_pages)):
        if value is not None and value < 1:
            raise DSV41Error(f"init_cache: {name} must be positive, got {value}")
    if max_tokens > config.max_position_embeddings:
        raise DSV41Error(
            f"init_cache: max_tokens={max_tokens} exceeds max_position_embeddings={config.max_position_embeddings}"
        )
    layout = CacheLayout.from_config(config, draft_tokens=draft_tokens)
    max_pages = layout.pages_for(max_tokens)
    assign_all = num_pages is None
    owners = ONE_DEVICE if mesh is None else PageOwners.of(rules, mesh.shape)
    num_pages = num_pages or owners.pages_for_all(num_slots, max_pages)
    owners.check_sizes(num_slots, num_pages)
    abstract = abstract_cache(config, layout, num_slots=num_slots, max_tokens=max_tokens, num_pages=num_pages)
    positions = np.arange(max_pages * layout.page_tokens)
    tables = (rope_table(layer_frequencies(config, compressed=c), positions) for c in (False, True))
    empty = dataclasses.replace(abstract, rope=(), page_table=None)
    table = owners.table_of_all(num_slots, max_pages) if assign_all else np.full((num_slots, max_pages), -1)
    tables, table = tuple(tables), table.astype(np.int32)
    if mesh is None:
        arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), empty)
        tables, table = jax.tree.map(jnp.asarray, (tables, table))
    else:
        arrays = zeros(empty, mesh, rules.spec("batch"))
        tables, table = place((tables, table), mesh, (PartitionSpec(), rules.spec("batch")))
    return dataclasses.replace(arrays, rope=tables, page_table=table)


def assign_pages(cache: KVCache, slot: int, first: int, pages: list[int]) -> KVCache:
    """Makes `pages` the slot's logical pages number first, first + 1, ...; page contents are untouched."""
    last, limit = first + len(pages), cache.page_table.shape[1]
    if last > limit:
        raise DSV41Error(f"assign_pages: slot {slot} would have {last} pages, the cache allows {limit}")
    table = cache.page_table.at[slot, first : first + len(pages)].set(jnp.asarray(pages, jnp.int32))
    return dataclasses.replace(cache, page_table=table)


def cache_bytes(cache: KVCache) -> dict[str, int]:
    """Bytes of the cache's arrays (or of their abstract shapes) by kind."""

    def total(arrays) -> int:
        return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in arrays if a is not None)

    return {
        "main": total(cache.main),
        "index": total(cache.index),
        "window": total(cache.window),
        "draft_window": total(cache.draft_window),
        "pending": total(cache.pending),
        "page_table": total([cache.page_table]),
        "rope": total(cache.rope),
    }


def read_window(layout: CacheLayout, rings: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whole rings of slots int32 [B]: float8_e4m3fn [B, length, H] and E8M0 scales uint8 [B, length, H / 32]."""
    values, scales = layout.window.read(rings, slot)
    return byte_to_e4m3(values), scales


def take_rows(x: jax.Array, first: jax.Array, width: int) -> jax.Array:
    """x [B, T, ...] from index first int32 [B] on: [B, width, ...]; beyond T the last one is repeated."""
    index = jnp.clip(first[:, None] + jnp.arange(width), 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
