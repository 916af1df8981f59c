"""`jax.lax.ragged_all_to_all` on a backend that has none."""

import itertools

import jax
import jax.numpy as jnp


def emulated_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `jax.lax.ragged_all_to_all` is documented to do, from arrays that all devices know.

    Offsets and sizes are those of one or more updates for each device, [devices * updates]. Rows that it must not
    write, or that a device expects and nobody sends, spoil the output.
    """
    me = jax.lax.axis_index(axis_name)
    operands, first, sizes, at = (
        jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    devices = operands.shape[0]
    first, sizes, at = (a.reshape(devices, devices, -1) for a in (first, sizes, at))
    row = jnp.arange(operand.shape[0])
    written = jnp.zeros(output.shape[0], jnp.int32)
    for sender, update in itertools.product(range(devices), range(sizes.shape[-1])):
        start, size = first[sender, me, update], sizes[sender, me, update]
        inside = (row >= start) & (row < start + size)
        to = jnp.where(inside, row - start + at[sender, me, update], output.shape[0])
        output = output.at[to].set(operands[sender], mode="drop")
        written = written.at[to].add(1, mode="drop")
    complete = written.sum() == sizes[:, me].sum()
    fits = (first >= 0).all() & (first + sizes <= operand.shape[0]).all() & (sizes >= 0).all()
    agreed = (sizes[:, me].reshape(-1) == recv_sizes).all() & (written <= 1).all() & complete & fits
    bad = jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else jnp.iinfo(output.dtype).max
    return jnp.where(agreed, output, jnp.full_like(output, bad))
