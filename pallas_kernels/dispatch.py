"""Which implementation of an op runs.

Ops take `implementation=`; None is what the context says, "auto" unless changed:

    with kernels("xla"):
        logits, cache, aux = model.forward(batch, cache)

| name | means |
|---|---|
| "auto" | the backend's kernel where it takes the shapes, else "xla"; said once in the log |
| "xla" | the plain-jnp reference, compiled by XLA |
| "pallas" | the backend's kernel; an error where there is none or it does not take the shapes |
| "gpu", "tpu" | that kernel, whatever the backend (to lower or compile for another machine) |
| "tpu_interpret" | the TPU kernel's arithmetic on any backend, slowly (tests) |
"""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Both add to what compiled functions are known by, `tuning` by a context and some releases of Pallas by a setting. Ops
# import their kernels in their first trace: if these came along only then, that program would be compiled twice.
import jax.experimental.pallas.tpu

import pallas_kernels.tuning  # noqa: F401

IMPLEMENTATIONS = ("auto", "xla", "pallas", "gpu", "tpu", "tpu_interpret")

# Part of the key of compiled functions: a step traced under one value is not found under another. `set_global` changes
# the value for the process.
kernels = jax.make_user_context(default_value="auto")

_log = logging.getLogger(__name__)


class KernelUnavailable(ValueError):
    """A kernel that was asked for cannot run here; the message says why."""


def backend() -> str:
    """What this process's default devices are: "gpu", "tpu" or "cpu"."""
    return {"gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}.get(jax.default_backend(), "cpu")


def choose(op: str, implementation: str | None, problems: Mapping[str, Callable[[], str | None]]) -> str:
    """The implementation to run: "xla", "gpu", "tpu" or "tpu_interpret".

    Args:
      op: its name, for messages.
      implementation: what was asked for, see above.
      problems: for "gpu" and "tpu", if there is such a kernel, what keeps it from running these shapes (None: nothing).

    Raises:
      ValueError: the name is unknown.
      KernelUnavailable: a kernel that was asked for cannot run.
    """
    if implementation is None:
        implementation = kernels.value
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: unknown implementation {implementation!r}, expected one of {IMPLEMENTATIONS}")
    if implementation == "xla":
        return "xla"
    named = implementation not in ("auto", "pallas")
    kernel = implementation.removesuffix("_interpret") if named else backend()
    problem = problems[kernel]() if kernel in problems else f"there is no kernel for the {kernel} backend"
    if problem is None:
        chosen = implementation if named else kernel
    elif implementation == "auto":
        chosen = "xla"
    else:
        raise KernelUnavailable(f"{op}: implementation {implementation!r} cannot run: {problem}")
    _say(op, chosen, problem)
    return chosen


def function(
    package: str, name: str, implementation: str | None, problems: Mapping[str, Callable[[], str | None]]
) -> Callable[..., Any]:
    """The function `name` of the chosen one of a package's modules `ref`, `gpu` and `tpu`, which is imported only now.

    Args:
      package: of the op, such as "pallas_kernels.topk".
      name: of the function, and of the op in messages.
      implementation, problems: as in `choose`.

    Raises:
      as `choose`.
    """
    chosen = choose(name, implementation, problems)
    module = {"xla": "ref", "tpu_interpret": "tpu"}.get(chosen, chosen)
    fn = getattr(importlib.import_module(f"{package}.{module}"), name)
    return functools.partial(fn, interpret=True) if chosen == "tpu_interpret" else fn


@functools.cache
def _say(op: str, chosen: str, problem: str | None) -> None:
    """One line for every choice, however often an op is traced."""
    if problem is None:
        _log.info("%s: %s kernel", op, chosen)
    else:
        _log.info("%s: plain XLA (%s)", op, problem)
