"""launch.import_checkpoint: killed and resumed, checked, refused; and the synthetic checkpoint it is tried on."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

import dsv41
from dsv41.checkpoint import (
    PARTS,
    check_import,
    check_inventory,
    is_engram_table,
    load_imported,
    open_checkpoint,
    open_imported,
    tensor_inventory,
)
from dsv41.checkpoint.synthetic import shrunk_config, write_synthetic_checkpoint
from dsv41.config import DSV41Error, load_config
from launch import import_checkpoint, inspect, synthetic_checkpoint
from launch.cli import run
from tests.checkpoint_files import TINY
from tests.imported_files import PIECES, abstract_of, equal_bytes

ROOT = pathlib.Path(__file__).parents[2]
FLASH = ROOT / "configs" / "flash.json"


def start(script, *arguments):
    return run(script.main, script.FLAGS, [script.__file__, *arguments])


def source_bytes(directory):
    reader = open_checkpoint(directory)
    return {name: reader.read(name).tobytes() for name in reader}


def imported_bytes(directory):
    """Tensor name -> bytes, stacks taken apart."""
    found = open_imported(directory)
    arrays = load_imported(found, abstract_of(directory))
    parts = {}
    for record in found.records:
        for p in record.parameters:
            whole = arrays[p.name] if not p.stacked else None
            parts |= {p.name: whole} if whole is not None else dict(zip(p.tensors, arrays[p.name], strict=True))
    return {name: part.__array__().tobytes() for name, part in parts.items()}


def test_killed_and_resumed(tmp_path, capsys):
    """kill -9 while pieces are being written, then the same command again."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "launch.import_checkpoint", f"--checkpoint={TINY}", f"--out={out}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while len(list(out.glob("pieces/*.json"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    process.stderr.close()
    done = len([path for path in out.glob("pieces/*.json") if not path.name.startswith(".")])
    assert 3 <= done < PIECES and not (out / "manifest.json").exists()
    assert start(import_checkpoint, f"--checkpoint={TINY}", f"--out={out}", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("seconds") > 0
    assert report == {
        "out": str(out), "tensors": 1535, "bytes": 6_115_774, "pieces": PIECES, "kept": done, "mended": []
    }  # fmt: skip
    assert imported_bytes(out) == source_bytes(TINY)


def test_what_it_says(tmp_path, capsys):
    out = tmp_path / "out"
    assert start(import_checkpoint, f"--checkpoint={TINY}", f"--out={out}", "--verbose") == 0
    said = capsys.readouterr()
    assert said.out == f"{out}: complete: 1,535 tensors, 6,115,774 bytes in 21 pieces, 0 of them from an earlier run\n"
    lines = said.err.splitlines()
    assert len(lines) == PIECES and lines[-1].startswith("5.8 of 5.8 MiB, ") and "0:00:00 left" in lines[-1]
    assert start(import_checkpoint, f"--out={out}", "--check") == 0
    assert capsys.readouterr().out == f"{out}: 1,535 tensors, 6,115,774 bytes in 21 pieces: all have their checksums\n"
    assert start(inspect, f"--checkpoint={out}", "--json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["tensors"] == 1535
    path = out / "engram" / "layers.1.engram.embed.scale"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert start(import_checkpoint, f"--out={out}", "--check") == 2
    assert "tensor 'layers.1.engram.embed.scale' is damaged: rows 0 to 833" in capsys.readouterr().err.splitlines()[-1]


def test_time_left(capsys):
    times = iter((0, 1, 12, 13, 100, 140, 7200))
    lines = import_checkpoint.ProgressLines(every_s=10.0, clock=lambda: next(times))
    for gib in (1, 12, 13, 100, 110, 475):
        lines(gib << 30, 475 << 30, "layers.3-1")
    assert capsys.readouterr().err.splitlines() == [
        "12.0 of 475.0 GiB, 1,024 MiB/s, 0:07:43 left, layers.3-1",
        "100.0 of 475.0 GiB, 1,024 MiB/s, 0:06:15 left, layers.3-1",
        "110.0 of 475.0 GiB, 782 MiB/s, 0:07:58 left, layers.3-1",
        "475.0 of 475.0 GiB, 53 MiB/s, 0:00:00 left, layers.3-1",
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--out=DIR is required"),
        (["--out=x"], "give either --checkpoint=DIR, to import, or --check"),
        (["--out=x", "--check", "--checkpoint=y"], "give either --checkpoint=DIR, to import, or --check"),
        (["--out={tmp}/x", "--checkpoint={tmp}/absent"], "absent: no such config file"),
        (["--out={tmp}/x", "--check"], "the import is not complete"),
        (["--out={tmp}/x/", f"--checkpoint={TINY}", "--set=a=1"], "set"),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    assert start(import_checkpoint, *(a.replace("{tmp}", str(tmp_path)) for a in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


# --- the synthetic checkpoint


def test_names_of_the_release():
    """What is shrunk changes no name, no dtype and no number of axes."""
    config = load_config(FLASH)
    full, small = tensor_inventory(config), tensor_inventory(shrunk_config(config, 160))
    assert len(full) == 96_085 and list(small) == list(full)
    assert all((small[n].dtype, len(small[n].shape)) == (full[n].dtype, len(full[n].shape)) for n in full)
    assert sum(spec.nbytes for spec in small.values()) < 40 << 20
    assert small["layers.3.ffn.gate.weight"].shape == (384, 32)


@pytest.mark.parametrize("factor", [1, 3, 40, 100_000])
def test_any_factor_gives_a_valid_config(factor):
    config = shrunk_config(load_config(FLASH), factor)
    assert config.text_config.hidden_size == max(32, -(-5120 // (32 * factor)) * 32)
    assert config.text_config.num_attention_heads % config.text_config.o_groups == 0


def test_synthetic_tiny(tmp_path, capsys):
    out = tmp_path / "out"
    config = ROOT / "configs" / "tiny.json"
    assert start(synthetic_checkpoint, f"--config={config}", f"--out={out}", "--factor=2", "--shards=3") == 0
    assert capsys.readouterr().out.startswith(f"{out}: 1,535 tensors, ")
    check_inventory(open_checkpoint(out), tensor_inventory(load_config(out)), PARTS)
    assert {open_checkpoint(out).info(f"layers.{n}.engram.embed.weight").file.name for n in (1, 4)} == {
        "model-00003-of-00003.safetensors"
    }
    dsv41.load(out)
    assert start(synthetic_checkpoint, f"--config={config}", f"--out={out}") == 2
    assert "is not empty" in capsys.readouterr().err
    for arguments in ({"factor": 0}, {"factor": 2, "shards": 1}):
        with pytest.raises(DSV41Error, match=next(reversed(arguments))):
            write_synthetic_checkpoint(tmp_path / "other", load_config(config), **arguments)


@pytest.mark.slow
def test_all_names_of_the_release(tmp_path, capsys):
    """All 96,085 tensors: written, imported, checked, and loaded from either directory."""
    source, out = tmp_path / "in", tmp_path / "out"
    assert start(synthetic_checkpoint, f"--config={FLASH}", f"--out={source}") == 0
    assert start(import_checkpoint, f"--checkpoint={source}", f"--out={out}", "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tensors"] == 96_085
    found = check_import(out)
    assert set(found) == set(tensor_inventory(load_config(FLASH)))
    assert imported_bytes(out) == source_bytes(source)
    ours, theirs = dsv41.load(out), dsv41.load(source)
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        assert equal_bytes(a, b)
    assert sum(is_engram_table(name) for name in found) == 4
