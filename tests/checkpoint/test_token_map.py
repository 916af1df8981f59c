"""The tokenizer file and the Engram token map."""

import dataclasses
import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from dsv41.checkpoint.token_map import check_token_map, check_vocabulary, engram_token_map, load_tokenizer
from dsv41.config import DSV41Error, load_config
from tests.golden import DATA, expected

TINY_PATH = DATA / "tiny_text" / "tokenizer.json"
TEXT_CONFIG = load_config(DATA / "tiny_text").text_config


def word_tokenizer(words):
    """A tokenizer whose tokens decode to themselves."""
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))


def classes_of(words):
    return engram_token_map(word_tokenizer(words), len(words)).tolist()


def test_golden_map():
    token_map = engram_token_map(load_tokenizer(TINY_PATH), 512)
    np.testing.assert_array_equal(token_map, expected("tiny_text")["engram_token_map"])
    assert token_map.dtype == np.int32
    check_token_map(token_map, TEXT_CONFIG, TINY_PATH)


@pytest.mark.parametrize(
    "words",
    [
        ["e", "E", "é", "É", "e\u0301", " e", "E\n", "\t\u3000E\r\n "],
        ["fi", "ﬁ", "ＦＩ"],
        ["the cat", "The\t \n CAT", " thé  cat "],
        # A text that folds to exactly one space stays one; so does the private-use mark for it.
        [" ", "\t\r\n ", "\u3000", " \u0301", "\ue000", "\u00a0"],
    ],
    ids=["letter", "compatibility", "phrase", "space"],
)
def test_texts_that_normalise_alike_share_a_class(words):
    assert classes_of(words) == [0] * len(words)


@pytest.mark.parametrize(
    "words",
    [
        # Nothing left after stripping: the text itself is the key.
        [" ", "\u2028", "\u2029", "\u0301", "\u0300", "\x0b", "\x0c"],
        # Parts of characters keep the vocabulary's own string, case and blanks included.
        ["x\ufffd", "X\ufffd", " x\ufffd"],
        # Not white space for the library, though Python's own strip removes it.
        ["a", "\x1ca", "a\x1f"],
        ["a b", "a\u2028b", "ab"],
    ],
    ids=["emptied", "partial", "separators", "inner"],
)
def test_texts_that_stay_apart(words):
    assert classes_of(words) == list(range(len(words)))


def test_classes_are_numbered_by_first_appearance():
    assert classes_of(["b", "a", "B", "c", "A", "d"]) == [0, 1, 0, 2, 1, 3]


def test_special_tokens_are_kept():
    tokenizer = word_tokenizer(["a", "b"])
    tokenizer.add_special_tokens([AddedToken("<S>", special=True), AddedToken("<s>", special=True)])
    assert engram_token_map(tokenizer, 4).tolist() == [0, 1, 2, 2]


def test_byte_level_parts_of_a_character():
    """Two different lone bytes decode to the same U+FFFD but must not share a class."""
    tokenizer = word_tokenizer(["Ã", "©", "Ã©", "E"])  # bytes C3, A9, both ("é"), and the letter
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode([0]) == tokenizer.decode([1]) == "\ufffd"
    assert engram_token_map(tokenizer, 4).tolist() == [0, 1, 2, 2]


def test_wrong_number_of_classes_names_file_and_sizes():
    token_map = expected("tiny_text")["engram_token_map"]
    config = dataclasses.replace(TEXT_CONFIG, engram_compressed_vocab_size=391)
    with pytest.raises(DSV41Error, match=r"dir/tokenizer\.json: .*390 Engram classes.*391"):
        check_token_map(token_map, config, "dir/tokenizer.json")
    with pytest.raises(DSV41Error, match=r"dir/tokenizer\.json: .*511 ids.*512"):
        check_token_map(token_map[:-1], TEXT_CONFIG, "dir/tokenizer.json")


@pytest.mark.parametrize("size", [511, 513, 129280])
def test_vocabulary_of_another_size_names_file_and_sizes(size):
    tokenizer = load_tokenizer(TINY_PATH)
    with pytest.raises(DSV41Error, match=rf"dir/tokenizer\.json: .*512 tokens.*vocab_size is {size}"):
        check_vocabulary(tokenizer, size, "dir/tokenizer.json")
    with pytest.raises(DSV41Error, match=rf"512 tokens.*{size}"):
        engram_token_map(tokenizer, size)


def test_ids_with_a_hole():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 3}, unk_token="a"))
    with pytest.raises(DSV41Error, match=r"3 tokens leave id 2 unused"):
        check_vocabulary(tokenizer, 3)


def test_load_tokenizer_from_a_directory():
    assert load_tokenizer(TINY_PATH.parent).get_vocab_size() == 512


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", json.dumps({"model": {"type": "BPE"}}).encode()])
def test_broken_tokenizer_file(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DSV41Error, match=r"tokenizer\.json: (not a|cannot read the) tokenizer file"):
        load_tokenizer(tmp_path)


def test_missing_tokenizer_file(tmp_path):
    with pytest.raises(DSV41Error, match=r"tokenizer\.json: no such tokenizer file"):
        load_tokenizer(tmp_path)
