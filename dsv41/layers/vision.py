"""Blocks of the vision tower and the projector (architecture.md section 7)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.config import VisionConfig
from dsv41.layers.linear import Linear, RMSNorm, abstract
from dsv41.ops import vision as ops
from dsv41.ops.linear import WeightFormat
from pallas_kernels.fixed_order import contract
from pallas_kernels.rounding import round_to_bf16

NORM_EPS = 1e-6


class Affine(nnx.Module):
    """A bfloat16 weight [out, in] and bias [out]; the sum is rounded once."""

    def __init__(self, in_dim: int, out_dim: int):
        self.weight = abstract(out_dim, in_dim)
        self.bias = abstract(out_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        """bfloat16 [..., in] -> bfloat16 [..., out]."""
        return round_to_bf16(contract(x, self.weight[...]) + self.bias[...].astype(jnp.float32))


class _Attention(nnx.Module):
    def __init__(self, config: VisionConfig):
        self.heads = config.num_attention_heads
        self.wqkv = Affine(config.hidden_size, 3 * config.hidden_size)
        self.wo = Affine(config.hidden_size, config.hidden_size)

    def __call__(self, x: jax.Array, rope: jax.Array, count: jax.Array) -> jax.Array:
        n, width = x.shape
        q, k, v = jnp.split(self.wqkv(x).reshape(n, 3 * self.heads, width // self.heads), 3, axis=1)
        o = ops.full_attention(ops.rotate_halves(q, rope), ops.rotate_halves(k, rope), v, count)
        return self.wo(o.reshape(n, width))


class _MLP(nnx.Module):
    def __init__(self, config: VisionConfig):
        self.w1 = Linear(config.hidden_size, 2 * config.intermediate_size, WeightFormat.BF16)
        self.w2 = Linear(config.intermediate_size, config.hidden_size, WeightFormat.BF16)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.w1(x), 2, axis=-1)
        return self.w2(ops.swiglu(gate, up))


class VisionBlock(nnx.Module):
    """One pre-norm block: attention, then SwiGLU."""

    def __init__(self, config: VisionConfig):
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS)
        self.attn = _Attention(config)
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = _MLP(config)

    def __call__(self, x: jax.Array, rope: jax.Array, count: jax.Array) -> jax.Array:
        """Every patch attends to every real patch.

        x bfloat16 [N, C]; rope float32 [N, 2, H / 2]; count int32 []: patches before the padding -> bfloat16 [N, C].
        """
        with jax.named_scope("attention"):
            x = ops.add(x, self.attn(self.norm1(x), rope, count))
        with jax.named_scope("mlp"):
            return ops.add(x, self.mlp(self.norm2(x)))


class Projector(nnx.Module):
    """Linear, GELU, Linear: unshuffled patches to the text model's width."""

    def __init__(self, in_dim: int, out_dim: int):
        self.w1 = Affine(in_dim, out_dim)
        self.w2 = Affine(out_dim, out_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        """bfloat16 [..., in] -> bfloat16 [..., D]."""
        return self.w2(ops.gelu(self.w1(x)))
