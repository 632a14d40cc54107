"""Text to train on and to judge with: code and documentation of Python's standard library.

Every word, module and topic belongs to one of two parts, by a checksum. Held-out modules and topics are
not read. A held-out word may stand in other text; the training never asks for it, and no name, parameter,
value or invented result of the training has it.
"""

from __future__ import annotations

import functools
import io
import re
import sysconfig
import tokenize
import zlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

_HELD_OUT_OF = 8
_LONGEST_LINE = 100
_SHORTEST_TEXT = 400
_MODULES = 240
_SKIPPED = frozenset("test tests idlelib site-packages lib2to3 encodings turtledemo pydoc_data".split())


def is_held_out(word: str) -> bool:
    return zlib.crc32(word.lower().encode()) % _HELD_OUT_OF == 0


@dataclass(frozen=True)
class Corpus:
    """Text of the one part or the other.

    Attributes:
        texts: prose and code, a module or a topic each.
        words: distinct words, in lower case.
        lines: what one line of a tool's result could be.
    """

    texts: tuple[str, ...]
    words: tuple[str, ...]
    lines: tuple[str, ...]


@functools.cache
def read_corpus(*, held_out: bool) -> Corpus:
    texts = tuple(text for name, text in _sources() if is_held_out(name) == held_out)
    words = {word.lower() for text in texts for word in re.findall(r"(?<![\w\\])[A-Za-z]{3,12}(?!\w)", text)}
    lines = {line.strip() for text in texts for line in text.splitlines()}
    return Corpus(
        texts=texts,
        words=tuple(sorted(word for word in words if is_held_out(word) == held_out)),
        lines=tuple(sorted(line for line in lines if 3 <= len(line) <= _LONGEST_LINE)),
    )


@functools.cache
def _sources() -> list[tuple[str, str]]:
    """Names and texts, each text once."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not _SKIPPED & set(path.relative_to(root).parts)]
    sources = [(f"topic {name}", text) for name, text in sorted(topics.items())]
    for path in paths[:: max(1, len(paths) // _MODULES)]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        name = str(path.relative_to(root))
        sources += [(name, text), (name, _prose(text))]
    names = {text: name for name, text in reversed(sources) if len(text) > _SHORTEST_TEXT}
    return [(name, text) for text, name in reversed(names.items())]


def _prose(text: str) -> str:
    """The comments and the texts of several lines."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):  # a module that shows what Python refuses
        return ""
    pieces = [
        token.string.strip("#\"' rfRF")
        for token in tokens
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and "\n" in token.string)
    ]
    return "\n".join(" ".join(line.split()) for line in "\n".join(pieces).splitlines())
