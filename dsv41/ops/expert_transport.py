"""How tokens travel to the devices of their experts and results travel back (see `dsv41.ops.expert_exchange`)."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

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
      at_once: results of a device that go back at once; with "padded", all of a round.
      pieces: of what goes to a device at once, with "ragged".
    """

    axes: MeshAxes
    devices: int
    slots: int
    tokens: int
    k: int
    width: int
    capacity: int
    at_once: int
    pieces: int = 1

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


class Experts(Protocol):
    """What a device does with rows that came."""

    def __call__(self, came: jax.Array, room: int | None) -> Callable[[jax.Array | int], jax.Array]:
        """Takes rows [devices * capacity, parts, words] by sender.

        Entries count through the senders; with `room`, those of each sender from a multiple of it on.

        Returns:
          a function that gives the results of `at_once` entries from a first one on, bfloat16 [at_once, D].
        """


class Padded:
    """Whole buffers: `capacity` rows for each device whether there are as many tokens or not."""

    def __init__(
        self, sizes: ExchangeSizes, plan: ExchangePlan, rows: Callable[[jax.Array], jax.Array], token_axes: MeshAxes
    ):
        """`rows` makes the rows [n, parts, words] of any pairs int32 [n] as they travel."""
        del token_axes  # the rounds are agreed on already
        self.sizes, self.plan, self.rows = sizes, plan, rows

    def round(self, start: jax.Array | int, home: jax.Array, experts: Experts) -> jax.Array:
        """Sends each device its pairs from rank `start` on, and takes in what comes back for them.

        Args:
          start: a multiple of the capacity.
          home: bfloat16 [T * K, D] in the plan's order, as far as earlier rounds filled it.
          experts: what is done with the tokens of others meanwhile.

        Returns:
          home with the results of this round.
        """
        plan, sizes = self.plan, self.sizes
        rank = start + jnp.arange(sizes.capacity)
        pair = jnp.where(rank < plan.pairs[:, None], plan.first_pair[:, None] + rank, plan.token.shape[0])
        came = collectives.exchange(self.rows(pair.reshape(-1)), sizes.axes)
        back = collectives.exchange(experts(came, sizes.room)(0), sizes.axes)
        now = _of_round(plan, sizes, start)
        owner = jnp.minimum(plan.owner, sizes.devices - 1)
        first = plan.first_entry + _by_owner(plan, sizes, plan.rank < start)
        at = owner * sizes.room + jnp.arange(plan.owner.size) - first[owner]
        return jnp.where(now[:, None], back[jnp.where(now, at, 0)], home)


