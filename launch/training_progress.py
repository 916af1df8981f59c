"""How a script that trains shows what its run does."""

import importlib.util
import pathlib
import sys
from typing import Any

from dsv41.sharding.processes import is_first_process
from dsv41.train.curves import has_rows
from dsv41.train.loop import LoopOptions, Progress, RunParts, run_steps
from launch.load_model import progress_bar
from launch.plots import plot_curves


def train_and_report(
    folder: pathlib.Path, parts: RunParts, state: Any, begin: Progress, options: LoopOptions, *, verbose: bool
) -> tuple[Any, Progress]:
    """`run_steps` with a bar and a line for each row of the curves; then closes their files and draws them.

    Of several processes the first one does all of this.

    Args:
      folder: of the run.
      parts, state, begin, options: of `run_steps`.
      verbose: also show the bar where there is no terminal.
    """
    steps = parts.schedule.steps
    if begin.step and is_first_process():
        print(f"{folder}: goes on behind step {begin.step:,}", file=sys.stderr)
    with progress_bar(verbose) as bar:
        task = bar.add_task("training", total=steps, completed=begin.step)

        def report(at: Progress, numbers: dict[str, float]) -> None:
            bar.update(task, completed=at.step)
            shown = " ".join(f"{name}={value:.4g}" for name, value in numbers.items())
            if is_first_process():
                bar.console.print(f"step {at.step} tokens {at.tokens:,} {shown}", highlight=False, soft_wrap=True)

        state, at = run_steps(parts, state, begin, options, report=report)
    parts.checkpoints.close()
    if parts.curves is None or parts.held_out is None:
        return state, at
    for curves in (parts.curves, parts.held_out):
        curves.close()
    if has_rows(parts.curves.path) and importlib.util.find_spec("matplotlib") is not None:
        plot_curves(parts.curves.path, folder / "curves.png")
    end = "complete" if at.step >= steps else "stopped; the same command goes on"
    print(f"{folder}: step {at.step:,} of {steps:,}, {at.tokens:,} tokens, {end}")
    return state, at
