"""Rows, pages and bytes for the tests of the store's parts."""

import hashlib

import numpy as np

from dsv41.kv_store import ImageSpan, split_row

ROOT = hashlib.sha256(b"a model").digest()
PAGE = 32


def image_hash(name):
    return hashlib.sha256(name.encode()).hexdigest()


def span(start, length, name="cat"):
    return ImageSpan(start=start, length=length, content_hash=image_hash(name))


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def pages_of(ids, spans=(), page_tokens=PAGE, root=ROOT):
    return split_row(root, ids, page_tokens, spans)


def page_arrays(page, sizes=((3, 4, 8), (5,))):
    """Bytes that only this page has."""
    random = np.random.default_rng(int.from_bytes(page.key[:8], "big"))
    return tuple(random.integers(0, 256, size, np.uint8) for size in sizes)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now=1_000_000.0):
        self.now = now

    def __call__(self):
        return self.now
