"""Shapes of sparse attention at which it is tested, measured, tuned and compiled."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.page_layout import PAGE_ENTRIES, MainPageLayout, WindowLayout
from pallas_kernels.sparse_attention import ops


def _arrays(
    key: jax.Array,
    *,
    batch: int,
    tokens: int,
    heads: int,
    width: int,
    window: int,
    selected: int,
    entries: int,
    layout: WindowLayout,
) -> dict[str, jax.Array | None]:
    """Random bytes with finite scales; indices anywhere in ring and pool."""
    keys = iter(jax.random.split(key, 8))
    bits = functools.partial(jax.random.bits, dtype=jnp.uint8)
    pages = MainPageLayout(width)
    rings = bits(next(keys), layout.shape(batch))
    rings = jnp.where((rings & 0x7F) == 0x7F, jnp.uint8(0x55), rings)
    rings = rings.at[:, layout.value_rows :].set(118 + rings[:, layout.value_rows :] % 4)
    angle = jax.random.uniform(next(keys), (batch, tokens, width // 16), maxval=6.28)
    arrays = {
        "q": jax.random.normal(next(keys), (batch, tokens, heads, width), jnp.bfloat16),
        "window": rings,
        "slot": jnp.arange(batch, dtype=jnp.int32),
        "window_index": jax.random.randint(next(keys), (batch, tokens, window), 0, layout.length, jnp.int32),
        "pool": None,
        "selected": None,
        "sink": jax.random.normal(next(keys), (heads,)),
        "rope": jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=2),
    }
    if selected:
        pool = bits(next(keys), pages.shape(-(-entries // PAGE_ENTRIES)))
        arrays["pool"] = pool.at[:, pages.value_rows :].set(24 + pool[:, pages.value_rows :] % 40)
        arrays["selected"] = jax.random.randint(next(keys), (batch, tokens, selected), 0, entries, jnp.int32)
    return arrays


def _spec(
    name: str,
    *tags: str,
    batch: int,
    tokens: int = 1,
    heads: int = 64,
    width: int = 512,
    window: int = 128,
    selected: int = 512,
    entries: int = 1 << 20,
    ring: int | None = None,
) -> ArgSpec:
    layout = WindowLayout(width, ring or window + 6)
    queries = batch * tokens
    # Rows shared by queries of one sequence (the window) or of the pool (a small one) need to be read once.
    pool_rows = min(queries * selected, entries) * (width // 2 + width // 16)
    ring_rows = batch * min(tokens * window, layout.length) * (width + width // 32)
    return ArgSpec(
        name=name,
        fn=ops.sparse_attention,
        make=functools.partial(
            _arrays,
            batch=batch,
            tokens=tokens,
            heads=heads,
            width=width,
            window=window,
            selected=selected,
            entries=entries,
            layout=layout,
        ),
        static={"scale": width**-0.5, "window_layout": layout},
        tags=frozenset(tags),
        bytes=queries * (2 * heads * width * 2 + 4 * (window + selected) + width // 2) + pool_rows + ring_rows,
        flops=4 * queries * heads * width * (window + selected),
    )


_TINY = {"heads": 4, "width": 64, "window": 16, "selected": 8, "entries": 400}

SPECS = (
    _spec("tiny_decode", "ci", batch=2, **_TINY),
    _spec("tiny_verify", "ci", batch=1, tokens=3, **_TINY),
    _spec("tiny_window_only", "ci", batch=2, **(_TINY | {"selected": 0})),
    # one new token a sequence
    *(_spec(f"decode_b{b}", "bench", "tune", *(["aot"] if b == 64 else []), batch=b) for b in (1, 8, 64, 128, 256)),
    # one committed token and five drafts a sequence
    *(
        _spec(f"verify6_b{b}", "bench", "tune", *(["aot"] if b == 64 else []), batch=b, tokens=6)
        for b in (1, 8, 64, 128)
    ),
    *(_spec(f"window_b{b}", "bench", "tune", *(["aot"] if b == 64 else []), batch=b, selected=0) for b in (1, 64, 256)),
    *(
        _spec(
            f"prefill4096_{k}k", "bench", *(["aot"] if k == 8 else []), batch=1, tokens=4096, entries=k << 10, ring=4224
        )
        for k in (8, 64, 256)
    ),
)
