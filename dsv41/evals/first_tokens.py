"""The first token ids of long texts, without encoding all of them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from dsv41.train.tokenizer import encode_texts

# Characters that are encoded at first: a few for each token that is wanted, and a line or two beyond.
_CHARACTERS_A_TOKEN, _MORE_CHARACTERS = 4, 256
_PROBE = "a\nb"


def first_tokens(tokenizer: Tokenizer, texts: Sequence[str], count: int) -> list[list[int]]:
    """`encode_text(tokenizer, text)[:count]` of each text: fewer ids only where the text has no more.

    A beginning of a text is encoded, as much as it takes. Its last tokens may be others than those of the whole text:
    the cut goes through a word, or through blank lines whose newlines are one token with those behind the cut. What is
    in front of its last line that is not blank is the same, if every piece that the tokenizer encodes for itself holds
    words of one line only; of a tokenizer that does not cut texts so, all of a text is encoded.

    Args:
      tokenizer: a byte-level one.
      texts: any.
      count: ids wanted of each.
    """
    found: list[list[int]] = [[] for _ in texts]
    left = list(range(len(texts)))
    size = _CHARACTERS_A_TOKEN * count + _MORE_CHARACTERS
    if not _cuts_at_lines(tokenizer):
        size = max(map(len, texts), default=0)
    while left:
        parts = [texts[i][:size] for i in left]
        again = []
        for i, part, ids in zip(left, parts, encode_texts(tokenizer, parts), strict=True):
            found[i] = ids[:count]
            # A token is a byte or more, so that the last line has no more tokens than bytes.
            if len(part) < len(texts[i]) and len(ids) - count < len(_from_last_line(part).encode()):
                again.append(i)
        left, size = again, 2 * size
    return found


def _cuts_at_lines(tokenizer: Tokenizer) -> bool:
    if tokenizer.pre_tokenizer is None:
        return False
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(_PROBE)]
    return not any("a" in piece and "b" in piece for piece in pieces)


def _from_last_line(text: str) -> str:
    """The last line that is not blank, and all behind it; the whole text if every line is blank."""
    return text[text.rfind("\n", 0, len(text.rstrip())) + 1 :]
