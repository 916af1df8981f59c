"""Updates of tables whose rows and columns are balanced (training.md section 3.3).

A table has a row for each token or n-gram bucket, of which a batch touches few, and some thousands of times as often as
others. Balancing gives each row that is touched at all the same size of update, and each column too.

The stored array of a layer counts as one table: column norms are taken over the rows of all its hash heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class SinkhornState(NamedTuple):
    """State of `scale_by_sinkhorn`."""

    momentum: Any  # the parameters' tree


def balance(
    g: jax.Array, *, steps: int = 11, threshold: float = 1e-3, eps: float = 1e-20
) -> tuple[jax.Array, jax.Array]:
    """Factors of the rows and columns of a matrix that bring its norms together.

    Rows and columns of diag(r) g diag(c) are divided by their norms in turn, rows first. Only r and c are kept, not
    the matrix. With rows spread over devices, a row step is local, a column step sums `cols` numbers.

    Columns are not made unit vectors but as long as they are on average: unit rows of a table with many more rows than
    columns have columns of norm 600 (Engram), and dividing by that in every round would take c, and with it the squares
    of g c, out of float32's range. The row step that follows cancels the difference.

    Args:
      g: float32 [rows, cols]. Values below 1e-19 have no square in float32 and count as zero.
      steps: how often; odd, so that the last step makes every live row a unit vector.
      threshold: rows whose norm is no larger than this part of the mean norm of all rows get the factor 0.
      eps: added to the norms.

    Returns:
      r float32 [rows], c float32 [cols]. A column that is zero in every live row keeps the factor it has.
    """
    norm = jnp.sqrt((g * g).sum(axis=1))
    live = norm > threshold * norm.mean()
    r, c = live.astype(jnp.float32), jnp.ones(g.shape[1], jnp.float32)
    for step in range(steps):
        if step % 2 == 0:
            size = jnp.sqrt(((g * c) ** 2).sum(axis=1))
            # Not left to eps: compilers merge the divisions of two steps, and the square of eps is zero.
            r = jnp.where(live, r / (size * r + eps), 0.0)
        else:
            size = jnp.sqrt(((r[:, None] * g) ** 2).sum(axis=0)) * c
            c = jnp.where(size > 0, c * (size.mean() / (size + eps)), c)
    return r, c


def scale_by_sinkhorn(
    *,
    beta: float = 0.95,
    steps: int = 11,
    threshold: float = 1e-3,
    eps: float = 1e-20,
    rms: float = 0.18,
    momentum_dtype: Any = jnp.float32,
) -> optax.GradientTransformation:
    """Gradients of tables [rows, cols] -> balanced updates; each row that is not masked has the root mean square `rms`.

    M <- beta M + (1 - beta) G; what is balanced is beta M + (1 - beta) G. Rows without gradient lose momentum step by
    step, until they fall below the threshold and stand still.

    Args:
      beta: decay of the momentum.
      steps, threshold, eps: as in `balance`.
      rms: of the updates, before the learning rate.
      momentum_dtype: what the momentum is stored in.
    """

    def init(params):
        return SinkhornState(jax.tree.map(lambda p: jnp.zeros(p.shape, momentum_dtype), params))

    def balanced(g):
        r, c = balance(g, steps=steps, threshold=threshold, eps=eps)
        return rms * g.shape[1] ** 0.5 * r[:, None] * g * c

    def update(updates, state, params=None):
        del params
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        mean = jax.tree.map(lambda m, g: beta * m.astype(jnp.float32) + (1 - beta) * g, state.momentum, gradients)
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, mean, gradients)
        return jax.tree.map(balanced, ahead), SinkhornState(jax.tree.map(lambda m: m.astype(momentum_dtype), mean))

    return optax.GradientTransformation(init, update)
