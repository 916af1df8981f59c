"""Documents in which facts are stated once and asked for at the end, among code of a corpus.

What is asked for cannot be guessed. Where it lies further back than the windows of all layers reach, only compressed
entries that the indexer selects can tell it. Mixed into training they teach recall; of held-out text they measure it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer

from dsv41.config import DSV41Error
from dsv41.train.tokenizer import encode_texts

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
_LINES_AT_ONCE = 32  # whose tokens are counted together
_SMALL_GAP = 16  # tokens that may stay free without another excerpt being sought for them
_AT_ONCE = 1024  # documents that are made side by side: the tokenizer counts many texts on all cores


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NeedleDocument:
    """A text with questions at its end.

    Attributes:
      text: all of it.
      ids: int32 [n] its token ids, without begin and end.
      answers: (begin, end) in characters of each answer, in the order of the questions.
      facts: where in the text, in characters, the statement of the same fact begins.
      order: the number of the same fact, as in the `depths` that were asked for.
    """

    text: str
    ids: np.ndarray
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
    return _make([_document(rng, _Filler(filler, tokenizer), tokens, depths)], tokenizer)[0]


def needle_documents(
    count: int,
    seed: int,
    filler: Sequence[str],
    tokenizer: Tokenizer,
    *,
    shortest: int = 200,
    longest: int = 4000,
) -> list[NeedleDocument]:
    """Documents whose lengths have a uniform logarithm, so that short ones, from which recall is learnt first, prevail.

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
    lines, documents = _Filler(filler, tokenizer), []
    for begin in range(0, count, _AT_ONCE):
        makers = []
        for i in range(begin, min(begin + _AT_ONCE, count)):
            rng = np.random.default_rng([seed, i])
            tokens = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
            makers.append(_document(rng, lines, tokens, None))
        documents += _make(makers, tokenizer)
    return documents


# Gives texts, is told their token ids, and returns a document.
_Maker = Generator[str, list[int], NeedleDocument]


def _make(makers: Sequence[_Maker], tokenizer: Tokenizer) -> list[NeedleDocument]:
    """What each returns."""
    made: dict[int, NeedleDocument] = {}
    asked = {i: next(maker) for i, maker in enumerate(makers)}
    while asked:
        for i, ids in zip(list(asked), encode_texts(tokenizer, list(asked.values())), strict=True):
            try:
                asked[i] = makers[i].send(ids)
            except StopIteration as end:
                made[i] = end.value
                del asked[i]
    return [made[i] for i in range(len(makers))]


def _document(rng: np.random.Generator, filler: _Filler, tokens: int, depths: Sequence[float] | None) -> _Maker:
    """Makes the document of `needle_document`."""
    if not filler:
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
        least = len((yield _assemble([], stated, depths, order).text))
        if least <= tokens or not drawn or len(depths) == 1:
            break
        depths, stated = depths[:-1], stated[:-1]
    lines = _filler_lines(rng, filler, tokens - least)
    while True:
        document = _assemble(lines, stated, depths, order)
        ids = yield document.text
        if len(ids) <= tokens:
            return dataclasses.replace(document, ids=np.asarray(ids, np.int32))
        if not lines:
            raise DSV41Error(
                f"needles: {len(depths)} facts and their questions take {len(ids)} tokens, more than {tokens}"
            )
        lines = lines[:-1]


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

    It has no ids yet.
    """
    ends = np.cumsum([0, *(len(line) + 1 for line in lines)])
    at = [int(np.abs(ends - depth * ends[-1]).argmin()) for depth in depths]
    text, begins, written = "", {}, 0
    for i in sorted(range(len(at)), key=lambda i: at[i]):
        text += "".join(f"{line}\n" for line in lines[written : at[i]])
        written = at[i]
        indent = _indent(lines[written]) if written < len(lines) else ""
        begins[i] = len(text) + len(indent)
        text += "".join(f"{indent}{line}\n" for line in stated[i][0].split("\n"))
    text += "".join(f"{line}\n" for line in lines[written:]) + _QUESTIONS
    answers = []
    for i in order:
        _, question, value = stated[i]
        text += f"    assert {question}\n"
        begin = text.rindex(value)
        answers.append((begin, begin + len(value)))
    facts = tuple(begins[i] for i in order)
    return NeedleDocument(text=text, ids=np.zeros(0, np.int32), answers=tuple(answers), facts=facts, order=tuple(order))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())] if line.strip() else ""


class _Filler:
    """Texts by lines, whose tokens are counted when they are used first."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        self._texts, self._tokenizer = texts, tokenizer
        self._lines: dict[int, list[str]] = {}
        self._sizes: dict[tuple[int, int], list[int]] = {}

    def __bool__(self) -> bool:
        return any(self._texts)

    def draw(self, rng: np.random.Generator) -> Iterator[tuple[str, int]]:
        """Lines of a text from a random one on, and the tokens of each behind the end of the line before it."""
        number = int(rng.integers(len(self._texts)))
        if number not in self._lines:
            self._lines[number] = self._texts[number].split("\n")
        lines = self._lines[number]
        start = int(rng.integers(len(lines)))
        for n in range(start, min(start + _EXCERPT_LINES, len(lines))):
            yield lines[n], self._size(number, n)

    def _size(self, number: int, line: int) -> int:
        group, place = divmod(line, _LINES_AT_ONCE)
        if (number, group) not in self._sizes:
            lines = self._lines[number][group * _LINES_AT_ONCE :][:_LINES_AT_ONCE]
            # A line's end and the next one's indentation are one token.
            self._sizes[number, group] = list(map(len, encode_texts(self._tokenizer, [f"\n{x}" for x in lines])))
        return self._sizes[number, group][place]


def _filler_lines(rng: np.random.Generator, filler: _Filler, tokens: int) -> list[str]:
    """Lines of up to so many tokens, in excerpts from random places."""
    taken: list[str] = []
    for _ in range(max(tokens, 0)):  # each excerpt has a token or more
        for line, size in filler.draw(rng):
            if size > tokens:
                break
            taken.append(line)
            tokens -= size
        if tokens < _SMALL_GAP:
            break
    return taken
