"""Pictures: the --plot flag of a script, and the curves of a training run."""

import importlib
import io
import math
import pathlib
from typing import Any

from absl import flags

from dsv41.config import DSV41Error
from dsv41.config.atomic_file import check_target, write_file


class PlotFlag:
    """--plot of a script."""

    def __init__(self, values: flags.FlagValues, what: str):
        """Defines the flag in `values`; `what` says what the picture shows."""
        self._values = values
        flags.DEFINE_string(
            "plot", None, f"PNG file to draw {what} into. Needs matplotlib (the notebooks extra).", flag_values=values
        )

    @property
    def given(self) -> bool:
        return self._values.plot is not None

    def check(self, out: str | None = None) -> None:
        """Finds out before any work whether a picture can be made.

        Args:
          out: the script's other file.

        Raises:
          DSV41Error: matplotlib is not installed, or the file cannot be put there, or it is `out`.
        """
        if self.given:
            if out is not None and pathlib.Path(out).resolve() == pathlib.Path(self._values.plot).resolve():
                raise DSV41Error(f"--plot: {out} is the file of --out")
            check_target(self._values.plot)
            self.figure()

    def figure(self, **size: Any) -> Any:
        """An empty `matplotlib.figure.Figure`.

        Raises:
          DSV41Error: matplotlib is not installed.
        """
        return _figure("--plot", "notebooks", **size)

    def save(self, figure: Any) -> None:
        """Writes the figure to the flag's file, whole or not at all.

        Raises:
          DSV41Error: it cannot be written.
        """
        _save(figure, self._values.plot)


def plot_curves(csv: str | pathlib.Path, png: str | pathlib.Path) -> None:
    """Draws the `curves.csv` of a training run into a PNG file.

    Raises:
      DSV41Error: matplotlib is not installed, the CSV file has no rows, or the PNG file cannot be written.
    """
    # Here, so that a script that measures decoding does not load the optimiser.
    from dsv41.train.curves import ACROSS, draw_curves, panels, read_curves

    figure, columns = _figure("curves", "train"), read_curves(csv)
    figure.set_size_inches(12, 3 * math.ceil(len(panels(columns)) / ACROSS))
    draw_curves(figure, columns)
    _save(figure, png)


def _figure(what: str, extra: str, **size: Any) -> Any:
    """An empty figure; the error, if there can be none, names what needs it and the extra to install."""
    try:
        # By name: it is not among what the package needs.
        module = importlib.import_module("matplotlib.figure")
    except ImportError as e:
        raise DSV41Error(f"{what}: matplotlib is not installed (pip install 'dsv41[{extra}]')") from e
    return module.Figure(layout="constrained", **size)


def _save(figure: Any, path: str | pathlib.Path) -> None:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    write_file(path, data.getvalue())
