"""Functions of modules that are traced and lowered once for all modules that differ in their weights alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from flax import nnx


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(function, graphdef: nnx.GraphDef, static: tuple[tuple[str, Hashable], ...], state: nnx.State, args: Any):
    return function(nnx.merge(graphdef, state), *args, **dict(static))


def traced_once(function: Callable[..., Any], module: nnx.Module, *args: Any, **static: Hashable) -> Any:
    """`function(module, *args, **static)`: inside of another trace, a call that modules like it share.

    Layers are of a few kinds. Tracing and lowering each kind once instead of each layer saves the host that much time;
    XLA puts the functions in their places before it optimises, so that the program is the same.

    Args:
      function: of a module, defined once; must not change the module.
      module: what tells it from others of its kind is in its parameters and in `args`.
      args: pytrees of arrays.
      static: whatever else the function takes.
    """
    graphdef, state = nnx.split(module)
    return _call(function, graphdef, tuple(sorted(static.items())), state, args)
