"""Shapes of the mHC step at which it is tested, measured, tuned and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.hyper_connection import ops

STATIC = {"iters": 20, "norm_eps": 1e-6, "hc_eps": 1e-6}


def arguments(key: jax.Array, tokens: int, dim: int, num_streams: int = 4) -> dict[str, jax.Array]:
    """Random arrays as a trained model has them: mixes of order one, comb nearly doubly stochastic."""
    t, r, d = tokens, num_streams, dim
    mix = (2 + r) * r
    sizes = (t * r * d, t * d, t * r, t * r * r, t * r, mix * r * d, 3, mix, d)
    # One draw: each shape of one would be a program of its own to compile.
    draws = iter(jnp.split(jax.random.normal(key, (sum(sizes),), jnp.float32), np.cumsum(sizes)[:-1].tolist()))

    def normal(*shape):
        return next(draws).reshape(shape)

    return {
        "streams": (4 * normal(t, r, d)).astype(jnp.bfloat16),
        "y": normal(t, d).astype(jnp.bfloat16),
        "post": 2 * jax.nn.sigmoid(normal(t, r)),
        "comb": jax.nn.softmax(normal(t, r, r), axis=-1),
        "pre": jax.nn.sigmoid(normal(t, r)),
        "fn": normal(mix, r * d) * (r * d) ** -0.5,
        "scale": 1 + 0.1 * normal(3),
        "base": normal(mix),
        "gain": (1 + 0.1 * normal(d)).astype(jnp.bfloat16),
    }


def _spec(name: str, tokens: int, dim: int, *tags: str) -> ArgSpec:
    r = 4
    mix = (2 + r) * r
    return ArgSpec(
        name=name,
        fn=ops.residual_step,
        make=functools.partial(arguments, tokens=tokens, dim=dim, num_streams=r),
        static=STATIC,
        tags=frozenset(tags),
        # streams and y in, streams and x out; the coefficients in and out, the weights once
        bytes=tokens * ((2 * r + 2) * dim * 2 + 2 * mix * 4) + mix * r * dim * 4 + dim * 2,
        flops=2 * tokens * mix * r * dim,
    )


SPECS = (
    _spec("tiny_t1", 1, 128, "ci"),
    _spec("tiny_t7", 7, 128, "ci"),
    _spec("odd_t37", 37, 384, "ci"),
    _spec("t1", 1, 5120, "bench"),
    _spec("t8", 8, 5120, "bench", "aot"),
    _spec("t64", 64, 5120, "bench", "aot"),
    _spec("t512", 512, 5120, "bench", "tune"),
    _spec("t4096", 4096, 5120, "bench", "tune", "aot"),
)
