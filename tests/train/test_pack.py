"""Documents in rows (training.md section 1)."""

import dataclasses
import re

import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.train.pack import Document, alignment, pack_documents
from tests.models_for_tests import small_model
from tests.train import packs


def test_documents_begin_at_multiples_of_groups_and_blocks():
    assert alignment(small_model().config) == 4  # ratio 2; candidate blocks of 4 entries at ratio 1
    first, second = packs.random_tokens(5, 1), packs.random_tokens(3, 2)
    pack = packs.pack([[Document(first), Document(second)], []], 16)
    assert pack.document.tolist() == [[0] * 5 + [-1] * 3 + [1] * 3 + [-1] * 5, [-1] * 16]
    assert pack.position[0].tolist() == [*range(8), *range(4), *range(4)]
    assert pack.start[0].tolist() == [0] * 8 + [8] * 4 + [12] * 4
    assert pack.tokens[0, 8:11].tolist() == second.tolist()
    # A document's last token predicts nothing.
    assert np.flatnonzero(pack.loss_mask[0]).tolist() == [0, 1, 2, 3, 8, 9]
    assert pack.targets[0, :4].tolist() == first[1:].tolist()
    assert not pack.valid[1].any()


def test_ngrams_end_at_a_documents_border():
    first, second = packs.random_tokens(6, 1), packs.random_tokens(7, 2)
    both = packs.pack([[Document(first), Document(second)]], 16)
    alone = packs.pack([[Document(second)]], 16)
    assert (both.engram_rows[0, 8:15] == alone.engram_rows[0, :7]).all()
    served = small_model().host_lookup
    assert served is not None
    model = small_model()
    values = model.make_batch([second], padded=False).engram_values
    table = model.engram.tables[0].values
    assert (
        np.asarray(values)[0, :, 0].view(np.uint8) == table[np.asarray(alone.engram_rows)[0, :7, 0]].view(np.uint8)
    ).all()


def test_what_is_to_be_predicted_and_replayed():
    tokens = packs.random_tokens(40)
    image = tokens.copy()
    image[3:6] = small_model().config.image_token_id
    document = Document(image, loss=[False] * 30 + [True] * 10, response=30)
    pack = packs.pack([[Document(tokens[:4]), document]])
    assert np.flatnonzero(pack.loss_mask[0]).tolist() == [0, 1, 2, *range(4 + 29, 4 + 39)]
    # The window of 16 tokens before the response begins with itself.
    assert pack.window_floor[0].tolist() == [0] * 18 + [14] * 16 + [0] * 30
    assert np.flatnonzero(pack.image_mask[0]).tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    "document, message",
    [
        (Document([]), "pack row 0, document 0: no tokens"),
        (Document([3, 512]), "pack row 0, document 0: token 1 is 512, expected an id in [0, 512)"),
        (Document([3] * 65), "pack row 0, document 0: ends at 65, behind the row's 64 tokens"),
        (Document([3, 4], loss=[True]), "pack row 0, document 0: 2 tokens, loss for 1; expected as many"),
        (Document([3, 4], response=3), "pack row 0, document 0: the response begins at 3, expected 1 to 2"),
    ],
)
def test_what_does_not_fit_is_named(document, message):
    with pytest.raises(DSV41Error, match=re.escape(message)):
        packs.pack([[document]])


def test_lengths_and_engrams_are_checked():
    with pytest.raises(DSV41Error, match="expected a length that is a multiple of 4, got 62"):
        packs.pack([[]], 62)
    with pytest.raises(DSV41Error, match="needs its hash and token map"):
        pack_documents([[]], 64, small_model().config)


def test_a_row_is_a_pytree():
    pack = packs.pack([[Document(packs.random_tokens(5))]], 16)
    assert dataclasses.replace(pack, targets=pack.tokens).targets is pack.tokens
