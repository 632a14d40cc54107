"""Finds out what a chat template writes for images, and whether it has a place for them in tool results."""

from dataclasses import replace

from start_llm.core.chat import Json
from start_llm.prompt.template import TemplateMessage
from start_llm.prompt.template_audit.call_probes import samples_for
from start_llm.prompt.template_audit.facts import TemplateFacts
from start_llm.prompt.template_audit.probe import TOOL, USER, TemplateProbe, between

_PARTS: tuple[dict[str, Json], ...] = ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}})
"""The forms in which templates expect an image in a list of parts."""
_BEFORE, _WORD, _AFTER = "probebefore", "probeimage", "probeafter"


def image_facts(probe: TemplateProbe, facts: TemplateFacts, placeholder: str) -> TemplateFacts:
    """Add what the template shows of images, for which it writes the placeholder."""
    for part in _PARTS:
        written = between(probe.text(USER | {"content": _parts(part)}), _BEFORE, _AFTER)
        if placeholder in written:
            before, _, after = written.partition(placeholder)
            facts = replace(facts, image_text=(before, after))
            is_in_place = _shows_in_results(probe, facts, part, written)
            return replace(facts, images_in_results=is_in_place)
    return replace(facts, image_text=("", ""))


def _parts(part: Json) -> Json:
    return [{"type": "text", "text": _BEFORE}, part, {"type": "text", "text": _AFTER}]


def _shows_in_results(probe: TemplateProbe, facts: TemplateFacts, part: Json, written: str) -> bool:
    """Return whether an image in a list stands where its word stands in a text."""
    if not facts.takes_calls:
        return True
    samples = samples_for(facts)

    def rendered(content: Json) -> str:
        result: TemplateMessage = samples.result() | {"content": content}
        return probe.text(USER, samples.calling(), result, tools=(TOOL,), add_generation_prompt=True)

    listed = rendered(_parts(part))
    return written in listed and listed == rendered(_BEFORE + _WORD + _AFTER).replace(_WORD, written)
