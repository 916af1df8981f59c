"""Kernels of one compiled step, layer by layer, from the profiler's trace."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import ForwardBatch, KVCache
from dsv41.config import DSV41Error
from dsv41.models import Model
from dsv41.models.sharded import compiled_forward
from dsv41.sharding import fetch
from pallas_kernels.dispatch import backend
from pallas_kernels.measure import KernelEvent, trace_kernels

_MOST_PAGES = 1 << 14  # logical pages of a sequence, more than 1M tokens take
_LAYER = re.compile(r"/layer_(\d+)/(?:(attention|moe|engram)/)?([a-z_]*)")
_CALL = re.compile(r"/jit\([^()]*\)")  # functions that layers share stand between the names of scopes
# What talks to other devices is told by the kernel's name (NCCL's, XLA's own in C++) or, copies, by the instruction's.
_COLLECTIVE = re.compile(
    r"nccl|(ragged-)?all[-_]?to[-_]?all|all[-_]?gather|all[-_]?reduce|reduce[-_]?scatter|collective[-_]?permute"
    r"|MultiGpuBarrier",
    re.IGNORECASE,
)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class LayerKernels:
    """What one layer (None: embedding, head and all between) launched in a step.

    Attributes:
      layer: its number.
      launches: kernels a step and device.
      us: their device time in microseconds.
      parts: launches and microseconds by part of the layer, such as "attention/attend"; those of kernels that talk to
        other devices end in "/collective", and what they wait for others is in their time; the experts' products are
        "moe/experts/products", what arranges their rows is "moe/experts".
    """

    layer: int | None
    launches: float
    us: float
    parts: dict[str, tuple[float, float]]


class StepShape(NamedTuple):
    """A step of `rows` sequences, `tokens` new tokens each behind `context` cached ones."""

    rows: int
    context: int
    tokens: int = 1


class StepProfile(NamedTuple):
    """`layers`: its kernels. `wall_us`: time from one step to the next on the host's clock, with nothing profiled."""

    layers: list[LayerKernels]
    wall_us: float


def profile_steps(model: Model, shapes: Sequence[StepShape], *, steps: int = 5) -> list[StepProfile]:
    """Runs a step of each shape, and counts its kernels.

    The pages hold random bytes: what the step says means nothing. Of a model on a mesh all devices are counted, and
    launches and times are those of a device on average.

    Raises:
      DSV41Error: the backend's trace lists no kernels (all but NVIDIA GPUs), or the cache cannot hold a context.
    """
    for shape in shapes:
        jax.eval_shape(lambda s=shape: model.init_cache(s.rows, s.context + s.tokens))
    if backend() != "gpu":
        raise DSV41Error(f"the trace of {jax.devices()[0].device_kind} lists no kernels; profile on an NVIDIA GPU")
    return [_profile(model, shape, steps, run) for shape, run in zip(shapes, compile_steps(model, shapes), strict=True)]


def compile_steps(model: Model, shapes: Sequence[StepShape]) -> list[jax.stages.Compiled]:
    """The forward program of each shape: lowered in turn, compiled side by side, which on GPUs takes most of the time.

    Each is called with (params, batch, cache, None) and returns what `Model.forward` returns; it consumes the cache.
    """
    program = compiled_forward(model.mesh, model.rules)
    static = {"config": model.config, "logits": "last", "capture": (), "tail": None}
    lowered = []
    for shape in shapes:
        cache, batch = _arguments(model, shape)
        lowered.append(program.lower(model.params, batch, cache, None, **static))
        del cache  # before that of the next shape is made
    with _scopes_of_its_own(), concurrent.futures.ThreadPoolExecutor(len(lowered)) as pool:
        return list(pool.map(jax.stages.Lowered.compile, lowered))


@contextlib.contextmanager
def _scopes_of_its_own():
    """Compiled programs are not taken from the persistent cache when only their scopes are others: those of another
    version of the code would come with them."""
    flag = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, before)


