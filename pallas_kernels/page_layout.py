"""Byte layout of the packed caches: pages of main KV and index keys, rings of window KV.

Everything is stored in 512-byte rows, uint8 arrays whose last two dimensions are [4, 128]: the form that TPU compilers
keep unpadded, and that is plain linear memory on GPU. A page holds 128 entries. The reads and writes here are the plain
ones for CPU and GPU, where reshaping a pool is free; a TPU would relay it out, and needs kernels on whole rows instead.

| array | shape | an entry |
|---|---|---|
| main KV | [pages, rows, 4, 128] | linear: [128, C/2] E2M1 bytes (half-split), then [128, C/16] E4M3 bytes |
| index keys | [pages, rows, 4, 128] | transposed: byte j at [j // 4, j % 4, entry], then the E8M0 bytes |
| window KV | [slots, rows, 4, 128] | linear: [length, C] E4M3 bytes, then [length, C/32] E8M0 bytes |

Released widths fill the rows exactly (288, 68 and 528 bytes an entry). Narrower models pad the last value row and the
last scale row of a page. Out-of-range page or slot numbers (such as -1 turned into the array's length by `drop_index`)
drop the write.
"""

import dataclasses

import jax
import jax.numpy as jnp

PAGE_ENTRIES = 128
ROW_BYTES = 512
_MAIN_SCALE_GROUP = 16
_E8M0_GROUP = 32


