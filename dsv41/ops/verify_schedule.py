"""How many drafts of each request are verified in a step.

Axis letters: B requests (rows), K drafts of a block, N entries of a table by batch size. A candidate is one draft
(r, k) of a request; its survival is the probability that the target accepts it and all before it. Batch tokens are
what the target forwards in a step: one anchor a request, and the admitted drafts.

A draft may be admitted by anything known before it was drawn, never by itself or a later one, or the output is no
longer the target's (dspark.md section 6.4). Confidence k depends on the drafts before k only. So `admit_top` and
`admit_while_improving` may use the present confidences; the search for the best number of drafts, `best_budget`, looks
at all of them at once and may only see old ones: `BudgetHistory`.
"""

from __future__ import annotations

import collections
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import DSV41Error

_NEGLIGIBLE = 1e-6
"""A survival below it is not worth a row of the batch."""


def survival(confidence_logits: jax.Array, temperatures: jax.Array) -> jax.Array:
    """Products of calibrated confidences, sigmoid(z_1/T_1) ... sigmoid(z_k/T_k) (dspark.md sections 5 and 7.1).

    Args:
      confidence_logits: float32 [B, K].
      temperatures: float32 [K], from the calibration; 1 leaves the head as it is.

    Returns:
      float32 [B, K] in [0, 1], not increasing along K; NaN from a NaN logit on.
    """
    confidence = jax.nn.sigmoid(confidence_logits.astype(jnp.float32) / temperatures)
    columns, product = [], jnp.ones_like(confidence[:, 0])
    for k in range(confidence.shape[1]):
        product = product * confidence[:, k]
        columns.append(product)
    return jnp.stack(columns, axis=1)


def expected_tokens(survival: jax.Array, lengths: jax.Array) -> jax.Array:
    """Tokens that a round is expected to give, float32 [B], with lengths int32 [B] drafts of each request verified."""
    verified = jnp.arange(survival.shape[1]) < lengths[:, None]
    return 1 + jnp.sum(jnp.where(verified, survival, 0), axis=1)


def _ranked(survival: jax.Array, caps: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    """Candidates from the best on: (survival float32 [B K], -1 where none; flat index int32 [B K] in [K, B] order)."""
    known = jax.lax.cummin(jnp.where(jnp.isnan(survival), 0, survival), axis=1)
    candidate = (jnp.arange(survival.shape[1]) < caps[:, None]) & (known >= least)
    # Position before request in the flat order, so that a stable sort breaks ties by position, then request.
    flat = jnp.where(candidate, known, -1).T.reshape(-1)
    order = jnp.argsort(-flat, stable=True)
    return flat[order], order


def _lengths(order: jax.Array, admitted: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """How many candidates of each request are among the first `admitted` of the order, int32 [B]."""
    rows, most = shape
    chosen = jnp.zeros(rows * most, jnp.int32).at[order].set((jnp.arange(rows * most) < admitted).astype(jnp.int32))
    return jnp.sum(chosen.reshape(most, rows), axis=0)


def admit_top(survival: jax.Array, caps: jax.Array, budget: jax.Array) -> jax.Array:
    """Verifies the `budget` likeliest drafts of the whole batch (dspark.md section 7.2 step 2).

    Ties go to the earlier position, then to the lower row. Since survival does not increase along K, what is admitted
    of a request is always its first drafts.

    Args:
      survival: float32 [B, K].
      caps: int32 [B], drafts that a request may verify; 0 in rows that are not in use.
      budget: int32 [], from step-old confidences or fixed.

    Returns:
      int32 [B] lengths, each in [0, cap], together no more than the budget. Survivals below 1e-6 or NaN are left out.
    """
    ranked, order = _ranked(survival, caps, _NEGLIGIBLE)
    return _lengths(order, jnp.minimum(budget, jnp.sum(ranked >= 0)), survival.shape)


def admit_while_improving(
    survival: jax.Array, caps: jax.Array, steps_per_second: jax.Array, active: jax.Array
) -> jax.Array:
    """Algorithm 1 of dspark.md section 7.1: takes drafts from the likeliest on until throughput stops rising.

    The stop at the first draft that brings nothing is what makes it lossless; on a cost in steps it stops early.

    Args:
      survival: float32 [B, K].
      caps: int32 [B].
      steps_per_second: float32 [N], by batch tokens; its last entry stands for all beyond.
      active: bool [B]; rows in use, each of which brings its anchor to the batch.

    Returns:
      int32 [B] lengths, 0 in rows that are not active.
    """
    ranked, order = _ranked(survival, jnp.where(active, caps, 0), 0)
    requests = jnp.sum(active)
    tokens = jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.maximum(ranked, 0))]) + requests
    batch = requests + jnp.arange(tokens.size)
    rate = tokens * jnp.asarray(steps_per_second)[jnp.minimum(batch, steps_per_second.shape[0] - 1)]
    improves = (rate[1:] > rate[:-1]) & (ranked >= 0)
    return _lengths(order, jnp.sum(jnp.cumprod(improves, dtype=jnp.int32)), survival.shape)


