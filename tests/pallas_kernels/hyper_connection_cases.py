"""Random and adversarial arguments of the mHC step, by name, and the check that any implementation passes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.hyper_connection import ref

STATIC = {"iters": 20, "norm_eps": 1e-20, "hc_eps": 1e-6}
NAMES = ("streams", "y", "post", "comb", "pre", "fn", "scale", "base", "gain")
_BFLOAT16 = ("streams", "y", "gain")


def _zero_streams(rng, a):
    a["streams"][:], a["y"][:] = 0, 0


def _zero_rows(rng, a):
    a["streams"][::2], a["y"][::2] = 0, 0


def _one_huge(rng, a):
    """One value in every row that dwarfs the sums of all others."""
    t, r, d = a["streams"].shape
    a["streams"][np.arange(t), rng.integers(0, r, t), rng.integers(0, d, t)] = 1e12


def _huge(rng, a):
    a["streams"] *= 1e15
    a["y"] *= 1e15


def _minute(rng, a):
    # streams whose squares are subnormal would differ by the flushing of subnormals
    a["streams"] *= 1e-12
    a["y"] *= 1e-12


def _permuting(rng, a):
    """Coefficients that copy: the new streams are the old ones in another order."""
    a["comb"][:] = np.eye(4)[[1, 2, 3, 0]]
    a["post"][:] = 0
    a["pre"][:] = np.eye(4)[2]


def _cancelling(rng, a):
    """Sums far smaller than their terms, so that the order of rounding shows."""
    a["streams"][:, 1] = -a["streams"][:, 0]
    a["comb"][:] = 0.25
    a["pre"][:] = 1


def _saturated(rng, a):
    """Mixes so large that a softmax is one-hot and sigmoids are 0 or 1."""
    a["fn"] *= 100


def _equal_tokens(rng, a):
    for name in ("streams", "y", "post", "comb", "pre"):
        a[name][:] = a[name][:1]


CASES = {
    "random": lambda rng, a: None,
    "zero_streams": _zero_streams,
    "zero_rows": _zero_rows,
    "one_huge": _one_huge,
    "huge": _huge,
    "minute": _minute,
    "permuting": _permuting,
    "cancelling": _cancelling,
    "saturated": _saturated,
    "equal_tokens": _equal_tokens,
}


def _arguments(rng, t: int, d: int, r: int = 4) -> dict[str, np.ndarray]:
    """Distributed as those of `pallas_kernels.hyper_connection.arg_specs`; numpy compiles nothing for a new size."""

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    mix = (2 + r) * r
    comb = np.exp(rng.normal(size=(t, r, r)))
    arrays = {
        "streams": 4 * rng.normal(size=(t, r, d)),
        "y": rng.normal(size=(t, d)),
        "post": 2 * sigmoid(rng.normal(size=(t, r))),
        "comb": comb / comb.sum(axis=-1, keepdims=True),
        "pre": sigmoid(rng.normal(size=(t, r))),
        "fn": rng.normal(size=(mix, r * d)) * (r * d) ** -0.5,
        "scale": 1 + 0.1 * rng.normal(size=3),
        "base": rng.normal(size=mix),
        "gain": 1 + 0.1 * rng.normal(size=d),
    }
    wide = {name: a.astype(np.float32) for name, a in arrays.items()}
    return wide | {name: wide[name].astype(ml_dtypes.bfloat16).astype(np.float32) for name in _BFLOAT16}


def make(case: str, seed: int, tokens: int, dim: int) -> tuple[jax.Array, ...]:
    """Arguments in the order of `ref.residual_step`."""
    rng = np.random.default_rng(seed)
    arrays = _arguments(rng, tokens, dim)
    CASES[case](rng, arrays)
    return tuple(jnp.asarray(arrays[n].astype(ml_dtypes.bfloat16) if n in _BFLOAT16 else arrays[n]) for n in NAMES)


def exact(args) -> tuple[np.ndarray, ...]:
    """The step in float64 without any rounding: new streams, x, pre, post, comb."""
    streams, y, post, comb, pre, fn, scale, base, gain = (np.asarray(a, np.float64) for a in args)
    new = post[..., None] * y[:, None] + np.einsum("tij,tid->tjd", comb, streams)
    u = np.einsum("tk,tkd->td", pre, new)
    x = u / np.sqrt((u * u).mean(-1, keepdims=True) + STATIC["norm_eps"]) * gain
    flat = new.reshape(len(new), -1)
    mix = flat @ fn.T / np.sqrt((flat * flat).mean(-1, keepdims=True) + STATIC["norm_eps"])
    logits = mix * np.repeat(scale, [4, 4, 16]) + base
    gate = 1 / (1 + np.exp(-logits[:, :8]))
    eps = STATIC["hc_eps"]
    c = logits[:, 8:].reshape(-1, 4, 4)
    c = np.exp(c - c.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + eps
    c = c / (c.sum(1, keepdims=True) + eps)
    for _ in range(STATIC["iters"] - 1):
        c = c / (c.sum(2, keepdims=True) + eps)
        c = c / (c.sum(1, keepdims=True) + eps)
    return new, x, gate[:, :4] + eps, 2 * gate[:, 4:], c


def _ulps(a, b) -> np.ndarray:
    """How many bfloat16 values lie between a and b, elementwise."""

    def ordered(x):
        bits = np.asarray(x).view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(ordered(a) - ordered(b))


@jax.jit
def _reference(new, streams, y, post, comb, pre, fn, scale, base, gain):
    """New streams, and from the given ones u, x and the coefficients."""
    u = ref.collapse(new, pre)
    x = ref.rms_norm(u, gain, STATIC["norm_eps"])
    return ref.update(streams, y, post, comb), u, x, ref.mix_coefficients(new, fn, scale, base, **STATIC)


def check(out, args) -> None:
    """Compares with the reference run on the kernel's own new streams, so that one rounding does not hide another."""
    new, x, *coefficients = out
    expected, u, ref_x, ref_coefficients = _reference(new, *args)
    assert new.shape == expected.shape and new.dtype == jnp.bfloat16
    # float32 products and sums may be contracted differently: the last bit where the sum lies at a tie, and after
    # cancellation the rounding of the terms
    terms = np.abs(np.asarray(args[2], np.float32)[..., None] * np.asarray(args[1], np.float32)[:, None]) + np.einsum(
        "tij,tid->tjd", np.abs(np.asarray(args[3], np.float32)), np.abs(np.asarray(args[0], np.float32))
    )
    difference = np.abs(np.asarray(new, np.float32) - np.asarray(expected, np.float32))
    off = _ulps(new, expected)
    assert ((off <= 1) | (difference <= 4e-7 * terms)).all()
    # a tie is hit by about one sum in 2^15; cancelling sums are all rounding
    assert (off > 0).mean() < 1e-3 or (difference <= 4e-7 * terms).all()

    terms = np.einsum("tk,tkd->td", np.abs(np.asarray(args[4])), np.abs(np.asarray(new, np.float32)))
    scale = np.abs(np.asarray(args[8], np.float32)) / np.sqrt(
        (np.asarray(u, np.float32).astype(np.float64) ** 2).mean(-1, keepdims=True) + STATIC["norm_eps"]
    )
    difference = np.abs(np.asarray(x, np.float32) - np.asarray(ref_x, np.float32))
    # one rounding of u and one of x, each a last bit at most
    assert ((_ulps(x, ref_x) <= 2) | (difference <= 4e-7 * terms * scale)).all()

    for name, got, want, shape in zip(
        ("pre", "post", "comb"), coefficients, ref_coefficients, (args[4], args[2], args[3]), strict=True
    ):
        assert got.shape == shape.shape and got.dtype == jnp.float32, name
        # sums of 4 * D float32 products in another order; `saturated` has mixes of order 100
        scale = max(1.0, float(np.abs(np.asarray(args[5])).max()) * args[5].shape[1] ** 0.5)
        np.testing.assert_allclose(got, want, rtol=2e-5 * scale, atol=2e-6 * scale, err_msg=name)
