"""The bundled tiny model is the golden one, byte for byte; the nano model is what its config says, and knows Python."""

import dataclasses
import filecmp
import pathlib

import numpy as np
import pytest

import dsv41
from dsv41.checkpoint import open_checkpoint
from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.config import load_config
from dsv41.data import NANO_MODEL, TINY_MODEL
from dsv41.evals import score_tokens
from dsv41.evals.acceptance import code_prompts, measure_acceptance
from dsv41.evals.needle import needle_accuracy
from dsv41.train.corpus import standard_library
from dsv41.train.export import exported_config
from dsv41.train.tokenizer import encode_text, tokenizer_json
from tests.golden import DATA

ROOT = pathlib.Path(__file__).parents[1]
FILES = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]


@pytest.mark.parametrize("name", FILES)
def test_bundled_file_is_the_golden_one(name):
    assert filecmp.cmp(TINY_MODEL / name, DATA / "tiny_text" / name, shallow=False)


def test_nothing_else_is_bundled():
    assert sorted(p.name for p in TINY_MODEL.iterdir()) == sorted(FILES)


def test_tiny_config_is_the_bundled_one():
    assert filecmp.cmp(ROOT / "configs" / "tiny.json", TINY_MODEL / "config.json", shallow=False)


def test_the_nano_model_is_that_of_its_config():
    config, tokenizer = load_config(NANO_MODEL), load_tokenizer(ROOT / "configs" / "nano_tokenizer.json")
    expected = load_config(ROOT / "configs" / "nano.json")
    drafter = bool(config.text_config.num_nextn_predict_layers)
    assert dataclasses.asdict(config) == dataclasses.asdict(exported_config(expected, drafter=drafter, vision=False))
    assert tokenizer_json(load_tokenizer(NANO_MODEL)) == tokenizer_json(tokenizer)
    assert "embed.weight" in open_checkpoint(NANO_MODEL)
    assert sum(p.stat().st_size for p in NANO_MODEL.iterdir()) < 20e6


_CODE = """
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
"""


@pytest.mark.slow
def test_the_nano_model_knows_python():
    model = dsv41.load(NANO_MODEL)
    ids = np.asarray([0, *encode_text(load_tokenizer(NANO_MODEL), _CODE)])
    shuffled = np.random.default_rng(0).permutation(ids)
    rows = np.stack([ids, shuffled])
    losses = -np.concatenate([piece.logprobs for piece in score_tokens(model, rows)], axis=1).mean(axis=1)
    assert losses[0] < 2.5 < 5 < losses[1]


@pytest.mark.slow
def test_the_nano_model_recalls_and_its_drafts_save_passes():
    """What its card says of held-out code, with room for the files of another Python release."""
    model, files = dsv41.load(NANO_MODEL), standard_library().held_out
    found = needle_accuracy(model, [d.text for d in files], lengths=(256, 1024), documents=2, batch=4)
    near, far = found.describe()["by_length"]
    assert near >= 0.9 and far >= 0.4  # the card has 100% and 85%; windows alone reach back 512
    prompts = code_prompts(files, model.tokenizer, model.config, count=16, tokens=256)
    saved = measure_acceptance(model, prompts, temperature=0, max_new_tokens=64, batch=16, compare=True)
    assert saved.identical == 16
    assert saved.describe()["fewer_passes"] > 2  # the card has 2.70
