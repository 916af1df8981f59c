"""Experts spread over devices: tokens travel to them and what they gave travels back.

Every device has tokens of its own and the experts of its own stacks. A token goes once to each device that has at least
one of its experts, in the form in which experts see it: FP8 values and scales before FP8 and FP4 weights (which is half
the bytes and what they would be rounded to there), bfloat16 before bfloat16 ones. With it go the slots and routing
weights of its experts there. One bfloat16 row a (token, expert) comes back, and the token's own device sums these in
ascending order of experts. So the result has the bits of the unsharded product. Sums made before the way back would
have others, and in float32 they would be fewer bytes only where a token has more than two experts on a device.

What is sent from one device to another is limited to `capacity` tokens at a time, so that memory is bounded; what does
not fit goes in another round, and no token is ever dropped. All devices agree on the number of rounds beforehand. A
step of few tokens fits into one round whatever the skew, and needs no agreement.

Two transports give the same arrays:

| transport | where | moves | collectives |
|---|---|---|---|
| "ragged" | TPU, GPU | what there is | 2 `ragged_all_to_all` a round; before the first one `all_to_all` of 2 numbers |
| "padded" | elsewhere: XLA has no ragged one for CPU | whole buffers | 2 `all_to_all` a round |

Where there may be more rounds than one, the maximum of an integer comes before the first. Rounds are a loop of a length
that is known at run time only, so such a step has no reverse-mode derivative.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.config import DSV41Error
from dsv41.ops import collectives
from dsv41.ops.expert_layout import BlockLayout, block_rows, layout_by_expert, sum_in_order
from dsv41.ops.expert_placement import ExpertPlacement
from dsv41.ops.expert_transport import ExchangePlan, ExchangeSizes, Padded, Ragged, choose_transport, plan_exchange
from dsv41.ops.linear import QuantizedArray, WeightFormat
from dsv41.sharding import MeshAxes, ShardingRules
from pallas_kernels.experts.ops import expert_blocks
from pallas_kernels.quantize import ops as quantize

# Results that a device makes room for in a round: its share of the memory bound above.
_ROUND_ROWS = 32768
# Rows that are gathered for the expert product at a time.
_PRODUCT_ROWS = 8192
# TPUs move rows of whole 512 bytes.
_ROW_BYTES = 512

Stacks = tuple[QuantizedArray, QuantizedArray, QuantizedArray]


def exchanged_experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    valid: jax.Array,
    stacks: Stacks,
    limit: float,
    *,
    rules: ShardingRules,
    placement: ExpertPlacement | None = None,
    transport: str | None = None,
    capacity: int | None = None,
) -> jax.Array:
    """`dsv41.ops.moe.routed_experts` inside `jax.shard_map`, bit for bit.

    Args:
      x: bfloat16 [T, D], this device's own tokens; T is the same on all devices.
      chosen, weights: int32 and float32 [T, K]; the K experts of a token differ.
      valid: bool [T]; the others go nowhere and return 0.
      stacks: w1, w3, w2 of this device's experts: [slots, F, D], [slots, F, D], [slots, D, F].
      limit: of SwiGLU.
      rules: experts are spread over `rules.experts`, tokens over `rules.tokens`.
      placement: which experts are in the stacks; None: each device has its share of all, in order.
      transport: "ragged" or "padded"; None: by the devices of the mesh.
      capacity: tokens from one device to another in a round; None: as many as memory should take.

    Returns:
      float32 [T, D].

    Raises:
      DSV41Error: the placement is for another number of devices or slots; the transport has an unknown name.
    """
    tokens, k = chosen.shape
    slots, devices = stacks[0].values.shape[0], collectives.axis_size(rules.experts)
    transport_of = Ragged if choose_transport(transport) == "ragged" else Padded
    if not tokens:
        return jnp.zeros(x.shape, jnp.float32)
    capacity = max(_ROUND_ROWS // (devices * min(k, slots)), 1) if capacity is None else capacity
    sizes = ExchangeSizes(rules.experts, devices, slots, tokens, k, x.shape[1], min(capacity, tokens))
    owner, slot = _where(chosen, slots, rules.experts, placement)
    plan = plan_exchange(jnp.where(valid[:, None], owner, devices), devices)
    travel = transport_of(sizes, plan, functools.partial(_rows, _pack(x, stacks[0].format), owner, slot, weights, plan))

    def one_round(number: jax.Array | int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        home, returned = carry
        y, count = _product(travel.out(number * sizes.capacity), sizes, stacks, limit)
        return travel.back(home, y, number * sizes.capacity, count, returned), returned + count

    home = jnp.zeros((tokens * k, x.shape[1]), x.dtype), jnp.zeros(devices, jnp.int32)
    if sizes.capacity == tokens:
        home = one_round(0, home)
    else:
        # Agreed by all devices that there are, not only by those that exchange, so that none is a round ahead.
        rounds = -(-jax.lax.pmax(plan.pairs.max(), rules.tokens) // sizes.capacity)
        home = jax.lax.fori_loop(0, rounds, one_round, home)
    return sum_in_order(home[0][plan.position])


def _where(
    chosen: jax.Array, slots: int, axes: MeshAxes, placement: ExpertPlacement | None
) -> tuple[jax.Array, jax.Array]:
    """Device and slot of each expert [T, K]; of several copies, tokens take one after the other.

    Raises:
      DSV41Error: the placement is for another number of devices or slots.
    """
    if placement is None:
        return chosen // slots, chosen % slots
    devices = collectives.axis_size(axes)
    if (placement.devices, placement.slots) != (devices, slots):
        raise DSV41Error(
            f"expert placement: made for {placement.slots} slots on {placement.devices} devices, used for {slots} on "
            f"{devices}"
        )
    device, slot, count = (jnp.asarray(table) for table in placement.copies)
    turn = jnp.arange(chosen.shape[0])[:, None] + collectives.axis_index(axes)
    copy = turn % count[chosen]
    return device[chosen, copy], slot[chosen, copy]


def _pack(x: jax.Array, format: WeightFormat) -> jax.Array:
    """What experts of this format see of each token: uint16 [T, D], or FP8 values, then scales, uint8 [T, D + D/32]."""
    if format is WeightFormat.BF16:
        return jax.lax.bitcast_convert_type(x, jnp.uint16)
    values, scales = quantize.quantize_fp8(x)
    return jnp.concatenate([jax.lax.bitcast_convert_type(values, jnp.uint8), scales], axis=1)


def _unpack(rows: jax.Array, width: int) -> jax.Array:
    """Tokens bfloat16 [..., D] from the beginning of rows that travelled."""
    if rows.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(rows[..., :width], jnp.bfloat16)
    values = jax.lax.bitcast_convert_type(rows[..., :width], jnp.float8_e4m3fn)
    return quantize.dequantize_fp8(values, rows[..., width : width + width // quantize.FP8_GROUP])


def _words(x: jax.Array, dtype: Any) -> jax.Array:
    """32-bit numbers [rows, K] as words of `dtype`, [rows, K * words]."""
    return jax.lax.bitcast_convert_type(x, dtype).reshape(x.shape[0], -1)


def _numbers(words: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_words`."""
    per = 4 // words.dtype.itemsize
    return jax.lax.bitcast_convert_type(words.reshape(words.shape[0], -1, per), dtype)


