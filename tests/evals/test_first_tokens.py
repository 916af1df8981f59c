"""The first tokens of a text are those of the whole text, though only its beginning is encoded."""

import functools
import pathlib
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.data import TINY_MODEL
from dsv41.evals import first_tokens as module
from dsv41.evals.first_tokens import first_tokens
from dsv41.train.tokenizer import encode_texts

ROOT = pathlib.Path(__file__).parents[2]
TOKENIZERS = {"nano": ROOT / "configs" / "nano_tokenizer.json", "tiny": TINY_MODEL}
# Blanks, ends of lines and words of every kind, so that cuts fall into all of them.
PARTS = ["\n", "\n", "\r\n", " ", "    ", "\t", "\u2028", "\x0c", "\x1c", "\u3000", "def", "x" * 40, "12345", "('", "é",
         "漢字", "😀", "<pad>"]  # fmt: skip


@functools.cache
def tokenizer(name):
    return load_tokenizer(TOKENIZERS[name])


def texts():
    rng = random.Random(0)
    mixed = ["".join(rng.choices(PARTS, k=rng.randrange(900))) for _ in range(150)]
    blank = [f"x{rng.choice(' *')}" + "\n" * rng.randrange(1500) + "y" * rng.randrange(2) for _ in range(50)]
    return [*mixed, *blank, (ROOT / "dsv41" / "train" / "corpus.py").read_text(), "", "\n" * 900, "z " * 2000]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_they_are_those_of_the_whole_text(name):
    whole = encode_texts(tokenizer(name), texts())
    for count in (1, 6, 63):
        assert first_tokens(tokenizer(name), texts(), count) == [ids[:count] for ids in whole]


@pytest.fixture
def encoded(monkeypatch):
    """Characters of each text that is encoded."""
    sizes = []

    def encode(tokenizer, texts):
        sizes.extend(map(len, texts))
        return encode_texts(tokenizer, texts)

    monkeypatch.setattr(module, "encode_texts", encode)
    return sizes


def test_only_a_beginning_is_encoded(encoded):
    (ids,) = first_tokens(tokenizer("nano"), ["    return x + 1\n" * 10_000], 20)
    assert len(ids) == 20 and sum(encoded) < 1000


def test_a_tokenizer_whose_pieces_go_over_lines_encodes_everything(encoded):
    merges = Tokenizer(models.BPE({"a": 0, "\n": 1, "\na": 2}, [("\n", "a")]))
    for pieces in (None, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)):
        if pieces is not None:
            merges.pre_tokenizer = pieces
        encoded.clear()
        first_tokens(merges, ["a\n" * 5000, "a\na"], 3)
        assert encoded == [10_000, 3]
    assert first_tokens(merges, [], 3) == []
