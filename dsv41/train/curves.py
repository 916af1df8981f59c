"""The course of a training run: a row of numbers a step, in a CSV file and for TensorBoard.

curves = Curves("run", tensorboard=True)
curves.truncate(restored_step)  # what came after it is computed again
curves.append(step, tokens, {"loss": 2.5, "learning_rate": 1e-3})
curves.close()
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import cannot_write, write_file

FILE = "curves.csv"
_STEP, _TOKENS = "step", "tokens"
# What is drawn in one panel: its title, and the columns by a word of their name.
_PANELS = (
    ("loss (nats a token)", ("loss", "perplexity")),
    ("learning rate", ("rate",)),
    ("gradient norm", ("norm",)),
    ("index recall", ("recall",)),
    ("expert load imbalance", ("imbalance", "violation")),
    ("tokens a second", ("per_second", "per_s")),
    ("drafts accepted at temperature 1", ("accept_",)),
    ("drafts that are the target's best", ("agree_",)),
    ("tokens a round", ("expected_tokens", "agreed_tokens")),
    ("confidence less acceptance", ("confidence_",)),
)
ACROSS = 3  # panels of a row


class Curves:
    """`curves.csv` of a run: step, tokens seen, and the metrics that the first row has."""

    def __init__(self, folder: str | pathlib.Path, tensorboard: bool = False, *, file: str = FILE):
        """
        Args:
          folder: of the run; what its file has is continued.
          tensorboard: also write events into a folder beside the file: `tensorboard` for `curves.csv`.
          file: its name, if it is another one.

        Raises:
          DSV41Error: the folder is missing, its file is not one of these, or tensorboardX is not installed.
        """
        self.path = pathlib.Path(folder) / file
        if not self.path.parent.is_dir():
            raise DSV41Error(f"{self.path}: no such directory {self.path.parent}")
        self._module = _tensorboard_module() if tensorboard else None
        self._file, self._events = None, None
        rows = _complete_rows(self.path)
        self._columns = rows[0] if rows else None
        self._last = int(rows[-1][0]) if len(rows) > 1 else None
        # A row that was cut off by the end of its process goes, so that the next one begins a line.
        if self.path.exists() and self.path.read_bytes() != _csv_bytes(rows):
            self._rewrite(rows)

    def truncate(self, step: int) -> None:
        """Drops the rows after `step`; with the last of them also the choice of columns.

        Raises:
          DSV41Error: the file cannot be written; it is untouched then.
        """
        self.close()
        rows = _complete_rows(self.path)
        kept = [row for row in rows[1:] if int(row[0]) <= step]
        if len(kept) + 1 < len(rows) or not kept:
            self._rewrite([rows[0], *kept] if kept else [])
        self._columns = rows[0] if kept else None
        self._last = int(kept[-1][0]) if kept else None
        if self._module is not None:
            self._open_events()

    def append(self, step: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """Adds a row, which other programs can read at once.

        Args:
          step: its number, above that of the row before.
          tokens: seen up to and with this step.
          metrics: numbers by name; the first row says which there are.

        Raises:
          DSV41Error: the step is not above the last one, a metric is missing or new or called as another column, or the
            system refuses to write.
        """
        if self._last is not None and step <= self._last:
            raise DSV41Error(f"{self.path}: step {step} after step {self._last}; truncate it to the step restored")
        if reserved := {_STEP, _TOKENS} & metrics.keys():
            raise DSV41Error(f"{self.path}: a metric cannot be called {', '.join(sorted(reserved))}")
        columns = [_STEP, _TOKENS, *metrics]
        if self._columns is None:
            self._columns = columns
            self._write(columns)
        for word, names in (("missing", set(self._columns) - set(columns)), ("new", set(columns) - set(self._columns))):
            if names:
                raise DSV41Error(f"{self.path}: step {step}: {word} column {', '.join(sorted(names))}")
        values = {name: float(value) for name, value in metrics.items()}
        self._write([step, tokens, *(repr(values[name]) for name in self._columns[2:])])
        self._last = step
        if self._module is not None:
            self._write_events(step, tokens, values)

    def _write(self, row: list[Any]) -> None:
        try:
            if self._file is None:
                self._file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115 (closed by `close`)
            csv.writer(self._file, lineterminator="\n").writerow(row)
            self._file.flush()
        except OSError as e:
            raise cannot_write(self.path, e) from e

    def _rewrite(self, rows: list[list[str]]) -> None:
        if rows:
            write_file(self.path, _csv_bytes(rows))
        else:
            self.path.unlink(missing_ok=True)

    def _open_events(self) -> None:
        # TensorBoard hides what an earlier run wrote of steps from `first` on. Files are named by the second, and one
        # would replace that of a run that ended just now.
        stem = "" if self.path.name == FILE else f"_{self.path.stem}"
        folder, first = self.path.parent / f"tensorboard{stem}", 0 if self._last is None else self._last + 1
        try:
            self._events = self._module.SummaryWriter(
                logdir=str(folder), purge_step=first, filename_suffix=f".{first}.{os.getpid()}"
            )
        except OSError as e:
            raise cannot_write(folder, e) from e

    def _write_events(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        if self._events is None:
            self._open_events()
        for name, value in ((_TOKENS, tokens), *values.items()):
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Lets go of the files; a later `append` opens them again."""
        for name in ("_file", "_events"):
            opened = getattr(self, name)
            setattr(self, name, None)
            if opened is not None:
                opened.close()

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _tensorboard_module() -> Any:
    try:
        # By name: it is not among what the package needs.
        return importlib.import_module("tensorboardX")
    except ImportError as e:
        raise DSV41Error("tensorboard: tensorboardX is not installed (pip install 'dsv41[train]')") from e


