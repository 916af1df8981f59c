"""Engram row ids inside a compiled function, exact with 32-bit integers only.

A speculative step hashes the tokens it has just drafted without going back to the host. JAX has no 64-bit integers by
default, so a product of up to 63 bits is kept as two uint32 limbs and reduced modulo its prime byte by byte.

Axis letters as in `engram_hash`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import ConfigError
from dsv41.ops.engram_hash import EngramHashSpec, lookback

# (remainder << 8) must fit 32 bits.
_PRIME_LIMIT = 1 << 24
_ROW_LIMIT = 1 << 31


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramHashArrays:
    """`EngramHashSpec` as 32-bit arrays that a compiled function takes as an argument."""

    multipliers_low: jax.Array  # uint32 [L, N]
    multipliers_high: jax.Array  # uint32 [L, N]
    primes: jax.Array  # uint32 [L, O, H]
    offsets: jax.Array  # int32 [L, O * H]
    pad_class: jax.Array  # int32 []


def engram_hash_arrays(spec: EngramHashSpec) -> EngramHashArrays:
    """The device form of a spec (numpy arrays, not yet on a device).

    Raises:
      ConfigError: a prime is not below 2^24 or a table has 2^31 rows or more, which 32-bit arithmetic cannot address.
    """
    if spec.primes.size and spec.primes.max() >= _PRIME_LIMIT:
        raise ConfigError(f"text_config.engram_vocab_size: on the device every prime must be below {_PRIME_LIMIT}")
    if max(spec.rows_per_layer, default=0) >= _ROW_LIMIT:
        raise ConfigError(f"text_config.engram_num_embeddings: on the device a table must have below {_ROW_LIMIT} rows")
    return EngramHashArrays(
        multipliers_low=(spec.multipliers & 0xFFFFFFFF).astype(np.uint32),
        multipliers_high=(spec.multipliers >> 32).astype(np.uint32),
        primes=spec.primes.astype(np.uint32),
        offsets=spec.offsets.astype(np.int32),
        pad_class=np.int32(spec.pad_class),
    )


def classes_window_device(
    arrays: EngramHashArrays, token_map: jax.Array, tokens: jax.Array, history: jax.Array, image_token_id: int
) -> jax.Array:
    """Look-back windows of new tokens; the traced counterpart of the first half of `engram_hash.row_ids`.

    A compiled function cannot raise, so an id outside [0, V) blocks the look-back like an image token; it never reads
    another id's class.

    Args:
      arrays: the constants.
      token_map: int32 [V].
      tokens: int32 [B, T].
      history: int32 [B, N - 1], newest last, -1 before the sequence start.
      image_token_id: the id that marks an image span.

    Returns:
      uint32 [B, T, N], slot 0 the token itself.
    """
    token_map = jnp.asarray(token_map)
    vocab_size = token_map.shape[0]

    def classes_and_blocked(ids):
        blocked = (ids < 0) | (ids >= vocab_size) | (ids == image_token_id)
        return token_map[jnp.where(blocked, 0, ids)], blocked

    windows = lookback(*classes_and_blocked(tokens), *classes_and_blocked(history), arrays.pad_class, xp=jnp)
    return windows.astype(jnp.uint32)


def _multiply(a: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint32 a times the 64-bit (high, low), modulo 2^64, as (low, high) uint32 limbs."""
    a0, a1 = a & 0xFFFF, a >> 16
    b0, b1 = low & 0xFFFF, low >> 16
    p00, p01, p10 = a0 * b0, a0 * b1, a1 * b0
    middle = (p00 >> 16) + (p01 & 0xFFFF) + (p10 & 0xFFFF)
    carry = (p01 >> 16) + (p10 >> 16) + (middle >> 16)
    return (p00 & 0xFFFF) | (middle << 16), a1 * b1 + carry + a * high


def _remainder(low: jax.Array, high: jax.Array, prime: jax.Array) -> jax.Array:
    """(high, low) modulo a prime below 2^24, uint32."""
    remainder = high % prime
    for shift in (24, 16, 8, 0):
        remainder = ((remainder << 8) | ((low >> shift) & 0xFF)) % prime
    return remainder


def row_ids_device(arrays: EngramHashArrays, classes_window: jax.Array) -> jax.Array:
    """Hashes look-back windows to table rows; equal to `engram_hash.hash_rows` on every valid class.

    Args:
      arrays: the constants.
      classes_window: uint32 [..., N], slot 0 the token itself.

    Returns:
      int32 [..., L, O * H].
    """
    windows = classes_window.astype(jnp.uint32)[..., None, :]
    low, high = _multiply(windows, arrays.multipliers_low, arrays.multipliers_high)
    ngram_low, ngram_high = low[..., 0], high[..., 0]
    orders = []
    for j in range(1, low.shape[-1]):
        ngram_low, ngram_high = ngram_low ^ low[..., j], ngram_high ^ high[..., j]
        primes = arrays.primes[:, j - 1, :]
        orders.append(_remainder(ngram_low[..., None], ngram_high[..., None], primes))
    buckets = jnp.concatenate(orders, axis=-1)
    return buckets.astype(jnp.int32) + arrays.offsets
