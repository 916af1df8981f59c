"""What TPU chips can do, by their data sheets.

Peak bfloat16 FLOPs, HBM bandwidth and inter-chip bandwidth are the vendor's published figures per chip (data sheet; the
published inter-chip figure counts both directions, half of it is taken here), divided by the devices that JAX shows for
a chip. HBM is what the compiler of libtpu 0.0.48 lets a program use. Nothing here was measured on a TPU.
"""

from __future__ import annotations

import dataclasses

from dsv41.config import DSV41Error

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device as JAX counts them.

    Attributes:
      name: the first part of a topology's name, such as "v6e".
      devices: of a chip.
      hbm_bytes: a program may use.
      hbm_bandwidth: bytes a second.
      flops: of bfloat16 products, a second.
      link_bandwidth: bytes a second that leave a device over the interconnect, all links together.
    """

    name: str
    devices: int
    hbm_bytes: int
    hbm_bandwidth: float
    flops: float
    link_bandwidth: float


def _chip(name: str, devices: int, hbm_gib: float, gb_per_s: float, tflops: float, links_gb_per_s: float) -> Chip:
    return Chip(
        name=name,
        devices=devices,
        hbm_bytes=int(hbm_gib * GIB),
        hbm_bandwidth=gb_per_s * 1e9 / devices,
        flops=tflops * 1e12 / devices,
        link_bandwidth=links_gb_per_s * 1e9 / 2 / devices,
    )


_CHIPS = {
    chip.name: chip
    for chip in (
        _chip("v5e", 1, 15.75, 819, 197, 400),
        _chip("v5p", 1, 95.73, 2765, 459, 1200),
        _chip("v6e", 1, 31.24, 1638, 918, 800),
        _chip("tpu7x", 2, 94.74, 7380, 2307, 1200),
    )
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as "v6e:8x8".

    Raises:
      DSV41Error: nothing is known of such a chip; lists those that are known.
    """
    name = topology.partition(":")[0]
    if name not in _CHIPS:
        raise DSV41Error(f"topology {topology!r}: data sheets are known of {', '.join(_CHIPS)} only")
    return _CHIPS[name]
