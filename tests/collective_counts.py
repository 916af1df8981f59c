"""Counting the collectives of a function as it was written, before any compiler joins or splits them."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.extend.core

COLLECTIVES = ("all_gather", "all_to_all", "ppermute", "psum", "ragged_all_to_all", "reduce_scatter")


class Found(NamedTuple):
    """One collective: its kind, the outermost `jax.named_scope` ("" for none), the shapes of what a device gives."""

    kind: str
    scope: str
    shapes: tuple[tuple[int, ...], ...]


def collective_operands(fn: Callable, *args) -> list[Found]:
    """Every collective of the program of `fn(*args)`; a loop's body counts once."""
    found: list[Found] = []

    def visit(jaxpr, outer: str) -> None:
        for eqn in jaxpr.eqns:
            scope = outer or str(eqn.source_info.name_stack).split("/")[0]
            for kind in COLLECTIVES:
                if eqn.primitive.name in (kind, f"{kind}_invariant"):
                    found.append(Found(kind, scope, tuple(tuple(x.aval.shape) for x in eqn.invars)))
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                visit(inner, scope)

    visit(jax.make_jaxpr(fn)(*args).jaxpr, "")
    return found


def collectives_by_scope(fn: Callable, *args) -> dict[str, Counter[str]]:
    """How often each kind stands in the program of `fn(*args)`, by scope."""
    counts: dict[str, Counter[str]] = {}
    for kind, scope, _ in collective_operands(fn, *args):
        counts.setdefault(scope, Counter())[kind] += 1
    return counts


def collective_counts(fn: Callable, *args) -> Counter[str]:
    """The same of the whole program."""
    return sum(collectives_by_scope(fn, *args).values(), Counter())
