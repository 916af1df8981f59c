"""Random and adversarial arguments of the experts' product, by name; what it should give; and the check of a result."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

LIMIT = 10.0
BLOCKS = 6
EXPERTS = 3
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _random(rng, a):
    pass


def _unused(rng, a):
    """Unused blocks in front, between two of one expert, between two experts, and at the end."""
    a["block_expert"][:] = [-1, 1, EXPERTS, 1, 99, 2]


def _none_used(rng, a):
    a["block_expert"][:] = [EXPERTS, -1, EXPERTS, EXPERTS + 1, -7, EXPERTS]


def _only_the_first(rng, a):
    a["block_expert"][1:] = EXPERTS


def _one_expert(rng, a):
    a["block_expert"][:] = 2


def _there_and_back(rng, a):
    """Experts in any order are right, if slower."""
    a["block_expert"][:] = [0, 1, 0, 0, 2, 1]


def _zero_rows(rng, a):
    """Rows that hold nobody's x, with and without a weight."""
    a["x"][:, 3:], a["row_weight"][:, 5:] = 0, 0


def _clamped(rng, a):
    """Most gates and ups lie outside the limits."""
    a["x"] *= 256


def _minute(rng, a):
    """Activations below the smallest scale of their groups."""
    a["x"] *= 2.0**-20


def _negative_weights(rng, a):
    a["row_weight"] *= -3


def _nan_row(rng, a):
    a["x"][2, 3, 7] = np.nan


def _wide_scales(rng, a):
    """Neighbouring groups differ by up to 2^24."""
    for name in ("w1", "w3", "w2"):
        a[name][1][:] = rng.integers(100, 125, a[name][1].shape)


def _largest_and_smallest_scales(rng, a):
    """The ends of what the kernels take exactly, a scale for a whole expert."""
    for name, smallest, largest in (("w1", 65, 180), ("w3", 65, 192), ("w2", 70, 192)):
        a[name][1][0], a[name][1][1] = smallest, largest


CASES = {
    name.strip("_"): maker
    for name, maker in globals().copy().items()
    if name.startswith("_") and callable(maker) and getattr(maker, "__module__", None) == __name__
}


def _fp8(x: np.ndarray) -> np.ndarray:
    """float64 [..., C] after the round trip through E4M3 in groups of 32."""
    grouped = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.maximum(np.abs(grouped).max(-1, keepdims=True), np.float32(1e-4))
    scale = np.exp2(np.ceil(np.log2(amax / 448)))
    return ((grouped / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)


def _stored(rng, kind: str, out: int, width: int):
    if kind == "bf16":
        return (rng.normal(size=(EXPERTS, out, width)) * width**-0.5).astype(ml_dtypes.bfloat16), None
    if kind == "fp8":
        values = rng.normal(size=(EXPERTS, out, width)).astype(ml_dtypes.float8_e4m3fn)
        return values, rng.integers(121, 125, (EXPERTS, -(-out // 32), -(-width // 32))).astype(np.uint8)
    values = rng.integers(0, 256, (EXPERTS, out, width // 2)).astype(np.uint8)
    return values, rng.integers(119, 124, (EXPERTS, out, width // 32)).astype(np.uint8)


def make(case: str, seed: int, *, rows: int = 8, d: int = 256, f: int = 512, kind: str = "fp4") -> dict:
    """Arguments of the op by name, numpy; x holds what FP8 groups of 32 hold unless weights are bfloat16."""
    rng = np.random.default_rng([seed, *case.encode()])
    arrays = {
        "x": rng.normal(size=(BLOCKS, rows, d)),
        "row_weight": rng.random((BLOCKS, rows)),
        "block_expert": np.array([0, 0, 1, 2, 2, 2], np.int32),
        "w1": _stored(rng, kind, f, d),
        "w3": _stored(rng, kind, f, d),
        "w2": _stored(rng, kind, d, f),
    }
    CASES[case](rng, arrays)
    x = arrays["x"].astype(ml_dtypes.bfloat16).astype(np.float64)
    arrays["x"] = (x if kind == "bf16" else _fp8(x)).astype(ml_dtypes.bfloat16)
    arrays["row_weight"] = arrays["row_weight"].astype(np.float32)
    return arrays


def decoded(weight) -> np.ndarray:
    """float64 [..., out, in]."""
    values, scales = weight
    if scales is None:
        return values.astype(np.float64)
    factors = np.exp2(scales.astype(np.float64) - 127)
    if values.dtype != np.uint8:
        values = values.astype(np.float64)
        factors = np.repeat(np.repeat(factors, 32, -2), 32, -1)
        return values * factors[..., : values.shape[-2], : values.shape[-1]]
    codes = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)
    return _E2M1[codes] * np.repeat(factors, 32, axis=-1)


def _bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def expected(args: dict) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Of every used block the result, float64 [rows, D], and the largest magnitude of the terms of each of its sums."""
    found = {}
    w1, w3, w2 = (decoded(args[name]) for name in ("w1", "w3", "w2"))
    for b, e in enumerate(args["block_expert"]):
        if not 0 <= e < EXPERTS:
            continue
        x = args["x"][b].astype(np.float64)
        gate, up = (_bf16(np.einsum("ti,oi->to", x, w[e])) for w in (w1, w3))
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
        with np.errstate(over="ignore"):
            inner = _bf16(gate / (1 + np.exp(-gate)) * up * args["row_weight"][b][:, None])
        inner = inner if args["w2"][1] is None else _fp8(inner)
        terms = np.abs(inner)[:, None] * np.abs(w2[e])[None]
        found[b] = _bf16(np.einsum("ti,oi->to", inner, w2[e])), terms.max(-1)
    return found


def check(y, args: dict) -> None:
    """Raises unless used blocks hold what they should.

    Sums in another order now and then move an activation to the neighbouring bfloat16, and one of sixteen of those to
    the neighbouring E4M3 code, up to an eighth away: two such terms a sum, and few results that differ at all.
    """
    y = np.asarray(jnp.asarray(y).astype(jnp.float32), np.float64)
    assert y.shape == args["x"].shape
    different = []
    for b, (result, term) in expected(args).items():
        np.testing.assert_array_equal(np.isnan(y[b]), np.isnan(result), err_msg=f"block {b}")
        there = ~np.isnan(result)
        error, allowed = np.abs(y[b] - result)[there], (2.0**-7 * np.abs(result) + term / 4)[there]
        assert (error <= allowed).all(), f"block {b}: {(error - allowed).max()} too far"
        different.append((error > 0).mean())
    assert np.mean(different or [0]) < 0.05
