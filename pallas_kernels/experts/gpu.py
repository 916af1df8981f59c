"""The product of routed experts on packed FP4 weights for Hopper (Mosaic GPU): a kernel for gate and up, one for down.

Blocks of 8 rows take `gpu_few`, which is bound by reading the weights, larger ones `gpu_many`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.compat import gpu_problem
from pallas_kernels.experts import block_sizes
from pallas_kernels.experts.ref import Weight
from pallas_kernels.thread_kernel import run_threads


def problem(x: jax.Array, w1: Weight, w2: Weight) -> str | None:
    """What keeps the kernels from taking these arrays (shapes of `ops.expert_blocks`); None if nothing does."""
    if (reason := gpu_problem()) is not None:
        return reason
    return block_sizes.problem(x, w1, w2)


def expert_blocks(
    x: jax.Array,
    row_weight: jax.Array,
    block_expert: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
) -> jax.Array:
    """As `ops.expert_blocks`. Blocks of 8 rows are rounded to FP8 in groups of 32: rows that went through it stay.

    Weights' scales of 2^-127 count as 0.

    Raises:
      ValueError: `problem` has an answer for these arrays.
    """
    if (why := problem(x, w1, w2)) is not None:
        raise ValueError(f"expert_blocks: {why}")
    blocks, rows, d = x.shape
    experts, f = w1[0].shape[:2]
    inner, outer = block_sizes.plans(blocks, rows, experts, d, f)
    y = _run(inner, x, block_expert, (*w1, *w3), row_weight, limit)
    return _run(outer, y, block_expert, w2, None, limit)


def _run(plan: block_sizes.FewPlan | block_sizes.ManyPlan, x, block_expert, weights, row_weight, limit: float):
    """bfloat16 [blocks, rows, plan.out]; weights: values and scales of gate, then of up, or those of down."""
    from pallas_kernels.experts.gpu_blocks import Half
    from pallas_kernels.experts.gpu_few import FewRows
    from pallas_kernels.experts.gpu_many import ManyRows
    from pallas_kernels.experts.gpu_program import Program

    kind = FewRows if isinstance(plan, block_sizes.FewPlan) else ManyRows

    def program(x, block_expert, *rest):
        if plan.gated:
            gate, gate_scales, up, up_scales, row_weight, out, shared = rest
            halves = Half(gate, gate_scales, 0), Half(up, up_scales, 0)
        else:
            (values, scales, out, shared), row_weight = rest, None
            halves = Half(values, scales, 0), Half(values, scales, block_sizes.TILE_ROWS // 2)
        kind(Program(), plan, x, block_expert, halves, row_weight, out, shared, limit).run()

    arrays = (x, block_expert, *weights, *([row_weight] if plan.gated else []))
    out = jax.ShapeDtypeStruct((plan.blocks, plan.rows, plan.out), jnp.bfloat16)
    return run_threads(
        program, arrays, [out], blocks=plan.grid, warpgroups=plan.warpgroups,
        shared_words=-(-plan.shared_bytes // 4), name="expert_inner" if plan.gated else "expert_outer",
    )[0]  # fmt: skip
