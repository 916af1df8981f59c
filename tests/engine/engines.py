"""Engines over the small model. All have one shape, so that a handful of programs serves every test."""

from __future__ import annotations

import jax
import numpy as np

from dsv41.cache import read_page
from dsv41.engine import Engine, EngineOptions, EngineResult
from dsv41.ops.sampling import SamplingParams
from tests.models.cache_rows import committed_rows
from tests.models_for_tests import small_model

WINDOW, PAGE, PAGES, ROWS = 16, 256, 8, 4
NOTHING = {"pages": 0, "references": 0, "rows": 0}
WARM = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=7)


def engine(*, model=None, tiers=None, snapshots=None, checkpoint: str = "small", **options) -> Engine:
    shape = {"max_requests": ROWS, "max_tokens": 1024, "num_pages": PAGES, "prefill_chunk": 64, "prefill_rows": 2}
    options = EngineOptions(**shape | {"poison": True} | options)
    return Engine(model or small_model(), options, checkpoint=checkpoint, tiers=tiers, snapshots=snapshots)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, count).tolist()


def serve(engine: Engine, *prompts, new: int = 8, sampling=SamplingParams(temperature=0), **options):  # noqa: B008
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
