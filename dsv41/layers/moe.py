"""Mixture-of-experts sublayer."""

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41.config import DSV41Error, TextConfig
from dsv41.layers.linear import Linear, abstract
from dsv41.ops import moe
from dsv41.ops.linear import WeightFormat
from dsv41.sharding import LOCAL, ExpertPlacement, ShardingRules
from pallas_kernels.rounding import round_to_bf16


class _Expert(nnx.Module):
    """w1 (gate), w3 (up), w2 (down); with `experts`, stacked over a leading axis."""

    def __init__(self, dim: int, inner: int, format: WeightFormat, experts: int | None = None):
        self.w1 = Linear(dim, inner, format, experts)
        self.w2 = Linear(inner, dim, format, experts)
        self.w3 = Linear(dim, inner, format, experts)


class _Gate(nnx.Module):
    def __init__(self, dim: int, experts: int):
        self.weight = abstract(experts, dim)
        self.bias = abstract(experts, dtype=jnp.float32)
        self.bias_vl = abstract(experts, dtype=jnp.float32)


class MoE(nnx.Module):
    """Routed experts plus one shared expert; no token is ever dropped.

    With `rules.experts` it is one device's part inside `jax.shard_map`: the device's own tokens, and its own experts of
    the stacks. Gate and shared expert are the same on all devices. With a `placement` too, the stacks have extra slots
    with copies of experts (`dsv41.ops.expert_copies.with_copies` fills them), and results are the same.

    Raises:
      DSV41Error: the placement is for another number of experts, or the experts are on one device.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        dense: WeightFormat,
        routed: WeightFormat,
        experts: int,
        top_k: int,
        rules: ShardingRules = LOCAL,
        placement: ExpertPlacement | None = None,
    ):
        if placement is not None and (not rules.experts or placement.experts != experts):
            raise DSV41Error(
                f"expert placement: made for {placement.experts} experts on {placement.devices} devices, the layer has "
                f"{experts} over the axes {rules.experts}"
            )
        self.rules = rules
        self.placement = placement
        dim, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = _Gate(dim, experts)
        self.experts = _Expert(
            dim, inner, routed, experts if placement is None else placement.devices * placement.slots
        )
        self.shared_experts = _Expert(dim, inner, dense)
        self.top_k = top_k
        self.limit = config.swiglu_limit
        self.scale = config.routed_scaling_factor

    def __call__(
        self, x: jax.Array, valid: jax.Array, image_mask: jax.Array, forced: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x bfloat16 [B, T, D]; valid, image_mask bool [B, T]; forced int32 [B, T, K] or None.

        Returns y bfloat16 [B, T, D], experts int32 [B, T, K] ascending, weights float32 [B, T, K].
        """
        b, t, d = x.shape
        rows = x.reshape(b * t, d)
        with jax.named_scope("route"):
            chosen, weights = moe.route(
                rows,
                self.gate.weight[...],
                self.gate.bias[...],
                self.gate.bias_vl[...],
                image_mask.reshape(-1),
                top_k=self.top_k,
                scale=self.scale,
                forced=None if forced is None else forced.reshape(b * t, -1),
            )
        routed, shared = self.experts, self.shared_experts
        with jax.named_scope("experts"):
            total = moe.routed_experts(
                rows,
                chosen,
                weights,
                valid.reshape(-1),
                routed.w1.stored,
                routed.w3.stored,
                routed.w2.stored,
                self.limit,
                self.rules,
                self.placement,
            )
        with jax.named_scope("shared_expert"):
            common = moe.expert(rows, shared.w1.stored, shared.w3.stored, shared.w2.stored, None, self.limit)
        y = round_to_bf16(total + common.astype(jnp.float32))
        return y.reshape(b, t, d), chosen.reshape(b, t, -1), weights.reshape(b, t, -1)
