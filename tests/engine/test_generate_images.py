"""Generation behind prompts with images, and what is refused."""

import dataclasses

import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.engine import Speculation, generate
from tests.models.test_images import IMAGE, picture, rows, spans
from tests.models_for_tests import seeing_model

PROMPT = 40


def prompts():
    """The image prompts of the model's tests, cut behind their spans."""
    ids, images = rows()
    return [ids[0, :PROMPT].tolist(), ids[1, :PROMPT].tolist()], images


def run(**options):
    """Beside two short requests and in chunks of 8: two of the programs are those of test_generate."""
    ids, images = prompts()
    options = {"max_new_tokens": 4, "stop_ids": [], "prefill_chunk": 8} | options
    results = generate(seeing_model(), [*ids, [0], [0]], images=[*images, [], []], **options)
    return [r.token_ids for r in results[:2]]


@pytest.mark.slow  # tests/launch/test_images.py has the same for one request
def test_greedy_tokens_are_those_of_forward():
    """The argmax of one pass over prompt and answer at each position."""
    model, (ids, _) = seeing_model(), prompts()
    tokens = run()
    # Padded to the length of the other tests' program.
    full = np.array([[*p, *t, *[7] * (53 - PROMPT - 4)] for p, t in zip(ids, tokens)])
    cache = model.init_cache(2, 512, draft_tokens=5)
    logits, _, _ = model.forward(model.make_batch(full, images=spans()), cache, logits="all")
    best = np.asarray(logits).argmax(-1)
    for row in range(2):
        assert best[row, PROMPT - 1 : PROMPT + 3].tolist() == list(tokens[row])


@pytest.mark.slow
def test_chunks_and_speculation_change_nothing():
    plain = run()
    assert run(prefill_chunk=64) == plain
    assert run(speculate=Speculation()) == plain


@pytest.mark.parametrize(
    "prompt, images, message",
    [
        ([0, 5, IMAGE, 6], None, r"prompt 0: position 2 is the image token \(id 505\), but no image is given"),
        ([0, 5], [[(93, 51)]], "prompt 0: no image tokens are left for 93 x 51"),
        ([0, *[IMAGE] * 9], [[(93, 51)]], "prompt 0: 9 image tokens at position 1, but 93 x 51 takes a span of 10"),
        ([0, 5], [[], []], "images: expected a list for each of 1 prompts, got 2"),
    ],
)
def test_refused_before_any_work(prompt, images, message, monkeypatch):
    monkeypatch.setattr(type(seeing_model()), "init_cache", lambda *_, **__: pytest.fail("work was begun"))
    if images is not None:
        images = [[picture(*size) for size in own] for own in images]
    with pytest.raises(DSV41Error, match=message):
        generate(seeing_model(), [prompt], images=images, max_new_tokens=2)


def test_images_need_vision():
    ids, images = prompts()
    with pytest.raises(DSV41Error, match="prompt 0: 3 images, but vision is not loaded"):
        generate(dataclasses.replace(seeing_model(), vision=None), ids, images=images, max_new_tokens=2)
