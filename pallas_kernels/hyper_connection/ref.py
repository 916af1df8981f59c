"""The meaning of the mHC step in plain jnp (architecture.md section 2). R streams of width D a token."""

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_order import contract, with_fixed_rows
from pallas_kernels.norms import rms_norm
from pallas_kernels.rounding import round_to_bf16


def split_mix(mix: jax.Array, scale: jax.Array, base: jax.Array, *, num_streams: int, iters: int, eps: float):
    """Turns raw mixes into coefficients.

    Args:
      mix: float32 [..., (2 + R) * R]: R pre, R post, then R x R comb row-major.
      scale: float32 [3]: pre, post, comb.
      base: float32 [(2 + R) * R].
      num_streams: R.
      iters: Sinkhorn rounds; the first is softmax over rows and one division by column sums.
      eps: added to pre, to the softmax, and to every divisor.

    Returns:
      pre float32 [..., R], post float32 [..., R], comb float32 [..., R, R] with axes [source stream, target stream].
    """
    r = num_streams
    pre = jax.nn.sigmoid(mix[..., :r] * scale[0] + base[:r]) + eps
    post = 2 * jax.nn.sigmoid(mix[..., r : 2 * r] * scale[1] + base[r : 2 * r])
    comb = (mix[..., 2 * r :] * scale[2] + base[2 * r :]).reshape(*mix.shape[:-1], r, r)
    comb = jax.nn.softmax(comb, axis=-1) + eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)

    def one_round(_, comb):
        comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        return comb / (comb.sum(axis=-2, keepdims=True) + eps)

    return pre, post, jax.lax.fori_loop(0, iters - 1, one_round, comb)


def mix_coefficients(
    streams: jax.Array, fn: jax.Array, scale: jax.Array, base: jax.Array, *, iters: int, norm_eps: float, hc_eps: float
):
    """Coefficients of one sublayer from its input streams.

    Args:
      streams: [..., R, D], any float type; computed in float32.
      fn: float32 [(2 + R) * R, R * D].
      scale, base, iters, hc_eps: as in `split_mix`.
      norm_eps: of the shared RMS statistic over the R * D values.

    Returns:
      pre, post, comb as in `split_mix`.
    """
    lead, r = streams.shape[:-2], streams.shape[-2]

    def coefficients(flat: jax.Array):
        inverse_rms = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + norm_eps)
        return split_mix(contract(flat, fn) * inverse_rms, scale, base, num_streams=r, iters=iters, eps=hc_eps)

    flat = streams.astype(jnp.float32).reshape(-1, r * streams.shape[-1])
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), with_fixed_rows(coefficients, flat))


def collapse(streams: jax.Array, pre: jax.Array) -> jax.Array:
    """Sublayer input: sum over streams of pre[k] * X[k] in float32. [..., R, D], [..., R] -> bfloat16 [..., D]."""
    x = streams.astype(jnp.float32)
    total = x[..., 0, :] * pre[..., 0, None]
    for k in range(1, x.shape[-2]):
        total = total + x[..., k, :] * pre[..., k, None]
    return round_to_bf16(total)


def update(streams: jax.Array, y: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """X'[j] = post[j] * y + sum over i of comb[i, j] * X[i], float32 with one cast.

    streams [..., R, D]; y [..., D]; post float32 [..., R]; comb float32 [..., R (source), R (target)] -> bfloat16
    [..., R, D].
    """
    x = streams.astype(jnp.float32)
    mixed = comb[..., 0, :, None] * x[..., 0, None, :]
    for i in range(1, x.shape[-2]):
        mixed = mixed + comb[..., i, :, None] * x[..., i, None, :]
    return round_to_bf16(post[..., None] * y.astype(jnp.float32)[..., None, :] + mixed)


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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `ops.residual_step`."""
    new_streams = update(streams, y, post, comb)
    x = rms_norm(collapse(new_streams, pre), gain, norm_eps)
    coefficients = mix_coefficients(new_streams, fn, scale, base, iters=iters, norm_eps=norm_eps, hc_eps=hc_eps)
    return new_streams, x, *coefficients
