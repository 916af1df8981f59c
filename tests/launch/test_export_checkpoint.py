"""launch.export_checkpoint: from runs to a model that scores as the weights in memory do."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dsv41
from dsv41.checkpoint import open_checkpoint
from dsv41.config import config_to_dict
from dsv41.engine.confidence_calibration import ConfidenceTemperatures, load_temperatures, save_temperatures
from dsv41.engram_store import EngramStore, EngramTable
from dsv41.evals import score_tokens
from dsv41.train.checkpoints import Checkpoints
from dsv41.train.export import exported_config, write_checkpoint
from dsv41.train.master_weights import stored_from
from dsv41.train.pack import Document
from launch import export_checkpoint, score
from launch.cli import run
from tests.checkpoint_files import TINY
from tests.models.parity import relative_rms
from tests.models_for_tests import small_model
from tests.train import off_grid, packs

TOKENIZER = TINY / "tokenizer.json"


def start(script, *arguments):
    return run(script.main, script.FLAGS, [script.__file__, *arguments])


def write_run(folder, masters, *steps, config=None, tokenizer=TOKENIZER):
    """A run directory; each step's masters are smaller than the last step's."""
    folder.mkdir()
    config = small_model().config if config is None else config
    (folder / "config.json").write_text(json.dumps(config_to_dict(config)))
    shutil.copy(tokenizer, folder / "tokenizer.json")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in steps:
            scaled = jax.tree.map(lambda x, step=step: x * (step / steps[-1]), masters)
            state = {"masters": scaled, "optimizer": {"mu": jnp.ones(3)}, "key": jax.random.key(0)}
            checkpoints.save(step, state, {"tokens": step})
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(of the model, of the drafter)."""
    folder = tmp_path_factory.mktemp("runs")
    model = write_run(folder / "model", off_grid.backbone(), 10, 20)
    # The same tokenizer in another form.
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(TOKENIZER.read_text()), indent=3))
    return model, write_run(folder / "drafter", off_grid.drafter(), 5, tokenizer=folder / "tokenizer.json")


def temperatures(first):
    return ConfidenceTemperatures(values=(first,) * 5, samples=9, ece_before=(0.5,) * 5, ece_after=(0.1,) * 5)


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    """The model alone."""
    out = tmp_path_factory.mktemp("exported") / "model"
    assert start(export_checkpoint, f"--run={runs[0]}", f"--out={out}") == 0
    return out


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tensors(directory):
    reader = open_checkpoint(directory)
    return {name: reader.read(name).tobytes() for name in reader}


