"""A page of global KV as the bytes of one file, from which it can be told whether they are whole and what they are.

All numbers are little-endian:

    magic              8 bytes
    record version     u32
    header bytes       u32    everything before the payload, magic included
    payload bytes      u64
    written            f64    seconds since 1970
    fingerprint        32 bytes
    parent, key        32 bytes each
    tokens, images, arrays: counts, u32 each
    token ids          big-endian i32 each
    images             i32 offset, u32 length, 32 bytes of hash each
    array shapes       u32 number of dimensions, u32 each
    payload            the arrays one after another, uint8
    checksum           sha256 of all before
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct

import numpy as np

from dsv41.config import DSV41Error
from dsv41.kv_store.page_keys import TOKEN_BYTES, PageId, PageImage, make_page

RECORD_VERSION = 1
_MAGIC = b"dsv41kv\n"
_START = struct.Struct("<8sIIQ")
_FIELDS = struct.Struct("<d32s32s32sIII")
_IMAGE = struct.Struct("<iI32s")
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class DamagedRecord(Exception):
    """Bytes are no record that this code may use; the message says why. Never leaves the store."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StoredPage:
    """A page as it comes from the store.

    Attributes:
      page: which.
      arrays: its bytes, uint8, read-only: one array per pool.
      written: when it was stored, seconds since 1970.
    """

    page: PageId
    arrays: tuple[np.ndarray, ...]
    written: float

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def encode_record(page: PageId, arrays: tuple[np.ndarray, ...], *, fingerprint: bytes, written: float) -> bytes:
    """The record of a page whose arrays are uint8."""
    counts = page.count, len(page.images), len(arrays)
    parts = [_FIELDS.pack(written, fingerprint, page.parent, page.key, *counts), page.packed]
    parts += [_IMAGE.pack(*image) for image in page.images]
    parts += [struct.pack(f"<{1 + array.ndim}I", array.ndim, *array.shape) for array in arrays]
    header = b"".join(parts)
    payload = [np.ascontiguousarray(array).data for array in arrays]
    size = sum(array.nbytes for array in arrays)
    body = b"".join([_START.pack(_MAGIC, RECORD_VERSION, _START.size + len(header), size), header, *payload])
    return body + hashlib.sha256(body).digest()


def _check_whole(data: bytes) -> int:
    """Where the payload starts, once version, length and checksum are known to be right."""
    if len(data) < _START.size:
        raise DamagedRecord(f"{len(data)} bytes, too few for a record")
    magic, version, header_bytes, payload_bytes = _START.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedRecord("does not begin like a record")
    if version != RECORD_VERSION:
        raise DamagedRecord(f"record version {version}, expected {RECORD_VERSION}")
    expected = header_bytes + payload_bytes + _CHECKSUM_BYTES
    if len(data) != expected:
        raise DamagedRecord(f"{len(data)} bytes, expected {expected}")
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    if hashlib.sha256(body).digest() != data[-_CHECKSUM_BYTES:]:
        raise DamagedRecord("the checksum does not match")
    return header_bytes


def _read_fields(data: bytes, at: int) -> tuple[tuple, int]:
    written, fingerprint, parent, key, tokens, images, arrays = _FIELDS.unpack_from(data, at)
    at += _FIELDS.size
    packed = data[at : at + TOKEN_BYTES * tokens]
    at += TOKEN_BYTES * tokens
    marks = [PageImage(*_IMAGE.unpack_from(data, at + _IMAGE.size * i)) for i in range(images)]
    at += _IMAGE.size * images
    shapes = []
    for _ in range(arrays):
        (ndim,) = struct.unpack_from("<I", data, at)
        shapes.append(struct.unpack_from(f"<{ndim}I", data, at + 4))
        at += 4 * (1 + ndim)
    return (written, fingerprint, parent, key, packed, marks, shapes), at


def decode_record(data: bytes, *, fingerprint: bytes, key: bytes) -> StoredPage:
    """The page that a record holds.

    Args:
      data: the whole file.
      fingerprint: of the model that wants to read it.
      key: that it was looked up by.

    Raises:
      DamagedRecord: it is torn, altered, of another version or model, or of another page.
    """
    payload_at = _check_whole(data)
    try:
        fields, end = _read_fields(data, _START.size)
    except struct.error as e:
        raise DamagedRecord(f"the header is too short ({e})") from e
    written, found_fingerprint, parent, found_key, packed, marks, shapes = fields
    sizes = [math.prod(shape) for shape in shapes]
    if end != payload_at or sum(sizes) != len(data) - payload_at - _CHECKSUM_BYTES:
        raise DamagedRecord("counts and shapes do not add up to its length")
    if found_fingerprint != fingerprint:
        raise DamagedRecord("of another model, checkpoint or cache format")
    if found_key != key:
        raise DamagedRecord(f"holds page {found_key.hex()[:16]}, which its name does not say")
    try:
        page = make_page(parent, np.frombuffer(packed, ">i4"), marks)
    except DSV41Error as e:
        raise DamagedRecord(f"impossible content ({e})") from e
    if page.key != key:
        raise DamagedRecord("its content does not have its key")
    arrays, at = [], payload_at
    for shape, size in zip(shapes, sizes, strict=True):
        arrays.append(np.frombuffer(data, np.uint8, size, at).reshape(shape))
        at += size
    return StoredPage(page=page, arrays=tuple(arrays), written=written)
