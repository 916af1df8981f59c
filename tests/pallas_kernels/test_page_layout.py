"""Bytes of pages and rings: what is written comes back, and nothing else changes."""

import jax
import numpy as np
import pytest

from pallas_kernels.page_layout import IndexPageLayout, MainPageLayout, WindowLayout, drop_index
from pallas_kernels.quantize import ops as quantize

RNG = np.random.default_rng(0)


def _bytes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("width", [32, 64, 512])
def test_main_pages(width):
    layout = MainPageLayout(width)
    pool = _bytes(*layout.shape(3))
    page, entry = np.array([[0, 2], [1, 2]]), np.array([[0, 127], [5, 0]])
    values, scales = _bytes(2, 2, width // 2), _bytes(2, 2, width // 16)
    after = np.asarray(jax.jit(layout.write)(pool, page, entry, values, scales))
    for actual, expected in zip(jax.jit(layout.gather)(after, page, entry), (values, scales)):
        np.testing.assert_array_equal(actual, expected)
    assert (after != pool).sum() <= values.size + scales.size
    # Linear inside a page: values of entry e at e * C/2, scales behind all values.
    flat = after.reshape(3, -1)
    np.testing.assert_array_equal(flat[2, 127 * width // 2 : 128 * width // 2], values[0, 1])
    first = layout.value_rows * 512
    np.testing.assert_array_equal(flat[1, first + 5 * width // 16 : first + 6 * width // 16], scales[1, 0])


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("block", [1, 4, 8])
def test_index_pages(width, block):
    layout = IndexPageLayout(width)
    pool = _bytes(*layout.shape(3))
    page, entry = np.array([0, 2, 2]), np.array([0, 127, 64])
    values, scales = _bytes(3, width // 2), _bytes(3, width // 32)
    after = jax.jit(layout.write)(pool, page, entry, values, scales)
    whole = jax.jit(layout.read_pages)(after, np.arange(3))
    for part, expected in zip(whole, (values, scales)):
        np.testing.assert_array_equal(np.asarray(part)[page, entry], expected)
    gather_blocks = jax.jit(layout.gather_blocks, static_argnums=3)
    for part, all_of_it in zip(gather_blocks(after, page, entry // block, block), whole):
        np.testing.assert_array_equal(np.asarray(part)[np.arange(3), entry % block], np.asarray(all_of_it)[page, entry])
        assert part.shape[1] == block
    # Transposed: byte j of entry e at row j // 4, subrow j % 4, lane e.
    np.testing.assert_array_equal(np.asarray(after)[2, 1, 2, 127], values[1, 6])


@pytest.mark.parametrize(("width", "length"), [(64, 16), (64, 32), (512, 128), (512, 160)])
def test_window_rings(width, length):
    layout = WindowLayout(width, length)
    rings = _bytes(*layout.shape(2))
    slot, index = np.array([0, 1, 1]), np.array([0, length - 1, 3])
    values, scales = _bytes(3, width), _bytes(3, width // 32)
    after = jax.jit(layout.write)(rings, slot, index, values, scales)
    for part, expected in zip(jax.jit(layout.read)(after, np.arange(2)), (values, scales)):
        np.testing.assert_array_equal(np.asarray(part)[slot, index], expected)
    assert (np.asarray(after) != rings).sum() <= values.size + scales.size


def test_dropped_writes_touch_nothing():
    main, index, window = MainPageLayout(512), IndexPageLayout(128), WindowLayout(512, 128)
    page = drop_index(np.array([-1, 0]), np.array([False, False]), 2)
    entry = np.array([0, 127])
    for layout, shape, (value, scale) in (
        (main, main.shape(2), (256, 32)), (index, index.shape(2), (64, 4)), (window, window.shape(2), (512, 16)),
    ):  # fmt: skip
        pool = _bytes(*shape)
        after = jax.jit(layout.write)(pool, page, entry, _bytes(2, value), _bytes(2, scale))
        np.testing.assert_array_equal(after, pool)


def test_case_c12_packed_record_is_lossless():
    """Quantise, pack, store in a released page, read back: the first dequantised value, -0 and saturation too."""
    x = RNG.normal(size=(128, 512)).astype(np.float32)
    x[0] = 0
    x[1, ::2] = -0.0
    x[2, :16] = 5000  # beyond the largest E4M3 scale
    x[3] *= 1e-4
    x[4] = 0
    x[4, 7] = 9 * 2.0**-9  # a group that moves if it is rounded twice
    values, scales = jax.jit(quantize.quantize_kv_fp4)(x)
    layout, dequantize = MainPageLayout(512), jax.jit(quantize.dequantize_kv_fp4)
    place = np.ones(128, np.int32), np.arange(128, dtype=np.int32)
    pool = jax.jit(layout.write)(np.zeros(layout.shape(2), np.uint8), *place, values, scales)
    stored, first = (
        np.asarray(dequantize(*jax.jit(layout.gather)(pool, *place))),
        np.asarray(dequantize(values, scales)),
    )
    np.testing.assert_array_equal(stored.view(np.uint16), first.view(np.uint16))
    assert float(stored[4, 7]) == 8 * 2.0**-9


@pytest.mark.parametrize("layout", [MainPageLayout, IndexPageLayout, lambda width: WindowLayout(width, 128)])
def test_widths_that_do_not_pack_are_refused(layout):
    with pytest.raises(ValueError, match="powers of two"):
        layout(96)
