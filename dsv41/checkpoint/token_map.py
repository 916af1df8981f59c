"""The tokenizer file, and the Engram token map that follows from it (architecture.md section 5).

Tokens whose texts normalise alike share a class, and the hash sees classes only. A map of another size than the model
was trained with silently makes every hash wrong, so it is refused.
"""

from __future__ import annotations

import pathlib

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from dsv41.config import DSV41Error, TextConfig

_REPLACEMENT_CHARACTER = "\ufffd"
# The release marks a lone space with this private-use character while it strips, and turns it back afterwards. So one
# that comes from the text itself ends as a space too.
_LONE_SPACE_MARK = "\ue000"


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """Reads a `tokenizer.json`, or the one inside a directory in the released layout.

    Raises:
      DSV41Error: the file is missing, unreadable or not a tokenizer; the message names it.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise DSV41Error(f"{path}: no such tokenizer file") from e
    except (OSError, UnicodeDecodeError) as e:
        raise DSV41Error(f"{path}: cannot read the tokenizer file ({e})") from e
    try:
        return Tokenizer.from_str(text)
    except Exception as e:  # the library raises bare Exception for every kind of malformed file
        raise DSV41Error(f"{path}: not a tokenizer file ({e})") from e


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, path: str | pathlib.Path = "tokenizer") -> None:
    """Refuses a tokenizer whose ids are not exactly 0..vocab_size - 1.

    The released tokenizer has a token for each of its 129,280 ids, reserved ones included. An id without a token would
    have no class, and a token without an embedding row no meaning.

    Raises:
      DSV41Error: the numbers differ, or some id has no token; the message names the file and both sizes.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocab_size:
        raise DSV41Error(f"{path}: the tokenizer has {size} tokens, but text_config.vocab_size is {vocab_size}")
    ids = np.fromiter(tokenizer.get_vocab(with_added_tokens=True).values(), np.int64, size)
    missing = np.setdiff1d(np.arange(vocab_size), ids)
    if len(missing):
        raise DSV41Error(
            f"{path}: the tokenizer's {size} tokens leave id {missing[0]} unused, but text_config.vocab_size is "
            f"{vocab_size}: expected one token for each id"
        )


def _text_key(text: str, fold: normalizers.Normalizer, strip: normalizers.Normalizer) -> str:
    folded = fold.normalize_str(text)
    if folded != " ":
        folded = strip.normalize_str(folded).replace(_LONE_SPACE_MARK, " ")
    return folded or text


def engram_token_map(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Class of each token id: int32 [V], classes numbered in order of first appearance.

    Each id is decoded alone, special tokens kept. A text with U+FFFD in it is part of a character: its key is the
    vocabulary's own string. Any other text is folded (NFKC, NFD, no accents, lower case, runs of blanks to one space)
    and stripped, except that a lone space stays; a text of which nothing is left is its own key. Ids with equal keys
    share a class.

    Raises:
      DSV41Error: the tokenizer's ids are not exactly 0..vocab_size - 1.
    """
    check_vocabulary(tokenizer, vocab_size)
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        ]
    )
    # The library's own notion of white space, which is not that of str.strip.
    strip = normalizers.Strip()
    texts = (tokenizer.decode([i], skip_special_tokens=False) for i in range(vocab_size))
    class_of_key: dict[str, int] = {}
    classes = np.empty(vocab_size, np.int32)
    for i, text in enumerate(texts):
        key = tokenizer.id_to_token(i) if _REPLACEMENT_CHARACTER in text else _text_key(text, fold, strip)
        classes[i] = class_of_key.setdefault(key, len(class_of_key))
    return classes


def check_token_map(token_map: np.ndarray, config: TextConfig, path: str | pathlib.Path) -> None:
    """Refuses a token map that is not the one the hashes were trained with.

    Raises:
      DSV41Error: its number of ids or of classes differs from the config; the message names the tokenizer file and both
        sizes.
    """
    if len(token_map) != config.vocab_size:
        raise DSV41Error(
            f"{path}: the Engram token map covers {len(token_map)} ids, but text_config.vocab_size is "
            f"{config.vocab_size}"
        )
    classes = int(token_map.max()) + 1
    if classes != config.engram_compressed_vocab_size:
        raise DSV41Error(
            f"{path}: the tokenizer gives {classes} Engram classes, but text_config.engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}"
        )
