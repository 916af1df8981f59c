"""Copies of hot experts on more devices than one.

Without a placement every expert lies on one device, and the device of a hot expert works while the others wait. A
placement gives every device some extra slots with copies of other devices' experts; a row goes to one of its expert's
copies, and gets the same bits from each. `dsv41.models.Model.with_expert_copies` makes a model that has them.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from dsv41.config import DSV41Error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Which experts lie on which device: E / devices of its own, in order, and the copies in its extra slots.

    Attributes:
      experts: E.
      extra: for each device along `ShardingRules.experts` the experts of its extra slots; as many on each.

    Raises:
      DSV41Error: devices do not divide the experts, have different numbers of extra slots, or one would hold an expert
        that does not exist or that it has already; names the device.
    """

    experts: int
    extra: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not self.devices or self.experts % self.devices:
            raise DSV41Error(f"expert placement: {self.devices} devices do not divide {self.experts} experts")
        for device, copies in enumerate(self.extra):
            if len(copies) != len(self.extra[0]):
                raise DSV41Error(
                    f"expert placement: device {device} has {len(copies)} extra slots, device 0 {len(self.extra[0])}"
                )
            held = self.held(device)
            if len(set(held)) != len(held) or not set(held) <= set(range(self.experts)):
                raise DSV41Error(f"expert placement: device {device} cannot hold copies of {copies} beside its own")

    @property
    def devices(self) -> int:
        return len(self.extra)

    @property
    def own(self) -> int:
        """Experts of a device without copies."""
        return self.experts // self.devices

    @property
    def slots(self) -> int:
        """Leading axis of a device's stacks."""
        return self.own + len(self.extra[0])

    def held(self, device: int) -> tuple[int, ...]:
        """The expert in each slot of a device."""
        return (*range(device * self.own, (device + 1) * self.own), *self.extra[device])

    @functools.cached_property
    def copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Device and slot of each copy of each expert, int32 [E, most copies], and how many there are, int32 [E]."""
        places: list[list[tuple[int, int]]] = [[(e // self.own, e % self.own)] for e in range(self.experts)]
        for device, extra in enumerate(self.extra):
            for slot, e in enumerate(extra, self.own):
                places[e].append((device, slot))
        count = np.array([len(p) for p in places], np.int32)
        table = np.zeros((self.experts, count.max(), 2), np.int32)
        for e, p in enumerate(places):
            table[e, : len(p)] = p
        return table[..., 0], table[..., 1], count

    def device_loads(self, loads: np.ndarray) -> np.ndarray:
        """float64 [devices]: rows of each device if expert e has loads[e] rows, shared equally by its copies."""
        device, _, count = self.copies
        there = np.arange(device.shape[1]) < count[:, None]
        share = np.broadcast_to((np.asarray(loads, np.float64) / count)[:, None], device.shape)
        return np.bincount(device[there], weights=share[there], minlength=self.devices)


def plan_copies(loads: np.ndarray, *, devices: int, extra: int) -> ExpertPlacement:
    """A placement that spreads measured loads: time and again, of the device with the most rows, the expert with the
    most gets a copy on the device with the fewest.

    Args:
      loads: rows by expert, [E], not negative.
      devices: along `ShardingRules.experts`.
      extra: slots to fill on each device.

    Raises:
      DSV41Error: loads are negative or not finite; the devices do not divide the experts; a device would hold more
        slots than there are experts.
    """
    loads = np.asarray(loads, np.float64)
    if loads.ndim != 1 or not np.isfinite(loads).all() or (loads < 0).any():
        raise DSV41Error(f"expert placement: loads must be finite, not negative and one an expert, got {loads.shape}")
    placement = ExpertPlacement(experts=len(loads), extra=((),) * devices)
    if extra < 0 or placement.own + extra > len(loads):
        raise DSV41Error(f"expert placement: {placement.own} + {extra} slots a device for {len(loads)} experts")
    held = [list(placement.held(d)) for d in range(devices)]
    copies = np.ones(len(loads))
    for _ in range(devices * extra):
        rows = np.array([(loads[h] / copies[h]).sum() for h in held])
        free = [d for d in np.argsort(rows, kind="stable") if len(held[d]) < placement.own + extra]
        full = np.argsort(-rows, kind="stable")
        hot = (e for d in full for e in sorted(held[d], key=lambda e: -loads[e] / copies[e]))
        target, e = next((t, e) for e in hot for t in free if e not in held[t])
        held[target].append(e)
        copies[e] += 1
    return ExpertPlacement(experts=len(loads), extra=tuple(tuple(h[placement.own :]) for h in held))
