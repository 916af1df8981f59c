"""Writes trained weights in the released layout, which every other script takes as --checkpoint.

    python -m launch.export_checkpoint --run=RUN --out=NEW_DIR
    python -m launch.export_checkpoint --run=RUN --drafter_run=DRAFTER_RUN --file=README.md --out=NEW_DIR
    python -m launch.export_checkpoint --checkpoint=DIR --drafter_run=DRAFTER_RUN --out=NEW_DIR

--run is a directory of launch.train: config.json, tokenizer.json and checkpoints; --step chooses the checkpoint, by
default the last. Its float32 masters are rounded to the stored formats as in every forward of training: FP4 experts,
FP8 matrices and Engram rows with their scales, or bfloat16 if the config has no quantization_config. Instead,
--checkpoint takes the weights of a directory in the released layout as they are.

--drafter_run is a directory of launch.train_dspark; its drafter goes with the model instead of any that --run or
--checkpoint has. Both runs must be of one model and tokenizer. Without any drafter, or with --nodrafter, the config
that is written says that there is none.

NEW_DIR holds config.json, tokenizer.json, tokenizer_config.json, safetensors files with their index, each --file under
its own name, and with a drafter confidence_temperatures.json, if they have been fitted. It is written beside its place
and appears when it is complete; it must not exist, or be empty. Of a run, one layer at a time is read into memory.

Prints tensors and bytes of each part. With --json, stdout is exactly one JSON object: out, step, drafter_step (null
without --drafter_run), drafter (whether there is one), tensors, bytes (of the tensors), directory_bytes (of all files),
subsystems and dtypes (bytes of each).
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any, NamedTuple

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

import dsv41
from dsv41.checkpoint import bytes_by_dtype, totals_by_subsystem
from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.config import DSV41Error, ModelConfig, load_config
from dsv41.engine.confidence_calibration import load_temperatures
from dsv41.models import Params
from dsv41.train.checkpoints import CHECKPOINTS, Checkpoints
from dsv41.train.export import SHARD_BYTES, write_checkpoint
from dsv41.train.tokenizer import tokenizer_hash
from launch.cli import new_flags, run
from launch.load_model import progress_bar

_TEMPERATURES_NAME = "confidence_temperatures.json"

FLAGS = new_flags()
_RUN = flags.DEFINE_string("run", None, "Directory of launch.train whose model is exported.", flag_values=FLAGS)
_STEP = flags.DEFINE_integer("step", None, "Its checkpoint; by default the last.", flag_values=FLAGS)
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Instead: a directory in the released layout.", flag_values=FLAGS)
_DRAFTER_RUN = flags.DEFINE_string(
    "drafter_run", None, "Directory of launch.train_dspark whose drafter goes with it.", flag_values=FLAGS
)
_DRAFTER_STEP = flags.DEFINE_integer("drafter_step", None, "Its checkpoint; by default the last.", flag_values=FLAGS)
_DRAFTER = flags.DEFINE_bool("drafter", True, "Export a drafter, if there is one.", flag_values=FLAGS)
_OUT = flags.DEFINE_string("out", None, "Directory to write; new or empty.", flag_values=FLAGS)
_FILE = flags.DEFINE_multi_string("file", [], "One more file to copy into it, such as a README.md.", flag_values=FLAGS)
_TEMPERATURES = flags.DEFINE_string(
    "confidence_temperatures",
    None,
    f"File made by launch.calibrate_confidence for this drafter, copied as {_TEMPERATURES_NAME}; by default that of "
    "the directory which the drafter is from, if it has one.",
    flag_values=FLAGS,
)
_SHARD_MIB = flags.DEFINE_integer(
    "shard_mib", SHARD_BYTES >> 20, "A safetensors file larger than that holds one layer only.", flag_values=FLAGS
)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", flag_values=FLAGS)

_VISION = ("vision", "aligner", "image_start", "image_end", "image_newline")


class _Weights(NamedTuple):
    """Parameters of a part each, whole names as keys or nested; None: there is no such part."""

    backbone: Params
    drafter: Params | None
    vision: Params | None
    tables: tuple[Any, ...] = ()


class _Saved(NamedTuple):
    """A checkpoint of a run."""

    config: ModelConfig
    tokenizer: pathlib.Path
    step: int | None  # None: of no run
    weights: _Weights


def _saved(directory: str, step: int | None) -> _Saved:
    """The masters of a run; nothing of them is read yet."""
    path = pathlib.Path(directory)
    config = load_config(path / "config.json")
    with Checkpoints(path / CHECKPOINTS, read_only=True) as checkpoints:
        step = checkpoints.chosen(step)
        arrays = checkpoints.arrays(step)
    parts: dict[str, Params] = {"backbone": {}, "drafter": {}, "vision": {}}
    for name, array in arrays.items():
        group, _, name = name.partition(".")
        if group == "masters":
            first = name.split(".")[0]
            part = "drafter" if first == "mtp" else "vision" if first in _VISION else "backbone"
            parts[part][name] = array
    weights = _Weights(parts["backbone"], parts["drafter"] or None, parts["vision"] or None)
    return _Saved(config, path / "tokenizer.json", step, weights)


def _loaded(directory: str, *, drafter: bool) -> _Saved:
    """The weights of a directory in the released layout, as they are stored."""
    model = dsv41.load(directory, drafter=drafter)
    tables = () if model.engram is None else tuple(model.engram.tables)
    weights = _Weights(model.params, model.drafter, model.vision, tables)
    return _Saved(model.config, pathlib.Path(directory) / "tokenizer.json", None, weights)


def _config_with_drafter(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """The config of a drafter's run, if it is of the same model: fields of the drafter alone may differ.

    Raises:
      DSV41Error: it is of another model; names the first field that differs.
    """

    def of_backbone(c: ModelConfig) -> dict[str, Any]:
        text = dataclasses.asdict(c.text_config)
        own = {name: value for name, value in text.items() if not name.startswith("dspark_")}
        ratios = own.pop("compress_ratios")[: c.text_config.num_hidden_layers]
        own.pop("num_nextn_predict_layers")
        whole = {name: value for name, value in dataclasses.asdict(c).items() if name != "text_config"}
        # A run that trains a drafter has no use for the tower.
        whole.pop("vision_config")
        return whole | {f"text_config.{name}": value for name, value in own.items()} | {"compress_ratios": ratios}

    ours, theirs = of_backbone(config), of_backbone(other)
    for field, value in ours.items():
        if theirs[field] != value:
            raise DSV41Error(
                f"--drafter_run: was trained for another model: its {field} is {theirs[field]!r}, expected {value!r}"
            )
    return dataclasses.replace(other, vision_config=config.vision_config)


def _same_tokenizer(model: pathlib.Path, drafter: pathlib.Path) -> None:
    # Runs write theirs in the library's own form, whatever the form of the file that they were given.
    if tokenizer_hash(load_tokenizer(model)) != tokenizer_hash(load_tokenizer(drafter)):
        raise DSV41Error(f"--drafter_run: {drafter} is another tokenizer than {model}")


def _files(config: ModelConfig, drafter: bool, directory: str) -> dict[str, bytes]:
    """What is copied along, by name; `directory` is where the drafter is from."""
    paths = {pathlib.Path(path).name: pathlib.Path(path) for path in _FILE.value}
    fitted = pathlib.Path(directory) / _TEMPERATURES_NAME
    if _TEMPERATURES.value is not None:
        if not drafter:
            raise DSV41Error("--confidence_temperatures: there is no drafter to go with them")
        fitted = pathlib.Path(_TEMPERATURES.value)
    if drafter and (_TEMPERATURES.value is not None or fitted.exists()):
        load_temperatures(fitted, config.text_config.dspark_block_size)
        paths[_TEMPERATURES_NAME] = fitted
    try:
        return {name: path.read_bytes() for name, path in paths.items()}
    except OSError as e:
        raise DSV41Error(f"--file: {e.filename}: cannot be read ({e.strerror or e})") from e


def _print(report: dict[str, Any], totals: dict[str, Any]) -> None:
    table = Table()
    table.add_column("part")
    for column in ("tensors", "bytes"):
        table.add_column(column, justify="right")
    for name, total in totals.items():
        table.add_row(name, f"{total.tensors:,}", f"{total.bytes:,}")
    width = None if sys.stdout.isatty() else 120
    Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False).print(table)
    dtypes = ", ".join(f"{name} {size:,}" for name, size in report["dtypes"].items())
    print(f"{report['out']}: {report['tensors']:,} tensors, {report['bytes']:,} bytes ({dtypes})")
    print(f"{report['directory_bytes']:,} bytes with all files; {'a' if report['drafter'] else 'no'} drafter")


def _check_flags() -> None:
    if _OUT.value is None:
        raise DSV41Error("--out=DIR is required")
    if (_RUN.value is None) == (_CHECKPOINT.value is None):
        raise DSV41Error("give either --run=DIR or --checkpoint=DIR")
    if _DRAFTER_RUN.value is not None and not _DRAFTER.value:
        raise DSV41Error("--drafter_run and --nodrafter exclude each other")
    for flag, needs in ((_STEP, _RUN), (_DRAFTER_STEP, _DRAFTER_RUN)):
        if flag.value is not None and needs.value is None:
            raise DSV41Error(f"--{flag.name} needs --{needs.name}")


def _with_drafter_of(model: _Saved, trained: _Saved) -> _Saved:
    """The model with the drafter of another run."""
    if trained.weights.drafter is None:
        raise DSV41Error(f"--drafter_run: step {trained.step} of {_DRAFTER_RUN.value} holds no drafter")
    _same_tokenizer(model.tokenizer, trained.tokenizer)
    weights = model.weights._replace(drafter=trained.weights.drafter)
    return model._replace(config=_config_with_drafter(model.config, trained.config), weights=weights)


def main() -> None:
    _check_flags()
    if _RUN.value is not None:
        model = _saved(_RUN.value, _STEP.value)
    else:
        model = _loaded(_CHECKPOINT.value, drafter=_DRAFTER.value and _DRAFTER_RUN.value is None)
    drafter_step = None
    if _DRAFTER_RUN.value is not None:
        trained = _saved(_DRAFTER_RUN.value, _DRAFTER_STEP.value)
        model, drafter_step = _with_drafter_of(model, trained), trained.step
    drafter = model.weights.drafter if _DRAFTER.value else None
    files = _files(model.config, drafter is not None, _DRAFTER_RUN.value or _RUN.value or _CHECKPOINT.value)
    with progress_bar(FLAGS.verbose, in_bytes=True) as bar:
        task = bar.add_task("writing", total=None)
        written = write_checkpoint(
            _OUT.value,
            model.config,
            model.weights.backbone,
            model.weights.tables,
            tokenizer=model.tokenizer,
            drafter=drafter,
            vision=model.weights.vision,
            files=files,
            shard_bytes=_SHARD_MIB.value << 20,
            progress=lambda done, total, _: bar.update(task, completed=done, total=total),
        )
    _report(model, written, drafter is not None, drafter_step)


def _report(model: _Saved, written: dict[str, Any], drafter: bool, drafter_step: int | None) -> None:
    totals = totals_by_subsystem(written)
    report = {
        "out": _OUT.value,
        "step": model.step,
        "drafter_step": drafter_step,
        "drafter": drafter,
        "tensors": len(written),
        "bytes": sum(spec.nbytes for spec in written.values()),
        "directory_bytes": sum(path.stat().st_size for path in pathlib.Path(_OUT.value).iterdir()),
        "subsystems": {name: total.bytes for name, total in totals.items()},
        "dtypes": bytes_by_dtype(written),
    }
    if _JSON.value:
        print(json.dumps(report))
    else:
        _print(report, totals)


def cli() -> int:
    """The console script."""
    # Rounding is all there is to compute, and an accelerator may be in use by the run.
    jax.config.update("jax_platforms", "cpu")
    return run(main, FLAGS)


if __name__ == "__main__":
    sys.exit(cli())
