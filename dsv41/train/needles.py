"""Documents in which facts are stated once and asked for at the end, among code of a corpus.

What is asked for cannot be guessed. Where it lies further back than the windows of all layers reach, only compressed
entries that the indexer selects can tell it. Mixed into training they teach recall; of held-out text they measure it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dsv41.config import DSV41Error
from dsv41.train.tokenizer import encode_text, encode_texts

# A statement of a fact and its question. In both, the name is a piece of its own for the tokenizer, so that it has the
# same tokens there.
KINDS = {
    "attribute": ("codes.{name} = {value}", "codes.{name} == {value}"),
    "entry": ('table["{name}"] = {value}', 'table["{name}"] == {value}'),
    "function": ("def {name}():\n    return {value}", "{name}() == {value}"),
}
_WORDS = (
    "amber anvil apple arrow badger bamboo basil beetle birch bison cactus camel canyon cedar cherry clover cobalt "
    "comet copper coral cougar daisy delta dingo dragon eagle ember falcon fennel ferret flint forest garnet ginger "
    "glacier granite harbor hazel heron hornet indigo iris island ivory jaguar jasper juniper kelp lagoon lemon lilac "
    "linen lotus magpie mango maple marble meadow melon mustard nectar nickel nutmeg ocean olive onyx orchid osprey "
    "otter paprika parrot pebble pepper pigeon plum poppy puffin quartz rabbit raven ripple rocket saffron salmon "
    "sorrel sparrow spruce sumac thistle thunder tiger topaz tulip turnip umber velvet violet walnut walrus willow "
    "zebra zephyr"
)
NAMES = tuple(_WORDS.split())
# A fact costs about 25 tokens, of which 3 are an answer: documents of few facts would teach recall with too few tokens.
_MOST_FACTS, _TOKENS_A_FACT = 32, 50
_QUESTIONS = "\n\ndef check():\n"
_SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
_EXCERPT_LINES = 60
_LINES_AT_ONCE = 15  # whose tokens are counted before it is known how many fit
_SMALL_GAP = 16  # tokens that may stay free without another excerpt being sought for them
# Documents a task of a process makes; fewer than some tasks are not worth processes, which take seconds to start.
_TASK, _TASKS = 250, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleDocument:
    """A text with questions at its end.

    Attributes:
      text: all of it, without begin and end tokens.
      tokens: its length.
      answers: (begin, end) in characters of each answer, in the order of the questions.
      facts: where in the text, in characters, the statement of the same fact begins.
      order: the number of the same fact, as in the `depths` that were asked for.
    """

    text: str
    tokens: int
    answers: tuple[tuple[int, int], ...]
    facts: tuple[int, ...]
    order: tuple[int, ...]


def needle_document(
    rng: np.random.Generator,
    filler: Sequence[str],
    tokens: int,
    tokenizer: Tokenizer,
    *,
    depths: Sequence[float] | None = None,
) -> NeedleDocument:
    """Facts between lines of other text, and questions behind it. The same generator state gives the same document.

    Args:
      rng: draws everything.
      filler: texts that whole lines are taken from.
      tokens: length that it comes close to from below.
      tokenizer: counts tokens.
      depths: where each fact is, as a share of the filler; None: one or more facts anywhere, as many as fit, up to 32.
        Each has another name, and all are asked in a random order.

    Raises:
      DSV41Error: there is no filler, a depth or their number is out of range, or the facts do not fit.
    """
    if not any(filler):
        raise DSV41Error("needles: there is no text to put them into")
    drawn = depths is None
    if drawn:
        depths = rng.random(rng.integers(1, min(_MOST_FACTS, 1 + tokens // _TOKENS_A_FACT) + 1)).tolist()
    if not 1 <= len(depths) <= len(NAMES):
        raise DSV41Error(f"needles: expected 1 to {len(NAMES)} facts, got {len(depths)}")
    if not all(0 <= depth <= 1 for depth in depths):
        raise DSV41Error(f"needles: expected depths in [0, 1], got {list(depths)}")
    stated = [_fact(rng, name) for name in rng.choice(NAMES, len(depths), replace=False)]
    while True:
        order = [int(i) for i in rng.permutation(len(depths))]
        least = len(encode_text(tokenizer, _assemble([], stated, depths, order).text))
        if least <= tokens or not drawn or len(depths) == 1:
            break
        depths, stated = depths[:-1], stated[:-1]
    lines = _filler_lines(rng, filler, tokens - least, tokenizer)
    while True:
        document = _assemble(lines, stated, depths, order)
        count = len(encode_text(tokenizer, document.text))
        if count <= tokens:
            return dataclasses.replace(document, tokens=count)
        if not lines:
            raise DSV41Error(
                f"needles: {len(depths)} facts and their questions take {count} tokens, more than {tokens}"
            )
        lines = lines[:-1]


def needle_documents(
    count: int,
    seed: int,
    filler: Sequence[str],
    tokenizer: Tokenizer,
    *,
    shortest: int = 200,
    longest: int = 4000,
) -> list[str]:
    """Texts whose lengths have a uniform logarithm, so that short ones, from which recall is learnt first, prevail.

    A document that is read again teaches its values, not recall: there should be as many as a whole training reads.

    Args:
      count: of documents.
      seed: of all draws.
      filler: texts that whole lines are taken from.
      tokenizer: counts tokens.
      shortest, longest: tokens of a document, without begin and end.

    Raises:
      DSV41Error: as `needle_document`, or the lengths are out of order.
    """
    if not 0 < shortest <= longest:
        raise DSV41Error(f"needles: expected lengths that rise from above 0, got {shortest} to {longest}")
    make = functools.partial(_documents_between, seed=seed, shortest=shortest, longest=longest)
    spans = [(begin, min(begin + _TASK, count)) for begin in range(0, count, _TASK)]
    if len(spans) < _TASKS:
        return [text for span in spans for text in make(span, filler, tokenizer)]
    workers = concurrent.futures.ProcessPoolExecutor(
        max_workers=min(os.cpu_count() or 1, len(spans)),
        mp_context=multiprocessing.get_context("spawn"),  # a process that has started JAX must not be forked
        initializer=_start_worker,
        initargs=(tokenizer.to_str(), list(filler)),
    )
    with workers:
        return [text for texts in workers.map(functools.partial(_in_worker, make), spans) for text in texts]


def _documents_between(
    span: tuple[int, int], filler: Sequence[str], tokenizer: Tokenizer, *, seed: int, shortest: int, longest: int
) -> list[str]:
    """Those with these numbers, each from a generator of its own."""
    texts = []
    for i in range(*span):
        rng = np.random.default_rng([seed, i])
        tokens = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
        texts.append(needle_document(rng, filler, tokens, tokenizer).text)
    return texts


# Of a worker process: what all of its tasks read.
_WORKER: dict[str, Any] = {}


def _start_worker(tokenizer: str, filler: list[str]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _WORKER.update(tokenizer=Tokenizer.from_str(tokenizer), filler=filler)


def _in_worker(make: Callable[..., list[str]], span: tuple[int, int]) -> list[str]:
    return make(span, _WORKER["filler"], _WORKER["tokenizer"])


def _fact(rng: np.random.Generator, name: str) -> tuple[str, str, str]:
    """Statement, question and value."""
    if rng.random() < 0.5:
        value = literal = str(rng.integers(1000, 1000000))
    else:
        value = "".join(rng.choice(_SYLLABLES, 3))
        literal = f'"{value}"'
    statement, question = KINDS[rng.choice(list(KINDS))]
    return statement.format(name=name, value=literal), question.format(name=name, value=literal), value


def _assemble(
    lines: Sequence[str], stated: Sequence[tuple[str, str, str]], depths: Sequence[float], order: Sequence[int]
) -> NeedleDocument:
    """Lines with a fact at the border nearest to each depth, indented like what follows; then the questions.

    Tokens are not counted.
    """
    ends = np.cumsum([0, *(len(line) + 1 for line in lines)])
    at = [int(np.abs(ends - depth * ends[-1]).argmin()) for depth in depths]
    text, begins = "", {}
    for n in range(len(lines) + 1):
        indent = _indent(lines[n]) if n < len(lines) else ""
        for i in (i for i, place in enumerate(at) if place == n):
            begins[i] = len(text) + len(indent)
            text += "".join(f"{indent}{line}\n" for line in stated[i][0].split("\n"))
        if n < len(lines):
            text += f"{lines[n]}\n"
    text += _QUESTIONS
    answers = []
    for i in order:
        _, question, value = stated[i]
        text += f"    assert {question}\n"
        begin = text.rindex(value)
        answers.append((begin, begin + len(value)))
    facts = tuple(begins[i] for i in order)
    return NeedleDocument(text=text, tokens=0, answers=tuple(answers), facts=facts, order=tuple(order))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())] if line.strip() else ""


def _filler_lines(rng: np.random.Generator, filler: Sequence[str], tokens: int, tokenizer: Tokenizer) -> list[str]:
    """Lines of up to so many tokens, in excerpts from random places."""
    taken: list[str] = []
    for _ in range(max(tokens, 0)):  # each excerpt has a token or more
        lines = filler[rng.integers(len(filler))].split("\n")
        start = rng.integers(len(lines))
        excerpt = lines[start : start + _EXCERPT_LINES]
        for line, size in _sizes(excerpt, tokenizer):
            if size > tokens:
                break
            taken.append(line)
            tokens -= size
        if tokens < _SMALL_GAP:
            break
    return taken


def _sizes(lines: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Each line and its tokens."""
    for begin in range(0, len(lines), _LINES_AT_ONCE):
        group = lines[begin : begin + _LINES_AT_ONCE]
        # A line's end and the next one's indentation are one token.
        yield from zip(group, map(len, encode_texts(tokenizer, [f"\n{line}" for line in group])), strict=True)
