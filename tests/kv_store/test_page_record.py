"""The file of a page: what is written is read, and nothing else is."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.kv_store.page_keys import make_page, page_images
from dsv41.kv_store.page_record import DamagedRecord, decode_record, encode_record
from tests.kv_store.rows import ROOT, page_arrays, pages_of, span

PAGE = make_page(ROOT, [5, 7, 9, 9, 9], page_images([span(2, 8)], 0, 5))
DATA = encode_record(PAGE, page_arrays(PAGE), fingerprint=ROOT, written=12.5)


def decode(data, fingerprint=ROOT, key=PAGE.key):
    return decode_record(data, fingerprint=fingerprint, key=key)


def sealed(data):
    """With the checksum that belongs to it."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
    st.booleans(),
    st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=9),
)
def test_a_record_brings_everything_back(ids, image, shapes):
    page = pages_of(ids, [span(0, 50)] if image else [], page_tokens=64)[0]
    arrays = page_arrays(page, [tuple(shape) for shape in shapes])
    stored = decode_record(encode_record(page, arrays, fingerprint=ROOT, written=1e9), fingerprint=ROOT, key=page.key)
    assert (stored.page.key, stored.page.parent, stored.page.images) == (page.key, page.parent, page.images)
    assert stored.page.tokens.tolist() == ids
    assert stored.written == 1e9
    assert len(stored.arrays) == len(arrays)
    for a, b in zip(stored.arrays, arrays):
        np.testing.assert_array_equal(a, b, strict=True)


def test_arrays_need_not_be_contiguous():
    array = np.arange(60, dtype=np.uint8).reshape(6, 10)[::2, ::3]
    data = encode_record(PAGE, (array,), fingerprint=ROOT, written=0)
    np.testing.assert_array_equal(decode(data).arrays[0], array)


def test_no_beginning_of_a_record_passes():
    for size in range(len(DATA)):
        with pytest.raises(DamagedRecord):
            decode(DATA[:size])


def test_no_flipped_bit_passes():
    for bit in range(8 * len(DATA)):
        data = bytearray(DATA)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecord):
            decode(bytes(data))


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_foreign_bytes_are_no_record(data):
    for attempt in (data, DATA[:8] + data, DATA[:12] + data, sealed(DATA[:24] + data + bytes(32))):
        with pytest.raises(DamagedRecord):
            decode(attempt)


def test_each_kind_of_damage_is_named():
    later = struct.pack("<8sI", DATA[:8], 2) + DATA[12:]
    many = bytearray(DATA)
    struct.pack_into("<I", many, 24 + 8 + 96, 10_000)
    other_count = bytearray(DATA)
    struct.pack_into("<I", other_count, 24 + 8 + 96, 4)
    tokens = bytearray(DATA)
    struct.pack_into(">i", tokens, 24 + 8 + 96 + 12, 6)
    negative = bytearray(DATA)
    struct.pack_into(">i", negative, 24 + 8 + 96 + 12, -6)
    cases = [
        (b"", "0 bytes, too few"),
        (b"x" * len(DATA), "does not begin like a record"),
        (later, "record version 2, expected 1"),
        (DATA[:-1], f"{len(DATA) - 1} bytes, expected {len(DATA)}"),
        (DATA + b"\0", f"{len(DATA) + 1} bytes, expected {len(DATA)}"),
        (DATA[:200] + bytes(1) + DATA[201:], "checksum"),
        (sealed(bytes(many)), "header is too short|do not add up"),
        (sealed(bytes(other_count)), "too short|do not add up"),
        (sealed(bytes(tokens)), "its content does not have its key"),
        (sealed(bytes(negative)), "impossible content"),
    ]
    for data, message in cases:
        with pytest.raises(DamagedRecord, match=message):
            decode(data)
    with pytest.raises(DamagedRecord, match="another model"):
        decode(DATA, fingerprint=bytes(32))
    with pytest.raises(DamagedRecord, match="its name does not say"):
        decode(DATA, key=bytes(32))
