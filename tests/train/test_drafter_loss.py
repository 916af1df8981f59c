"""Losses and figures of the drafter against float64 (dspark.md section 3.3)."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.train.drafter_forward import DrafterOptions
from dsv41.train.drafter_loss import (
    DrafterSums,
    Heads,
    acceptance,
    compare,
    drafter_metrics,
    mean_loss,
    weighted_sums,
)

N, K, D, R, V = 6, 5, 32, 16, 48
G = 4.0


def _arrays(seed=0):
    rng = np.random.default_rng(seed)

    def bf16(*shape, scale=1.0):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.bfloat16)

    valid = np.arange(K) < np.array([5, 5, 3, 0, 1, 5])[:, None]
    return {
        "normed": bf16(N * K, D), "before": bf16(N * K, R), "confidence": jnp.asarray(rng.normal(size=(N, K)), "f4"),
        "head": bf16(V, D, scale=0.4), "markov": bf16(V, R, scale=0.2).astype(jnp.float32), "hidden": bf16(N * K, D),
        "labels": jnp.asarray(rng.integers(0, V, (N, K)), jnp.int32), "valid": jnp.asarray(valid),
    }  # fmt: skip


def _loss(a, options=None, logit_bytes=0):
    options = options or DrafterOptions(decay=G)
    heads = Heads(a["normed"], a["before"], a["confidence"])
    compared = compare(heads, a["head"], a["markov"], a["hidden"], a["labels"], logit_bytes=logit_bytes)
    total, sums = weighted_sums(compared, a["confidence"], a["valid"], options)
    return mean_loss(total, sums), (compared, sums)


def _reference(a, accepted=None):
    """(loss, p, t); the label of the confidences is a constant if given."""
    x = {name: np.asarray(value, np.float64) for name, value in a.items()}

    def softmax(logits):
        e = np.exp(logits - logits.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)).reshape(N, K, V)

    p = softmax(x["normed"] @ x["head"].T + x["before"] @ x["markov"].T)
    t = softmax(x["hidden"] @ x["head"].T)
    l1 = np.abs(p - t).sum(-1)
    ce = -np.log(np.take_along_axis(p, np.asarray(a["labels"])[..., None], -1)[..., 0])
    c = 1 / (1 + np.exp(-x["confidence"]))
    target = 1 - l1 / 2 if accepted is None else accepted
    bce = -(target * np.log(c) + (1 - target) * np.log(1 - c))
    w = np.exp(-np.arange(K) / G) * x["valid"]
    return (w * (0.1 * ce + 0.9 * l1 + bce)).sum() / w.sum(), p, t


def test_the_loss_is_that_of_the_spec():
    a = _arrays()
    loss, (compared, _) = jax.jit(_loss)(a)
    expected, p, t = _reference(a)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(compared.l1, np.abs(p - t).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(acceptance(compared), np.minimum(p, t).sum(-1), atol=1e-5)
    assert np.array_equal(compared.agree, p.argmax(-1) == t.argmax(-1))


def test_gradients_are_those_of_finite_differences():
    """And none of the acceptance that the confidences are to predict, of the target, and of what is not valid."""
    a, rng = _arrays(), np.random.default_rng(1)
    names = ("normed", "before", "confidence", "markov", "head", "hidden")
    grads = jax.jit(jax.grad(lambda part: _loss(a | part)[0]))({name: a[name] for name in names})
    _, p, t = _reference(a)
    accepted = 1 - np.abs(p - t).sum(-1) / 2
    for name in names[:4]:
        x, got = np.asarray(a[name], np.float64), np.asarray(grads[name], np.float64)
        at, sides = rng.choice(x.size, 24, replace=False), []
        for sign in (1, -1):
            moved = [x.copy() for _ in at]
            for m, i in zip(moved, at, strict=True):
                m.flat[i] += sign * 1e-6
            sides.append(np.array([_reference(a | {name: m}, accepted)[0] for m in moved]))
        expected = (sides[0] - sides[1]) / 2e-6
        # Gradients of logits are rounded to bfloat16.
        assert np.sqrt(((got.flat[at] - expected) ** 2).mean() / (expected**2).mean()) < 1e-2, name
    assert not np.asarray(grads["head"], np.float32).any() and not np.asarray(grads["hidden"], np.float32).any()
    invalid = ~np.asarray(a["valid"])
    for name in ("normed", "before"):
        assert not np.asarray(grads[name], np.float32).reshape(N, K, -1)[invalid].any()
    assert not np.asarray(grads["confidence"])[invalid].any()


def test_a_few_drafts_at_a_time_are_all_of_them():
    a = _arrays()

    def run(logit_bytes):
        def loss(part):
            return _loss(a | part, logit_bytes=logit_bytes)[0]

        return jax.jit(jax.value_and_grad(loss))({name: a[name] for name in ("normed", "before", "markov")})

    (whole, grads), (parts, part_grads) = run(0), run(4 * V * 7)  # 30 drafts in parts of 7
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(part_grads), strict=True):
        np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(x, np.float32), rtol=1e-2, atol=1e-5)


def test_figures():
    a, options = _arrays(), DrafterOptions(decay=G)
    _, (compared, sums) = _loss(a, options)
    found = {name: float(x) for name, x in drafter_metrics(sums, options).items()}
    valid = np.asarray(a["valid"])
    c = 1 / (1 + np.exp(-np.asarray(a["confidence"], np.float64)))
    accepted, agree = np.asarray(acceptance(compared), np.float64), np.asarray(compared.agree)
    whole = valid.all(axis=1)
    assert whole.sum() == 3
    for k in range(K):
        np.testing.assert_allclose(found[f"accept_{k + 1}"], accepted[valid[:, k], k].mean(), rtol=1e-5)
        np.testing.assert_allclose(found[f"agree_{k + 1}"], agree[valid[:, k], k].mean(), rtol=1e-5)
    lengths = {
        "expected_tokens": 1 + np.cumprod(accepted[whole], axis=1).sum(axis=1).mean(),
        "agreed_tokens": 1 + np.cumprod(agree[whole], axis=1).sum(axis=1).mean(),
        "confidence_error": np.abs(c - accepted)[valid].mean(),
        "confidence_bias": (c - accepted)[valid].mean(),
        "confidence_cumulative_bias": (np.cumprod(c, 1) - np.cumprod(accepted, 1))[whole].mean(),
        "loss": float(_loss(a, options)[0]),
        "drafts": valid.sum(),
    }
    for name, value in lengths.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-7, err_msg=name)


def test_sums_of_two_batches_add_up_to_those_of_both():
    """What several devices or micro-batches see is divided by the weight of all of it."""
    a, b = _arrays(0), _arrays(1)
    b["valid"] = jnp.asarray(np.arange(K) < np.array([1, 0, 2, 1, 1, 5])[:, None])
    tables = {name: a[name] for name in ("head", "markov")}
    parts = [_loss(x | tables)[1][1] for x in (a, b)]
    added = DrafterSums(*(x + y for x, y in zip(*parts, strict=True)))
    loss, (_, sums) = _loss({name: jnp.concatenate([a[name], b[name]]) for name in a.keys() - tables.keys()} | tables)
    for name, x, y in zip(DrafterSums._fields, added, sums, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(drafter_metrics(added, DrafterOptions())["loss"], loss, rtol=1e-4)
