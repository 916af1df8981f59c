"""Top-k on Hopper: one launch, or one for the parts of long rows and one for what they kept (Mosaic GPU)."""

import jax
import jax.numpy as jnp

from pallas_kernels.compat import gpu_problem
from pallas_kernels.thread_kernel import run_threads
from pallas_kernels.topk import block_sizes
from pallas_kernels.topk.gpu_plan import Plan
from pallas_kernels.topk.gpu_program import Arrays, TopK


def problem(scores: jax.Array, k: int, *, lengths: jax.Array | None = None) -> str | None:
    """Why the kernel does not take these arguments of `ops.topk`; None if it does."""
    del lengths
    if (reason := gpu_problem()) is not None:
        return reason
    return block_sizes.problem(*scores.shape, k)


def topk(scores: jax.Array, k: int, *, lengths: jax.Array | None = None) -> jax.Array:
    """See `ops.topk`. The positions come in no particular order."""
    rows, width = scores.shape
    vector = 16 // scores.dtype.itemsize
    if width % vector:
        # rows must begin at multiples of 16 bytes
        scores = jnp.pad(scores, ((0, 0), (0, -width % vector)), constant_values=-jnp.inf)
    first, second = block_sizes.plans(rows, scores.shape[1], k, scores.dtype.itemsize)
    ids, values = _launch(first, scores, lengths, None)
    if second is None:
        return ids
    return _launch(second, values, None, ids)[0]


def _launch(plan: Plan, scores: jax.Array, lengths: jax.Array | None, mapping: jax.Array | None):
    """ids int32 [rows, splits / cluster * slots] and, if the plan asks for it, their scores float32."""
    from pallas_kernels.simt import Simt

    rows = scores.shape[0]
    shape = (rows, plan.splits // plan.cluster * plan.slots)
    inputs = [x for x in (scores, lengths, mapping) if x is not None]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32)]
    if plan.values:
        outputs.append(jax.ShapeDtypeStruct(shape, jnp.float32))

    def program(*refs):
        refs = list(refs)
        arrays = Arrays(
            scores=refs.pop(0),
            lengths=None if lengths is None else refs.pop(0),
            mapping=None if mapping is None else refs.pop(0),
            ids=refs.pop(0),
            values=refs.pop(0) if plan.values else None,
        )
        TopK(Simt(), plan, arrays, refs.pop(0)).run()

    out = run_threads(
        program, inputs, outputs, blocks=rows * plan.splits // plan.cluster, warpgroups=plan.threads // 128,
        shared_words=plan.shared_words, cluster=plan.cluster,
        name="topk_parts" if plan.splits > 1 else "topk_merge" if plan.mapped else "topk",
    )  # fmt: skip
    return out[0], out[1] if plan.values else None
