"""Entry point of the FP8 product.

There is a kernel for TPU only. On a GPU it is XLA's product even where a whole step is told to take Pallas kernels; a
call that names one itself is refused there.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.array_checks import expect
from pallas_kernels.dispatch import backend, function, kernels
from pallas_kernels.quantize.ref import WEIGHT_BLOCK

_OP = "fp8_linear"


def fp8_linear(x: jax.Array, values: jax.Array, scales: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Each group of inputs times its own rows of a block-scaled FP8 weight, summed in float32.

    Args:
      x: bfloat16 [rows, G, in], taken as it is.
      values: float8_e4m3fn [G * out, in].
      scales: E8M0 uint8 [ceil(G * out / 32), ceil(in / 32)], one a tile of 32 x 32.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      float32 [rows, G * out].

    Raises:
      ValueError: a dtype or shape does not fit, or the implementation asked for cannot run.
    """
    expect(_OP, "x", x, jnp.bfloat16, None, None, None)
    rows, groups, width = x.shape
    expect(_OP, "values", values, jnp.float8_e4m3fn, None, width)
    out = values.shape[0]
    expect(_OP, "scales", scales, jnp.uint8, -(-out // WEIGHT_BLOCK), -(-width // WEIGHT_BLOCK))
    if groups == 0 or out % groups:
        raise ValueError(f"{_OP}: {groups} groups do not divide the {out} rows of the weight")
    if 0 in (rows, out, width):
        return jnp.zeros((rows, out), jnp.float32)

    chosen = kernels.value
    if implementation is None and (chosen == "gpu" or (chosen == "pallas" and backend() == "gpu")):
        implementation = "xla"

    def tpu_says() -> str | None:
        from pallas_kernels.fp8_linear import tpu

        return tpu.problem(x, values)

    return function(__package__, _OP, implementation, {"tpu": tpu_says})(x, values, scales)