def _arguments(model: Model, shape: StepShape) -> tuple[KVCache, ForwardBatch]:
    return model.init_cache(shape.rows, shape.context + shape.tokens), step_at(model, *shape)


def _profile(model: Model, shape: StepShape, steps: int, run: jax.stages.Compiled) -> StepProfile:
    cache, batch = _arguments(model, shape)
    carried = [random_pages(cache)]
    del cache  # a second one beside it may not fit
    scopes = dict(_INSTRUCTION.findall(run.as_text()))

    def step():
        logits, carried[0], _ = run(model.params, batch, carried[0], None)
        return logits

    jax.block_until_ready(step())
    started = time.perf_counter()
    for _ in range(steps):
        logits = step()
    jax.block_until_ready(logits)
    wall_us = (time.perf_counter() - started) / steps * 1e6
    events = trace_kernels(lambda: jax.block_until_ready(step()), steps)
    return StepProfile(_by_layer(events, scopes, steps * (1 if model.mesh is None else model.mesh.size)), wall_us)


def step_at(model: Model, rows: int, context: int, tokens: int) -> ForwardBatch:
    """A step of some tokens behind `context` others, on the devices; those of a row follow from its number."""
    look_back = max(model.config.text_config.engram_max_ngram_size, 1)
    new = np.arange(rows * tokens).reshape(rows, tokens) % 97 + 3
    batch = model.make_batch(new, [np.arange(look_back) % 97 + 3] * rows, padded=False)
    return model.place_rows(dataclasses.replace(batch, start=np.full_like(batch.start, context)))


def random_pages(cache: KVCache) -> KVCache:
    """Random values; scales near one another, none of them NaN. Page j of a slot holds the same wherever it lies, and
    however many pages the cache has room for."""
    layout, table = cache.layout, fetch(cache.page_table)

    def fill(pool: jax.Array, value_rows: int, kind: int, per_logical: int) -> jax.Array:
        whose = np.zeros(pool.shape[0] // per_logical, np.int32)
        slot, number = np.nonzero(table >= 0)
        whose[table[slot, number]] = slot * _MOST_PAGES + number
        whose = np.repeat(whose * per_logical, per_logical) + np.tile(np.arange(per_logical), len(whose))
        key = jax.random.key(kind)

        def one(number):
            bits = jax.random.bits(jax.random.fold_in(key, number), pool.shape[1:], jnp.uint8)
            is_scale = jnp.arange(pool.shape[1])[:, None, None] >= value_rows
            return jnp.where(is_scale, (bits & 0x7) | 0x70, bits)

        return jax.jit(jax.vmap(one), out_shardings=pool.sharding)(whose.astype(np.int32))

    pages = [layout.pages_per_logical(ratio) for ratio in layout.ratios]
    return dataclasses.replace(
        cache,
        main=tuple(fill(p, layout.main.value_rows, i, n) for i, (p, n) in enumerate(zip(cache.main, pages))),
        index=tuple(fill(p, layout.index.value_rows, 100 + i, n) for i, (p, n) in enumerate(zip(cache.index, pages))),
    )


def _by_layer(events: list[KernelEvent], scopes: dict[str, str], steps: int) -> list[LayerKernels]:
    found: dict[int | None, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for event in events:
        scope = scopes.get(event.hlo_op, "") or event.scope
        match = _LAYER.search(_CALL.sub("", scope))
        part = "/".join(p for p in match.groups()[1:] if p) if match else ""
        if match is None and event.hlo_op.startswith("ragged-all-to-all"):
            part = "moe/experts"  # XLA drops the scope, so the layer is lost; only the experts' exchange is ragged
        if _COLLECTIVE.search(event.name) or _COLLECTIVE.match(event.hlo_op):
            part = f"{part}/collective".strip("/")
        elif part == "moe/experts" and "/products/" in scope:
            part += "/products"
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