def _rows(num_bytes: int) -> int:
    return -(-num_bytes // ROW_BYTES)


def _check_width(name: str, width: int) -> None:
    if width < 32 or width & (width - 1):
        raise ValueError(f"{name}: the packed cache stores widths that are powers of two from 32 up, got {width}")


def _pack(shape: tuple[int, ...], values: jax.Array, scales: jax.Array, value_rows: int) -> jax.Array:
    """Values, then scales, each padded to whole rows."""
    parts = []
    for part, rows in ((values, value_rows), (scales, shape[1] - value_rows)):
        flat = part.reshape(part.shape[0], -1)
        parts.append(jnp.pad(flat, ((0, 0), (0, rows * ROW_BYTES - flat.shape[1]))))
    return jnp.concatenate(parts, axis=1).reshape(shape)


def drop_index(index: jax.Array, keep: jax.Array, size: int) -> jax.Array:
    """Indices with those not in `keep` moved out of range, so that a scatter with mode='drop' skips them."""
    return jnp.where(keep, index, size)


@dataclasses.dataclass(frozen=True)
class MainPageLayout:
    """Pages of main (compressed) KV: E2M1 values with one E4M3 scale per 16 channels."""

    head_dim: int

    def __post_init__(self):
        _check_width("head_dim", self.head_dim)

    @property
    def value_bytes(self) -> int:
        return self.head_dim // 2

    @property
    def scale_bytes(self) -> int:
        return self.head_dim // _MAIN_SCALE_GROUP

    @property
    def value_rows(self) -> int:
        return _rows(PAGE_ENTRIES * self.value_bytes)

    @property
    def page_rows(self) -> int:
        return self.value_rows + _rows(PAGE_ENTRIES * self.scale_bytes)

    @property
    def entry_bytes(self) -> float:
        """Bytes of memory an entry takes, padding included."""
        return self.page_rows * ROW_BYTES / PAGE_ENTRIES

    def shape(self, num_pages: int) -> tuple[int, ...]:
        return (num_pages, self.page_rows, 4, 128)

    def _views(self, pool: jax.Array) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        first_scale = self.value_rows * ROW_BYTES // self.scale_bytes
        return (pool.shape[0], -1, self.value_bytes), (pool.shape[0], -1, self.scale_bytes), first_scale

    def write(self, pool: jax.Array, page: jax.Array, entry: jax.Array, values: jax.Array, scales: jax.Array):
        """Stores entries, returns the pool. page, entry int32 [...]; values u8 [..., C/2]; scales u8 [..., C/16]."""
        value_view, scale_view, first_scale = self._views(pool)
        linear = pool.reshape(value_view).at[page, entry].set(values, mode="drop")
        linear = linear.reshape(scale_view).at[page, first_scale + entry].set(scales, mode="drop")
        return linear.reshape(pool.shape)

    def gather(self, pool: jax.Array, page: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads entries. page, entry int32 [...] in range -> values uint8 [..., C/2], scales uint8 [..., C/16]."""
        value_view, scale_view, first_scale = self._views(pool)
        return pool.reshape(value_view)[page, entry], pool.reshape(scale_view)[page, first_scale + entry]

    def pack(self, values: jax.Array, scales: jax.Array) -> jax.Array:
        """Whole pages: values uint8 [pages, 128, C/2], scales uint8 [pages, 128, C/16] -> [pages, rows, 4, 128]."""
        return _pack(self.shape(values.shape[0]), values, scales, self.value_rows)


@dataclasses.dataclass(frozen=True)
class IndexPageLayout:
    """Pages of index keys: MXFP4, entries on the lanes so that a key page is already the transposed matmul operand."""

    dim: int

    def __post_init__(self):
        _check_width("index_head_dim", self.dim)

    @property
    def value_bytes(self) -> int:
        return self.dim // 2

    @property
    def scale_bytes(self) -> int:
        return self.dim // _E8M0_GROUP

    @property
    def value_rows(self) -> int:
        return -(-self.value_bytes // 4)

    @property
    def page_rows(self) -> int:
        return self.value_rows + -(-self.scale_bytes // 4)

    @property
    def entry_bytes(self) -> float:
        """Bytes of memory an entry takes, padding included."""
        return self.page_rows * ROW_BYTES / PAGE_ENTRIES

    def shape(self, num_pages: int) -> tuple[int, ...]:
        return (num_pages, self.page_rows, 4, 128)

    def _lanes(self, pool: jax.Array) -> jax.Array:
        """The pool as [pages, byte, entry]."""
        return pool.reshape(pool.shape[0], self.page_rows * 4, PAGE_ENTRIES)

    def _split(self, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., byte, entry] -> values [..., entry, C/2], scales [..., entry, C/32]."""
        rows = jnp.swapaxes(columns, -1, -2)
        first_scale = self.value_rows * 4
        return rows[..., : self.value_bytes], rows[..., first_scale : first_scale + self.scale_bytes]

    def write(self, pool: jax.Array, page: jax.Array, entry: jax.Array, values: jax.Array, scales: jax.Array):
        """Stores keys. page, entry int32 [...]; values uint8 [..., C/2]; scales uint8 [..., C/32]. Returns the pool."""
        lanes = self._lanes(pool)
        lanes = lanes.at[page, : self.value_bytes, entry].set(values, mode="drop")
        first_scale = self.value_rows * 4
        lanes = lanes.at[page, first_scale : first_scale + self.scale_bytes, entry].set(scales, mode="drop")
        return lanes.reshape(pool.shape)

    def read_pages(self, pool: jax.Array, page: jax.Array) -> tuple[jax.Array, jax.Array]:
        """page int32 [...] -> values uint8 [..., 128, C/2], scales uint8 [..., 128, C/32]."""
        return self._split(self._lanes(pool)[page])

    def gather_blocks(
        self, pool: jax.Array, page: jax.Array, block: jax.Array, block_size: int
    ) -> tuple[jax.Array, jax.Array]:
        """Reads runs of `block_size` keys (a divisor of 128).

        page, block int32 [...], block numbered inside its page -> values uint8 [..., block_size, C/2], scales uint8
        [..., block_size, C/32].
        """
        lanes = self._lanes(pool).reshape(pool.shape[0], self.page_rows * 4, -1, block_size)
        return self._split(lanes[page, :, block])


@dataclasses.dataclass(frozen=True)
class WindowLayout:
    """Rings of window KV, one a sequence slot: E4M3 values with one E8M0 scale per 32 channels.

    `length` positions are kept; position p lies at ring index p % length.
    """

    head_dim: int
    length: int

    def __post_init__(self):
        _check_width("head_dim", self.head_dim)

    @property
    def scale_bytes(self) -> int:
        return self.head_dim // _E8M0_GROUP

    @property
    def value_rows(self) -> int:
        return _rows(self.length * self.head_dim)

    @property
    def slot_rows(self) -> int:
        return self.value_rows + _rows(self.length * self.scale_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory a slot takes, padding included."""
        return self.slot_rows * ROW_BYTES

    def shape(self, num_slots: int) -> tuple[int, ...]:
        return (num_slots, self.slot_rows, 4, 128)

    def write(self, rings: jax.Array, slot: jax.Array, index: jax.Array, values: jax.Array, scales: jax.Array):
        """Stores rows. slot, index int32 [...]; values uint8 [..., C]; scales uint8 [..., C/32]. Returns the rings."""
        first_scale = self.value_rows * ROW_BYTES // self.scale_bytes
        linear = rings.reshape(rings.shape[0], -1, self.head_dim).at[slot, index].set(values, mode="drop")
        linear = linear.reshape(rings.shape[0], -1, self.scale_bytes)
        return linear.at[slot, first_scale + index].set(scales, mode="drop").reshape(rings.shape)

    def read(self, rings: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """slot int32 [...] -> whole rings: values uint8 [..., length, C], scales uint8 [..., length, C/32]."""
        linear = rings[slot].reshape(*slot.shape, -1)
        split = self.value_rows * ROW_BYTES
        values = linear[..., : self.length * self.head_dim]
        scales = linear[..., split : split + self.length * self.scale_bytes]
        return (
            values.reshape(*slot.shape, self.length, self.head_dim),
            scales.reshape(*slot.shape, self.length, self.scale_bytes),
        )

    def gather(self, rings: jax.Array, slot: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads rows. slot, index int32 [...] in range -> values uint8 [..., C], scales uint8 [..., C/32]."""
        first_scale = self.value_rows * ROW_BYTES // self.scale_bytes
        values = rings.reshape(rings.shape[0], -1, self.head_dim)[slot, index]
        return values, rings.reshape(rings.shape[0], -1, self.scale_bytes)[slot, first_scale + index]

    def pack(self, values: jax.Array, scales: jax.Array) -> jax.Array:
        """Whole rings: values uint8 [slots, length, C], scales uint8 [slots, length, C/32] -> [slots, rows, 4, 128]."""
        return _pack(self.shape(values.shape[0]), values, scales, self.value_rows)
