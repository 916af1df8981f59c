"""The serving engine: continuous batching over the slots of one cache, with prefix reuse and tiers behind it.

A step admits waiting requests, forwards one chunk of prompts, and runs a decoding round of all requests whose prompts
are in. Shapes are few and fixed, so that every step is compiled before the first request.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from dsv41.config import DSV41Error
from dsv41.engine.engine_options import CED, EngineOptions
from dsv41.engine.engine_request import EngineRequest, EngineResult, Event, Status
from dsv41.engine.engine_runner import EngineRunner
from dsv41.engine.generate import check_prompts
from dsv41.engine.metrics import EngineMetrics, RequestMetrics
from dsv41.engine.prefix_pages import Hit, PrefixPages, SequencePages
from dsv41.engine.speculation import check_drafter
from dsv41.images import PreparedImage
from dsv41.kv_store import ImageSpan, PageTiers, SnapshotPool, cache_fingerprint
from dsv41.models import Model
from dsv41.ops.sampling import NO_TOKEN, SamplingParams


class Engine:
    """Serves requests. Not safe to call from several threads at once.

    Args:
      model: the model, with its drafter if the options speculate.
      options: sizes and modes.
      checkpoint: text that identifies the weights; pages of another one are never used. Needed with `tiers` and with
        `snapshots`.
      tiers: host memory and disk for pages; None: pages live on the device only.
      snapshots: host memory for window state; None: windows are always replayed.
      clock: seconds that never go back.

    Raises:
      DSV41Error: the options do not fit the model or each other.
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions = EngineOptions(),  # noqa: B008  frozen
        *,
        checkpoint: str = "",
        tiers: PageTiers | None = None,
        snapshots: SnapshotPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        options.check(model.config)
        if (tiers is not None or snapshots is not None) and not checkpoint:
            raise DSV41Error(
                "engine: tiers and snapshots need the checkpoint's identity, so that no other's pages are used"
            )
        if options.speculation is not None and options.speculation.drafts(model.config):
            check_drafter(model)
        self._model, self._options, self._clock = model, options, clock
        self._run = EngineRunner(model, options)
        self._window = model.config.text_config.sliding_window
        self._prefix = PrefixPages(
            self._run.cache,
            cache_fingerprint(model.config, checkpoint),
            window=self._window,
            encoder_layers=model.schedule.decoder_start,
            tiers=tiers,
            snapshots=snapshots if options.prefill == CED else None,
            poison=options.poison,
        )
        self._requests: dict[int, EngineRequest] = {}
        self._queue: collections.deque[EngineRequest] = collections.deque()
        self._refused: EngineRequest | None = None  # the queue's head, if no page was given back since it found too few
        self._rows: list[EngineRequest | None] = [None] * options.max_requests
        self._ids, self._order = itertools.count(), itertools.count()
        self._events: list[Event] = []
        self.metrics = EngineMetrics()

    # Requests

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = SamplingParams(temperature=0),  # noqa: B008  frozen
        stop_ids: Sequence[int] | None = None,
        images: Sequence[PreparedImage] = (),
        reuse: bool = True,
    ) -> int:
        """Takes a request; `step` works on it. Arguments as for `generate`.

        Args:
          reuse: False: compute the whole prompt, and leave nothing for later ones.

        Returns:
          The request's id.

        Raises:
          DSV41Error: it can never be served; the message says why.
        """
        (ids,) = check_prompts(self._model.config, [prompt], max_new_tokens)
        total = len(ids) + max_new_tokens
        room = min(self._options.max_tokens, self._prefix.pool.num_pages * self._prefix.size)
        if total > room:
            raise DSV41Error(
                f"request: {len(ids)} tokens and {max_new_tokens} new ones exceed what the engine holds of one: {room}"
            )
        stop = (self._model.config.eos_token_id,) if stop_ids is None else tuple(stop_ids)
        if len(stop) > self._options.stop_ids:
            raise DSV41Error(f"request: {len(stop)} stop ids, the engine's options allow {self._options.stop_ids}")
        vocab = self._model.config.text_config.vocab_size
        if unknown := [token for token in stop if not 0 <= token < vocab]:
            raise DSV41Error(f"request: stop id {unknown[0]}, expected an id in [0, {vocab})")
        positions = self._model.check_images(ids, images, what="request")
        buffer = np.concatenate([ids, np.zeros(max_new_tokens, np.int64)])
        request = EngineRequest(
            id=next(self._ids),
            buffer=buffer,
            prompt_tokens=len(ids),
            sampling=sampling,
            stop_ids=stop,
            reuse=reuse and self._options.reuse,
            images=tuple(images),
            spans=_spans(positions, images),
            metrics=RequestMetrics(added=self._clock()),
            known=len(ids),
        )
        self._requests[request.id] = request
        self._queue.append(request)
        self.metrics.requests += 1
        return request.id

    def abort(self, request_id: int) -> None:
        """Ends a request; what it has so far is its result. Nothing happens if it is done."""
        request = self._request(request_id)
        if request.status is Status.DONE:
            return
        self.metrics.aborted += 1
        self._end(request, "abort")

    def result(self, request_id: int) -> EngineResult | None:
        """The result of a request, None while it is under way."""
        request = self._request(request_id)
        return request.result() if request.status is Status.DONE else None

    def take(self, request_id: int) -> EngineResult:
        """The result of a request that is done; the engine forgets the request.

        Raises:
          DSV41Error: it is under way.
        """
        result = self.result(request_id)
        if result is None:
            raise DSV41Error(f"request {request_id} is not done")
        del self._requests[request_id]
        return result

    def stream(self, request_id: int) -> Iterator[int]:
        """The new tokens of a request as they come; steps the engine, and so the other requests, when it has none."""
        request, sent = self._request(request_id), 0
        while True:
            tokens = request.ids[request.prompt_tokens + sent :].tolist()
            yield from tokens
            sent += len(tokens)
            if request.status is Status.DONE and sent == request.new_tokens:
                return
            self.step()

    def run(self) -> None:
        """Steps until nothing is under way."""
        while self.busy:
            self.step()

    @property
    def busy(self) -> bool:
        """Whether a request is under way, or an event of one is still to be had from `step`."""
        return bool(self._events) or self._working

    @property
    def _working(self) -> bool:
        return bool(self._queue) or any(r is not None for r in self._rows)

    def _request(self, request_id: int) -> EngineRequest:
        if request_id not in self._requests:
            raise DSV41Error(f"no request {request_id}")
        return self._requests[request_id]

    # Steps

    def warm_up(self) -> None:
        """Compiles everything that serving can need, but for the vision tower: that is compiled for each size class of
        pictures when the first one comes.

        Raises:
          DSV41Error: a request is under way.
        """
        if self._working:
            raise DSV41Error("engine: a request is under way")
        self._run.warm_up()
        self._run.cache = self._prefix.warm_up(self._run.cache)

    def step(self) -> list[Event]:
        """Does a little of everything; returns what became of requests."""
        self._admit()
        self._prefill()
        self._decode()
        self._prefix.settle()
        self.metrics.evicted_pages = self._prefix.evicted_pages
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        """Gives rows and pages to waiting requests, first come first served."""
        while self._queue and None in self._rows and self._queue[0] is not self._refused:
            request = self._queue[0]
            if not self._embed_images(request):
                continue
            if not self._open(request, self._rows.index(None)):
                self._refused = request
                return
            self._queue.popleft()

    def _embed_images(self, request: EngineRequest) -> bool:
        """Encodes a request's pictures before anything is taken for it; one that does not fit the device ends it."""
        if request.images and request.embeds is None:
            try:
                request.embeds = self._model.embed_images(request.ids[: request.prompt_tokens], request.images)
            except jax.errors.JaxRuntimeError as e:
                request.error = f"its images cannot be encoded: {e}"
                self.metrics.failed += 1
                self._end(request, "error")
                return False
        return True

    def _find(self, request: EngineRequest, most: int) -> Hit:
        """How a request can go on from up to `most` tokens that are there."""
        if not request.reuse or not most:
            return self._prefix.cold(request.ids, request.spans)
        return self._prefix.find(request.ids, request.spans, most, with_snapshot=self._options.prefill == CED)

    def _take_pages(self, request: EngineRequest, row: int) -> tuple[Hit, SequencePages | None]:
        prefix, size = self._prefix, self._prefix.size
        tokens = min(request.known + self._run.tokens_ahead, len(request.buffer))
        hit = self._find(request, request.known - 1)
        self._run.cache, pages = prefix.open(self._run.cache, row, hit, tokens, request.spans)
        if pages is None and hit.tokens % size and not any(self._rows):
            # The page that the hit ends in and its copy are one page too many for the pool, and waiting won't help.
            hit = self._find(request, hit.tokens - hit.tokens % size)
            hit = self._find(request, 0) if hit.tokens % size else hit
            self._run.cache, pages = prefix.open(self._run.cache, row, hit, tokens, request.spans)
        return hit, pages

    def _open(self, request: EngineRequest, row: int) -> bool:
        hit, pages = self._take_pages(request, row)
        if pages is None:
            return False
        ids = request.ids
        request.row, request.order, request.pages = row, next(self._order), pages
        request.status, self._rows[row] = Status.PREFILL, request
        replayed = 0 if hit.snapshot is not None else min(hit.tokens, self._window)
        request.cursor, request.target, request.write_from = hit.tokens - replayed, len(ids), hit.tokens
        # Window rows before the replay are somebody else's; those of a snapshot or of the prompt itself are right.
        request.floor = request.cursor if replayed else 0
        self._run.set_sampling(row, request.sampling, request.stop_ids)
        self._count_admission(request, hit, replayed)
        return True

    def _count_admission(self, request: EngineRequest, hit: Hit, replayed: int) -> None:
        total = self.metrics
        mine = request.metrics
        if mine.admitted is None:
            mine.admitted = self._clock()
        for counts in (mine, total):
            counts.fresh_tokens += request.target - hit.tokens
            counts.replayed_tokens += replayed
            for tier, tokens in hit.by_tier.items():
                counts.cached_tokens[tier] += tokens
        mine.window_hit = hit.snapshot is not None
        total.window_hits += mine.window_hit
        total.prompt_tokens += request.target

    def _prefill(self) -> None:
        """One chunk of the prompts admitted first."""
        waiting = sorted((r for r in self._rows if r and r.status is Status.PREFILL), key=lambda r: r.order)
        rows = waiting[: self._options.prefill_rows]
        if not rows:
            return
        self.metrics.prefill_steps += 1
        tail = self._window if self._options.prefill == CED else 0
        drawn = self._run.prefill(rows, [r.chunk(self._run.chunk, tail) for r in rows])
        for request, token in zip(rows, drawn, strict=True):
            if token is not None:
                self._finish_prefill(request, token)

    def _finish_prefill(self, request: EngineRequest, token: int) -> None:
        # Pages behind which nothing can be drawn must not be found by others.
        if token != NO_TOKEN:
            self._leave(request, request.target, final=False)
        if request.metrics.first_token is None:
            request.metrics.first_token = self._clock()
        if self._emit(request, [token]):
            request.status = Status.DECODE
            self._run.begin(request)

    def _decode(self) -> None:
        live = [r for r in self._rows if r and r.status is Status.DECODE]
        while self._run.may_start(live):
            if not self._make_room(live):
                break
            live = [r for r in live if r.status is Status.DECODE]
            self._run.start_round(live)
            self.metrics.rounds += 1
        for request, tokens, verified, accepted in self._run.finish_round():
            if request.status is not Status.DECODE:
                continue
            for counts in (request.metrics, self.metrics):
                counts.verified += verified
                counts.accepted += accepted
            request.metrics.rounds += 1
            self.metrics.request_rounds += 1
            self._emit(request, tokens)

    def _make_room(self, live: list[EngineRequest]) -> bool:
        """Pages for the next round; sets the youngest request back if there are none. False: a round must end first."""
        for request in sorted(live, key=lambda r: r.order):
            while request.status is Status.DECODE:
                tokens = min(self._run.reach(request), len(request.buffer))
                self._run.cache, ok = self._prefix.grow(self._run.cache, request.row, request.pages, tokens)
                if ok:
                    break
                if self._run.in_flight:
                    return False
                self._preempt(max((r for r in self._rows if r), key=lambda r: r.order))
        return any(r.status is Status.DECODE for r in live)

    def _preempt(self, request: EngineRequest) -> None:
        """Sets a request back to the head of the queue; it goes on from its tokens, of which the index keeps pages."""
        if request.status is Status.DECODE:
            self._leave(request, request.known - 1, final=True)
        self._vacate(request)
        request.status = Status.WAITING
        request.metrics.preemptions += 1
        self.metrics.preemptions += 1
        self._queue.appendleft(request)

    # Ends

    def _emit(self, request: EngineRequest, tokens: Sequence[int]) -> bool:
        """Gives a request its tokens; whether it goes on."""
        for i, token in enumerate(tokens):
            if token == NO_TOKEN:
                request.error = f"new token {request.new_tokens}: the model's logits hold NaN or infinity"
                self.metrics.failed += 1
                self._end(request, "error", tokens[:i])
                return False
            request.append(int(token))
            self.metrics.new_tokens += 1
        if request.finish_reason is not None:
            self._leave(request, request.known - 1, final=True)
            self.metrics.finished += 1
            self._end(request, request.finish_reason, tokens)
            return False
        self._events.append(Event(request=request.id, token_ids=tuple(map(int, tokens)), finish_reason=None))
        return True

    def _leave(self, request: EngineRequest, committed: int, *, final: bool) -> None:
        """Leaves pages and window state of the committed tokens for later prompts."""
        if request.reuse and committed:
            self._refused = None
            cache, row, pages = self._run.cache, request.row, request.pages
            self._run.cache = self._prefix.publish(cache, row, pages, request.ids[:committed], final=final)
            self._prefix.snapshot(self._run.cache, row, pages, committed)

    def _end(self, request: EngineRequest, reason: str, tokens: Sequence[int] = ()) -> None:
        if request.status is Status.WAITING:
            self._queue.remove(request)
        else:
            self._vacate(request)
        request.status, request.finish_reason = Status.DONE, reason
        request.metrics.finished = self._clock()
        self._events.append(Event(request=request.id, token_ids=tuple(map(int, tokens)), finish_reason=reason))

    def _vacate(self, request: EngineRequest) -> None:
        self._refused = None
        self._run.stop(request.row)
        self._run.cache = self._prefix.close(self._run.cache, request.row, request.pages)
        self._rows[request.row], request.pages = None, None

    def device_pages(self) -> tuple[int, int]:
        """Pages on the device that a prompt can go on from, and their bytes."""
        pages = self._prefix.index.counts().pages
        return pages, pages * self._run.cache.layout.page_bytes

    def leaks(self) -> dict[str, int]:
        """What is held although nothing is under way; all zero if the books are right.

        Raises:
          DSV41Error: a request is under way.
        """
        if self._working:
            raise DSV41Error("engine: a request is under way")
        pool, index = self._prefix.pool, self._prefix.index
        counts = index.counts()
        return {
            "pages": pool.num_pages - pool.num_free - counts.pages,
            "references": counts.in_use,
            "rows": sum(r is not None for r in self._rows),
        }


def _spans(positions: np.ndarray, images: Sequence[PreparedImage]) -> list[ImageSpan]:
    """The images' spans in a row, from the positions of all image tokens."""
    spans, at = [], 0
    for image in images:
        length = image.plan.num_tokens
        start = int(positions[at])
        spans.append(ImageSpan(start=start, length=length, content_hash=image.content_hash))
        at += length
    return spans
