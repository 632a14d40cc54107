"""The bytes of every token: what the tokenizer's own `decode` writes for it behind another token.

Whatever reads the text of tokens (streams, stop strings, grammars, log-probabilities, transcripts) reads
this table, so none of them can disagree with `decode`. A token that is a part of a character has no text of
its own; its bytes are in its spelling, and are taken if `decode` shows the same broken character for them.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from start_llm.core.errors import InternalError
from start_llm.models.rust_panics import panics_as_errors


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_ALPHABET = frozenset(_byte_alphabet())
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in _byte_alphabet().items()})
"""Maps the byte alphabet to Latin-1, whose characters are the bytes themselves."""
_SPACE_MARK = "\u2581"
_BROKEN = "\ufffd"
_DECODING = "_decode"
"""The method of transformers between ids and the text that the tokenizers library returns."""

_ANCHORS = ("a", "x", "the", "1", "0")
_AT_ONCE = 2**14
_RUNS, _RUN_LENGTH = 64, 16
_HARD_TEXTS = (
    "    if x:\n\t\treturn  [\n" + "".join(" " * width + "|" for width in range(1, 41)),
    "naïve cafe\u0301 \u1e9b\u0323 Straße, Ελληνικά, русский, עברית, हिन्दी, ไทย",
    "日本語, 한국어, \u1112\u1161\u11ab",
    "🐟 👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 👍🏽 \U00010348 \U0001d573 \U000e0067 \U0010fffd \ue000",
)
"""Texts with characters of all planes, joined and decomposed ones, and white space of all widths."""

type Decode = Callable[[Sequence[list[int]]], list[str]]
"""Returns the texts of several runs of tokens."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What tokens spell.

    Attributes:
        bytes: of each token, behind another one.
        trims_leading_space: the decoder drops the space in front of the first token of a text.
        warning: in what way joined bytes differ from `decode`, for the person who runs the server; empty if
            no difference is known.
    """

    bytes: Mapping[int, bytes]
    trims_leading_space: bool
    warning: str = ""


def token_table(wrapper: Any) -> TokenTable:
    """Ask a tokenizer for the text of each token. Takes about a second for 250,000 tokens.

    An added token spells its text as it is where the decoder would take it for bytes and break it, and a
    special one wherever the decoder would change it: it is a mark, and no user sees it.

    Args:
        wrapper: mlx_lm's, or a tokenizer of transformers.
    """
    decode, pieces = _decoding(wrapper), _pieces(wrapper)
    added, special = _added(wrapper)
    anchor = _anchor(wrapper, decode, {token: text for token, text in pieces.items() if token not in added})
    pieces |= added
    spelled, unexplained = dict[int, bytes](), list[int]()
    for (token, piece), decoded in zip(pieces.items(), _behind(anchor, pieces, decode), strict=True):
        is_broken = token in added and _BROKEN in decoded
        is_changed = token in special and piece not in decoded
        text = piece if is_broken or is_changed else decoded
        raw = _bytes_of(text, piece)
        spelled[token] = text.encode() if raw is None else raw
        if raw is None:
            unexplained.append(token)
    trims = _trims(spelled, decode)
    runs = _runs(wrapper, anchor, spelled, special)
    warning = _warning_of_pieces(unexplained, pieces) or _warning_of_runs(runs, spelled, decode, trims)
    return TokenTable(spelled, trims, warning)


def _added(wrapper: Any) -> tuple[dict[int, str], frozenset[int]]:
    """Return the texts of the added tokens, and which of them are special.

    A tokenizer that is no program of the tokenizers library may not say which: then all are.
    """
    added = {int(token): text for token, text in wrapper.added_tokens_decoder.items()}
    special = frozenset(token for token, text in added.items() if getattr(text, "special", True))
    return {token: str(text) for token, text in added.items()}, special


def _decoding(wrapper: Any) -> Decode:
    """Return the tokenizer's `decode`, without the clean-up of blanks that some ask for."""
    kind = type(getattr(wrapper, "_tokenizer", wrapper))
    if getattr(kind, _DECODING, None) is getattr(PreTrainedTokenizerFast, _DECODING):
        backend = wrapper.backend_tokenizer
        return lambda runs: backend.decode_batch(runs, skip_special_tokens=False)
    return lambda runs: [
        str(wrapper.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for run in runs
    ]


def _pieces(wrapper: Any) -> dict[int, str]:
    """Return the vocabulary's spelling of each token."""
    pieces: dict[int, str] = {token: piece for piece, token in wrapper.get_vocab().items()}
    # The vocabulary is a map from spelling to token, so it has only one of two tokens with the same spelling.
    missing = [token for token in range(max(pieces, default=-1)) if token not in pieces]
    spelled = zip(missing, wrapper.convert_ids_to_tokens(missing), strict=True)
    pieces.update((token, piece) for token, piece in spelled if isinstance(piece, str))
    return pieces


def _anchor(wrapper: Any, decode: Decode, ordinary: Mapping[int, str]) -> list[int]:
    """Return a token that ends with a whole character, for others to stand behind; none if there is none."""
    tried = [wrapper.encode(text, add_special_tokens=False)[-1:] for text in _ANCHORS]
    tried += ([token] for token, piece in ordinary.items() if piece.isascii() and piece.isalnum())
    return next((run for run in tried if run and run[0] in ordinary and _is_plain(*decode([run]))), [])


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isalnum()


def _behind(anchor: list[int], tokens: Iterable[int], decode: Decode) -> Iterator[str]:
    """Return the text of each token behind the anchor."""
    before = decode([anchor])[0] if anchor else ""
    for some in batched(tokens, _AT_ONCE):
        for text in decode([[*anchor, token] for token in some]):
            yield text.removeprefix(before)


def _bytes_of(text: str, piece: str) -> bytes | None:
    """Return the bytes that `decode` shows as `text`; None if the spelling of the token has no such bytes."""
    if _BROKEN not in text:
        return text.encode()
    return next((raw for raw in _spellings(piece) if raw.decode(errors="replace") == text), None)


def _spellings(piece: str) -> Iterator[bytes]:
    """Return what a piece can mean: SentencePiece's byte, letters of the byte alphabet, or a text."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        yield bytes.fromhex(piece[3:5])
    if _BYTE_ALPHABET.issuperset(piece):
        yield piece.translate(_TO_LATIN_1).encode("latin-1")
    yield piece.replace(_SPACE_MARK, " ").encode()
    yield piece.encode()


def _trims(spelled: Mapping[int, bytes], decode: Decode) -> bool:
    """Return whether a token that begins with a space loses it at the start of a text."""
    spaced = (token for token, text in spelled.items() if text[:1] == b" " and text[1:].isalnum())
    token = next(spaced, None)
    return token is not None and decode([[token]]) == [spelled[token].decode()[1:]]


def _runs(
    wrapper: Any, anchor: list[int], spelled: Mapping[int, bytes], special: Container[int]
) -> list[list[int]]:
    """Return runs of tokens to compare with `decode`: whole characters in any order, and the hard texts."""
    whole = [token for token in spelled if token not in special and _is_whole(spelled[token])]
    chosen = Random(0)
    runs = [[*anchor, *chosen.choices(whole, k=_RUN_LENGTH)] for _ in range(_RUNS if whole else 0)]
    texts = (_encoded(wrapper, text) for text in _HARD_TEXTS)
    return [*runs, *([*anchor, *ids] for ids in texts if not any(token in special for token in ids))]


def _encoded(wrapper: Any, text: str) -> list[int]:
    """Return the ids of a text; none if the library fails on it, which says nothing of other texts."""
    try:
        with panics_as_errors("The tokenizers library"):
            return list(wrapper.encode(text, add_special_tokens=False))
    except InternalError:
        return []


def _is_whole(spelled: bytes) -> bool:
    return _BROKEN not in spelled.decode(errors="replace")


def _warning_of_pieces(unexplained: Sequence[int], pieces: Mapping[int, str]) -> str:
    if not unexplained:
        return ""
    return (
        f"The spelling of {len(unexplained)} tokens, such as {pieces[min(unexplained)]!r}, does not say what "
        "bytes they are; characters that they are a part of are shown as the tokenizer's `decode` shows each "
        "part."
    )


def _warning_of_runs(
    runs: Sequence[list[int]], spelled: Mapping[int, bytes], decode: Decode, trims: bool
) -> str:
    for run, text in zip(runs, decode(runs), strict=True):
        joined = b"".join(spelled.get(token, b"") for token in run).decode(errors="replace")
        if (joined.removeprefix(" ") if trims else joined) != text:
            return (
                f"This tokenizer's `decode` writes {text[:40]!r} for tokens that alone are {joined[:40]!r}: "
                "it changes tokens beside others. Replies are spelled token by token."
            )
    return ""
