"""Drawing the next token: temperature, top-k and top-p per row, one compiled function for a mixed batch.

Axis letters: B rows (sequences), V vocabulary.

A draw depends on the row's logits and parameters, its seed and its step only: never on which rows share the batch.
Temperature 0 is the argmax. Ties always go to the lower id, in the argmax and at the cuts of top-k and top-p alike.
-inf marks a token that may not be drawn. A row that holds NaN or +inf, or nothing but -inf, has no distribution: its
sample is `NO_TOKEN`, which no vocabulary contains, so that the request fails instead of going on with an arbitrary id.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import DSV41Error

NO_TOKEN = -1
"""The sample of a row without a distribution."""

# Draws must not depend on jax's configurable default generator.
_GENERATOR = "threefry2x32"
# Folded in before a round's index; no step has it, since steps are int32 and count from 0.
_ROUNDS = 0xFFFFFFFF
# Dividing by less would overflow the largest float32 distances; far below, only the maximum has any mass left.
_GREEDY_BELOW = 1e-6


def _check(ok: bool, field: str, expected: str, value: object) -> None:
    if not ok:
        raise DSV41Error(f"{field}: expected {expected}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens.

    Attributes:
      temperature: divides the logits; 0 takes the argmax, whatever the other fields.
      top_p: in (0, 1]; keeps the smallest set of best tokens whose mass reaches it, at least one. 1 keeps all.
      top_k: keeps that many best tokens, before top_p; 0 keeps all.
      seed: in [0, 2^32).

    Raises:
      DSV41Error: a field is out of range; the message names it.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    seed: int = 0

    def __post_init__(self):
        for field in ("temperature", "top_p"):
            value = getattr(self, field)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            _check(is_number and math.isfinite(value), field, "a finite number", value)
        _check(self.temperature >= 0, "temperature", "0 or more", self.temperature)
        _check(0 < self.top_p <= 1, "top_p", "a number in (0, 1]", self.top_p)
        _check(_is_int(self.top_k) and 0 <= self.top_k < 2**31, "top_k", "an integer, 0 or more", self.top_k)
        _check(_is_int(self.seed) and 0 <= self.seed < 2**32, "seed", "an integer in [0, 2^32)", self.seed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingArrays:
    """The parameters of a batch."""

    temperature: jax.Array  # float32 [B]
    top_p: jax.Array  # float32 [B]
    top_k: jax.Array  # int32 [B]
    seed: jax.Array  # uint32 [B]


def sampling_arrays(params: Sequence[SamplingParams]) -> SamplingArrays:
    """Parameters of the rows of a batch, as numpy arrays."""
    return SamplingArrays(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_p=np.array([p.top_p for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        seed=np.array([p.seed for p in params], np.uint32),
    )


def all_greedy(params: SamplingArrays) -> jax.Array:
    """bool []: every row takes its best token, so that no noise is needed."""
    return jnp.all(params.temperature < _GREEDY_BELOW)


def step_keys(seed: jax.Array, step: jax.Array) -> jax.Array:
    """Random keys [B] from uint32 seeds [B] and int32 steps [B] (the index of the token to draw in its request)."""

    def key(seed, step):
        return jax.random.fold_in(jax.random.key(seed, impl=_GENERATOR), step)

    return jax.vmap(key)(jnp.asarray(seed, jnp.uint32), jnp.asarray(step, jnp.int32))


def round_keys(seed: jax.Array, round_index: jax.Array, purpose: int = 0) -> jax.Array:
    """Random keys of draft-and-verify rounds, in a stream of their own next to that of `step_keys`.

    Noise may not be keyed by the position of the token it draws. Whether a draft is kept depends on those behind it
    under the block rule, and on how many of them are verified; the noise of a position whose draft was dropped has
    therefore already decided something, and a later draw from it would not be free. So every round has fresh noise,
    however few tokens the round before it gave, and everything drawn inside a round (each draft, the acceptance
    tests, the next token) has a purpose of its own.

    Args:
      seed: uint32 [B].
      round_index: int32 [B], rounds that the request has begun before this one.
      purpose: 0 or more; what is drawn, different for each draw of the round.

    Returns:
      keys [B].
    """

    def key(seed, index):
        rounds = jax.random.fold_in(jax.random.key(seed, impl=_GENERATOR), _ROUNDS)
        return jax.random.fold_in(jax.random.fold_in(rounds, index), purpose)

    return jax.vmap(key)(jnp.asarray(seed, jnp.uint32), jnp.asarray(round_index, jnp.int32))


def _order(x: jax.Array) -> jax.Array:
    """float32 -> uint32 that compare like the floats (no NaN); -0 and +0 become one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_level(order: jax.Array, amount: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest level [B] such that the amounts of elements at or above it still add up to `wanted`.

    Binary search on the bits: 32 passes over [B, V] instead of a sort of long rows, which is slow on accelerators.
    """

    def narrow(i, level):
        trial = level | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        total = jnp.sum(jnp.where(order >= trial[:, None], amount, 0), axis=-1)
        return jnp.where(total >= wanted, trial, level)

    return jax.lax.fori_loop(0, 32, narrow, jnp.zeros(order.shape[:1], jnp.uint32))


def _keep_above(order: jax.Array, level: jax.Array, ties: jax.Array) -> jax.Array:
    """bool [B, V]: elements above the level, and of those at it the first `ties` by id."""
    at_level = order == level[:, None]
    return (order > level[:, None]) | (at_level & (jnp.cumsum(at_level, axis=-1) <= ties[:, None]))


def _top_k_mask(scaled: jax.Array, top_k: jax.Array) -> jax.Array:
    vocabulary = scaled.shape[-1]
    k = jnp.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    order = _order(scaled)
    level = _largest_level(order, jnp.int32(1), k)
    above = jnp.sum(order > level[:, None], axis=-1)
    return _keep_above(order, level, k - above)


def _top_p_mask(scaled: jax.Array, top_p: jax.Array) -> jax.Array:
    order, mass = _order(scaled), jnp.exp(scaled)
    wanted = top_p * jnp.sum(mass, axis=-1)
    level = _largest_level(order, mass, wanted)
    above = jnp.sum(jnp.where(order > level[:, None], mass, 0), axis=-1)
    each = jnp.max(jnp.where(order == level[:, None], mass, 0), axis=-1)
    ties = jnp.maximum(jnp.ceil((wanted - above) / each), 1).astype(jnp.int32)
    return _keep_above(order, level, ties) | (top_p >= 1)[:, None]


def has_distribution(logits: jax.Array) -> jax.Array:
    """bool [B]: rows of float32 [B, V] without NaN and +inf that leave something to draw."""
    # Not every backend's maximum hands NaN on.
    return jnp.isfinite(jnp.max(logits, axis=-1)) & ~jnp.any(jnp.isnan(logits), axis=-1)


def filter_logits(logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The logits of the distribution that a row is drawn from, up to a constant a row.

    Temperature first, then top-k, then top-p on what top-k left. `jax.nn.softmax` of the result gives the
    probabilities; at temperature 0 all of the mass is on the lowest id of the maximum.

    Args:
      logits: float32 [B, V].
      temperature: float32 [B], 0 or more.
      top_k: int32 [B]; 0, or above V, keeps all.
      top_p: float32 [B], in (0, 1].

    Returns:
      float32 [B, V]: (logit - row maximum) / temperature where kept, else -inf. Rows without a distribution are NaN.
    """
    greedy = temperature < _GREEDY_BELOW
    logits = logits.astype(jnp.float32)
    best = jnp.max(logits, axis=-1, keepdims=True)
    # Subtracting first keeps tiny temperatures from overflowing.
    scaled = (logits - best) / jnp.where(greedy, 1.0, temperature)[:, None]

    def keep(mask, values):
        return jnp.where(mask, values, -jnp.inf)

    cuts_k = ~greedy & (top_k > 0) & (top_k < logits.shape[-1])
    cuts_p = ~greedy & (top_p < 1)
    # A batch that asks for no cut pays for none.
    scaled = jax.lax.cond(jnp.any(cuts_k), lambda x: keep(_top_k_mask(x, top_k), x), lambda x: x, scaled)
    scaled = jax.lax.cond(jnp.any(cuts_p), lambda x: keep(_top_p_mask(x, top_p), x), lambda x: x, scaled)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    only_best = keep(ids == jnp.argmax(logits, axis=-1)[:, None], jnp.zeros_like(scaled))
    scaled = jnp.where(greedy[:, None], only_best, scaled)
    return jnp.where(has_distribution(logits)[:, None], scaled, jnp.nan)


def filtered_logprobs(logits: jax.Array, params: SamplingArrays) -> jax.Array:
    """Log probabilities that the positions of each row are drawn with.

    Args:
      logits: float32 [B, T, V].
      params: of the rows; every position of a row has the same.

    Returns:
      float32 [B, T, V], -inf where cut off; at temperature 0 nothing but 0 and -inf. Positions without a
      distribution are NaN.
    """
    rows, positions, vocabulary = logits.shape
    # Rows of one long batch, not a vmap over T, under which `filter_logits` would take both sides of its branches.
    per_position = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), positions), params)
    flat = logits.reshape(rows * positions, vocabulary)
    kept = filter_logits(flat, per_position.temperature, per_position.top_k, per_position.top_p)
    return jax.nn.log_softmax(kept, axis=-1).reshape(logits.shape)


