"""What is asked of the engine for a file of answers, and what a line says."""

import json
import pathlib

import pytest

from dsv41.checkpoint.token_map import load_tokenizer
from dsv41.config import DSV41Error
from dsv41.engine import GenerationResult, Timings
from dsv41.evals import answers
from dsv41.evals.answers import answer_requests, append_answers, keep_answers, open_answers
from dsv41.ops.sampling import SamplingParams

TOKENIZER = load_tokenizer(pathlib.Path(__file__).parents[2] / "configs" / "nano_tokenizer.json")
BOS, EOS = 0, 1


class Model:
    tokenizer = TOKENIZER


def requests(prompts, seed=0):
    return answer_requests(prompts, SamplingParams(seed=seed), max_new_tokens=4, identity="a model")


def result(prompt, tokens, reason="length"):
    timings = Timings(compile_s=1, prefill_s=1, decode_s=1, prompt_tokens=len(prompt), new_tokens=len(tokens))
    return GenerationResult(
        token_ids=tuple(tokens), finish_reason=reason, prompt_tokens=len(prompt), timings=timings,
        kv_bytes_per_token=0, window_bytes=0,
    )  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """What each batch was asked for. Prompt [0, n] stops after n tokens or has four."""
    batches = []

    def generate(model, prompts, *, on_token, **options):
        batches.append((prompts, options))
        for number in range(4):
            for row, (_, most) in enumerate(prompts):
                if on_token is not None and number < most:
                    on_token(row, 300)
        return [result(p, [300] * min(p[1], 4), "stop" if p[1] < 4 else "length") for p in prompts]

    monkeypatch.setattr(answers, "generate", generate)
    return batches


def test_a_last_batch_is_filled_up(asked, tmp_path):
    wanted = requests([[BOS, n] for n in (4, 2, 4, 4, 3)], seed=7)
    seen = []
    with open_answers(tmp_path / "a.jsonl") as file:
        made = append_answers(Model, wanted, file, batch=3, progress=lambda *n: seen.append(n))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [p for p, _ in asked] == [[(0, 4), (0, 2), (0, 4)], [(0, 4), (0, 3), (0, 3)]]
    assert [[s.seed for s in o["sampling"]] for _, o in asked] == [[7, 8, 9], [10, 11, 11]]
    assert [line["key"] for line in lines] == [r.key for r in wanted]
    assert (made.texts, made.stopped, made.new_tokens, made.compile_s) == (5, 2, 17, 2)
    assert seen == sorted(seen) and seen[-1] == (20, 20) and (12, 20) in seen


def test_what_is_kept_is_not_asked_for(asked, tmp_path):
    wanted = requests([[BOS, n] for n in (4, 2, 4, 4, 3)])
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with open_answers(path) as file:
        append_answers(Model, wanted, file, batch=5)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    for kept, cut, zeros in ((0, 1, 0), (1, 25, 0), (2, len(lines[2]) - 1, 9), (3, 0, 9), (3, 0, 0), (5, 0, 0)):
        other.write_bytes(b"".join(lines[:kept]) + (lines[kept][:cut] if cut else b"") + b"\0" * zeros)
        asked.clear()
        with open_answers(other) as file:
            assert keep_answers(file, wanted) == kept
            assert other.read_bytes() == b"".join(lines[:kept])
            append_answers(Model, wanted, file, kept=kept, batch=2)
        assert len(asked) == -(-(5 - kept) // 2)
        assert other.read_bytes() == data


def test_a_changed_line_is_found(asked, tmp_path):
    wanted, path = requests([[BOS, n] for n in (4, 2, 4)]), tmp_path / "a.jsonl"
    with open_answers(path) as file:
        append_answers(Model, wanted, file)
    lines = path.read_bytes().splitlines(keepends=True)
    for number, changed in ((2, [lines[0], lines[2], lines[1]]), (3, [*lines[:2], b"\0\0\n"]), (2, [lines[0], b"\n"])):
        path.write_bytes(b"".join(changed))
        with open_answers(path) as file, pytest.raises(DSV41Error, match=rf"a\.jsonl, line {number}: "):
            keep_answers(file, wanted)
        assert path.read_bytes() == b"".join(changed)


def test_keys_tell_everything_apart():
    same = {"max_new_tokens": 4, "identity": "a model"}
    prompts, sampling = [[BOS, 5], [BOS, 6]], SamplingParams()
    first, second = requests(prompts)
    assert first.key != second.key and requests(prompts)[0].key == first.key
    others = [
        answer_requests([[BOS, 7]], sampling, **same),
        answer_requests(prompts, SamplingParams(top_p=0.5), **same),
        answer_requests(prompts, SamplingParams(seed=1), **same),
        answer_requests(prompts, sampling, **same | {"max_new_tokens": 5}),
        answer_requests(prompts, sampling, **same | {"identity": "another"}),
    ]
    assert len({first.key, *(r[0].key for r in others)}) == 6


def test_the_longest_prompts_come_first():
    found = requests([[BOS, 3], [BOS] * 4, [BOS, 4], [BOS] * 5], seed=2)
    assert [r.number for r in found] == [3, 1, 0, 2]
    assert [r.sampling.seed for r in found] == [5, 3, 2, 4]


def test_a_line_is_the_text_without_special_tokens():
    text, smile = "x = '\u2028é'", TOKENIZER.encode("\U0001f600").ids
    assert len(smile) > 1  # of several tokens
    ids = TOKENIZER.encode(text).ids
    (request,) = requests([[BOS, *ids[:2]]])

    def line(*tokens, reason="length"):
        written = request.line(result(request.prompt, tokens, reason), TOKENIZER)
        assert written.endswith("\n") and len(written.splitlines()) == 1
        return json.loads(written)

    assert line(*ids[2:], EOS, reason="stop") == {
        "name": "answers/00000000", "text": text, "prompt_tokens": 3, "new_tokens": len(ids) - 1,
        "finish_reason": "stop", "key": request.key,
    }  # fmt: skip
    assert line(*ids[2:], *smile)["text"] == f"{text}\U0001f600"
    assert line(*ids[2:], *smile[:-1])["text"] == text  # the character is not whole
    assert line(*ids[2:], TOKENIZER.token_to_id("<pad>"), *smile)["text"] == f"{text}\U0001f600"
