"""Maps the reasoning efforts of a request to the words that a template knows.

A word means what the prompt then says. A word that the template does not know gives its default, and the
prompt may name that default's level.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from operator import and_

OPTIONS = ("reasoning_effort", "thinking_effort")
"""Names of the template option."""
WORDS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts in ascending order."""
REQUESTED = WORDS[:5]
"""Efforts that a request may ask for (`core.chat.Thinking`)."""
OFF = ("none", "no_think")
"""Words for no reasoning at all."""
UNKNOWN = "probeeffort"
"""A word that no template knows."""
TRIED = (*WORDS, *OFF, UNKNOWN)

_PRINTED = ("low", "medium", "high")
_USUAL_DEFAULTS = ("medium", "high", "low")
_WORD = re.compile(r"[a-z]+")


type Texts = Mapping[str | None, str]
"""The rendering for each word of `TRIED`, and without the option (None). Empty if the template refuses."""


def words_for(texts: Texts) -> dict[str, str | None]:
    """Return for each effort of a request the word to give to the template; None: leave the option out.

    Return an empty dict if the template knows no word.
    """
    levels = dict(_levels(texts))
    if not levels.keys() - {None}:
        return {}
    ranks = {WORDS.index(level): word for word, level in levels.items()}
    ranks |= {WORDS.index(level): word for word, level in levels.items() if word == level}
    nearest = {word: ranks[_nearest(rank, ranks)] for rank, word in enumerate(REQUESTED)}
    return {word: word if levels.get(word) == word else near for word, near in nearest.items()}


def word_for_off(texts: Texts) -> str | None:
    """Return the word that turns reasoning off, or None."""
    others = {"", *(texts[word] for word in WORDS if texts[word] != texts[UNKNOWN])}
    words = (
        word
        for word in OFF
        if texts[word] not in others and (texts[word] != texts[UNKNOWN] or word in texts[word])
    )
    return None if _prints_any(texts) else next(words, None)


def _levels(texts: Texts) -> Iterator[tuple[str | None, str]]:
    """Yield each useful word for the template (None: no option) and the level that the prompt then states."""
    if _prints_any(texts):
        yield from zip(_PRINTED, _PRINTED, strict=True)
        return
    named = _named(texts)
    known = {word: text for word, text in texts.items() if word and text not in ("", texts[UNKNOWN])}
    levels = {word: named.get(word, word) for word in WORDS if word in known}
    yield from levels.items()
    off = word_for_off(texts)
    if texts[None] and texts[None] not in known.values() and not (off and texts[None] == texts[off]):
        yield None, named.get(None) or _silent_default(levels.values())


def _prints_any(texts: Texts) -> bool:
    """Return whether the template prints any word that it is given."""
    text = texts[UNKNOWN].lower()
    return UNKNOWN in text and all(
        texts[word].lower() == text.replace(UNKNOWN, word) for word in (*_PRINTED, *OFF)
    )


def _named(texts: Texts) -> dict[str | None, str]:
    """Map words to the effort that the prompt names instead, if giving that effort makes the same prompt."""
    counted = {word: Counter(_effort_words(text)) for word, text in texts.items() if text}
    everywhere = reduce(and_, counted.values()) if counted else Counter[str]()
    own = {word: list(count - everywhere) for word, count in counted.items()}
    return {
        word: names[0] for word, names in own.items() if len(names) == 1 and texts[names[0]] == texts[word]
    }


def _effort_words(text: str) -> Iterable[str]:
    return (word for word in _WORD.findall(text.lower()) if word in WORDS)


def _silent_default(levels: Collection[str]) -> str:
    """Return the level of a template that names none: the most usual one that it has no word for."""
    return next((level for level in _USUAL_DEFAULTS if level not in levels), "high")


def _nearest(rank: int, ranks: Iterable[int]) -> int:
    """Return the nearest rank; of two equally near the higher one."""
    return min(ranks, key=lambda other: (abs(other - rank), -other))
