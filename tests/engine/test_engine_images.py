"""Images in the engine: tokens of `generate`, and prefixes that are the same only if the pictures are."""

import functools

import numpy as np
import pytest
from PIL import Image

from dsv41.config import DSV41Error
from dsv41.engine import generate
from dsv41.images import expand_images, prepare_image
from tests.engine.engines import NOTHING, WINDOW, cached, engine, ids, spoil_rings, watch_prefill
from tests.models.cache_rows import same_rows
from tests.models.test_images import IMAGE
from tests.models_for_tests import seeing_model

SPAN = 26  # tokens of a picture of 170 x 150


@functools.cache
def picture(seed: int):
    pixels = np.random.default_rng(seed).integers(0, 256, (150, 170, 3), np.uint8)
    return prepare_image(Image.fromarray(pixels), seeing_model().config.vision_config, source=f"picture {seed}")


def prompt(before: int, after: int, *, seed: int = 0, pictures: int = 1) -> list[int]:
    """Text, pictures that stand beside each other, text."""
    marks = [*ids(before, seed), *[IMAGE] * pictures, *ids(after, seed + 1)]
    return expand_images(marks, [picture(0)] * pictures, image_token_id=IMAGE, bos_token_id=0)


def serve(made, row, images, new: int = 4):
    number = made.add(row, max_new_tokens=new, stop_ids=(), images=images)
    made.run()
    return made.take(number)


@pytest.fixture(scope="module", params=["full", "ced"])
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def made(mode):
    return engine(model=seeing_model(), prefill=mode)


@pytest.mark.slow
def test_tokens_of_generate(made, mode):
    rows = [prompt(50, 60, pictures=2), prompt(3, 2, seed=4), ids(20), [5]]
    images = [[picture(0), picture(1)], [picture(2)], [], []]
    options = {"max_new_tokens": 6, "stop_ids": (), "prefill_chunk": 16, "prefill": mode}
    wanted = generate(seeing_model(), rows, images=images, **options)
    numbers = [made.add(r, max_new_tokens=6, stop_ids=(), images=i) for r, i in zip(rows, images, strict=True)]
    made.run()
    assert [made.take(n).token_ids for n in numbers] == [r.token_ids for r in wanted]


@pytest.mark.slow
def test_another_picture_is_another_prefix(made):
    row = prompt(40, 30, seed=10)
    first = serve(made, row, [picture(0)])
    begin = row.index(IMAGE)
    assert len(row) - begin == SPAN + 30
    other, same = serve(made, row, [picture(1)]), serve(made, row, [picture(0)])
    assert [cached(r) for r in (first, other, same)] == [0, begin - begin % 2, len(row) - 2 + len(row) % 2]
    assert made.leaks() == NOTHING


@pytest.mark.slow
def test_a_hit_does_not_end_inside_a_picture(made):
    """The prompt ends with the picture, of which one token would be left to compute."""
    row = prompt(44, 0, seed=20)
    begin = row.index(IMAGE)
    assert begin > WINDOW and row[-1] == IMAGE
    counts = [cached(serve(made, row, [picture(0)])) for _ in range(2)]
    assert counts == [0, begin - begin % 2]


@pytest.mark.slow
def test_replay_that_begins_inside_a_picture(mode):
    row = prompt(20, 8, seed=30)
    longer = row + ids(15, 31)
    seen = []
    for spoil in (False, True):
        made = engine(model=seeing_model(), prefill=mode)
        serve(made, row, [picture(0)], new=1)
        if spoil:
            spoil_rings(made)
        rows = watch_prefill(made)
        result = serve(made, longer, [picture(0)])
        hit = len(row) - len(row) % 2
        assert cached(result) == hit
        assert longer[hit - WINDOW] == IMAGE
        seen.append((result.token_ids, rows[0]))
    assert seen[0][0] == seen[1][0]
    same_rows(seen[1][1], seen[0][1])


def test_refusals():
    blind = engine(prefill="full")
    with pytest.raises(DSV41Error, match="vision is not loaded"):
        blind.add(prompt(3, 3), max_new_tokens=1, images=[picture(0)])
    with pytest.raises(DSV41Error, match="no image tokens are left"):
        engine(model=seeing_model(), prefill="full").add(ids(9), max_new_tokens=1, images=[picture(0)])
