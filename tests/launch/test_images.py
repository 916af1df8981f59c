"""--image of launch.generate and launch.score: image files in, golden logits out, and bad input."""

import json

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from launch import generate, score
from launch.cli import run
from tests.golden import DATA, expected

TINY = f"--checkpoint={DATA / 'tiny_text'}"
MODEL = (TINY, "--set=text_config.max_position_embeddings=4096")
GOLDEN = expected("tiny_vl")
ROW = GOLDEN["input_ids"][:1, :45].astype(np.int32)  # a span of 10 image tokens from position 6


@pytest.fixture
def photo(tmp_path) -> str:
    Image.fromarray(GOLDEN["image.rgb"]).save(tmp_path / "photo.png")
    return f"--image={tmp_path / 'photo.png'}"


def start(script, *arguments):
    return run(script.main, script.FLAGS, [f"{script.__name__.replace('.', '/')}.py", *arguments])


def generated(capsys, *arguments) -> dict:
    """Prompts of whatever length in chunks of 8: with images one more program than without."""
    fixed = ("--max_new_tokens=3", "--stop_ids=", "--prefill_chunk=8", "--json")
    assert start(generate, *MODEL, *fixed, *arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.slow
def test_generate(capsys, photo):
    """No mark, a mark among ids and a mark in the text, all for the same prompt."""
    first = generated(capsys, photo, "--prompt_ids=0,371,86,261")
    assert first["prompt_tokens"] == 14 and len(first["token_ids"]) == 3
    for prompt in ("--prompt_ids=0,505,371,86,261", "--prompt=<image>atethe", "--prompt=atethe"):
        found = generated(capsys, photo, prompt)
        assert (found["token_ids"], found["prompt_tokens"]) == (first["token_ids"], 14), prompt


@pytest.mark.slow
def test_several_images(capsys, photo):
    assert generated(capsys, photo, photo, "--prompt_ids=0,17,505,18,505")["prompt_tokens"] == 23


def score_files(tmp_path, tokens) -> tuple[str, str]:
    save_file({"tokens": np.ascontiguousarray(tokens, np.int32)}, tmp_path / "tokens.safetensors")
    return f"--tokens={tmp_path / 'tokens.safetensors'}", f"--out={tmp_path / 'out.safetensors'}"


@pytest.mark.slow
def test_score(capsys, photo, tmp_path):
    """Free run of the golden image row: mean 0.06 as in the golden README."""
    assert start(score, *MODEL, photo, *score_files(tmp_path, ROW), "--json") == 0
    assert json.loads(capsys.readouterr().out)["predictions"] == 44
    error = np.abs(load_file(tmp_path / "out.safetensors")["logits"] - GOLDEN["prefill.logits"][:1])
    assert error.mean() < 0.06 and error.max() < 1


@pytest.mark.slow
def test_generated_tokens_are_the_best_by_score(capsys, photo, tmp_path):
    """In chunks that cut the span, against one pass over prompt and answer."""
    prompt = [*ROW[0, :7], *ROW[0, 16:]]
    found = generated(capsys, photo, f"--prompt_ids={','.join(map(str, prompt))}")
    assert found["prompt_tokens"] == 45
    files = score_files(tmp_path, [[*ROW[0], *found["token_ids"]]])
    assert start(score, *MODEL, photo, *files) == 0
    best = load_file(tmp_path / "out.safetensors")["logits"][0].argmax(-1)
    assert best[44:47].tolist() == found["token_ids"]


@pytest.mark.slow
def test_score_in_chunks(photo, tmp_path):
    found = []
    for cut in ((), ("--chunk=7",), ("--chunk=8", "--decode_from=10")):
        assert start(score, *MODEL, photo, *score_files(tmp_path, ROW), *cut) == 0
        found.append(load_file(tmp_path / "out.safetensors")["logits"])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def refused(capsys, script, message, *arguments):
    assert start(script, TINY, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"{script.__name__.rpartition('.')[2]}: ") and message in err


@pytest.fixture
def unloaded(monkeypatch):
    """Everything that is wrong here shows before loading."""
    monkeypatch.setattr("dsv41.load", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt_ids=0,505"], "prompt: 1 image tokens (id 505) mark places for 0 images"),
        (["--prompt=<image>"], "prompt: 1 image tokens (id 505) mark places for 0 images"),
        (["PHOTO", "--prompt_ids=505,0,505"], "prompt: 2 image tokens (id 505) mark places for 1 images"),
        (["PHOTO", "PHOTO", "--prompt_ids=505"], "prompt: 1 image tokens (id 505) mark places for 2 images"),
        (["--image=absent.png", "--prompt_ids=1"], "absent.png: no such image file"),
        ([f"--image={__file__}", "--prompt_ids=1"], "test_images.py: not an image, or of another format"),
        (["PHOTO", "--prompt_ids=1", "--set=vision_config=null"], "--image: the config has no vision_config"),
        (["PHOTO", "--prompt_ids=1", "--max_new_tokens=118"], "11 tokens and 118 new ones exceed"),
    ],
)
def test_bad_input_of_generate(capsys, unloaded, photo, arguments, message):
    refused(capsys, generate, message, *(photo if a == "PHOTO" else a for a in arguments))


@pytest.mark.parametrize(
    "tokens, images, message",
    [
        (ROW, 0, "row 0: position 6 is the image token (id 505), but no image is given"),
        (ROW, 2, "row 0: no image tokens are left for"),
        (ROW[:, 7:], 1, "row 0: 9 image tokens at position 0, but"),
        (GOLDEN["input_ids"][1:, :45], 1, "row 0: no image tokens are left for"),
        (GOLDEN["input_ids"][:, :45], 1, "tokens.safetensors: --image needs one row of tokens, got 2"),
        (GOLDEN["input_ids"][::-1, :45], 0, "row 1: position 6 is the image token (id 505), but no image is given"),
    ],
)
def test_bad_input_of_score(capsys, unloaded, tmp_path, photo, tokens, images, message):
    refused(capsys, score, message, *[photo] * images, *score_files(tmp_path, tokens))


def test_vision_is_loaded_only_for_images(capsys, monkeypatch, photo):
    asked = []

    def load(*_, vision, **__):
        asked.append(vision)
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv41.load", load)
    for images in ((), (photo,)):
        assert start(generate, TINY, "--prompt_ids=0", "--max_new_tokens=1", *images) == 130
    assert asked == [False, True]
