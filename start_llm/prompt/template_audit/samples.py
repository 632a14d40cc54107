"""Renders sample conversations, in which others look for the marks of a model's text."""

from collections.abc import Iterator, Mapping
from itertools import product

from start_llm.core.chat import Json
from start_llm.prompt.template import TemplateMessage, TemplateTokenizer
from start_llm.prompt.template_audit.probe import (
    REPLY,
    SAMPLE_IDS,
    SYSTEM,
    TOOL,
    USER,
    Samples,
    TemplateProbe,
)

_REASONING: TemplateMessage = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "probethought")
_SWITCHED: tuple[Mapping[str, Json], ...] = (
    {},
    *({option: on} for option in ("enable_thinking", "thinking") for on in (True, False)),
)


def rendered_samples(tokenizer: TemplateTokenizer) -> str:
    """Return renderings of tools, reasoning, all forms of calls, and generation prompts.

    Generation prompts come with reasoning on and off. Templates refuse some samples, and some compose their
    marks only while they render.
    """
    return "\n".join(_renderings(TemplateProbe(tokenizer))) if tokenizer.has_chat_template else ""


def _renderings(probe: TemplateProbe) -> Iterator[str]:
    for options in _SWITCHED:
        yield probe.text(SYSTEM, USER, tools=(TOOL,), options=options, add_generation_prompt=True)
    for asked in ((SYSTEM, USER), (USER,)):
        yield probe.text(*asked, REPLY | _REASONING, tools=(TOOL,))
        for ids, as_text in product(SAMPLE_IDS, (False, True)):
            samples = Samples(ids, as_text, named=True)
            called = (samples.calling() | _REASONING, samples.result())
            yield probe.text(*asked, *called, tools=(TOOL,), add_generation_prompt=True)
