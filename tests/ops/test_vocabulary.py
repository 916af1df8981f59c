"""Embedding and head over devices: rows and logits are those of whole tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.ops.vocabulary import embed, head_logits
from dsv41.sharding import ShardingRules, make_mesh

VOCAB, WIDTH, ROWS = 24, 32, 8
TABLE = np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(jnp.bfloat16)

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


def spread(fn, rules):
    """`fn` of a table spread by vocabulary and of rows, on eight devices."""
    mesh = make_mesh({"data": 2, "sequence": 2, "tensor": 2}, jax.devices()[:8])
    specs = rules.spec("vocab"), rules.spec("batch")
    fn = functools.partial(fn, rules=rules)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False))


def rules_for(vocab):
    return ShardingRules(batch=("data", "sequence"), heads=("tensor",), vocab=vocab)


@pytest.mark.parametrize("vocab", [("tensor",), ("sequence", "tensor"), ("data", "sequence", "tensor"), ("sequence",)])
def test_rows_and_logits_are_those_of_the_whole_table(vocab):
    rules, rng = rules_for(vocab), np.random.default_rng(1)
    ids = rng.integers(0, VOCAB, (ROWS, 3)).astype(np.int32)
    np.testing.assert_array_equal(np.asarray(spread(embed, rules)(TABLE, ids)), TABLE[ids])
    x = rng.normal(size=(ROWS, 3, WIDTH)).astype(jnp.bfloat16)
    logits = spread(lambda head, x, rules: head_logits(x, head, rules), rules)(TABLE, x)
    wanted = np.asarray(x, np.float64) @ np.asarray(TABLE, np.float64).T
    np.testing.assert_allclose(np.asarray(logits), wanted, atol=1e-4)  # float32 sums of 32 products


def test_an_order_that_parts_do_not_come_back_in():
    rules = rules_for(("tensor", "sequence"))
    x = np.zeros((ROWS, 1, WIDTH), jnp.bfloat16)
    with pytest.raises(DSV41Error, match=r"vocab=\('tensor', 'sequence'\): expected axes of batch first"):
        spread(lambda head, x, rules: head_logits(x, head, rules), rules)(TABLE, x)
