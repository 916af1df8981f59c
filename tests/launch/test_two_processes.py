"""Scripts as jobs of two processes with a mesh over the devices of both: the numbers are those of one process."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from launch import generate, score
from launch.cli import run
from tests.checkpoint_files import TINY, few_layers, script_model
from tests.golden import expected
from tests.sharding.jobs import Job

_PATIENCE_S = 1200  # two processes that compile, on a machine that does other things too


def start(tmp_path, script, *arguments, devices=2, own=((), ())):
    """Two processes with `devices` each; `own` are arguments of one of them."""

    def command(port, index):
        job = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}"]
        return ["-m", f"launch.{script}", *arguments, f"--cpu_devices={devices}", *job, *own[index]]

    return Job(tmp_path, command)


def done(job):
    """The JSON object of process 0, all that the job prints to stdout."""
    assert job.end(_PATIENCE_S) == [0, 0], job.err(0) + job.err(1)
    assert job.out(1) == ""
    return json.loads(job.out(0))


def tokens_file(tmp_path, rows, length, vocab=500):
    tokens = np.random.default_rng(0).integers(3, vocab, (rows, length), np.int32)
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    return f"--tokens={tmp_path / 'tokens.safetensors'}"


def compare_scores(tmp_path, capsys, model, tokens, mesh, devices):
    job = start(
        tmp_path, "score", *model, tokens, f"--out={tmp_path / 'two'}", "--json", f"--mesh={mesh}", devices=devices
    )
    assert run(score.main, score.FLAGS, ["score", *model, tokens, f"--out={tmp_path / 'one'}", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out), done(job)
    for name in ("perplexity", "mean_logprob", "predictions", "array", "shape"):
        assert two[name] == one[name]
    # No sum crosses devices but between two, where order does not matter; products have an order of their own on CPU.
    found = load_file(tmp_path / "two")["logits"]
    np.testing.assert_array_equal(found, load_file(tmp_path / "one")["logits"])
    assert np.ptp(found, axis=-1).min() > 0


def test_score(tmp_path, capsys):
    """Rows of one process, halves of the heads of its two devices. One process runs the program of test_score."""
    compare_scores(tmp_path, capsys, script_model(), tokens_file(tmp_path, 2, 24), "data=2,tensor=2", 2)


@pytest.mark.slow
def test_score_with_all_roles_of_layers(tmp_path, capsys):
    compare_scores(tmp_path, capsys, (f"--checkpoint={TINY}",), tokens_file(tmp_path, 3, 21), "data=4,tensor=2", 4)


@pytest.mark.slow
def test_score_with_an_image(tmp_path, capsys):
    """Fewer rows than devices that rows are spread over; the vision tower is whole on each."""
    golden = expected("tiny_vl")
    Image.fromarray(golden["image.rgb"]).save(tmp_path / "photo.png")
    save_file({"tokens": golden["input_ids"][:1, :45].astype(np.int32)}, tmp_path / "row.safetensors")
    model = (f"--checkpoint={few_layers(tmp_path / 'model', 2)}", f"--image={tmp_path / 'photo.png'}")
    compare_scores(tmp_path, capsys, model, f"--tokens={tmp_path / 'row.safetensors'}", "data=2,tensor=2", 2)


@pytest.mark.slow
@pytest.mark.parametrize("sharding, mesh", [("decode", "data=2,tensor=2"), ("prefill", "sequence=2,tensor=2")])
def test_generate(tmp_path, capsys, sharding, mesh):
    model = (f"--checkpoint={few_layers(tmp_path / 'model', 3)}", "--prompt_ids=0,17,42,99,7", "--max_new_tokens=12")
    job = start(tmp_path, "generate", *model, "--stop_ids=", "--json", f"--mesh={mesh}", f"--sharding={sharding}")
    assert run(generate.main, generate.FLAGS, ["generate", *model, "--stop_ids=", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out), done(job)
    assert len(one["token_ids"]) == 12
    assert all(two[name] == one[name] for name in ("token_ids", "text", "prompt_tokens", "finish_reason", "cache"))


@pytest.mark.slow
def test_generate_speculatively(tmp_path, capsys):
    model = (f"--checkpoint={TINY}", "--prompt_ids=0,17,42", "--max_new_tokens=8", "--speculate=on", "--stop_ids=")
    job = start(tmp_path, "generate", *model, "--json", "--mesh=data=2,tensor=2")
    assert run(generate.main, generate.FLAGS, ["generate", *model, "--json"]) == 0
    assert done(job)["token_ids"] == json.loads(capsys.readouterr().out)["token_ids"]


@pytest.mark.slow
def test_a_file_that_one_host_lacks(tmp_path):
    """Bad input is one line and status 2 where it is found, and named by the others."""
    job = start(tmp_path, "generate", "--mesh=data=4", "--prompt_ids=0", own=((), ("--checkpoint=nowhere",)))
    assert job.end(_PATIENCE_S) == [1, 2]
    assert re.search(r"the job ends because of host \S+ \(process 1\): nowhere.*: no such", job.err(0))
    assert re.search(r"\[process 1 on \S+\] generate: nowhere.*: no such", job.err(1))
    assert job.out(0) == job.out(1) == "" and "Traceback" not in job.err(0) + job.err(1)


@pytest.mark.slow
def test_different_flags_end_the_start(tmp_path):
    job = start(tmp_path, "generate", "--mesh=data=4", own=(("--prompt_ids=0",), ("--prompt_ids=0,1",)))
    assert job.end(_PATIENCE_S) == [2, 2]
    for i in range(2):
        assert (
            job.err(i).rstrip("\n").endswith("runs with --prompt_ids=['0', '1'] where process 0 has --prompt_ids=['0']")
        )


@pytest.mark.slow
def test_a_mesh_of_other_devices(tmp_path):
    job = start(tmp_path, "generate", "--mesh=data=8", "--prompt_ids=0")
    assert sorted(job.end(_PATIENCE_S)) in ([1, 2], [2, 2])
    assert "mesh data=8,sequence=1,tensor=1: needs 8 devices, there are 4" in job.err(0) + job.err(1)


@pytest.mark.parametrize("script", [generate, score])
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mesh=rows=2"], "mesh 'rows=2': expected each of data, sequence, tensor at most once, as in data=4,"
         "tensor=2"),
        (["--sharding=decode"], "--sharding=decode needs --mesh"),
        (["--mesh=data=2", "--sharding=serve"], "flag --sharding=serve: value should be one of <decode|prefill|train>"),
        (["--mesh=data=2", "--num_processes=2"], "--coordinator and --process_id missing beside --num_processes=2: a "
         "job of several processes needs all"),
        (["--mesh=data=2", "--distributed=off", "--process_id=0"], "--distributed=off contradicts --process_id=0"),
        (["--mesh=data=2", "--start_timeout=0"], "start timeout 0.0: expected more than 0 seconds"),
        (["--coordinator=a:1", "--num_processes=2", "--process_id=0"], "2 processes (--coordinator=a:1, "
         "--num_processes=2, --process_id=0) need --mesh, or --distributed=off"),
    ],
)  # fmt: skip
def test_bad_flags(capsys, script, flags, message):
    assert run(script.main, script.FLAGS, ["x", *flags]) == 2
    assert capsys.readouterr() == ("", f"x: {message}\n")


def test_a_coordinator_that_does_not_answer(capsys, monkeypatch):
    # This process has devices already, which no script has when it starts.
    monkeypatch.setattr("dsv41.sharding.processes._check_fresh", lambda: None)
    flags = ["--mesh=data=2", "--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=1", "--start_timeout=0.3"]
    assert run(generate.main, generate.FLAGS, ["generate", *flags]) == 2
    assert re.fullmatch(
        r"generate: process 0 cannot be reached at 127.0.0.1:2 within 0.3 s \(.*\)\n", capsys.readouterr().err
    )
