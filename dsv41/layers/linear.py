"""Stored weights and norms."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.ops.linear import QuantizedArray, WeightFormat, linear, linear_sum
from pallas_kernels.norms import rms_norm

_Module = TypeVar("_Module", bound=nnx.Module)


LogicalAxes = tuple[str | None, ...]


def abstract(*shape: int, dtype=jnp.bfloat16, axes: LogicalAxes = ()) -> nnx.Param:
    """A parameter without memory; `axes` are the logical axes of its first axes, the others are never spread."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), logical_axes=axes)


def parameters_of(module: nnx.Module) -> dict[str, Any]:
    """The parameters of an abstract module as nested dicts of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.split(module)[1])


def logical_axes_of(module: nnx.Module) -> dict[str, Any]:
    """The logical axes of the parameters of an abstract module, nested as `parameters_of` nests them."""
    nested: dict[str, Any] = {}
    for path, param in nnx.to_flat_state(nnx.split(module)[1]):
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = param.get_metadata()["logical_axes"]
    return nested


def with_parameters(module: _Module, params: dict[str, Any]) -> _Module:
    """The module with `params` (nested dicts of arrays) in place; cheap enough to do inside every trace."""
    graphdef, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def _ceil32(n: int) -> int:
    return -(-n // 32)


class Linear(nnx.Module):
    """A weight [out, in] in its stored format; with `experts`, a stack of them, spread as such.

    `axes` are the logical axes of (out, in). A stored form whose scales do not split along with the values is refused
    where parameters are spread.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        format: WeightFormat,
        experts: int | None = None,
        *,
        axes: LogicalAxes = (),
    ):
        lead = () if experts is None else (experts,)
        axes = axes if experts is None else ("experts", *axes)
        self.format = format
        if format is WeightFormat.FP8_BLOCK:
            self.weight = abstract(*lead, out_dim, in_dim, dtype=jnp.float8_e4m3fn, axes=axes)
            self.scale = abstract(*lead, _ceil32(out_dim), _ceil32(in_dim), dtype=jnp.uint8, axes=axes)
        elif format is WeightFormat.FP4_ROW:
            self.weight = abstract(*lead, out_dim, in_dim // 2, dtype=jnp.uint8, axes=axes)
            self.scale = abstract(*lead, out_dim, in_dim // 32, dtype=jnp.uint8, axes=axes)
        else:
            self.weight = abstract(*lead, out_dim, in_dim, axes=axes)

    @property
    def stored(self) -> QuantizedArray:
        """The weight with its scales and format."""
        scales = self.scale[...] if self.format.has_scales else None
        return QuantizedArray(self.weight[...], scales, self.format)

    def __call__(self, x: jax.Array) -> jax.Array:
        """bfloat16 [..., in] -> bfloat16 [..., out]."""
        return linear(x, self.stored)

    def partial(self, x: jax.Array) -> jax.Array:
        """Where the input axis is spread, this device's share of the result: bfloat16 [..., in] -> float32 [..., out],
        to be summed over devices and rounded."""
        return linear_sum(x, self.stored)


class RMSNorm(nnx.Module):
    """RMSNorm with a stored gain."""

    def __init__(self, dim: int, eps: float):
        self.weight = abstract(dim)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., C] -> bfloat16 [..., C]."""
        return rms_norm(x, self.weight[...], self.eps)
