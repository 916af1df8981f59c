"""Rows and batches of documents: nothing lost, nothing twice, the same again, and from any step on."""

import collections
import dataclasses
import hashlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import DSV41Error, load_config
from dsv41.train.corpus import Document as TextDocument
from dsv41.train.data import BatchOptions, RowSource, TrainingBatches, tokenize
from dsv41.train.pack import alignment
from dsv41.train.row_plan import MIN_SPACE, plan_rows
from dsv41.train.tokenizer import make_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = load_config(ROOT / "configs" / "tiny.json")
LENGTH = 128
ALIGNMENT = alignment(CONFIG)
BOS, EOS = CONFIG.bos_token_id, CONFIG.eos_token_id
TOKEN_MAP = np.arange(CONFIG.text_config.vocab_size, dtype=np.int32) % CONFIG.text_config.engram_compressed_vocab_size


def documents(count=40, longest=400):
    """Token k of document i is no token of another place nearby, so that a cut shows."""
    rng = np.random.default_rng(5)
    return [rng.integers(3, 500, rng.integers(1, longest)).astype(np.int32) for _ in range(count)]


def source(**options):
    return RowSource(documents(), CONFIG, **{"length": LENGTH, "seed": 3} | options)


def batches(rows=4, **options):
    return TrainingBatches(source(), BatchOptions(rows=rows, **options), token_map=TOKEN_MAP)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_same(a, b):
    for field in dataclasses.fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        np.testing.assert_array_equal(left, right, err_msg=field.name)


def row_tokens(rows):
    return [[d.tokens.tolist() for d in row] for row in rows]


