"""The span of token positions that stands for an image (architecture.md section 7).

Every position of a span carries the image token id; which of start, patch, newline and end it is follows from the
image's plan.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from dsv41.config import DSV41Error
from dsv41.images.plan import ImagePlan
from dsv41.images.read import PreparedImage


class SpanType(enum.IntEnum):
    """What a position of a span holds."""

    START = 0
    PATCH = 1
    NEWLINE = 2
    END = 3


def span_types(plan: ImagePlan) -> np.ndarray:
    """int32 [num_tokens] of `SpanType`: start, then each row of patches and its newline, then end."""
    row = [SpanType.PATCH] * plan.token_cols + [SpanType.NEWLINE]
    return np.array([SpanType.START, *row * plan.token_rows, SpanType.END], np.int32)


def expand_images(
    ids: Sequence[int], images: Sequence[PreparedImage], *, image_token_id: int, bos_token_id: int
) -> list[int]:
    """The token row in which every image has its whole span.

    Args:
      ids: token ids in which each image token is one mark, where the next image goes. Without any mark the images come
        before all else, but behind a leading BOS.
      images: in the order of the marks.
      image_token_id, bos_token_id: of the config.

    Raises:
      DSV41Error: there are marks, but not as many as images.
    """
    ids = [int(i) for i in ids]
    marks = ids.count(image_token_id)
    if marks == 0:
        first = 1 if ids[:1] == [bos_token_id] else 0
        ids = ids[:first] + [image_token_id] * len(images) + ids[first:]
    elif marks != len(images):
        raise DSV41Error(f"prompt: {marks} image tokens (id {image_token_id}) mark places for {len(images)} images")
    waiting = iter(images)
    out: list[int] = []
    for i in ids:
        out += [i] * next(waiting).plan.num_tokens if i == image_token_id else [i]
    return out


def place_spans(
    ids: Sequence[int] | np.ndarray, images: Sequence[PreparedImage], *, image_token_id: int, what: str = "tokens"
) -> np.ndarray:
    """Positions int64 [N], ascending, of the image tokens of a row whose spans are already laid out.

    Args:
      ids: the row. Spans of images next to each other form one run of image tokens.
      images: in the order of their spans.
      image_token_id: of the config.
      what: names the row in messages.

    Raises:
      DSV41Error: the runs of image tokens are not the spans of `images`; the message names the position and the image.
    """
    positions = np.flatnonzero(np.asarray(ids) == image_token_id)
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if len(positions) else []
    waiting = list(images)
    for run in runs:
        left = len(run)
        while left:
            begin = int(run[-1]) + 1 - left
            if not waiting:
                raise DSV41Error(f"{what}: {left} image tokens at position {begin}, but no image is left for them")
            image = waiting.pop(0)
            need = image.plan.num_tokens
            if need > left:
                raise DSV41Error(
                    f"{what}: {left} image tokens at position {begin}, but {image.source} takes a span of {need} "
                    f"({image.plan.token_rows} rows of {image.plan.token_cols} and a newline, start and end)"
                )
            left -= need
    if waiting:
        raise DSV41Error(f"{what}: no image tokens are left for {waiting[0].source}")
    return positions