def _noise(keys: jax.Array, vocabulary: int) -> jax.Array:
    """Gumbel noise float32 [B, V], finite."""
    # "high": with 23-bit uniforms, the noise of a large vocabulary would often tie.
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary,), jnp.float32, mode="high"))(keys)


def draw(law: jax.Array, keys: jax.Array, certain: jax.Array | bool = False) -> jax.Array:
    """Draws one token a row from logits as they are (Gumbel-max).

    Args:
      law: float32 [B, V], log probabilities up to a constant a row.
      keys: random keys [B].
      certain: bool []; every row leaves one token only, so that no noise is needed.

    Returns:
      int32 [B]; `NO_TOKEN` in rows without a distribution.
    """
    noise_of = functools.partial(_noise, vocabulary=law.shape[-1])
    noise = jax.lax.cond(certain, lambda _: jnp.zeros_like(law), noise_of, keys)
    ids = jnp.argmax(law + noise, axis=-1).astype(jnp.int32)
    return jnp.where(has_distribution(law), ids, NO_TOKEN)


def sample(logits: jax.Array, keys: jax.Array, params: SamplingArrays) -> jax.Array:
    """Draws one token a row (Gumbel-max on the filtered logits).

    Args:
      logits: float32 [B, V].
      keys: random keys [B] from `step_keys`.
      params: of the rows.

    Returns:
      int32 [B]; `NO_TOKEN` in rows without a distribution.
    """
    with jax.named_scope("sample"):
        filtered = filter_logits(logits, params.temperature, params.top_k, params.top_p)
        return draw(filtered, keys, certain=all_greedy(params))
