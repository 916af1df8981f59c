"""Entry point of the routed experts' product."""

import jax
import jax.numpy as jnp

from pallas_kernels.array_checks import expect
from pallas_kernels.dispatch import function
from pallas_kernels.experts.ref import Weight
from pallas_kernels.quantize.ref import MXFP4_GROUP, WEIGHT_BLOCK

__all__ = ["Weight", "expert_blocks"]

_OP = "expert_blocks"


def expert_blocks(
    x: jax.Array,
    row_weight: jax.Array,
    block_expert: jax.Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    *,
    limit: float,
    implementation: str | None = None,
) -> jax.Array:
    """w2(silu(min(w1 x, limit)) * clip(w3 x, -limit, limit) * weight) of rows in blocks of one expert each.

    The products are summed in float32; those of w1 and w3 are rounded to bfloat16, the activation is calculated in
    float32 and rounded once, after the row's weight. With quantised weights it then goes through FP8 in groups of 32
    along F; x is taken as it is, so the caller brings it through FP8 groups of 32 (once a token, not once a row).

    Neighbouring blocks of one expert share the work of reading and dequantising its weights where a kernel runs, so
    blocks should be sorted by expert, and unused ones come last.

    Args:
      x: bfloat16 [blocks, block, D].
      row_weight: float32 [blocks, block]; routing weights, anything finite for rows that hold nobody's x.
      block_expert: int32 [blocks]; a block whose expert is outside 0..E-1 is unused.
      w1, w3, w2: values and scales of the matrices [E, F, D], [E, F, D], [E, D, F], all three of one kind:
        uint8 [E, out, in/2] packed E2M1, channel 2j in the low nibble of byte j, and E8M0 uint8 [E, out, in/32];
        float8_e4m3fn [E, out, in] and E8M0 uint8 [E, ceil(out/32), ceil(in/32)];
        bfloat16 [E, out, in] and None.
        A stack of several layers may be given whole, flattened, with the layer's offset added to `block_expert`.
      limit: of the gate from above, and of the other factor on both sides.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      bfloat16 [blocks, block, D]. Rows of unused blocks may hold anything, NaN included, and must not be read; the
      plain-XLA implementation gives zeros.

    Raises:
      ValueError: a dtype or shape does not fit, or the implementation asked for cannot run.
    """
    _check(x, row_weight, block_expert, w1, w3, w2)
    if 0 in x.shape:
        return jnp.zeros_like(x)

    def gpu_says() -> str | None:
        from pallas_kernels.experts import gpu

        return gpu.problem(x, w1, w2)

    def tpu_says() -> str | None:
        from pallas_kernels.experts import tpu

        return tpu.problem(x, w1, w2)

    run = function(__package__, _OP, implementation, {"gpu": gpu_says, "tpu": tpu_says})
    with jax.named_scope("products"):  # so that profiles tell them from what arranges the rows
        return run(x, row_weight, block_expert, w1, w3, w2, limit=limit)


def _check(x, row_weight, block_expert, w1: Weight, w3: Weight, w2: Weight) -> None:
    expect(_OP, "x", x, jnp.bfloat16, None, None, None)
    blocks, block, d = x.shape
    expect(_OP, "row_weight", row_weight, jnp.float32, blocks, block)
    expect(_OP, "block_expert", block_expert, jnp.int32, blocks)
    values, scales = w1
    if values.ndim != 3 or values.dtype not in (jnp.uint8, jnp.float8_e4m3fn, jnp.bfloat16):
        raise ValueError(
            f"{_OP}: w1 must be uint8, float8_e4m3fn or bfloat16 [E, F, any], got {values.dtype} {values.shape}"
        )
    if (scales is None) != (values.dtype == jnp.bfloat16):
        raise ValueError(f"{_OP}: bfloat16 weights have no scales and all others have them, w1 is {values.dtype}")
    experts, f = values.shape[:2]
    if experts == 0:
        raise ValueError(f"{_OP}: there must be at least one expert")
    if values.dtype == jnp.uint8 and (d % MXFP4_GROUP or f % MXFP4_GROUP):
        raise ValueError(f"{_OP}: D and F must be multiples of {MXFP4_GROUP} with packed weights, got {d} and {f}")
    for name, (stored, scale), out, width in (("w1", w1, f, d), ("w3", w3, f, d), ("w2", w2, d, f)):
        packed = 2 if values.dtype == jnp.uint8 else 1
        expect(_OP, name, stored, values.dtype, experts, out, width // packed)
        if (scale is None) != (scales is None):
            raise ValueError(f"{_OP}: {name} and w1 must both have scales or both have none")
        if scale is None:
            continue
        if packed == 2:
            expect(_OP, f"scales of {name}", scale, jnp.uint8, experts, out, width // MXFP4_GROUP)
        else:
            tiles = (-(-out // WEIGHT_BLOCK), -(-width // WEIGHT_BLOCK))
            expect(_OP, f"scales of {name}", scale, jnp.uint8, experts, *tiles)
