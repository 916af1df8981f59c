"""Shapes of quantisation and of the fused writes at which they are tested, measured, tuned and compiled."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.page_layout import PAGE_ENTRIES, IndexPageLayout, MainPageLayout, WindowLayout
from pallas_kernels.quantize import ops, ref

# Stored bytes a channel, values and scales.
_STORED = {"fp8": 1 + 1 / 32, "mxfp4": 1 / 2 + 1 / 32, "kv_fp4": 1 / 2 + 1 / 16}


def _rows(key: jax.Array, rows: int, channels: int) -> dict[str, jax.Array]:
    return {"x": jax.random.normal(key, (rows, channels), jnp.bfloat16)}


def _stored(key: jax.Array, quantize: Callable, names: tuple[str, str], rows: int, channels: int):
    made = quantize(jax.random.normal(key, (rows, channels), jnp.bfloat16))
    return dict(zip(names, made, strict=True))


def _plain(name: str, rows: int, channels: int, *tags: str) -> list[ArgSpec]:
    """Quantising and dequantising in each format."""
    specs = []
    for format, stored in _STORED.items():
        names = ("values" if format == "fp8" else "packed", "scales")
        stored_fn = functools.partial(
            _stored, quantize=getattr(ref, f"quantize_{format}"), names=names, rows=rows, channels=channels
        )
        makes = {"quantize": functools.partial(_rows, rows=rows, channels=channels), "dequantize": stored_fn}
        specs += [
            ArgSpec(
                name=f"{way}_{format}_{name}",
                fn=getattr(ops, f"{way}_{format}"),
                make=make,
                tags=frozenset(tags),
                bytes=int(rows * channels * (2 + stored)),
            )
            for way, make in makes.items()
        ]
    return specs


def _write_arrays(key: jax.Array, *, op: str, layout, width: int, rope_dim: int, batch: int, rows: int, outer: int):
    """Random rows for random places, all different; a prefill (one sequence) writes neighbouring entries."""
    inner = layout.length if op == "write_window" else PAGE_ENTRIES
    x, pool, gain, angle, place = jax.random.split(key, 5)
    if batch == 1:
        places = jax.random.randint(place, (), 0, outer * inner) + jnp.arange(rows)
    else:
        places = jax.random.permutation(place, outer * inner)[: batch * rows]
    places = (places % (outer * inner)).astype(jnp.int32).reshape(batch, rows)
    angles = jax.random.uniform(angle, (batch, rows, 1, rope_dim // 2), maxval=6.3)
    arrays = {
        "x": jax.random.normal(x, (batch, rows, width), jnp.bfloat16),
        "gain": jax.random.normal(gain, (width,), jnp.bfloat16),
        "rope": jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=2),
        "pool": jax.random.bits(pool, layout.shape(outer), jnp.uint8),
        "outer": places // inner,
        "inner": places % inner,
    }
    names = {
        "write_window": {"pool": "rings", "outer": "slot", "inner": "index"},
        "write_main": {"x": "latent", "outer": "page", "inner": "entry"},
        "write_index": {"x": "key", "outer": "page", "inner": "entry"},
    }[op]
    return {names.get(name, name): a for name, a in arrays.items() if (op, name) != ("write_main", "gain")}


def _writes(
    name: str, batch: int, rows: int, *tags: str, width: int = 512, index_width: int = 128, rope_dim: int = 64,
    length: int = 160, outer: int = 64,
) -> list[ArgSpec]:  # fmt: skip
    layouts = {
        "write_window": (WindowLayout(width, length), width, _STORED["fp8"]),
        "write_main": (MainPageLayout(width), width, _STORED["kv_fp4"]),
        "write_index": (IndexPageLayout(index_width), index_width, _STORED["mxfp4"]),
    }
    return [
        ArgSpec(
            name=f"{op}_{name}",
            fn=getattr(ops, op),
            make=functools.partial(
                _write_arrays, op=op, layout=layout, width=channels, rope_dim=rope_dim, batch=batch, rows=rows,
                outer=outer,
            ),
            static={"layout": layout} if op == "write_main" else {"layout": layout, "eps": 1e-6},
            tags=frozenset(tags),
            donated="rings" if op == "write_window" else "pool",
            bytes=int(batch * rows * (channels * (2 + stored) + rope_dim * 4 + 8)),
        )
        for op, (layout, channels, stored) in layouts.items()
    ]  # fmt: skip


SPECS = (
    *_plain("tiny", 5, 64, "ci"),
    *_plain("odd", 37, 96, "ci"),
    *_plain("t64", 64, 5120, "bench"),
    *_plain("t4096", 4096, 5120, "bench", "aot"),
    *_plain("t32768", 32768, 5120, "bench"),
    *_writes("tiny", 3, 2, "ci", width=64, index_width=64, rope_dim=16, length=16, outer=3),
    *_writes("b1", 1, 1, "bench"),
    *_writes("b64", 64, 1, "bench", "aot"),
    *_writes("b256", 256, 1, "bench"),
    *_writes("t4096", 1, 4096, "bench", "aot"),
)
