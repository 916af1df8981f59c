"""Which device's part of the page pools each page of a sequence must lie in: host bookkeeping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from dsv41.config import DSV41Error
from dsv41.sharding import ShardingRules, devices_along


@dataclasses.dataclass(frozen=True)
class PageOwners:
    """Slots and pools are spread in equal runs over all devices, group by group.

    Logical page j of a slot lies on device j modulo `shards` of the slot's group, at any place of that device's part of
    the pools.

    Attributes:
      groups: groups of devices.
      shards: devices of a group.
    """

    groups: int = 1
    shards: int = 1

    @classmethod
    def of(cls, rules: ShardingRules, sizes: Mapping[str, int]) -> PageOwners:
        """By rules and the sizes of the mesh axes."""
        devices, shards = (devices_along(sizes, axes) for axes in (rules.batch, rules.pages))
        return cls(devices // shards, shards)

    @property
    def devices(self) -> int:
        return self.groups * self.shards

    def owner(self, slot: np.ndarray, number: np.ndarray, num_slots: int) -> np.ndarray:
        """The device of page `number` of a slot; also which part of a `PagePool` with `devices` parts to ask."""
        return slot * self.groups // num_slots * self.shards + number % self.shards

    def check_sizes(self, num_slots: int, num_pages: int) -> None:
        """
        Raises:
          DSV41Error: the devices do not divide the slots or the pages.
        """
        for name, value in (("num_slots", num_slots), ("num_pages", num_pages)):
            if value % self.devices:
                raise DSV41Error(f"cache: {name}={value} cannot be spread equally over {self.devices} devices")

    def check(self, page_table: np.ndarray, num_pages: int) -> None:
        """Whether every page lies where it must, and in the pools at all; -1 is no page.

        Args:
          page_table: int32 [slots, max_pages].
          num_pages: logical pages of the pools.

        Raises:
          DSV41Error: one does not; names slot, number and page.
        """
        num_slots, max_pages = page_table.shape
        self.check_sizes(num_slots, num_pages)
        if len(outside := np.argwhere((page_table < -1) | (page_table >= num_pages))):
            slot, j = outside[0]
            raise DSV41Error(f"page table: page {j} of slot {slot} is {page_table[slot, j]}, outside [0, {num_pages})")
        wanted = self.owner(np.arange(num_slots)[:, None], np.arange(max_pages), num_slots)
        actual = page_table // (num_pages // self.devices)
        if len(wrong := np.argwhere((page_table >= 0) & (actual != wanted))):
            slot, j = wrong[0]
            raise DSV41Error(
                f"page table: page {j} of slot {slot} is {page_table[slot, j]}, which lies on device {actual[slot, j]} "
                f"of {self.devices}; it must lie on device {wanted[slot, j]}"
            )

    def pages_for_all(self, num_slots: int, max_pages: int) -> int:
        """Logical pages of pools that can hold `max_pages` of every slot."""
        return num_slots // self.groups * -(-max_pages // self.shards) * self.devices

    def table_of_all(self, num_slots: int, max_pages: int) -> np.ndarray:
        """int32 [slots, max_pages]: every slot with all of its pages, in pools of `pages_for_all`."""
        slot, number = np.arange(num_slots)[:, None], np.arange(max_pages)
        per_slot, slots = -(-max_pages // self.shards), num_slots // self.groups
        inside = slot % slots * per_slot + number // self.shards
        return (self.owner(slot, number, num_slots) * slots * per_slot + inside).astype(np.int32)


ONE_DEVICE = PageOwners()
"""All pages on one device."""
