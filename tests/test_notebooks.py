"""Every notebook runs from a clone, is stored without outputs, and uses what there is."""

import ast
import builtins
import inspect
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow  # whole models are compiled
def test_runs(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("TRAIN_SECONDS", "5")  # instead of a minute for each training; compiling takes longer anyway
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()


def code_of(path: pathlib.Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def bound(tree: ast.AST) -> set[str]:
    """Names that anything in a cell gives a meaning to, imports aside."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def value_of(node: ast.expr, imported: dict[str, Any]) -> Any:
    """What `name` or `name.attribute...` is, as far as it is a module, a class or found in one; else None.

    Raises:
      AttributeError: there is no such attribute.
    """
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = value_of(node.value, imported)
    fixed = inspect.ismodule(owner) or inspect.isclass(owner)
    return getattr(owner, node.attr) if fixed else None


def problems(cells: list[str]) -> Iterator[str]:
    """What running the cells would stumble over that the imports alone show: names and attributes that there are not,
    and calls of imported functions of dsv41 that these do not take."""
    imported, known = {}, set(dir(builtins))
    for cell in cells:
        tree = ast.parse(cell)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                try:
                    exec(compile(ast.Module([node], []), "cell", "exec"), imported)
                except ImportError as e:
                    yield str(e)
        known |= bound(tree) | set(imported)
        imported = {name: value for name, value in imported.items() if name not in bound(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in known:
                yield f"name {node.id!r} is not defined"
            elif isinstance(node, ast.Attribute | ast.Call):
                try:
                    called = value_of(node.func if isinstance(node, ast.Call) else node, imported)
                    if isinstance(node, ast.Call) and getattr(called, "__module__", "").startswith("dsv41"):
                        check_call(called, node)
                except (AttributeError, TypeError) as e:
                    yield f"{ast.unparse(node)}: {e}"


def check_call(called: Any, node: ast.Call) -> None:
    """Raises a TypeError if `called` does not take as many arguments of these names; passes over `*` and `**`."""
    starred = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
    signature = inspect.signature(called)
    bind = signature.bind_partial if starred else signature.bind
    positional = [a for a in node.args if not isinstance(a, ast.Starred)]
    bind(*positional, **{k.arg: k.value for k in node.keywords if k.arg is not None})


def test_uses_what_there_is(path):
    assert list(problems(code_of(path))) == []


@pytest.mark.parametrize(
    "cells, message",
    [
        (["from dsv41.engine import generator"], "cannot import name 'generator'"),
        (["import dsv41.absent"], "No module named 'dsv41.absent'"),
        (["y = 1", "x = y\nx + z"], "name 'z' is not defined"),
        (["import dsv41", "dsv41.lode(3)"], "has no attribute 'lode'"),
        (["import numpy as np\nnp.random.absent"], "has no attribute 'absent'"),
        (["from dsv41.cache import CacheLayout\nCacheLayout.from_nothing"], "has no attribute 'from_nothing'"),
        (
            ["from dsv41.engine import generate\ngenerate(1, [], max_new_tokens=2, new_tokens=3)"],
            "unexpected keyword argument",
        ),
        (["from dsv41.engine import generate\ngenerate()"], "missing a required argument"),
    ],
)
def test_what_there_is_not_is_found(cells, message):
    found = list(problems(cells))
    assert found and message in found[0]


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
