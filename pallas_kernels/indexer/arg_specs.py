"""Shapes of index scoring at which it is tested, measured, tuned and compiled."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.indexer import ops
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout


def _arrays(
    key: jax.Array,
    *,
    batch: int,
    tokens: int,
    heads: int,
    width: int,
    block_size: int,
    keys: int,
    blocks: int | None,
    ascending: bool,
) -> dict[str, jax.Array]:
    """Random bytes with finite scales; pages in random order; all keys visible, the last token's the most."""
    split = iter(jax.random.split(key, 8))
    bits = functools.partial(jax.random.bits, dtype=jnp.uint8)
    layout = IndexPageLayout(width)
    table = -(-keys // PAGE_ENTRIES)
    pool = bits(next(split), layout.shape(batch * table))
    visible = jnp.broadcast_to(keys - jnp.arange(tokens - 1, -1, -1, dtype=jnp.int32), (batch, tokens))
    arrays = {
        "q_values": bits(next(split), (batch, tokens, heads, width // 2)),
        "q_scales": 120 + bits(next(split), (batch, tokens, heads, width // 32)) % 6,
        "weights": (0.05 * jax.random.normal(next(split), (batch, tokens, heads))).astype(jnp.bfloat16),
        "pool": pool.at[:, layout.value_rows :].set(120 + pool[:, layout.value_rows :] % 6),
        "pages": jax.random.permutation(next(split), batch * table).astype(jnp.int32).reshape(batch, table),
        "visible": jnp.maximum(visible, 0),
    }
    if blocks is not None:
        last = keys // block_size
        chosen = jax.random.randint(next(split), (batch, tokens, blocks), 0, last, jnp.int32)
        arrays["blocks"] = jnp.sort(chosen) if ascending else chosen
    return arrays


def _spec(
    name: str,
    *tags: str,
    batch: int = 1,
    tokens: int = 1,
    heads: int = 32,
    width: int = 128,
    block_size: int = 8,
    keys: int,
    blocks: int | None = None,
    ascending: bool = False,
) -> ArgSpec:
    queries = batch * tokens
    key_bytes = width // 2 + width // 32
    scored = keys if blocks is None else blocks * block_size
    # Blocks of a sequence's queries may coincide: its keys need to be read once.
    read = batch * (keys if blocks is None else min(tokens * scored, keys)) * key_bytes
    written = queries * (keys // block_size if blocks is None else scored) * 4
    return ArgSpec(
        name=name,
        fn=ops.block_maxima if blocks is None else ops.entry_scores,
        make=functools.partial(
            _arrays,
            batch=batch,
            tokens=tokens,
            heads=heads,
            width=width,
            block_size=block_size,
            keys=keys,
            blocks=blocks,
            ascending=ascending,
        ),
        static={"block_size": block_size},
        tags=frozenset(tags),
        bytes=read + written + queries * heads * (key_bytes + 2),
        flops=2 * queries * heads * scored * width,
    )


_TINY = {"heads": 4, "width": 64, "block_size": 4}

SPECS = (
    _spec("maxima_tiny", "ci", batch=3, tokens=5, keys=300, **_TINY),
    _spec("entries_tiny", "ci", batch=3, tokens=5, keys=300, blocks=5, **_TINY),
    _spec("maxima_small", "ci", batch=2, tokens=3, keys=200),
    _spec("entries_small", "ci", batch=2, tokens=3, keys=200, blocks=9),
    _spec("maxima_1x1m", "bench", "tune", "aot", keys=1 << 20),
    _spec("maxima_64x128k", "bench", "tune", "aot", batch=64, keys=128 << 10),
    _spec("maxima_verify_8x128k", "bench", "tune", "aot", batch=8, tokens=6, keys=128 << 10),
    _spec("maxima_prefill_16k", "bench", "tune", "aot", tokens=4096, keys=16 << 10),
    _spec("maxima_prefill_64k", "bench", "tune", "aot", tokens=4096, keys=64 << 10),
    _spec("maxima_prefill_128k", "bench", "tune", "aot", tokens=4096, keys=128 << 10),
    # A candidate pool, in ascending order, and the blocks of a top-k.
    _spec("entries_1x2048", "bench", "tune", "aot", keys=1 << 20, blocks=2048, ascending=True),
    _spec("entries_64x2048", "bench", "tune", "aot", batch=64, keys=128 << 10, blocks=2048, ascending=True),
    _spec("entries_64x512", "bench", "tune", "aot", batch=64, keys=128 << 10, blocks=512),
    _spec("entries_prefill_2048", "bench", "tune", "aot", tokens=4096, keys=128 << 10, blocks=2048, ascending=True),
)
