"""Launches GPU kernels that are written for single threads (`pallas_kernels.simt`)."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


def run_threads(
    program: Callable[..., None],
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    blocks: int,
    warpgroups: int,
    shared_words: int,
    name: str | None = None,
    cluster: int = 1,
) -> list[jax.Array]:
    """Runs `program(*arrays, *outputs, shared)`, which is given references, once in every thread.

    Args:
      program: emits the code of a thread.
      arrays: it reads.
      outputs: it writes.
      blocks: thread blocks; with `cluster` above 1, groups of so many.
      warpgroups: of 128 threads, in a thread block.
      shared_words: of 32 bits, of shared memory.
      name: in traces.
      cluster: thread blocks of a cluster.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def run(_, *refs):
            program(*refs)

        run(*refs)

    if name is not None:
        body.__name__ = name
    clusters = {"cluster": (cluster,), "cluster_names": ("part",)} if cluster > 1 else {}
    kernel = plgpu.kernel(
        body,
        out_type=list(outputs),
        grid=(blocks,),
        grid_names=("block",),
        **clusters,
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((shared_words,), jnp.uint32)],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return kernel(*arrays)
