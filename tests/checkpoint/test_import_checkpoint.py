"""Importing changes nothing: bytes, models, other meshes; and what is refused before the work begins."""

import fcntl
import hashlib
import pathlib
import resource
import shutil
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dsv41
from dsv41.checkpoint import (
    CheckpointError,
    is_engram_table,
    is_imported,
    load_imported,
    load_parameters,
    open_checkpoint,
    open_imported,
    tensor_inventory,
)
from dsv41.checkpoint.identity import checkpoint_identity
from dsv41.checkpoint.import_checkpoint import import_checkpoint
from dsv41.checkpoint.import_plan import RowPiece, plan_pieces
from dsv41.checkpoint.imported import _check_values
from dsv41.checkpoint.piece_files import abstract_arrays
from dsv41.config import DSV41Error, load_config
from tests.checkpoint_files import TINY, dequantised_checkpoint, stored_tensors, write_safetensors
from tests.imported_files import abstract_of, content, equal_bytes
from tests.models_for_tests import OVERRIDES, tiny_model

ROOT = pathlib.Path(__file__).parents[2]
FILE = "model.safetensors"


# --- what comes back


def test_every_tensor_comes_back(imported):
    """FP4, E4M3, E8M0, BF16 and F32 of backbone, Engram, drafter and vision."""
    source, found = open_checkpoint(TINY), open_imported(imported)
    assert set(found) == set(source)
    arrays = load_imported(found, abstract_of(imported))
    kinds = set()
    for record in found.records:
        for parameter in record.parameters:
            array = arrays[parameter.name]
            for name, part in zip(parameter.tensors, array if parameter.stacked else [array], strict=True):
                expected = source.read(name)
                assert found.info(name)[:2] == source.info(name)[:2]
                assert part.shape == expected.shape and equal_bytes(part, expected), name
                assert record.tensors[name].sha256 == hashlib.sha256(expected.tobytes()).hexdigest()
                kinds.add(found.info(name).dtype)
    assert kinds == {"I8", "F8_E4M3", "F8_E8M0", "BF16", "F32"}
    tables = [name for name in source if is_engram_table(name)]
    assert len(tables) == 4 and all(equal_bytes(found.read(name), source.read(name)) for name in tables)


def test_stacks_are_as_in_memory(imported):
    source, found = open_checkpoint(TINY), open_imported(imported)
    structs = {name: s for name, s in abstract_of(imported).items() if not is_engram_table(name)}
    calls = []
    ours = load_imported(found, structs, progress=lambda *call: calls.append(call))
    theirs = load_parameters(source, structs)
    assert list(ours) == list(theirs) and all(equal_bytes(ours[name], theirs[name]) for name in theirs)
    assert ours["layers.3.ffn.experts.w1.weight"].shape == (12, 64, 64)
    assert len(calls) == len(structs) and calls[-1][0] == calls[-1][1] == sum(a.nbytes for a in ours.values())


def test_load_reads_either(imported):
    ours, theirs = dsv41.load(imported, overrides=OVERRIDES), tiny_model()
    for part in ("params", "drafter", "vision"):
        a, b = getattr(ours, part), getattr(theirs, part)
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            # Placed alike, too: otherwise programs would be compiled again.
            assert equal_bytes(x, y) and (x.sharding, x.committed) == (y.sharding, y.committed)
    assert ours.config == theirs.config and np.array_equal(ours.token_map, theirs.token_map)
    assert ours.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    for x, y in zip(ours.engram.tables, theirs.engram.tables, strict=True):
        assert equal_bytes(x.values, y.values) and equal_bytes(x.scales, y.scales)


@pytest.mark.slow  # compiles the whole model
def test_same_logits(imported):
    def logits(model):
        batch = model.make_batch([[0, 17, 42, 5]])
        return np.asarray(model.forward(batch, model.init_cache(num_slots=1, max_tokens=64))[0])

    assert equal_bytes(logits(dsv41.load(imported, overrides=OVERRIDES)), logits(tiny_model()))


def test_parts_may_be_left_out(imported):
    model = dsv41.load(imported, drafter=False, vision=False)
    assert model.drafter is None and model.vision is None


