"""Checking what an op is given before anything is traced."""

import jax
import jax.numpy as jnp


def expect(op: str, name: str, array: jax.Array, dtype: jax.typing.DTypeLike, *shape: int | None) -> None:
    """Raises unless an array has this dtype and shape, None standing for any size.

    Raises:
      ValueError: it has not; names the op, the array, what was wanted and what it is.
    """
    fits = len(array.shape) == len(shape) and all(e in (None, a) for e, a in zip(shape, array.shape, strict=True))
    if not fits or array.dtype != dtype:
        wanted = ", ".join("any" if e is None else str(e) for e in shape)
        raise ValueError(f"{op}: {name} must be {jnp.dtype(dtype)} [{wanted}], got {array.dtype} {array.shape}")
