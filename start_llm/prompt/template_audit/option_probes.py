"""Finds out which options of a chat template change nothing in front of the generation prompt.

A conversation that asks with another value of such an option goes on from its recorded tokens. Every other
option is part of the conversation's root: with another value it is another conversation.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from start_llm.core.chat import Json
from start_llm.prompt.template import SYSTEM_WORDS, TemplateMessage
from start_llm.prompt.template_audit.facts import BUDGET_OPTION, TemplateFacts
from start_llm.prompt.template_audit.probe import SYSTEM, TOOL, TemplateProbe

type _Values = tuple[Json, ...]
type _Talk = tuple[TemplateMessage, ...]

_BUDGETS = (0, 1, 512, 1024)
_WORD = re.compile(r"probe\w*")


@dataclass(frozen=True, slots=True)
class OptionProbes:
    """Renders conversations with every combination of options that requests may set.

    Attributes:
        talks: conversations whose words begin with `probe`.
    """

    probe: TemplateProbe
    talks: Sequence[_Talk]

    def facts(self, facts: TemplateFacts) -> TemplateFacts:
        """Add the options that were tried, and those that change the generation prompt alone."""
        tried = _tried(facts)
        combinations = [*product(*tried.values())]
        inside: set[str] = set()
        talks = [(*lead, *talk) for talk in self.talks for lead in ((), (SYSTEM,))]
        for talk, tools in product(talks, ((), (TOOL,))):
            texts = {
                values: self._in_front(talk, tools, _options_of(tried, values)) for values in combinations
            }
            inside |= {name for place, name in enumerate(tried) if _changes_text(place, texts)}
        return replace(
            facts,
            tried_options=tried,
            generation_prompt_options=_of_requests(facts) & (tried.keys() - inside),
        )

    def _in_front(self, talk: _Talk, tools: Sequence[Mapping[str, Json]], options: Mapping[str, Json]) -> str:
        """Return the prompt up to the end of the last message; empty if the template refuses."""
        text = self.probe.text(*talk, tools=tools, options=options, add_generation_prompt=True)
        last = max((match.end() for match in _WORD.finditer(text)), default=0)
        closer = self.probe.added.search(text, last)  # an added token ends what a message says
        return text[: closer.start()] if closer else text


def _tried(facts: TemplateFacts) -> dict[str, _Values]:
    """Return the values to try of each option that a request can set; None: it is left out."""
    tried: dict[str, list[Json]] = {}
    if facts.switch and facts.switch.option != SYSTEM_WORDS:
        tried[facts.switch.option] = [facts.switch.on, facts.switch.off]
    if facts.effort:
        tried.setdefault(facts.effort.option, []).extend(facts.effort.words.values())
    if BUDGET_OPTION in tried or facts.tells_budget:
        tried.setdefault(BUDGET_OPTION, []).extend(_BUDGETS)
    for name, value in facts.preserve.items():
        tried[name] = [value, not value]
    return {name: _different([None, *values]) for name, values in tried.items()}


def _different(values: Sequence[Json]) -> _Values:
    """Return the values, each once. True and 1 are two."""
    return tuple({repr(value): value for value in values}.values())


def _options_of(tried: Mapping[str, _Values], values: _Values) -> dict[str, Json]:
    return {name: value for name, value in zip(tried, values, strict=True) if value is not None}


def _changes_text(place: int, texts: Mapping[_Values, str]) -> bool:
    """Return whether another value at this place changes a text. Empty texts are refused renderings."""
    seen: dict[_Values, str] = {}
    return any(
        text and seen.setdefault((*values[:place], *values[place + 1 :]), text) != text
        for values, text in texts.items()
    )


def _of_requests(facts: TemplateFacts) -> frozenset[str]:
    """Return the options that a request sets by its wish to reason."""
    named = [control.option for control in (facts.switch, facts.effort) if control]
    return frozenset([*named, BUDGET_OPTION])
