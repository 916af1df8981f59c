"""The tokenizer made from a corpus: exact, deterministic, and accepted as one of the released layout."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.checkpoint.token_map import check_token_map, engram_token_map, load_tokenizer
from dsv41.config import DSV41Error, load_config
from dsv41.train.corpus import standard_library
from dsv41.train.tokenizer import (
    FIRST_TOKENS,
    LAST_TOKENS,
    encode_text,
    make_tokenizer,
    tokenizer_hash,
    tokenizer_json,
    with_tokenizer,
)
from launch import make_tokenizer as script
from launch.cli import run
from tests.golden import DATA

CONFIGS = DATA.parents[1] / "configs"
NANO = CONFIGS / "nano.json"
SMALL = 512
TEXTS = [d.text for d in standard_library().train if d.name.startswith("json/")]


@pytest.fixture(scope="module")
def small():
    return make_tokenizer(TEXTS, SMALL)


@pytest.fixture(scope="module")
def bundled():
    return load_tokenizer(CONFIGS / "nano_tokenizer.json")


@given(text=st.text())
def test_any_text_comes_back(bundled, text):
    assert bundled.decode(encode_text(bundled, text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["\x00\x01\x7f\xff", "a\r\n\r\n \t b", "\ue000 \u2028\u0301e\u0301", "𝔘🧵\U0010ffff", " " * 999]
)
def test_odd_texts_come_back(bundled, text):
    assert bundled.decode(encode_text(bundled, text), skip_special_tokens=False) == text


def test_every_character_of_a_byte_comes_back(bundled):
    text = "".join(map(chr, range(0x3000)))
    assert bundled.decode(encode_text(bundled, text), skip_special_tokens=False) == text


def test_special_tokens_in_a_text_are_characters(bundled):
    text = "".join((*FIRST_TOKENS, *LAST_TOKENS))
    special = {bundled.token_to_id(token) for token in (*FIRST_TOKENS, *LAST_TOKENS)}
    ids = encode_text(bundled, text)
    assert not special & set(ids) and bundled.decode(ids, skip_special_tokens=False) == text
    assert bundled.encode("<eos>", add_special_tokens=False).ids == [1]  # and the tokenizer is as it was


def test_a_line_and_its_indentation_are_one_token(bundled):
    tokens = bundled.encode("def f(self):\n    if self:\n        return None\n").tokens
    assert tokens[0] == "def" and {"ĊĠĠĠĠ", "ĊĠĠĠĠĠĠĠĠ", "return"} <= set(tokens)


def test_ids_of_special_tokens(small):
    assert [small.token_to_id(t) for t in FIRST_TOKENS] == [0, 1, 2]
    assert [small.token_to_id(t) for t in LAST_TOKENS] == list(range(SMALL - len(LAST_TOKENS), SMALL))


def test_the_same_texts_give_the_same_tokenizer(small):
    """Also in another process, where strings hash differently."""
    assert tokenizer_json(make_tokenizer(TEXTS, SMALL)) == tokenizer_json(small)
    code = (
        "from dsv41.train.corpus import standard_library as s; from dsv41.train.tokenizer import *\n"
        "texts = [d.text for d in s().train if d.name.startswith('json/')]\n"
        f"print(tokenizer_hash(make_tokenizer(texts, {SMALL})))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.split() == [tokenizer_hash(small)]


def test_it_is_one_of_the_released_layout(small, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(small))
    loaded = load_tokenizer(tmp_path)
    assert tokenizer_json(loaded) == tokenizer_json(small)
    assert engram_token_map(loaded, SMALL).tolist() == engram_token_map(small, SMALL).tolist()


def test_the_bundled_one_is_that_of_the_config(bundled):
    config = load_config(NANO)
    token_map = engram_token_map(bundled, config.text_config.vocab_size)
    check_token_map(token_map, config.text_config, NANO)
    assert with_tokenizer(config, bundled) == config
    # The classes of special tokens are their own, so that the padding of the hash means nothing else.
    ids = [bundled.token_to_id(token) for token in (*FIRST_TOKENS, *LAST_TOKENS)]
    assert (np.bincount(token_map)[token_map[ids]] == 1).all()


def test_a_config_is_fitted(small):
    tiny = load_config(CONFIGS / "tiny.json")
    fitted = with_tokenizer(tiny, small)
    assert (fitted.bos_token_id, fitted.eos_token_id, fitted.pad_token_id) == (0, 1, 2)
    assert fitted.image_token_id == small.token_to_id("<image>")
    assert fitted.text_config.dspark_noise_token_id == small.token_to_id("<noise>")
    assert fitted.text_config.engram_compressed_vocab_size != tiny.text_config.engram_compressed_vocab_size
    with pytest.raises(DSV41Error, match="has 512 tokens, but text_config"):
        with_tokenizer(load_config(NANO), small)
    with pytest.raises(DSV41Error, match="no special token <reserved>"):
        with_tokenizer(tiny, load_tokenizer(DATA / "tiny_text"))


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [(TEXTS, 200, "expected at least 267"), (["abc"], SMALL, "only 269 tokens, fewer than vocab_size=512")],
)
def test_what_is_refused(texts, size, message):
    with pytest.raises(DSV41Error, match=message):
        make_tokenizer(texts, size)


def start(*arguments):
    return run(script.main, script.FLAGS, ["launch/make_tokenizer.py", *arguments])


def test_script(tmp_path, capsys):
    """The vocabulary of the tiny config, which is quick to learn, from the whole corpus."""
    file, config = tmp_path / "tokenizer.json", tmp_path / "config.json"
    tiny = CONFIGS / "tiny.json"
    assert start(f"--out={file}", f"--config={tiny}", f"--out_config={config}") == 0
    report = json.loads(capsys.readouterr().out)
    tokenizer, text = load_tokenizer(tmp_path), load_config(tmp_path).text_config
    assert report["sha256"] == tokenizer_hash(tokenizer) and report["vocab_size"] == SMALL
    assert report["engram_classes"] == text.engram_compressed_vocab_size
    assert report["corpus"]["sha256"] == standard_library().sha256
    check_token_map(engram_token_map(tokenizer, SMALL), text, file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out is required"),
        (["--out=t.json", "--out_config=c.json"], "--out_config needs --config"),
        (["--out=t.json", f"--config={NANO}", "--vocab_size=512"], "exclude each other"),
        (["--out=no/such/t.json"], "no such directory"),
    ],
)
def test_bad_flags(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert start(*arguments) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []
