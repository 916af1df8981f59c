"""launch.bench_engram on the tiny config: every mode runs, and what a trace says is told apart."""

import gzip
import json

import pytest

from dsv41.config import load_config
from dsv41.engine.device_gaps import Launch, find_gaps, read_launches
from launch import bench_engram
from launch.cli import run
from tests.test_architecture import ROOT

TINY = ROOT / "configs" / "tiny.json"
SMALL = (
    "--set=text_config.num_hidden_layers=3",
    "--set=text_config.compress_ratios=[0, 0, 0]",
    "--set=text_config.kv_source_layer_ids=[]",
    "--set=text_config.index_source_layer_ids=[]",
    "--set=text_config.candidate_source_layer_id=null",
    "--set=text_config.engram_layer_ids=[1, 2]",
    "--set=text_config.num_nextn_predict_layers=0",
    "--set=text_config.dspark_target_layer_ids=[]",
)


def bench(capsys, *arguments):
    status = run(bench_engram.main, bench_engram.FLAGS, ["bench_engram", f"--config={TINY}", *SMALL, *arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.slow
def test_every_mode_runs(capsys, tmp_path):
    arguments = ("--table_rows=2400", "--rows=2", "--new_tokens=4", "--prompt=24", "--chunk=8")
    status, out, _ = bench(capsys, *arguments, "--parallel", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["table_rows"] == [2514, 2712] and not found["mapped"]
    for kind, forwarded in (("decode", 2 * 4), ("prefill", 24)):
        assert list(found[kind]) == ["none", "blocking", "overlap", "device"]
        for name, entry in found[kind].items():
            assert entry["tokens_per_s"] > 0 and (entry["loss"] is None) == (name == "none")
            if name in ("blocking", "overlap"):
                assert entry["engram"]["rows"] == forwarded * 2 * 6
    assert found["prefill"]["overlap"]["engram"]["prefetched"] == 3
    status, out, _ = bench(capsys, *arguments, f"--table_dir={tmp_path}", "--modes=overlap")
    assert status == 0 and "overlap" in out and "blocking" not in out
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--modes=overlap,none,fast", "--modes: unknown fast"),
        ("--table_dir=/no/such/place", "--table_dir: /no/such/place is no directory"),
        ("--set=text_config.engram_layer_ids=[]", "engram"),
    ],
)
def test_bad_input(capsys, monkeypatch, argument, message):
    """Found before weights are drawn."""
    monkeypatch.setattr(bench_engram, "random_model", lambda *_, **__: pytest.fail("drawn"))
    status, _, err = bench(capsys, "--table_rows=2400", argument)
    assert status == 2 and message in err and err.count("\n") == 1


def test_released_widths_have_two_engrams_with_slack():
    text, released = (load_config(ROOT / "configs" / f"{name}.json").text_config for name in ("flash_engram", "flash"))
    assert text.engram_layer_ids == (1, 5)
    for name in ("hidden_size", "head_dim", "engram_head_dim", "engram_n_heads", "moe_intermediate_size", "hc_mult"):
        assert getattr(text, name) == getattr(released, name)


def test_gaps_in_front_of_programs():
    launches = [
        Launch(10, 20, "jit_step_segment_0"),
        Launch(22, 25, "jit_step_segment_0"),  # a gap inside a program
        Launch(24, 30, ""),  # overlaps; in a graph
        Launch(37, 40, "jit_step_segment_1"),
        Launch(40, 41, "jit__draw"),
        Launch(46, 50, "jit_step_segment_1"),
    ]
    gaps = find_gaps(reversed(launches))
    assert gaps.span_us == 40 and gaps.busy_us == 26
    assert gaps.idle_us == {"": 2, "jit_step_segment_1": 12}
    assert find_gaps([]) is None


def test_a_trace_is_read(tmp_path):
    def name(kind, pid, tid, text):
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}

    kernel = {"ph": "X", "pid": 1, "ts": 5.0, "dur": 2.0, "args": {"hlo_module": "jit_forward"}}
    events = [
        name("process_name", 1, 0, "/device:GPU:0"),
        name("process_name", 2, 0, "/host:CPU"),
        name("thread_name", 1, 7, "Stream #7(Compute)"),
        name("thread_name", 1, 8, "XLA Ops"),
        kernel | {"name": "gemm", "tid": 7},
        kernel | {"name": "MemcpyH2D", "tid": 7},
        kernel | {"name": "gemm", "tid": 8},
        kernel | {"name": "gemm", "pid": 2, "tid": 7},
    ]
    directory = tmp_path / "plugins" / "profile"
    directory.mkdir(parents=True)
    with gzip.open(directory / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert read_launches(str(tmp_path)) == [Launch(5.0, 7.0, "jit_forward")]
