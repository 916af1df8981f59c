"""Token ids to text as they arrive."""

from __future__ import annotations

from typing import Any

_REPLACEMENT_CHARACTER = "\ufffd"


class TextStream:
    """Hands out text in whole characters: a token may end inside one.

    The pieces and the rest that `finish` returns make up the tokenizer's text of all ids. Needs a byte-level tokenizer,
    as the released one is: texts of tokens that meet between two characters join without change.
    """

    def __init__(self, tokenizer: Any):
        """tokenizer: a `tokenizers.Tokenizer`; special tokens have no text."""
        self._tokenizer = tokenizer
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now; "" while the last character is incomplete."""
        self._waiting.append(token)
        text = self._tokenizer.decode(self._waiting, skip_special_tokens=True)
        if text.endswith(_REPLACEMENT_CHARACTER):
            return ""
        self._waiting.clear()
        return text

    def finish(self) -> str:
        """What is left; a character that stayed incomplete comes as U+FFFD."""
        text = self._tokenizer.decode(self._waiting, skip_special_tokens=True)
        self._waiting.clear()
        return text
