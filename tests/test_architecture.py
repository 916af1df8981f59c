"""The house rules that a program can check."""

import ast
import functools
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from pallas_kernels.registry import OPS

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("dsv41", "pallas_kernels", "launch", "tests")
MAX_FILE_LINES = 500
# pallas_kernels holds kernel bodies, which may not be cut at will.
MAX_FUNCTION_LINES = {"dsv41": 60, "launch": 60, "pallas_kernels": 150}
FORBIDDEN_FILES = re.compile(r"(utils?|helpers?|common|misc|.*_(v\d+|deprecated|old|new|copy))\.py")
# What an import is called where the distribution is called otherwise.
IMPORT_NAMES = {"absl-py": "absl", "orbax-checkpoint": "orbax", "pillow": "PIL"}
# What the benchmark may compare with, where it happens to be installed.
PEERS = "pallas_kernels/bench_peers/"
PEER_PACKAGES = {"torch", "triton"}


def _python_files(*packages: str) -> list[pathlib.Path]:
    return sorted(f for p in packages for f in (ROOT / p).rglob("*.py"))


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _imported_packages(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names


def _check(*command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_imports_go_down_only():
    _check("-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")


def test_ruff_check():
    _check("-m", "ruff", "check", "--no-cache", ".")


def test_ruff_format():
    _check("-m", "ruff", "format", "--no-cache", "--check", ".")


def test_kernels_know_only_arrays():
    allowed = {"jax", "ml_dtypes", "numpy", "pallas_kernels"}
    found = {f.relative_to(ROOT).as_posix(): _imported_packages(f) - allowed for f in _python_files("pallas_kernels")}
    assert {f: names for f, names in found.items() if names - (PEER_PACKAGES if f.startswith(PEERS) else set())} == {}


def test_the_model_calls_kernels_through_their_ops_only():
    """No implementation of an op is named outside it, so that one choice holds for a whole step."""
    op = rf"pallas_kernels\.({'|'.join(OPS)})"
    inside = re.compile(rf"{op}\.(?!ops\b)\w+|from {op} import (?!ops\b)")
    users = _python_files("dsv41", "launch")
    assert [f.relative_to(ROOT).as_posix() for f in users if inside.search(f.read_text())] == []


def test_only_the_benchmark_knows_peers():
    users = [f for f in _python_files("dsv41", "pallas_kernels", "launch") if "bench_peers" in f.read_text()]
    outside = {f.relative_to(ROOT).as_posix() for f in users if PEERS not in f.as_posix()}
    assert outside <= {"launch/bench_kernels.py"}


def test_config_and_images_load_without_jax():
    code = "import sys, dsv41.config, dsv41.data, dsv41.images; sys.exit('jax' if 'jax' in sys.modules else 0)"
    _check("-c", code)


def test_dependencies_are_what_is_imported():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    distributions = {re.match(r"[\w-]+", d).group() for d in declared}
    names = {IMPORT_NAMES.get(d, d) for d in distributions}
    own = {"dsv41", "pallas_kernels", "launch"}
    imported = set().union(*(_imported_packages(f) for f in _python_files(*own))) - own - PEER_PACKAGES
    assert imported == names


def test_files_are_short():
    lengths = {f.relative_to(ROOT).as_posix(): len(f.read_text().splitlines()) for f in _python_files(*PACKAGES)}
    assert {f: n for f, n in lengths.items() if n > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("package", MAX_FUNCTION_LINES)
def test_functions_are_short(package):
    too_long = {}
    for path in _python_files(package):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES[package]:
                    too_long[f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}"] = lines
    assert too_long == {}


def test_names_say_what_is_inside():
    files = _python_files(*PACKAGES)
    assert [f.relative_to(ROOT).as_posix() for f in files if FORBIDDEN_FILES.fullmatch(f.name)] == []
    classes = [node.name for f in files for node in ast.walk(_tree(f)) if isinstance(node, ast.ClassDef)]
    assert [name for name in classes if "Manager" in name] == []


def _text_files():
    """Everything that is committed, apart from binary files."""
    hidden_but_ours = {".ci", ".github", ".gitignore"}
    for top in ROOT.iterdir():
        if (top.name.startswith(".") and top.name not in hidden_but_ours) or top.name in ("build", "dist"):
            continue
        for path in top.rglob("*") if top.is_dir() else [top]:
            if path.is_file() and path.suffix not in (".pyc", ".safetensors", ".png") and ".egg-info" not in str(path):
                yield path


def test_no_machine_or_package_index_is_named():
    # The brackets keep this file from naming them itself.
    pattern = re.compile(r"(?<![\w.$})/])/(?:work|root|opt)/|py[p]i\.org|python[h]osted|index[-]url|find[-]links")
    found = []
    for path in _text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT).as_posix()}:{number}: {line.strip()[:120]}")
    assert found == []
