"""Sequences whose pages lie on several devices, round robin: numbering, messages between these devices, fetching.

Logical page j of a sequence lies on device j modulo their number, along some mesh axes. The devices together are a
group: each has rows of a step of its own, and pages of all their rows. So every device works for the rows of the whole
group, in the order of the devices, on the pages that it has. All of it runs inside `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from dsv41.ops import collectives
from dsv41.ops.selection import Ranked, take_ranked
from dsv41.sharding import MeshAxes
from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, MainPageLayout
from pallas_kernels.topk.ops import topk


@dataclasses.dataclass(frozen=True)
class RoundRobin:
    """Two ways to number what pages hold, entries or blocks of them: through a sequence, and through its pages here.

    Both ascend together, so that what is first in one is first in the other.

    Attributes:
      device: number of this device in its group.
      devices: of the group.
      per_page: entries or blocks of a logical page.
    """

    device: jax.Array | int
    devices: int
    per_page: int

    def count_here(self, count: jax.Array) -> jax.Array:
        """How many of a sequence's first `count` lie here."""
        full, rest = count // self.per_page, count % self.per_page
        pages = (full - self.device + self.devices - 1) // self.devices
        return pages * self.per_page + jnp.where(full % self.devices == self.device, rest, 0)

    def number_here(self, number: jax.Array) -> jax.Array:
        """Numbers through the sequence -> through its pages here; -1 for what lies elsewhere, and for -1."""
        page = number // self.per_page
        here = page // self.devices * self.per_page + number % self.per_page
        return jnp.where((number >= 0) & (page % self.devices == self.device), here, -1)

    def number_of(self, here: jax.Array) -> jax.Array:
        """Numbers through the pages here -> through the sequence; -1 stays."""
        page = here // self.per_page * self.devices + self.device
        return jnp.where(here < 0, -1, page * self.per_page + here % self.per_page)


def pages_here(page_table: jax.Array, columns: jax.Array, axes: MeshAxes) -> tuple[jax.Array, jax.Array]:
    """What a device must know of its group's rows, by one exchange.

    Args:
      page_table: int32 [B, max_pages] of this device's rows: where page j lies in the pool of device j modulo their
        number, -1 where none is assigned.
      columns: int32 [B, n], anything else that all devices of the group need.
      axes: mesh axes of the group.

    Returns:
      int32 [devices * B, ceil(max_pages / devices)], of every row of the group the pages here; int32 [devices * B, n].
    """
    rows, devices = page_table.shape[0], collectives.axis_size(axes)
    if devices == 1:
        return page_table, columns
    padded = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % devices)), constant_values=-1)
    by_device = jnp.moveaxis(padded.reshape(rows, -1, devices), 2, 0)
    message = jnp.concatenate([by_device, jnp.broadcast_to(columns, (devices, *columns.shape))], axis=2)
    message = collectives.exchange(message.reshape(devices * rows, -1), axes)
    return message[:, : by_device.shape[2]], message[:, by_device.shape[2] :]


def gather_rows(arrays: Sequence[jax.Array], axes: MeshAxes) -> list[jax.Array]:
    """Several arrays [B, ...] of this device's rows -> [devices * B, ...] of the group's, by one collective."""
    if not axes:
        return list(arrays)
    parts = [_to_bytes(x) for x in arrays]
    whole = collectives.gather(jnp.concatenate(parts, axis=1), axes)
    ends = [sum(p.shape[1] for p in parts[: i + 1]) for i in range(len(parts))]
    return [
        _from_bytes(whole[:, end - part.shape[1] : end], like)
        for end, part, like in zip(ends, parts, arrays, strict=True)
    ]


def _to_bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)


def _from_bytes(x: jax.Array, like: jax.Array) -> jax.Array:
    size = like.dtype.itemsize
    shape = (x.shape[0], *like.shape[1:], *((size,) if size > 1 else ()))
    return jax.lax.bitcast_convert_type(x.reshape(shape), like.dtype)


def merge_ranked(parts: Sequence[Ranked], axes: MeshAxes, *, ordered: bool) -> list[Ranked]:
    """The best of what each device of a group found on its pages, at the device that has the row; by one exchange.

    Args:
      parts: several kinds of things [devices * B, T, k] of the group's rows, with ids that hold through the sequence;
        each the k best of its kind here.
      axes: mesh axes of the group.
      ordered: best first, the lower id first among equal scores; else in any order, and any of equal scores.

    Returns:
      for each kind the k best of all devices, [B, T, k].
    """
    if not axes:
        return list(parts)
    message = [half for scores, ids in parts for half in (jax.lax.bitcast_convert_type(scores, jnp.int32), ids)]
    message = collectives.exchange(jnp.concatenate(message, axis=-1), axes, split=0, concat=2)
    found = message.reshape(*message.shape[:2], collectives.axis_size(axes), -1)
    merged, end = [], 0
    for scores, _ in parts:
        k, begin, end = scores.shape[-1], end, end + 2 * scores.shape[-1]
        both = found[..., begin : begin + k], found[..., begin + k : end]
        scores, ids = (x.reshape(*x.shape[:2], -1) for x in both)
        scores = jax.lax.bitcast_convert_type(scores, jnp.float32)
        merged.append((_best_in_order if ordered else _best)(scores, ids, k))
    return merged