class Ragged:
    """Only the rows that there are; methods as those of `Padded`.

    All devices hear how much each sends to each, and so know all sizes and places of both ways.
    """

    def __init__(
        self, sizes: ExchangeSizes, plan: ExchangePlan, rows: Callable[[jax.Array], jax.Array], token_axes: MeshAxes
    ):
        self.sizes, self.plan, self.token_axes = sizes, plan, token_axes
        self.rows = rows(jnp.arange(plan.token.shape[0]))

    def round(self, start: jax.Array | int, home: jax.Array, experts: Experts) -> jax.Array:
        plan, sizes = self.plan, self.sizes
        me = collectives.axis_index(sizes.axes)
        pairs = jnp.clip(plan.pairs - start, 0, sizes.capacity)
        first = plan.first_entry + _by_owner(plan, sizes, plan.rank < start)
        entries = _by_owner(plan, sizes, _of_round(plan, sizes, start))
        # [devices that send, devices that receive, 3]
        told = collectives.gather(jnp.stack([pairs, entries, first], axis=-1)[None], sizes.axes)
        came = ragged_all_to_all(
            self.rows,
            jnp.zeros((sizes.devices * sizes.capacity, *self.rows.shape[1:]), self.rows.dtype),
            jnp.minimum(plan.first_pair + start, self.rows.shape[0]),
            pairs,
            jnp.full(sizes.devices, me * sizes.capacity, jnp.int32),
            told[:, me, 0],
            axes=sizes.axes,
            pieces=sizes.pieces,
        )
        results = experts(came, None)
        before = jnp.cumsum(told[..., 1], axis=0) - told[..., 1]

        def part(number: jax.Array | int, home: jax.Array) -> jax.Array:
            """Entries from a first one on, counted on each device through those that came there."""
            begin = number * sizes.at_once
            skipped, end = (jnp.clip(bound - before, 0, told[..., 1]) for bound in (begin, begin + sizes.at_once))
            return ragged_all_to_all(
                results(begin),
                home,
                jnp.clip(before[:, me] - begin, 0, sizes.at_once),
                (end - skipped)[:, me],
                told[:, me, 2] + skipped[:, me],
                (end - skipped)[me],
                axes=sizes.axes,
                pieces=sizes.pieces,
            )

        if sizes.at_once >= sizes.devices * sizes.room:
            return part(0, home)
        parts = -(-told[..., 1].sum(axis=0).max() // sizes.at_once)
        return jax.lax.fori_loop(0, agreed(parts, sizes.axes, self.token_axes), part, home)


def ragged_all_to_all(
    rows: jax.Array,
    output: jax.Array,
    first: jax.Array,
    count: jax.Array,
    at: jax.Array,
    came: jax.Array,
    *,
    axes: MeshAxes,
    pieces: int,
) -> jax.Array:
    """`jax.lax.ragged_all_to_all` with one run of rows for each device, which travels in several updates.

    Args:
      rows: [n, ...] of this device.
      output: [m, ...], into which what comes is written.
      first, count: int32 [devices], the rows that go to each.
      at: int32 [devices], where they begin in its output.
      came: int32 [devices], how many come from each.
      axes: mesh axes of the devices.
      pieces: updates for each.

    Returns:
      output with what came.
    """

    def bounds(count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where pieces begin and end, [devices, pieces]."""
        each = -(-count // pieces)[:, None]
        begin = jnp.minimum(jnp.arange(pieces) * each, count[:, None])
        return begin, jnp.minimum(begin + each, count[:, None])

    (begin, end), (came_begin, came_end) = bounds(count), bounds(came)
    updates = first[:, None] + begin, end - begin, at[:, None] + begin, came_end - came_begin
    return jax.lax.ragged_all_to_all(rows, output, *(x.reshape(-1) for x in updates), axis_name=axes)


def agreed(count: jax.Array, axes: MeshAxes, token_axes: MeshAxes) -> jax.Array:
    """The largest of a number that is the same along `axes`: no device may be a round ahead, also of those that it
    does not exchange with."""
    others = tuple(axis for axis in token_axes if axis not in axes)
    return jax.lax.pmax(count, others) if others else count


def _of_round(plan: ExchangePlan, sizes: ExchangeSizes, start: jax.Array | int) -> jax.Array:
    """bool [T * K]: entries that travel in the round that begins at rank `start`."""
    return (plan.rank >= start) & (plan.rank < start + sizes.capacity) & (plan.owner < sizes.devices)


def _by_owner(plan: ExchangePlan, sizes: ExchangeSizes, entries: jax.Array) -> jax.Array:
    """int32 [devices]: how many of the marked entries bool [T * K] go to each device."""
    return jnp.zeros(sizes.devices, jnp.int32).at[plan.owner].add(entries.astype(jnp.int32), mode="drop")


# GPUs that XLA's own kernel for ragged exchanges can serve, and updates a device that keep its thread blocks busy.
_KERNEL_GPUS = 8
_MOST_PIECES = 256
_PIECE_ROWS = 2


def choose_transport(devices: int, asked: str | None = None) -> str:
    """The transport's name, "ragged" or "padded"; by the devices of the mesh in use unless asked for. Says once which.

    Raises:
      DSV41Error: there is no such transport.
    """
    if asked not in (None, "ragged", "padded"):
        raise DSV41Error(f"expert exchange: no transport {asked!r}, expected ragged or padded")
    platform = _platform()
    # Between other GPUs XLA may refuse ragged exchanges, or make a call of every update.
    in_reach = devices <= _KERNEL_GPUS and jax.process_count() == 1
    chosen = asked or ("ragged" if platform == "tpu" or (platform == "gpu" and in_reach) else "padded")
    where = "" if platform != "gpu" or in_reach else f", {devices} of them in {jax.process_count()} processes"
    _say(chosen, "asked for" if asked else f"devices are {platform}{where}")
    return chosen


def update_pieces(devices: int, rows: int) -> int:
    """Updates in which up to `rows` rows go to one of so many devices, with "ragged".

    XLA's kernel between GPUs copies every update with one thread block, which moves 3 to 6 GB/s on an H200: it needs
    hundreds of them (docs/benchmarks.md). TPUs copy an update at full speed.
    """
    return min(max(rows // devices // _PIECE_ROWS, 16), _MOST_PIECES) if _platform() == "gpu" else 1


def _platform() -> str:
    """Of the devices of the mesh in use."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = dispatch.backend() if device is None else device.platform
    return "gpu" if platform == "cuda" else platform


@functools.cache
def _say(chosen: str, why: str) -> None:
    """One line for every choice, however often it is made."""
    _log.info("expert exchange: %s (%s)", {"ragged": "ragged_all_to_all", "padded": "padded all_to_all"}[chosen], why)
