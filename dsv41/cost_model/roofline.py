"""How long a step takes at least, by the data sheet of the chip. An estimate: nothing of it was measured."""

from __future__ import annotations

import dataclasses

from dsv41.cost_model.chips import Chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds that a device's memory, products and links take, each by itself at its published peak.

    Attributes:
      memory: bytes over HBM bandwidth.
      products: FLOPs over the peak of bfloat16 products.
      links: bytes sent over the bandwidth of all links together, latencies left out.
    """

    memory: float
    products: float
    links: float

    @property
    def overlapped(self) -> float:
        """If all three go on at one time: no step is faster."""
        return max(self.memory, self.products, self.links)

    @property
    def in_turn(self) -> float:
        """If they take turns."""
        return self.memory + self.products + self.links


def roofline(chip: Chip, *, bytes: float, flops: float, sent_bytes: float) -> Roofline:
    """Of a device's share of a step."""
    return Roofline(
        memory=bytes / chip.hbm_bandwidth, products=flops / chip.flops, links=sent_bytes / chip.link_bandwidth
    )
