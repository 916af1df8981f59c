"""launch.aot_compile --program: presets, bad input, the child process, and the real compiler where it is installed."""

import dataclasses
import json
import sys

import pytest

from dsv41.config import load_config
from dsv41.cost_model import StepSizes
from launch import aot_compile, aot_program
from launch.cli import run
from pallas_kernels import ahead_of_time

STEP = ["--program=decode", "--topology=v6e:2x2", "--mesh=data=4", "--rows=4", "--context=4096"]


def start(*arguments):
    return run(aot_compile.main, aot_compile.FLAGS, ["launch/aot_compile.py", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--program=serve"], "serve"),
        (["--program=decode"], "give --rows"),
        ([*STEP[:-1]], "give --context"),
        ([*STEP, "--topology=v6e:2x2,v5e:2x2"], "--topology: a step is compiled for one topology"),
        ([*STEP, "--topology=v6e"], "--topology: 'v6e' is no TPU topology"),
        ([*STEP, "--topology=v4:2x2x1"], "data sheets are known of"),
        ([*STEP, "--mesh=data=2"], "--mesh=data=2: 2 devices, v6e:2x2 has 4"),
        ([*STEP, "--topology=tpu7x:2x2x1"], "--mesh=data=4: 4 devices, tpu7x:2x2x1 has 8"),
        ([*STEP, "--mesh=expert=4"], "mesh 'expert=4'"),
        ([*STEP, "--tokens=7"], "tokens=7"),
        ([*STEP, "--config=nowhere.json"], "nowhere.json"),
        ([*STEP, "--set=text_config.nothing=1"], "nothing"),
        ([*STEP, "--rules=serve"], "sharding preset 'serve'"),
        (["--preset=nothing"], "--preset=nothing: there is no such file"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert start(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no JSON"), ('{"rows": 1, "batch": 2}', "unknown batch"), ("[]", "no object")]
)
def test_bad_preset(text, message, tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert start(f"--preset={path}") == 2
    assert message in capsys.readouterr().err


PRESETS = sorted(aot_program.PRESETS.glob("*.json"))


def test_presets_are_there():
    chips = {json.loads(p.read_text())["topology"].partition(":")[0] for p in PRESETS}
    programs = {json.loads(p.read_text())["program"] for p in PRESETS}
    assert chips == {"v5p", "v6e", "tpu7x"} and programs == {"decode", "prefill", "verify"}


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_presets_can_be_built(path):
    """Mesh, topology and rules agree, rows divide, and a preset says what it is for."""
    values = aot_program.preset(path.stem)
    assert values["about"]
    job = aot_program.job_of(values, kernels="tpu", hlo=None)
    sizes = StepSizes(**job["sizes"])
    rules = sizes.rules_for(load_config(job["config"]))
    shards = 1
    for axis in rules.batch:
        shards *= sizes.mesh_sizes[axis]
    assert sizes.rows % shards == 0


COST = {
    "parameters": {"attention": 3 << 30, "routed experts": 1 << 30},
    "cache": {"main KV": 1 << 30},
    "batch": 0,
    "footprint": {
        "arguments": 5 << 30, "outputs": 2 << 30, "temporaries": 1 << 30, "alias": 1 << 30, "peak": 6 << 30,
        "limit": 31 << 30, "needed": 7 << 30, "fits": True,
    },
    "work": {
        "flops": {"attention": 2e9}, "bytes": {"attention": 3 << 20, "window KV": 1 << 20}, "total_flops": 2e9,
        "total_bytes": 4 << 20,
    },
    "compiled_flops": 3e9, "compiled_bytes": 6 << 20, "hbm_bytes": 5 << 20,
    "collectives": [
        {"kind": "all-gather", "count": 80.0, "operand_bytes": 2 << 20, "sent_bytes": 1 << 20, "largest_bytes": 1 << 19}
    ],
    "collectives_in_layer": {"most in a layer": {"all-gather": 2.0}, "elsewhere": {}},
    "moved": ["all-gather of u8[7] in layer_3"],
    "temporaries": [
        {"shape": "f32[8,128]", "opcode": "fusion", "bytes": 4096, "count": 3, "scope": "jit(f)/layer_*/attend/mul"}
    ],
    "unknown_loops": ["jit(f)/search/while"],
    "least": {"memory": 1e-3, "products": 2e-3, "links": 3e-3, "overlapped": 3e-3, "in_turn": 6e-3},
    "as_compiled": {"memory": 4e-3, "products": 2e-3, "links": 3e-3, "overlapped": 4e-3, "in_turn": 9e-3},
}  # fmt: skip


@pytest.fixture
def child(monkeypatch, tmp_path):
    """The child's program is what the test writes here; libtpu seems installed."""
    path = tmp_path / "child.py"
    real = aot_program.subprocess.Popen
    monkeypatch.setattr(ahead_of_time, "libtpu_problem", lambda: None)
    monkeypatch.setattr(aot_compile.importlib.metadata, "version", lambda name: "1.2.3")
    monkeypatch.setattr(aot_program, "_PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(
        aot_program.subprocess, "Popen", lambda command, **k: real([sys.executable, str(path), *command[3:]], **k)
    )
    return path


def answers(row, before=""):
    """A child that says `row`."""
    said = f"print(json.dumps({{'row': json.loads({json.dumps(row)!r})}}))"
    return f"import json, time\n{before}\nprint('not ours')\n{said}"


def test_report(child, capsys):
    row = {
        "cost": COST, "error": None, "fits": True, "bad_input": False, "seconds": {"compiling": 61.0},
        "host_peak_bytes": 3 << 30,
    }  # fmt: skip
    child.write_text(answers(row, 'print(\'{"stage": "compiling"}\', flush=True)\ntime.sleep(0.5)'))
    assert start(*STEP) == 0
    out, err = capsys.readouterr()
    lines = {line.strip().split("  ")[0]: line.split() for line in out.splitlines()}
    assert lines["needed"][-1] == "7.000" and lines["weights, together"][-1] == "4.000"
    assert lines["of it padding"][-1] == "0.000"
    assert lines["all-gather"][1:] == ["80", "2", "2.00", "1.00", "0.50"]
    assert lines["f32[8,128]"][1:3] == ["0.00", "3"]
    assert lines["that must move"][-2:] == ["3.00", "6.00"]
    assert "compiling 61 s; this took 3.0 GiB of host memory" in out and "fits, 24.0 GiB to spare" in out
    assert "jit(f)/search/while" in out and "moves what should stay: all-gather of u8[7] in layer_3" in out
    assert "decode for v6e:2x2: compiling, " in err


def test_json_and_what_does_not_fit(child, capsys):
    row = {
        "cost": None, "error": "RESOURCE_EXHAUSTED: 40G of 31G", "fits": False, "bad_input": False, "seconds": {},
        "host_peak_bytes": 1,
    }  # fmt: skip
    child.write_text(answers(row))
    with pytest.raises(SystemExit) as exit:
        start(*STEP, "--json")
    assert exit.value.code == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["fits"] is False and found["sizes"]["rows"] == 4 and found["topology"] == "v6e:2x2"
    assert "does not fit: RESOURCE_EXHAUSTED" in err


def test_a_dead_compiler(child, capsys):
    child.write_text(
        "import os, sys\nprint('F0101 x.cc:1] Check failed: rows < 8', file=sys.stderr, flush=True)\nos.abort()\n"
    )
    with pytest.raises(SystemExit) as exit:
        start(*STEP)
    assert exit.value.code == 1
    err = capsys.readouterr().err
    assert "SIGABRT" in err and "Check failed: rows < 8" in err


def test_what_only_building_shows_is_bad_input(child, capsys):
    row = {"cost": None, "error": "rows=4: no", "fits": None, "bad_input": True, "seconds": {}, "host_peak_bytes": 1}
    child.write_text(answers(row))
    assert start(*STEP) == 2
    assert "rows=4: no" in capsys.readouterr().err.splitlines()[-1]


def test_the_job_reaches_the_child(child, tmp_path):
    """Flags win over a preset's values."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"about": "x", "topology": "v6e:2x2", "program": "prefill", "tokens": 64, "rows": 4,
                                "context": 4096, "mesh": "data=4"}))  # fmt: skip
    child.write_text(f"import sys\nopen({str(tmp_path / 'job')!r}, 'w').write(sys.argv[1])\n")
    with pytest.raises(SystemExit):
        start(f"--preset={path}", "--rows=8", "--set=text_config.index_topk=256", "--kernels=xla")
    job = json.loads((tmp_path / "job").read_text())
    assert job["sizes"] == {"program": "prefill", "tokens": 64, "rows": 8, "context": 4096, "mesh": "data=4"}
    assert job["overrides"] == {"text_config.index_topk": "256"} and job["kernels"] == "xla"
    assert job["config"] == "configs/flash.json" and set(job["sizes"]) <= {
        f.name for f in dataclasses.fields(StepSizes)
    }


@pytest.mark.slow
@pytest.mark.skipif(ahead_of_time.libtpu_problem() is not None, reason="libtpu is not installed")
def test_real_compiler(capsys):
    """The tiny model, in plain XLA since its widths fill no kernel, on four devices."""
    assert start("--program=decode", "--config=configs/tiny.json", "--topology=v6e:2x2", "--mesh=data=2,tensor=2",
                 "--rows=4", "--context=128", "--kernels=xla", "--json") == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    cost = found["cost"]
    arguments = sum(cost["parameters"].values()) + sum(cost["cache"].values()) + cost["batch"]
    assert cost["footprint"]["arguments"] >= arguments
    assert {kind["kind"] for kind in cost["collectives"]} & {"all-gather", "all-reduce", "reduce-scatter"}
    assert found["seconds"]["compiling"] > 0 and found["host_peak_bytes"] > 100 << 20
