"""Device time of compiled functions, read from the profiler's trace."""

import collections
import dataclasses
import glob
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Time of one call in microseconds.

    Attributes:
      us: sum over the call's kernels of their durations, medians over the calls; on backends whose trace lists no
        kernels (CPU), the median wall time.
      wall_us: time between calls of a queue of them, gaps included.
      kernels: (name, median duration in us, launches a call), longest first; empty where the trace lists none.
    """

    us: float
    wall_us: float
    kernels: tuple[tuple[str, float, float], ...]


def device_time(fn: Callable[..., Any], arg_sets: Sequence[tuple], *, calls: int = 20) -> DeviceTime:
    """Times a compiled function.

    Args:
      fn: the function, jitted; it must not donate its arguments.
      arg_sets: argument tuples to take turns with. Several that together exceed the cache keep it cold.
      calls: timed calls, rounded up to whole rounds over arg_sets.
    """
    for args in arg_sets:
        jax.block_until_ready(fn(*args))
    rounds = -(-calls // len(arg_sets))
    durations = collections.defaultdict(list)
    for event in trace_kernels(lambda: _rounds(fn, arg_sets, rounds), 1):
        durations[event.name].append(event.us)
    walls = [_rounds(fn, arg_sets, rounds) for _ in range(3)]
    wall = statistics.median(walls)
    if not durations:
        return DeviceTime(us=wall, wall_us=wall, kernels=())
    total = rounds * len(arg_sets)
    kernels = [(name, statistics.median(d), len(d) / total) for name, d in durations.items()]
    kernels.sort(key=lambda k: -k[1] * k[2])
    return DeviceTime(us=sum(d * n for _, d, n in kernels), wall_us=wall, kernels=tuple(kernels))


def _rounds(fn, arg_sets, rounds: int) -> float:
    """Microseconds a call."""
    start = time.perf_counter()
    out = None
    for _ in range(rounds):
        for args in arg_sets:
            out = fn(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / (rounds * len(arg_sets)) * 1e6


@dataclasses.dataclass(frozen=True)
class KernelEvent:
    """One launch of a kernel: its name, the HLO instruction and scope it belongs to ("" if not told), microseconds."""

    name: str
    hlo_op: str
    scope: str
    us: float


def trace_kernels(run: Callable[[], Any], times: int) -> list[KernelEvent]:
    """What `run`, called so many times, launched on a GPU's streams; it must wait for its own results."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(times):
                run()
        return _events(directory)


def _events(directory: str) -> list[KernelEvent]:
    events = []
    for path in glob.glob(os.path.join(directory, "**", "*.json.gz"), recursive=True):
        with gzip.open(path) as file:
            trace = json.load(file)["traceEvents"]
        devices = {
            e["pid"] for e in trace if e.get("name") == "process_name" and "/device:GPU" in e["args"].get("name", "")
        }
        streams = {
            (e["pid"], e["tid"])
            for e in trace
            if e.get("name") == "thread_name" and "Stream" in e["args"].get("name", "")
        }
        for e in trace:
            if e.get("pid") in devices and "dur" in e and (e["pid"], e["tid"]) in streams:
                args = e.get("args", {})
                events.append(KernelEvent(e["name"], args.get("hlo_op", ""), args.get("name", ""), e["dur"]))
    return events
