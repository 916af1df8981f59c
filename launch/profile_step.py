"""Counts and times the kernels of one step, layer by layer, on an NVIDIA GPU.

    python -m launch.profile_step --config=configs/flash_groups.json --rows=64 --context=131072
    python -m launch.profile_step --config=configs/flash_groups.json --rows=1 --tokens=4096 --context=131072 --parts

A step has --tokens new tokens for each of --rows sequences that have --context tokens in the cache. The cache holds
random bytes, and with --config the weights are random too: what the step says means nothing. configs/flash_groups.json
is one encoder group and one decoder group of the released widths, with 16 experts a layer. Kernels are those that the
profiler's trace lists; they are put down to layers by the scopes of the compiled program, which launches inside CUDA
graphs do not have: set XLA_FLAGS=--xla_gpu_enable_command_buffer= in the environment.
"""

import json
import sys

from absl import flags
from rich.console import Console
from rich.table import Table

from dsv41.checkpoint.random_model import random_model
from dsv41.config import layer_schedule
from dsv41.engine.step_profile import LayerKernels, StepShape, profile_steps
from launch.cli import new_flags, run
from launch.load_model import ModelFlags

FLAGS = new_flags()
_MODEL = ModelFlags(FLAGS, config=True)
_ROWS = flags.DEFINE_integer("rows", 8, "Sequences of the step.", lower_bound=1, flag_values=FLAGS)
_TOKENS = flags.DEFINE_integer("tokens", 1, "New tokens of each sequence.", lower_bound=1, flag_values=FLAGS)
_CONTEXT = flags.DEFINE_integer("context", 4096, "Tokens in the cache of each.", lower_bound=0, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 5, "Steps that are traced.", lower_bound=1, flag_values=FLAGS)
_PARTS = flags.DEFINE_bool("parts", False, "Also print the parts of every layer.", flag_values=FLAGS)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.", flag_values=FLAGS)


def _role(config, layer: int | None) -> str:
    return "rest" if layer is None else layer_schedule(config.text_config).layers[layer].mode.name.lower()


def _print(config, layers: list[LayerKernels]) -> None:
    table = Table(box=None, header_style="bold")
    for name in ("layer", "role", "kernels", "us", "attention", "moe"):
        table.add_column(name, justify="right" if name not in ("layer", "role") else "left")
    for entry in layers:
        shares = {"attention": [0.0, 0.0], "moe": [0.0, 0.0]}
        for part, (launches, us) in entry.parts.items():
            half = shares.get(part.partition("/")[0])
            if half is not None:
                half[0] += launches
                half[1] += us
        table.add_row(
            "–" if entry.layer is None else str(entry.layer), _role(config, entry.layer), f"{entry.launches:g}",
            f"{entry.us:.1f}", *(f"{n:g} / {us:.1f} us" for n, us in shares.values()),
        )  # fmt: skip
        for part, (launches, us) in entry.parts.items() if _PARTS.value else ():
            table.add_row("", f"  {part}", f"{launches:g}", f"{us:.1f}", "", "")
    Console(width=100).print(table)


def main() -> None:
    config = _MODEL.config()
    if _MODEL.checkpoint is not None:
        model, _ = _MODEL.load()
    else:
        _MODEL.start_device()
        model = random_model(config, drafter=False)
    shape = StepShape(_ROWS.value, _CONTEXT.value, _TOKENS.value)
    ((layers, _),) = profile_steps(model, [shape], steps=_STEPS.value)
    if _JSON.value:
        found = [
            {"role": _role(config, e.layer), "layer": e.layer, "kernels": e.launches, "us": e.us, "parts": e.parts}
            for e in layers
        ]
        print(json.dumps({"rows": _ROWS.value, "tokens": _TOKENS.value, "context": _CONTEXT.value, "layers": found}))
    else:
        _print(config, layers)


def cli() -> int:
    """The console script."""
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
