"""Tuning as a command, with a clock that knows which choice is best."""

import json
import types

import jax
import pytest

from launch import tune_kernels
from launch.cli import run
from pallas_kernels.registry import arg_specs
from pallas_kernels.tuning import HEURISTIC, data_file, trial


def _run(*argv: str) -> int:
    return run(tune_kernels.main, tune_kernels.FLAGS, ["tune_kernels", *argv])


@pytest.fixture
def fake(monkeypatch):
    """An op with one shape whose time is 10 us, or by the choice; 3 splits do not fit the device."""
    times = {1: 9.9, 2: 6.0, 3: None, 4: 8.0}

    def time_spec(spec, kernel):
        if trial.value == HEURISTIC:
            return 10.0
        ((_, name, value),) = trial.value
        assert name == "splits"
        if times[value] is None:
            raise ValueError("too large")
        return times[value]

    specs = arg_specs("topk", "ci")[:1]
    sizes = types.SimpleNamespace(knobs=lambda **_: ("64x128", {"splits": [1, 2, 3, 4]}))
    monkeypatch.setattr(tune_kernels, "_kernel", lambda: "gpu")
    monkeypatch.setattr(tune_kernels, "time_spec", time_spec)
    monkeypatch.setattr(tune_kernels, "arg_specs", lambda op, tag: specs)
    monkeypatch.setattr(tune_kernels, "_block_sizes", lambda op: sizes)
    return times


def test_the_best_choice_is_kept_beside_other_shapes(fake, tmp_path, capsys):
    kind = jax.devices()[0].device_kind
    path = tmp_path / data_file(kind).name
    path.write_text(json.dumps({"device_kind": kind, "jax": "0", "ops": {"topk": {"1x1": {"splits": 7}}}}))
    assert _run("--op=topk", f"--out={tmp_path}") == 0
    sizes = json.loads(path.read_text())
    assert sizes["ops"] == {"topk": {"1x1": {"splits": 7}, "64x128": {"splits": 2}}}
    assert sizes["jax"] == jax.__version__
    assert "6.0" in capsys.readouterr().out


def test_a_second_run_says_the_same(fake, tmp_path):
    """What the first one wrote is not what the second one compares with."""
    for _ in range(2):
        assert _run("--op=topk", f"--out={tmp_path / 'sizes'}") == 0
        path = tmp_path / "sizes" / data_file(jax.devices()[0].device_kind).name
        assert json.loads(path.read_text())["ops"] == {"topk": {"64x128": {"splits": 2}}}


def test_a_choice_that_gains_little_leaves_the_heuristic(fake, tmp_path):
    fake.update({2: 9.8, 4: 9.9})
    assert _run("--op=topk", f"--out={tmp_path}") == 0
    path = tmp_path / data_file(jax.devices()[0].device_kind).name
    assert json.loads(path.read_text())["ops"] == {"topk": {}}


def test_bad_input(fake, tmp_path, capsys):
    assert _run() == 2
    assert "give --out=DIR" in capsys.readouterr().err
    assert _run("--out=/nowhere/at/all") == 2
    assert "no such directory /nowhere/at" in capsys.readouterr().err
    assert _run("--spec=nothing", f"--out={tmp_path}") == 2
    assert "--spec='nothing': no shape of" in capsys.readouterr().err
    path = tmp_path / data_file(jax.devices()[0].device_kind).name
    path.write_text(json.dumps({"device_kind": "another", "ops": {}}))
    assert _run(f"--out={tmp_path}") == 2
    assert f"{path}: not a file of block sizes" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about the CPU")
def test_a_cpu_has_nothing_to_tune(tmp_path, capsys):
    assert _run(f"--out={tmp_path}") == 2
    assert "the cpu backend has no kernels to tune" in capsys.readouterr().err
