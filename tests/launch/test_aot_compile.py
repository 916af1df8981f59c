"""launch.aot_compile: bad input, what a dead compiler becomes, and the real compiler where it is installed."""

import importlib.metadata
import json
import sys

import pytest

from launch import aot_compile
from launch.cli import run
from pallas_kernels import ahead_of_time
from pallas_kernels.ahead_of_time import Compiled, Kernel


def start(*arguments):
    return run(aot_compile.main, aot_compile.FLAGS, ["launch/aot_compile.py", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op=softmax"], "softmax"),
        (["--topology=v6e"], "--topology: 'v6e' is no TPU topology"),
        (["--topology=v6e:2x2,h200:1x1"], "--topology: 'h200:1x1' is no TPU topology"),
        (["--topology="], "--topology: name at least one"),
        (["--spec=nothing"], "--spec='nothing': no shape of"),
        (["--jobs=0"], "--jobs"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert start(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert message in err


def test_without_libtpu(monkeypatch, capsys):
    monkeypatch.setattr(ahead_of_time.importlib.util, "find_spec", lambda name: None)
    assert start() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "pip install 'dsv41[tpu]'" in err


@pytest.fixture
def results(monkeypatch):
    """Makes the compiler say what the test put there, for the two shapes of one op."""

    def fake(op, specs, topology):
        good = {
            "op": op, "topology": topology, "seconds": 1.5, "argument_bytes": 3 << 20, "must_move": 1 << 20,
            "fits": True,
            "kernels": (Kernel(name="a", vmem_bytes=5 << 20, flops=1, bytes=2),),
        }  # fmt: skip
        bad = {"op": op, "topology": topology, "error": "INTERNAL: no such register"}
        return [Compiled(spec=name, **(bad if name == rows.get("bad") else good)) for name in specs]

    rows = {}
    monkeypatch.setattr(ahead_of_time, "libtpu_problem", lambda: None)
    monkeypatch.setattr(ahead_of_time, "compile_specs", fake)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3" if name == "libtpu" else version(name))
    return rows


def test_table(results, capsys):
    assert start("--op=hyper_connection", "--topology=v5e:2x2,v5p:2x2x1", "--spec=t8") == 0
    out = capsys.readouterr().out
    assert "libtpu 1.2.3" in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("hyper_connection")]
    assert [row[1:6] for row in rows] == [["t8", t, "1.5", "5.00", "3.00"] for t in ("v5e:2x2", "v5p:2x2x1")]
    assert all(row[-1] == "yes" for row in rows)


def test_failed_rows_are_listed_and_make_the_status(results, capsys):
    results["bad"] = "t64"
    with pytest.raises(SystemExit) as exit:
        start("--op=hyper_connection", "--topology=v5e:2x2", "--json")
    assert exit.value.code == 1
    out, err = capsys.readouterr()
    rows = {row["spec"]: row for row in json.loads(out)["rows"]}
    assert rows["t64"]["error"] == "INTERNAL: no such register" and rows["t64"]["fits"] is None
    assert rows["t8"]["error"] is None and rows["t8"]["vmem_bytes"] == 5 << 20
    assert "hyper_connection t64 for v5e:2x2: INTERNAL" in err


def test_a_dead_compiler_costs_one_shape(monkeypatch, tmp_path):
    """The child answers for one shape and dies at the next; the third is compiled by another child."""
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os, sys\n"
        "op, topology, *names = sys.argv[3:]\n"
        "for name in names:\n"
        "    if name == 'two':\n"
        "        print('F0101 12:00 register.cc:1] Check failed: rows < 8', file=sys.stderr, flush=True)\n"
        "        os.abort()\n"
        "    row = {'op': op, 'spec': name, 'topology': topology, 'fits': True, 'kernels': []}\n"
        "    print(json.dumps(row), flush=True)\n"
    )
    real = ahead_of_time.subprocess.run
    monkeypatch.setattr(
        ahead_of_time.subprocess, "run", lambda command, **k: real([sys.executable, str(child), *command[1:]], **k)
    )
    one, two, three = ahead_of_time.compile_specs("topk", ["one", "two", "three"], "v6e:2x2")
    assert one.fits and three.fits and [r.spec for r in (one, two, three)] == ["one", "two", "three"]
    assert "SIGABRT" in two.error and "Check failed: rows < 8" in two.error and two.fits is None


def test_kernels_of_a_program():
    line = (
        '  %%%s = f32[8,128]{1,0} custom-call(%%a), custom_call_target="%s", backend_config={"custom_call_config":{'
        '"cost_estimate":{"flops":"12","transcendentals":"1","bytes_accessed":"34"}},"scoped_memory_configs":'
        '[{"memory_space":"1","offset":"0","size":"999"}],"used_scoped_memory_configs":'
        '[{"memory_space":"0","offset":"0","size":"7"},{"memory_space":"1","offset":"0","size":"56"}]}'
    )
    program = "\n".join([line % ("topk_select.2", "tpu_custom_call"), line % ("other", "Sharding"), "ROOT %x = add"])
    assert ahead_of_time.kernels_of(program) == (Kernel(name="topk_select.2", vmem_bytes=56, flops=12, bytes=34),)


@pytest.mark.slow
@pytest.mark.skipif(ahead_of_time.libtpu_problem() is not None, reason="libtpu is not installed")
def test_real_compiler(capsys):
    """One shape of each kind: a kernel that streams, and one that changes a pool in place."""
    assert start("--op=hyper_connection", "--op=quantize", "--topology=v6e:2x2", "--spec=64", "--json") == 0
    rows = {row["spec"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert all(row["fits"] and row["kernels"] and row["vmem_bytes"] > 0 for row in rows.values())
    assert rows["t64"]["bytes_accessed"] < 2 * rows["t64"]["must_move"]
    for name in ("write_window_b64", "write_main_b64", "write_index_b64"):
        assert rows[name]["alias_bytes"] == rows[name]["output_bytes"] and rows[name]["temp_bytes"] == 0
