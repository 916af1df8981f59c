"""Steps of a model on a mesh, described by their sizes alone: what is compiled where no device is at hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41.cache import ForwardBatch, KVCache, PageOwners, cache_specs
from dsv41.cache.kv_cache import abstract_cache
from dsv41.cache.layout import CacheLayout
from dsv41.config import DSV41Error, ModelConfig, layer_schedule
from dsv41.cost_model.greedy_round import compiled_greedy_round
from dsv41.models.backbone import abstract_params
from dsv41.models.drafter import abstract_drafter_params
from dsv41.models.sharded import compiled_forward, param_shardings, param_specs
from dsv41.sharding import ShardingRules, devices_along, parse_mesh, preset_rules

PROGRAMS = ("prefill", "decode", "verify")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """One step of a model.

    Attributes:
      program: "decode": a token a row; "verify": a token and its drafts, then the next drafts (`greedy_round`);
        "prefill": a chunk of a prompt through the encoder, its last `sliding_window` tokens through the decoder too.
      rows: sequences, of all devices together.
      context: tokens that each of them may have in the cache.
      tokens: new tokens of each row in a step of prefill; the other programs have their own number.
      mesh: sizes of the mesh axes as text, such as "data=8,tensor=8".
      rules: sharding preset; "" means "prefill" for prefill and "decode" for the others.
    """

    program: str
    rows: int
    context: int
    tokens: int = 0
    mesh: str = ""
    rules: str = ""

    def __post_init__(self):
        if self.program not in PROGRAMS:
            raise DSV41Error(f"program {self.program!r}: expected one of {', '.join(PROGRAMS)}")
        for name in ("rows", "context"):
            if getattr(self, name) < 1:
                raise DSV41Error(f"{name} must be positive, got {getattr(self, name)}")
        if (self.program == "prefill") != (self.tokens > 0):
            raise DSV41Error(f"tokens={self.tokens}: a chunk of prefill has some, {self.program} has its own number")

    @property
    def mesh_sizes(self) -> dict[str, int]:
        return parse_mesh(self.mesh)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh_sizes.values())

    def rules_for(self, config: ModelConfig) -> ShardingRules:
        """Raises DSV41Error as `preset_rules`."""
        preset = self.rules or ("prefill" if self.program == "prefill" else "decode")
        return preset_rules(preset, self.mesh_sizes, config.text_config)

    def new_tokens(self, config: ModelConfig) -> int:
        """Of each row."""
        verified = 1 + config.text_config.dspark_block_size
        return {"decode": 1, "verify": verified, "prefill": self.tokens}[self.program]

    def tail(self, config: ModelConfig) -> int | None:
        """Tokens of a row that go through the decoder; None: all."""
        if self.program != "prefill" or layer_schedule(config.text_config).tail_problem:
            return None
        return min(config.text_config.sliding_window, self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step ready to be lowered.

    Attributes:
      function: jitted.
      params, batch, cache: its arguments as `jax.ShapeDtypeStruct` with shardings.
      drafter: likewise, parameters; None for a program that does not draft.
      static: its static arguments.
    """

    function: Callable[..., Any]
    params: Any
    batch: ForwardBatch
    cache: KVCache
    drafter: Any
    static: Mapping[str, Any]

    def lower(self) -> jax.stages.Lowered:
        models = (self.params,) if self.drafter is None else (self.params, self.drafter)
        return self.function.lower(*models, self.batch, self.cache, **self.static)


def abstract_step(config: ModelConfig, sizes: StepSizes, mesh: Mesh) -> Step:
    """The step of `sizes` on `mesh`, whose axes have the sizes that it names.

    Raises:
      DSV41Error: rows do not divide over the mesh, or a parameter does not, which it names; the context is longer than
        the model's; or there is no drafter to verify for.
    """
    c, rules = config.text_config, sizes.rules_for(config)
    shards = devices_along(sizes.mesh_sizes, rules.batch)
    if sizes.rows % shards:
        raise DSV41Error(
            f"rows={sizes.rows} are not divisible by the {shards} parts that mesh {sizes.mesh} has for them"
        )
    tokens, tail = sizes.new_tokens(config), sizes.tail(config)
    if sizes.context < tokens or sizes.context > c.max_position_embeddings:
        raise DSV41Error(f"context={sizes.context}: expected {tokens} to {c.max_position_embeddings} tokens")
    verify = sizes.program == "verify"
    if verify and not c.num_nextn_predict_layers:
        raise DSV41Error("program 'verify': the model has no drafter")
    layout = CacheLayout.from_config(c, draft_tokens=tokens - 1 if verify else 0)
    owners = PageOwners.of(rules, sizes.mesh_sizes)
    pages = owners.pages_for_all(sizes.rows, layout.pages_for(sizes.context))
    cache = abstract_cache(c, layout, num_slots=sizes.rows, max_tokens=sizes.context, num_pages=pages)
    static = {"config": config} if verify else {"config": config, "logits": "last", "tail": tail}
    drafter = abstract_drafter_params(config) if verify else None
    return Step(
        function=(compiled_greedy_round if verify else compiled_forward)(mesh, rules),
        params=param_shardings(abstract_params(config), param_specs(config, rules), mesh),
        drafter=param_shardings(drafter, param_specs(config, rules, "drafter"), mesh) if verify else None,
        batch=_abstract_batch(config, sizes.rows, tokens, tail, NamedSharding(mesh, rules.spec("batch"))),
        cache=with_shardings(cache, cache_specs(cache, rules), mesh),
        static=static,
    )


def with_shardings(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Abstract arrays with shardings by specs of the same tree."""

    def one(spec: PartitionSpec, struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _abstract_batch(
    config: ModelConfig, rows: int, tokens: int, tail: int | None, sharding: NamedSharding
) -> ForwardBatch:
    """A step's new tokens; Engram rows come with them, as the host looked them up."""
    c = config.text_config

    def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)

    layers, heads = len(c.engram_layer_ids), (c.engram_max_ngram_size - 1) * c.engram_n_heads
    quantized = config.quantization_config is not None
    dim, dtype = c.engram_head_dim, jnp.float8_e4m3fn if quantized else jnp.bfloat16
    return ForwardBatch(
        tokens=array(jnp.int32, tokens),
        num_new=array(jnp.int32),
        start=array(jnp.int32),
        slot=array(jnp.int32),
        image_mask=array(jnp.bool_, tokens),
        engram_values=array(dtype, tokens, layers, heads, dim) if layers else None,
        engram_scales=array(jnp.uint8, tokens, layers, heads, dim // 32) if layers and quantized else None,
        tail=None if tail is None else array(jnp.int32),
    )
