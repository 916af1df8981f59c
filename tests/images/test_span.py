"""Spans in a row of tokens: expanding marks, and checking rows that are laid out."""

import numpy as np
import pytest

from dsv41.config import DSV41Error, VisionConfig
from dsv41.images import PreparedImage, expand_images, place_spans, plan_image, span_types

CONFIG = VisionConfig(max_image_tokens=40, min_pixels=3136)
IMAGE, BOS = 505, 0


def image(name: str, width: int, height: int) -> PreparedImage:
    return PreparedImage(
        source=name, plan=plan_image(width, height, CONFIG), patches=np.zeros(0), content_hash=f"{width} {height}"
    )


A, B = image("a.png", 93, 51), image("b.png", 42, 84)  # spans of 10 and 6


def expand(ids, images):
    return expand_images(ids, images, image_token_id=IMAGE, bos_token_id=BOS)


def place(ids, images):
    return place_spans(ids, images, image_token_id=IMAGE, what="row 3")


def test_types():
    assert [t.tolist() for t in (span_types(A.plan), span_types(B.plan))] == [
        [0, 1, 1, 1, 2, 1, 1, 1, 2, 3],
        [0, 1, 2, 1, 2, 3],
    ]


def test_marks_become_spans_in_order():
    assert expand([0, 7, IMAGE, 8, IMAGE, 9], [A, B]) == [0, 7, *[IMAGE] * 10, 8, *[IMAGE] * 6, 9]
    assert expand([IMAGE, IMAGE], [B, A]) == [IMAGE] * 16
    assert expand([0, 7], []) == [0, 7]


def test_without_marks_images_come_first_but_behind_a_bos():
    assert expand([0, 7], [A, B]) == [0, *[IMAGE] * 16, 7]
    assert expand([7, 0], [B]) == [*[IMAGE] * 6, 7, 0]
    assert expand([], [B]) == [IMAGE] * 6


@pytest.mark.parametrize("ids, images", [([IMAGE], [A, B]), ([IMAGE, 5, IMAGE], [A]), ([0, IMAGE], [])])
def test_counts_must_match(ids, images):
    with pytest.raises(DSV41Error, match=f"{ids.count(IMAGE)} image tokens .* places for {len(images)} images"):
        expand(ids, images)


def test_positions():
    ids = expand([0, 7, IMAGE, IMAGE, 8, IMAGE], [A, B, A])
    np.testing.assert_array_equal(place(ids, [A, B, A]), [*range(2, 18), *range(19, 29)])
    assert place([1, 2], []).tolist() == []


@pytest.mark.parametrize(
    "ids, images, message",
    [
        ([1, *[IMAGE] * 9], [A], "row 3: 9 image tokens at position 1, but a.png takes a span of 10 .2 rows of 3"),
        ([1, *[IMAGE] * 11], [A], "row 3: 1 image tokens at position 11, but no image is left"),
        ([*[IMAGE] * 16], [A], "row 3: 6 image tokens at position 10, but no image is left"),
        ([*[IMAGE] * 12], [A, B], "row 3: 2 image tokens at position 10, but b.png takes a span of 6"),
        ([*[IMAGE] * 10, 1, *[IMAGE] * 10], [A, B], "row 3: 4 image tokens at position 17, but no image is left"),
        ([*[IMAGE] * 10, 1], [A, B], "row 3: no image tokens are left for b.png"),
        ([1], [A], "row 3: no image tokens are left for a.png"),
    ],
)
def test_spans_that_do_not_fit(ids, images, message):
    with pytest.raises(DSV41Error, match=message):
        place(ids, images)
