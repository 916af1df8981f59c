"""Decode and prefill rates of a model with its Engram rows from here and there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dsv41.config import with_overrides
from dsv41.engine.device_gaps import Gaps, find_gaps, read_launches
from dsv41.engine.engram_mode import EngramFigures, EngramMode
from dsv41.engine.generate import generate
from dsv41.models import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is run.

    Attributes:
      rows: sequences that are decoded together, from prompts of one token.
      new_tokens: steps of each.
      prompt: tokens of a single prompt that is prefilled; 0: no prefill.
      chunk: of them a step.
      traced: decode steps, and prompt chunks, in the middle of a run that are traced; 0: none.
    """

    rows: int
    new_tokens: int
    prompt: int
    chunk: int
    traced: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """Of one run.

    Attributes:
      tokens_per_s: of all rows together.
      step_ms: time of a step, from start to start: the median.
      compile_s: before.
      engram: what its rows took; None without Engram.
      gaps: of the device in the traced steps; None if nothing was traced or the trace lists no kernels.
      traced: these steps.
    """

    tokens_per_s: float
    step_ms: float
    compile_s: float
    engram: EngramFigures | None
    gaps: Gaps | None
    traced: int


@functools.cache
def _without_engram(model: Model) -> Model:
    """The same layers without their Engram, to compare with."""
    config = with_overrides(
        model.config, {"text_config.engram_layer_ids": "[]", "text_config.engram_num_embeddings": "[]"}
    )
    layers = {n: {k: v for k, v in p.items() if k != "engram"} for n, p in model.params["layers"].items()}
    params = model.params | {"layers": layers}
    return dataclasses.replace(model, config=config, params=params, engram=None, token_map=None)


class _Tracer:
    """Traces the calls of `tick` from number `first` to number `first + count`."""

    def __init__(self, first: int, count: int):
        self._first, self._count, self._calls, self._stack = first, count, 0, contextlib.ExitStack()
        self.gaps: Gaps | None = None
        self.times: list[float] = []

    def tick(self, *_) -> None:
        self.times.append(time.perf_counter())
        self._calls += 1
        if self._count and self._calls == self._first:
            self._directory = self._stack.enter_context(tempfile.TemporaryDirectory())
            jax.profiler.start_trace(self._directory)
        elif self._count and self._calls == self._first + self._count:
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self.gaps = find_gaps(read_launches(self._directory))
        self._count = 0
        self._stack.close()

    def __enter__(self) -> _Tracer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._count and self._calls >= self._first:
            self._stop()

    @property
    def step_ms(self) -> float:
        """Median time between ticks."""
        return 1e3 * statistics.median(np.diff(self.times)) if len(self.times) > 1 else 0.0


def _ids(model: Model, rows: int, tokens: int, seed: int) -> list[list[int]]:
    """Random tokens: no n-gram comes twice but by chance, the worst case for a look-up."""
    text = model.config.text_config
    ids = np.random.default_rng(seed).integers(3, text.vocab_size - 1, (rows, tokens))
    ids[ids == model.config.image_token_id] = 3
    return ids.tolist()


def decode_rate(model: Model, mode: EngramMode, plan: BenchPlan) -> Rate:
    """Decodes `plan.rows` sequences; one untraced run for the rate, then a short traced one."""
    prompts = _ids(model, plan.rows, 1, seed=1)
    with _Tracer(0, 0) as clock:
        result = _run(model, prompts, mode, plan.new_tokens, 1, on_step=clock.tick)
    gaps = None
    if plan.traced:
        with _Tracer(4, plan.traced) as tracer:
            _run(model, prompts, mode, min(plan.new_tokens, plan.traced + 8), 1, on_step=tracer.tick)
        gaps = tracer.gaps
    t = result.timings
    rate = 0.0 if t.decode_tokens_per_s is None else plan.rows * t.decode_tokens_per_s
    return Rate(tokens_per_s=rate, step_ms=clock.step_ms, compile_s=t.compile_s, engram=result.engram, gaps=gaps,
                traced=plan.traced)  # fmt: skip


