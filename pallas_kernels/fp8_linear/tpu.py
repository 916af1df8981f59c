"""The FP8 product as a Mosaic TPU kernel: weights are read once, as bytes, and dequantised in VMEM.

XLA makes an array of scales as large as the weight in float32, then the bfloat16 weight, and reads both again: up to 16
times the bytes. Here a grid step is a tile of the weight's rows and a tile of x. While the weight's tile stays, as it
does for all tiles of x, it is neither copied nor dequantised again. Scales come to lanes by a product with ones and
zeros, which is exact, and to sublanes by a broadcast.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize.ref import WEIGHT_BLOCK
from pallas_kernels.tpu_formats import e8m0

_LANES = 128
_CHUNK = _LANES * WEIGHT_BLOCK  # channels whose scales fill the lanes of a register
# Leaves the compiler room in the 64 MiB of the smallest VMEM.
_VMEM_LIMIT = 48 << 20
_VMEM_PLANNED = 32 << 20  # the compiler takes up to 1.4 times as much


class _Plan(NamedTuple):
    """Sizes of a grid step.

    Attributes:
      rows: of x.
      tile: rows of the weight.
    """

    rows: int
    tile: int

    def x_reads(self, rows: int, out: int) -> int:
        """How often x is read for a group's `out` rows of the weight: it stays in VMEM only whole."""
        return 1 if rows <= self.rows else out // self.tile

    def vmem_bytes(self, width: int) -> int:
        """Blocks twice, scratch, and a piece in float32."""
        stored, x, out = self.tile * width, self.rows * width * 2, self.rows * self.tile * 4
        spread = min(width, _CHUNK) ** 2 // WEIGHT_BLOCK * 2
        scales = self.tile // WEIGHT_BLOCK * width * 4
        return 2 * (stored + x + out + spread) + self.tile * width * 2 + 2 * scales + out


def _plan(rows: int, out: int, width: int) -> _Plan | None:
    """Tiles that fit and read x least often, then the largest; None: none fits."""
    most = -(-rows // 16) * 16
    plans = [
        _Plan(at_once, tile)
        for at_once in (rows, *(n for n in (1024, 512, 256, 128, 64, 32, 16) if n < most))
        for tile in (512, 256, _LANES)
        if out % tile == 0
    ]
    fitting = [plan for plan in plans if plan.vmem_bytes(width) <= _VMEM_PLANNED]
    return min(fitting, key=lambda plan: (plan.x_reads(rows, out), -plan.rows, -plan.tile), default=None)


def problem(x: jax.Array, values: jax.Array) -> str | None:
    """What keeps the kernel from taking these arrays (shapes of `ops.fp8_linear`); None if nothing does."""
    rows, groups, width = x.shape
    out = values.shape[0] // groups
    if width % _LANES or out % _LANES:
        return f"both sizes of a group's weight must be multiples of {_LANES}, got {out} and {width}"
    if _plan(rows, out, width) is None:
        return f"rows of {width} channels do not fit VMEM"
    return None


def _kernel(x_ref, values_ref, scales_ref, spread_ref, out_ref, weight):
    width = weight.shape[1]

    @pl.when(pl.program_id(1) == 0)
    def _():
        scales = e8m0(scales_ref[0].astype(jnp.int32)).astype(jnp.bfloat16)
        for first in range(0, width, _CHUNK):
            channels = min(_CHUNK, width - first)
            groups = channels // WEIGHT_BLOCK
            here = scales[:, first // WEIGHT_BLOCK : first // WEIGHT_BLOCK + groups]
            spread = spread_ref[:groups, :channels]
            factors = jnp.dot(here, spread, preferred_element_type=jnp.float32)
            for r in range(factors.shape[0]):
                rows = slice(r * WEIGHT_BLOCK, (r + 1) * WEIGHT_BLOCK)
                stored = values_ref[rows, first : first + channels].astype(jnp.float32)
                weight[rows, first : first + channels] = (stored * factors[r : r + 1]).astype(jnp.bfloat16)

    out_ref[...] = jax.lax.dot_general(
        x_ref[...], weight[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def fp8_linear(x: jax.Array, values: jax.Array, scales: jax.Array, *, interpret: bool = False) -> jax.Array:
    """As `ops.fp8_linear`; `interpret` runs it on any backend, slowly.

    A scale of 2^-127 counts as 0, as in all arithmetic of a TPU.

    Raises:
      ValueError: `problem` has an answer for these arrays.
    """
    if (why := problem(x, values)) is not None:
        raise ValueError(f"fp8_linear: {why}")
    rows, groups, width = x.shape
    out = values.shape[0]
    plan = _plan(rows, out // groups, width)
    per_group = out // groups // plan.tile
    chunk = min(width, _CHUNK)
    spread = jnp.arange(chunk) // WEIGHT_BLOCK == jnp.arange(chunk // WEIGHT_BLOCK)[:, None]
    by_tile = scales.reshape(out // plan.tile, plan.tile // WEIGHT_BLOCK, width // WEIGHT_BLOCK)
    x_reads = groups * plan.x_reads(rows, out // groups)
    return pl.pallas_call(
        _kernel,
        name="fp8_linear",
        grid=(out // plan.tile, pl.cdiv(rows, plan.rows)),
        in_specs=[
            pl.BlockSpec((plan.rows, width), lambda t, r: (r, t // per_group)),
            pl.BlockSpec((plan.tile, width), lambda t, r: (t, 0)),
            pl.BlockSpec((1, *by_tile.shape[1:]), lambda t, r: (t, 0, 0)),
            pl.BlockSpec(spread.shape, lambda t, r: (0, 0)),
        ],
        out_specs=pl.BlockSpec((plan.rows, plan.tile), lambda t, r: (r, t)),
        out_shape=jax.ShapeDtypeStruct((rows, out), jnp.float32),
        scratch_shapes=[pltpu.VMEM((plan.tile, width), jnp.bfloat16)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * out * width,
            transcendentals=0,
            bytes_accessed=out * width + rows * width * 2 * x_reads + rows * out * 4,
        ),
        interpret=interpret,
    )(x.reshape(rows, groups * width), values, by_tile, spread.astype(jnp.bfloat16))
