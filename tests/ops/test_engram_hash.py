"""Engram hashing: host int64 against golden data and published cases, device limbs against the host."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.config import ConfigError, DSV41Error, TextConfig, load_config
from dsv41.ops.engram_hash import engram_hash_spec, first_primes, hash_rows, lookback, row_ids
from dsv41.ops.engram_hash_device import classes_window_device, engram_hash_arrays, row_ids_device
from tests.golden import DATA, expected, primitives

TINY = load_config(DATA / "tiny_text")
IMAGE = TINY.image_token_id


def toy_config(vocab_size: int, classes: int, start: int, heads: int) -> TextConfig:
    primes = first_primes(start, 3 * heads)
    return dataclasses.replace(
        TextConfig(),
        vocab_size=vocab_size,
        engram_layer_ids=(1,),
        engram_num_embeddings=(int(primes.sum()),),
        engram_vocab_size=start,
        engram_n_heads=heads,
        engram_compressed_vocab_size=classes,
        dspark_noise_token_id=1,
    )


SPECS = {
    "tiny": engram_hash_spec(TINY.text_config, 2),
    "real": engram_hash_spec(TextConfig(), 2),
    "toy": engram_hash_spec(toy_config(64, 64, 1000, 2), 2),
}


@pytest.fixture
def real():
    return SPECS["real"]


@pytest.fixture
def tiny():
    return SPECS["tiny"]


@pytest.fixture
def toy():
    return SPECS["toy"]


def windows_of(ids, spec, blocked=None):
    """Windows [B, T, N] of sequences [B, T] that start at position 0."""
    ids = np.atleast_2d(ids)
    blocked = np.zeros(ids.shape, bool) if blocked is None else blocked
    before = np.ones((len(ids), spec.window - 1), bool)
    return lookback(ids, blocked, np.zeros(before.shape, ids.dtype), before, spec.pad_class)


def exact_rows(spec, window):
    """One window hashed with Python's unbounded integers; [L][O * H]."""
    rows = []
    for multipliers, primes, offsets in zip(spec.multipliers, spec.primes, spec.offsets, strict=True):
        mixed, layer = int(window[0]) * int(multipliers[0]), []
        for order, order_primes in enumerate(primes, start=1):
            mixed ^= int(window[order]) * int(multipliers[order])
            layer += [mixed % int(p) for p in order_primes]
        rows.append([r + int(o) for r, o in zip(layer, offsets, strict=True)])
    return rows


# Case G1: table sizes.
def test_primes_and_table_sizes_of_the_release(real):
    assert real.primes[0, 0, :3].tolist() == [16000057, 16000079, 16000081]
    assert real.primes[-1, -1, -1] == 16000889
    assert real.rows_per_layer == (384006168, 384016682)
    assert len(np.unique(real.primes)) == 48


