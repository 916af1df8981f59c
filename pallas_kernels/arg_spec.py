"""Named argument shapes of an op: tests, the benchmark, the tuner and ahead-of-time compilation read the same list."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgSpec:
    """One call of an op.

    Attributes:
      name: unique within the op, such as "decode_b64".
      fn: the op's entry, taking the arrays by name, the static arguments and `implementation`.
      make: key -> the arrays by name, random and valid; traceable, so that `abstract` costs nothing.
      static: the other keyword arguments.
      tags: of "ci" (small enough for CPU tests), "bench", "tune", "aot" (compiled for TPU topologies).
      bytes: device memory that must move: each input byte that is needed read once, each output byte written once.
      flops: arithmetic of the matrix products; 0 for an op that only moves bytes.
      donated: the array that the op returns with changes, in place if it may; None if there is none.
    """

    name: str
    fn: Callable[..., Any]
    make: Callable[[jax.Array], dict[str, jax.Array]]
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tags: frozenset[str] = frozenset({"bench"})
    bytes: int = 0
    flops: int = 0
    donated: str | None = None

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays' shapes and dtypes."""
        return jax.eval_shape(lambda: self.make(jax.random.key(0)))

    def bind(self, implementation: str | None) -> Callable[[dict[str, jax.Array]], Any]:
        """A function of the arrays' dict."""
        return lambda arrays: self.fn(**arrays, **self.static, implementation=implementation)
