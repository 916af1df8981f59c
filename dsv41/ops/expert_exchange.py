"""Experts spread over devices: tokens travel to them and what they gave travels back.

Every device has tokens of its own and the experts of its own stacks. A token goes once to each device that has at least
one of its experts, in the form in which experts see it: FP8 values and scales before FP8 and FP4 weights (which is half
the bytes and what they would be rounded to there), bfloat16 before bfloat16 ones. With it go the slots and routing
weights of its experts there. One bfloat16 row a (token, expert) comes back, and the token's own device sums these in
ascending order of experts. So the result has the bits of the unsharded product (on GPUs where both have blocks of 8
rows or both larger ones: their kernels do not round alike). Sums made before the way back would have others, and in
float32 they would be fewer bytes only where a token has more than two experts on a device.

What is sent from one device to another is limited to `capacity` tokens at a time, so that memory is bounded; what does
not fit goes in another round, and no token is ever dropped. All devices agree on the number of rounds beforehand. A
step of few tokens fits into one round whatever the skew, and needs no agreement.

Two transports give the same results:

| transport | where | moves | collectives of a round |
|---|---|---|---|
| "ragged" | TPU, GPU | what there is, `ragged_all_to_all` | `all_gather` of 3 integers a pair, out, back |
| "padded" | elsewhere | whole buffers, `all_to_all` | out, back |

XLA has no ragged exchange for CPU, and may refuse it between GPUs of several processes or more than eight GPUs.

The ragged one has room for results of four times the fair share of rows where these are few, of a quarter more where
they are many; where more come, it multiplies and sends back several times.
Where there may be more rounds than one, the maximum of an integer comes before the first. Loops have a length that is
known at run time only, so such a step has no reverse-mode derivative.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.config import DSV41Error
from dsv41.ops import collectives
from dsv41.ops.expert_layout import block_rows, layout_by_expert, sum_in_order
from dsv41.ops.expert_transport import (
    ExchangePlan,
    ExchangeSizes,
    Padded,
    Ragged,
    choose_transport,
    plan_exchange,
    update_pieces,
)
from dsv41.ops.linear import QuantizedArray, WeightFormat
from dsv41.sharding import ExpertPlacement, MeshAxes, ShardingRules
from pallas_kernels import formats
from pallas_kernels.experts.ops import expert_blocks
from pallas_kernels.quantize import ops as quantize
from pallas_kernels.rounding import round_to_bf16

# Rows that a device makes room for in a round, of tokens that come and, with "padded", of results that go back.
_ROUND_ROWS = 16384
# Rows of the expert product at a time: so many, or more where a device has many experts, which it reads each time. 192
# experts of released widths take 1.9 GB for 36,864 rows: both ways in blocks, the activation, the results.
_PRODUCT_ROWS = 8192
_EXPERT_ROWS = 192
# Bytes of a row that travels are a multiple: TPUs move whole tiles of 128 words of 32 bits.
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
    at_once: int | None = None,
    pieces: int | None = None,
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
      at_once: results that go back at once where the transport is ragged; None: by the fair share.
      pieces: updates in which what goes to a device travels where the transport is ragged; None: by the devices.

    Returns:
      float32 [T, D].

    Raises:
      DSV41Error: the placement is for another number of devices or slots; the transport has an unknown name.
    """
    tokens, k = chosen.shape
    if not tokens:
        return jnp.zeros(x.shape, jnp.float32)
    slots, devices = stacks[0].values.shape[0], collectives.axis_size(rules.experts)
    ragged = choose_transport(devices, transport) == "ragged"
    capacity, at_once = _limits(ragged, devices, slots, tokens, k, capacity, at_once)
    pieces = pieces or update_pieces(devices, tokens * k)
    sizes = ExchangeSizes(rules.experts, devices, slots, tokens, k, x.shape[1], capacity, at_once, pieces)
    owner, slot = _where(chosen, slots, rules.experts, placement)
    plan = plan_exchange(jnp.where(valid[:, None], owner, devices), devices)
    rows = functools.partial(_rows, _pack(x, stacks[0].format), owner, slot, weights, plan)
    travel = (Ragged if ragged else Padded)(sizes, plan, rows, rules.tokens)
    experts = functools.partial(_experts, sizes, stacks, limit)

    home = jnp.zeros((tokens * k, x.shape[1]), x.dtype)
    if capacity == tokens:
        home = travel.round(0, home, experts)
    else:
        rounds = -(-jax.lax.pmax(plan.pairs.max(), rules.tokens) // capacity)
        home = jax.lax.fori_loop(0, rounds, lambda i, home: travel.round(i * capacity, home, experts), home)
    return sum_in_order(home[plan.position])


def _limits(
    ragged: bool, devices: int, slots: int, tokens: int, k: int, capacity: int | None, at_once: int | None
) -> tuple[int, int]:
    """Tokens from one device to another in a round, and results that go back at once; those asked for or the usual."""
    most = devices * min(k, slots)  # results of a round for every token of the capacity
    if capacity is None:
        capacity = max(_ROUND_ROWS // (devices if ragged else most), 1)
    capacity = min(capacity, tokens)
    if not ragged or at_once is None:
        at_once = _product_rows(tokens * k, slots) if ragged else most * capacity
    return capacity, min(at_once, most * capacity)


def _product_rows(share: int, slots: int) -> int:
    """Rows of the expert product at a time, where a device's fair share is so many: all of them if chance allows."""
    most, usual = max(_PRODUCT_ROWS, _EXPERT_ROWS * slots), math.ceil(1.25 * share)
    if usual <= most:
        return min(max(4 * share, 64), most)
    return -(-usual // -(-usual // most))  # in equal parts


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
    """Tokens bfloat16 [..., D] from the beginning of rows that travelled, [..., parts, words]."""
    rows = rows.reshape(*rows.shape[:-2], -1)
    if rows.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(rows[..., :width], jnp.bfloat16)
    values = jax.lax.bitcast_convert_type(rows[..., :width], jnp.float8_e4m3fn)
    scales = rows[..., width : width + width // quantize.FP8_GROUP]
    return jax.lax.platform_dependent(values, scales, tpu=dequantize_by_product, default=quantize.dequantize_fp8)


def dequantize_by_product(values: jax.Array, scales: jax.Array) -> jax.Array:
    """`quantize.dequantize_fp8` with scales spread over channels by a product with zeros and ones, which is exact.

    TPUs are faster at that than at repeating neighbours, for which XLA gives every 32 channels a row of 128. A NaN
    spoils its whole token, as it does inside any expert.
    """
    group_of_channel = jnp.arange(values.shape[-1]) // quantize.FP8_GROUP
    ones = (jnp.arange(scales.shape[-1])[:, None] == group_of_channel).astype(jnp.bfloat16)
    spread = jnp.dot(formats.e8m0_to_f32(scales).astype(jnp.bfloat16), ones, preferred_element_type=jnp.float32)
    return round_to_bf16(formats.e4m3_to_f32(values) * spread)


def _words(x: jax.Array, dtype: Any) -> jax.Array:
    """32-bit numbers [rows, K] as words of `dtype`, [rows, K * words]."""
    return jax.lax.bitcast_convert_type(x, dtype).reshape(x.shape[0], -1)


def _numbers(words: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_words`."""
    per = 4 // words.dtype.itemsize
    return jax.lax.bitcast_convert_type(words.reshape(words.shape[0], -1, per), dtype)


def _rows(
    packed: jax.Array, owner: jax.Array, slot: jax.Array, weights: jax.Array, plan: ExchangePlan, pairs: jax.Array
) -> jax.Array:
    """The rows of some pairs [n], of any number, as they travel: [n, parts, words]. Zeros for pairs that do not exist.

    A row is the packed token, a gap, K slots and K weights. A slot travels as its number and one, so that a row of
    zeros has no expert. The words of 32 bits are an axis: TPUs lay out what travels like that, and copy nothing then.
    """
    token = plan.token.at[pairs].get(mode="fill", fill_value=packed.shape[0])
    receiver = plan.receiver.at[pairs].get(mode="fill", fill_value=-1)
    there = owner.at[token].get(mode="fill", fill_value=-2) == receiver[:, None]
    slots = jnp.where(there, slot.at[token].get(mode="fill", fill_value=0) + 1, 0)
    shares = jnp.where(there, weights.at[token].get(mode="fill", fill_value=0), 0)
    numbers = jnp.concatenate([_words(slots, packed.dtype), _words(shares, packed.dtype)], axis=1)
    token_words = packed.at[token].get(mode="fill", fill_value=0)
    parts, gap = _row_form(packed.shape[1], numbers.shape[1], packed.dtype.itemsize)
    row = jnp.concatenate([jnp.pad(token_words, ((0, 0), (0, gap))), numbers], axis=1)
    return row.reshape(row.shape[0], parts, -1)


def _row_form(packed: int, numbers: int, itemsize: int) -> tuple[int, int]:
    """Parts of a row, and words of the gap, so that the numbers are inside the last part."""
    parts = 4 // itemsize
    words = max(packed + numbers, parts * numbers)
    return parts, -(-words // (_ROW_BYTES // itemsize)) * (_ROW_BYTES // itemsize) - packed - numbers


def _experts(
    sizes: ExchangeSizes, stacks: Stacks, limit: float, came: jax.Array, room: int | None
) -> Callable[[jax.Array | int], jax.Array]:
    """This device's experts as `dsv41.ops.expert_transport.Experts`."""
    slot, weight = _numbers_of(came, sizes)
    there = (slot > 0).reshape(sizes.devices, -1)
    if room is None:
        number = jnp.cumsum(there.reshape(-1), dtype=jnp.int32) - 1
    else:
        number = jnp.cumsum(there, axis=1, dtype=jnp.int32) - 1 + room * jnp.arange(sizes.devices)[:, None]
    most = -(-sizes.devices * sizes.room // sizes.at_once) * sizes.at_once
    at = jnp.where(there.reshape(-1), number.reshape(-1), most)
    row = jnp.arange(at.size, dtype=jnp.int32) // sizes.k
    entries = tuple(
        jnp.full(most, fill, value.dtype).at[at].set(value, mode="drop")
        for fill, value in ((came.shape[0], row), (sizes.slots, slot.reshape(-1) - 1), (0, weight.reshape(-1)))
    )
    block = block_rows(min(sizes.tokens * sizes.k, sizes.at_once), sizes.slots)

    def results(first: jax.Array | int) -> jax.Array:
        row, slot, weight = (jax.lax.dynamic_slice_in_dim(a, first, sizes.at_once) for a in entries)
        layout = layout_by_expert(slot[:, None], weight[:, None], sizes.slots, block=block)
        source = row.at[layout.source].get(mode="fill", fill_value=came.shape[0])
        x = _unpack(came.at[source].get(mode="fill", fill_value=0), sizes.width)
        weights = ((w.values, w.scales) for w in stacks)
        y = expert_blocks(x, layout.row_weight, layout.block_expert, *weights, limit=limit)
        return y.reshape(-1, sizes.width).at[layout.place[:, 0]].get(mode="fill", fill_value=0)

    return results


def _numbers_of(rows: jax.Array, sizes: ExchangeSizes) -> tuple[jax.Array, jax.Array]:
    """Slots and one, and weights, int32 and float32 [rows, K], of rows that travelled."""
    words = sizes.k * 4 // rows.dtype.itemsize
    numbers = rows[:, -1, -2 * words :]
    return _numbers(numbers[:, :words], jnp.int32), _numbers(numbers[:, words:], jnp.float32)
