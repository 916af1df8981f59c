"""Random and adversarial rows for top-k, by name, and the check that any exact implementation passes."""

import numpy as np


def _random(rng, rows, width):
    return rng.normal(size=(rows, width))


def _all_equal(rng, rows, width):
    return np.full((rows, width), -1.25)


def _two_values(rng, rows, width):
    return rng.integers(0, 2, (rows, width)) * 3.0


def _few_values(rng, rows, width):
    return rng.integers(-3, 4, (rows, width)) * 0.5


def _ascending(rng, rows, width):
    return np.arange(width)[None] + rng.normal(size=(rows, 1))


def _descending(rng, rows, width):
    return -_ascending(rng, rows, width)


def _one_huge(rng, rows, width):
    scores = rng.normal(size=(rows, width)) * 1e-3
    scores[np.arange(rows), rng.integers(0, width, rows)] = 3e38
    return scores


def _close_together(rng, rows, width):
    """Scores that differ in their last bits only: every digit of a radix select but the last is shared."""
    return 1.0 + rng.integers(0, 1 << 12, (rows, width)) * 2.0**-23


def _wide_range(rng, rows, width):
    return rng.normal(size=(rows, width)) * 2.0 ** rng.integers(-120, 120, (rows, width))


def _negative(rng, rows, width):
    return -np.abs(rng.normal(size=(rows, width))) - 1


def _signed_zeros(rng, rows, width):
    return np.where(rng.random((rows, width)) < 0.5, 0.0, -0.0)


def _infinities(rng, rows, width):
    kind = rng.integers(0, 4, (rows, width))
    return np.select([kind == 0, kind == 1], [-np.inf, np.inf], rng.normal(size=(rows, width)))


def _nan(rng, rows, width):
    """NaN of both signs between the scores."""
    scores = rng.normal(size=(rows, width)).astype(np.float32)
    bits = scores.view(np.uint32)
    bits[rng.random((rows, width)) < 0.3] = 0x7FC00000
    bits[rng.random((rows, width)) < 0.3] = 0xFFC00001
    return scores


def _mostly_absent(rng, rows, width):
    """Fewer scores than k, the rest -inf or NaN."""
    scores = np.where(rng.random((rows, width)) < 0.5, -np.inf, np.nan)
    for row in range(rows):
        some = rng.integers(0, width, row % 4)
        scores[row, some] = rng.normal(size=len(some))
    return scores


def _nothing(rng, rows, width):
    return np.full((rows, width), -np.inf)


def _best_in_one_place(rng, rows, width):
    """The best scores are neighbours: one block, warp or chunk holds them all."""
    scores = rng.normal(size=(rows, width))
    size = max(1, width // 8)
    for row in range(rows):
        start = rng.integers(0, width - size + 1)
        scores[row, start : start + size] += 100
    return scores


def _best_strided(rng, rows, width):
    """The best scores lie at multiples of 128: always the same lane."""
    scores = rng.normal(size=(rows, width))
    scores[:, ::128] += 100
    return scores


def _top_half_equal(rng, rows, width):
    scores = -np.abs(rng.normal(size=(rows, width)))
    scores[rng.random((rows, width)) < 0.5] = 0.5
    return scores


CASES = {
    name.strip("_"): maker
    for name, maker in globals().copy().items()
    if name.startswith("_") and getattr(maker, "__module__", None) == __name__
}


def make(name: str, seed: int, rows: int, width: int, dtype) -> np.ndarray:
    """Scores of the named case, [rows, width], of a jnp dtype."""
    rng = np.random.default_rng([seed, *name.encode()])
    return CASES[name](rng, rows, width).astype(np.float32).astype(dtype)


def make_lengths(name: str, seed: int, rows: int, width: int) -> np.ndarray | None:
    """int32 [rows] of one kind: "none", "random", "short" (0, 1, 2, ...), "full"."""
    rng = np.random.default_rng([seed, *name.encode()])
    if name == "none":
        return None
    lengths = {
        "random": rng.integers(0, width + 1, rows),
        "short": np.minimum(np.arange(rows), width),
        "full": np.full(rows, width),
    }[name]
    return lengths.astype(np.int32)


def expected(scores: np.ndarray, k: int, lengths: np.ndarray | None) -> np.ndarray:
    """The stable answer: best first, the lowest position at ties, -1 at the end."""
    values = usable_scores(scores, lengths)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    ids = np.where(np.take_along_axis(values, order, 1) > -np.inf, order, -1)
    return np.pad(ids, ((0, 0), (0, k - ids.shape[1])), constant_values=-1).astype(np.int32)


def usable_scores(scores: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """float32 scores, -inf where a position may not be taken."""
    values = scores.astype(np.float32)
    usable = values > -np.inf
    if lengths is not None:
        usable &= np.arange(values.shape[1]) < lengths[:, None]
    return np.where(usable, values, -np.inf)


def check(ids: np.ndarray, scores: np.ndarray, k: int, lengths: np.ndarray | None) -> None:
    """Raises unless each row holds k best usable positions, each once, in any order, and then -1."""
    ids, values = np.asarray(ids), usable_scores(scores, lengths)
    rows, width = values.shape
    assert ids.shape == (rows, k) and ids.dtype == np.int32
    count = np.minimum((values > -np.inf).sum(1), k)
    taken = ids >= 0
    np.testing.assert_array_equal(taken, np.arange(k) < count[:, None], err_msg="-1 only behind the taken positions")
    assert (ids < width).all() and (ids >= -1).all()
    by_position = np.sort(ids, axis=1)
    assert not ((by_position[:, 1:] == by_position[:, :-1]) & (by_position[:, 1:] >= 0)).any(), "a position twice"
    got = np.where(taken, np.take_along_axis(values, np.maximum(ids, 0), 1), -np.inf)
    best = -np.sort(-values, axis=1)[:, :k]
    best = np.pad(best, ((0, 0), (0, k - best.shape[1])), constant_values=-np.inf)
    np.testing.assert_array_equal(-np.sort(-got, axis=1), best, err_msg="not the k best scores")
