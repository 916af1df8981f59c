"""The product of routed experts on packed FP4 weights as two Mosaic TPU kernels: gate and up, then down.

A grid step is a tile of rows of the weights and a block. Weights stay in HBM in their stored layout; the scales are
taken transposed, which is how XLA keeps an array whose last dimension fills no lanes, so that no stack is ever copied.
Blocks are the inner grid axis: while the expert stays the same its tile is neither copied nor dequantised again. The
grid ends behind the last used block.

Between the kernels lies the activation after its FP8 round trip, in split order (`tpu_tiles`).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compat import tpu_device_kind
from pallas_kernels.experts import tpu_tiles as tiles
from pallas_kernels.experts.ref import Weight, swiglu
from pallas_kernels.experts.tpu_tiles import LANES, PAIRS
from pallas_kernels.quantize.tpu_codes import round_to_bf16_value

_ROWS = 8
# Leaves the compiler room in the 64 MiB of the smallest VMEM.
_VMEM_LIMIT = 48 << 20
_VMEM_PLANNED = 40 << 20
_MOST_ROWS = 1536  # of the weights a step
_TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")  # kinds of devices that are two cores
_NOT, _USED, _FRESH = 0, 1, 2  # what a block is: nobody's, of the expert before it, of another one


class _Plan(NamedTuple):
    """Sizes of one kernel's steps.

    Attributes:
      rows: of a block.
      matrices: 2 for gate and up, 1 for down.
      out, width: of a matrix.
      tile: its rows a step.
      form: how codes are decoded, one of `tiles.FORMS`.
    """

    rows: int
    matrices: int
    out: int
    width: int
    tile: int
    form: str

    @property
    def row_bytes(self) -> int:
        return self.width // 2

    @property
    def scales_shape(self) -> tuple[int, int]:
        return tiles.scales_shape(self.tile, self.row_bytes)

    @property
    def vmem_bytes(self) -> int:
        """Blocks and matrices twice, scratch, and the products in float32."""
        stored = self.matrices * self.tile * (self.row_bytes + self.scales_shape[1])
        blocks = self.rows * (self.width * 2 + self.tile * 2 * self.matrices + LANES * 4)
        weights = self.matrices * self.tile * self.width * 2
        products = self.rows * self.tile * self.matrices * 4 * 4 + self.rows * self.width * 8
        return 2 * (stored + blocks) + weights + 4 * math.prod(self.scales_shape) + products


def _plan(rows: int, matrices: int, out: int, width: int) -> _Plan:
    """The tile that fits, of at most `_MOST_ROWS` rows of all matrices together, with the least work for a core."""
    kind = tpu_device_kind() or ""
    form = "pairs" if any(name in kind for name in ("v6", "TPU7", "7x")) else "float32"
    cores = 2 if kind in _TWO_CORES else 1
    plans = [
        _Plan(rows, matrices, out, width, tile, form)
        for tile in range(PAIRS, max(PAIRS, _MOST_ROWS // matrices) + 1, PAIRS)
        if out % tile == 0
    ]
    fitting = [plan for plan in plans if plan.vmem_bytes <= _VMEM_PLANNED] or plans[:1]
    # Tiles are divided among the cores; of equal shares the larger tile has fewer steps.
    return min(fitting, key=lambda plan: (pl.cdiv(out // plan.tile, cores) * plan.tile, -plan.tile))


def problem(x: jax.Array, w1: Weight, w2: Weight) -> str | None:
    """What keeps the kernels from taking these arrays (shapes of `ops.expert_blocks`); None if nothing does."""
    rows, d = x.shape[1:]
    f = w1[0].shape[1]
    if w1[0].dtype != jnp.uint8:
        return f"the kernel takes packed FP4 weights, not {w1[0].dtype}"
    if d % PAIRS or f % PAIRS:
        return f"D and F must be multiples of {PAIRS}, got {d} and {f}"
    if rows % _ROWS:
        return f"blocks must have a multiple of {_ROWS} rows, got {rows}"
    for plan in (_plan(rows, 2, f, d), _plan(rows, 1, d, f)):
        if plan.vmem_bytes > _VMEM_PLANNED:
            return f"blocks of {rows} rows by {d} and {f} channels need {plan.vmem_bytes >> 20} MiB of VMEM"
    return None


def _schedule(block_expert: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The expert whose weights lie in VMEM at a block, int32 [blocks]; what the block is, int32 [blocks]; and how many
    blocks there are to the last used one, at least 1."""
    number = jnp.arange(block_expert.shape[0], dtype=jnp.int32)
    used = (block_expert >= 0) & (block_expert < num_experts)
    latest = jax.lax.cummax(jnp.where(used, number, -1))
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), latest[:-1]])
    fresh = (before < 0) | (block_expert != block_expert[jnp.maximum(before, 0)])
    # Unused blocks stay with the tile that is there; those in front wait with the first one.
    owner = block_expert[jnp.where(latest < 0, jnp.argmax(used), latest)]
    state = jnp.where(used, jnp.where(fresh, _FRESH, _USED), _NOT)
    return jnp.clip(owner, 0, num_experts - 1), state.astype(jnp.int32), jnp.maximum(latest[-1] + 1, 1)