def prefill_rate(model: Model, mode: EngramMode, plan: BenchPlan) -> Rate:
    """Prefills one prompt; as `decode_rate`."""
    prompts = _ids(model, 1, plan.prompt, seed=2)
    with _Tracer(0, 0) as clock:
        result = _run(model, prompts, mode, 1, plan.chunk, on_chunk=clock.tick)
    gaps = None
    if plan.traced:
        # The device lags behind the host, which goes on at once: so the whole prompt is traced.
        with _Tracer(1, plan.prompt) as tracer:
            _run(model, prompts, mode, 1, plan.chunk, on_chunk=tracer.tick)
        gaps = tracer.gaps
    t = result.timings
    return Rate(tokens_per_s=t.prefill_tokens_per_s, step_ms=clock.step_ms, compile_s=t.compile_s,
                engram=result.engram, gaps=gaps, traced=-(-plan.prompt // plan.chunk))  # fmt: skip


def _run(model, prompts, mode, new_tokens, chunk, on_step=None, on_chunk=None):
    """The first request's result; `on_step` is called once a decode step, `on_chunk` once a chunk."""

    def on_token(row: int, _: int) -> None:
        if on_step is not None and row == 0:
            on_step()

    (result, *_) = generate(
        model,
        prompts,
        max_new_tokens=new_tokens,
        stop_ids=(),
        prefill_chunk=chunk,
        engram=mode,
        on_token=on_token,
        on_prefill=on_chunk,
    )
    return result


def transfer_rates(nbytes: int, *, times: int = 20) -> dict[str, float]:
    """GB/s of copies of `nbytes` from numpy to the device: "direct", and "pinned" by way of pinned host memory, of
    which the copy into it is not counted, being another thread's work. Without such memory there is no "pinned"."""
    device = jax.devices()[0]
    arrays = [np.random.default_rng(i).integers(0, 256, nbytes, np.uint8) for i in range(4)]
    sources: dict[str, list] = {"direct": arrays}
    if any(m.kind == "pinned_host" for m in device.addressable_memories()) and device.platform != "cpu":
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        sources["pinned"] = jax.block_until_ready([jax.device_put(a, pinned) for a in arrays])
    target, rates = SingleDeviceSharding(device, memory_kind="device"), {}
    for name, source in sources.items():
        seconds = []
        for i in range(times):
            started = time.perf_counter()
            jax.block_until_ready(jax.device_put(source[i % len(source)], target))
            seconds.append(time.perf_counter() - started)
        rates[name] = nbytes / statistics.median(seconds) / 1e9
    return rates


def warm_up(model: Model, plan: BenchPlan, names: Sequence[str], device: bool) -> None:
    """Compiles what the runs need, independent programs at the same time, each in a thread."""
    chosen = [case for case in cases(model, device) if case[0] in names]
    short = dataclasses.replace(plan, new_tokens=2, prompt=min(plan.prompt, 2 * plan.chunk), traced=0)

    def run(rate_of: Callable[..., Rate], group: tuple[str, ...]) -> None:
        for name, case, mode in chosen:
            if name in group:
                rate_of(case, mode, short)

    # Cases of one group share programs, which two threads would both compile.
    jobs = [(decode_rate, ("none",)), (decode_rate, ("blocking", "device")), (decode_rate, ("overlap",))]
    if plan.prompt:
        jobs += [(prefill_rate, ("none",)), (prefill_rate, ("blocking", "overlap", "device"))]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(run, *job) for job in jobs]:
            done.result()


def cases(model: Model, device: bool) -> Iterator[tuple[str, Model, EngramMode]]:
    """What is compared: (name, model, mode)."""
    yield "none", _without_engram(model), EngramMode.AUTO
    yield "blocking", model, EngramMode.BLOCKING
    yield "overlap", model, EngramMode.OVERLAP
    if device:
        yield "device", model, EngramMode.DEVICE
