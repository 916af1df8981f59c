"""Shapes of the FP8 product at which it is tested, measured and compiled."""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.fp8_linear import ops


def arguments(key: jax.Array, rows: int, out: int, width: int, groups: int = 1) -> dict[str, jax.Array]:
    """Random arrays with outputs of order one."""
    first, second, third = jax.random.split(key, 3)
    # Values have a standard deviation of 64.
    exponent = 127 - 6 - round(math.log2(width**0.5))
    return {
        "x": jax.random.normal(first, (rows, groups, width), jnp.bfloat16),
        "values": (64 * jax.random.normal(second, (out, width))).astype(jnp.float8_e4m3fn),
        "scales": jax.random.randint(third, (out // 32, width // 32), exponent - 1, exponent + 2).astype(jnp.uint8),
    }


def _spec(name: str, *tags: str, rows: int, out: int, width: int, groups: int = 1) -> ArgSpec:
    return ArgSpec(
        name=name,
        fn=ops.fp8_linear,
        make=functools.partial(arguments, rows=rows, out=out, width=width, groups=groups),
        tags=frozenset(tags),
        bytes=out * width * 1025 // 1024 + rows * groups * width * 2 + rows * out * 4,
        flops=2 * rows * out * width,
    )


SPECS = (
    _spec("tiny", "ci", rows=3, out=64, width=96),
    _spec("tiny_groups", "ci", rows=5, out=128, width=64, groups=2),
    # The release's: queries, the grouped and the last output projection, gate of the shared expert, Engram.
    _spec("wq_b_t8", "bench", "aot", rows=8, out=32768, width=1280),
    _spec("wo_a_t8", "bench", "aot", rows=8, out=8192, width=4096, groups=8),
    _spec("wo_b_t8", "bench", "aot", rows=8, out=5120, width=8192),
    _spec("shared_t8", "bench", "aot", rows=8, out=2304, width=5120),
    _spec("engram_t8", "bench", "aot", rows=8, out=25600, width=6144),
    _spec("drafter_t64", "bench", "aot", rows=64, out=5120, width=15360),
    _spec("wq_b_t64", "bench", "aot", rows=64, out=32768, width=1280),
    _spec("wo_b_t512", "bench", "aot", rows=512, out=5120, width=8192),
    _spec("wq_b_t4096", "bench", "aot", rows=4096, out=32768, width=1280),
    _spec("wkv_t4096", "bench", "aot", rows=4096, out=512, width=5120),
    _spec("shared_t4096", "bench", "aot", rows=4096, out=2304, width=5120),
)
