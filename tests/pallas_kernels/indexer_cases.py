"""Named arguments of index scoring: random and adversarial, small enough for a CPU."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call; the defaults are those of a tiny model."""

    batch: int = 3
    tokens: int = 2
    heads: int = 4
    width: int = 64
    block_size: int = 4
    table: int = 4  # pages of the page table's line
    blocks: int = 7  # of each query, for entry_scores


RELEASED = Shape(heads=32, width=128, block_size=8)


def random_case(rng: np.random.Generator, shape: Shape = Shape()) -> dict:
    """Arguments by name: pages in shuffled order, some unassigned, odd lengths; unused memory holds NaN codes."""
    s, lead = shape, (shape.batch, shape.tokens)
    layout = IndexPageLayout(s.width)
    visible = rng.integers(0, s.table * PAGE_ENTRIES + 1, lead).astype(np.int32)
    used = -(-visible.max(axis=1) // PAGE_ENTRIES)
    num_pages = s.batch * s.table + 2  # of a size, all cases have equal shapes
    order = iter(rng.permutation(num_pages))
    pages = np.full((s.batch, s.table), -1, np.int32)
    for b in range(s.batch):
        pages[b, : used[b]] = [next(order) for _ in range(used[b])]
    pool = rng.integers(0, 256, layout.shape(num_pages), np.uint8)
    scales = pool[:, layout.value_rows :]
    scales[...] = rng.integers(116, 128, scales.shape)
    pool[sorted(order), :] = 255
    for b in range(s.batch):
        if used[b]:
            lanes = pool[pages[b, used[b] - 1]].reshape(-1, PAGE_ENTRIES)
            lanes[:, visible[b].max() - (used[b] - 1) * PAGE_ENTRIES :] = 255
    blocks = rng.integers(-1, s.table * PAGE_ENTRIES // s.block_size, (*lead, s.blocks)).astype(np.int32)
    return {
        "q_values": jnp.asarray(rng.integers(0, 256, (*lead, s.heads, s.width // 2), np.uint8)),
        "q_scales": jnp.asarray(rng.integers(116, 128, (*lead, s.heads, s.width // 32), np.uint8)),
        "weights": jnp.asarray(rng.normal(size=(*lead, s.heads)) * 0.05, jnp.bfloat16),
        "pool": jnp.asarray(pool),
        "pages": jnp.asarray(pages),
        "visible": jnp.asarray(visible),
        "blocks": jnp.asarray(blocks),
    }


def _changed(**changes: Callable[[np.random.Generator, np.ndarray], np.ndarray]):
    def make(rng: np.random.Generator, shape: Shape = Shape()) -> dict:
        case = random_case(rng, shape)
        for name, change in changes.items():
            case[name] = jnp.asarray(change(rng, np.array(case[name])), case[name].dtype)
        return case

    return make


def _one_outlier(rng: np.random.Generator, scales: np.ndarray) -> np.ndarray:
    """One group of every head outweighs the others by far more than float32 can hold beside it."""
    scales[..., 0] = 190
    return scales


def _zero_first_group(rng: np.random.Generator, pool: np.ndarray) -> np.ndarray:
    """Half of the keys are 0 in the first group, so that there the small groups of `_one_outlier` decide."""
    lanes = pool.reshape(pool.shape[0], -1, PAGE_ENTRIES)
    lanes[:, :16, ::2] = 0
    return pool


def _spread_scales(rng: np.random.Generator, pool: np.ndarray) -> np.ndarray:
    """Groups of a key far apart. Pages end with one row of scales."""
    scales = pool[:, -1]
    scales[...] = np.where(scales == 255, 255, rng.choice([20, 60, 95, 96, 127, 159, 160, 200], scales.shape))
    return pool


CASES: dict[str, Callable[..., dict]] = {
    "random": random_case,
    "nothing_visible": _changed(visible=lambda rng, x: x * 0),
    "one_visible": _changed(visible=lambda rng, x: np.minimum(x, 1)),
    "page_boundaries": _changed(visible=lambda rng, x: np.minimum(x, x // PAGE_ENTRIES * PAGE_ENTRIES)),
    "all_equal": _changed(pool=lambda rng, x: np.where(x == 255, x, 119)),
    "zero_queries": _changed(q_values=lambda rng, x: x & 0x88),
    "negative_weights": _changed(weights=lambda rng, x: -abs(x)),
    "one_outlier": _changed(q_scales=_one_outlier, pool=_zero_first_group),
    "spread_keys": _changed(pool=_spread_scales),
    "nan_query": _changed(q_scales=lambda rng, x: np.where(np.arange(x.shape[1])[:, None, None] == 0, 255, x)),
    "unassigned_pages": _changed(pages=lambda rng, x: np.where(rng.random(x.shape) < 0.4, -1, x)),
    "no_blocks": _changed(blocks=lambda rng, x: x * 0 - 1),
}
