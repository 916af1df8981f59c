"""Interrupted imports go on, damage is named and mended, and memory holds one piece at a time."""

import hashlib
import json
import os
import pathlib
import threading

import pytest

import dsv41
from dsv41.checkpoint import (
    CheckpointError,
    ImportedCheckpoint,
    TensorSpec,
    check_import,
    load_imported,
    open_checkpoint,
    open_imported,
    tensor_inventory,
)
from dsv41.checkpoint import import_checkpoint as import_module
from dsv41.checkpoint.import_checkpoint import import_checkpoint
from dsv41.checkpoint.import_plan import plan_pieces
from dsv41.checkpoint.piece_files import abstract_arrays, check_piece, write_piece
from dsv41.config import DSV41Error, load_config
from tests.checkpoint_files import TINY, write_sparse
from tests.imported_files import PIECES, abstract_of, content

FILE = "model.safetensors"


# --- interrupted


def test_goes_on_behind_the_last_piece(imported, tmp_path, monkeypatch):
    """Interrupted between writing a piece and recording it."""
    calls, at = [], 5

    def interrupted(out, record):
        calls.append(record.name)
        if len(calls) == at:
            raise KeyboardInterrupt
        write(out, record)

    write = import_module.write_piece_record
    monkeypatch.setattr(import_module, "write_piece_record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(TINY, tmp_path / "out")
    (tmp_path / "out" / "pieces" / "layers.3-0.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(DSV41Error, match=r"out: the import is not complete; run launch\.import_checkpoint again"):
        dsv41.load(tmp_path / "out")
    progress = []
    report = import_checkpoint(TINY, tmp_path / "out", progress=lambda *call: progress.append(call))
    assert (report.pieces, report.kept, report.mended) == (PIECES, at - 1, ())
    assert calls[at:] == [name for _, _, name in progress][at - 1 :]
    assert progress[-1][0] == progress[-1][1] == report.bytes == sum(s.nbytes for s in inventory_of_tiny())
    assert not list((tmp_path / "out" / "pieces").glob("*tmp*"))
    assert content(tmp_path / "out") == content(imported)


def inventory_of_tiny():
    return tensor_inventory(load_config(TINY)).values()


def test_rows_are_pieces_too(tmp_path):
    """A table is cut into runs of rows, each of which can be written, checked and written again by itself."""
    name, reader = "layers.1.engram.embed.weight", open_checkpoint(TINY)
    pieces = plan_pieces([tensor_inventory(load_config(TINY))[name]], 10_000)
    assert [(piece.begin, piece.end) for piece in pieces] == [(0, 312), (312, 624), (624, 834)]
    (tmp_path / "engram").mkdir()
    records = {piece.name: write_piece(tmp_path, piece, reader) for piece in reversed(pieces)}
    file = tmp_path / "engram" / name
    assert file.read_bytes() == reader.read(name).tobytes()
    damage(file, "flip")
    check_piece(tmp_path, records[f"{name}-0"])
    with pytest.raises(CheckpointError, match=rf"{name}: tensor '{name}' is damaged: rows 312 to 623 do not"):
        check_piece(tmp_path, records[f"{name}-1"])
    write_piece(tmp_path, pieces[1], reader)
    assert file.read_bytes() == reader.read(name).tobytes()


def test_a_complete_import_stays(copy_of_import):
    before = {path: path.stat().st_mtime_ns for path in (copy_of_import / "pieces").rglob("*")}
    assert import_checkpoint(TINY, copy_of_import).kept == PIECES
    assert import_checkpoint(TINY, copy_of_import, verify=False).kept == PIECES
    assert {path: path.stat().st_mtime_ns for path in (copy_of_import / "pieces").rglob("*")} == before


# --- damage


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()


def largest(directory):
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_piece_is_named(copy_of_import, how):
    damage(largest(copy_of_import / "pieces" / "layers.3-0"), how)
    with pytest.raises(CheckpointError, match=r"layers\.3-0: tensor 'layers\.3\.[a-z0-9_.]*'"):
        dsv41.load(copy_of_import)


@pytest.mark.parametrize(
    "how, message",
    [
        ("cut", r"layers\.4\.engram\.embed\.scale: tensor .* takes 1020 bytes, the file has 510"),
        ("remove", r"layers\.4\.engram\.embed\.scale: tensor .* cannot be read \(No such file"),
    ],
)
def test_a_damaged_table_is_named(copy_of_import, how, message):
    damage(copy_of_import / "engram" / "layers.4.engram.embed.scale", how)
    with pytest.raises(CheckpointError, match=message):
        open_imported(copy_of_import).read("layers.4.engram.embed.scale")


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_record_is_named(copy_of_import, how):
    damage(copy_of_import / "pieces" / "layers.3-0.json", how)
    with pytest.raises(CheckpointError, match=r"layers\.3-0\.json"):
        open_imported(copy_of_import)


def test_all_damage_is_mended(copy_of_import, imported):
    damage(largest(copy_of_import / "pieces" / "layers.3-0"), "flip")
    damage(largest(copy_of_import / "pieces" / "layers.5-0"), "cut")
    damage(copy_of_import / "engram" / "layers.1.engram.embed.weight", "flip")
    damage(copy_of_import / "engram" / "layers.4.engram.embed.scale", "remove")
    mended = ("layers.3-0", "layers.5-0", "layers.1.engram.embed.weight-0", "layers.4.engram.embed.scale-0")
    with pytest.raises(CheckpointError) as e:
        check_import(copy_of_import)
    assert [message.split(":")[0].split("/")[-1] for message in str(e.value).split("; ")] == [
        name.removesuffix("-0") if "engram" in name else name for name in mended
    ]
    damage(copy_of_import / "pieces" / "layers.7-0.json", "cut")
    report = import_checkpoint(TINY, copy_of_import)
    assert (report.kept, report.mended) == (PIECES - 5, mended)
    assert content(copy_of_import) == content(imported)


@pytest.mark.parametrize(
    "entry",
    [["XX", [2], "0" * 64], ["BF16", [-2], "0" * 64], ["BF16", 2, "0" * 64], ["BF16", [2], "0"], ["BF16", [2]], 5],
)
def test_malformed_record(copy_of_import, entry):
    path = copy_of_import / "pieces" / "model-0.json"
    record = json.loads(path.read_text())
    record["tensors"]["norm.weight"] = entry
    path.write_text(json.dumps(record))
    manifest = json.loads((copy_of_import / "manifest.json").read_text())
    manifest["pieces"]["model-0"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (copy_of_import / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"model-0\.json: tensor 'norm\.weight': expected \[dtype, shape, sha256\]"
    ):
        open_imported(copy_of_import)


# --- memory


class PeakMemory:
    """Most anonymous memory that the process gained inside; mapped files do not count, the system takes them back."""

    def __enter__(self):
        self._before = self.peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    @staticmethod
    def _now():
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) << 10

    def _watch(self):
        while not self._done.wait(0.001):
            self.peak = max(self.peak, self._now())

    def __exit__(self, *exception):
        self._done.set()
        self._thread.join()
        self.peak -= self._before


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_peak_memory(tmp_path, imported):
    """L5: an import holds less than a layer, a load no more than the model and a layer."""
    shapes = {f"layers.0.ffn.experts.{j}.w{i}.weight": (1024, 4096) for j in range(16) for i in (1, 2, 3)}
    specs = [TensorSpec(name, shape, "I8", "backbone", "experts", 0) for name, shape in shapes.items()]
    layer = sum(spec.nbytes for spec in specs)
    assert layer == 192 << 20
    write_sparse(tmp_path / FILE, {name: ("I8", shape) for name, shape in shapes.items()})
    reader = open_checkpoint(tmp_path)
    load_imported(open_imported(imported), abstract_of(imported))  # threads and pools are there now
    written, loaded = [], []
    # What else the process does may only add to a peak.
    for number in range(3):
        folder = tmp_path / str(number)
        (folder / "pieces").mkdir(parents=True)
        with PeakMemory() as memory:
            records = [write_piece(folder, piece, reader) for piece in plan_pieces(specs, 1 << 20)]
        assert len(records) == 3
        written.append(memory.peak)
        structs = {name: struct for record in records for name, struct in abstract_arrays(record).items()}
        with PeakMemory() as memory:
            arrays = load_imported(ImportedCheckpoint(folder, tuple(records)), structs)
        assert sum(array.nbytes for array in arrays.values()) == layer
        loaded.append(memory.peak)
        del arrays
        if written[-1] < layer and loaded[-1] < 2 * layer:
            break
    assert min(written) < layer and min(loaded) < 2 * layer
