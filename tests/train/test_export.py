"""Weights in the released layout: what is written, read back, and refused."""

import dataclasses
import json
import resource
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv41
from dsv41.checkpoint import TensorSpec, open_checkpoint, tensor_inventory
from dsv41.checkpoint.write import shards_of
from dsv41.config import DSV41Error, load_config
from dsv41.ops.linear import WeightFormat
from dsv41.train import export
from dsv41.train.export import exported_config, write_checkpoint
from dsv41.train.master_weights import masters_from, stored_array, stored_from
from tests.checkpoint_files import DATA, TINY, dequantised_checkpoint, dequantised_weight, stored_tensors
from tests.models_for_tests import small_model
from tests.train import off_grid

TOKENIZER = TINY / "tokenizer.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Masters of the backbone, the drafter's, and no vision tower."""
    out = tmp_path_factory.mktemp("exported") / "model"
    files = {"README.md": b"# A model\n"}
    parts = {"params": off_grid.backbone(), "drafter": off_grid.drafter()}
    write_checkpoint(out, small_model().config, tokenizer=TOKENIZER, files=files, **parts)
    return out


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def small_parts():
    """What is stored of the small model, which costs nothing to write."""
    model = small_model()
    return {"params": model.params, "tables": model.engram.tables, "drafter": model.drafter, "tokenizer": TOKENIZER}


def write_small(folder, **changes):
    return write_checkpoint(folder, **{"config": small_model().config, **small_parts(), **changes})


def test_masters_are_read_back_as_they_are_stored(exported):
    loaded, config = dsv41.load(exported), small_model().config
    assert loaded.config == dataclasses.replace(config, vision_config=None)
    assert loaded.vision is None
    stored, tables = jax.jit(stored_from, static_argnums=1)(off_grid.backbone(), config)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(stored)[0], jax.tree.leaves(loaded.params)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
    for a, b in zip(tables, loaded.engram.tables, strict=True):
        assert np.asarray(a.values).tobytes() == b.values.tobytes()
        assert np.asarray(a.scales).tobytes() == b.scales.tobytes()
    stage, own = loaded.drafter["mtp"][0], off_grid.drafter()["mtp"][0]
    for found, master, form in (
        (stage["main_proj"], own["main_proj"], WeightFormat.FP8_BLOCK),
        (stage["ffn"]["experts"]["w2"], own["ffn"]["experts"]["w2"], WeightFormat.FP4_ROW),
    ):
        expected = jax.jit(stored_array, static_argnums=0)(form, master["weight"])
        assert np.asarray(found["weight"]).tobytes() == np.asarray(expected.values).tobytes()
        assert np.asarray(found["scale"]).tobytes() == np.asarray(expected.scales).tobytes()
    confidence = own["confidence_head"]["proj"]["weight"].astype(jnp.bfloat16)
    assert np.array_equal(stage["confidence_head"]["proj"]["weight"], confidence)
    assert np.array_equal(stage["attn"]["attn_sink"], own["attn"]["attn_sink"])


def test_what_lies_in_the_directory(exported):
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", SINGLE, INDEX, "README.md"}
    assert {path.name for path in exported.iterdir()} == names
    assert not list(exported.parent.glob(".*"))
    assert (exported / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()
    inventory = tensor_inventory(load_config(exported))
    index = json.loads((exported / INDEX).read_text())
    assert set(index["weight_map"]) == set(inventory) and set(index["weight_map"].values()) == {SINGLE}
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in inventory.values())
    for name, (dtype, array) in stored_tensors(exported).items():
        assert (dtype, array.shape) == (inventory[name].dtype, inventory[name].shape), name
    tokens = json.loads((exported / "tokenizer_config.json").read_text())
    found = {name: dsv41.load(exported).tokenizer.token_to_id(tokens[name]) for name in ("bos_token", "eos_token")}
    assert found == {"bos_token": 0, "eos_token": 1}


def test_written_again_it_is_the_same(exported, tmp_path):
    """From what is stored. From new masters the values are the same; scales shrink once, where the largest value of a
    block was rounded down to what the next smaller scale holds."""
    text = TOKENIZER.read_bytes()

    def write(name, like, rounds):
        loaded = dsv41.load(like)
        parts = {"params": loaded.params, "tables": loaded.engram.tables, "drafter": loaded.drafter}
        if rounds:
            of_masters = off_grid.masters(loaded.params, loaded.config, loaded.engram.tables)
            parts = {"params": of_masters, "drafter": off_grid.masters(loaded.drafter, loaded.config)}
        write_checkpoint(tmp_path / name, loaded.config, tokenizer=text, **parts)
        return tmp_path / name

    stored, once = write("stored", exported, False), write("once", exported, True)
    assert content(stored) == {name: data for name, data in content(exported).items() if name != "README.md"}
    same_values(open_checkpoint(once), open_checkpoint(exported))
    assert content(write("twice", once, True)) == content(once)


