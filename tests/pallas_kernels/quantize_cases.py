"""Arguments that quantisation and the fused writes must get right, random and adversarial."""

import ml_dtypes
import numpy as np

from pallas_kernels.page_layout import IndexPageLayout, MainPageLayout, WindowLayout

_MIDPOINTS = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6], np.float32)


def _normal(rng, rows, width):
    return rng.normal(size=(rows, width))


def _any_magnitude(rng, rows, width):
    """Every group at its own power of two between the smallest and the largest, values inside it within 2^12."""
    exponent = rng.uniform(-140, 120, (rows, width // 16, 1)) + rng.uniform(-12, 0, (rows, width // 16, 16))
    return (rng.choice([-1, 1], (rows, width // 16, 16)) * 2.0**exponent).reshape(rows, width)


def _any_bits(rng, rows, width):
    """Any bfloat16 bits: subnormals, infinities, both zeros, NaN of both signs."""
    bits = rng.integers(0, 2**16, (rows, width), dtype=np.uint16)
    # Most groups would hold a NaN otherwise.
    keep = (rng.random((rows, width)) < 0.02) | ((bits & 0x7F80) != 0x7F80)
    return np.where(keep, bits, bits & 0x3FFF).view(ml_dtypes.bfloat16).astype(np.float32)


def _ties(rng, rows, width):
    """Each group: an amax that fixes the scale and halfway points between E2M1 values times it, signs mixed."""
    scale = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = rng.choice(scale, (rows, width // 16, 1)) * rng.choice([1, 1, 2.0**-20], (rows, width // 16, 1))
    x = rng.choice(_MIDPOINTS, (rows, width // 16, 16)) * rng.choice([-1, 1], (rows, width // 16, 16))
    x[..., 5] = 6
    return (x * scale).reshape(rows, width)


def _special(rng, rows, width):
    x = rng.normal(size=(rows, width)).astype(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40, 3.3e38, -3.3e38, 448, 449, 2688, 3000, 1e-5]
    for i in range(rows):
        x[i, rng.integers(width)] = special[i % len(special)]
        if i % 3 == 0:
            x[i, : width // 2] = special[i // 3 % len(special)]
    return x


def _outlier(rng, rows, width):
    x = rng.normal(size=(rows, width)) * 1e-3
    x[:, rng.integers(width)] = 1e9
    return x


def _zeros(rng, rows, width):
    return np.where(rng.random((rows, width)) < 0.5, 0.0, -0.0)


VALUES = {
    "normal": _normal, "any_magnitude": _any_magnitude, "any_bits": _any_bits, "ties": _ties, "special": _special,
    "outlier": _outlier, "zeros": _zeros,
}  # fmt: skip


def values(name: str, rows: int, width: int, dtype, seed: int) -> np.ndarray:
    """[rows, width] of the named kind."""
    with np.errstate(over="ignore", invalid="ignore"):
        return VALUES[name](np.random.default_rng(seed), rows, width).astype(dtype)


def stored(name: str, rows: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Any stored bytes of the format "fp8", "mxfp4" or "kv_fp4": every code, every scale, NaN ones included."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (rows, width if name == "fp8" else width // 2), dtype=np.uint8)
    scales = rng.integers(0, 256, (rows, width // (16 if name == "kv_fp4" else 32)), dtype=np.uint8)
    return values.view(ml_dtypes.float8_e4m3fn) if name == "fp8" else values, scales


LAYOUTS = {
    "write_window": lambda width: WindowLayout(width, 160 if width >= 512 else 16),
    "write_main": MainPageLayout,
    "write_index": IndexPageLayout,
}


def write_arguments(
    op: str, width: int, rope_dim: int, batch: int, rows: int, *, outer: int, kind: str = "normal", seed: int = 0
) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and static arguments of a fused write of [batch, rows] rows into `outer` pages or slots.

    Every pool byte is random, every address differs, about one row in eight is dropped: with numbers too large, and
    negative ones. kind: one of `VALUES`; "consecutive" has neighbouring rows in neighbouring entries; "exact" has rows
    whose norm has no rounding that depends on the order of summation, and angles of 0 and a quarter turn.
    """
    rng = np.random.default_rng(seed)
    layout = LAYOUTS[op](width)
    inner = layout.length if op == "write_window" else 128
    n = batch * rows
    if kind == "consecutive":
        place = rng.integers(outer * inner) + np.arange(n)
    else:
        place = rng.choice(outer * inner, n, replace=n > outer * inner)
    place = place % (outer * inner)
    first, second = place // inner, place % inner
    wrong = rng.random(n)
    first = np.where(wrong < 0.04, outer + rng.integers(0, 9, n), np.where(wrong < 0.08, -1 - rng.integers(9), first))
    second = np.where((wrong > 0.08) & (wrong < 0.12), inner + rng.integers(0, 9, n), second)
    if kind == "exact":
        x = rng.choice([-2, 2], (n, width)).astype(ml_dtypes.bfloat16)
        angle = rng.integers(0, 2, (n, rope_dim // 2)) * np.pi / 2
    else:
        x = values(kind if kind in VALUES else "normal", n, width, ml_dtypes.bfloat16, seed + 1)
        angle = rng.uniform(0, 2 * np.pi, (n, rope_dim // 2))
    table = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    if kind == "exact":
        table = np.round(table)
    arrays = {
        "x": x.reshape(batch, rows, width),
        "gain": rng.normal(size=width).astype(ml_dtypes.bfloat16),
        "rope": table.reshape(batch, rows, 2, rope_dim // 2),
        "pool": rng.integers(0, 256, layout.shape(outer), dtype=np.uint8),
        "first": first.reshape(batch, rows).astype(np.int32),
        "second": second.reshape(batch, rows).astype(np.int32),
    }
    names = {
        "write_window": ("x", "gain", "rope", "rings", "slot", "index"),
        "write_main": ("latent", None, "rope", "pool", "page", "entry"),
        "write_index": ("key", "gain", "rope", "pool", "page", "entry"),
    }[op]
    static = {"layout": layout} if op == "write_main" else {"layout": layout, "eps": 1e-6}
    return {name: a for name, a in zip(names, arrays.values(), strict=True) if name}, static
