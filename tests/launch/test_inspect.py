"""launch.inspect: the released numbers, the checkpoint check, and bad input."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from dsv41.checkpoint.inventory import is_engram_table, tensor_inventory
from dsv41.config import load_config
from launch import inspect
from launch.cli import run
from tests.checkpoint_files import TINY, stored_tensors, write_safetensors
from tests.golden import DATA

ROOT = pathlib.Path(__file__).parents[2]
FLASH = f"--config={ROOT / 'configs' / 'flash.json'}"


def start(*arguments):
    return run(inspect.main, inspect.FLAGS, ["launch/inspect.py", *arguments])


def report(capsys, *arguments):
    """The JSON object that a run prints, which must be all it prints."""
    assert start("--json", *arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_released_numbers(capsys):
    found = report(capsys, FLASH)
    assert found["tensors"] == 96_085
    assert found["bytes"] == 510_286_023_000
    assert found["parameters"] == {
        "total": 763_205_315_794,
        "backbone": 551_566_180_464,
        "engram_tables": 196_613_849_600,
        "engram_projections": 314_654_720,
        "drafter": 14_225_362_530,
        "vision": 485_268_480,
        "active_prefill": 7_892_875_448,
        "active_decode": 16_130_588_784,
    }
    assert sum(found["bytes_by_dtype"].values()) == found["bytes"]
    assert sum(s["bytes"] for s in found["bytes_by_subsystem"].values()) == found["bytes"]
    assert found["bytes_by_subsystem"]["engram"] == {"tensors": 12, "bytes": 203_073_076_240}
    assert found["cache"] == {  # case C11 for the full context
        "kv_bytes_per_token": 890,
        "kv_bytes_per_token_stored": 890,
        "max_position_embeddings": 1_048_576,
        "kv_bytes_per_sequence": 933_232_640,
        "window_bytes_per_sequence": 2_703_360,
    }
    assert found["checkpoint"] is None


def test_layer_table(capsys):
    layers = report(capsys, FLASH)["layers"]
    assert [row["layer"] for row in layers] == list(range(40))
    assert layers[14] == {
        "layer": 14,
        "m": 2,
        "mode": "full",
        "kv_source": 14,
        "selection_source": 14,
        "candidate_pool": None,
        "engram": 1,
        "half": "encoder",
    }
    assert layers[20]["candidate_pool"] == "builds" and layers[20]["half"] == "decoder"
    assert layers[28]["candidate_pool"] == "reads" and layers[28]["mode"] == "reindex"
    assert layers[0]["kv_source"] is None and layers[0]["m"] == 0


def test_overrides(capsys):
    found = report(capsys, FLASH, "--set=text_config.max_position_embeddings=3", "--set=quantization_config=null")
    assert found["cache"]["kv_bytes_per_sequence"] == 2_136
    assert set(found["bytes_by_dtype"]) == {"BF16", "F32"}


def test_checkpoint(capsys):
    found = report(capsys, f"--checkpoint={TINY}")
    assert found["checkpoint"] == {"directory": str(TINY), "files": 1, "tensors": 1535}
    assert found["bytes"] == 6_115_774


@pytest.mark.parametrize("arguments", [[FLASH], [f"--checkpoint={TINY}"]])
def test_tables(capsys, arguments):
    """Every number that the JSON has is in the tables too, unfolded."""
    found = report(capsys, *arguments)
    assert start(*arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    numbers = [*found["parameters"].values(), found["tensors"], found["bytes"], *found["bytes_by_dtype"].values()]
    numbers += [n for total in found["bytes_by_subsystem"].values() for n in total.values()]
    numbers += found["cache"].values()
    assert [n for n in numbers if f"{n:,}" not in out] == []
    assert [name for name in found["bytes_by_subsystem"] if name not in out] == []
    assert sum(out.count(mode) for mode in ("sliding", "full", "reuse", "reindex")) == len(found["layers"])
    padded = found["cache"]["kv_bytes_per_token_stored"] != found["cache"]["kv_bytes_per_token"]
    assert ("with row padding" in out) == padded
    assert ("all 1,535 tensors" in out) == (found["checkpoint"] is not None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give either --checkpoint=DIR or --config=FILE"),
        ([FLASH, f"--checkpoint={TINY}"], "give either --checkpoint=DIR or --config=FILE"),
        (["--config=absent.json"], "absent.json: no such config file"),
        (["--checkpoint="], "config.json: no such config file"),
        ([f"--config={TINY / 'model.safetensors'}"], "not a readable JSON file"),
        ([f"--checkpoint={DATA / 'tiny_bf16'}"], "holds neither model.safetensors.index.json nor model.safetensors"),
        ([FLASH, "--set=text_config.hc_mult"], "--set: expected key=value, got 'text_config.hc_mult'"),
        ([FLASH, "--set=hc_mult=4"], "unknown field hc_mult"),
        ([FLASH, "--set=text_config.hc_mult=0"], "text_config.hc_mult: expected a positive number, got 0"),
        ([f"--checkpoint={TINY}", "--set=text_config.vocab_size=576"], "tensors of the wrong shape: embed.weight"),
    ],
)
def test_bad_input(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert start(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("inspect: ") and message in err


def test_checkpoint_that_lacks_a_tensor(capsys, tmp_path):
    shutil.copy(TINY / "config.json", tmp_path)
    tensors = stored_tensors()
    del tensors["layers.3.ffn.experts.7.w2.scale"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert start(f"--checkpoint={tmp_path}", "--json") == 2
    out, err = capsys.readouterr()
    assert out == "" and "1 missing tensors: layers.3.ffn.experts.7.w2.scale" in err


def test_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "launch.inspect", FLASH, "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["parameters"]["total"] == 763_205_315_794


def test_mesh_of_one_device_holds_all_parameters(capsys):
    found = report(capsys, FLASH, "--mesh=data=1")
    inventory = tensor_inventory(load_config(ROOT / "configs" / "flash.json"))
    tables = sum(spec.nbytes for name, spec in inventory.items() if is_engram_table(name))
    assert found["mesh"]["devices"] == found["mesh"]["rows"] == 1
    # Engram tables are no parameters: they stay with the host.
    assert sum(found["mesh"]["parameters"].values()) == found["bytes"] - tables


def test_mesh(capsys):
    one = report(capsys, FLASH, "--mesh=data=1", "--rows=64", "--context=131072")["mesh"]
    many = report(capsys, FLASH, "--mesh=data=8,tensor=8", "--rows=64", "--context=131072")["mesh"]
    assert many["devices"] == 64 and many["context"] == 131_072
    for part, shares in {
        "parameters": {"routed experts": 64, "embedding": 8, "head": 8, "shared experts": 1, "norms": 1},
        "cache": {"main KV": 8, "index keys": 8, "window KV": 8, "RoPE tables": 1},
    }.items():
        for kind, share in shares.items():
            assert many[part][kind] * share == one[part][kind], kind
    assert many["total"] == sum(many["parameters"].values()) + sum(many["cache"].values())


def test_pages_of_a_sequence_over_several_devices(capsys):
    found = report(capsys, FLASH, "--mesh=data=4,sequence=8", "--rows=32")["mesh"]
    assert found["rules"]["pages"] == ["sequence"]
    assert found["cache"]["main KV"] == 1_048_576 * 720  # a sequence a device: 288 bytes an entry, 2.5 entries a token


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--mesh=8"], "mesh '8': expected each of data, sequence, tensor at most once, as in data=4,tensor=2"),
        (["--mesh=tensor=16"], "mesh axis tensor=16: does not divide the 8 groups of heads"),
        (["--mesh=data=8", "--rows=12"], "rows=12 are not divisible by the 8 parts that mesh data=8 has for them"),
        (["--mesh=data=8", "--context=2000000"], "context=2000000: expected 1 to 1048576 tokens"),
    ],
)
def test_impossible_meshes(capsys, flags, message):
    assert start(FLASH, *flags) == 2
    assert message in capsys.readouterr().err
