"""Shapes of top-k at which it is tested, measured, tuned and compiled."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.arg_spec import ArgSpec
from pallas_kernels.topk import ops


def _scores(key: jax.Array, rows: int, width: int, dtype, with_lengths: bool) -> dict[str, jax.Array]:
    key, length_key = jax.random.split(key)
    arrays = {"scores": jax.random.normal(key, (rows, width), dtype)}
    if with_lengths:
        arrays["lengths"] = jax.random.randint(length_key, (rows,), 0, width + 1, jnp.int32)
    return arrays


def _spec(name: str, rows: int, width: int, k: int, dtype, *tags: str, with_lengths: bool = False) -> ArgSpec:
    return ArgSpec(
        name=name,
        fn=ops.topk,
        make=functools.partial(_scores, rows=rows, width=width, dtype=dtype, with_lengths=with_lengths),
        static={"k": k},
        tags=frozenset(tags),
        bytes=rows * (width * jnp.dtype(dtype).itemsize + 4 * k + 4 * with_lengths),
    )


_F32, _BF16 = jnp.float32, jnp.bfloat16

SPECS = (
    # tiny models: 8 of a row; a candidate pool of 5 blocks
    _spec("tiny_select", 3, 40, 8, _F32, "ci"),
    _spec("tiny_pool", 2, 10, 5, _F32, "ci", with_lengths=True),
    _spec("odd_width", 5, 4107, 33, _BF16, "ci", with_lengths=True),
    _spec("pyramid", 2, 33001, 70, _F32, "ci"),
    # the bars of the comparison with other libraries
    _spec("rows64_16k", 64, 16_384, 512, _F32, "bench", "tune"),
    _spec("rows64_128k", 64, 131_072, 512, _F32, "bench", "tune"),
    _spec("rows64_1m", 64, 1_048_576, 512, _F32, "bench", "tune"),
    _spec("rows1_128k", 1, 131_072, 512, _F32, "bench"),
    _spec("rows1_1m", 1, 1_048_576, 512, _F32, "bench"),
    _spec("rows64_128k_k2048_bf16", 64, 131_072, 2048, _BF16, "bench"),
    _spec("rows4096_16k_bf16", 4096, 16_384, 512, _BF16, "bench", "tune"),
    # decode: blocks of up to 1M entries, then the entries of the kept blocks
    _spec("decode_blocks_b64", 64, 131_072, 2048, _F32, "bench", "aot"),
    _spec("decode_entries_b1", 1, 4096, 512, _F32, "bench"),
    _spec("decode_entries_b64", 64, 4096, 512, _F32, "bench", "tune", "aot"),
    _spec("decode_pool_entries_b64", 64, 16_384, 512, _F32, "bench", "aot"),
    # prefill: thousands of rows
    _spec("prefill_entries", 4096, 4096, 512, _F32, "bench", "tune", "aot"),
    _spec("prefill_pool_entries", 4096, 16_384, 512, _F32, "bench"),
    _spec("prefill_blocks_k2048", 4096, 16_384, 2048, _F32, "bench", "aot"),
)
