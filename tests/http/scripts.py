"""Models that answer with any texts: which one, the request says.

    folder = write_model(tmp, "opens_reasoning", scripts={"deep": "The sea …", "call": "<tool_call>…"})
    body = {"messages": …, **asking("call")}

A scripted model knows the next token from the last one alone, so no token may stand in two places. `cut` sees
to that: it cuts a text into pieces that no other text of the model has, so the pieces break words, markup and
characters anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.tiny_models import Phrase
from tests.templates.traits import TRAITS, Trait, trait_folder

_PIECE = 7
"""Bytes of a piece, unless another one has them."""
_INNER_BYTES = [bytes([byte]) for byte in range(0x80, 0xC0)]
"""Those that begin no character of UTF-8."""
_HOOK = "{{- '<|script:' ~ script ~ '|>' if add_generation_prompt and script is defined else '' -}}"


def write_model(
    tmp: Path,
    trait: str,
    *,
    scripts: Mapping[str, str] | None = None,
    starts: Mapping[str, str] | None = None,
    **options: Any,
) -> Path:
    """A model with the template of a trait.

    Args:
        scripts: what it answers to a request with `asking(name)`, by name.
        starts: what it answers otherwise, by the last token of the prompt.
        options: of `tiny_models.build_chain`.
    """
    by_token = {**(starts or {}), **{_mark(name): text for name, text in (scripts or {}).items()}}
    settings: dict[str, Any] = {"hidden": 256, "layers": 1, "words": [_mark(name) for name in scripts or {}]}
    template = TRAITS[trait].template + _HOOK
    chains = cut(TRAITS[trait], by_token)
    return trait_folder(trait, tmp, chains, chat_template=template, **(settings | options))


def asking(script: str) -> dict[str, Any]:
    """The field of a request that chooses a script: one more token ends the prompt."""
    return {"chat_template_kwargs": {"script": script}}


def _mark(name: str) -> str:
    return f"<|script:{name}|>"


def cut(trait: Trait, texts: Mapping[str, str]) -> dict[str, list[Phrase]]:
    """Chains for `build_chain`: each text in pieces that are nowhere else.

    An added token is one piece where it stands for the first time; later ones are spelt.
    """
    used = {start.encode() for start in texts}
    return {start: _pieces(text.encode(), trait, used) for start, text in texts.items()}


def _pieces(text: bytes, trait: Trait, used: set[bytes]) -> list[Phrase]:
    """Adds what it uses to `used`, but for the token that ends the reply: nothing follows it."""
    end = next((end for end in trait.eos if text.endswith(end.encode())), "")
    text = text.removesuffix(end.encode())
    markers = {marker.encode(): marker for marker in trait.added_tokens}
    pieces: list[bytes] = []
    while text:
        piece = _added_token(text, [marker for marker in markers if marker not in used])
        piece = piece or _new_piece(text, used | markers.keys())
        text = text.removeprefix(piece)
        while piece in used:
            # Nothing but the last one can be: it is too short.
            piece = pieces.pop() + piece
        pieces.append(piece)
        used.add(piece)
    return [*(markers.get(piece, piece) for piece in pieces), *([end] if end else [])]


def _added_token(text: bytes, markers: Sequence[bytes]) -> bytes:
    return max((marker for marker in markers if text.startswith(marker)), key=len, default=b"")


def _new_piece(text: bytes, used: set[bytes]) -> bytes:
    """A piece that is new, broken off inside a character if there is one; all of the text if none is."""
    broken = [length for length in range(_PIECE, 0, -1) if text[length : length + 1] in _INNER_BYTES]
    lengths = [*broken, *range(_PIECE, len(text))]
    return next((text[:length] for length in lengths if text[:length] not in used), text)
