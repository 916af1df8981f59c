"""Every notebook runs from a clone, and is stored without outputs."""

import os
import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


# The others compile more programs than a change should wait for.
RUN_ALWAYS = "01_model_tour"


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if p.stem == RUN_ALWAYS else pytest.mark.slow) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_runs(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("TRAIN_SECONDS", "5")  # instead of a minute for each training; compiling takes longer anyway
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()


def test_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


def test_opens_in_colab(path):
    """A badge that points at this very notebook, and a cell that installs the package."""
    notebook = nbformat.read(path, as_version=4)
    place = path.relative_to(ROOT).as_posix()
    assert f"https://colab.research.google.com/github/dsv41/dsv41/blob/main/{place}" in notebook.cells[0].source
    assert '"pip", "install"' in notebook.cells[1].source
