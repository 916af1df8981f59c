"""Blocks of the training path beside step-wise drafting (dspark.md section 3.5)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.models import Model, bind_drafter, draft
from dsv41.train.drafter_anchors import anchors_at
from dsv41.train.drafter_forward import DrafterOptions, bind_masters, run_stages
from dsv41.train.drafter_loss import draft_logits, run_heads
from dsv41.train.master_weights import masters_from
from dsv41.train.pack import Document
from tests.models.parity import relative_rms
from tests.models_for_tests import small_model, tiny_model
from tests.train import drafters, packs

DRAFTS = 5
# The first anchor that there is, others before and behind the end of the window, and one at the end of a document.
FIRST, SECOND = (1, 5, 18), (25, 30, 45, 58)
BEGIN = 24


@functools.cache
def compiled(model: Model):
    """masters, features, pack, anchors -> (logits [N, K, V], confidences [N, K], loads)."""
    config, options = model.config, DrafterOptions()
    text = config.text_config

    @jax.jit
    def run(masters, features, pack, anchors):
        drafter = bind_masters(masters, config, options.qat)
        rope = drafters.rope(model.config)[0]
        blocks = run_stages(
            drafter, features.embed, features.main_hidden, pack, anchors, jnp.asarray(rope), options=options
        )
        heads = run_heads(masters, blocks.x, anchors.tokens.reshape(-1, DRAFTS), text, options)
        markov = masters["mtp"][text.num_nextn_predict_layers - 1]["markov_head"]["head"]["weight"]
        logits = draft_logits(heads.normed, heads.before, features.head, markov)
        return logits.reshape(-1, DRAFTS, logits.shape[-1]), heads.confidence, blocks.loads

    return run


@functools.cache
def documents():
    return packs.random_tokens(21, 1), packs.random_tokens(40, 2)


def trained(model: Model, rows, index, features=None):
    pack = drafters.pack(model.config, rows)
    features = drafters.features(model, pack.tokens.shape) if features is None else features
    anchors = anchors_at(pack, jnp.asarray(index)[None], DRAFTS)
    masters = masters_from(model.drafter, model.config)
    return compiled(model)(masters, features, pack, anchors), anchors, features


@functools.cache
def stepwise(model: Model):
    """What `remember` and `draft` make of blocks whose drafts are the tokens given."""

    @jax.jit
    def run(params, drafter, hidden, batch, cache, truth, position):
        cache = bind_drafter(model.config, drafter).remember(hidden, batch, cache)
        rows = len(truth)
        return draft(
            params, drafter, truth[:, 0], position, jnp.arange(rows), jnp.ones(rows, bool), cache,
            lambda k, _: truth[:, min(k + 1, DRAFTS - 1)], config=model.config,
        )[0]  # fmt: skip

    return run


def served(model: Model, features, anchors, shift: int = 0):
    """The same blocks step by step, with the true tokens as drafts; `shift`: features of so many tokens further on."""
    index, start = np.asarray(anchors.index)[0], np.asarray(anchors.start)[0]
    held = [features.main_hidden[0, s + shift : a + shift] for a, s in zip(index, start, strict=True)]
    rows, longest = [np.zeros(len(x), np.int64) for x in held], max(map(len, held))
    batch = jax.tree.map(jnp.asarray, model.make_batch(rows, padded=False))
    hidden = jnp.stack([jnp.pad(x, ((0, longest - len(x)), (0, 0))) for x in held])
    cache = model.init_cache(len(rows), 128, draft_tokens=DRAFTS)
    return stepwise(model)(
        model.params, model.drafter, hidden, batch, cache, anchors.tokens[0], jnp.asarray(index - start)
    )


@pytest.mark.parametrize(
    "model", [small_model, pytest.param(tiny_model, marks=pytest.mark.slow)], ids=["one_stage", "three_stages"]
)
def test_blocks_are_those_of_step_wise_drafting(model):
    """Sums are taken in another order, so that now and then a value is rounded the other way."""
    model, (first, second) = model(), documents()
    (logits, confidence, _), anchors, features = trained(model, [[Document(first), Document(second)]], FIRST + SECOND)
    block = served(model, features, anchors)
    assert np.asarray(anchors.valid)[0].sum(axis=1).tolist() == [5, 5, 2, 5, 5, 5, 5]
    worst = [relative_rms(np.asarray(a), np.asarray(b)) for a, b in zip(logits, block.logits, strict=True)]
    # Measured: 0 but for one block of the three stages, 3e-4.
    assert np.median(worst) == 0 and max(worst) < 5e-3
    np.testing.assert_allclose(confidence, block.confidence, atol=1e-2)  # measured: 9e-4
    # The newest context row is the anchor's predecessor, not the anchor.
    later = served(model, features, anchors, shift=1)
    for a, b in zip(logits, later.logits, strict=True):
        assert relative_rms(np.asarray(a), np.asarray(b)) > 1e-2  # measured: 2e-2 and more


def test_packed_documents_do_not_know_of_each_other():
    """Blocks are those of the document alone, whatever stands beside it, features included; dummies are nothing."""
    model, (first, second) = small_model(), documents()
    dummies = (64, 64, 64)
    (both, _, loads), _, features = trained(model, [[Document(first), Document(second)]], FIRST + SECOND)
    (alone, _, _), _, _ = trained(model, [[Document(first)]], (*FIRST, *dummies, 64), features)
    assert np.array_equal(both[:3], alone[:3])
    moved = features._replace(main_hidden=jnp.roll(features.main_hidden, -BEGIN, axis=1))
    index = [a - BEGIN for a in SECOND] + list(dummies)
    (alone, _, few), anchors, _ = trained(model, [[Document(second)]], index, moved)
    assert np.array_equal(both[3:], alone[:4])
    assert not np.asarray(anchors.valid)[0, 4:].any()
    top_k = model.config.text_config.dspark_num_experts_per_tok
    assert loads.sum() == 7 * DRAFTS * top_k and few.sum() == 4 * DRAFTS * top_k


def test_what_lies_behind_the_anchor_changes_nothing():
    """Features and tokens at the anchor and behind it are what the block is to predict."""
    model, (_, second) = small_model(), documents()
    (logits, _, _), _, features = trained(model, [[Document(second)]], (5, 12, 20, 64, 64, 64, 64))
    other = features.main_hidden.at[0, 20:].set(7.0)
    changed = np.concatenate([second[:25], packs.random_tokens(15, 9)])
    (again, _, _), _, _ = trained(
        model, [[Document(changed)]], (5, 12, 20, 64, 64, 64, 64), features._replace(main_hidden=other)
    )
    assert np.array_equal(logits[:3], again[:3])
    (last, _, _), _, _ = trained(
        model,
        [[Document(second)]],
        (5, 12, 20, 64, 64, 64, 64),
        features._replace(main_hidden=features.main_hidden.at[0, 19].set(7.0)),
    )
    assert np.array_equal(logits[:2], last[:2]) and not np.array_equal(logits[2], last[2])


def test_rows_too_long_for_the_rope_are_refused():
    model, (first, _) = small_model(), documents()
    pack = drafters.pack(model.config, [[Document(first)]])
    features, anchors = drafters.features(model, pack.tokens.shape), anchors_at(pack, jnp.asarray([[5]]), DRAFTS)
    rope = jnp.asarray(drafters.rope(model.config)[0][:-1])

    def run(masters):
        drafter = bind_masters(masters, model.config, DrafterOptions().qat)
        return run_stages(drafter, features.embed, features.main_hidden, pack, anchors, rope, options=DrafterOptions())

    with pytest.raises(ValueError, match="68 positions, expected 69 or more"):
        jax.eval_shape(run, masters_from(model.drafter, model.config))
