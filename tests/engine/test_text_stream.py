"""TextStream: pieces join to the tokenizer's own text, and no piece holds half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.engine import TextStream
from tests.golden import DATA

TOKENIZER = load_tokenizer(DATA / "tiny_text")


def pieces(ids):
    stream = TextStream(TOKENIZER)
    return [stream.push(i) for i in ids], stream.finish()


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40))
def test_any_ids(ids):
    """Bytes that are no text included."""
    parts, rest = pieces(ids)
    assert "".join(parts) + rest == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=20))
def test_text_comes_in_whole_characters(text):
    text = text.replace("\ufffd", "")
    ids = TOKENIZER.encode(text).ids
    parts, rest = pieces(ids)
    assert "".join(parts) + rest == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in "".join(parts) + rest


@pytest.mark.parametrize("text", ["日本", "😀"])
def test_a_character_waits_for_its_last_token(text):
    ids = TOKENIZER.encode(text).ids
    assert len(ids) > len(text)
    parts, rest = pieces(ids)
    assert "" in parts and "".join(parts) == text and rest == ""
    cut, rest = pieces(ids[:-1])
    assert "".join(cut) == text[:-1] and rest == "\ufffd"