def best_budget(
    survival: np.ndarray,
    caps: np.ndarray,
    steps_per_second: Callable[[int], float] | np.ndarray,
    requests: int,
) -> int:
    """The number of drafts with the highest expected throughput, over all numbers (dspark.md section 7.2 step 1).

    Args:
      survival: float [B, K] of confidences that are older than every draft of the step it decides on.
      caps: int [B].
      steps_per_second: by batch tokens; an array's last entry stands for all beyond.
      requests: anchors in the batch.

    Returns:
      The K that maximises (requests + sum of the K highest survivals) * steps_per_second(requests + K); the least of
      equal ones.
    """
    caps = np.asarray(caps)[:, None]
    known = np.minimum.accumulate(np.nan_to_num(np.asarray(survival, np.float64), nan=0.0), axis=1)
    candidates = known[(np.arange(known.shape[1]) < caps) & (known >= _NEGLIGIBLE)]
    tokens = requests + np.concatenate([[0.0], np.cumsum(np.sort(candidates)[::-1])])
    batch = requests + np.arange(len(tokens))
    if callable(steps_per_second):
        rates = np.array([steps_per_second(int(b)) for b in batch], np.float64)
    else:
        table = np.asarray(steps_per_second, np.float64)
        rates = table[np.minimum(batch, len(table) - 1)]
    return int(np.argmax(tokens * rates))


class BudgetHistory:
    """Chooses each step's number of drafts from the confidences of `lag` steps before (dspark.md section 7.2).

    With a lag of 2, the host can choose while the step before is still running. A row's confidences count only for the
    request that gave them: rows whose request has begun since then, and all rows at first, count as certain to be
    accepted. Nothing but the number leaves here, so that old confidences never decide on a single draft.

    Each step: `budget`, `stamp` when it is launched, `record` with that stamp when its confidences have arrived.
    """

    def __init__(self, rows: int, block_size: int, lag: int = 2):
        """rows: of the batch; block_size: drafts of a block, K; lag: 1 or more.

        Raises:
          DSV41Error: a number is below 1.
        """
        for name, value in (("rows", rows), ("block_size", block_size), ("lag", lag)):
            if not isinstance(value, numbers.Integral) or value < 1:
                raise DSV41Error(f"{name}: expected an integer, 1 or more, got {value!r}")
        self._shape = (rows, block_size)
        self._generation = np.zeros(rows, np.int64)
        self._active = np.zeros(rows, bool)
        self._past: collections.deque[tuple[np.ndarray, np.ndarray]] = collections.deque(maxlen=lag)

    def begin(self, row: int) -> None:
        """A new request has the row from now on."""
        self._generation[row] += 1
        self._active[row] = True

    def release(self, row: int) -> None:
        """The row's request has finished; it takes no part until the next `begin`."""
        self._generation[row] += 1
        self._active[row] = False

    def stamp(self) -> np.ndarray:
        """Which requests have the rows now, int64 [rows]."""
        return self._generation.copy()

    def record(self, survival: np.ndarray, stamp: np.ndarray) -> None:
        """Keeps the survivals float [rows, K] of a step that was launched at the time of the stamp; in order of steps.

        Raises:
          DSV41Error: the shape is not [rows, K].
        """
        # A copy: the caller's may be a view of a buffer that the device reuses.
        survival = np.array(survival, np.float64)
        if survival.shape != self._shape:
            raise DSV41Error(f"survival: expected shape {self._shape}, got {survival.shape}")
        self._past.append((survival, stamp))

    def budget(self, caps: np.ndarray, steps_per_second: Callable[[int], float] | np.ndarray) -> int:
        """The number of drafts to verify in the step about to be launched, in [0, sum of the active rows' caps].

        Args:
          caps: int [rows].
          steps_per_second: as for `best_budget`.
        """
        survival = np.ones(self._shape)
        if len(self._past) == self._past.maxlen:
            old, stamp = self._past[0]
            same = stamp == self._generation
            survival[same] = old[same]
        caps = np.where(self._active, caps, 0)
        return best_budget(survival, caps, steps_per_second, int(self._active.sum()))
