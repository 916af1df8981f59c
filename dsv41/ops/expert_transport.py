"""How tokens travel to the devices of their experts and results travel back (see `dsv41.ops.expert_exchange`)."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dsv41.config import DSV41Error
from dsv41.ops import collectives
from dsv41.sharding import MeshAxes
from pallas_kernels import dispatch

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ExchangeSizes:
    """Static numbers of an exchange.

    Attributes:
      axes: the mesh axes.
      devices: along them.
      slots: experts of a device.
      tokens, k, width: T, K, D.
      capacity: tokens from one device to another in a round.
    """

    axes: MeshAxes
    devices: int
    slots: int
    tokens: int
    k: int
    width: int
    capacity: int

    @property
    def room(self) -> int:
        """Entries from one device to another in a round, at most."""
        return self.capacity * min(self.k, self.slots)


class ExchangePlan(NamedTuple):
    """What a device sends, in order of receiver, then token: entries are (token, expert), pairs (token, receiver).

    Attributes:
      position: int32 [T, K], place of each entry; those that go nowhere come last.
      owner: int32 [T * K], receiver of each entry in that order; the number of devices for those that go nowhere.
      rank: int32 [T * K], the place of the entry's pair among those with the same receiver.
      token: int32 [pairs], token of each pair; T behind the last.
      receiver: int32 [pairs].
      pairs, first_pair, first_entry: int32 [devices].
    """

    position: jax.Array
    owner: jax.Array
    rank: jax.Array
    token: jax.Array
    receiver: jax.Array
    pairs: jax.Array
    first_pair: jax.Array
    first_entry: jax.Array


def plan_exchange(owner: jax.Array, devices: int) -> ExchangePlan:
    """owner int32 [T, K], `devices` for entries that go nowhere."""
    tokens, k = owner.shape
    entries = tokens * k
    order = jnp.argsort(owner.reshape(entries), stable=True).astype(jnp.int32)
    owner, token = owner.reshape(entries)[order], order // k
    differs = (owner[1:] != owner[:-1]) | (token[1:] != token[:-1])
    first = jnp.concatenate([jnp.ones(1, bool), differs]) & (owner < devices)
    pair = jnp.cumsum(first, dtype=jnp.int32) - 1
    pairs, count = (jnp.zeros(devices, jnp.int32).at[owner].add(n, mode="drop") for n in (first.astype(jnp.int32), 1))
    first_pair = jnp.cumsum(pairs) - pairs
    most = tokens * min(k, devices)
    at = jnp.where(first, pair, most)
    return ExchangePlan(
        position=jnp.zeros(entries, jnp.int32).at[order].set(jnp.arange(entries, dtype=jnp.int32)).reshape(tokens, k),
        owner=owner,
        rank=pair - first_pair[jnp.minimum(owner, devices - 1)],
        token=jnp.full(most, tokens, jnp.int32).at[at].set(token, mode="drop"),
        receiver=jnp.full(most, devices, jnp.int32).at[at].set(owner, mode="drop"),
        pairs=pairs,
        first_pair=first_pair,
        first_entry=jnp.cumsum(count) - count,
    )


class Padded:
    """Whole buffers: `capacity` rows for each device whether there are as many tokens or not."""

    def __init__(self, sizes: ExchangeSizes, plan: ExchangePlan, rows: Callable[[jax.Array], jax.Array]):
        self.sizes, self.plan, self.rows = sizes, plan, rows

    def out(self, start: jax.Array | int) -> jax.Array:
        """Sends each device its pairs from rank `start` on: what came, [devices * capacity, words] by sender."""
        plan = self.plan
        rank = start + jnp.arange(self.sizes.capacity)
        pair = jnp.where(rank < plan.pairs[:, None], plan.first_pair[:, None] + rank, plan.token.shape[0])
        return collectives.exchange(self.rows(pair.reshape(-1)), self.sizes.axes)

    def back(
        self, home: jax.Array, y: jax.Array, start: jax.Array | int, count: jax.Array, returned: jax.Array
    ) -> jax.Array:
        """Returns what the product gave and takes in what others return.

        Args:
          home: bfloat16 [T * K, D] in the plan's order, as far as earlier rounds filled it.
          y: bfloat16 [devices * room, D]: results by receiver, in the order in which its entries came.
          start: as in `out`.
          count, returned: int32 [devices], results for each receiver in this round, and in earlier ones.
        """
        plan, sizes = self.plan, self.sizes
        came = collectives.exchange(y, sizes.axes)
        now = _of_round(plan, sizes, start)
        before = _by_owner(plan, sizes, plan.rank < start)
        owner = jnp.minimum(plan.owner, sizes.devices - 1)
        at = owner * sizes.room + jnp.arange(plan.owner.size) - (plan.first_entry + before)[owner]
        return jnp.where(now[:, None], came[jnp.where(now, at, 0)], home)


class Ragged:
    """Only the rows that there are; methods as those of `Padded`."""

    def __init__(self, sizes: ExchangeSizes, plan: ExchangePlan, rows: Callable[[jax.Array], jax.Array]):
        self.sizes, self.plan = sizes, plan
        self.rows = rows(jnp.arange(plan.token.shape[0]))
        told = collectives.exchange(jnp.stack([plan.pairs, plan.first_entry], axis=1), sizes.axes)
        self.coming, self.first_at_home = told[:, 0], told[:, 1]

    def out(self, start: jax.Array | int) -> jax.Array:
        plan, sizes = self.plan, self.sizes
        mine = collectives.axis_index(sizes.axes) * sizes.capacity
        return jax.lax.ragged_all_to_all(
            self.rows,
            jnp.zeros((sizes.devices * sizes.capacity, self.rows.shape[1]), self.rows.dtype),
            jnp.minimum(plan.first_pair + start, self.rows.shape[0]),
            jnp.clip(plan.pairs - start, 0, sizes.capacity),
            jnp.full(sizes.devices, mine, jnp.int32),
            jnp.clip(self.coming - start, 0, sizes.capacity),
            axis_name=sizes.axes,
        )

    def back(
        self, home: jax.Array, y: jax.Array, start: jax.Array | int, count: jax.Array, returned: jax.Array
    ) -> jax.Array:
        plan, sizes = self.plan, self.sizes
        return jax.lax.ragged_all_to_all(
            y,
            home,
            jnp.arange(sizes.devices, dtype=jnp.int32) * sizes.room,
            count,
            self.first_at_home + returned,
            _by_owner(plan, sizes, _of_round(plan, sizes, start)),
            axis_name=sizes.axes,
        )


def _of_round(plan: ExchangePlan, sizes: ExchangeSizes, start: jax.Array | int) -> jax.Array:
    """bool [T * K]: entries that travel in the round that begins at rank `start`."""
    return (plan.rank >= start) & (plan.rank < start + sizes.capacity) & (plan.owner < sizes.devices)


def _by_owner(plan: ExchangePlan, sizes: ExchangeSizes, entries: jax.Array) -> jax.Array:
    """int32 [devices]: how many of the marked entries bool [T * K] go to each device."""
    return jnp.zeros(sizes.devices, jnp.int32).at[plan.owner].add(entries.astype(jnp.int32), mode="drop")


def choose_transport(asked: str | None = None) -> str:
    """ "ragged" or "padded"; by the devices of the mesh in use unless asked for. Says once which.

    Raises:
      DSV41Error: there is no such transport.
    """
    if asked not in (None, "ragged", "padded"):
        raise DSV41Error(f"expert exchange: no transport {asked!r}, expected ragged or padded")
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = dispatch.backend() if device is None else device.platform
    chosen = asked or ("ragged" if platform in ("tpu", "gpu", "cuda") else "padded")
    _say(chosen, "asked for" if asked else f"devices are {platform}")
    return chosen


@functools.cache
def _say(chosen: str, why: str) -> None:
    """One line for every choice, however often it is made."""
    _log.info("expert exchange: %s (%s)", {"ragged": "ragged_all_to_all", "padded": "padded all_to_all"}[chosen], why)
