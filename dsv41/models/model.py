"""A loaded model: parameters plus the host side of a step (bucketing, hashing, Engram rows)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dsv41.cache import ForwardBatch, KVCache, init_cache
from dsv41.config import DSV41Error, ModelConfig, Schedule, layer_schedule
from dsv41.engram_store import DEVICE_BYTES, EngramRows, EngramStore, HostLookup, StepLookup, join_rows, step_lookup
from dsv41.images import PreparedImage
from dsv41.models.backbone import ForcedChoices, Params
from dsv41.models.sharded import compiled_forward
from dsv41.models.vision import SpanEmbeds, check_images, embed_images, encode_image
from dsv41.ops.engram_hash import EngramHashSpec, engram_hash_spec
from dsv41.ops.expert_copies import with_copies
from dsv41.sharding import LOCAL, ShardingRules, devices_along, fetch, place, plan_copies

# One bucket serves every verify length (2 to 6 tokens).
_SHORTEST_CHUNK = 8


def batch_bucket(rows: int) -> int:
    """Rows that a batch is padded to, so that few shapes are compiled: powers of two."""
    return 1 << max(rows - 1, 0).bit_length()


def token_bucket(tokens: int) -> int:
    """New tokens a row that a step is padded to: 1 (decode), then powers of two from 8 up."""
    return 1 if tokens == 1 else max(batch_bucket(tokens), _SHORTEST_CHUNK)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A model ready to run.

    Attributes:
      config: the released config.
      params: of the backbone, nested dicts of arrays in their stored formats, named as in the checkpoint.
      token_map: int32 [V] Engram class of each token id; None if the model has no Engram.
      engram: table rows; None if the model has no Engram.
      drafter: parameters of the drafter; None if there is none or it was not loaded.
      vision: parameters of the vision tower and projector; None if there are none or they were not loaded.
      tokenizer: a `tokenizers.Tokenizer`, or None if the directory had none.
      mesh: over which parameters, caches and steps are spread; None: one device.
      rules: how they are.
    """

    config: ModelConfig
    params: Params
    token_map: np.ndarray | None = None
    engram: EngramStore | None = None
    drafter: Params | None = None
    vision: Params | None = None
    tokenizer: Any = None
    mesh: Mesh | None = None
    rules: ShardingRules = LOCAL

    @functools.cached_property
    def schedule(self) -> Schedule:
        return layer_schedule(self.config.text_config)

    @functools.cached_property
    def _hash_spec(self) -> EngramHashSpec:
        text = self.config.text_config
        return engram_hash_spec(text, int(self.token_map[text.engram_pad_token_id]))

    @functools.cached_property
    def host_lookup(self) -> HostLookup | None:
        """Engram rows of tokens that the host knows; None if the model has no Engram."""
        if self.engram is None:
            return None
        image = self.config.image_token_id
        return HostLookup(store=self.engram, spec=self._hash_spec, token_map=self.token_map, image_token_id=image)

    @functools.cached_property
    def step_lookup(self) -> StepLookup | None:
        """Engram rows inside a compiled step, from the device if the tables are small; None if there is no Engram."""
        if self.engram is None:
            return None
        image = self.config.image_token_id
        return step_lookup(self.engram, self._hash_spec, self.token_map, image, mesh=self.mesh)

    @functools.cached_property
    def device_lookup(self) -> StepLookup | None:
        """As `step_lookup`, from tables on the device whatever their size; on a mesh spread by `rules.engram_rows`."""
        if self.engram is None:
            return None
        if not self.rules.engram_rows and self.engram.nbytes <= DEVICE_BYTES:
            return self.step_lookup
        return step_lookup(
            self.engram,
            self._hash_spec,
            self.token_map,
            self.config.image_token_id,
            device_bytes=self.engram.nbytes,
            mesh=self.mesh,
            axes=self.rules.engram_rows,
        )

    def init_cache(
        self, num_slots: int, max_tokens: int, *, num_pages: int | None = None, draft_tokens: int = 0
    ) -> KVCache:
        """An empty cache for `num_slots` sequences of up to `max_tokens` tokens; see `dsv41.cache.init_cache`.

        Raises:
          DSV41Error: see there; or the mesh does not divide the slots or pages.
        """
        return init_cache(
            self.config.text_config,
            num_slots=num_slots,
            max_tokens=max_tokens,
            num_pages=num_pages,
            draft_tokens=draft_tokens,
            mesh=self.mesh,
            rules=self.rules,
        )

    def with_expert_copies(self, loads: np.ndarray, extra: int) -> Model:
        """This model with copies of hot experts on devices that have less to do; it gives the same bits.

        Args:
          loads: tokens by layer and expert, [layers, E], of any sample: the captured "experts.n" of `forward`, counted.
          extra: experts that each device holds beside its own.

        Raises:
          DSV41Error: the model's experts are on one device, it has copies already, or the counts are of another shape.
        """
        text, axes = self.config.text_config, self.rules.experts
        loads = np.asarray(loads)
        if not axes or self.rules.placements:
            raise DSV41Error("expert copies: the experts are on one device, or have copies already")
        if loads.shape != (text.num_hidden_layers, text.n_routed_experts):
            raise DSV41Error(
                f"expert copies: expected counts [{text.num_hidden_layers}, {text.n_routed_experts}], got "
                f"{list(loads.shape)}"
            )
        devices = devices_along(self.mesh.shape, axes)
        placements = tuple(plan_copies(row, devices=devices, extra=extra) for row in loads)
        layers = {}
        for n, placement in enumerate(placements):
            layer = self.params["layers"][n]
            experts = with_copies(layer["ffn"]["experts"], placement, self.mesh, self.rules)
            layers[n] = layer | {"ffn": layer["ffn"] | {"experts": experts}}
        rules = dataclasses.replace(self.rules, placements=placements)
        return dataclasses.replace(self, params=self.params | {"layers": layers}, rules=rules)

    @property
    def row_shards(self) -> int:
        """Devices or groups of them that the rows of a step are spread over, in equal runs."""
        return 1 if self.mesh is None else devices_along(self.mesh.shape, self.rules.batch)

    def batch_rows(self, rows: int) -> int:
        """Rows that a batch is padded to: `batch_bucket`, and divisible by `row_shards`."""
        return -(-batch_bucket(rows) // self.row_shards) * self.row_shards

    def make_batch(
        self,
        tokens: Sequence[Sequence[int]],
        history: Sequence[Sequence[int]] | None = None,
        *,
        slots: Sequence[int] | None = None,
        images: Sequence[SpanEmbeds | None] | None = None,
        padded: bool = True,
        engram: bool = True,
    ) -> ForwardBatch:
        """The arrays of one step.

        Args:
          tokens: new token ids of each sequence; lengths may differ.
          history: token ids of each sequence that are in the cache already; their number is where the new tokens start,
            and the last few enter the Engram hashes. None: the sequences start here.
          slots: cache slot of each sequence; None: 0, 1, ...
          images: for each sequence, what stands for its image tokens, old and new ones (`embed_images`). An image token
            without it is embedded like a word; it is an image token to routing and Engram all the same.
          padded: round batch and length up to `batch_bucket` and `token_bucket`, so that few shapes are met.
          engram: False: Engram rows are left out; the caller puts them in.

        Raises:
          DSV41Error: an empty batch or row, an id outside the vocabulary, a slot used twice, or images whose positions
            hold other tokens; the message names it.
        """
        rows = [np.asarray(r, np.int64).reshape(-1) for r in tokens]
        past = [()] * len(rows) if history is None else list(history)
        slots = list(range(len(rows))) if slots is None else list(slots)
        # Only the end of the history is looked at: a step's host work must not grow with the context.
        look_back = self.config.text_config.engram_max_ngram_size - 1
        tails = [np.asarray(h[max(len(h) - look_back, 0) :], np.int64).reshape(-1) for h in past]
        self._check_batch(rows, [len(h) for h in past], tails, slots)
        lengths = [len(r) for r in rows]
        b, t = (self.batch_rows(len(rows)), token_bucket(max(lengths))) if padded else (len(rows), max(lengths))
        pad = self.config.pad_token_id
        ids = np.full((b, t), pad, np.int32)
        image = np.zeros((b, t), bool)
        for i, r in enumerate(rows):
            ids[i, : len(r)] = r
            image[i, : len(r)] = r == self.config.image_token_id

        def column(values: list[int]) -> np.ndarray:
            return np.array(values + [0] * (b - len(values)), np.int32)

        values, scales = self._engram_rows(ids, tails, lengths) if engram else (None, None)
        return ForwardBatch(
            tokens=ids,
            num_new=column(lengths),
            start=column([len(h) for h in past]),
            slot=column(slots),
            image_mask=image,
            engram_values=values,
            engram_scales=scales,
            image_embeds=None if images is None else self._image_embeds(image, [len(h) for h in past], lengths, images),
        )

    def _image_embeds(
        self, mask: np.ndarray, starts: list[int], lengths: list[int], images: Sequence[SpanEmbeds | None]
    ) -> np.ndarray | None:
        """bfloat16 [B, T, D] where mask [B, T] is set; None if none of `images` lies in the step."""
        if len(images) != len(starts):
            raise DSV41Error(f"batch: {len(starts)} rows of tokens, {len(images)} of images; expected as many")
        embeds, without = None, mask.copy()
        for i, (spans, start, length) in enumerate(zip(images, starts, lengths, strict=True)):
            if spans is None:
                continue
            first, last = np.searchsorted(spans.positions, [start, start + length])
            if first == last:
                continue
            if embeds is None:
                embeds = np.zeros((*mask.shape, spans.embeds.shape[1]), spans.embeds.dtype)
            at = spans.positions[first:last] - start
            if not mask[i, at].all():
                position = spans.positions[first + int(np.argmin(mask[i, at]))]
                raise DSV41Error(f"batch row {i}: an image covers position {position}, which holds no image token")
            embeds[i, at], without[i, at] = spans.embeds[first:last], False
        if embeds is not None and without.any():
            embeds[without] = self._image_word
        return embeds

    @functools.cached_property
    def _image_word(self) -> np.ndarray:
        """bfloat16 [D]: the embedding of the image token as a word, on the host."""
        return fetch(self.params["embed"]["weight"][self.config.image_token_id])

    def check_images(
        self, tokens: Sequence[int] | np.ndarray, images: Sequence[PreparedImage], *, what: str = "tokens"
    ) -> np.ndarray:
        """Whether this model can take a row of tokens with these images: `dsv41.models.vision.check_images`."""
        return check_images(self.config, tokens, images, loaded=self.vision is not None, what=what)

    def encode_image(self, image: PreparedImage) -> jax.Array:
        """What one image's span is embedded as: `dsv41.models.vision.encode_image`."""
        return encode_image(self.vision, image, self.config)

    def embed_images(self, tokens: Sequence[int] | np.ndarray, images: Sequence[PreparedImage]) -> SpanEmbeds | None:
        """Encodes the images of a row of tokens whose spans are laid out; None if there are neither.

        Raises:
          DSV41Error: as `check_images`.
        """
        return embed_images(self.vision, self.config, self.check_images(tokens, images), images)

    def _check_batch(self, rows: list[np.ndarray], past: list[int], tails: list[np.ndarray], slots: list[int]) -> None:
        if not rows:
            raise DSV41Error("batch: no sequences")
        if len(past) != len(rows) or len(slots) != len(rows):
            raise DSV41Error(
                f"batch: {len(rows)} rows of tokens, {len(past)} of history, {len(slots)} slots; expected as many"
            )
        if len(set(slots)) != len(slots):
            raise DSV41Error(f"batch: each sequence needs a cache slot of its own, got {slots}")
        vocab = self.config.text_config.vocab_size
        for i, (row, length, tail) in enumerate(zip(rows, past, tails, strict=True)):
            if not len(row):
                raise DSV41Error(f"batch row {i}: no new tokens")
            for kind, ids, first in (("token", row, 0), ("history token", tail, length - len(tail))):
                bad = np.flatnonzero((ids < 0) | (ids >= vocab))
                if len(bad):
                    where = f"batch row {i}: {kind} {first + bad[0]}"
                    raise DSV41Error(f"{where} is {ids[bad[0]]}, expected an id in [0, {vocab})")

    def look_back(self, past: Sequence[Sequence[int]], rows: int) -> np.ndarray:
        """int64 [rows, N - 1]: what enters hashes of each sequence's known tokens, newest last, -1 before its start."""
        window = self.config.text_config.engram_max_ngram_size - 1
        history = np.full((rows, window), -1, np.int64)
        for i, ids in enumerate(past):
            tail = ids[max(len(ids) - window, 0) :]
            history[i, window - len(tail) :] = tail
        return history

    def join_rows(self, rows: EngramRows) -> tuple[np.ndarray | jax.Array, np.ndarray | jax.Array | None]:
        """Engram rows of a step from what this process has looked up; those of other hosts come from there.

        Where tables are cut by row over hosts, all processes must call for the same steps in the same order.
        """
        if self.engram.whole:
            return tuple(rows)
        return join_rows(rows, self.mesh, self.rules.spec("batch"))

    def _engram_rows(
        self, ids: np.ndarray, tails: list[np.ndarray], lengths: list[int]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        if self.engram is None:
            return None, None
        valid = np.arange(ids.shape[1]) < np.array(lengths + [0] * (len(ids) - len(lengths)))[:, None]
        return self.join_rows(self.host_lookup.rows(ids, self.look_back(tails, len(ids)), valid))

    def forward(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        *,
        logits: str = "last",
        capture: tuple[str, ...] = (),
        forced: ForcedChoices | None = None,
        tail: int | None = None,
    ) -> tuple[jax.Array | None, KVCache, dict[str, jax.Array]]:
        """One step: prefill chunk, decode or verify. The cache is consumed; use the returned one.

        Args and returns as in `dsv41.models.backbone.forward`.

        Raises:
          DSV41Error: a row would grow past what a sequence may hold, or names a slot that the cache lacks.
        """
        if isinstance(batch.start, np.ndarray):
            end = batch.start + batch.num_new
            if (end > cache.max_tokens).any():
                row = int(np.argmax(end))
                raise DSV41Error(
                    f"batch row {row}: {batch.num_new[row]} tokens at position {batch.start[row]} exceed the cache's "
                    f"{cache.max_tokens} tokens a sequence"
                )
            if batch.slot.min() < 0 or batch.slot.max() >= cache.num_slots:
                raise DSV41Error(f"batch: slots {batch.slot.tolist()} are not all in [0, {cache.num_slots})")
            self._check_rows(batch, cache)
        batch, forced = self.place_rows(batch), self.place_rows(forced)
        static = {"config": self.config, "logits": logits, "capture": capture, "tail": tail}
        return compiled_forward(self.mesh, self.rules)(self.params, batch, cache, forced, **static)

    def place_rows(self, tree: Any) -> Any:
        """Arrays of the host whose first axis counts rows of a step, on the devices that compute these rows."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        return place(tree, self.mesh, self.rules.spec("batch"))

    def own_rows(self, rows: int) -> np.ndarray:
        """bool [rows]: rows of a step whose Engram rows this process looks up. Those that its devices compute; or all,
        where tables are cut by row over hosts."""
        if self.mesh is None or not self.engram.whole or rows % self.row_shards:
            return np.ones(rows, bool)
        own = np.zeros(rows, bool)
        sharding = NamedSharding(self.mesh, self.rules.spec("batch"))
        for (index,) in sharding.addressable_devices_indices_map((rows,)).values():
            own[index] = True
        return own

    def _check_rows(self, batch: ForwardBatch, cache: KVCache) -> None:
        """A mesh spreads rows and slots alike: a row must be where its slot is."""
        shards, rows = self.row_shards, len(batch.slot)
        if rows % shards:
            raise DSV41Error(f"batch: {rows} rows cannot be spread equally over {shards} devices; see Model.batch_rows")
        of_slot, of_row = batch.slot // (cache.num_slots // shards), np.arange(rows) // (rows // shards)
        if wrong := np.flatnonzero((of_slot != of_row) & (batch.num_new > 0)).tolist():
            row = wrong[0]
            raise DSV41Error(
                f"batch row {row}: slot {batch.slot[row]} lies on device {of_slot[row]} of {shards}, the row on device "
                f"{of_row[row]}"
            )