def test_first_primes_against_trial_division():
    by_division = [n for n in range(2, 3000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    for start in (-5, 0, 1, 2, 3, 4, 120, 1000, 2000):
        expect = [p for p in by_division if p >= start][:100]
        assert first_primes(start, 100).tolist() == expect
    assert first_primes(10, 0).tolist() == []
    # More primes than the first segment holds.
    assert len(np.unique(first_primes(2, 3000))) == 3000 and first_primes(2, 3000)[-1] == 27449


def test_wrong_table_size_names_the_field():
    config = dataclasses.replace(TINY.text_config, engram_num_embeddings=(834, 1021))
    with pytest.raises(ConfigError, match=r"text_config\.engram_num_embeddings.*\[834, 1020\].*\[834, 1021\]"):
        engram_hash_spec(config, 2)
    with pytest.raises(ConfigError, match=r"text_config\.engram_pad_token_id.*390"):
        engram_hash_spec(TINY.text_config, 390)


def test_model_without_engram():
    config = dataclasses.replace(TINY.text_config, engram_layer_ids=(), engram_num_embeddings=())
    spec = engram_hash_spec(config, 0)
    ids = row_ids(spec, np.arange(512), np.ones((2, 3), int), np.full((2, 3), -1), IMAGE)
    assert ids.shape == (2, 3, 0, 6) and spec.rows_per_layer == ()


# Case G2: exact hashes of the released constants.
def test_published_hashes(real):
    assert real.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    rows = hash_rows(real, windows_of([10, 20, 30, 40, 50], real))[0]
    assert rows[0, 0, ::8].tolist() == [9400104, 128026094, 261350200]
    assert rows[4, 0, ::8].tolist() == [5457301, 130605657, 261515048] and rows[4, 0, -1] == 377395685
    assert rows[4, 1, ::8].tolist() == [12112771, 142726201, 259419700]


# Case G3: products beyond 2^53.
def test_products_do_not_pass_through_doubles(real, toy):
    rows = hash_rows(real, windows_of([99091] * 4, real))[0]
    assert rows[3, 0, ::8].tolist() == [12193612, 132502226, 260190704]
    assert toy.multipliers[0, 0] == 118650432209603643
    assert hash_rows(toy, windows_of([5, 7, 9, 11, 63], toy))[0, 4, 0].tolist() == [690, 1732, 2724, 3321, 5069, 5436]
    window = windows_of([63, 62, 61, 60], toy)[0, 3]
    assert hash_rows(toy, window).tolist() == exact_rows(toy, window)


@pytest.mark.parametrize("name", ["tiny", "real"])
def test_golden_constants_and_hashes(name):
    spec, golden = SPECS[name], primitives()
    prefix = f"engram_hash.{name}"
    for field in ("primes", "offsets", "multipliers"):
        np.testing.assert_array_equal(getattr(spec, field), golden[f"{prefix}.{field}"])
    if name == "tiny":
        classes = golden[f"{prefix}.token_map"][golden[f"{prefix}.input_ids"]]
    else:
        classes = golden[f"{prefix}.compressed_ids"]
    dead = golden[f"{prefix}.token_mask"] == 0
    np.testing.assert_array_equal(hash_rows(spec, windows_of(classes, spec)), golden[f"{prefix}.hash"])
    np.testing.assert_array_equal(hash_rows(spec, windows_of(classes, spec, dead)), golden[f"{prefix}.hash_masked"])


def test_golden_prefill_and_decode(tiny):
    golden = expected("tiny_text")
    token_map, ids = golden["engram_token_map"], golden["input_ids"]
    start = np.full((2, 3), -1)
    np.testing.assert_array_equal(row_ids(tiny, token_map, ids[:, :53], start, IMAGE), golden["prefill.engram_hash"])
    for step in range(14):
        p = 53 + step
        rows = row_ids(tiny, token_map, ids[:, p : p + 1], ids[:, p - 3 : p], IMAGE)
        np.testing.assert_array_equal(rows[:, 0], golden["decode.engram_hash"][step])


def test_image_span_blocks_the_look_back(tiny):
    """Slots from the newest image token backwards are pad; the image tokens themselves are all pad."""
    spec = tiny
    ids = np.array([[10, 11, IMAGE, IMAGE, 12, 13, 14, 15]])
    windows = windows_of(ids, spec, ids == IMAGE)[0].tolist()
    assert windows == [
        [10, 2, 2, 2], [11, 10, 2, 2], [2, 2, 2, 2], [2, 2, 2, 2],
        [12, 2, 2, 2], [13, 12, 2, 2], [14, 13, 12, 2], [15, 14, 13, 12],
    ]  # fmt: skip
    token_map = np.arange(512) % 390
    rows = row_ids(spec, token_map, ids, np.full((1, 3), -1), IMAGE)
    np.testing.assert_array_equal(rows[0], hash_rows(spec, np.array(windows)))


token_ids = st.one_of(st.integers(0, 511), st.just(IMAGE))


@settings(max_examples=30, deadline=None)
@given(st.lists(token_ids, min_size=1, max_size=20), st.data())
def test_any_chunking_gives_the_rows_of_one_pass(ids, data):
    spec = SPECS["tiny"]
    token_map = expected("tiny_text")["engram_token_map"]
    padded = np.array([[-1] * 3 + ids])
    whole = row_ids(spec, token_map, padded[:, 3:], padded[:, :3], IMAGE)
    cuts = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids)), max_size=5))})
    chunks = [
        row_ids(spec, token_map, padded[:, 3 + a : 3 + b], padded[:, a : 3 + a], IMAGE)
        for a, b in itertools.pairwise(cuts)
    ]
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), whole)
    assert whole.shape == (1, len(ids), 2, 6)


