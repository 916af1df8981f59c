"""Engram row ids on the host: n-gram hashes of compressed token ids (architecture.md section 5).

Everything is int64 numpy. The products need 63 bits, which JAX does not have by default and a double cannot hold;
`engram_hash_device` computes the same numbers from 32-bit limbs.

Axis letters: B sequences, T new tokens, N look-back slots (`engram_max_ngram_size`), L Engram layers, O n-gram orders
(2..N, so N - 1 of them), H heads per order. Slot 0 of a window is the token itself, slot j the token j before it.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import numpy as np

from dsv41.config import ConfigError, DSV41Error, TextConfig

BEFORE_START = -1
"""Stands in a history for a position before the sequence start."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EngramHashSpec:
    """The constants of the hash.

    Attributes:
      layer_ids: the layer number of each Engram table.
      multipliers: int64 [L, N], odd, one per (layer, look-back slot).
      primes: int64 [L, O, H], the bucket counts.
      offsets: int64 [L, O * H], the first row of each (order, head) bucket range, order-major.
      pad_class: class of the positions that a look-back may not see.
      class_count: number of classes; `class * multiplier` stays below 2^63 for every class below it.
    """

    layer_ids: tuple[int, ...]
    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray
    pad_class: int
    class_count: int

    @property
    def window(self) -> int:
        """Look-back slots, the token itself included."""
        return self.multipliers.shape[1]

    @property
    def columns(self) -> int:
        """Row ids per token and layer: orders * heads."""
        return self.offsets.shape[1]

    @property
    def rows_per_layer(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(int(n) for n in self.primes.sum(axis=(1, 2)))

    def of_layer(self, ordinal: int) -> EngramHashSpec:
        """The constants of one table, counted from 0: the hash of each layer is its own."""
        one = slice(ordinal, ordinal + 1)
        return dataclasses.replace(
            self,
            layer_ids=self.layer_ids[one],
            multipliers=self.multipliers[one],
            primes=self.primes[one],
            offsets=self.offsets[one],
        )


def _primes_up_to(limit: int) -> np.ndarray:
    """All primes <= limit, int64, ascending."""
    is_prime = np.ones(max(limit + 1, 2), bool)
    is_prime[:2] = False
    for n in range(2, math.isqrt(max(limit, 0)) + 1):
        if is_prime[n]:
            is_prime[n * n :: n] = False
    return np.flatnonzero(is_prime[: limit + 1])


def first_primes(start: int, count: int) -> np.ndarray:
    """The first `count` primes >= `start`, int64 [count], ascending: a sieve of growing segments above `start`."""
    start = max(start, 2)
    found: list[np.ndarray] = []
    missing = count
    length = 4096
    while missing > 0:
        is_prime = np.ones(length, bool)
        for p in _primes_up_to(math.isqrt(start + length)):
            # The smallest multiple inside the segment that is not the prime itself.
            first = max(p * p, -(-start // p) * p)
            is_prime[first - start :: p] = False
        found.append(start + np.flatnonzero(is_prime)[:missing])
        missing -= len(found[-1])
        start += length
        length *= 2
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


def _multipliers(layer_id: int, window: int, class_count: int) -> np.ndarray:
    """int64 [N]. The bound keeps `class * multiplier` below 2^63."""
    bound = max(1, (int(np.iinfo(np.int64).max) // class_count) // 2)
    draws = np.random.default_rng(10007 * layer_id).integers(0, bound, size=window, dtype=np.int64)
    return draws * 2 + 1


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def engram_hash_spec(text_config: TextConfig, token_map_pad_class: int) -> EngramHashSpec:
    """Derives the constants from the config; `token_map_pad_class` is the class of `engram_pad_token_id`.

    Each order restarts the prime search at `engram_vocab_size` and never reuses a prime, so the primes in (layer,
    order, head) order are simply consecutive.

    Raises:
      ConfigError: a table size in `text_config.engram_num_embeddings` is not the sum of its primes, or the pad class is
        not a class.
    """
    c = text_config
    layers, window = len(c.engram_layer_ids), c.engram_max_ngram_size
    if layers and not 0 <= token_map_pad_class < c.engram_compressed_vocab_size:
        raise ConfigError(
            f"text_config.engram_pad_token_id: its class {token_map_pad_class} is outside [0, "
            f"engram_compressed_vocab_size={c.engram_compressed_vocab_size})"
        )
    shape = (layers, window - 1, c.engram_n_heads)
    primes = first_primes(c.engram_vocab_size, math.prod(shape)).reshape(shape)
    flat = primes.reshape(layers, math.prod(shape[1:]))
    rows = tuple(int(n) for n in primes.sum(axis=(1, 2)))
    if rows != tuple(c.engram_num_embeddings):
        raise ConfigError(
            f"text_config.engram_num_embeddings: expected {list(rows)}, the sums of the primes from engram_vocab_size="
            f"{c.engram_vocab_size} on, got {list(c.engram_num_embeddings)}"
        )
    multipliers = [_multipliers(i, window, c.engram_compressed_vocab_size) for i in c.engram_layer_ids]
    return EngramHashSpec(
        layer_ids=c.engram_layer_ids,
        multipliers=_frozen(np.array(multipliers, np.int64).reshape(layers, window)),
        primes=_frozen(primes),
        offsets=_frozen(flat.cumsum(axis=1) - flat),
        pad_class=int(token_map_pad_class),
        class_count=c.engram_compressed_vocab_size,
    )


def lookback(classes, blocked, history_classes, history_blocked, pad_class, *, xp: ModuleType = np):
    """The window of each token, oldest slots blanked.

    Walking back from a token, the first blocked position (the token itself included) and everything older become
    `pad_class`. Works on numpy and, with `xp=jax.numpy`, on traced arrays.

    Args:
      classes: int [B, T] of the new tokens; anything where blocked.
      blocked: bool [B, T], true at image-span tokens.
      history_classes: int [B, N - 1] of the positions just before, newest last.
      history_blocked: bool [B, N - 1], true at image-span tokens and before the sequence start.
      pad_class: int.
      xp: the array module.

    Returns:
      [B, T, N] of `classes`' type, slot 0 the token itself.
    """
    tokens, reach = classes.shape[1], history_classes.shape[1]
    all_classes = xp.concatenate([history_classes, classes], axis=1)
    all_blocked = xp.concatenate([history_blocked, blocked], axis=1)
    hidden = xp.zeros(classes.shape, bool)
    slots = []
    for j in range(reach + 1):
        past = slice(reach - j, reach - j + tokens)
        hidden = hidden | all_blocked[:, past]
        slots.append(xp.where(hidden, pad_class, all_classes[:, past]))
    return xp.stack(slots, axis=-1)


def hash_rows(spec: EngramHashSpec, class_ids_window: np.ndarray) -> np.ndarray:
    """Hashes look-back windows to table rows.

    The n-gram hash is the XOR of the first n products; per head it is reduced modulo a prime, and the bucket ranges of
    the heads lie end to end.

    Args:
      spec: the constants.
      class_ids_window: integers [..., N], slot 0 the token itself.

    Returns:
      int64 [..., L, O * H], rows of each layer's table, order-major.

    Raises:
      DSV41Error: a class lies outside [0, class_count), for which the products would overflow.
    """
    windows = np.asarray(class_ids_window)
    if windows.shape[-1] != spec.window:
        raise DSV41Error(f"engram: expected windows of {spec.window} classes, got shape {windows.shape}")
    if windows.size and not (windows.min() >= 0 and windows.max() < spec.class_count):
        bad = windows[(windows < 0) | (windows >= spec.class_count)].flat[0]
        raise DSV41Error(f"engram: class {bad} is outside [0, {spec.class_count})")
    products = windows.astype(np.int64)[..., None, :] * spec.multipliers
    ngrams = np.bitwise_xor.accumulate(products, axis=-1)[..., 1:]
    buckets = ngrams[..., None] % spec.primes
    return buckets.reshape(*buckets.shape[:-2], spec.columns) + spec.offsets


def _check_ids(ids: np.ndarray, vocab_size: int, lowest: int, first_position: int) -> None:
    bad = np.argwhere((ids < lowest) | (ids >= vocab_size))
    if len(bad):
        row, column = bad[0]
        raise DSV41Error(
            f"engram: token id {ids[row, column]} at row {row}, position {first_position + column} is outside "
            f"[0, {vocab_size})"
        )


def class_windows(
    spec: EngramHashSpec, token_map: np.ndarray, tokens: np.ndarray, history: np.ndarray, image_token_id: int
) -> np.ndarray:
    """Look-back windows of new tokens, from token ids alone. Arguments and errors as of `row_ids`.

    Returns:
      integers [B, T, N] of classes, slot 0 the token itself.
    """
    tokens, history = np.asarray(tokens), np.asarray(history)
    expected = (tokens.shape[0], spec.window - 1)
    if tokens.ndim != 2 or history.shape != expected:
        raise DSV41Error(
            f"engram: expected tokens [B, T] and history [B, {spec.window - 1}], got {tokens.shape} and {history.shape}"
        )
    if not (np.issubdtype(tokens.dtype, np.integer) and np.issubdtype(history.dtype, np.integer)):
        raise DSV41Error(f"engram: expected integer token ids, got {tokens.dtype} and {history.dtype}")
    _check_ids(tokens, len(token_map), 0, 0)
    _check_ids(history, len(token_map), BEFORE_START, -history.shape[1])
    before_start = history == BEFORE_START
    return lookback(
        token_map[tokens],
        tokens == image_token_id,
        token_map[np.where(before_start, 0, history)],
        before_start | (history == image_token_id),
        spec.pad_class,
    )


def row_ids(
    spec: EngramHashSpec, token_map: np.ndarray, tokens: np.ndarray, history: np.ndarray, image_token_id: int
) -> np.ndarray:
    """Table rows of new tokens, from token ids alone.

    Args:
      spec: the constants.
      token_map: integers [V], class of each token id.
      tokens: integers [B, T], the new tokens; every position of an image span carries `image_token_id`.
      history: integers [B, N - 1], the token ids just before them, newest last, -1 before the sequence start.
      image_token_id: the id that marks an image span.

    Returns:
      int64 [B, T, L, O * H].

    Raises:
      DSV41Error: a token id is outside [0, V); the message names row, position (from the first new token, negative in
        the history) and value. Padding must therefore use a real id.
    """
    return hash_rows(spec, class_windows(spec, token_map, tokens, history, image_token_id))