@pytest.mark.slow
def test_the_run_is_scored_as_the_weights_in_memory(exported, tmp_path):
    """launch.score on the files = the same program on `stored_from` of the masters, bit for bit; beside both, the
    training forward of the masters."""
    tokens = packs.random_tokens(56, 5)[None].astype(np.int32)
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    files = (f"--tokens={tmp_path / 'tokens.safetensors'}", f"--out={tmp_path / 'out.safetensors'}")
    assert start(score, f"--checkpoint={exported}", *files) == 0
    scored = load_file(tmp_path / "out.safetensors")["logits"]

    config = exported_config(small_model().config, drafter=False, vision=False)
    params, tables = jax.jit(stored_from, static_argnums=1)(off_grid.backbone(), small_model().config)
    store = EngramStore(
        [EngramTable(layer=1, values=np.asarray(t.values), scales=np.asarray(t.scales)) for t in tables]
    )
    in_memory = dataclasses.replace(small_model(), config=config, params=params, drafter=None, engram=store)
    pieces = list(score_tokens(in_memory, tokens))
    assert np.array_equal(scored, np.concatenate([piece.logits for piece in pieces], axis=1))

    hidden = packs.compiled()(off_grid.backbone(), packs.pack([[Document(tokens[0])]])).x
    head = off_grid.backbone()["head"]["weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    trained = (np.asarray(hidden, np.float32) @ head.T)[0, :56]
    # As in tests/train/test_training_forward.py: equal until the first value that is rounded the other way.
    equal = np.mean([np.array_equal(a, b) for a, b in zip(trained, scored[0], strict=True)])
    assert equal > 0.1  # measured: 0.20
    assert relative_rms(trained, scored[0]) < 8e-2  # measured: 3.6e-2


def test_it_says_what_was_written(runs, tmp_path, capsys):
    (tmp_path / "README.md").write_text("# Model\n")
    save_temperatures(temperatures(1.5), tmp_path / "t.json")
    out = tmp_path / "out"
    arguments = [f"--run={runs[0]}", f"--drafter_run={runs[1]}", f"--out={out}", f"--file={tmp_path / 'README.md'}"]
    assert start(export_checkpoint, *arguments, f"--confidence_temperatures={tmp_path / 't.json'}", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    reader = open_checkpoint(out)
    assert report["tensors"] == len(reader)
    assert report["bytes"] == sum(report["dtypes"].values()) == sum(report["subsystems"].values())
    assert report["bytes"] == sum(reader.read(name).nbytes for name in reader)
    assert report["directory_bytes"] == sum(len(data) for data in content(out).values())
    found = {name: report[name] for name in ("out", "step", "drafter_step", "drafter")}
    assert found == {"out": str(out), "step": 20, "drafter_step": 5, "drafter": True}
    assert (out / "README.md").read_text() == "# Model\n"
    assert (out / "confidence_temperatures.json").read_bytes() == (tmp_path / "t.json").read_bytes()
    loaded = dsv41.load(out)
    assert loaded.config == exported_config(small_model().config, drafter=True, vision=False)
    write_checkpoint(
        tmp_path / "direct",
        small_model().config,
        off_grid.backbone(),
        tokenizer=TOKENIZER,
        drafter=off_grid.drafter(),
    )
    assert tensors(out) == tensors(tmp_path / "direct")


def test_steps_and_a_model_without_drafter(runs, exported, tmp_path, capsys):
    assert start(export_checkpoint, f"--run={runs[0]}", "--step=10", f"--out={tmp_path / 'half'}") == 0
    out = capsys.readouterr().out
    assert "routed experts, backbone" in out and out.endswith("bytes with all files; no drafter\n")
    last, half = (
        open_checkpoint(path).read("embed.weight").astype(np.float32) for path in (exported, tmp_path / "half")
    )
    assert np.array_equal(last, 2 * half)
    assert start(export_checkpoint, f"--run={runs[0]}", f"--out={exported}") == 2
    assert "is not empty; expected a new directory" in capsys.readouterr().err
    assert dsv41.load(exported).config.text_config.num_nextn_predict_layers == 0


def test_a_drafter_for_weights_that_are_stored(runs, exported, tmp_path, capsys):
    """A drafter of the small model's run goes with the weights that its model was exported to."""
    out = tmp_path / "out"
    drafter = shutil.copytree(runs[1], tmp_path / "drafter")
    save_temperatures(temperatures(2.0), drafter / "confidence_temperatures.json")
    arguments = (f"--checkpoint={exported}", f"--drafter_run={drafter}", f"--out={out}", "--json")
    assert start(export_checkpoint, *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["drafter_step"], report["drafter"]) == (None, 5, True)
    before, after = tensors(exported), tensors(out)
    assert {name: after[name] for name in before} == before
    assert {name.split(".")[0] for name in after.keys() - before.keys()} == {"mtp"}
    fitted = load_temperatures(out / "confidence_temperatures.json", 5)
    assert fitted == temperatures(2.0)
    # And without it again.
    assert start(export_checkpoint, f"--checkpoint={out}", "--nodrafter", f"--out={tmp_path / 'alone'}") == 0
    assert tensors(tmp_path / "alone") == before
    assert not (tmp_path / "alone" / "confidence_temperatures.json").exists()


@pytest.fixture(scope="module")
def odd_runs(tmp_path_factory):
    """Runs that are not the drafter's of the small model: of another width, tokenizer, without steps."""
    folder, config = tmp_path_factory.mktemp("odd"), small_model().config
    other = dataclasses.replace(config, text_config=dataclasses.replace(config.text_config, rope_theta=20000))
    write_run(folder / "other", off_grid.drafter(), 5, config=other)
    text = json.loads(TOKENIZER.read_text())
    vocabulary = text["model"]["vocab"]
    first, second = (next(word for word, i in vocabulary.items() if i == n) for n in (400, 401))
    vocabulary[first], vocabulary[second] = 401, 400
    (folder / "tokenizer.json").write_text(json.dumps(text))
    write_run(folder / "words", off_grid.drafter(), 5, tokenizer=folder / "tokenizer.json")
    write_run(folder / "new", {})
    return folder


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--out=DIR is required"),
        (["--out=x"], "give either --run=DIR or --checkpoint=DIR"),
        (["--out=x", "--run={run}", f"--checkpoint={TINY}"], "give either --run=DIR or --checkpoint=DIR"),
        (["--out=x", f"--checkpoint={TINY}", "--step=3"], "--step needs --run"),
        (["--out=x", "--run={run}", "--drafter_step=3"], "--drafter_step needs --drafter_run"),
        (["--out=x", "--run={run}", "--drafter_run=y", "--nodrafter"], "exclude each other"),
        (["--out=x", "--run=absent"], "absent/config.json: no such config file"),
        (["--out=x", "--run={odd}/new"], "new/checkpoints: there is no checkpoint yet"),
        (["--out=x", "--run={run}", "--step=7"], "no checkpoint of step 7; there are 10, 20"),
        (["--out=x", "--run={drafter}"], "parameter embed.weight: is missing"),
        (["--out=x", "--run={run}", "--drafter_run={run}"], "model holds no drafter"),
        (
            ["--out=x", "--run={run}", "--drafter_run={odd}/other"],
            "another model: its text_config.rope_theta is 20000, expected 10000",
        ),
        (["--out=x", "--run={run}", "--drafter_run={odd}/words"], "words/tokenizer.json is another tokenizer than"),
        (["--out=x", "--run={run}", "--file=absent.md"], "--file: absent.md: cannot be read (No such file"),
        (["--out=x", "--run={run}", "--confidence_temperatures=t.json"], "there is no drafter to go with them"),
        (
            ["--out=x", "--run={run}", "--drafter_run={drafter}", "--confidence_temperatures=t.json"],
            "t.json: no such file",
        ),
    ],
)
def test_bad_input(runs, odd_runs, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    places = {"{run}": runs[0], "{drafter}": runs[1], "{odd}": odd_runs}
    for name, path in places.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
    assert start(export_checkpoint, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
