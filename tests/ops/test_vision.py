"""Arithmetic of the vision tower against plain float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.config import VisionConfig
from dsv41.images import plan_image
from dsv41.models.vision import unshuffle_sources
from dsv41.ops import vision
from pallas_kernels.tiling import map_query_tiles
from tests.models.parity import ulps_bf16

HEADS, WIDTH = 3, 16


def qkv(n: int) -> list[jnp.ndarray]:
    rng = np.random.default_rng(n)
    return [jnp.asarray(rng.normal(size=(n, HEADS, WIDTH)) * s, jnp.bfloat16) for s in (4, 1, 1)]


def reference(q, k, v, count: int) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, k[:count]) * WIDTH**-0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v[:count])


@pytest.mark.parametrize("count", [1, 255, 256, 257, 512])
def test_attention_ignores_padding(count):
    """On this backend, and by each of the two paths that a backend may take."""
    q, k, v = qkv(512)
    found = [
        jax.jit(vision.full_attention)(q, k, v, jnp.int32(count)),
        map_query_tiles(vision.whole_rows(k, v, count), 128, q[None])[0],
        map_query_tiles(vision.by_key_blocks(k, v, count), 128, q[None])[0],
    ]
    for out in found:
        assert out.dtype == jnp.bfloat16
        # Where values cancel, one step of the result is far below what was summed.
        np.testing.assert_allclose(np.asarray(out, np.float64), reference(q, k, v, count), rtol=5e-3, atol=1e-5)


def test_attention_never_holds_all_scores():
    """The largest image of the release, 9,216 patches and 16 heads: all scores would take 5.4 GB."""
    struct = jax.ShapeDtypeStruct((9216, 16, 64), jnp.bfloat16)
    compiled = (
        jax.jit(vision.full_attention).lower(struct, struct, struct, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 512 << 20


def test_rotation_by_halves():
    """Channel i turns with channel i + 8: rows by the first four angles, columns by the others."""
    table = vision.rope_2d(np.array([0, 2, 0, 3]), np.array([0, 0, 5, 1]), 16, 10000)
    x = np.random.default_rng(0).normal(size=(4, 2, 16)).astype(jnp.bfloat16)
    found = np.asarray(vision.rotate_halves(jnp.asarray(x), jnp.asarray(table)))
    np.testing.assert_array_equal(found[0], x[0])
    frequency = 10000.0 ** -(np.arange(4) / 4)
    for n, (row, col) in enumerate([(0, 0), (2, 0), (0, 5), (3, 1)]):
        turn = np.exp(1j * np.concatenate([row * frequency, col * frequency]))
        z = (x[n, :, :8].astype(float) + 1j * x[n, :, 8:].astype(float)) * turn
        expected = np.concatenate([z.real, z.imag], -1).astype(np.float32).astype(jnp.bfloat16)
        assert ulps_bf16(found[n], expected).max() <= 1


def test_gelu_is_the_erf_form():
    x = np.array([-3, -1, -0.5, 0, 0.5, 1, 3], jnp.bfloat16)
    expected = [-0.00404969, -0.15865525, -0.15426877, 0, 0.34573123, 0.84134475, 2.99595031]
    np.testing.assert_array_equal(vision.gelu(jnp.asarray(x)), np.array(expected, np.float32).astype(jnp.bfloat16))


def test_unshuffle():
    """Rows of 3 x 3 patches, beyond the grid nothing; start, newlines and end have none."""
    plan = plan_image(70, 56, VisionConfig(max_image_tokens=40, min_pixels=3136))
    assert (plan.patch_rows, plan.patch_cols, plan.num_tokens) == (4, 5, 8)
    none = [-1] * 9
    np.testing.assert_array_equal(
        unshuffle_sources(plan, 3),
        [
            none,
            [0, 1, 2, 5, 6, 7, 10, 11, 12],
            [3, 4, -1, 8, 9, -1, 13, 14, -1],
            none,
            [15, 16, 17, *[-1] * 6],
            [18, 19, -1, *[-1] * 6],
            none,
            none,
        ],
    )
