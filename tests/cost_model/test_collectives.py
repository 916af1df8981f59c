"""Collectives of compiled programs: kinds, counts, bytes, layers."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv41.cost_model import Collective, collectives, count_by_layer, moved_like, parse, totals
from dsv41.cost_model.hlo import Shape
from dsv41.sharding import make_mesh

MESH = {"data": 2, "sequence": 2, "tensor": 2}
ALL = ("data", "sequence", "tensor")


@pytest.fixture(scope="module")
def found():
    """One collective of each kind that XLA has on CPU, and one three times in a loop."""
    mesh = make_mesh(MESH)

    def step(x, w):
        with jax.named_scope("layer_4"):
            a = jax.lax.all_gather(x, ("tensor",), axis=0, tiled=True)
            b = jax.lax.psum(a @ w, ("data",))
        with jax.named_scope("layer_5"):
            c = jax.lax.psum_scatter(b, ("sequence", "tensor"), scatter_dimension=0, tiled=True)
            d = jax.lax.all_to_all(b, ALL, 0, 0, tiled=True)
        e = jax.lax.ppermute(d, "sequence", [(0, 1), (1, 0)])
        return c, jax.lax.fori_loop(0, 3, lambda i, y: jax.lax.psum(jnp.tanh(y @ w), ("tensor",)), e)

    rows = P(("data", "sequence"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(rows, P()), out_specs=P(ALL), check_vma=False)

    def array(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    compiled = jax.jit(mapped).lower(array((64, 32), rows), array((32, 32), P())).compile()
    return collectives(parse(compiled.as_text()), 8)


def test_kinds_and_counts(found):
    by_kind = {}
    for c in found:
        by_kind[c.kind] = by_kind.get(c.kind, 0) + c.times
    # CPU writes a sum and a slice where TPU has a reduce-scatter of its own; both are what was asked for.
    assert by_kind.pop("all-reduce") + by_kind.pop("reduce-scatter", 0) == 1 + 1 + 3
    assert by_kind == {"all-gather": 1, "all-to-all": 1, "collective-permute": 1}


def test_bytes(found):
    kinds = {c.kind: c for c in found if c.kind != "all-reduce"}
    part = 16 * 32 * 4  # rows of a device
    assert kinds["all-gather"].operand_bytes == part and kinds["all-gather"].result_bytes == 2 * part
    assert kinds["all-gather"].devices == 2 and kinds["all-gather"].sent_bytes == part
    assert kinds["all-to-all"].devices == 8 and kinds["all-to-all"].operand_bytes == 2 * part
    assert kinds["all-to-all"].sent_bytes == 2 * part * 7 / 8
    assert kinds["collective-permute"].sent_bytes == 2 * part
    loop = next(c for c in found if c.times == 3)
    assert loop.kind == "all-reduce" and loop.sent_bytes == 2 * (2 * part) / 2
    row = next(t for t in totals(found) if t.kind == "all-reduce")
    assert row.sent_bytes == sum(c.times * c.sent_bytes for c in found if c.kind == "all-reduce")


def test_layers(found):
    layers = count_by_layer(found)
    assert set(layers) == {"layer_4", "layer_5", None}
    assert sum(layers["layer_4"].values()) == 2 and sum(layers["layer_5"].values()) == 2
    assert sum(layers[None].values()) == 1 + 3


def test_what_should_stay_is_named():
    """By number and size of its items, whatever its form; what is small is not looked at."""

    def gathered(*dims, dtype="bf16"):
        part = Shape(dtype, dims)
        return Collective(
            kind="all-gather", name="x", operands=(part,), results=(part,), devices=2, times=1, scope="layer_1"
        )

    weight, norm = Shape("f8e4m3fn", (1024, 512)), Shape("f32", (64,))
    assert moved_like([gathered(512, 8, 128, dtype="u8")], [weight, norm])
    assert moved_like([gathered(64, dtype="f32"), gathered(1024, 512), gathered(1024, 256)], [weight, norm]) == []


# As libtpu's compiler writes them: groups in three forms, a reduce-scatter as a fusion, asynchronous pairs.
TPU_TEXT = """HloModule jit_f

