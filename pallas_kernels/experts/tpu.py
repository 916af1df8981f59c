"""The product of routed experts on packed FP4 weights as two Mosaic TPU kernels: gate and up, then down.

A grid step is a tile of rows of the weights and a block. Weights stay in HBM in their stored layout; the scales are taken
transposed, which is how XLA keeps an array whose last dimension fills no lanes, so that no stack is ever copied. Blocks
are the inner grid axis: while the expert stays the same its tile is neither copied nor dequantised again. The grid ends
behind the last used block.

Between the kernels lies the activation after its FP8 round trip, even channels in front of odd ones (`tpu_tiles`).
"""

import functools
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
_CHUNK = 512  # bytes of a row that are dequantised together
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
    def chunk(self) -> int:
        return max(c for c in range(LANES, _CHUNK + 1, LANES) if self.row_bytes % c == 0)

    @property
    def vmem_bytes(self) -> int:
        """Blocks and matrices twice, scratch, and the products in float32."""
        groups = -(-self.row_bytes // tiles.GROUP_BYTES // LANES) * LANES
        stored = self.matrices * self.tile * (self.row_bytes + groups)
        blocks = self.rows * (self.width * 2 + self.tile * 2 * self.matrices + LANES * 4)
        weights = self.matrices * self.tile * self.width * 2
        factors = self.tile * (groups * 2 + self.chunk * 4)
        spread = groups * self.row_bytes * 2
        products = self.rows * self.tile * self.matrices * 4 * 4 + self.rows * self.width * 8
        return 2 * (stored + blocks + spread) + weights + factors + products


def _plan(rows: int, matrices: int, out: int, width: int) -> _Plan:
    """The largest tile that fits, of at most 1,280 rows in all matrices or so."""
    kind = tpu_device_kind()
    form = "pairs" if kind is not None and any(name in kind for name in ("v6", "TPU7", "7x")) else "float32"
    plans = [
        _Plan(rows, matrices, out, width, tile, form)
        for tile in range(PAIRS, 1536 // matrices + 1, PAIRS)
        if out % tile == 0
    ]
    fitting = [plan for plan in plans if plan.vmem_bytes <= _VMEM_PLANNED]
    return fitting[-1] if fitting else plans[0]


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


def _product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """bfloat16 [rows, n] times [out, n] -> float32 [rows, out]."""
    return jax.lax.dot_general(x, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _inner_kernel(
    _, state_ref, x_ref, row_weight_ref, v1_ref, s1_ref, v3_ref, s3_ref, order_ref, split_ref, spread_ref,
    out_ref, weights, factors, spread_scales, *, limit: float, form: str,
):  # fmt: skip
    state = state_ref[pl.program_id(1)]

    @pl.when(state == _FRESH)
    def _():
        for matrix, (values, scales) in enumerate(((v1_ref, s1_ref), (v3_ref, s3_ref))):
            tiles.dequantize(
                values.at[0], scales.at[0], order_ref, spread_ref, weights.at[matrix], factors, spread_scales, form=form
            )

    @pl.when(state != _NOT)
    def _():
        x = tiles.split(x_ref[0], split_ref[...])
        row_weight = row_weight_ref[0][:, :1]
        halves = []
        for half in (0, 1):
            gate, up = (round_to_bf16_value(_product(x, weights[matrix, half])) for matrix in (0, 1))
            halves.append(round_to_bf16_value(swiglu(gate, up, limit) * row_weight))
        for half, value in enumerate(tiles.through_fp8(*halves)):
            out_ref[0, half] = value.astype(jnp.bfloat16)


def _outer_kernel(
    _, state_ref, x_ref, v2_ref, s2_ref, order_ref, join_ref, spread_ref, out_ref, weights, factors, spread_scales,
    *, form: str,
):  # fmt: skip
    state = state_ref[pl.program_id(1)]

    @pl.when(state == _FRESH)
    def _():
        tiles.dequantize(v2_ref.at[0], s2_ref.at[0], order_ref, spread_ref, weights, factors, spread_scales, form=form)

    @pl.when(state != _NOT)
    def _():
        x = jnp.concatenate([x_ref[0, 0], x_ref[0, 1]], axis=1)
        even, odd = (round_to_bf16_value(_product(x, weights[half])) for half in (0, 1))
        out_ref[0] = tiles.joined(even, odd, join_ref[...])


def _call(kernel, name: str, plan: _Plan, schedule, inputs, weights, matrix, out_block, out_shape, interpret: bool):
    """One kernel over (tiles of the weights' rows, used blocks).

    Args:
      inputs: (array, BlockSpec) in front of the weights.
      weights: of each matrix.
      matrix: [256, 256], brings rows of activations into or out of split order.
      out_block: BlockSpec of the result; out_shape: its shape, bfloat16.
    """
    owner, state, count = schedule
    num_experts, groups = weights[0][0].shape[0], plan.row_bytes // tiles.GROUP_BYTES
    size = plan.tile // tiles.ways(plan.form)

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
    order = tiles.split_matrix(tiles.ways(plan.form)).T
    for array in (order, matrix, tiles.spread_matrix(plan.row_bytes)):
        arrays.append(array)
        specs.append(pl.BlockSpec(array.shape, lambda t, b, *_: (0, 0)))
    blocks = state.shape[0]
    experts = min(num_experts, blocks)
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
                pltpu.VMEM((plan.matrices, 2, plan.tile // 2, plan.width)[plan.matrices == 1 :], jnp.bfloat16),
                pltpu.VMEM((tiles.ways(plan.form), size, groups), jnp.bfloat16),
                pltpu.VMEM((tiles.ways(plan.form), size, plan.chunk), tiles.scale_type(plan.form)),
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
    split = tiles.split_matrix()

    plan = _plan(rows, 2, f, d)
    on_lanes = jnp.broadcast_to(row_weight[..., None], (blocks, rows, LANES))
    inner = _call(
        functools.partial(_inner_kernel, limit=limit), "expert_inner", plan, schedule,
        [
            (x, pl.BlockSpec((1, rows, d), lambda t, b, *_: (b, 0, 0))),
            (on_lanes, pl.BlockSpec((1, rows, LANES), lambda t, b, *_: (b, 0, 0))),
        ],
        (w1, w3), split, pl.BlockSpec((1, 2, rows, plan.tile // 2), lambda t, b, *_: (b, 0, 0, t)),
        (blocks, 2, rows, f // 2), interpret,
    )  # fmt: skip
    plan = _plan(rows, 1, d, f)
    return _call(
        _outer_kernel, "expert_outer", plan, schedule,
        [(inner, pl.BlockSpec((1, 2, rows, f // 2), lambda t, b, *_: (b, 0, 0, 0)))],
        (w2,), split.T, pl.BlockSpec((1, rows, plan.tile), lambda t, b, *_: (b, 0, t)),
        (blocks, rows, d), interpret,
    )  # fmt: skip
