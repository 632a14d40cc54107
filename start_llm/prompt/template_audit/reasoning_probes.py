"""Finds out how a chat template shows reasoning, and which options control it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from start_llm.core.chat import Json
from start_llm.prompt import efforts
from start_llm.prompt.template import SYSTEM_WORDS, TemplateMessage
from start_llm.prompt.template_audit.facts import BUDGET_OPTION, Effort, Switch, TemplateFacts
from start_llm.prompt.template_audit.probe import NEXT, REPLY, SYSTEM, USER, TemplateProbe

_SWITCHES = (
    Switch(option="enable_thinking"),
    Switch(option="thinking"),
    Switch(option="thinking_mode", on="enabled", off="disabled"),
    Switch(option="thinking_mode", on="thinking", off="chat"),
    Switch(option="thinking_mode", on="on", off="off"),
    Switch(option="reasoning"),
    Switch(option=BUDGET_OPTION, on=None, off=0),
)
_BUDGETS = (512, 1024)
_THINK, _NO_THINK = "/think", "/no_think"
_FLAGS = {"low_effort": "low", "medium_effort": "medium"}
_PRESERVING: tuple[Mapping[str, Json], ...] = (
    {"preserve_thinking": True},
    {"clear_thinking": False},
    {"truncate_history_thinking": False},
    {"keep_all_reasoning": True},
)
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class ReasoningFacts:
    """Examines how a template handles reasoning.

    Attributes:
        calling: a reply that calls a tool, in the form that the template takes.
    """

    probe: TemplateProbe
    calling: TemplateMessage
    result: TemplateMessage

    def facts(self, facts: TemplateFacts) -> TemplateFacts:
        """Add all facts about reasoning."""
        key = next((key for key in _REASONING_KEYS if self._shows_reasoning(key)), None)
        preserve, is_kept = self._preserving(key or _REASONING_KEYS[0])
        switch = self._switch()
        effort, by_effort = self._effort(switch)
        return replace(
            facts,
            reasoning_key=key,
            old_reasoning="kept" if is_kept else "dropped",
            preserve=preserve,
            switch=self._with_default(switch or by_effort),
            effort=effort,
            tells_budget=self._tells_budget(switch or by_effort),
        )

    def talks(self, facts: TemplateFacts) -> tuple[tuple[TemplateMessage, ...], ...]:
        """Return conversations with one question, and with reasoning beside an answer and beside a call."""
        key = facts.reasoning_key or _REASONING_KEYS[0]
        answered = (USER, _thinking(REPLY, key), NEXT)
        return (USER,), answered, (USER, _thinking(self.calling, key), self.result)

    # ---------------------------------------------------------------------------------------------- reasoning

    def _shows_reasoning(self, key: str) -> bool:
        """Return whether reasoning is shown in the last reply or until its call is answered."""
        running = (USER, _thinking(self.calling, key), self.result)
        latest = (USER, _thinking(REPLY, key))
        return any("probethought" in self.probe.text(*talk) for talk in (running, latest))

    def _preserving(self, key: str) -> tuple[Mapping[str, Json], bool]:
        """Return the option that shows most old reasoning, and whether it is shown without one."""
        plain = self._old_reasoning(key, {})
        options = max(_PRESERVING, key=lambda options: self._old_reasoning(key, options))
        return (options, False) if self._old_reasoning(key, options) > plain else ({}, plain > 0)

    def _old_reasoning(self, key: str, options: Mapping[str, Json]) -> int:
        """Return how many of two reasoning texts are shown after a new question.

        One belongs to an answer, the other to a call.
        """
        answer = (USER, _thinking(REPLY, key), NEXT)
        call = (USER, _thinking(self.calling, key), self.result, REPLY, NEXT)
        texts = [self.probe.text(*talk, options=options) for talk in (answer, call)]
        return sum("probethought" in text and "probereply" in text for text in texts)

    # ----------------------------------------------------------------------------------------------- options

    def _switch(self) -> Switch | None:
        return next((switch for switch in _SWITCHES if self._acts(switch)), None) or self._words_in_system()

    def _acts(self, switch: Switch) -> bool:
        on, off = (self._openings(switch.options(on=on)) for on in (True, False))
        return any(opening and other and opening != other for opening, other in zip(on, off, strict=True))

    def _words_in_system(self) -> Switch | None:
        """Return a switch if the template acts on words in the system message, not only prints them."""
        on, off, plain = (self._without_words(words) for words in (_THINK, _NO_THINK, ""))
        if not (on and off) or on == off:
            return None
        return Switch(option=SYSTEM_WORDS, on=None if on == plain else _THINK, off=_NO_THINK)

    def _without_words(self, words: str) -> str:
        text = self.probe.text(SYSTEM, USER, options={SYSTEM_WORDS: words}, add_generation_prompt=True)
        return "".join(text.replace(_NO_THINK, "").replace(_THINK, "").split())

    def _openings(self, options: Mapping[str, Json]) -> tuple[str, ...]:
        """Return the prompts for a question, without and with a system message."""
        talks = ((USER,), (SYSTEM, USER))
        return tuple(self.probe.text(*talk, options=options, add_generation_prompt=True) for talk in talks)

    def _with_default(self, switch: Switch | None) -> Switch | None:
        """Add what the template does if the option is left out."""
        if switch is None or switch.on is None:
            return switch
        if switch.option == SYSTEM_WORDS:
            return replace(switch, thinks=self._without_words("") != self._without_words(_NO_THINK))
        return replace(switch, thinks=self._openings({}) != self._openings(switch.options(on=False)))

    def _effort(self, switch: Switch | None) -> tuple[Effort | None, Switch | None]:
        """Return the option for the effort, and a switch if one of its words turns reasoning off."""
        thinking = switch.options(on=True) if switch else {}
        for option in efforts.OPTIONS:
            choices = {word: {**thinking, option: word} for word in efforts.TRIED}
            texts: efforts.Texts = {
                word: "\n".join(self._openings(options)).strip()
                for word, options in {**choices, None: thinking}.items()
            }
            words = efforts.words_for(texts)
            if words:
                off = efforts.word_for_off(texts)
                by_word = Switch(option=option, on=words["medium"], off=off) if off else None
                return Effort(option=option, words=words), by_word
        return self._flag(thinking), None

    def _tells_budget(self, switch: Switch | None) -> bool:
        thinking = switch.options(on=True) if switch else {}
        openings, other = (self._openings({**thinking, BUDGET_OPTION: tokens}) for tokens in _BUDGETS)
        return any(openings) and any(other) and openings != other

    def _flag(self, thinking: Mapping[str, Json]) -> Effort | None:
        """Return an on/off option that sets one effort, also used for the efforts below it."""
        plain = self._openings(thinking)
        for option, level in _FLAGS.items():
            openings = self._openings({**thinking, option: True})
            if any(openings) and openings != plain:
                end = efforts.REQUESTED.index(level)
                words: dict[str, Json] = dict.fromkeys(efforts.REQUESTED)
                return Effort(option=option, words=words | dict.fromkeys(efforts.REQUESTED[: end + 1], True))
        return None


def _thinking(message: TemplateMessage, key: str) -> TemplateMessage:
    return message | {key: "probethought"}


def options_described(facts: TemplateFacts) -> list[str]:
    """Describe the options for reasoning."""
    switch, effort = facts.switch, facts.effort
    text = f"{switch.option} switches thinking" if switch else "thinking cannot be switched"
    text += "" if switch is None or switch.thinks else ", which is off unless asked for"
    text += f", {BUDGET_OPTION} is passed" if facts.tells_budget else ""
    return [text, *([f"{effort.option} {_words_of(effort)}"] if effort else [])]


def _words_of(effort: Effort) -> str:
    known = dict.fromkeys(word for word in effort.words.values() if word is not None)
    return "/".join(map(str, known))
