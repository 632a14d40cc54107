"""How hard to think: the words that a template knows, and the nearest of them for each word of a request.

A word counts for what the prompt then says. One that the template does not know is read as its default, and
what that is may be told by its own words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from operator import and_

OPTIONS = ("reasoning_effort", "thinking_effort")
"""Names of the option."""
WORDS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""From the least to the most."""
REQUESTED = WORDS[:5]
"""Those of a request (`core.chat.Thinking`)."""
OFF = ("none", "no_think")
"""Words for no thinking at all."""
UNKNOWN = "probeeffort"
"""A word that no template knows."""
TRIED = (*WORDS, *OFF, UNKNOWN)

_PRINTED = ("low", "medium", "high")
_USUAL_DEFAULTS = ("medium", "high", "low")
_WORD = re.compile(r"[a-z]+")


type Texts = Mapping[str | None, str]
"""What a template makes of each word of `TRIED`, and of none. A refusal is empty."""


def words_for(texts: Texts) -> dict[str, str | None]:
    """The word that a template is given for each of a request; None: none at all. Empty if it knows none."""
    levels = dict(_levels(texts))
    if not levels.keys() - {None}:
        return {}
    ranks = {WORDS.index(level): word for word, level in levels.items()}
    ranks |= {WORDS.index(level): word for word, level in levels.items() if word == level}
    nearest = {word: ranks[_nearest(rank, ranks)] for rank, word in enumerate(REQUESTED)}
    return {word: word if levels.get(word) == word else near for word, near in nearest.items()}


def word_for_off(texts: Texts) -> str | None:
    """The word that turns thinking off, if one does."""
    others = ["", *(texts[word] for word in (*WORDS, UNKNOWN))]
    found = (word for word in OFF if texts[word] not in others)
    return None if _prints_any(texts) else next(found, None)


def _levels(texts: Texts) -> Iterator[tuple[str | None, str]]:
    """What is worth giving to the template, and the level that it then tells the model."""
    if _prints_any(texts):
        yield from zip(_PRINTED, _PRINTED, strict=True)
        return
    told = _told(texts)
    known = {word: text for word, text in texts.items() if word and text not in ("", texts[UNKNOWN])}
    levels = {word: told.get(word, word) for word in WORDS if word in known}
    yield from levels.items()
    if texts[None] and texts[None] not in known.values():
        yield None, told.get(None) or _silent_default(levels.values())


def _prints_any(texts: Texts) -> bool:
    """Whether the template writes down whatever word it gets."""
    told = texts[UNKNOWN].lower()
    return UNKNOWN in told and all(
        texts[word].lower() == told.replace(UNKNOWN, word) for word in (*_PRINTED, *OFF)
    )


def _told(texts: Texts) -> dict[str | None, str]:
    """For what is given to the template the word that the prompt has instead, if that is given alike."""
    counted = {word: Counter(_effort_words(text)) for word, text in texts.items() if text}
    everywhere = reduce(and_, counted.values()) if counted else Counter[str]()
    own = {word: list(count - everywhere) for word, count in counted.items()}
    return {word: told[0] for word, told in own.items() if len(told) == 1 and texts[told[0]] == texts[word]}


def _effort_words(text: str) -> Iterable[str]:
    return (word for word in _WORD.findall(text.lower()) if word in WORDS)


def _silent_default(levels: Collection[str]) -> str:
    """What a template means that says nothing: the most usual level that it has no word for."""
    return next((level for level in _USUAL_DEFAULTS if level not in levels), "high")


def _nearest(rank: int, ranks: Iterable[int]) -> int:
    """Of two the higher."""
    return min(ranks, key=lambda one: (abs(one - rank), -one))