def test_bf16_checkpoint_without_vision(tmp_path):
    source = dequantised_checkpoint(TINY, tmp_path / "in")
    inventory = tensor_inventory(load_config(source))
    tensors = {name: t for name, t in stored_tensors(source).items() if inventory[name].part != "vision"}
    write_safetensors(source / FILE, tensors)
    assert import_checkpoint(source, tmp_path / "out").tensors == len(tensors)
    reader, found = open_checkpoint(source), open_imported(tmp_path / "out")
    arrays = load_imported(found, abstract_of(tmp_path / "out"))
    assert set(found) == set(tensors)
    assert equal_bytes(arrays["layers.3.ffn.experts.w1.weight"][2], reader.read("layers.3.ffn.experts.2.w1.weight"))
    assert equal_bytes(found.read("layers.1.engram.embed.weight"), reader.read("layers.1.engram.embed.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensors: .*vision"):
        dsv41.load(tmp_path / "out")


def test_files_beside_the_weights(imported, copy_of_import):
    for name in ("config.json", "tokenizer.json"):
        assert (imported / name).read_bytes() == (TINY / name).read_bytes()
    assert not list(imported.glob("*.safetensors*")) and is_imported(imported) and not is_imported(TINY)
    identity = checkpoint_identity(imported)
    assert identity != checkpoint_identity(TINY)
    assert checkpoint_identity(copy_of_import) == identity
    (copy_of_import / "manifest.json").write_text("{}")
    assert checkpoint_identity(copy_of_import) != identity


# --- other meshes


@pytest.mark.parametrize(
    "shape, spec",
    [((8,), ("x",)), ((4,), ("x",)), ((8,), (None, "x")), ((2, 4), ("x", "y")), ((2,), ()), ((2, 2), (("x", "y"),))],
)
def test_another_mesh(imported, shape, spec):
    """Rows, columns, experts and Engram rows, wherever the mesh divides them."""
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("x", "y")[: len(shape)])
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    wanted = {}
    for name, struct in abstract_of(imported).items():
        if name.startswith(("layers.1.", "layers.4.engram", "embed", "norm", "vision.blocks.0", "mtp.2")):
            parts = [np.prod([mesh.shape[a] for a in np.ravel(axis) if a]) for axis in spec]
            if len(spec) > len(struct.shape) or any(n % k for n, k in zip(struct.shape, parts, strict=False)):
                continue
            wanted[name] = jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
    assert "embed.weight" in wanted
    loaded = load_imported(open_imported(imported), wanted)
    plain = load_imported(
        open_imported(imported), {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in wanted.items()}
    )
    for name, array in loaded.items():
        assert array.sharding == sharding and equal_bytes(array, plain[name]), name
    if shape == (2,):
        assert any(is_engram_table(name) for name in loaded)


def shard(array, index):
    return types.SimpleNamespace(index=index, data=array[index])


def test_a_process_that_holds_a_part(imported):
    """Experts that are there whole are compared with their checksums, cut ones are only looked through for NaN."""
    found = open_imported(imported)
    record = next(r for r in found.records if r.name == "layers.3-0")
    parameter = next(p for p in record.parameters if p.name == "layers.3.ffn.experts.w1.scale")
    struct = abstract_arrays(record)[parameter.name]
    array = np.array(load_imported(found, {parameter.name: struct})[parameter.name])

    def check(*indices):
        shards = [shard(array, index) for index in indices]
        held = types.SimpleNamespace(is_fully_addressable=False, shape=array.shape, addressable_shards=shards)
        _check_values(found, record, parameter, held)

    everything = slice(None)
    whole, cut = (slice(4, 8), everything, everything), (slice(0, 2), slice(0, 32), everything)
    check(whole, whole, cut)
    array[5, 0, 0] ^= 1
    check(cut)
    with pytest.raises(
        CheckpointError, match=r"layers\.3-0: tensor 'layers\.3\.ffn\.experts\.5\.w1\.scale' is damaged"
    ):
        check(whole, cut)
    array[0, 0, 0] = 255
    with pytest.raises(CheckpointError, match=r"tensor 'layers\.3\.ffn\.experts\.w1\.scale' holds NaN"):
        check(cut)


