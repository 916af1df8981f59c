"""The FP8 product: the reference against float64, the TPU kernel interpreted against the reference."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.dispatch import KernelUnavailable, kernels
from pallas_kernels.fp8_linear import ops, tpu
from pallas_kernels.fp8_linear.arg_specs import SPECS

# Sums of bfloat16 products in float32 in another order, of terms that largely cancel.
TOLERANCE = 2e-6


@functools.cache
def _jitted(implementation: str):
    return jax.jit(functools.partial(ops.fp8_linear, implementation=implementation))


def arguments(seed: int, rows: int, out: int, width: int, groups: int = 1) -> dict[str, np.ndarray]:
    """Distributed as those of `pallas_kernels.fp8_linear.arg_specs`; numpy compiles nothing for a new size."""
    rng = np.random.default_rng(seed)
    exponent = 127 - 6 - round(math.log2(width**0.5))
    return {
        "x": rng.normal(size=(rows, groups, width)).astype(ml_dtypes.bfloat16),
        "values": (64 * rng.normal(size=(out, width))).astype(ml_dtypes.float8_e4m3fn),
        "scales": rng.integers(exponent - 1, exponent + 2, (out // 32, width // 32), dtype=np.uint8),
    }


def exact(x, values, scales) -> np.ndarray:
    """In float64, and the sums of magnitudes that rounding errors are relative to."""
    scale = np.repeat(np.repeat(np.exp2(np.asarray(scales, np.float64) - 127), 32, 0), 32, 1)
    weight = np.asarray(values).astype(np.float64) * scale[: values.shape[0], : values.shape[1]]
    x = np.asarray(x).astype(np.float64)
    weight = weight.reshape(x.shape[1], -1, x.shape[2])
    sums = [np.einsum("rgi,goi->rgo", a, b).reshape(x.shape[0], -1) for a, b in ((x, weight), (abs(x), abs(weight)))]
    return sums[0], sums[1]


def check(implementation: str, args: dict) -> None:
    y = np.asarray(_jitted(implementation)(**args), np.float64)
    wanted, magnitude = exact(**args)
    assert y.shape == wanted.shape and (abs(y - wanted) <= TOLERANCE * magnitude).all()


@pytest.mark.parametrize("spec", [s for s in SPECS if "ci" in s.tags], ids=lambda s: s.name)
def test_arg_specs(spec):
    # This generator takes a third of the default one's time to compile.
    check("xla", jax.jit(spec.make)(jax.random.key(0, impl="unsafe_rbg")))


def test_ref_partial_tiles():
    """The last tile of 32 x 32 may be partial."""
    args = arguments(1, rows=4, out=96, width=128)
    check(
        "xla", args | {"values": args["values"][:70, :101], "scales": args["scales"][:3, :4], "x": args["x"][..., :101]}
    )


@pytest.mark.parametrize(
    ("rows", "out", "width", "groups"),
    [(1, 128, 128, 1), (8, 512, 256, 2), (37, 384, 128, 1), (5, 256, 384, 2), (3, 128, 4096 + 128, 1)],
)
def test_tpu(rows, out, width, groups):
    check("tpu_interpret", arguments(2, rows=rows, out=out, width=width, groups=groups))


def test_tpu_tiles_of_rows(monkeypatch):
    """Where rows come in several tiles, the last one partial, the weight's tile serves all of them."""
    monkeypatch.setattr(tpu, "_plan", lambda rows, out, width: tpu._Plan(16, 128))
    _jitted.cache_clear()
    check("tpu_interpret", arguments(3, rows=40, out=512, width=128, groups=2))
    _jitted.cache_clear()


def test_all_codes_are_exact():
    """Every code times every scale that gives normal numbers is the value itself."""
    values = np.tile(np.arange(256, dtype=np.uint8), (128, 1)).view(ml_dtypes.float8_e4m3fn)
    values = np.where(np.isnan(values.astype(np.float32)), ml_dtypes.float8_e4m3fn(0), values)
    scales = np.linspace(20, 230, 4 * 8).astype(np.uint8).reshape(4, 8)
    x = np.zeros((16, 1, 256), ml_dtypes.bfloat16)
    x[np.arange(16), 0, np.arange(16) * 16 + 7] = 1
    args = {"x": x, "values": values, "scales": scales}
    np.testing.assert_array_equal(_jitted("tpu_interpret")(**args), exact(**args)[0])
    np.testing.assert_array_equal(_jitted("xla")(**args), exact(**args)[0])


def test_released_shapes_fit():
    for spec in SPECS:
        if "aot" in spec.tags:
            arrays = spec.abstract()
            assert tpu.problem(arrays["x"], arrays["values"]) is None
    x, values = jax.ShapeDtypeStruct((8, 1, 96), jnp.bfloat16), jax.ShapeDtypeStruct((64, 96), jnp.float8_e4m3fn)
    assert "multiples of 128" in tpu.problem(x, values)


def test_a_step_with_gpu_kernels_takes_xla(monkeypatch):
    args = arguments(6, rows=4, out=64, width=64)
    args = {name: jnp.asarray(a) for name, a in args.items()}
    wanted = ops.fp8_linear(**args, implementation="xla")
    with kernels("gpu"):
        np.testing.assert_array_equal(ops.fp8_linear(**args), wanted)
    with pytest.raises(KernelUnavailable, match="no kernel for the gpu"):
        ops.fp8_linear(**args, implementation="gpu")
    monkeypatch.setattr(ops, "backend", lambda: "gpu")
    with kernels("pallas"):
        np.testing.assert_array_equal(ops.fp8_linear(**args), wanted)


def test_no_rows():
    args = {name: jnp.asarray(a) for name, a in arguments(4, rows=4, out=64, width=64).items()}
    assert ops.fp8_linear(args["x"][:0], args["values"], args["scales"]).shape == (0, 64)


def test_bad_arguments():
    args = arguments(5, rows=4, out=64, width=64)

    def attempt(**changes):
        ops.fp8_linear(**(args | changes))

    with pytest.raises(ValueError, match="x must be bfloat16"):
        attempt(x=args["x"].astype(jnp.float32))
    with pytest.raises(ValueError, match="values must be float8"):
        attempt(values=args["values"][:, 1:])
    with pytest.raises(ValueError, match="scales must be uint8"):
        attempt(scales=args["scales"][1:])
    with pytest.raises(ValueError, match="3 groups do not divide the 64 rows"):
        attempt(x=jnp.zeros((4, 3, 64), jnp.bfloat16))
