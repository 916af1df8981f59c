"""Text to token ids and back, as scripts need it."""

from collections.abc import Sequence
from typing import Any

from dsv41.config import DSV41Error
from dsv41.engine import TextStream


def encode_plain(tokenizer: Any, text: str, what: str) -> list[int]:
    """Ids of `text` with nothing put before or behind it; `what` names its origin in messages."""
    try:
        text.encode()
    except UnicodeEncodeError as e:  # Python keeps such bytes of the command line as lone surrogates
        raise DSV41Error(f"{what}: not valid UTF-8") from e
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode(tokenizer: Any, text: str, bos_token_id: int, what: str = "--prompt") -> list[int]:
    """Ids of `text` behind exactly one BOS, unless the text itself spells more."""
    ids = encode_plain(tokenizer, text, what)
    return ids if ids[:1] == [bos_token_id] else [bos_token_id, *ids]


class TextPrinter:
    """Writes the text of tokens to stdout as they come; without a tokenizer their ids."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]):
        """stop_ids: tokens that have no text."""
        self._stream = TextStream(tokenizer) if tokenizer is not None else None
        self._stop = frozenset(stop_ids)

    def push(self, token: int) -> None:
        if token in self._stop:
            return
        print(self._stream.push(token) if self._stream else f"{token} ", end="", flush=True)

    def finish(self) -> None:
        print(self._stream.finish() if self._stream else "")
