"""Kernels of one compiled step, layer by layer, from the profiler's trace."""

from __future__ import annotations

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import KVCache
from dsv41.config import DSV41Error
from dsv41.models import Model
from dsv41.models.sharded import compiled_forward
from pallas_kernels.dispatch import backend
from pallas_kernels.measure import KernelEvent, trace_kernels

_LAYER = re.compile(r"/layer_(\d+)/(?:(attention|moe|engram)/)?([a-z_]*)")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class LayerKernels:
    """What one layer (None: embedding, head and all between) launched in a step.

    Attributes:
      layer: its number.
      launches: kernels a step.
      us: their device time in microseconds.
      parts: launches and microseconds by part of the layer, such as "attention/attend".
    """

    layer: int | None
    launches: float
    us: float
    parts: dict[str, tuple[float, float]]


def profile_step(model: Model, *, rows: int, context: int, tokens: int = 1, steps: int = 5) -> list[LayerKernels]:
    """Runs a step of `rows` sequences, `tokens` new tokens each behind `context` cached ones, and counts its kernels.

    The pages hold random bytes: what the step says means nothing.

    Raises:
      DSV41Error: the backend's trace lists no kernels (all but NVIDIA GPUs), or the cache cannot hold the context.
    """
    cache = model.init_cache(rows, context + tokens)
    if backend() != "gpu":
        raise DSV41Error(f"the trace of {jax.devices()[0].device_kind} lists no kernels; profile on an NVIDIA GPU")
    cache = _random_pages(cache)
    look_back = max(model.config.text_config.engram_max_ngram_size, 1)
    new = np.arange(rows * tokens).reshape(rows, tokens) % 97 + 3
    batch = model.make_batch(new, [np.arange(look_back) % 97 + 3] * rows)
    batch = dataclasses.replace(batch, start=np.full_like(batch.start, context))
    batch = jax.tree.map(jnp.asarray, batch)
    static = {"config": model.config, "logits": "last", "capture": (), "tail": None}
    compiled = compiled_forward().lower(model.params, batch, cache, None, **static).compile()
    scopes = dict(_INSTRUCTION.findall(compiled.as_text()))
    carried = [cache]

    def step():
        logits, carried[0], _ = compiled(model.params, batch, carried[0], None)
        jax.block_until_ready(logits)

    step()
    events = trace_kernels(step, steps)
    return _by_layer(events, scopes, steps)


def _random_pages(cache: KVCache) -> KVCache:
    """Random values; scales near one another, none of them NaN."""

    def fill(pool: jax.Array, value_rows: int, key: int) -> jax.Array:
        bits = jax.random.bits(jax.random.key(key), pool.shape, jnp.uint8)
        is_scale = jnp.arange(pool.shape[1])[:, None, None] >= value_rows
        return jnp.where(is_scale, (bits & 0x7) | 0x70, bits)

    fill = jax.jit(fill, static_argnums=(1, 2))
    layout = cache.layout
    return dataclasses.replace(
        cache,
        main=tuple(fill(pool, layout.main.value_rows, i) for i, pool in enumerate(cache.main)),
        index=tuple(fill(pool, layout.index.value_rows, 100 + i) for i, pool in enumerate(cache.index)),
    )


def _by_layer(events: list[KernelEvent], scopes: dict[str, str], steps: int) -> list[LayerKernels]:
    found: dict[int | None, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for event in events:
        scope = scopes.get(event.hlo_op, "") or event.scope
        match = _LAYER.search(scope)
        part = "/".join(p for p in match.groups()[1:] if p) if match else ""
        found[int(match[1]) if match else None][part or "other"].append(event.us)
    rows = []
    for layer in sorted(found, key=lambda n: (n is None, n or 0)):
        parts = {name: (len(us) / steps, sum(us) / steps) for name, us in found[layer].items()}
        rows.append(
            LayerKernels(
                layer=layer,
                launches=sum(n for n, _ in parts.values()),
                us=sum(us for _, us in parts.values()),
                parts=dict(sorted(parts.items(), key=lambda item: -item[1][1])),
            )
        )
    return rows
