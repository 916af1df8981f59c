"""Engines over the small model. All have one shape, so that a handful of programs serves every test."""

from __future__ import annotations

import functools

import jax
import numpy as np

from dsv41.cache import read_page
from dsv41.engine import Engine, EngineOptions, EngineResult
from dsv41.engine.engine_request import EngineRequest
from dsv41.ops.sampling import SamplingParams
from tests.models.cache_rows import committed_rows, same_rows
from tests.models_for_tests import small_model

WINDOW, PAGE, PAGES, ROWS = 16, 256, 8, 4
GREEDY = SamplingParams(temperature=0)
ALONE = {"reuse": False}
NOTHING = {"pages": 0, "references": 0, "rows": 0}
WARM = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=7)


def engine(*, model=None, tiers=None, snapshots=None, checkpoint: str = "small", **options) -> Engine:
    shape = {"max_requests": ROWS, "max_tokens": 1024, "num_pages": PAGES, "prefill_chunk": 64, "prefill_rows": 2}
    options = EngineOptions(**shape | {"poison": True} | options)
    return Engine(model or small_model(), options, checkpoint=checkpoint, tiers=tiers, snapshots=snapshots)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, count).tolist()


def serve(engine: Engine, *prompts, new: int = 8, sampling=GREEDY, **options):
    """Results of requests that are added together; the only one alone."""
    numbers = [engine.add(p, max_new_tokens=new, stop_ids=(), sampling=sampling, **options) for p in prompts]
    engine.run()
    results = [engine.take(n) for n in numbers]
    for result in results:
        assert result.error is None and len(result.token_ids) == new
    return results[0] if len(results) == 1 else results


def tokens(results) -> list[tuple[int, ...]]:
    return [r.token_ids for r in results]


def cached(result: EngineResult) -> int:
    return sum(result.metrics.cached_tokens.values())


def watch_prefill(engine: Engine) -> list[dict]:
    """What the cache holds of each prompt (`committed_rows`) when it is in, in the order of their ends."""
    seen, finish = [], engine._finish_prefill

    def watched(request, token):
        seen.append(committed_rows(engine._run.cache, [request.target] * ROWS, WINDOW)[request.row])
        finish(request, token)

    engine._finish_prefill = watched
    return seen


def page_bytes(engine: Engine) -> list[tuple[np.ndarray, ...]]:
    return [tuple(np.asarray(a) for a in read_page(engine._run.cache, page)) for page in range(PAGES)]


def same_bytes(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def evict_all(engine: Engine) -> None:
    """Drops every page that nobody uses from the device, as requests for that many would."""
    engine._run.cache, pages = engine._prefix._take(engine._run.cache, PAGES)
    engine._run.cache = engine._prefix._freed(engine._run.cache, engine._prefix.pool.release(pages))


def spoil_rings(engine: Engine) -> None:
    """Every window holds what decodes to NaN, as another request might have left it."""
    cache = engine._run.cache
    rings = {name: tuple(ring * 0 + 0xFF for ring in getattr(cache, name)) for name in ("window", "draft_window")}
    engine._run.cache = jax.block_until_ready(type(cache)(**{**cache.__dict__, **rings}))


@functools.cache
def plain(prefill: str):
    """An engine without state worth keeping."""
    return engine(prefill=prefill, **ALONE)


@functools.cache
def alone(prefill: str, prompt: tuple[int, ...], new: int, sampling=GREEDY) -> tuple[int, ...]:
    """Tokens of a request that nothing else is near."""
    return serve(plain(prefill), list(prompt), new=new, sampling=sampling).token_ids


def check_company(**options) -> None:
    """Case N16: a request's tokens are the same in any order, beside any arrivals, ends and aborts."""
    made = engine(**options, **ALONE)
    prompts = [(ids(n, n), s) for n, s in ((100, GREEDY), (33, WARM), (150, WARM), (17, GREEDY))]
    wanted = [serve(made, p, new=9, sampling=s).token_ids for p, s in prompts]
    for order, gap in (((3, 2, 0, 1), 2), ((1, 0, 3, 2), 0)):
        other = [made.add(ids(90, 5 + gap), max_new_tokens=40, sampling=SamplingParams(seed=gap)) for _ in range(2)]
        numbers = {}
        for i in order:
            prompt, sampling = prompts[i]
            numbers[i] = made.add(prompt, max_new_tokens=9, stop_ids=(), sampling=sampling)
            for _ in range(gap):
                made.step()
        made.abort(other[0])
        made.run()
        assert [made.take(numbers[i]).token_ids for i in range(4)] == wanted
    assert made.leaks() == NOTHING


def check_chunks(monkeypatch, prefill: str) -> None:
    """Case A12: prompts in chunks of any size give the same tokens, pages and windows."""
    prompt = ids(150)
    made = engine(prefill=prefill, **ALONE)
    rows = watch_prefill(made)
    wanted = serve(made, prompt)
    chunk = EngineRequest.chunk
    for size in (16, 17, 33):
        monkeypatch.setattr(EngineRequest, "chunk", lambda self, most, tail, size=size: chunk(self, size, tail))
        assert serve(made, prompt).token_ids == wanted.token_ids
        same_rows(rows[-1], rows[0])
    assert len(rows) == 4


def check_own_window(**options) -> None:
    """Pages of [0, H) are those that were left, byte for byte, and what windows held before does not matter."""
    made = engine(**options)
    prompt = ids(300)
    serve(made, prompt)
    pages, index = page_bytes(made), made._prefix.index
    again = prompt + ids(20, 1)
    serve(made, ids(200, 2), ids(210, 3), ids(220, 4), ids(230, 5))
    left = {node.value: node.page.count for node in index._tree if node.page.tokens[0] == prompt[0]}
    rows = watch_prefill(made)
    result = serve(made, again)
    assert cached(result) == 300 and result.metrics.replayed_tokens == WINDOW
    full = [number for number, count in left.items() if count == PAGE]
    assert full and all(same_bytes(pages[n], page_bytes(made)[n]) for n in full)
    dirty = engine(**options)
    serve(dirty, prompt)
    spoil_rings(dirty)
    seen = watch_prefill(dirty)
    assert serve(dirty, again).token_ids == result.token_ids
    same_rows(seen[0], rows[0])
    assert made.leaks() == dirty.leaks() == NOTHING
