"""Results of a row that do not depend on how many rows there are.

A compiler picks another code path for one or a few rows: a matrix-vector routine with another summation order, scalar
instead of vector exponentials. Decoding one token must give the bits of a longer pass, so the plain-jnp references never
compute fewer rows than these.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# From here up, every row count was measured to give the same bits on CPU, the products from 2 rows up.
MIN_ROWS = 8


def with_min_rows(fn: Callable[[jax.Array], Any], x: jax.Array, min_rows: int = MIN_ROWS) -> Any:
    """`fn(x)` for a function of independent rows x [rows, ...], computed on at least `min_rows` rows.

    The barriers keep the compiler from computing only the rows that are used.
    """
    rows = x.shape[0]
    if rows >= min_rows:
        return fn(x)
    padded = jnp.concatenate([x, jnp.broadcast_to(x[:1], (min_rows - rows, *x.shape[1:]))])
    out = jax.lax.optimization_barrier(fn(jax.lax.optimization_barrier(padded)))
    return jax.tree.map(lambda y: y[:rows], out)
