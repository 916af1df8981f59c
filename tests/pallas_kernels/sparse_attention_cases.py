"""Named arguments of sparse attention: random and adversarial, small enough for a CPU."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_layout import PAGE_ENTRIES, ROW_BYTES, MainPageLayout, WindowLayout

ARRAYS = ("q", "window", "slot", "window_index", "pool", "selected", "sink", "rope")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call; the defaults are those of a tiny model."""

    batch: int = 3
    tokens: int = 2
    heads: int = 4
    width: int = 64
    window: int = 16
    selected: int = 8
    pages: int = 3
    slots: int = 4
    ring: int = 24
    rope_pairs: int = 8


def random_case(rng: np.random.Generator, shape: Shape = Shape(), absent: float = 0.3) -> dict:
    """Arguments by name, `absent` of the indices -1; each query's indices are distinct where there are enough rows."""
    s, lead = shape, (shape.batch, shape.tokens)
    layout = WindowLayout(s.width, s.ring)

    def pick(count: int, choices: int) -> np.ndarray:
        rows = [rng.choice(choices, count, replace=count > choices) for _ in range(s.batch * s.tokens)]
        index = np.array(rows, np.int32).reshape(*lead, count)
        return np.where(rng.random(index.shape) < absent, -1, index).astype(np.int32)

    pages = MainPageLayout(s.width)
    pool = rng.integers(0, 256, (s.pages, pages.page_rows, 4, 128), np.uint8)
    # E4M3 scales of 2^-4 to 2, E8M0 scales of 2^-9 to 2^-5, no NaN among the E4M3 values.
    pool[:, pages.value_rows :] = rng.integers(24, 64, pool[:, pages.value_rows :].shape)
    rings = rng.integers(0, 256, layout.shape(s.slots), np.uint8)
    rings[(rings & 0x7F) == 0x7F] = 0x55
    rings[:, layout.value_rows :] = rng.integers(118, 122, rings[:, layout.value_rows :].shape)
    angle = rng.uniform(0, 6.28, (*lead, s.rope_pairs))
    return {
        "q": jnp.asarray(rng.normal(size=(*lead, s.heads, s.width)), jnp.bfloat16),
        "window": jnp.asarray(rings),
        "slot": jnp.asarray(
            rng.permutation(s.slots)[: s.batch] if s.batch <= s.slots else rng.integers(0, s.slots, s.batch), jnp.int32
        ),
        "window_index": jnp.asarray(pick(s.window, s.ring)),
        "pool": jnp.asarray(pool) if s.selected else None,
        "selected": jnp.asarray(pick(s.selected, s.pages * PAGE_ENTRIES)) if s.selected else None,
        "sink": jnp.asarray(rng.normal(size=s.heads), jnp.float32),
        "rope": jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], axis=2), jnp.float32),
        "scale": s.width**-0.5,
        "window_layout": layout,
    }


def _replace(**changes) -> Callable[[dict], dict]:
    return lambda args: {**args, **{k: v(args) if callable(v) else v for k, v in changes.items()}}


def _poison(args: dict) -> dict:
    """Every row that no index names filled with NaN codes and NaN scales."""
    width = args["q"].shape[-1]
    pages, layout = MainPageLayout(width), args["window_layout"]
    pool, rings = np.array(args["pool"]), np.array(args["window"])
    used = np.unique(np.asarray(args["selected"]))
    keep = np.zeros(pool.shape[0] * PAGE_ENTRIES, bool)
    keep[used[used >= 0]] = True
    values = pool[:, : pages.value_rows].reshape(pool.shape[0], -1)[:, : PAGE_ENTRIES * pages.value_bytes]
    scales = pool[:, pages.value_rows :].reshape(pool.shape[0], -1)[:, : PAGE_ENTRIES * pages.scale_bytes]
    keep = keep.reshape(pool.shape[0], PAGE_ENTRIES, 1)
    clean = np.full(pool.shape, 0x7F, np.uint8).reshape(pool.shape[0], -1)
    split = pages.value_rows * ROW_BYTES
    clean[:, : values.shape[1]] = np.where(keep, values.reshape(*keep.shape[:2], -1), 0xFF).reshape(values.shape)
    clean[:, split : split + scales.shape[1]] = np.where(keep, scales.reshape(*keep.shape[:2], -1), 0x7F).reshape(
        scales.shape
    )
    named = np.zeros((rings.shape[0], layout.length), bool)
    for slot, index in zip(np.asarray(args["slot"]), np.asarray(args["window_index"]), strict=True):
        named[slot, index[index >= 0]] = True
    linear = rings.reshape(rings.shape[0], -1)
    dirty = np.full(linear.shape, 0xFF, np.uint8)
    for at, size in ((0, width), (layout.value_rows * ROW_BYTES, layout.scale_bytes)):
        part = linear[:, at : at + layout.length * size].reshape(*named.shape, size)
        dirty[:, at : at + layout.length * size] = np.where(named[..., None], part, 0xFF).reshape(linear.shape[0], -1)
    return {**args, "pool": jnp.asarray(clean.reshape(pool.shape)), "window": jnp.asarray(dirty.reshape(rings.shape))}


