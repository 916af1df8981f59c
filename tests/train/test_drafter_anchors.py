"""Where blocks begin, and which of their drafts count (dspark.md section 3.2)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.train.drafter_anchors import anchors_at, draw_anchors, eligible
from dsv41.train.pack import Document, alignment
from tests.models_for_tests import small_model
from tests.train import drafters, packs

DRAFTS = 5


def _rows():
    """Documents with gaps in what is to be predicted, a row that they do not fill, and one with a single token."""
    first, second = packs.random_tokens(21, 1), packs.random_tokens(39, 2)
    loss = np.ones(39, bool)
    loss[[0, 1, 2, 10, 20, 21]] = False
    short = [Document(packs.random_tokens(1, 3)), Document(packs.random_tokens(7, 4))]
    return [[Document(first), Document(second, loss)], short]


def _by_hand():
    """(eligible anchors, {anchor: valid drafts}) of each row, from the documents."""
    out, align = [], alignment(small_model().config)
    for documents in _rows():
        begin, able, valid = 0, [], {}
        for d in documents:
            n = len(d.tokens)
            counts = np.ones(n, bool) if d.loss is None else d.loss
            for p in range(1, n - 1):
                if counts[p] and counts[p + 1]:
                    able.append(begin + p)
                drafts = 0
                while drafts < DRAFTS and p + drafts + 1 < n and counts[p + drafts + 1]:
                    drafts += 1
                valid[begin + p] = drafts
            begin += -(-n // align) * align
        out.append((able, valid))
    return out


def test_eligible_tokens_are_those_with_a_feature_before_and_a_true_token_behind():
    pack = drafters.pack(small_model().config, _rows())
    found = [np.flatnonzero(row).tolist() for row in np.asarray(eligible(pack))]
    assert found == [able for able, _ in _by_hand()]


def test_drafts_count_up_to_the_first_that_does_not():
    pack = drafters.pack(small_model().config, _rows())
    tokens, document = np.asarray(pack.tokens), np.asarray(pack.document)
    for row, (_, valid) in enumerate(_by_hand()):
        index = np.array(sorted(valid))
        anchors = anchors_at(pack, jnp.asarray(np.broadcast_to(index, (2, len(index)))), DRAFTS)
        assert np.asarray(anchors.valid)[row].sum(axis=-1).tolist() == [valid[p] for p in index]
        for n, p in enumerate(index):
            drafts = valid[p]
            assert np.asarray(anchors.valid)[row, n].tolist() == [True] * drafts + [False] * (DRAFTS - drafts)
            assert np.asarray(anchors.tokens)[row, n, :drafts].tolist() == tokens[row, p : p + drafts].tolist()
            assert np.asarray(anchors.labels)[row, n, :drafts].tolist() == tokens[row, p + 1 : p + 1 + drafts].tolist()
            assert (document[row, p : p + drafts + 1] == document[row, p]).all()
            assert document[row, np.asarray(anchors.start)[row, n]] == document[row, p]
            assert p == np.asarray(anchors.start)[row, n] + np.asarray(anchors.position)[row, n]


def test_anchors_are_drawn_uniformly_without_replacement():
    rows = [[Document(packs.random_tokens(64, i))] for i in range(8)]
    pack = drafters.pack(small_model().config, rows)
    able = np.asarray(eligible(pack))[0]
    draw = jax.jit(lambda key, pack: draw_anchors(key, pack, 16, DRAFTS))
    count = np.zeros(64)
    for i in range(50):
        anchors = draw(jax.random.key(i), pack)
        assert np.asarray(anchors.keep).all()
        index = np.asarray(anchors.index)
        assert (np.diff(index, axis=1) > 0).all()
        count += np.bincount(index.reshape(-1), minlength=64)
    assert not count[~able].any()
    # 400 draws of 16 of 62: 103 of each on average, with a standard deviation of 8.7.
    assert np.abs(count[able] - 400 * 16 / able.sum()).max() < 45
    again, other = draw(jax.random.key(3), pack), draw(jax.random.key(4), pack)
    assert np.array_equal(again.index, draw(jax.random.key(3), pack).index)
    assert not np.array_equal(again.index, other.index)
    assert not np.array_equal(again.index[0], again.index[1])


def test_missing_anchors_are_dummies_at_the_end():
    pack = drafters.pack(small_model().config, _rows())
    for count in (40, 100):  # fewer and more than a row has tokens
        anchors = draw_anchors(jax.random.key(0), pack, count, DRAFTS)
        assert anchors.valid.shape == (2, count, DRAFTS)
        for row, (able, _) in enumerate(_by_hand()):
            found = min(count, len(able))
            assert np.asarray(anchors.keep)[row].tolist() == [True] * found + [False] * (count - found)
            assert set(np.asarray(anchors.index)[row, :found]) <= set(able)
            assert not np.asarray(anchors.valid)[row, found:].any()
    nothing = dataclasses.replace(pack, loss_mask=jnp.zeros_like(pack.loss_mask))
    assert not draw_anchors(jax.random.key(0), nothing, 4, DRAFTS).keep.any()
