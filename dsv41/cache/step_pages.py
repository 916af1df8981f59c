"""Which pages of the sequences of a step lie on a device."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from dsv41.cache.layout import CacheLayout
from dsv41.ops import collectives
from dsv41.ops.sequence_pages import RoundRobin, fetch_entries, fetch_pages, pages_here
from dsv41.sharding import MeshAxes
from pallas_kernels.page_layout import PAGE_ENTRIES

if TYPE_CHECKING:  # a batch carries its pages
    from dsv41.cache.kv_cache import ForwardBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepPages:
    """The rows of a group of devices in one step, and the pages of them that lie on this device.

    Where every device has all pages of its rows, the group is the device itself. R counts the rows of the group, device
    by device; for all devices of a group these are the same.
    """

    table: jax.Array  # int32 [R, n] logical pages in this device's pools, -1 for none
    start: jax.Array  # int32 [R] as in the batch, and so are the others
    num_new: jax.Array  # int32 [R]
    write_from: jax.Array | None  # int32 [R]
    tail: jax.Array | None  # int32 [R]
    axes: MeshAxes = dataclasses.field(metadata={"static": True})  # of the group

    @classmethod
    def of(cls, batch: ForwardBatch, page_table: jax.Array, axes: MeshAxes) -> StepPages:
        """For the rows of `batch`; with axes by an exchange, which is done once a step (`local_step`).

        page_table: int32 [slots, max_pages] where page j of a slot lies in the pools of device j of the group (modulo
        the size of the group).
        """
        optional = [batch.write_from, batch.tail]
        columns = [batch.start, batch.num_new, *(x for x in optional if x is not None)]
        table, rows = pages_here(page_table[batch.slot], jnp.stack(columns, axis=1), axes)
        start, num_new, *given = (rows[:, i] for i in range(len(columns)))
        write_from, tail = (None if x is None else given.pop(0) for x in optional)
        return cls(table, start, num_new, write_from, tail, axes)

    def of_tail(self) -> StepPages:
        """For `ForwardBatch.tail_batch`."""
        begin = self.start + self.num_new - self.tail
        nothing = jnp.full_like(begin, jnp.iinfo(jnp.int32).max)
        return StepPages(self.table, begin, self.tail, nothing, None, self.axes)

    @property
    def devices(self) -> int:
        """Devices of the group."""
        return collectives.axis_size(self.axes)

    def numbering(self, per_page: int) -> RoundRobin:
        """How things are numbered of which a logical page holds so many."""
        return RoundRobin(collectives.axis_index(self.axes), self.devices, per_page)

    def address(self, layout: CacheLayout, entries: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array]:
        """`CacheLayout.address` in this device's pools of entries int32 [R, ...], numbered through their sequences."""
        here = self.numbering(layout.page_tokens // ratio).number_here(entries) if self.axes else entries
        return layout.address(self.table, here, ratio)

    def fetch(
        self, pool: jax.Array, selected: jax.Array, layout: CacheLayout, ratio: int, held: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Main KV of this device's selections from all devices of the group, as pages that all layers behind can read.

        The entries themselves are fetched, or, where that would take more bytes, all pages of the rows, once for a KV
        source. Every device answers for all entries that a row asks for, but sends only those pages that it has.

        Args:
          pool: uint8 [P, rows, 4, 128] main KV of a ratio-m source, on this device.
          selected: int32 [B, T, K] entries, -1 unused.
          layout, ratio: of the cache; m.
          held: what this returned for the same source and step before, if it did.

        Returns:
          uint8 [p, rows, 4, 128]; int32 [B, T, K] where the entries lie in it, page * 128 + number inside, -1 unused.
        """
        held_here = self.table.shape[1] * layout.pages_per_logical(ratio) * PAGE_ENTRIES
        if selected.shape[1] * selected.shape[2] <= held_here:
            return fetch_entries(pool, selected, lambda e: self.address(layout, e, ratio), layout.main, self.axes)
        if held is None:
            held = fetch_pages(pool, jnp.maximum(layout.physical_pages(self.table, ratio), 0), self.axes)
        rows, max_pages = selected.shape[0], self.table.shape[1] * self.devices
        # Page j of a row is the (j // devices)th of those that came from device j % devices.
        row, number = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(max_pages, dtype=jnp.int32)
        table = row * max_pages + number % self.devices * self.table.shape[1] + number // self.devices
        return held, layout.physical_entry(table, selected, ratio)
