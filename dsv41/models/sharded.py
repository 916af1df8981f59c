"""One step as one program a device: `jax.shard_map` around `forward`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41.cache import ForwardBatch, KVCache, cache_specs
from dsv41.config import DSV41Error, ModelConfig
from dsv41.models.backbone import ForcedChoices, Params, backbone_axes, forward
from dsv41.models.drafter import drafter_axes
from dsv41.sharding import LOCAL, ShardingRules, devices_along
from pallas_kernels.fixed_order import compiler_options


def param_specs(config: ModelConfig, rules: ShardingRules, part: str = "backbone") -> Params:
    """`PartitionSpec`s of the parameters of "backbone" or "drafter", nested as these are."""
    axes = backbone_axes(config) if part == "backbone" else drafter_axes(config)
    return jax.tree.map(lambda logical: rules.spec(*logical), axes, is_leaf=lambda x: isinstance(x, tuple))


def param_shardings(abstract: Params, specs: Params, mesh: Mesh) -> Params:
    """Abstract parameters with their shardings.

    Raises:
      DSV41Error: an axis is not divisible by the devices it is spread over; names the parameter.
    """

    def one(path, struct: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        for size, devices in spread(struct.shape, spec, mesh.shape):
            if size % devices:
                name = ".".join(str(k.key) for k in path)
                raise DSV41Error(f"parameter {name} {list(struct.shape)}: {size} is not divisible by {devices} devices")
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(one, abstract, specs)


def spread(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Size of each axis that a spec names, and over how many devices it is spread."""
    for size, axes in zip(shape, spec, strict=False):
        if axes is not None:
            yield size, devices_along(sizes, (axes,) if isinstance(axes, str) else axes)


def on_mesh(
    fn: Callable[..., Any], mesh: Mesh | None, rules: ShardingRules, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`fn(*arguments, rules=rules)` as one program a device, each with its parts of the arguments.

    The specs are prefixes of arguments and results. Without a mesh it is `fn` itself.
    """
    if mesh is None:
        return fn
    # Collectives are written by hand: JAX's checker cannot see that sums over `heads` are alike on all of them.
    step = functools.partial(fn, rules=rules)
    return jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def made_once(make: Callable[[Mesh | None, ShardingRules], Any]) -> Callable[..., Any]:
    """`make(mesh, rules)`, once for each pair, whether a caller names the defaults (one device) or leaves them out."""
    made = functools.cache(make)

    @functools.wraps(make)
    def get(mesh: Mesh | None = None, rules: ShardingRules = LOCAL) -> Any:
        return made(mesh, rules)

    return get


@made_once
def compiled_forward(mesh: Mesh | None, rules: ShardingRules) -> Callable[..., Any]:
    """`forward`, compiled once a shape for all models; the donated cache is updated in place.

    With a mesh, arguments and results are whole arrays spread over it: parameters by `param_specs`, the cache by
    `cache_specs`, everything else by rows.
    """
    return jax.jit(
        forward if mesh is None else functools.partial(_sharded_forward, mesh, rules),
        static_argnames=("config", "logits", "capture", "tail"),
        donate_argnames=("cache",),
        compiler_options=compiler_options(),
    )


def _sharded_forward(
    mesh: Mesh,
    rules: ShardingRules,
    params: Params,
    batch: ForwardBatch,
    cache: KVCache,
    forced: ForcedChoices | None = None,
    *,
    config: ModelConfig,
    **static: Any,
):
    rows, caches = rules.spec("batch"), cache_specs(cache, rules)
    arguments, results = (param_specs(config, rules), rows, caches, rows), (rows, caches, rows)
    step = on_mesh(functools.partial(forward, config=config, **static), mesh, rules, arguments, results)
    return step(params, batch, cache, forced)
