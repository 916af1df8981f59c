"""Tables of a compiled step, for `launch.aot_compile --program`."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

_GIB = 2**30
_MIB = 2**20


def _gib(size: float) -> str:
    return f"{size / _GIB:,.3f}"


def _mib(size: float) -> str:
    return f"{size / _MIB:,.2f}"


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose other columns are flush right."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _memory(cost: Mapping[str, Any]) -> Table:
    table = _table("HBM of a device", "what", "GiB")
    for name, kinds in (("weights", cost["parameters"]), ("cache", cost["cache"])):
        for kind, size in kinds.items():
            table.add_row(f"{name}: {kind}", _gib(size))
        table.add_row(f"{name}, together", _gib(sum(kinds.values())), end_section=True)
    table.add_row("what the step brings", _gib(cost["batch"]), end_section=True)
    found = cost["footprint"]
    logical = sum(cost["parameters"].values()) + sum(cost["cache"].values()) + cost["batch"]
    table.add_row("arguments", _gib(found["arguments"]))
    table.add_row("  of it padding", _gib(found["arguments"] - logical))
    table.add_row("outputs, not in place", _gib(found["outputs"] - found["alias"]))
    table.add_row("outputs in place", _gib(found["alias"]))
    table.add_row("temporaries", _gib(found["temporaries"]), end_section=True)
    table.add_row("needed", _gib(found["needed"]))
    table.add_row("limit", _gib(found["limit"]))
    return table


def _work(cost: Mapping[str, Any]) -> Table:
    table = _table("Work of a device in a step, counted from the config", "what", "GFLOP", "MiB that must move")
    work = cost["work"]
    for kind in work["flops"] | work["bytes"]:
        flops, moved = work["flops"].get(kind), work["bytes"].get(kind)
        table.add_row(kind, *(("–" if x is None else f(x)) for x, f in ((flops, _giga), (moved, _mib))))
    table.add_section()
    table.add_row("together", _giga(work["total_flops"]), _mib(work["total_bytes"]))
    table.add_row("moved by the program, told from its text", "–", _mib(cost["hbm_bytes"]))
    table.add_row("by the compiler's count", _giga(cost["compiled_flops"]), _mib(cost["compiled_bytes"]))
    return table


def _giga(value: float) -> str:
    return f"{value / 1e9:,.2f}"


def _collectives(cost: Mapping[str, Any]) -> Table:
    table = _table("Collectives of a step", "kind", "count", "most in a layer", "MiB given", "MiB sent", "largest MiB")
    layer = cost["collectives_in_layer"]["most in a layer"]
    for kind in cost["collectives"]:
        table.add_row(
            kind["kind"], f"{kind['count']:g}", f"{layer.get(kind['kind'], 0):g}", _mib(kind["operand_bytes"]),
            _mib(kind["sent_bytes"]), _mib(kind["largest_bytes"]),
        )  # fmt: skip
    return table


def _temporaries(cost: Mapping[str, Any]) -> Table:
    table = _table("Largest temporaries", "shape", "MiB", "count", "by", "where")
    table.columns[3].justify = table.columns[4].justify = "left"
    for found in cost["temporaries"]:
        where = "/".join(found["scope"].split("/")[-4:])
        table.add_row(found["shape"], _mib(found["bytes"]), str(found["count"]), found["opcode"], where)
    return table


def _times(cost: Mapping[str, Any]) -> Table:
    columns = ("bytes", "HBM ms", "products ms", "links ms", "all at once ms", "in turn ms")
    table = _table("Time of a step by data sheet: an estimate, not measured", *columns)
    for name, label in (("least", "that must move"), ("as_compiled", "moved by the program")):
        line = cost[name]
        keys = ("memory", "products", "links", "overlapped", "in_turn")
        table.add_row(label, *(f"{line[key] * 1e3:,.2f}" for key in keys))
    return table


def tables(row: Mapping[str, Any]) -> Iterator[Table | str]:
    """What is printed of a step that compiled."""
    cost = row["cost"]
    yield from (_memory(cost), _work(cost), _collectives(cost), _temporaries(cost), _times(cost))
    yield from (f"moves what should stay: {moved}" for moved in cost["moved"])
    # Every layer of a kind has the same ones.
    for loop, times in collections.Counter(re.sub(r"layer_\d+", "layer_*", x) for x in cost["unknown_loops"]).items():
        yield f"counted as one trip, which the program's text does not say ({times} of it): {loop}"
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in row["seconds"].items())
    yield f"{stages}; this took {row['host_peak_bytes'] / _GIB:.1f} GiB of host memory"
    found = cost["footprint"]
    room = (found["limit"] - found["needed"]) / _GIB
    yield f"fits, {room:.1f} GiB to spare" if found["fits"] else f"does not fit: {-room:.1f} GiB too much"
