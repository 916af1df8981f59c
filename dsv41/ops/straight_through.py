"""Rounding whose gradient is that of the identity, and products whose gradients are made of bfloat16 (training).

Forward results are those of the serving path, bit for bit. Backward, nothing is known of scales and of saturation
(training.md section 2.3): a value's gradient is its rounded value's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_order import contract, contract_groups
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.rounding import round_to_bf16


def _straight_through(fn: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`fn` of one array, with the gradient of the identity in the argument's dtype."""

    @jax.custom_vjp
    def rounded(x):
        return fn(x)

    # The argument's dtype travels as an empty array: residuals are arrays.
    rounded.defvjp(lambda x: (fn(x), jnp.zeros((0,), x.dtype)), lambda like, g: (g.astype(like.dtype),))
    # Weights of few shapes are rounded by the hundred: each shape is traced once.
    compiled = jax.jit(rounded)
    return functools.wraps(fn)(lambda x: compiled(x))


@_straight_through
def activation_fp8(x: jax.Array) -> jax.Array:
    """[..., C] -> bfloat16 [..., C] after E4M3 with a power-of-two scale for 32 channels: activations, window KV."""
    return quantize.dequantize_fp8(*quantize.quantize_fp8(x))


@_straight_through
def index_mxfp4(x: jax.Array) -> jax.Array:
    """[..., C] -> bfloat16 [..., C] after E2M1 with a power-of-two scale for 32 channels: index queries and keys."""
    return quantize.dequantize_mxfp4(*quantize.quantize_mxfp4(x))


@_straight_through
def main_kv_fp4(x: jax.Array) -> jax.Array:
    """[..., C] -> bfloat16 [..., C] after E2M1 with an E4M3 scale for 16 channels: compressed KV."""
    return quantize.dequantize_kv_fp4(*quantize.quantize_kv_fp4(x))


@_straight_through
def weight_fp8(x: jax.Array) -> jax.Array:
    """[..., out, in] -> bfloat16 [..., out, in] after E4M3 with a power-of-two scale for 32 x 32 values."""
    return quantize.dequantize_weight_fp8(*quantize.quantize_weight_fp8(x))


@_straight_through
def weight_fp4(x: jax.Array) -> jax.Array:
    """[..., out, in] -> bfloat16 [..., out, in] after E2M1 with a power-of-two scale for 32 inputs of a row."""
    return quantize.dequantize_weight_fp4(*quantize.quantize_weight_fp4(x))


@_straight_through
def rows_fp8(x: jax.Array) -> jax.Array:
    """[..., C] -> bfloat16 [..., C] as rows of Engram tables are stored: E4M3, a power-of-two scale for 32 channels."""
    return quantize.dequantize_fp8(*quantize.quantize_rows_fp8(x))


@jax.custom_vjp
def product_bf16(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in] transposed, both bfloat16 -> float32 [..., out].

    Its gradients are products of bfloat16 values with float32 sums too; left to JAX, one factor would be float32, for
    which devices have no fast unit.
    """
    return contract(x, weight)


def _product_backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    g = g.astype(jnp.bfloat16)
    return bf16_einsum("...o,oi->...i", g, weight).astype(x.dtype), weight_gradient(g, x).astype(weight.dtype)


product_bf16.defvjp(lambda x, weight: (contract(x, weight), (x, weight)), _product_backward)


@jax.custom_vjp
def group_product_bf16(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As `product_bf16`, each group's x [..., G, in] times its own weight [G, out, in] -> float32 [..., G, out]."""
    return contract_groups(x, weight)


def _group_backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    g = g.astype(jnp.bfloat16)
    d_weight = bf16_einsum("tgo,tgi->goi", g.reshape(-1, *g.shape[-2:]), x.reshape(-1, *x.shape[-2:]))
    return bf16_einsum("...go,goi->...gi", g, weight).astype(x.dtype), d_weight.astype(weight.dtype)


group_product_bf16.defvjp(lambda x, weight: (contract_groups(x, weight), (x, weight)), _group_backward)


@jax.custom_vjp
def product_of_master(x: jax.Array, master: jax.Array) -> jax.Array:
    """As `product_bf16`, of a float32 weight rounded to bfloat16; its gradient is float32, so that those of many parts
    of x can be added."""
    return contract(x, round_to_bf16(master))


def _master_backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, master = residuals
    g = g.astype(jnp.bfloat16)
    return bf16_einsum("...o,oi->...i", g, round_to_bf16(master)).astype(x.dtype), weight_gradient(g, x)


product_of_master.defvjp(lambda x, master: (product_of_master(x, master), (x, master)), _master_backward)


def bf16_einsum(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 sums of products of bfloat16 values."""

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
        # Not every layout has a product of bfloat16 there.
        return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))

    def elsewhere(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)

    return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=elsewhere)


def einsum_bf16(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`bf16_einsum` whose gradients are such products too. Every index of one factor is in the other or in the result.

    Raises:
      ValueError: an index is in one factor only.
    """
    factors, out = equation.split("->")
    first, second = factors.split(",")
    if not (set(first) <= set(second + out) and set(second) <= set(first + out)):
        raise ValueError(f"einsum_bf16: an index of {equation!r} is in one factor only")

    @jax.custom_vjp
    def product(a, b):
        return bf16_einsum(equation, a, b)

    def backward(residuals, g):
        a, b = residuals
        g = g.astype(jnp.bfloat16)
        da, db = bf16_einsum(f"{out},{second}->{first}", g, b), bf16_einsum(f"{out},{first}->{second}", g, a)
        return da.astype(a.dtype), db.astype(b.dtype)

    product.defvjp(lambda a, b: (product(a, b), (a, b)), backward)
    return product(a, b)


def weight_gradient(g: jax.Array, x: jax.Array) -> jax.Array:
    """g bfloat16 [..., out], x bfloat16 [..., in] -> float32 [out, in], summed over all rows."""
    return bf16_einsum("to,ti->oi", g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]))