def _scale_bytes(pool_byte: int, window_byte: int) -> Callable[[dict], dict]:
    """Every scale of the pool and of the rings set to one byte."""

    def change(args: dict) -> dict:
        pool, window = np.array(args["pool"]), np.array(args["window"])
        pool[:, MainPageLayout(args["q"].shape[-1]).value_rows :] = pool_byte
        window[:, args["window_layout"].value_rows :] = window_byte
        return {**args, "pool": jnp.asarray(pool), "window": jnp.asarray(window)}

    return change


def _outlier(args: dict) -> dict:
    """One ring with scales of 2^100: its logits swamp everything."""
    window = np.array(args["window"])
    window[np.asarray(args["slot"])[0], args["window_layout"].value_rows :] = 227
    return {**args, "window": jnp.asarray(window)}


def _nothing(args: dict) -> dict:
    """The first query sees nothing, the second only its window, the third only one selected entry."""
    window, selected = np.array(args["window_index"]), np.array(args["selected"])
    flat_window, flat_selected = window.reshape(-1, window.shape[-1]), selected.reshape(-1, selected.shape[-1])
    flat_window[[0, 2]] = -1
    flat_selected[[0, 1, 2]] = -1
    flat_selected[2, -1] = 77
    return {**args, "window_index": jnp.asarray(window), "selected": jnp.asarray(selected)}


_TINY = Shape()
_ODD = Shape(batch=2, tokens=3, heads=5, window=37, selected=135, ring=53)
_RELEASED = Shape(batch=1, tokens=2, heads=64, width=512, window=128, selected=512, pages=5, ring=134, rope_pairs=32)


def _same(args: dict) -> dict:
    return args


# name -> (shape, share of absent indices, change of the random arguments)
CASES: dict[str, tuple[Shape, float, Callable[[dict], dict]]] = {
    "tiny": (_TINY, 0.0, _same),
    "tiny_absent": (_TINY, 0.5, _same),
    "tiny_window_only": (dataclasses.replace(_TINY, selected=0), 0.2, _same),
    "no_window": (dataclasses.replace(_TINY, window=0), 0.2, _same),
    "no_rope": (_TINY, 0.2, _replace(rope=None)),
    "odd": (_ODD, 0.3, _same),
    "width_128": (dataclasses.replace(_ODD, width=128, rope_pairs=16), 0.3, _same),
    "width_256": (dataclasses.replace(_ODD, width=256, rope_pairs=32), 0.3, _same),
    "released": (_RELEASED, 0.0, _same),
    "released_absent": (_RELEASED, 0.4, _same),
    "mostly_absent": (dataclasses.replace(_ODD, selected=300), 0.97, _same),
    "no_sequences": (dataclasses.replace(_TINY, batch=0), 0.0, _same),
    "one_of_everything": (Shape(batch=1, tokens=1, heads=1, window=1, selected=1), 0.0, _same),
    "nothing_visible": (_ODD, 0.2, _nothing),
    "tiny_nothing_visible": (_TINY, 0.2, _nothing),
    "poisoned": (_ODD, 0.4, _poison),
    "released_poisoned": (_RELEASED, 0.4, _poison),
    "largest_scales": (_TINY, 0.1, _scale_bytes(0x7E, 142)),
    "smallest_scales": (_TINY, 0.1, _scale_bytes(0x01, 105)),
    "zero_scales": (_TINY, 0.1, _scale_bytes(0x00, 105)),
    "outlier": (_TINY, 0.1, _outlier),
    "all_equal_logits": (_ODD, 0.2, lambda args: {**args, "q": jnp.asarray(np.zeros_like(args["q"]))}),
    "huge_sink": (_TINY, 0.1, lambda args: {**args, "sink": jnp.asarray(np.full_like(args["sink"], 60.0))}),
    "page_ends": (
        _TINY,
        0.0,
        lambda args: {
            **args,
            "selected": jnp.asarray(
                np.broadcast_to(np.int32([0, 127, 128, 255, 256, 383, -1, 383]), args["selected"].shape)
            ),
        },
    ),
}


def make(name: str, seed: int) -> dict:
    """Arguments of `ops.sparse_attention` by name for a case, fresh for each seed."""
    shape, absent, change = CASES[name]
    return change(random_case(np.random.default_rng(seed), shape, absent))
