"""Encodes log-probabilities in the two formats of OpenAI's protocols."""

import codecs
from collections.abc import Callable, Iterable

from start_llm.core.chat import Json
from start_llm.core.events import Piece, ScoredToken, TokenLogprobs

type TokenBytes = Callable[[int], bytes]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _scored(entry: ScoredToken, token_bytes: TokenBytes) -> dict[str, Json]:
    raw = token_bytes(entry.token)
    return {"token": _text(raw), "logprob": entry.logprob, "bytes": list(raw)}


def _entry(entry: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, Json]:
    top: list[Json] = [_scored(alternative, token_bytes) for alternative in entry.top]
    return {**_scored(entry.chosen, token_bytes), "top_logprobs": top}


def logprob_entries(entries: Iterable[TokenLogprobs], token_bytes: TokenBytes) -> list[Json]:
    """Return each token with its alternatives, as in chat completions and responses."""
    return [_entry(entry, token_bytes) for entry in entries]


def chat_logprobs(entries: Iterable[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Json]:
    """Return the `logprobs` of a chat choice or chunk."""
    return {"content": logprob_entries(entries, token_bytes), "refusal": None}


class TextOffsets:
    """Computes the character offsets of tokens in the text of a reply.

    A token that completes a character has the offset of that character.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0

    def of_next(self, token: int) -> int:
        """Return the offset of `token`, which must follow the previous call's token."""
        offset = self._length
        self._length += len(self._decoder.decode(self._token_bytes(token)))
        return offset


def text_logprobs(pieces: Iterable[Piece], token_bytes: TokenBytes, offsets: TextOffsets) -> dict[str, Json]:
    """Return the `logprobs` of a text completion. `offsets` must have processed all earlier pieces."""
    entries = [entry for piece in pieces for entry in piece.logprobs]
    return {
        "tokens": [_text(token_bytes(entry.chosen.token)) for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": [
            {_text(token_bytes(scored.token)): scored.logprob for scored in entry.top} for entry in entries
        ],
        "text_offset": [offsets.of_next(entry.chosen.token) for entry in entries],
    }