def test_no_new_tokens(tiny):
    assert row_ids(tiny, np.arange(512), np.zeros((2, 0), int), np.full((2, 3), -1), IMAGE).shape == (2, 0, 2, 6)


# Case G4: ids that are not tokens never wrap into a valid row.
@pytest.mark.parametrize("bad", [-1, -2, 512, 129280, 2**40])
def test_token_outside_the_vocabulary(tiny, bad):
    tokens, history = np.full((2, 4), 7), np.full((2, 3), -1)
    tokens[1, 2] = bad
    with pytest.raises(DSV41Error, match=rf"token id {bad} at row 1, position 2 is outside \[0, 512\)"):
        row_ids(tiny, np.arange(512), tokens, history, IMAGE)
    if bad != -1:
        history[0, 1] = bad
        with pytest.raises(DSV41Error, match=rf"token id {bad} at row 0, position -2 "):
            row_ids(tiny, np.arange(512), np.full((2, 4), 7), history, IMAGE)


def test_malformed_arrays(tiny):
    with pytest.raises(DSV41Error, match="history"):
        row_ids(tiny, np.arange(512), np.zeros((2, 4), int), np.zeros((2, 2), int), IMAGE)
    with pytest.raises(DSV41Error, match="integer"):
        row_ids(tiny, np.arange(512), np.zeros((2, 4)), np.full((2, 3), -1), IMAGE)
    for bad in (-1, 390):
        with pytest.raises(DSV41Error, match=rf"class {bad} is outside \[0, 390\)"):
            hash_rows(tiny, np.array([0, 1, bad, 3]))


device_rows = jax.jit(row_ids_device)


@pytest.mark.parametrize("name", ["tiny", "real", "toy"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_device_limbs_equal_int64(name, data):
    spec = SPECS[name]
    # The largest classes give the products nearest to 2^63.
    one = st.one_of(st.integers(0, spec.class_count - 1), st.integers(spec.class_count - 3, spec.class_count - 1))
    windows = np.array(data.draw(st.lists(st.tuples(*[one] * 4), min_size=8, max_size=8)))
    rows = device_rows(engram_hash_arrays(spec), windows.astype(np.uint32))
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, hash_rows(spec, windows))
    assert rows[0].tolist() == exact_rows(spec, windows[0])


def test_device_on_golden_tokens_with_history(tiny):
    golden = expected("tiny_text")
    token_map, ids = golden["engram_token_map"].astype(np.int32), golden["input_ids"].astype(np.int32)

    @jax.jit
    def rows(arrays, tokens, history):
        return row_ids_device(arrays, classes_window_device(arrays, token_map, tokens, history, IMAGE))

    arrays = engram_hash_arrays(tiny)
    start = np.full((2, 3), -1, np.int32)
    np.testing.assert_array_equal(rows(arrays, ids[:, :53], start), golden["prefill.engram_hash"])
    verify = rows(arrays, ids[:, 53:59], ids[:, 50:53])
    np.testing.assert_array_equal(verify, golden["decode.engram_hash"][:6].swapaxes(0, 1))


def test_device_ids_outside_the_vocabulary_block_like_images(tiny):
    arrays = engram_hash_arrays(tiny)
    token_map = np.arange(512, dtype=np.int32) % 390
    windows = [
        np.asarray(classes_window_device(arrays, token_map, np.array([[5, bad, 6]]), np.array([[1, 3, 4]]), IMAGE))
        for bad in (IMAGE, -1, 512, -512)
    ]
    assert windows[0][0].tolist() == [[5, 4, 3, 1], [2, 2, 2, 2], [6, 2, 2, 2]]
    for other in windows[1:]:
        np.testing.assert_array_equal(other, windows[0])


def test_device_refuses_constants_beyond_32_bits():
    spec = engram_hash_spec(toy_config(64, 64, 1 << 24, 1), 2)
    with pytest.raises(ConfigError, match=r"text_config\.engram_vocab_size"):
        engram_hash_arrays(spec)
    spec = engram_hash_spec(toy_config(64, 64, 16_000_000, 50), 2)
    with pytest.raises(ConfigError, match=r"text_config\.engram_num_embeddings"):
        engram_hash_arrays(spec)
