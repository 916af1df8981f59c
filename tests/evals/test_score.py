"""score_tokens: the golden logits, however the tokens are cut; and the file writer."""

import functools
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dsv41.config import DSV41Error
from dsv41.evals import ArrayFileWriter, check_tokens, read_tokens, score_tokens
from tests.golden import expected
from tests.models_for_tests import tiny_model

PROMPT = 53


def tokens() -> np.ndarray:
    return expected("tiny_text")["input_ids"][:, :PROMPT]


@functools.cache
def scored(chunk: int = 64, decode_from: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Logits [2, 53, V] and log-probabilities [2, 52] of the golden prompt."""
    logits = np.full((2, PROMPT, 512), np.nan, np.float32)
    logprobs = np.full((2, PROMPT - 1), np.nan, np.float32)
    count = 0
    for piece in score_tokens(tiny_model(), tokens(), chunk=chunk, decode_from=decode_from):
        rows, length = piece.logits.shape[:2]
        logits[piece.row : piece.row + rows, piece.position : piece.position + length] = piece.logits
        logprobs[piece.row : piece.row + rows, piece.position : piece.position + length] = piece.logprobs
        count += piece.tokens
    assert count == tokens().size and not np.isnan(logits).any() and not np.isnan(logprobs).any()
    return logits, logprobs


def test_golden_logits():
    """Free run: mean 0.06 as in the golden README. A near-tie that falls the other way moves single logits by 0.5."""
    error = np.abs(scored()[0] - expected("tiny_text")["prefill.logits"])
    assert error.mean() < 0.06 and error.max() < 1


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{"chunk": 7}, {"decode_from": 40}, {"chunk": 7, "decode_from": 45}])
def test_the_cut_does_not_change_the_logits(cut):
    logits, logprobs = scored(**cut)
    np.testing.assert_array_equal(logits, scored()[0])
    np.testing.assert_allclose(logprobs, scored()[1], atol=1e-5)  # a sum over the vocabulary, in another program


def test_logprobs_are_those_of_the_logits():
    logits, logprobs = scored()
    x = logits.astype(np.float64)
    everything = x - np.log(np.exp(x).sum(-1, keepdims=True))
    of_next = np.take_along_axis(everything[:, :-1], tokens()[:, 1:, None].astype(np.int64), axis=-1)[..., 0]
    np.testing.assert_allclose(logprobs, of_next, atol=1e-5)


def test_rows_in_groups(monkeypatch):
    """As many rows at a time as the logits of a step leave room for; the last group may be smaller."""
    monkeypatch.setattr("dsv41.evals.score._LOGITS_BYTES", 2 * 64 * 512 * 4)
    three = np.concatenate([tokens(), tokens()[:1]])
    pieces = list(score_tokens(tiny_model(), three, chunk=64, with_logits=False))
    assert [(p.row, p.position, p.tokens) for p in pieces] == [(0, 0, 106), (2, 0, 53)]
    assert all(p.logits is None for p in pieces)
    np.testing.assert_array_equal(np.concatenate([p.logprobs for p in pieces])[:2], scored()[1])
    np.testing.assert_array_equal(pieces[1].logprobs[0], scored()[1][0])


@pytest.mark.slow
def test_logits_larger_than_the_limit_come_in_parts(monkeypatch):
    """As where a mesh wants more rows at a time than there is room for: 20 of 53 positions, the step has 64."""
    monkeypatch.setattr("dsv41.evals.score._LOGITS_BYTES", 20 * 512 * 4)
    pieces = list(score_tokens(tiny_model(), tokens()[:1], chunk=64))
    assert [(p.row, p.position, p.tokens) for p in pieces] == [(0, 0, 20), (0, 20, 20), (0, 40, 13)]
    assert [p.logits.shape for p in pieces] == [(1, 20, 512), (1, 20, 512), (1, 13, 512)]
    np.testing.assert_array_equal(np.concatenate([p.logits for p in pieces], axis=1), scored()[0][:1])
    np.testing.assert_array_equal(np.concatenate([p.logprobs for p in pieces], axis=1), scored()[1][:1])


@pytest.mark.parametrize(
    "array, options, message",
    [
        (np.array([[1, 2], [3, 512]]), {}, r"tokens\[1, 1\] is 512, expected an id in \[0, 512\)"),
        (np.array([[-5]]), {}, r"tokens\[0, 0\] is -5"),
        (np.zeros((1, 4097), np.int64), {}, "4097 a row exceed max_position_embeddings=4096"),
        (np.zeros((1, 4), np.int64), {"chunk": 0}, "chunk: expected 1 or more, got 0"),
        (np.zeros((1, 4), np.int64), {"decode_from": 4}, r"decode_from: expected a position in \[0, 4\), got 4"),
        (np.zeros((1, 4), np.int64), {"decode_from": -1}, r"decode_from: .* got -1"),
    ],
)
def test_bad_arguments(array, options, message):
    with pytest.raises(DSV41Error, match=message):
        check_tokens(tiny_model().config, array, **options)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_read_tokens(tmp_path, dtype):
    save_file({"tokens": np.array([[1, 2, 3]], dtype), "other": np.zeros(2)}, tmp_path / "t.safetensors")
    np.testing.assert_array_equal(read_tokens(tmp_path / "t.safetensors"), [[1, 2, 3]])


@pytest.mark.parametrize(
    "arrays, message",
    [
        (None, "no such file of tokens"),
        (b"junk", "not a readable safetensors file"),
        ({"ids": np.zeros((1, 2), np.int32)}, r"holds no array 'tokens', only \['ids'\]"),
        ({"tokens": np.zeros((1, 2), np.float32)}, "'tokens' is F32, expected I32 or I64"),
        ({"tokens": np.zeros((1, 2), np.int16)}, "'tokens' is I16"),
        ({"tokens": np.zeros(2, np.int32)}, r"'tokens' has shape \[2\], expected \[B, T\]"),
        ({"tokens": np.zeros((0, 2), np.int32)}, r"'tokens' has shape \[0, 2\]"),
    ],
)
def test_unusable_token_files(tmp_path, arrays, message):
    path = tmp_path / "t.safetensors"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        save_file(arrays, path)
    with pytest.raises(DSV41Error, match=f"t.safetensors: {message}"):
        read_tokens(path)


def test_writer_places_pieces(tmp_path):
    values = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    path = tmp_path / "x.safetensors"
    with ArrayFileWriter(path, "logits", values.shape) as file:
        file.write(0, 0, values[:2, :3])
        file.write(2, 0, values[2:, :5])
        file.write(0, 3, values[:2, 3:])
        assert not path.exists()
    assert os.listdir(tmp_path) == ["x.safetensors"]
    np.testing.assert_array_equal(load_file(path)["logits"], values)


@pytest.mark.parametrize("error", [DSV41Error, KeyboardInterrupt])
def test_an_interrupted_writer_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")

    def write():
        with ArrayFileWriter(path, "logits", (1, 2, 3)) as file:
            file.write(0, 0, np.zeros((1, 1, 3)))
            raise error

    with pytest.raises(error):
        write()
    assert os.listdir(tmp_path) == ["x.safetensors"] and path.read_bytes() == b"old"


def test_targets_that_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(DSV41Error, match="absent/x: no such directory"):
        ArrayFileWriter(tmp_path / "absent" / "x", "logits", (1, 1))
    with pytest.raises(DSV41Error, match="is a directory, expected the name of a file"):
        ArrayFileWriter(tmp_path, "logits", (1, 1))
    with pytest.raises(DSV41Error, match=r"x: cannot write the file \("):  # more than any disk has
        ArrayFileWriter(tmp_path / "x", "logits", (1 << 40, 1 << 18))
    assert os.listdir(tmp_path) == []
