"""The flags that say which model a script runs, and loading it."""

import os
import pathlib
import sys
import time
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import dsv41
from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.config import DSV41Error, ModelConfig, load_config, with_overrides
from dsv41.data import TINY_MODEL
from dsv41.models import Model
from dsv41.sharding.agreement import check_same_input
from dsv41.sharding.processes import is_first_process
from launch.cli import make_directory, overrides
from launch.mesh_flags import MeshFlags
from pallas_kernels.dispatch import kernels


class ModelFlags:
    """--checkpoint, --set, --kernels and --compile_cache_dir of a script, and what follows from them."""

    def __init__(self, values: flags.FlagValues, *, config: bool = False):
        """Defines the flags in `values`; with `config` also --config, which stands for a model without weights."""
        self._values = values
        flags.DEFINE_string(
            "checkpoint",
            None,
            "Directory in the released layout, or an import of one (launch.import_checkpoint). Without it: the bundled "
            "tiny model, whose weights are random.",
            flag_values=values,
        )
        if config:
            flags.DEFINE_string(
                "config",
                None,
                "Instead: a config.json, or a directory that holds one; the weights are random.",
                flag_values=values,
            )
        flags.DEFINE_multi_string(
            "set",
            [],
            "key=value: changes one field of the config, such as text_config.max_position_embeddings=4096.",
            flag_values=values,
        )
        flags.DEFINE_string(
            "compile_cache_dir",
            None,
            "Directory that keeps compiled programs, so that later runs start faster. "
            "Several CPU processes do without.",
            flag_values=values,
        )
        flags.DEFINE_enum(
            "kernels",
            "auto",
            ["auto", "xla", "pallas"],
            "auto: Pallas kernels where the backend has them for these shapes, else plain XLA (--verbose says which); "
            "xla: none; pallas: an error where one is missing.",
            flag_values=values,
        )

    @property
    def checkpoint(self) -> pathlib.Path | None:
        """The directory; None if --config is given instead."""
        if self._config is not None:
            return None
        return TINY_MODEL if self._values.checkpoint is None else pathlib.Path(self._values.checkpoint)

    @property
    def _config(self) -> str | None:
        return self._values.config if "config" in self._values else None

    def config(self) -> ModelConfig:
        """The config with overrides; reads nothing else, so that bad input shows before a long load."""
        if self._config is not None and self._values.checkpoint is not None:
            raise DSV41Error("give either --checkpoint=DIR or --config=FILE")
        return with_overrides(load_config(self._config or self.checkpoint), overrides(self._values.set))

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of the checkpoint.

        Raises:
          DSV41Error: there is none.
        """
        return load_tokenizer(self.checkpoint)

    def load(
        self, *, vision: bool = False, drafter: bool = False, mesh: MeshFlags | None = None
    ) -> tuple[Model, float]:
        """The model, with its vision tower and its drafter or without, and the seconds that loading took.

        With `mesh` it is spread as those flags say.
        """
        started = time.perf_counter()
        self.start_device()
        spread = {}
        if mesh is not None:
            config = self.config()
            spread = {"mesh": mesh.mesh(), "rules": mesh.rules(config)}
            check_same_input(config=repr(config).encode())
        with progress_bar(self._values.verbose, in_bytes=True) as bar:
            task = bar.add_task("loading", total=None)
            model = dsv41.load(
                self.checkpoint,
                overrides=overrides(self._values.set),
                vision=vision,
                drafter=drafter,
                progress=lambda done, total, _: bar.update(task, completed=done, total=total),
                **spread,
            )
        return model, time.perf_counter() - started

    def start_device(self) -> None:
        """Finds a device, and sets up kernels and where compiled programs are kept; `load` does so too.

        Raises:
          DSV41Error: there is no device, or the directory cannot be made.
        """
        try:
            jax.devices()
        except (RuntimeError, AssertionError) as e:  # some releases of JAX assert that a backend started
            platforms = os.environ.get("JAX_PLATFORMS", "")
            reason = str(e) or "none started"
            raise DSV41Error(f"no device that JAX can use (JAX_PLATFORMS={platforms!r}): {reason}") from e
        kernels.set_global(self._values.kernels)
        self._use_compile_cache()

    def _use_compile_cache(self) -> None:
        directory = self._values.compile_cache_dir
        if directory is None:
            return
        make_directory("compile_cache_dir", directory)
        jax.config.update("jax_compilation_cache_dir", directory)
        # Keep small programs too: together they take as long as the large ones.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def progress_bar(verbose: bool, *, in_bytes: bool = False) -> Progress:
    """A bar on stderr that vanishes when it is done; shown on a terminal, or always if `verbose`, by process 0."""
    amount = DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not (is_first_process() and (verbose or sys.stderr.isatty())),
        transient=not verbose,
    )
