"""What a chat template does is found by rendering it."""

from dataclasses import fields, replace

import pytest

from start_llm.core.family import Family
from start_llm.prompt.adapt import needed
from start_llm.prompt.audit import audit, described
from start_llm.prompt.facts import Switch, TemplateFacts
from tests.prompt.fakes import FakeTokenizer, WatchedTokenizer, preparer_of
from tests.templates.traits import TRAITS, trait_tokenizer

CHATML_ENDS = frozenset({"<|im_end|>", "<|endoftext|>"})
THINKS = TemplateFacts(
    thought_key="reasoning_content",
    switch=Switch(option="enable_thinking"),
    tail_options=frozenset({"enable_thinking"}),
)
REFUSED = "{{ raise_exception('no') }}"

FACTS = {
    "strips_old_thoughts": replace(THINKS, closers=CHATML_ENDS),
    "opens_thought": replace(THINKS, closers=CHATML_ENDS, preserve={"preserve_thinking": True}),
    "stop_opens_next": replace(
        THINKS,
        closers=frozenset({"<|user|>", "<|observation|>", "<|endoftext|>"}),
        preserve={"clear_thinking": False},
    ),
    "tools_before_last_user": TemplateFacts(
        takes_late_system=False,
        takes_neighbours=False,
        keeps_text_beside_calls=False,
        splits_text_from_calls=False,
        takes_user_after_result=False,
        moving=frozenset({"tools", "system"}),
        call_ids="nine",
        closers=frozenset({"</s>"}),
    ),
    "dates": TemplateFacts(
        takes_parallel_calls=False,
        keeps_text_beside_calls=False,
        dates=("%d %b %Y",),
        closers=frozenset({"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}),
    ),
    "no_system": TemplateFacts(
        takes_system=False,
        takes_late_system=False,
        takes_neighbours=False,
        takes_tools=False,
        takes_calls=False,
        closers=frozenset({"<end_of_turn>", "<eos>"}),
    ),
    "channels": TemplateFacts(
        takes_late_system=False,
        thought_key="reasoning_content",
        takes_effort=True,
        dates=("%Y-%m-%d",),
        closers=frozenset({"<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"}),
    ),
    "kimi": TemplateFacts(call_ids="kimi", closers=frozenset({"<|im_end|>", "[EOS]"})),
    "arguments_as_text": TemplateFacts(arguments_as_text=True, closers=frozenset({"<｜end▁of▁sentence｜>"})),
    # The switch is a mark in the system turn.
    "gemma4_channel": replace(
        THINKS, tail_options=frozenset(), closers=frozenset({"<turn|>", "<|tool_response>", "<eos>"})
    ),
    "hoists_systems": TemplateFacts(takes_late_system=False, closers=CHATML_ENDS),
    "plain": TemplateFacts(takes_tools=False, takes_calls=False, lead=" ", closers=frozenset({"</s>"})),
    "minicpm": TemplateFacts(closers=frozenset({"<|im_end|>", "</s>"})),
}
NO_THOUGHTS = "shows no thoughts"
DROPPED = "old thoughts dropped"
SWITCHED, NOT_SWITCHED = "enable_thinking switches thinking", "thinking cannot be switched"
DESCRIBED = {
    "strips_old_thoughts": (DROPPED, "tools", SWITCHED, "writes no dates"),
    "opens_thought": (f"{DROPPED} unless preserve_thinking", "tools", SWITCHED, "writes no dates"),
    "stop_opens_next": (f"{DROPPED} unless clear_thinking", "tools", SWITCHED, "writes no dates"),
    "tools_before_last_user": (NO_THOUGHTS, "tools", NOT_SWITCHED, "writes no dates"),
    "dates": (NO_THOUGHTS, "tools", NOT_SWITCHED, "writes dates (%d %b %Y)"),
    "no_system": (NO_THOUGHTS, "no tools", NOT_SWITCHED, "writes no dates"),
    "channels": (DROPPED, "tools", NOT_SWITCHED, "writes dates (%Y-%m-%d)"),
    "kimi": (NO_THOUGHTS, "tools", NOT_SWITCHED, "writes no dates"),
    "arguments_as_text": (NO_THOUGHTS, "tools", NOT_SWITCHED, "writes no dates"),
    "gemma4_channel": (DROPPED, "tools", SWITCHED, "writes no dates"),
    "hoists_systems": (NO_THOUGHTS, "tools", NOT_SWITCHED, "writes no dates"),
    "plain": (NO_THOUGHTS, "no tools", NOT_SWITCHED, "writes no dates"),
    "minicpm": (NO_THOUGHTS, "tools", NOT_SWITCHED, "writes no dates"),
}
NEEDED = {
    "tools_before_last_user": [
        "late system messages as marked user turns",
        "user text behind a result joined to it",
        "neighbours of one role merged",
        "text beside calls in front of their result",
    ],
    "dates": ["calls made one after the other", "text beside calls in a turn of its own"],
    "no_system": [
        "tools told in the system message",
        "calls and results written as text",
        "late system messages as marked user turns",
        "system message in the first user turn",
        "neighbours of one role merged",
    ],
    "channels": ["late system messages as marked user turns"],
    "hoists_systems": ["late system messages as marked user turns"],
    "plain": ["tools told in the system message", "calls and results written as text"],
}
"""What is done for a template; nothing for the others."""


@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_is_found(trait):
    assert preparer_of(trait).facts == FACTS[trait]


@pytest.mark.parametrize("trait", TRAITS)
def test_a_user_is_told_what_a_template_does(trait):
    assert described(FACTS[trait]) == ", ".join(DESCRIBED[trait])


@pytest.mark.parametrize("trait", TRAITS)
def test_a_user_is_told_what_is_done_for_a_template(trait):
    assert needed(FACTS[trait]) == NEEDED.get(trait, [])


def test_a_user_is_told_that_a_tokenizer_cannot_be_cut():
    assert described(TemplateFacts(can_be_cut=False)).endswith(", cannot be cut")


@pytest.mark.parametrize("trait", TRAITS)
def test_an_audit_takes_a_few_dozen_renderings(trait):
    watched = WatchedTokenizer(trait_tokenizer(trait))
    audit(watched, Family(name="generic"))
    assert len(watched.rendered) < 50


# -------------------------------------------------------------------- templates that no trait stands for

TURNS = """
{%- for message in messages -%}
    {{- '<' ~ message.role ~ '>' ~ message.content ~ '<end>' -}}
{%- endfor -%}
{{- '<assistant>' if add_generation_prompt -}}
"""
ADDED = ("<user>", "<system>", "<assistant>", "<tool>", "<end>")


def facts_of(template: str, family: str = "generic", **tokenizer: bool) -> TemplateFacts:
    return audit(FakeTokenizer(template, ADDED, ("<end>",), **tokenizer), Family(name=family))


def test_a_template_that_refuses_everything_has_facts_too():
    facts = facts_of(REFUSED)
    assert facts.closers == {"<end>"}
    assert not (facts.takes_system or facts.takes_late_system or facts.takes_calls or facts.takes_tools)


def test_a_template_that_shows_only_the_last_of_two_calls_does_not_take_both():
    calls = """
        {%- for call in message.tool_calls -%}
            {{- call.function.name ~ call.function.arguments | tojson if CONDITION -}}
        {%- endfor -%}
    """
    every, last = (
        facts_of(TURNS.replace("~ '<end>'", "-}}" + calls.replace("CONDITION", condition) + "{{- '<end>'"))
        for condition in ("true", "loop.last")
    )
    assert every.takes_calls
    assert every.takes_parallel_calls
    assert last.takes_calls
    assert not last.takes_parallel_calls


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_has_the_name_that_the_template_knows(key):
    facts = facts_of(TURNS.replace("message.content", f"(message.{key} or '') ~ message.content"))
    assert facts.thought_key == key
    assert facts.old_thoughts == "kept"
    assert facts.preserve == {}


@pytest.mark.parametrize(
    ("options", "preserve"),
    [
        ("preserve_thinking", {"preserve_thinking": True}),
        ("clear_thinking is false", {"clear_thinking": False}),
        ("keep_all_reasoning", {"keep_all_reasoning": True}),
    ],
)
def test_an_option_that_keeps_old_thoughts_is_found(options, preserve):
    thought = f"(message.reasoning_content or '' if loop.last or {options} else '') ~ message.content"
    facts = facts_of(TURNS.replace("message.content", thought))
    assert (facts.old_thoughts, facts.preserve) == ("dropped", preserve)


def test_the_second_name_of_the_switch_is_found():
    facts = facts_of(TURNS.replace("'<assistant>'", "('<think>' if thinking else '</think>')"))
    assert facts.switch == Switch(option="thinking")


def test_the_form_of_ids_that_a_template_wants_is_found_whatever_the_family():
    calls = """-}}
        {%- for call in message.tool_calls -%}
            {{- call.function.arguments | tojson if call.id | length == 9 else raise_exception('id') -}}
        {%- endfor -%}
    {{- '<end>'"""
    facts = facts_of(TURNS.replace("~ '<end>'", calls))
    assert facts.takes_calls
    assert facts.call_ids == "nine"


def test_a_template_that_would_print_an_object_as_python_does_gets_text():
    calls = (
        "-}}{%- for call in message.tool_calls -%}{{- call.function.arguments -}}{%- endfor -%}{{- '<end>'"
    )
    assert facts_of(TURNS.replace("~ '<end>'", calls)).arguments_as_text


@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_white_space_that_the_model_writes_in_front_of_its_answer_is_found(space):
    told = f"('{space}' if message.role == 'assistant' else '') ~ message.content"
    assert facts_of(TURNS.replace("message.content", told)).lead == space


def test_white_space_that_the_prompt_ends_with_is_not_the_models():
    facts = facts_of(TURNS.replace("'>'", "'>\n'").replace("'<assistant>'", "'<assistant>\n'"))
    assert facts.lead == ""


def test_a_tokenizer_that_marks_the_start_of_a_text_cannot_be_cut():
    assert facts_of(TURNS).can_be_cut
    assert not facts_of(TURNS, marks_the_start=True).can_be_cut


def test_the_defaults_are_a_template_that_takes_everything():
    takes = [field.name for field in fields(TemplateFacts) if field.name.startswith(("takes_", "keeps_"))]
    facts = TemplateFacts()
    assert [name for name in takes if not getattr(facts, name)] == ["takes_effort"]