def _packed_width(width: int, dtype: Any) -> int:
    """Words of a packed token of D channels."""
    return width if dtype == jnp.uint16 else width + width // quantize.FP8_GROUP


def _rows(
    packed: jax.Array, owner: jax.Array, slot: jax.Array, weights: jax.Array, plan: ExchangePlan, pairs: jax.Array
) -> jax.Array:
    """The rows of some pairs [n], of any number, as they travel: [n, words]. Zeros for pairs that do not exist.

    A slot travels as its number and one, so that a row of zeros has no expert.
    """
    token = plan.token.at[pairs].get(mode="fill", fill_value=packed.shape[0])
    receiver = plan.receiver.at[pairs].get(mode="fill", fill_value=-1)
    there = owner.at[token].get(mode="fill", fill_value=-2) == receiver[:, None]
    slots = jnp.where(there, slot.at[token].get(mode="fill", fill_value=0) + 1, 0)
    shares = jnp.where(there, weights.at[token].get(mode="fill", fill_value=0), 0)
    parts = [packed.at[token].get(mode="fill", fill_value=0), *(_words(n, packed.dtype) for n in (slots, shares))]
    row = jnp.concatenate(parts, axis=1)
    return jnp.pad(row, ((0, 0), (0, -row.shape[1] % (_ROW_BYTES // row.dtype.itemsize))))


def _product(rows: jax.Array, sizes: ExchangeSizes, stacks: Stacks, limit: float) -> tuple[jax.Array, jax.Array]:
    """What this device's experts give for rows that came.

    Args:
      rows: [devices * capacity, words] by sender (`_rows`).

    Returns:
      bfloat16 [devices * room, D]: the results for each sender in the order of its entries, zeros behind them; int32
      [devices]: how many there are.
    """
    shape = sizes.devices, sizes.capacity * sizes.k
    slot, weights = _entries(rows, sizes)
    there, nowhere = slot > 0, sizes.devices * sizes.room
    # With twice the fair share of rows, most experts fill one block only.
    share = min(2 * sizes.tokens * sizes.k, nowhere)
    block = block_rows(share, sizes.slots)
    chosen = jnp.where(there, slot - 1, sizes.slots)
    layout = layout_by_expert(chosen, weights, sizes.slots, block=block, most=nowhere)
    step = max(min(sizes.slots + share // block, _PRODUCT_ROWS // block), 1)
    y = _through_blocks(rows, layout, stacks, limit, sizes.width, step)
    number = jnp.cumsum(there.reshape(shape), axis=1, dtype=jnp.int32)
    at = jnp.where(there.reshape(shape), jnp.arange(sizes.devices)[:, None] * sizes.room + number - 1, nowhere)
    place = jnp.full(nowhere, y.shape[0], jnp.int32).at[at].set(layout.place.reshape(shape), mode="drop")
    return y.at[place].get(mode="fill", fill_value=0), number[:, -1]


def _entries(rows: jax.Array, sizes: ExchangeSizes) -> tuple[jax.Array, jax.Array]:
    """Slots and one, and weights, int32 and float32 [rows, K], of rows that travelled."""
    first = _packed_width(sizes.width, rows.dtype)
    words = sizes.k * 4 // rows.dtype.itemsize
    slots, weights = rows[:, first : first + words], rows[:, first + words : first + 2 * words]
    return _numbers(slots, jnp.int32), _numbers(weights, jnp.float32)


def _through_blocks(
    rows: jax.Array, layout: BlockLayout, stacks: Stacks, limit: float, width: int, step: int
) -> jax.Array:
    """The expert product of laid out rows, `step` blocks at a time as far as blocks are in use.

    Returns:
      bfloat16 [blocks * block, D], or more at the end.
    """
    blocks, block = layout.source.shape
    slots, weights = stacks[0].values.shape[0], [(w.values, w.scales) for w in stacks]

    def product(source: jax.Array, row_weight: jax.Array, block_expert: jax.Array) -> jax.Array:
        x = _unpack(rows.at[source].get(mode="fill", fill_value=0), width)
        return expert_blocks(x, row_weight, block_expert, *weights, limit=limit)

    parts = layout.source, layout.row_weight, layout.block_expert
    if blocks <= step:
        return product(*parts).reshape(-1, width)
    fills = rows.shape[0], 0, slots
    missing = -blocks % step
    parts = [
        jnp.pad(a, ((0, missing),) + ((0, 0),) * (a.ndim - 1), constant_values=fill)
        for a, fill in zip(parts, fills, strict=True)
    ]

    def one_step(number: jax.Array, y: jax.Array) -> jax.Array:
        some = (jax.lax.dynamic_slice_in_dim(a, number * step, step) for a in parts)
        return jax.lax.dynamic_update_slice_in_dim(y, product(*some), number * step, 0)

    used = (layout.block_expert < slots).sum()
    y = jnp.zeros((blocks + missing, block, width), jnp.bfloat16)
    return jax.lax.fori_loop(0, -(-used // step), one_step, y).reshape(-1, width)
