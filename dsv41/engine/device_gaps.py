"""When a device had nothing to do, and what it was waiting for, from a profiler's trace."""

from __future__ import annotations

import collections
import dataclasses
import glob
import gzip
import json
import os
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel on a stream, in microseconds on the trace's clock; `program` is the compiled module's name or ""."""

    begin: float
    end: float
    program: str


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Of one device, between its first kernel and its last.

    Attributes:
      span_us: from the one to the other.
      busy_us: in which at least one kernel ran.
      idle_us: by the program whose first kernel ended a gap: time in front of programs. Gaps inside a program are under
        "".
    """

    span_us: float
    busy_us: float
    idle_us: dict[str, float]


def read_launches(directory: str) -> list[Launch]:
    """The kernels that a trace in `directory` lists for GPUs, copies between host and device left out."""
    launches = []
    for path in glob.glob(os.path.join(directory, "**", "*.json.gz"), recursive=True):
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        named = {"process_name": {}, "thread_name": {}}
        for e in events:
            if e.get("name") in named:
                named[e["name"]][(e["pid"], e.get("tid") if e["name"] == "thread_name" else None)] = e["args"]["name"]
        for e in events:
            device = "/device:GPU" in named["process_name"].get((e.get("pid"), None), "")
            stream = "Stream" in named["thread_name"].get((e.get("pid"), e.get("tid")), "")
            if device and stream and "dur" in e and not e["name"].lower().startswith("memcpy"):
                program = e.get("args", {}).get("hlo_module", "")
                launches.append(Launch(e["ts"], e["ts"] + e["dur"], program))
    return launches


def find_gaps(launches: Iterable[Launch]) -> Gaps | None:
    """Where no kernel ran; None of an empty trace.

    A kernel without a program's name (inside a CUDA graph the trace has none) counts as its predecessor's, unless it
    begins the trace.
    """
    ordered = sorted(launches, key=lambda k: k.begin)
    if not ordered:
        return None
    end, program, busy = ordered[0].begin, "", 0.0
    idle: dict[str, float] = collections.defaultdict(float)
    for kernel in ordered:
        following = kernel.program or program
        if kernel.begin > end:
            idle[following if following != program else ""] += kernel.begin - end
        busy += max(kernel.end - max(kernel.begin, end), 0.0)
        end, program = max(end, kernel.end), following
    return Gaps(end - ordered[0].begin, busy, dict(idle))