def _csv_bytes(rows: list[list[str]]) -> bytes:
    return "".join(",".join(row) + "\n" for row in rows).encode()


def _complete_rows(path: pathlib.Path) -> list[list[str]]:
    """Header and rows up to the last line end, as text; nothing if there is no file.

    Raises:
      DSV41Error: it cannot be read or is not a file of curves; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as e:
        raise DSV41Error(f"{path}: not a readable CSV file ({e})") from e
    rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    if rows and rows[0][:2] != [_STEP, _TOKENS]:
        raise DSV41Error(f"{path}: line 1: expected the columns {_STEP},{_TOKENS}, got {','.join(rows[0])}")
    for number, row in enumerate(rows[1:], 2):
        numbers = False
        with contextlib.suppress(ValueError):
            numbers = len(row) == len(rows[0]) and [int(row[0]), int(row[1]), *map(float, row[2:])]
        if not numbers:
            raise DSV41Error(f"{path}: line {number}: expected {len(rows[0])} numbers, got {','.join(row)!r}")
    return rows


def read_curves(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The columns of a `curves.csv`: int64 `step` and `tokens`, float64 metrics.

    Raises:
      DSV41Error: there is no row, or the file is not one of these.
    """
    path = pathlib.Path(path)
    rows = _complete_rows(path)
    if len(rows) < 2:
        raise DSV41Error(f"{path}: no rows of a training run" if path.exists() else f"{path}: no such file")
    columns = dict(zip(rows[0], zip(*rows[1:]), strict=True))
    return {
        name: np.array([int(v) for v in values] if name in (_STEP, _TOKENS) else [float(v) for v in values])
        for name, values in columns.items()
    }


def has_rows(path: str | pathlib.Path) -> bool:
    """Whether `read_curves` finds any there; raises DSV41Error if the file is not one of these."""
    return len(_complete_rows(pathlib.Path(path))) > 1


def panels(columns: Mapping[str, Any]) -> dict[str, list[str]]:
    """Which metrics are drawn together: names by the title of their panel. One that fits none has its own."""
    drawn: dict[str, list[str]] = {}
    for name in columns:
        if name not in (_STEP, _TOKENS):
            title = next((title for title, words in _PANELS if any(word in name for word in words)), name)
            drawn.setdefault(title, []).append(name)
    order = [title for title, _ in _PANELS]
    return dict(sorted(drawn.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def draw_curves(figure: Any, columns: Mapping[str, np.ndarray]) -> None:
    """Draws metrics over tokens, panel by panel, into an empty `matplotlib.figure.Figure`."""
    drawn = panels(columns)
    across = min(ACROSS, len(drawn))
    axes = figure.subplots(math.ceil(len(drawn) / across), across, squeeze=False).flatten()
    for axis, (title, names) in zip(axes, drawn.items()):
        for name in names:
            axis.plot(columns[_TOKENS], columns[name], label=name, linewidth=1)
        axis.set_title(title)
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend(fontsize="small")
    for axis in axes[len(drawn) :]:
        axis.remove()