@pytest.mark.parametrize(
    "name, shape, dtype, message",
    [
        ("absent", (2,), np.float32, r"no tensor 'absent'"),
        ("norm.weight", (128,), np.float32, r"model-0: tensor 'norm\.weight': expected float32 \[128\], got bfloat16"),
        ("layers.3.ffn.experts.w1.scale", (13, 64, 4), np.uint8, r"layers\.3-0: tensor .* got uint8 \[12, 64, 4\]"),
    ],
)
def test_what_is_not_there(imported, name, shape, dtype, message):
    with pytest.raises(CheckpointError, match=message):
        load_imported(open_imported(imported), {name: jax.ShapeDtypeStruct(shape, dtype)})


# --- refusals


def test_source_is_checked_first(tmp_path):
    (tmp_path / "in").mkdir()
    shutil.copy(TINY / "config.json", tmp_path / "in")
    tensors = stored_tensors()
    write_safetensors(tmp_path / "in" / FILE, {n: t for n, t in tensors.items() if n != "layers.9.attn.attn_sink"})
    with pytest.raises(CheckpointError, match=r"missing tensors: layers\.9\.attn\.attn_sink"):
        import_checkpoint(tmp_path / "in", tmp_path / "out")
    write_safetensors(tmp_path / "in" / FILE, tensors)
    with pytest.raises(DSV41Error, match=r"tokenizer\.json: no such tokenizer file"):
        import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nan_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, tmp_path / "in")
    tensors = stored_tensors()
    scale = tensors["layers.0.ffn.experts.7.w2.scale"][1].copy()
    scale[-1, -1] = 255
    tensors["layers.0.ffn.experts.7.w2.scale"] = ("F8_E8M0", scale)
    write_safetensors(tmp_path / "in" / FILE, tensors)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'layers\.0\.ffn\.experts\.7\.w2\.scale'"):
        import_checkpoint(tmp_path / "in", tmp_path / "out")


def test_unusable_targets(copy_of_import, tmp_path):
    with pytest.raises(DSV41Error, match="is the checkpoint itself"):
        import_checkpoint(TINY, TINY)
    with pytest.raises(DSV41Error, match="is an import already"):
        import_checkpoint(copy_of_import, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(DSV41Error, match="file: is a file"):
        import_checkpoint(TINY, tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    with pytest.raises(DSV41Error, match=r"full: holds no import but other files \(thesis\.txt\)"):
        import_checkpoint(TINY, tmp_path / "full")
    with pytest.raises(DSV41Error, match=r"import\.json: this is the import of another checkpoint"):
        import_checkpoint(ROOT / "dsv41" / "data" / "tiny", copy_of_import)
    with open(copy_of_import / "import.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DSV41Error, match="another process imports to this directory"):
            import_checkpoint(TINY, copy_of_import)


def test_too_little_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 20))
    with pytest.raises(DSV41Error, match=r"out: the disk has 0\.0 GiB free, what is left to import takes"):
        import_checkpoint(TINY, tmp_path / "out")


def test_the_system_refuses_to_write(imported, tmp_path):
    """As a full disk does, in the middle of a piece; what was written is kept."""
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DSV41Error, match=r"pieces/model-0: cannot write the piece \(.*File too large"):
            import_checkpoint(TINY, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((out / "pieces").glob("model-0*"))
    import_checkpoint(TINY, out)
    assert content(out) == content(imported)


# --- cutting


def test_plan_of_the_release():
    """Every tensor is in one piece, and no piece takes more than a third of a layer."""
    inventory = tensor_inventory(load_config(ROOT / "configs" / "flash.json"))
    pieces = plan_pieces(inventory.values(), 1 << 30)
    whole = [name for piece in pieces if not isinstance(piece, RowPiece) for name in piece.tensors]
    assert len(whole) == len(set(whole)) == 96_085 - 4
    layer = sum(spec.nbytes for spec in inventory.values() if spec.name.startswith("layers.3."))
    sizes = [sum(inventory[n].nbytes for n in piece.tensors) for piece in pieces if not isinstance(piece, RowPiece)]
    assert max(sizes) == 384 * 2304 * 2560 < layer / 3
    for name in filter(is_engram_table, inventory):
        rows = [(piece.begin, piece.end) for piece in pieces if isinstance(piece, RowPiece) and piece.tensor == name]
        assert [begin for begin, _ in rows] == [0, *(end for _, end in rows[:-1])]
        assert rows[-1][1] == inventory[name].shape[0]
        width = inventory[name].shape[1]
        assert all((end - begin) * width <= 1 << 30 for begin, end in rows)
    assert len({piece.name for piece in pieces}) == len(pieces) < 700