def _best_in_order(scores: jax.Array, ids: jax.Array, k: int) -> Ranked:
    # Unused ones have the score -inf and come last, whatever their id.
    worst_first, ids = jax.lax.sort((-scores, ids), num_keys=2)
    return Ranked(-worst_first[..., :k], ids[..., :k])


def _best(scores: jax.Array, ids: jax.Array, k: int) -> Ranked:
    where = topk(scores.reshape(-1, scores.shape[-1]), k).reshape(*scores.shape[:-1], k)
    return take_ranked(scores, ids, where)


def fetch_entries(
    pool: jax.Array,
    entries: jax.Array,
    address: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    layout: MainPageLayout,
    axes: MeshAxes,
) -> tuple[jax.Array, jax.Array]:
    """Copies of the entries that this device's rows ask for, from wherever in the group they lie.

    Every device hears what all ask for and answers with what it has; pages are not moved.

    Args:
      pool: uint8 [P, rows, 4, 128], the pages here.
      entries: int32 [B, T, K] as numbered through their sequences, -1 unused.
      address: entries [devices * B, T, K] of the group's rows -> pages in the pool, -1 for what lies elsewhere, and
        numbers inside the page.
      layout: of `pool`.
      axes: mesh axes of the group.

    Returns:
      uint8 [p, rows, 4, 128] pages with the copies; int32 [B, T, K] where each lies, page * 128 + number inside it,
      -1 unused.
    """
    page, inside = address(collectives.gather(entries, axes))
    per_row = math.prod(entries.shape[1:])
    page, inside = (x.reshape(-1, per_row) for x in (page, inside))
    here = (page >= 0)[..., None]
    copies = [jnp.where(here, x, 0) for x in read_entries(pool, jnp.maximum(page, 0), inside, layout)]
    pages = -(-per_row // PAGE_ENTRIES)
    copies = [jnp.pad(x, ((0, 0), (0, pages * PAGE_ENTRIES - per_row), (0, 0))) for x in copies]
    packed = layout.pack(*(x.reshape(-1, PAGE_ENTRIES, x.shape[-1]) for x in copies))
    # All devices but one have zeros for an entry. This is no scattered sum, since of integers a TPU makes that by an
    # all-reduce, which moves twice as much.
    fetched = collectives.exchange(packed, axes)
    fetched = fetched.reshape(collectives.axis_size(axes), -1, *pool.shape[1:]).max(axis=0)
    row = jnp.arange(entries.shape[0], dtype=jnp.int32)[:, None] * pages * PAGE_ENTRIES
    where = (row + jnp.arange(per_row, dtype=jnp.int32)).reshape(entries.shape)
    return fetched, jnp.where(entries < 0, -1, where)


def read_entries(
    pool: jax.Array, page: jax.Array, entry: jax.Array, layout: MainPageLayout
) -> tuple[jax.Array, jax.Array]:
    """`layout.gather` by whole rows of 512 bytes, which is the form that a TPU reads without a copy of the pool."""

    def read(first_row: int, width: int) -> jax.Array:
        if ROW_BYTES % width:
            raise ValueError(f"entries of {width} bytes do not fill rows of {ROW_BYTES}")
        rows = pool[page, first_row + entry * width // ROW_BYTES]
        parts = rows.reshape(*page.shape, ROW_BYTES // width, width)
        wanted = (entry * width % ROW_BYTES // width)[..., None] == jnp.arange(ROW_BYTES // width)
        return jnp.where(wanted[..., None], parts, 0).max(axis=-2)

    return read(0, layout.value_bytes), read(layout.value_rows, layout.scale_bytes)


def fetch_pages(pool: jax.Array, pages: jax.Array, axes: MeshAxes) -> jax.Array:
    """Copies of whole pages that belong to this device's rows, from all devices of the group.

    Args:
      pool: uint8 [P, rows, 4, 128], the pages here.
      pages: int32 [devices * B, n], pages here of every row of the group; anything in range where there is none.
      axes: mesh axes of the group.

    Returns:
      uint8 [B * devices * n, rows, 4, 128]: of each row the n pages of the first device, of the second, and so on.
    """
    copies = collectives.exchange(pool[pages], axes, split=0, concat=1)
    return copies.reshape(-1, *pool.shape[1:])