# --- the plan


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=60),
    alignment=st.sampled_from([1, 2, 8, 16]),
    seed=st.none() | st.integers(0, 99),
)
def test_every_token_is_in_one_row_once(sizes, alignment, seed):
    length = 128
    rng = None if seed is None else np.random.default_rng(seed)
    rows = plan_rows(sizes, length, alignment, rng)
    pieces = collections.defaultdict(list)
    for row in rows:
        end = 0
        for piece in row:
            assert end % alignment == 0 and piece.begin < piece.end
            pieces[piece.document].append(piece)
            end = -(-(end + piece.tokens) // alignment) * alignment
        assert 0 < end <= length
    assert sorted(pieces) == list(range(len(sizes)))
    for i, parts in pieces.items():
        parts.sort(key=lambda piece: piece.begin)
        assert [p.begin for p in parts] == [0, *(p.end for p in parts[:-1])]
        assert parts[-1].end == sizes[i] and [p.last for p in parts] == [False] * (len(parts) - 1) + [True]
        assert len(parts) == 1 or sizes[i] + 2 > length  # what fits is whole


def test_rows_are_full():
    """Of 400 documents, up to a third of a row to eight rows: each row may lose `MIN_SPACE` and some alignment."""
    sizes = np.random.default_rng(0).integers(300, 8192, 400)
    for align in (1, 8):
        rows = plan_rows(sizes, 1024, align, np.random.default_rng(1))
        used = [sum(-(-p.tokens // align) * align for p in row) for row in rows]
        assert sorted(used)[1] > 1024 - MIN_SPACE  # but for the last row to be opened
        assert 1 - sum(p.tokens for row in rows for p in row) / (1024 * len(rows)) < 5e-3


@pytest.mark.parametrize(
    ("sizes", "length", "align", "message"),
    [
        ([5], 100, 8, "a multiple of 8, got 100"),
        ([5], 32, 8, "at least 64 tokens"),
        ([5, 0], 64, 1, "document 1 has no"),
    ],
)
def test_plans_that_cannot_be(sizes, length, align, message):
    with pytest.raises(DSV41Error, match=message):
        plan_rows(sizes, length, align)


# --- rows


def test_an_epoch_is_the_documents():
    """With a begin before each piece and an end behind each document, which comes together again from its pieces."""
    rows, found = source(), collections.Counter()
    heads = {}
    for i in range(len(rows.epoch(0))):
        for document, piece in zip(rows[i], rows.epoch(0)[i], strict=True):
            ids = document.tokens.tolist()
            assert ids[0] == BOS and (ids[-1] == EOS) == piece.last
            heads[piece.document, piece.begin] = ids[1 : len(ids) - piece.last]
            found[EOS] += piece.last
    assert found[EOS] == len(documents())
    for i, ids in enumerate(documents()):
        parts = [heads[key] for key in sorted(heads) if key[0] == i]
        assert np.concatenate(parts).tolist() == ids.tolist()


def test_epochs_differ_and_repeat():
    one, two = source(), source()
    n = sum(len(one.epoch(e)) for e in range(3))
    first = row_tokens(one[i] for i in range(n))
    assert row_tokens(two[i] for i in reversed(range(n)))[::-1] == first  # in any order of asking
    a, b = len(one.epoch(0)), len(one.epoch(1))
    assert first[:a] != first[a : a + b]
    assert row_tokens(source(seed=4)[i] for i in range(a)) != first[:a]
    assert one.locate(a - 1) == (0, a - 1) and one.locate(a) == (1, 0) and one.locate(a + b) == (2, 0)


def test_an_evaluation_is_in_order():
    rows = source(seed=None)
    assert rows.epoch(0) == rows.epoch(7) and 0 < rows.padding() < 0.1
    pieces = [p for row in rows.epoch(0) for p in row]
    assert {p.document for p in pieces} == set(range(40))


def test_texts_become_documents():
    tokenizer = make_tokenizer(["def f(x):\n    return x\n" * 3], 256 + 11)
    ids = tokenize([TextDocument("a", "<eos>é", False), TextDocument("empty", "", False)], tokenizer)
    assert len(ids) == 1 and ids[0].dtype == np.int32 and EOS not in ids[0]
    assert tokenizer.decode(ids[0].tolist()) == "<eos>é"


# --- batches


def test_batches_are_the_packed_rows():
    rows = source()
    for step, batch in enumerate(take(batches(rows=3), 4)):
        assert batch.tokens.shape == (3, LENGTH) and batch.engram_rows.shape[:2] == (3, LENGTH)
        for b in range(3):
            for d, document in enumerate(rows[3 * step + b]):
                where = np.flatnonzero(batch.document[b] == d)
                assert where[0] % ALIGNMENT == 0
                assert batch.tokens[b, where].tolist() == document.tokens.tolist()
                assert batch.position[b, where].tolist() == list(range(len(where)))


@pytest.mark.parametrize("steps", [0, 1, 5, 60])
def test_it_goes_on_where_it_was(steps):
    """Batches that were read ahead, or are in the next epoch, included."""
    one = batches()
    take(one, steps)
    state = json.loads(json.dumps(one.state()))
    expected = take(one, 7)
    other = batches(threads=1, ahead=1)
    take(other, 3)
    other.restore(state)
    for a, b in zip(expected, take(other, 7), strict=True):
        assert_same(a, b)


def test_another_process_reads_the_same():
    code = (
        "import json, sys, hashlib\n"
        "from tests.train.test_data import batches, take\n"
        "b = batches(); b.restore(json.loads(sys.argv[1]))\n"
        "print(hashlib.sha256(b''.join(x.tokens.tobytes() for x in take(b, 5))).hexdigest())"
    )
    one = batches()
    take(one, 4)
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(one.state())], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [hashlib.sha256(b"".join(x.tokens.tobytes() for x in take(one, 5))).hexdigest()]


def test_processes_share_a_batch():
    """Together they have the rows of one process, and each can go on from the state of any."""
    whole = batches(rows=4)
    parts = [batches(rows=4, process=p, processes=2) for p in range(2)]
    for _ in range(3):
        tokens = next(whole).tokens
        for p, part in enumerate(parts):
            np.testing.assert_array_equal(next(part).tokens, tokens[p::2])
    assert parts[0].state() == parts[1].state() == whole.state()


def test_a_state_of_other_data_is_refused():
    state = batches().state()
    other = TrainingBatches(source(seed=4), BatchOptions(rows=4), token_map=TOKEN_MAP)
    with pytest.raises(DSV41Error, match="other documents, row length or seed"):
        other.restore(state)
    with pytest.raises(DSV41Error, match="another batch size: 4, not 2"):
        batches(rows=2).restore(state)
    with pytest.raises(DSV41Error, match="not the state of training batches"):
        batches().restore({"rows": 1})
    with pytest.raises(DSV41Error, match="not a position"):
        batches().restore(state | {"position": {"elsewhere": 1}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 3, "processes": 2}, "a multiple of 2 processes"),
        ({"rows": 4, "process": 2, "processes": 2}, "process 2 of 2"),
        ({"rows": 4, "threads": 0}, "threads"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(DSV41Error, match=message):
        BatchOptions(**options)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [([], {}, "no documents"), ([[1]], {"seed": -1}, "seed"), ([[1]], {"length": 102}, "multiple of")],
)
def test_sources_that_cannot_be(documents, options, message):
    with pytest.raises(DSV41Error, match=message):
        RowSource([np.array(d, np.int32) for d in documents], CONFIG, **{"length": LENGTH} | options)


def test_only_a_pipeline_needs_grain(monkeypatch):
    code = "import sys, dsv41.train.data; sys.exit('grain' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(DSV41Error, match="needs the package 'grain'"):
        batches()