def same_values(after, before):
    """The same tensors, with scales that are the same or smaller."""
    assert set(after) == set(before)
    for name in before:
        assert after.info(name)[:2] == before.info(name)[:2], name
        if name.endswith(".scale"):
            assert (after.read(name) <= before.read(name)).all(), name
        elif name.removesuffix(".weight") + ".scale" in before:
            assert np.array_equal(dequantised_weight(after, name), dequantised_weight(before, name)), name
        else:
            assert after.read(name).tobytes() == before.read(name).tobytes(), name


def test_pieces_and_shards_hold_the_same_tensors(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_PIECE_BYTES", 1 << 14)
    inventory = write_checkpoint(
        tmp_path / "cut",
        small_model().config,
        # From the device as well as from the host.
        jax.tree.map(jnp.asarray, off_grid.backbone()),
        tokenizer=TOKENIZER,
        drafter=off_grid.drafter(),
        shard_bytes=700_000,
    )
    whole, cut = stored_tensors(exported), stored_tensors(tmp_path / "cut")
    assert cut.keys() == whole.keys()
    assert all(cut[n][0] == whole[n][0] and cut[n][1].tobytes() == whole[n][1].tobytes() for n in whole)
    reader = open_checkpoint(tmp_path / "cut")
    files = {name: reader.info(name).file.name for name in inventory}
    count = len(set(files.values()))
    assert count > 3 and sorted(set(files.values()))[-1] == f"model-{count:05d}-of-{count:05d}.safetensors"
    assert len({files[n] for n in files if n.startswith("layers.2.")}) == 1
    assert files["layers.1.engram.embed.weight"] == max(files.values()) != files["layers.1.engram.wkv.weight"]
    assert max(path.stat().st_size for path in (tmp_path / "cut").glob("*.safetensors")) < 700_000 + 50_000


def test_shards_keep_layers_whole():
    names = ["embed.weight", "layers.0.a", "layers.0.b", "layers.1.engram.embed.weight", "layers.1.a", "norm.weight"]
    specs = [TensorSpec(name, (10,), "I8", "backbone", "norms", 0) for name in names]

    def cut(most):
        return [[names.index(spec.name) for spec in shard] for shard in shards_of(specs, most)]

    assert cut(60) == [[0, 5, 1, 2, 4, 3]]
    assert cut(40) == [[0, 5, 1, 2], [4, 3]]
    assert cut(20) == [[0, 5], [1, 2], [4, 3]]
    assert cut(1) == [[0, 5], [1, 2], [4], [3]]
    with pytest.raises(DSV41Error, match="shard bytes: expected a positive number, got 0"):
        cut(0)


def test_the_tiny_checkpoint_keeps_its_values(tmp_path):
    """Every part, from masters. Scales may be smaller than they were; the values are those of before."""
    tiny = dsv41.load(TINY)
    of_masters = off_grid.masters(tiny.params, tiny.config, tiny.engram.tables)
    others = {part: off_grid.masters(getattr(tiny, part), tiny.config) for part in ("drafter", "vision")}
    written = write_checkpoint(tmp_path / "out", tiny.config, of_masters, tokenizer=TOKENIZER, **others)
    assert list(written) == list(tensor_inventory(tiny.config))
    same_values(open_checkpoint(tmp_path / "out"), open_checkpoint(TINY))


def test_a_checkpoint_is_written_as_it_was(tmp_path):
    tiny = dsv41.load(TINY)
    write_checkpoint(
        tmp_path / "out",
        tiny.config,
        tiny.params,
        tiny.engram.tables,
        tokenizer=TOKENIZER,
        drafter=tiny.drafter,
        vision=tiny.vision,
    )
    before, after = stored_tensors(TINY), stored_tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(after[n][0] == before[n][0] and after[n][1].tobytes() == before[n][1].tobytes() for n in before)


def test_without_quantisation(tmp_path):
    source = dequantised_checkpoint(TINY, tmp_path / "in")
    model = dsv41.load(source)
    of_masters = masters_from(model.params, model.config, model.engram.tables)
    drafter = masters_from(model.drafter, model.config)
    vision = masters_from(model.vision, model.config) if model.vision else None
    write_checkpoint(tmp_path / "out", model.config, of_masters, tokenizer=TOKENIZER, drafter=drafter, vision=vision)
    before, after = stored_tensors(source), stored_tensors(tmp_path / "out")
    assert after.keys() == before.keys() and {dtype for dtype, _ in after.values()} == {"BF16", "F32"}
    assert all(after[n][1].tobytes() == before[n][1].tobytes() for n in before)


def test_a_model_without_drafter_says_so(tmp_path):
    write_small(tmp_path / "out", drafter=None)
    loaded = dsv41.load(tmp_path / "out")
    text = loaded.config.text_config
    assert loaded.drafter is None and text.num_nextn_predict_layers == 0
    assert len(text.compress_ratios) == text.num_hidden_layers
    config = small_model().config
    assert exported_config(config, drafter=True, vision=True) == config


# --- refused


def _without(tree, *path):
    *parents, last = path
    copy = node = dict(tree)
    for key in parents:
        node[key] = dict(node[key])
        node = node[key]
    del node[last]
    return copy


def _with(tree, value, *path):
    *parents, last = path
    copy = node = dict(tree)
    for key in parents:
        node[key] = dict(node[key])
        node = node[key]
    node[last] = value
    return copy


def _changes(case):
    model = small_model()
    params, w1 = model.params, ("layers", 2, "ffn", "experts", "w1")
    stack = params["layers"][2]["ffn"]["experts"]["w1"]["weight"]
    wkv = np.zeros(params["layers"][0]["attn"]["wkv"]["weight"].shape, np.float32)
    wkv[3, 4] = np.nan
    no_scale = _without(params, "layers", 0, "attn", "wkv", "scale")
    bad_norm = jnp.full(params["norm"]["weight"].shape, jnp.inf, jnp.bfloat16)
    return {
        "missing": {"params": _without(params, "head")},
        "missing expert": {"params": _without(params, *w1, "weight")},
        "missing scale": {"params": no_scale},
        "unknown": {"params": _with(params, jnp.zeros(3), "layers", 2, "ffn", "gate", "bias_3d")},
        "shape": {"params": _with(params, stack[:-1], *w1, "weight")},
        "dtype": {"params": _with(params, params["norm"]["weight"].astype(jnp.float16), "norm", "weight")},
        "nan": {"params": _with(no_scale, wkv, "layers", 0, "attn", "wkv", "weight")},
        "inf": {"params": _with(params, bad_norm, "norm", "weight")},
        "no tables": {"tables": ()},
        "tables": {"tables": [*model.engram.tables] * 2},
        "twice": {"params": params | model.drafter},
        "tokenizer": {"tokenizer": DATA.parents[1] / "configs" / "nano_tokenizer.json"},
        "no tokenizer": {"tokenizer": b"{}"},
        "absent tokenizer": {"tokenizer": DATA / "absent.json"},
        "file": {"files": {"config.json": b""}},
        "path": {"files": {"a/b": b""}},
        "shards": {"shard_bytes": 0},
    }[case]


@pytest.mark.parametrize(
    "case, message",
    [
        ("missing", r"parameter head\.weight: is missing, tensor head\.weight is made of it"),
        (
            "missing expert",
            r"parameter layers\.2\.ffn\.experts\.w1\.weight: is missing, tensor .*\.experts\.0\.w1\.wei",
        ),
        ("missing scale", r"parameter layers\.0\.attn\.wkv\.scale: is missing"),
        ("unknown", r"parameter layers\.2\.ffn\.gate\.bias_3d: the config has no such tensor"),
        ("shape", r"parameter layers\.2\.ffn\.experts\.w1\.weight: expected uint8 \[12, .*got uint8 \[11,"),
        ("dtype", r"parameter norm\.weight: expected bfloat16 \[\d+\], got float16"),
        ("nan", r"tensor 'layers\.0\.attn\.wkv\.weight' holds NaN or infinite values"),
        ("inf", r"tensor 'norm\.weight' holds NaN or infinite values"),
        ("no tables", r"parameter layers\.1\.engram\.embed\.weight: is missing"),
        ("tables", r"one for each of the layers \[1\], got 2"),
        ("twice", r"parameter mtp\.0\.\S+: is given twice"),
        ("tokenizer", r"tokenizer\.json: the tokenizer has 4096 tokens, but text_config\.vocab_size is 512"),
        ("no tokenizer", r"tokenizer\.json: not a tokenizer file"),
        ("absent tokenizer", r"absent\.json: cannot be read \(No such file"),
        ("file", r"file 'config\.json': expected a name beside config\.json, tokenizer\.json"),
        ("path", r"file 'a/b': expected a name"),
        ("shards", r"shard bytes: expected a positive number"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, case, message):
    with pytest.raises(DSV41Error, match=message):
        write_small(tmp_path / "out", **_changes(case))
    assert list(tmp_path.iterdir()) == []


def test_unusable_targets(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DSV41Error, match="file: is a file, expected a directory"):
        write_small(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    with pytest.raises(DSV41Error, match="full: is not empty; expected a new directory"):
        write_small(tmp_path / "full")
    assert content(tmp_path / "full") == {"thesis.txt": b"all of it"}
    with pytest.raises(DSV41Error, match="file: is a file, expected a directory"):
        write_small(tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    write_small(tmp_path / "empty")
    assert (tmp_path / "empty" / SINGLE).exists()


def test_too_little_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 20))
    with pytest.raises(DSV41Error, match=r"the disk has 0\.00 GiB free, the tensors take"):
        write_small(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_system_refuses_to_write(tmp_path):
    """As a full disk does, in the middle of a tensor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DSV41Error, match=r"out: cannot write the directory \(File too large\)"):
            write_small(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
