"""What an op costs on the device at hand: its kernel, plain XLA in the same run, and the measured limits."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.measure import DeviceTime, device_time

# Argument sets take turns so that no call finds its inputs in the cache; H200 caches 60 MB, TPUs up to 128 MiB.
_COLD_BYTES = 512 << 20
_MOST_SETS = 8
_MOST_BYTES = 24 << 30
# What a program that does not fit this device, or shapes that a kernel does not take, end with.
FAILURES = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)
# Calls that take longer than this are not repeated more than a few times.
_LONG_US = 20_000


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Rates of this device, measured with XLA's own programs.

    Attributes:
      bytes_per_us: of a large elementwise pass, bytes read plus bytes written.
      flops_per_us: of a bfloat16 product of 8192 x 8192 matrices (2048 on CPU).
    """

    bytes_per_us: float
    flops_per_us: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the benchmark; times in microseconds of device time.

    Attributes:
      op, spec: which.
      kernel: the implementation that `choose` takes, "xla" where there is no kernel.
      time: of the kernel; `xla`: of plain XLA; None where it was not run or failed, with the reason in `error`.
      bytes, flops: what the op must move and compute.
      limit_us: the larger of bytes and flops over the ceilings.
    """

    op: str
    spec: str
    kernel: str
    time: DeviceTime | None
    xla: DeviceTime | None
    bytes: int
    flops: int
    limit_us: float
    error: str = ""

    @property
    def share(self) -> float | None:
        """How much of the limit is reached: 1 is as fast as the ceilings allow."""
        return None if self.time is None else self.limit_us / self.time.us

    @property
    def speedup(self) -> float | None:
        """Plain XLA's time over the kernel's."""
        return None if self.time is None or self.xla is None else self.xla.us / self.time.us


@functools.cache
def ceilings() -> Ceilings:
    """Measured once a process."""
    small = jax.default_backend() == "cpu"
    words, side = (1 << 22, 2048) if small else (1 << 29, 8192)
    x = jnp.arange(words, dtype=jnp.float32)
    copy = device_time(jax.jit(lambda x: x + 1), [(x,)], calls=5)
    del x
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    product = device_time(jax.jit(lambda a, b: a @ b), [(a, b)], calls=5)
    return Ceilings(bytes_per_us=8 * words / copy.us, flops_per_us=2 * side**3 / product.us)


def bench(
    op: str,
    specs: Iterable[ArgSpec],
    kernel: str,
    *,
    calls: int = 20,
    xla: bool = True,
    alone: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Iterable[Row]:
    """Times every spec, one row after the other.

    Args:
      op: its name.
      specs: the argument shapes.
      kernel: implementation to time beside "xla" ("gpu", "tpu"); "xla": nothing else.
      calls: timed calls of each.
      xla: also time plain XLA.
      alone: entered while the device is used.
    """
    names = list(dict.fromkeys([kernel] + ["xla"] * xla))
    specs = list(specs)
    compiled = _compile([(spec, name) for spec in specs for name in names])
    for i, spec in enumerate(specs):
        times, errors = {}, []
        with alone():
            limit = max(spec.bytes / ceilings().bytes_per_us, spec.flops / ceilings().flops_per_us)
            sets = _argument_sets(spec)
            for name, program in zip(names, compiled[i * len(names) :], strict=False):
                try:
                    times[name] = _time(spec, program, sets, calls)
                except FAILURES as e:
                    errors.append(f"{name}: {(str(e) or type(e).__name__).splitlines()[0][:200]}")
            del sets
        yield Row(
            op=op, spec=spec.name, kernel=kernel, time=times.get(kernel), xla=times.get("xla"), bytes=spec.bytes,
            flops=spec.flops, limit_us=limit, error="; ".join(errors),
        )  # fmt: skip


def time_spec(spec: ArgSpec, implementation: str, *, calls: int = 20) -> float:
    """Microseconds of device time of one implementation."""
    (program,) = _compile([(spec, implementation)])
    return _time(spec, program, _argument_sets(spec), calls).us


def _compile(jobs: list[tuple[ArgSpec, str]]) -> list[jax.stages.Compiled | Exception]:
    """Programs of (donated array or None, the other arrays), lowered in turn and compiled side by side."""

    def lower(spec: ArgSpec, implementation: str) -> jax.stages.Lowered:
        bound, arrays = spec.bind(implementation), spec.abstract()
        donated = None if spec.donated is None else arrays.pop(spec.donated)

        def fn(donated, rest):
            return bound(rest if spec.donated is None else {**rest, spec.donated: donated})

        return jax.jit(fn, donate_argnums=0).lower(donated, arrays)

    def attempt(fn, *args):
        try:
            return fn(*args)
        except FAILURES as e:
            return e

    lowered = [attempt(lower, *job) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(lambda x: x if isinstance(x, Exception) else attempt(x.compile), lowered))


def _argument_sets(spec: ArgSpec) -> list[tuple[dict[str, jax.Array]]]:
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(spec.abstract()))
    wanted = min(_MOST_SETS, max(2, -(-_COLD_BYTES // max(size, 1))))
    count = max(1, min(wanted, _MOST_BYTES // max(size, 1)))
    make = jax.jit(spec.make)
    return [(jax.block_until_ready(make(jax.random.key(i))),) for i in range(count)]


def _time(spec: ArgSpec, program: jax.stages.Compiled | Exception, sets: list, calls: int) -> DeviceTime:
    if isinstance(program, Exception):
        raise program
    latest: dict[int, jax.Array] = {}

    def fn(arrays: dict[str, jax.Array]) -> jax.Array:
        """A donated array is replaced by the result of the call before, so that no copy of it is timed."""
        if spec.donated is None:
            return program(None, arrays)
        rest = {name: array for name, array in arrays.items() if name != spec.donated}
        donated = latest.pop(id(arrays), None)
        latest[id(arrays)] = program(jnp.copy(arrays[spec.donated]) if donated is None else donated, rest)
        return latest[id(arrays)]

    jax.block_until_ready(fn(*sets[0]))
    first = device_time(fn, sets[:1], calls=1)
    return first if first.us > _LONG_US else device_time(fn, sets, calls=calls)