%all-reduce-scatter.1 (input.1: bf16[64,128]) -> bf16[8,128] {
  %input.1 = bf16[64,128]{1,0} parameter(0)
  %all-reduce.9 = bf16[64,128]{1,0} all-reduce(%input.1), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %dynamic-slice.1 = bf16[8,128]{1,0} dynamic-slice(%all-reduce.9), dynamic_slice_sizes={8,128}
}

%add (x.1: bf16[], x.2: bf16[]) -> bf16[] {
  %x.1 = bf16[] parameter(0)
  %x.2 = bf16[] parameter(1)
  ROOT %add.0 = bf16[] add(%x.1, %x.2)
}

%exchange.1 (input.2: bf16[8,16,128]) -> bf16[8,16,128] {
  %input.2 = bf16[8,16,128]{2,1,0} parameter(0)
  ROOT %all-to-all.1 = bf16[8,16,128]{2,1,0} all-to-all(%input.2), replica_groups=[2,8]<=[16], dimensions={0}
}

ENTRY %main (param.0: bf16[64,128], param.1: bf16[8,16,128]) -> bf16[8,128] {
  %param.0 = bf16[64,128]{1,0} parameter(0)
  %param.1 = bf16[8,16,128]{2,1,0} parameter(1)
  %zeros.1 = bf16[64,128]{1,0} broadcast()
  %sizes.1 = s32[8]{0} iota(), iota_dimension=0
  %fusion.1 = bf16[8,128]{1,0} fusion(%param.0), kind=kCustom, calls=%all-reduce-scatter.1, \
metadata={op_name="jit(f)/layer_2/attention/output/reduce_scatter"}
  %all-gather-start.1 = (bf16[64,128]{1,0}, bf16[256,128]{1,0}) all-gather-start(%param.0), \
replica_groups=mesh['data'=4,'sequence'=2,'tensor'=2] {'data'}, dimensions={0}, metadata={op_name="jit(f)/layer_2/x"}
  %all-gather-done.1 = bf16[256,128]{1,0} all-gather-done(%all-gather-start.1)
  %all-to-all-start.1 = ((bf16[8,16,128]), bf16[8,16,128]) async-start(%param.1), calls=%exchange.1
  %all-to-all-done.1 = bf16[8,16,128] async-done(%all-to-all-start.1)
  %collective-permute-start.1 = (bf16[64,128]{1,0}, bf16[64,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%param.0), source_target_pairs={{0,1},{1,0}}
  %collective-permute-done.1 = bf16[64,128]{1,0} collective-permute-done(%collective-permute-start.1)
  %ragged.1 = bf16[64,128]{1,0} ragged-all-to-all(%param.0, %zeros.1, %sizes.1, %sizes.1, %sizes.1, /*index=5*/%sizes.1)
  %all-reduce.7 = bf16[64,128]{1,0} all-reduce(%param.0), replica_groups={{0,1}}, to_apply=%add
  %slice.1 = bf16[8,128]{1,0} slice(%all-reduce.7), metadata={op_name="jit(f)/layer_9/attention/output/reduce_scatter"}
  ROOT %copy.1 = bf16[8,128]{1,0} copy(%fusion.1)
}
"""


def test_as_the_tpu_compiler_writes_them():
    found = {c.kind: c for c in collectives(parse(TPU_TEXT), 16)}
    size = 64 * 128 * 2
    assert {kind: (c.devices, c.operand_bytes, c.times) for kind, c in found.items()} == {
        "reduce-scatter": (8, size, 1),
        "all-gather": (4, size, 1),
        "all-to-all": (8, 2 * size, 1),
        "collective-permute": (16, size, 1),
        "ragged-all-to-all": (16, size, 1),
        "all-reduce": (2, size, 1),
    }
    assert found["all-gather"].result_bytes == 4 * size and found["all-gather"].layer == "layer_2"
    assert found["collective-permute"].result_bytes == size
    # The compiler's own sum belongs where the slice of it does.
    assert found["all-reduce"].layer == "layer_9"
