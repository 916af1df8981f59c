"""A byte-level BPE tokenizer of our own, in the file format of the release.

Ids are as in the release: begin, end and padding of a text are 0, 1 and 2, all other special tokens come last. The
Engram classes follow from the tokenizer, so that a config belongs to one: `with_tokenizer` fits it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv41.checkpoint.token_map import check_token_map, check_vocabulary, engram_token_map
from dsv41.config import DSV41Error, ModelConfig
from dsv41.ops.engram_hash import engram_hash_spec

FIRST_TOKENS = ("<bos>", "<eos>", "<pad>")
LAST_TOKENS = ("<image>", "<noise>", "<user>", "<assistant>", "<think>", "</think>", "<tool>", "<reserved>")
VOCAB_SIZE = 4096
# The end of a line and the indentation of the next one are one piece, whatever its depth: in Python they say what
# begins and what ends. A word takes the blank in front of it along. The last two alternatives leave no character over.
_PIECES = (
    r"\s*[\r\n]+[ \t]*"
    r"| ?[\p{L}\p{M}_]+"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}_]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def make_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learns the merges of a byte-level BPE. The same texts give the same tokenizer, bit for bit.

    Every string can be encoded and decodes to itself. No normaliser, no prefix blank, no token for unknown text.

    Args:
      texts: what to learn from.
      vocab_size: tokens in all, special ones included.

    Raises:
      DSV41Error: the vocabulary is too small for all bytes, or the texts too few to fill it.
    """
    least = 256 + len(FIRST_TOKENS) + len(LAST_TOKENS)
    if vocab_size < least:
        raise DSV41Error(f"vocab_size: expected at least {least}, 256 bytes and the special tokens, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LAST_TOKENS),
        special_tokens=[_special(token) for token in FIRST_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([_special(token) for token in LAST_TOKENS])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocab_size:
        raise DSV41Error(f"tokenizer: the texts give only {size} tokens, fewer than vocab_size={vocab_size}")
    return tokenizer


def _special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of the `tokenizer.json` that `tokenizer_json` gives."""
    return hashlib.sha256(tokenizer_json(tokenizer)).hexdigest()


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """The bytes of `tokenizer.json`."""
    return f"{tokenizer.to_str(pretty=False)}\n".encode()


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text in which special tokens are ordinary characters: source code may well spell `<pad>`.

    The tokenizer is as before afterwards. Not for several threads that share one.
    """
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """`encode_text` of each, which is faster for all of them at once."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    finally:
        tokenizer.encode_special_tokens = before


def with_tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The config with the ids of the special tokens and the number of Engram classes of a tokenizer made here.

    Raises:
      DSV41Error: the tokenizer lacks a special token, or has another number of tokens than the config.
    """
    text = config.text_config
    check_vocabulary(tokenizer, text.vocab_size)
    ids = {token: tokenizer.token_to_id(token) for token in (*FIRST_TOKENS, *LAST_TOKENS)}
    if missing := [token for token, i in ids.items() if i is None]:
        raise DSV41Error(f"tokenizer: no special token {missing[0]}")
    fields = {"dspark_noise_token_id": ids["<noise>"]}
    token_map = engram_token_map(tokenizer, text.vocab_size)
    if text.engram_layer_ids:
        fields |= {"engram_pad_token_id": ids["<pad>"], "engram_compressed_vocab_size": int(token_map.max()) + 1}
    fitted = dataclasses.replace(
        config,
        bos_token_id=ids["<bos>"],
        eos_token_id=ids["<eos>"],
        pad_token_id=ids["<pad>"],
        image_token_id=ids["<image>"],
        text_config=dataclasses.replace(text, **fields),
    )
    if text.engram_layer_ids:
        check_token_map(token_map, fitted.text_config, "tokenizer")
        engram_hash_spec(fitted.text_config, int(token_map[ids["<pad>"]]))
    return fitted
