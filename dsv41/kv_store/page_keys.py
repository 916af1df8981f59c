"""What a page of global KV is known by: a chain of hashes over everything that its bytes depend on.

The key of a page covers the key of the page before it, its token ids and the images whose spans touch it; the first
page's parent is the fingerprint of model, checkpoint and cache format. Equal keys therefore mean equal prefixes. All
positions of an image carry one token id, so that without the images' content two pictures would look alike.

A page holds `page_tokens` tokens; the last one of a row may hold fewer and is then called a tail.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsv41.cache import FORMAT_VERSION, CacheLayout
from dsv41.config import DSV41Error, ModelConfig, config_to_dict

KEY_BYTES = 32
TOKEN_BYTES = 4
# Big-endian, so that packed rows compare as bytes in the order of their tokens.
_PACKED = np.dtype(">i4")
_IMAGE_BIT = 1 << 31


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """The positions of a row that stand for one image.

    Attributes:
      start, length: tokens [start, start + length) of the row.
      content_hash: sha256 in hexadecimal of what the model sees, such as `PreparedImage.content_hash`.

    Raises:
      DSV41Error: the span is empty or begins before the row, or the hash is no sha256.
    """

    start: int
    length: int
    content_hash: str

    def __post_init__(self):
        if self.start < 0 or self.length < 1:
            raise DSV41Error(f"image span: expected a start >= 0 and a length >= 1, got {self.start}, {self.length}")
        try:
            good = len(bytes.fromhex(self.content_hash)) == KEY_BYTES
        except ValueError:
            good = False
        if not good:
            raise DSV41Error(f"image span at {self.start}: content_hash: expected 64 hexadecimal digits")

    @property
    def end(self) -> int:
        return self.start + self.length


class PageImage(NamedTuple):
    """An image that touches a page: where its span starts as seen from the page's first token (negative if on an
    earlier page), the length of the whole span, and the 32-byte hash of its content."""

    offset: int
    length: int
    digest: bytes


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PageId:
    """A page of a row and what its key is made of. `make_page` and `split_row` make them.

    Attributes:
      key: 32 bytes, the hash of all that follows.
      parent: 32 bytes, key of the page before it; of a first page the fingerprint.
      packed: token ids as big-endian int32.
      images: those whose spans touch the page, in order.
    """

    key: bytes
    parent: bytes
    packed: bytes
    images: tuple[PageImage, ...]

    @property
    def count(self) -> int:
        """Tokens in the page."""
        return len(self.packed) // TOKEN_BYTES

    @property
    def tokens(self) -> np.ndarray:
        """int32 [count] token ids."""
        return np.frombuffer(self.packed, _PACKED).astype(np.int32)

    @functools.cached_property
    def identity(self) -> bytes:
        """Four bytes a position that differ where the pages differ: `packed`, but with bits of the image's content at
        the positions of an image. Good for sorting; `agreement` is what decides."""
        if not self.images:
            return self.packed
        row = np.frombuffer(self.packed, _PACKED).astype(np.uint32)
        for image in self.images:
            begin, end = max(image.offset, 0), min(image.offset + image.length, self.count)
            inside = np.arange(begin - image.offset, end - image.offset, dtype=np.uint64)
            seed = int.from_bytes(image.digest[:4], "big")
            row[begin:end] = ((inside + np.uint64(seed)) % _IMAGE_BIT + _IMAGE_BIT).astype(np.uint32)
        return row.astype(">u4").tobytes()

    def head(self, count: int) -> PageId:
        """The page that holds only the first `count` >= 1 tokens."""
        if count >= self.count:
            return self
        return _page(self.parent, self.packed[: TOKEN_BYTES * count], tuple(i for i in self.images if i.offset < count))


def _page(parent: bytes, packed: bytes, images: tuple[PageImage, ...]) -> PageId:
    # Counts and fixed widths: no two contents are the same bytes.
    digest = hashlib.sha256(parent)
    digest.update(struct.pack("<II", len(packed) // TOKEN_BYTES, len(images)))
    digest.update(packed)
    for image in images:
        digest.update(struct.pack("<iI", image.offset, image.length) + image.digest)
    return PageId(key=digest.digest(), parent=parent, packed=packed, images=images)


def _pack(ids: Sequence[int] | np.ndarray) -> bytes:
    row = np.asarray(ids)
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise DSV41Error(f"page keys: expected a row of token ids, got {row.dtype} {row.shape}")
    if row.size and (row.min() < 0 or row.max() >= _IMAGE_BIT):
        raise DSV41Error(f"page keys: token ids lie in [0, 2^31), got {row.min()} to {row.max()}")
    return row.astype(_PACKED).tobytes()


def make_page(parent: bytes, tokens: Sequence[int] | np.ndarray, images: Sequence[PageImage] = ()) -> PageId:
    """A page from its content.

    Args:
      parent: 32 bytes, key of the page before it or the fingerprint.
      tokens: the page's ids, at least one.
      images: from `page_images`.

    Raises:
      DSV41Error: the parent is no key, there are no tokens, an id is negative, or an image does not touch the page.
    """
    if len(parent) != KEY_BYTES:
        raise DSV41Error(f"page keys: parent: expected {KEY_BYTES} bytes, got {len(parent)}")
    packed = _pack(tokens)
    if not packed:
        raise DSV41Error("page keys: a page needs at least one token")
    for image in images:
        if image.offset >= len(packed) // TOKEN_BYTES or image.offset + image.length <= 0 or image.length < 1:
            raise DSV41Error(f"page keys: an image of {image.length} tokens at {image.offset} does not touch the page")
        if len(image.digest) != KEY_BYTES:
            raise DSV41Error(f"page keys: image digest: expected {KEY_BYTES} bytes, got {len(image.digest)}")
    return _page(parent, packed, tuple(PageImage(*image) for image in images))


def check_spans(spans: Sequence[ImageSpan]) -> None:
    """Raises DSV41Error unless the spans ascend and do not overlap."""
    for before, after in itertools.pairwise(spans):
        if after.start < before.end:
            raise DSV41Error(
                f"image spans: the one at {after.start} begins before that at {before.start} ends ({before.end})"
            )


def page_images(spans: Sequence[ImageSpan], first: int, count: int) -> tuple[PageImage, ...]:
    """The images that touch tokens [first, first + count) of a row with those spans (ascending)."""
    begin = bisect.bisect_right(spans, first, key=lambda span: span.end)
    touching = itertools.takewhile(lambda span: span.start < first + count, spans[begin:])
    return tuple(PageImage(s.start - first, s.length, bytes.fromhex(s.content_hash)) for s in touching)


def split_row(
    root: bytes,
    ids: Sequence[int] | np.ndarray,
    page_tokens: int,
    spans: Sequence[ImageSpan] = (),
    *,
    known: Sequence[PageId] = (),
) -> list[PageId]:
    """The pages of a token row in order; the last one is a tail if the row ends inside a page.

    Args:
      root: parent of the first page, from `cache_fingerprint`.
      ids: the row. Positions of images carry the image token id.
      page_tokens: tokens of a full page.
      spans: of the row's images, ascending; the last may reach beyond the row.
      known: what an earlier call gave for a shorter form of the same row; its full pages are not hashed again.

    Raises:
      DSV41Error: an id is negative, spans overlap, or the root is no key.
    """
    check_spans(spans)
    pages = [page for page in known if page.count == page_tokens][: len(ids) // page_tokens]
    parent = pages[-1].key if pages else root
    for first in range(len(pages) * page_tokens, len(ids), page_tokens):
        tokens = ids[first : first + page_tokens]
        page = make_page(parent, tokens, page_images(spans, first, len(tokens)))
        pages.append(page)
        parent = page.key
    return pages


def snapshot_key(pages: Sequence[PageId], length: int, page_tokens: int) -> tuple[bytes, int]:
    """What window state after the first `length` tokens of a row is known by: the chain key there, and the length.

    Args:
      pages: of the row, from `split_row`; they hold at least `length` tokens.
      length: tokens, at least 1.
      page_tokens: tokens of a full page.

    Raises:
      DSV41Error: the pages hold fewer tokens, or length is not positive.
    """
    number = (length - 1) // page_tokens
    rest = length - number * page_tokens
    if length < 1 or number >= len(pages) or pages[number].count < rest:
        raise DSV41Error(f"snapshot_key: expected a length between 1 and the row's, got {length}")
    return pages[number].head(rest).key, length


def agreement(a: PageId, b: PageId) -> int:
    """Leading tokens at which two pages of one parent are the same, images included."""
    n = min(a.count, b.count)
    differ = np.flatnonzero(np.frombuffer(a.packed, _PACKED, n) != np.frombuffer(b.packed, _PACKED, n))
    if len(differ):
        n = int(differ[0])
    if a.images != b.images:
        n = min([n, *(max(image.offset, 0) for image in {*a.images} ^ {*b.images})])
    return n


def cache_fingerprint(config: ModelConfig, checkpoint: str) -> bytes:
    """32 bytes that differ whenever global KV of the same tokens could: the root of every chain of page keys.

    Covers the model config, the checkpoint and the format of pages. Rings and drafting are not part of it: pages are
    the same with a drafter and without.

    Args:
      config: the model's.
      checkpoint: any text that identifies the weights, adapters included.
    """
    layout = CacheLayout.from_config(config.text_config)
    pages = [[[*layout.main.shape(1)], [*layout.index.shape(1)], layout.pages_per_logical(r), r] for r in layout.ratios]
    fields = [FORMAT_VERSION, layout.page_tokens, pages, checkpoint, config_to_dict(config)]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()
