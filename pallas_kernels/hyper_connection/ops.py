"""Entry points of the mHC step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.compat import gpu_problem
from pallas_kernels.dispatch import function
from pallas_kernels.hyper_connection import ref
from pallas_kernels.hyper_connection.ref import collapse, mix_coefficients, split_mix, update

__all__ = ["collapse", "mix_coefficients", "residual_step", "split_mix", "update"]


def residual_step(
    streams: jax.Array,
    y: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    gain: jax.Array,
    *,
    iters: int,
    norm_eps: float,
    hc_eps: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """From one sublayer's output to the next one's input, in one pass over the streams (architecture.md section 2).

        X'[j] = post[j] * y + sum over i of comb[i, j] * X[i]
        x     = RMSNorm(sum over k of pre[k] * X'[k]) * gain
        next  = mix_coefficients(X')

    Differentiable in reverse mode in every array. A kernel's derivative is that of the reference, which computes the
    step again from its inputs.

    Args:
      streams: bfloat16 [T, R, D], X.
      y: bfloat16 [T, D], what the sublayer put out.
      post, comb: float32 [T, R] and [T, R (source), R (target)], its coefficients.
      pre: float32 [T, R], which the sublayer predicted for the next one's input.
      fn: float32 [(2 + R) * R, R * D], weights of the next coefficients.
      scale: float32 [3], base: float32 [(2 + R) * R], as in `split_mix`.
      gain: bfloat16 [D], of the next sublayer's norm.
      iters: Sinkhorn rounds.
      norm_eps: of both RMS statistics.
      hc_eps: as `eps` of `split_mix`.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      new streams bfloat16 [T, R, D], x bfloat16 [T, D], and the next pre float32 [T, R], post float32 [T, R] and comb
      float32 [T, R, R].

    Raises:
      TypeError: a dtype is not one of these.
      ValueError: a shape or `iters` does not fit, or the implementation asked for cannot run.
    """
    arrays = (streams, y, post, comb, pre, fn, scale, base, gain)
    _check(*arrays)
    if iters < 1:
        raise ValueError(f"residual_step: iters must be at least 1, got {iters}")
    options = {"iters": iters, "norm_eps": norm_eps, "hc_eps": hc_eps}

    def gpu_says() -> str | None:
        if (problem := gpu_problem()) is not None:
            return problem
        from pallas_kernels.hyper_connection import gpu

        return gpu.problem(streams)

    def tpu_says() -> str | None:
        from pallas_kernels.hyper_connection import tpu

        return tpu.problem(streams)

    if streams.shape[0] == 0:
        return ref.residual_step(*arrays, **options)
    kernel = function(__package__, "residual_step", implementation, {"gpu": gpu_says, "tpu": tpu_says})
    if kernel is ref.residual_step:
        return kernel(*arrays, **options)
    return _with_derivative_of_ref(kernel, options)(*arrays)


def _with_derivative_of_ref(kernel: Callable, options: dict) -> Callable:
    """The kernel; its backward pass is the reference's from the same inputs."""

    @jax.custom_vjp
    def step(*arrays):
        return kernel(*arrays, **options)

    def forward(*arrays):
        return step(*arrays), arrays

    def backward(arrays, cotangents):
        return jax.vjp(lambda *a: ref.residual_step(*a, **options), *arrays)[1](cotangents)

    step.defvjp(forward, backward)
    return step


def _check(streams, y, post, comb, pre, fn, scale, base, gain) -> None:
    """Shapes and dtypes."""
    if streams.ndim != 3:
        raise ValueError(f"residual_step: streams must be [T, R, D], got {streams.shape}")
    t, r, d = streams.shape
    mix = (2 + r) * r
    expected = {
        "streams": (streams, (t, r, d), jnp.bfloat16),
        "y": (y, (t, d), jnp.bfloat16),
        "post": (post, (t, r), jnp.float32),
        "comb": (comb, (t, r, r), jnp.float32),
        "pre": (pre, (t, r), jnp.float32),
        "fn": (fn, (mix, r * d), jnp.float32),
        "scale": (scale, (3,), jnp.float32),
        "base": (base, (mix,), jnp.float32),
        "gain": (gain, (d,), jnp.bfloat16),
    }
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape:
            raise ValueError(f"residual_step: {name} must be {shape} with streams {(t, r, d)}, got {array.shape}")
        if array.dtype != dtype:
            raise TypeError(f"residual_step: {name} must be {jnp.dtype(dtype)}, got {array.dtype}")
