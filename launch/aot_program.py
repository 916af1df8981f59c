"""`launch.aot_compile --program`: what is compiled, the process that does it, and its report."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dsv41.config import DSV41Error, load_config, with_overrides
from dsv41.cost_model import StepSizes, chip_of
from pallas_kernels import ahead_of_time

_log = logging.getLogger(__name__)

PRESETS = pathlib.Path(__file__).parents[1] / "configs" / "pods"
_PROGRESS_SECONDS = 10.0
_SIZES = {field.name for field in dataclasses.fields(StepSizes)}
_JOB = {"config": "configs/flash.json", "topology": "", "overrides": {}}


def preset(name: str) -> dict[str, Any]:
    """The values of a preset: a file, or the name of one in configs/pods.

    Raises:
      DSV41Error: there is no such file, or it holds something else.
    """
    path = pathlib.Path(name)
    if not path.is_file():
        path = PRESETS / f"{name}.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        known = ", ".join(sorted(p.stem for p in PRESETS.glob("*.json")))
        raise DSV41Error(f"--preset={name}: there is no such file, and known presets are {known}") from e
    except json.JSONDecodeError as e:
        raise DSV41Error(f"--preset={name}: {path} is no JSON: {e}") from e
    unknown = set(values) - _SIZES - set(_JOB) - {"about"} if isinstance(values, dict) else {"no object"}
    if unknown:
        raise DSV41Error(f"--preset={name}: {path} has unknown {', '.join(sorted(unknown))}")
    return values


def job_of(values: Mapping[str, Any], *, kernels: str, hlo: str | None) -> dict[str, Any]:
    """What the child is told, from a preset's values with those of the command line over them.

    Raises:
      DSV41Error: something is missing or impossible; names it.
    """
    sizes = {name: values[name] for name in _SIZES if name in values}
    if missing := [n for n in ("program", "rows", "context") if n not in sizes]:
        raise DSV41Error(f"give --{missing[0]} or a --preset that has it")
    job = {name: values.get(name, default) for name, default in _JOB.items()}
    if (why := ahead_of_time.topology_problem(job["topology"])) is not None:
        raise DSV41Error(f"--topology: {why}")
    chip = chip_of(job["topology"])
    checked = StepSizes(**sizes)
    chips = 1
    for part in job["topology"].partition(":")[2].split("x"):
        chips *= int(part)
    if checked.devices != chips * chip.devices:
        raise DSV41Error(
            f"--mesh={checked.mesh}: {checked.devices} devices, {job['topology']} has {chips * chip.devices}"
        )
    checked.rules_for(with_overrides(load_config(job["config"]), job["overrides"]))
    return job | {"sizes": sizes, "kernels": kernels, "hlo": hlo}


def compile_step(job: Mapping[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Compiles in a child process, which a fault of the compiler may end.

    Args:
      job: of `job_of`.
      progress: told a line every few seconds.

    Returns:
      cost (of `StepCost.as_json`, None if it failed), error, fits, seconds by stage, host_peak_bytes.

    Raises:
      DSV41Error: the job is impossible in a way that only building it shows.
    """
    command = [sys.executable, "-m", "launch.aot_child", json.dumps(job)]
    start, stage, row = time.perf_counter(), "starting", None
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_PROGRESS_SECONDS):
            progress(f"{stage}, {time.perf_counter() - start:.0f} s")

    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        environment = os.environ | ahead_of_time.ENVIRONMENT
        teller = threading.Thread(target=tell, daemon=True)
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as child:
            teller.start()
            try:
                for line in child.stdout:
                    # The compiler's own words may stand between ours.
                    said = json.loads(line) if line.startswith("{") else {}
                    stage, row = said.get("stage", stage), said.get("row", row)
            except BaseException:
                child.kill()
                raise
            finally:
                done.set()
                teller.join()
        log.seek(0)
        if row is None:
            why = ahead_of_time.why_it_ended(child.returncode, log.read())
            return {"cost": None, "error": why, "fits": None, "seconds": {}, "host_peak_bytes": 0}
    if row.pop("bad_input"):
        raise DSV41Error(row["error"])
    return row
