"""The exact output law of draft-and-verify rounds on a tiny vocabulary: every draft and every outcome, weighted.

Laws depend on the whole context: those behind t tokens are an array [V^t, V], indexed by the tokens as digits of a
number in base V. N = K + 1 tokens are looked at, the most that one round gives; where it gives fewer, the target's own
law fills up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import numpy as np

from dsv41.ops.sampling import SamplingParams, filtered_logprobs, sampling_arrays
from dsv41.ops.verification import acceptance_probabilities, accepted_count, next_token_logits

# (target_logprobs, draft_logprobs, drafts, lengths, rule) -> bounds [B, K], as `acceptance_probabilities`.
Bounds = Callable[..., np.ndarray]

_bounds = jax.jit(acceptance_probabilities, static_argnames="rule")
_count = jax.jit(accepted_count, static_argnames="rule")
_next_law = jax.jit(next_token_logits, static_argnames="rule")


def sequences(vocabulary: int, length: int) -> np.ndarray:
    """int32 [V^length, length], every sequence, in the order of its index."""
    return np.array(list(itertools.product(range(vocabulary), repeat=length)), np.int32).reshape(-1, length)


def context_index(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """[n, t] -> [n], where the laws behind these tokens are found."""
    return tokens @ (vocabulary ** np.arange(tokens.shape[1])[::-1])


@dataclasses.dataclass(frozen=True)
class Laws:
    """Log probabilities float32 [V^t, V] behind t tokens: the target's for t = 0..K, the drafter's for t = 0..K - 1."""

    target: list[np.ndarray]
    draft: list[np.ndarray]

    @property
    def vocabulary(self) -> int:
        return self.target[0].shape[1]

    @property
    def drafts(self) -> int:
        return len(self.draft)

    @functools.cached_property
    def all_drafts(self) -> np.ndarray:
        return sequences(self.vocabulary, self.drafts)

    @functools.cached_property
    def draft_weights(self) -> np.ndarray:
        """float64 [V^K], how likely each sequence of `all_drafts` is drawn."""
        return self._conditional(self.draft, self.all_drafts).prod(axis=1)

    @functools.cached_property
    def target_law(self) -> np.ndarray:
        """float64 [V^N]."""
        return self._conditional(self.target, sequences(self.vocabulary, self.drafts + 1)).prod(axis=1)

    def _conditional(self, laws: list[np.ndarray], tokens: np.ndarray) -> np.ndarray:
        columns = [np.exp(row.astype(np.float64)) for row in self.behind(laws, tokens)]
        return np.stack([c[np.arange(len(tokens)), tokens[:, t]] for t, c in enumerate(columns)], axis=1)

    def behind(self, laws: list[np.ndarray], tokens: np.ndarray) -> list[np.ndarray]:
        """[n, V] for each t: the law behind the first t of each row's tokens."""
        return [law[context_index(tokens[:, :t], self.vocabulary)] for t, law in enumerate(laws)]

    def output_law(self, drafts, lengths, rule, bounds: Bounds = _bounds, next_law: Bounds = _next_law) -> np.ndarray:
        """float64 [n, V^N]: the law of N tokens, given the drafts [n, K] and how many of them are verified [n].

        Each uniform is once below its bound and once above it; both outcomes count by their probability.
        """
        below = np.array(list(itertools.product([True, False], repeat=self.drafts)))
        n, cells = len(drafts), len(below)
        drafts, lengths = np.repeat(drafts, cells, axis=0), np.repeat(np.int32(lengths), cells)
        below = np.tile(below, (n, 1))
        target = np.stack(self.behind(self.target, drafts), axis=1)
        draft = np.stack(self.behind(self.draft, drafts), axis=1)
        h = np.asarray(bounds(target, draft, drafts, lengths, rule=rule))
        uniforms = np.where(below, h / 2, (1 + h) / 2)
        weights = np.where(below, h, 1 - h.astype(np.float64)).prod(axis=1)
        count = np.asarray(_count(h, uniforms, lengths, rule=rule))
        law = np.exp(np.asarray(next_law(target, draft, drafts, count, lengths, rule=rule), np.float64))
        law /= law.sum(axis=1, keepdims=True)

        outputs = sequences(self.vocabulary, self.drafts + 1)
        kept = np.arange(self.drafts) < count[:, None]
        same = ((drafts[:, None] == outputs[None, :, :-1]) | ~kept[:, None]).all(axis=-1)
        each = self._conditional(self.target, outputs)
        behind = np.concatenate([each[:, ::-1].cumprod(axis=1)[:, ::-1], np.ones((len(each), 1))], axis=1)
        result = weights[:, None] * same * law[:, outputs.T][np.arange(n * cells), count] * behind[:, count + 1].T
        return result.reshape(n, cells, -1).sum(axis=1)

    def error(self, lengths, rule, **options) -> float:
        """Total variation between the output's law and the target's; lengths: of each of `all_drafts`, or one for all.

        It is the most by which the probability of any set of outputs is wrong.
        """
        lengths = np.broadcast_to(lengths, len(self.all_drafts))
        law = self.draft_weights @ self.output_law(self.all_drafts, lengths, rule, **options)
        return np.abs(law - self.target_law).sum() / 2


def joint_error(one: Laws, other: Laws, lengths: np.ndarray, rule) -> float:
    """The same for the pair of outputs of two requests; lengths: int [V^K, V^K, 2] of every pair of drafts."""
    n = len(one.all_drafts)
    first = one.output_law(np.repeat(one.all_drafts, n, axis=0), lengths[..., 0].reshape(-1), rule)
    second = other.output_law(np.tile(other.all_drafts, (n, 1)), lengths[..., 1].reshape(-1), rule)
    weights = np.outer(one.draft_weights, other.draft_weights).reshape(-1, 1)
    joint = (weights * first).T @ second
    return np.abs(joint - np.outer(one.target_law, other.target_law)).sum() / 2


_filtered = jax.jit(filtered_logprobs)


def random_laws(
    seed: int, *, vocabulary: int = 3, drafts: int = 3, target: SamplingParams, draft: SamplingParams, near: float = 0
) -> Laws:
    """Laws of random logits, cut as the sampling parameters say.

    near: from 0, where the two know nothing of each other, to 1, where they are the same.
    """
    rng = np.random.default_rng(seed)

    def laws(logits: list[np.ndarray], params: SamplingParams) -> list[np.ndarray]:
        flat = np.concatenate(logits)[None]
        cut = np.asarray(_filtered(flat, sampling_arrays([params])))[0]
        return np.split(cut, np.cumsum([len(x) for x in logits])[:-1])

    shapes = [(vocabulary**t, vocabulary) for t in range(drafts + 1)]
    theirs = [1.5 * rng.normal(size=s).astype(np.float32) for s in shapes]
    ours = [np.float32(near) * x + np.float32(1 - near) * rng.normal(size=x.shape).astype(np.float32) for x in theirs]
    return Laws(target=laws(theirs, target), draft=laws(ours, draft)[:drafts])
