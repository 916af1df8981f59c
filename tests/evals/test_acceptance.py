"""What is counted of speculative decoding, and the prompts that it is measured on."""

import functools
import pathlib

import numpy as np
import pytest

from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.config import DSV41Error, load_config
from dsv41.engine import GenerationResult, Speculation, SpeculationRecord, Timings
from dsv41.evals import acceptance
from dsv41.evals.acceptance import code_prompts, measure_acceptance
from dsv41.train.corpus import Document

ROOT = pathlib.Path(__file__).parents[2]
NANO = load_config(ROOT / "configs" / "nano.json")
FILES = [
    Document(name, (ROOT / "dsv41" / "train" / name).read_text(), True)
    for name in ("corpus.py", "pack.py", "__init__.py")
]


@functools.cache
def tokenizer():
    return load_tokenizer(ROOT / "configs" / "nano_tokenizer.json")


def result(tokens, accepted=(), verified=3) -> GenerationResult:
    record = SpeculationRecord(
        confidence=np.zeros((len(accepted), 3), np.float32),
        verified=np.full(len(accepted), verified, np.int32),
        accepted=np.array(accepted, np.int32),
        emitted=np.array(accepted, np.int32) + 1,
    )
    return GenerationResult(
        token_ids=tuple(tokens), finish_reason="length", prompt_tokens=2, kv_bytes_per_token=0, window_bytes=0,
        timings=Timings(compile_s=0, prefill_s=1, decode_s=1, prompt_tokens=2, new_tokens=len(tokens)),
        speculation=record if accepted else None,
    )  # fmt: skip


@pytest.fixture
def generated(monkeypatch):
    """Five new tokens a prompt in two rounds; plain decoding ends the prompt [9] another way. Returns the calls."""
    calls = []

    def generate(model, prompts, **options):
        calls.append((prompts, options))
        for i in range(len(prompts)):
            for token in range(5):
                if options["on_token"]:
                    options["on_token"](i, token)
        drafts = (2, 0) if options["speculate"] else ()
        return [result([*range(4), 7 if p == [9] and not drafts else 4], drafts) for p in prompts]

    monkeypatch.setattr(acceptance, "generate", generate)
    return calls


def test_what_is_counted(generated):
    seen = []
    found = measure_acceptance(
        None, [[0], [9], [5]], temperature=0, max_new_tokens=5, batch=2, seed=7, compare=True,
        progress=lambda *n: seen.append(n),
    )  # fmt: skip
    assert found.describe() == {
        "temperature": 0,
        "prompts": 3,
        "new_tokens": 15,
        "rounds": 6,
        "acceptance_length": 2.0,
        "mean_verified_length": 3.0,
        "by_position": [0.5, 0.5, 0.0],
        "plain_passes": 12,  # the prompt gives the first of five tokens
        "fewer_passes": 2.0,
        "identical_to_plain": 2,
    }
    assert [(prompts, bool(o["speculate"])) for prompts, o in generated] == [
        ([[0], [9]], True), ([[0], [9]], False), ([[5]], True), ([[5]], False),
    ]  # fmt: skip
    assert [[s.seed for s in o["sampling"]] for _, o in generated] == [[7, 8], [7, 8], [9], [9]]
    assert seen[-1] == (30, 30) and [n for n, _ in seen] == sorted(n for n, _ in seen)


def test_above_temperature_0_nothing_is_compared(generated):
    way = Speculation(draft_tokens=2)
    found = measure_acceptance(None, [[0], [5]], temperature=1, max_new_tokens=5, speculation=way)
    assert found.describe()["identical_to_plain"] is None and len(generated) == 1
    assert generated[0][1]["speculate"] is way
    assert all(s.temperature == 1 for s in generated[0][1]["sampling"])


def test_positions_that_no_round_verified(generated, monkeypatch):
    monkeypatch.setattr(acceptance, "generate", lambda *_, **__: [result([1, 2, 3, 4], [1, 0], verified=2)])
    assert measure_acceptance(None, [[0]], temperature=1).describe()["by_position"] == [0.5, 0.0, None]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": 0, "batch": 0}, "a batch of 1 or more, got 0"),
        ({"temperature": 1, "compare": True}, "only at temperature 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(DSV41Error, match=message):
        measure_acceptance(None, [[0]], **options)


def test_something_must_be_drafted(monkeypatch):
    monkeypatch.setattr(acceptance, "generate", lambda *_, **__: [result([1])])
    with pytest.raises(DSV41Error, match="nothing was drafted"):
        measure_acceptance(None, [[0]], temperature=0)


def test_prompts_begin_at_lines_of_the_files_in_turn():
    prompts = code_prompts(FILES[:2], tokenizer(), NANO, count=7, tokens=60, seed=3)
    assert all(len(ids) == 60 and ids[0] == NANO.bos_token_id for ids in prompts)
    at_lines = 0
    for i, ids in enumerate(prompts):
        text = FILES[i % 2].text
        place = text.index(tokenizer().decode(ids[1:-1]))  # the last token may be part of a character
        at_lines += place == 0 or text[place - 1] == "\n"
    assert at_lines >= 6  # those too near to a file's end begin anywhere
    assert len({tuple(ids) for ids in prompts}) == 7
    assert prompts == code_prompts(FILES[:2], tokenizer(), NANO, count=7, tokens=60, seed=3)
    assert prompts != code_prompts(FILES[:2], tokenizer(), NANO, count=7, tokens=60, seed=4)


def test_files_that_are_too_short_are_left_out():
    size = len(tokenizer().encode(FILES[2].text, add_special_tokens=False).ids)
    prompts = code_prompts([FILES[2], FILES[0]], tokenizer(), NANO, count=2, tokens=size + 1)
    assert all(tokenizer().decode(ids[1:-1]) in FILES[0].text for ids in prompts)
    with pytest.raises(DSV41Error, match=f"none of the 1 files has {size + 1} tokens"):
        code_prompts([FILES[2]], tokenizer(), NANO, count=1, tokens=size + 1)
    with pytest.raises(DSV41Error, match="got 0 of 256"):
        code_prompts(FILES, tokenizer(), NANO, count=0)
