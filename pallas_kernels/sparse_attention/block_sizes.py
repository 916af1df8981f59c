"""How sparse attention is cut up on a GPU: splits of a query's entries, and what the warpgroups of a CTA do."""

import dataclasses
from collections.abc import Sequence

import jax

from pallas_kernels.page_layout import WindowLayout
from pallas_kernels.tuning import knob

_PROCESSORS = 132  # of an H100 or H200
# Microseconds of a block of 64 entries, of the combining kernel, and of it for each split of each query, on an H200.
_BLOCK_US, _COMBINE_US, _COMBINE_SPLIT_US = 2.8, 1.5, 0.021
# Registers a thread of the softmax, the value and the gathering warpgroups, by the number of the latter and by whether
# the softmax warpgroup has a quarter of the value columns or a half. All together may have 504 a lane of the
# warpgroups when there are three of them, and 512 when there are four: one more hangs the device.
_REGISTERS = {
    (1, False): (200, 160, 144),
    (1, True): (144, 240, 120),
    (2, False): (208, 160, 72),
    (2, True): (144, 224, 72),
}


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One way to run the kernel.

    Attributes:
      splits: items that share the entries of a query.
      left_columns: value columns of the warpgroup that also computes the softmax; a multiple of 64.
      gatherers: warpgroups that gather, 1 or 2.
      group: units (16 bytes a thread) that are copied and dequantised together.
      registers: a thread of the softmax, the value and the gathering warpgroups.
      ctas: CTAs at most; each takes several items in turn where there are more.
    """

    splits: int
    left_columns: int
    gatherers: int
    group: int
    registers: tuple[int, int, int]
    ctas: int = _PROCESSORS


def tuning(width: int, *, splits: int, quarter: bool, gatherers: int, ctas: int = _PROCESSORS) -> Tuning:
    """What follows from the few free choices, see `Tuning`; `quarter` only where H is 512."""
    left = {64: 64, 128: 64, 256: 128, 512: 128 if quarter else 256}[width]
    group = 2 if width == 512 and (gatherers == 1 or splits == 1) else 1
    registers = _REGISTERS[gatherers, quarter and width == 512]
    return Tuning(splits=splits, left_columns=left, gatherers=gatherers, group=group, registers=registers, ctas=ctas)


def choose(*, queries: int, blocks: int, width: int) -> Tuning:
    """Tuned, or by heuristic: no more items than processors, and as many splits as pay for combining them.

    Args:
      queries: times groups of 64 heads.
      blocks: of 64 entries, of a query.
      width: H, 64, 128, 256 or 512.
    """
    key = _key(queries, blocks, width)

    def cost(splits: int) -> float:
        combining = _COMBINE_US + _COMBINE_SPLIT_US * queries * splits if splits > 1 else 0.0
        return -(-blocks // splits) * _BLOCK_US + combining

    splits = min(range(1, max(1, min(blocks, _PROCESSORS // queries)) + 1), key=cost)
    splits = min(knob("sparse_attention", key, "splits", splits), blocks)
    return tuning(
        width,
        splits=splits,
        quarter=bool(knob("sparse_attention", key, "quarter", 0)),
        gatherers=knob("sparse_attention", key, "gatherers", 2),
    )


def knobs(
    q: jax.ShapeDtypeStruct,
    window: jax.ShapeDtypeStruct,
    slot: jax.ShapeDtypeStruct,
    window_index: jax.ShapeDtypeStruct,
    pool: jax.ShapeDtypeStruct | None,
    selected: jax.ShapeDtypeStruct | None,
    sink: jax.ShapeDtypeStruct,
    rope: jax.ShapeDtypeStruct | None,
    scale: float,
    window_layout: WindowLayout,
) -> tuple[str, dict[str, Sequence[int]]]:
    """What the tuner may vary for these arguments of `ops.sparse_attention`, see `pallas_kernels.tuning`."""
    del window, slot, pool, sink, rope, scale, window_layout
    b, t, n, width = q.shape
    queries = b * t * -(-n // 64)
    blocks = -(-window_index.shape[-1] // 64) + (0 if selected is None else -(-selected.shape[-1] // 64))
    splits = sorted(
        {-(-blocks // share) for share in range(1, blocks + 1) if queries * -(-blocks // share) <= 264} | {1}
    )
    choices: dict[str, Sequence[int]] = {"splits": splits, "gatherers": (1, 2)}
    if width == 512:
        choices["quarter"] = (0, 1)
    return _key(queries, blocks, width), choices


def _key(queries: int, blocks: int, width: int) -> str:
    return f"{queries}q {blocks}x64 h{width}"
