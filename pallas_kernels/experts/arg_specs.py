"""Shapes of the experts' product at which it is tested, measured and compiled."""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.experts import ops
from pallas_kernels.quantize.ref import dequantize_fp8, quantize_fp8

LIMIT = 10.0


def arguments(
    key: jax.Array, experts: int, blocks: int, rows: int, d: int, f: int, used: int | None = None, packed: bool = True
) -> dict:
    """Random arrays with outputs of order one: `used` blocks (None: all) spread evenly over the experts.

    The three matrices hold the same random numbers in different places: drawing them is most of a test's time.
    """
    x_key, weight_key, value_key, scale_key = jax.random.split(key, 4)
    used = blocks if used is None else used
    x = jax.random.normal(x_key, (blocks, rows, d), jnp.bfloat16)
    number = jnp.arange(blocks, dtype=jnp.int32)
    if packed:
        # E2M1 codes have a root mean square of about 3.
        first = 126 - round(math.log2(3 * d**0.5))
        values = jax.random.bits(value_key, (experts, f, d // 2), jnp.uint8)
        scales = first + jax.random.bits(scale_key, (experts, f, d // 32), jnp.uint8) % 3
        x = dequantize_fp8(*quantize_fp8(x))
    else:
        values = (jax.random.normal(value_key, (experts, f, d)) * d**-0.5).astype(jnp.bfloat16)
        scales = None

    def matrix(change):
        return change(values), None if scales is None else change(scales)

    return {
        "x": x,
        "row_weight": jax.random.uniform(weight_key, (blocks, rows)),
        "block_expert": jnp.where(number < used, number * experts // max(used, 1), experts),
        "w1": matrix(lambda w: w),
        "w3": matrix(lambda w: w[:, ::-1]),
        "w2": matrix(lambda w: w.reshape(experts, d, -1)),
    }


def _spec(name: str, *tags: str, experts: int, blocks: int, rows: int, d: int = 5120, f: int = 2304,
          used: int | None = None, packed: bool = True) -> ArgSpec:  # fmt: skip
    served = blocks if used is None else used
    sizes = {"experts": experts, "blocks": blocks, "rows": rows, "d": d, "f": f, "used": used, "packed": packed}
    weight_bits = 4 + 8 / 32 if packed else 16
    return ArgSpec(
        name=name,
        fn=ops.expert_blocks,
        make=functools.partial(arguments, **sizes),
        static={"limit": LIMIT},
        tags=frozenset(tags),
        bytes=int(min(experts, served) * 3 * d * f * weight_bits / 8) + served * rows * (4 * d + 4),
        flops=6 * served * rows * d * f,
    )


SPECS = (
    _spec("tiny", "ci", experts=3, blocks=5, rows=8, d=64, f=96, used=4),
    _spec("tiny_bf16", "ci", experts=3, blocks=4, rows=8, d=64, f=96, packed=False),
    _spec("one_block", "ci", experts=2, blocks=1, rows=16, d=256, f=256),
    # decode: one token, and a few rows for each local expert
    _spec("decode_e6", "bench", "tune", "aot", experts=6, blocks=6, rows=8),
    _spec("decode_e6_one_used", "bench", experts=6, blocks=8, rows=8, used=1),
    _spec("decode_e48", "bench", "tune", "aot", experts=48, blocks=48, rows=8),
    _spec("decode_e48_blocks2", "bench", experts=48, blocks=96, rows=8),
    _spec("decode_e48_rows16", "bench", experts=48, blocks=48, rows=16),
    _spec("decode_e48_rows32", "bench", experts=48, blocks=48, rows=32),
    _spec("decode_e48_rows64", "bench", experts=48, blocks=48, rows=64),
    # prefill: 512 rows for each expert
    _spec("prefill_e6", "bench", experts=6, blocks=24, rows=128),
    _spec("prefill_e48", "bench", "aot", experts=48, blocks=192, rows=128),
)
