"""Decode token ids to text incrementally. A state machine without I/O."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Decodes the bytes of tokens and holds back a character until it is complete.

    Every byte reaches the text: bytes that are not UTF-8 become U+FFFD. A leading space is dropped only if
    the tokenizer itself puts one before every text. The cost per token is constant.

    Args:
        token_bytes: returns the bytes of a token id.
        trims_leading_space: drop one space at the very start.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, trims_leading_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = trims_leading_space

    def feed(self, token: int) -> str:
        return self._trimmed(self._decoder.decode(self._token_bytes(token)))

    @property
    def is_inside_character(self) -> bool:
        """True if the last token ended within a character."""
        return bool(self._decoder.getstate()[0])

    def close(self) -> str:
        """Decode an incomplete character at the end."""
        return self._trimmed(self._decoder.decode(b"", final=True))

    def _trimmed(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")