def _product(x: jax.Array, words: jax.Array) -> jax.Array:
    """bfloat16 [rows, n] times words of two bfloat16 rows [out / 2, n] -> float32 [rows, out], rounded to bfloat16."""
    weights = pltpu.bitcast(words, jnp.bfloat16)
    y = jax.lax.dot_general(x, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return round_to_bf16_value(y * tiles.UNIT)


def _inner_kernel(
    _, state_ref, x_ref, row_weight_ref, v1_ref, s1_ref, v3_ref, s3_ref, split_ref, join_ref, out_ref, weights, scales,
    *, limit: float, form: str,
):  # fmt: skip
    state = state_ref[pl.program_id(1)]

    @pl.when(state == _FRESH)
    def _():
        for matrix, (values, codes) in enumerate(((v1_ref, s1_ref), (v3_ref, s3_ref))):
            tiles.dequantize(values.at[0], codes.at[0], join_ref, weights.at[matrix], scales, form=form)

    @pl.when(state != _NOT)
    def _():
        x = tiles.reordered(x_ref[0], split_ref[...])
        gate, up = (_product(x, weights[matrix]) for matrix in (0, 1))
        inner = round_to_bf16_value(swiglu(gate, up, limit) * row_weight_ref[0][:, :1])
        out_ref[0] = tiles.through_fp8(inner).astype(jnp.bfloat16)


def _outer_kernel(_, state_ref, x_ref, v2_ref, s2_ref, __, join_ref, out_ref, weights, scales, *, form: str):
    state = state_ref[pl.program_id(1)]

    @pl.when(state == _FRESH)
    def _():
        tiles.dequantize(v2_ref.at[0], s2_ref.at[0], join_ref, weights.at[0], scales, form=form)

    @pl.when(state != _NOT)
    def _():
        out_ref[0] = tiles.reordered(_product(x_ref[0], weights[0]), join_ref[...])


def _call(kernel, name: str, plan: _Plan, schedule, inputs, weights, out_block, out_shape, interpret: bool):
    """One kernel over (tiles of the weights' rows, used blocks).

    Args:
      inputs: (array, BlockSpec) in front of the weights.
      weights: of each matrix.
      out_block: BlockSpec of the result; out_shape: its shape, bfloat16.
    """
    owner, state, count = schedule
    groups = plan.row_bytes // tiles.GROUP_BYTES

    def stored(x: jax.Array) -> jax.Array:
        # Small stacks would else be staged in VMEM whole.
        return x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM)

    arrays, specs = [list(part) for part in zip(*inputs)]
    for values, scales in weights:
        arrays += [stored(values), stored(jnp.swapaxes(scales, 1, 2))]
        specs += [
            pl.BlockSpec((1, plan.tile, plan.row_bytes), lambda t, b, owner, _: (owner[b], t, 0)),
            pl.BlockSpec((1, groups, plan.tile), lambda t, b, owner, _: (owner[b], 0, t)),
        ]
    split = tiles.split_matrix()
    arrays += [split, split.T]
    specs += [pl.BlockSpec(split.shape, lambda t, b, *_: (0, 0))] * 2
    blocks = state.shape[0]
    experts = min(weights[0][0].shape[0], blocks)
    values = plan.matrices * plan.out * plan.width
    return pl.pallas_call(
        functools.partial(kernel, form=plan.form),
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.out // plan.tile, count),
            in_specs=specs,
            out_specs=out_block,
            scratch_shapes=[
                pltpu.VMEM((plan.matrices, plan.tile // 2, plan.width), jnp.int32),
                pltpu.VMEM(plan.scales_shape, jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * blocks * plan.rows * values,
            transcendentals=blocks * plan.rows * plan.out * (plan.matrices - 1),
            bytes_accessed=experts * values * 17 // 32
            + 2 * blocks * plan.rows * (plan.width * (plan.out // plan.tile) + plan.out),
        ),
        interpret=interpret,
    )(owner, state, *arrays)


def expert_blocks(
    x: jax.Array,
    row_weight: jax.Array,
    block_expert: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    interpret: bool = False,
) -> jax.Array:
    """As `ops.expert_blocks`; `interpret` runs it on any backend, slowly.

    A NaN of a weight reaches the 256 channels around its own.

    Raises:
      ValueError: `problem` has an answer for these arrays.
    """
    if (why := problem(x, w1, w2)) is not None:
        raise ValueError(f"expert_blocks: {why}")
    blocks, rows, d = x.shape
    num_experts, f = w1[0].shape[:2]
    schedule = _schedule(block_expert, num_experts)
    plan = _plan(rows, 2, f, d)
    on_lanes = jnp.broadcast_to(row_weight[..., None], (blocks, rows, LANES))
    inner = _call(
        functools.partial(_inner_kernel, limit=limit), "expert_inner", plan, schedule,
        [
            (x, pl.BlockSpec((1, rows, d), lambda t, b, *_: (b, 0, 0))),
            (on_lanes, pl.BlockSpec((1, rows, LANES), lambda t, b, *_: (b, 0, 0))),
        ],
        (w1, w3), pl.BlockSpec((1, rows, plan.tile), lambda t, b, *_: (b, 0, t)),
        (blocks, rows, f), interpret,
    )  # fmt: skip
    plan = _plan(rows, 1, d, f)
    return _call(
        _outer_kernel, "expert_outer", plan, schedule,
        [(inner, pl.BlockSpec((1, rows, f), lambda t, b, *_: (b, 0, 0)))],
        (w2,), pl.BlockSpec((1, rows, plan.tile), lambda t, b, *_: (b, 0, t)),
        (blocks, rows, d), interpret,
    )  # fmt: skip
