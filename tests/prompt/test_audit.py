"""The audit finds out by rendering how a chat template behaves."""

from dataclasses import fields, replace

import pytest

from start_llm.core.family import Family
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.registry import family_by_name
from start_llm.prompt.adapt import needed
from start_llm.prompt.stand_ins import StandIns
from start_llm.prompt.template import SYSTEM_WORDS
from start_llm.prompt.template_audit.audit import audit, described
from start_llm.prompt.template_audit.facts import Effort, Switch, TemplateFacts
from tests.prompt.fakes import FakeTokenizer, WatchedTokenizer, preparer_of
from tests.templates.traits import TRAITS, trait_tokenizer

pytestmark = pytest.mark.sample(3)

CHATML_ENDS = frozenset({"<|im_end|>", "<|endoftext|>"})
THINKS = TemplateFacts(
    reasoning_key="reasoning_content",
    switch=Switch(option="enable_thinking"),
    generation_prompt_options=frozenset({"enable_thinking"}),
)
ENDS_OF_MISTRAL = frozenset({"</s>"})
CHANNEL_ENDS = frozenset({"<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"})
R1_MARKS = (
    "<think> </think> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
)
CHANNEL_MARKS = "<|channel|>analysis<|message|> <|end|> <|start|> <|message|> <|channel|> <|call|>"
GEMMA_MARKS = (
    '<|channel>thought <channel|> <bos> <|turn> <|tool> <tool|> <turn|> <|channel> <|tool_call> <|"|> '
    "<tool_call|> <|tool_response> <tool_response|>"
)
CHATML_MARKS = "<think> </think> <|im_start|> <|im_end|> <tool_call> </tool_call>"
REFUSED = "{{ raise_exception('no') }}"

FACTS = {
    "strips_old_reasoning": replace(THINKS, closers=CHATML_ENDS),
    "opens_reasoning": replace(THINKS, closers=CHATML_ENDS, preserve={"preserve_thinking": True}),
    "stop_opens_next": replace(
        THINKS,
        closers=frozenset({"<|user|>", "<|observation|>", "<|endoftext|>"}),
        preserve={"clear_thinking": False},
    ),
    "tools_before_last_user": TemplateFacts(
        takes_late_system=False,
        takes_neighbours=False,
        takes_lone_system=False,
        takes_reply_first=False,
        text_beside_calls="set in",
        stand_ins=StandIns(call_head='[TOOL_CALLS][{"name": "'),
        takes_user_after_result=False,
        moving=frozenset({"tools", "system"}),
        call_ids="nine",
        closers=frozenset({"</s>"}),
    ),
    "dates": TemplateFacts(
        takes_parallel_calls=False,
        takes_lone_system=False,
        text_beside_calls="parted",
        dates=("%d %b %Y",),
        closers=frozenset({"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}),
    ),
    "no_system": TemplateFacts(
        takes_system=False,
        takes_reply_first=False,
        takes_late_system=False,
        takes_neighbours=False,
        takes_tools=False,
        takes_calls=False,
        closers=frozenset({"<end_of_turn>", "<eos>"}),
    ),
    "channels": TemplateFacts(
        takes_late_system=False,
        reasoning_key="reasoning_content",
        effort=Effort(
            option="reasoning_effort",
            words={"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"},
        ),
        shows_schemas=False,
        dates=("%Y-%m-%d",),
        closers=CHANNEL_ENDS,
    ),
    "kimi": TemplateFacts(call_ids="kimi", closers=frozenset({"<|im_end|>", "[EOS]"})),
    "arguments_as_text": TemplateFacts(
        arguments_as_text=True,
        stand_ins=StandIns(quoted=tuple(" ".join(R1_MARKS).split()), inline=THINK),
        closers=frozenset({"<｜end▁of▁sentence｜>"}),
    ),
    # The switch is a mark in the system turn.
    "gemma4_channel": replace(
        THINKS,
        generation_prompt_options=frozenset(),
        closers=frozenset({"<turn|>", "<|tool_response>", "<eos>"}),
    ),
    "hoists_systems": TemplateFacts(takes_late_system=False, closers=CHATML_ENDS),
    "plain": TemplateFacts(takes_tools=False, takes_calls=False, lead=" ", closers=frozenset({"</s>"})),
    "words_in_system": replace(
        THINKS,
        switch=Switch(option=SYSTEM_WORDS, on=None, off="/no_think"),
        generation_prompt_options=frozenset(),
        closers=CHATML_ENDS,
    ),
    "effort_words": replace(
        THINKS,
        effort=Effort(
            option="reasoning_effort",
            words={"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh"},
        ),
        closers=CHATML_ENDS,
    ),
    "minicpm": TemplateFacts(closers=frozenset({"<|im_end|>", "</s>"})),
    "minimax": TemplateFacts(reasoning_key="reasoning_content", closers=frozenset({"[e~["})),
    "nested_arguments": replace(
        THINKS,
        switch=Switch(option="thinking_mode", on="enabled", off="disabled"),
        generation_prompt_options=frozenset({"thinking_mode"}),
        closers=frozenset({"[e~["}),
    ),
    "dsml": replace(
        THINKS,
        switch=Switch(option="thinking"),
        generation_prompt_options=frozenset({"thinking"}),
        closers=frozenset({"<｜end▁of▁sentence｜>"}),
    ),
    "seed": TemplateFacts(reasoning_key="reasoning_content", closers=frozenset({"<seed:eos>"})),
    "python_calls": TemplateFacts(closers=CHATML_ENDS),
    "bare_python_calls": TemplateFacts(
        takes_lone_system=False, closers=frozenset({"<|eot|>", "<|end_of_text|>"})
    ),
    "python_lines": TemplateFacts(closers=CHATML_ENDS),
    "call_list": TemplateFacts(closers=frozenset({"<SPECIAL_12>", "</s>"})),
    "call_list_without_end": TemplateFacts(takes_lone_system=False, closers=frozenset({"<|end_of_text|>"})),
    "option_without_tools": TemplateFacts(
        takes_lone_system=False,
        switch=Switch(option="thinking", thinks=False),
        closers=frozenset({"<|end_of_text|>"}),
    ),
    "call_lines": TemplateFacts(closers=frozenset({"<end_of_sentence>"})),
    "bare_call_list": TemplateFacts(text_beside_calls="parted", closers=CHATML_ENDS),
    "role_of_a_call": TemplateFacts(closers=frozenset({"<|message_sep|>", "</s>"})),
    "escaped_texts": TemplateFacts(closers=frozenset({"<end_of_turn>", "<eos>"})),
    "numbered_actions": TemplateFacts(
        reasoning_key="reasoning_content", closers=frozenset({"<|END_OF_TURN_TOKEN|>"})
    ),
    "open_and_close": TemplateFacts(
        reasoning_key="reasoning_content", closers=frozenset({"<|end_of_msg|>", "[EOS]"})
    ),
    "strict_channels": TemplateFacts(
        takes_late_system=False,
        takes_parallel_calls=False,
        text_beside_calls="set in",
        stand_ins=StandIns(
            quoted=tuple(CHANNEL_MARKS.split()),
            call_head=" to=functions.",
            around_text=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        ),
        takes_bare_tools=False,
        shows_schemas=False,
        reasoning_key="thinking",
        effort=Effort(
            option="reasoning_effort",
            words={"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"},
        ),
        closers=CHANNEL_ENDS,
    ),
    "text_after_calls": TemplateFacts(
        text_beside_calls="set in",
        stand_ins=StandIns(
            quoted=tuple(GEMMA_MARKS.split()),
            inline=family_by_name("gemma4").reasoning,
            call_head="<|tool_call>call:",
        ),
        reasoning_key="reasoning_content",
        closers=frozenset({"<turn|>", "<|tool_response>", "<eos>"}),
    ),
    "tool_use_form": TemplateFacts(
        takes_calls_without_tools=False, takes_bare_tools=False, closers=CHATML_ENDS
    ),
    "system_with_last_word": TemplateFacts(
        takes_system=False,
        takes_late_system=False,
        call_ids="nine",
        closers=ENDS_OF_MISTRAL,
    ),
    "flat_schemas": TemplateFacts(
        takes_bare_tools=False,
        shows_schemas=False,
        closers=CHATML_ENDS,
    ),
    "reasoning_or_answer": TemplateFacts(
        reasoning_hide=frozenset({"answers"}),
        reasoning_key="reasoning_content",
        old_reasoning="kept",
        closers=CHATML_ENDS,
    ),
    "cuts_at_closing_mark": TemplateFacts(
        stand_ins=StandIns(quoted=tuple(CHATML_MARKS.split()), inline=THINK),
        reasoning_key="reasoning_content",
        closers=CHATML_ENDS,
    ),
    "refuses_empty_replies": TemplateFacts(
        takes_late_system=False,
        refuses_empty=frozenset({"assistant"}),
        call_ids="nine",
        closers=ENDS_OF_MISTRAL,
    ),
    "text_or_calls": TemplateFacts(
        text_beside_calls="set in",
        stand_ins=StandIns(call_head='<tool_call>\n{"name": "'),
        refuses_empty=frozenset({"assistant"}),
        closers=CHATML_ENDS,
    ),
    "reasoning_without_text": TemplateFacts(
        text_beside_calls="set in",
        stand_ins=StandIns(call_head='<tool_call>\n{"name": "'),
        reasoning_key="reasoning_content",
        old_reasoning="kept",
        closers=CHATML_ENDS,
    ),
    "named_results": TemplateFacts(results_need_names=True, closers=CHATML_ENDS),
    "strict_schemas": TemplateFacts(takes_bare_tools=False, shows_schemas=False, closers=CHATML_ENDS),
    "raw_texts": TemplateFacts(quotes_texts="'", closers=CHATML_ENDS),
    "separated_names": TemplateFacts(closers=CHATML_ENDS),
    "answer_as_reasoning": TemplateFacts(
        reasoning_hide=frozenset({"answers"}),
        reasoning_key="reasoning_content",
        old_reasoning="kept",
        closers=CHATML_ENDS,
    ),
}
NO_REASONING = "shows no reasoning"
DROPPED = "old reasoning dropped"
SWITCHED, NOT_SWITCHED = "enable_thinking switches thinking", "thinking cannot be switched"
DESCRIBED = {
    "strips_old_reasoning": (DROPPED, "tools", SWITCHED),
    "opens_reasoning": (f"{DROPPED} unless preserve_thinking", "tools", SWITCHED),
    "stop_opens_next": (f"{DROPPED} unless clear_thinking", "tools", SWITCHED),
    "tools_before_last_user": (NO_REASONING, "tools", NOT_SWITCHED),
    "dates": (NO_REASONING, "tools", NOT_SWITCHED, "writes dates (%d %b %Y)"),
    "no_system": (NO_REASONING, "no tools", NOT_SWITCHED),
    "channels": (
        DROPPED,
        "tools",
        NOT_SWITCHED,
        "reasoning_effort low/medium/high",
        "writes dates (%Y-%m-%d)",
    ),
    "kimi": (NO_REASONING, "tools", NOT_SWITCHED),
    "arguments_as_text": (NO_REASONING, "tools", NOT_SWITCHED),
    "gemma4_channel": (DROPPED, "tools", SWITCHED),
    "hoists_systems": (NO_REASONING, "tools", NOT_SWITCHED),
    "plain": (NO_REASONING, "no tools", NOT_SWITCHED),
    "words_in_system": (DROPPED, "tools", f"{SYSTEM_WORDS} switches thinking"),
    "effort_words": (DROPPED, "tools", SWITCHED, "reasoning_effort low/medium/xhigh"),
    "minicpm": (NO_REASONING, "tools", NOT_SWITCHED),
    "minimax": (DROPPED, "tools", NOT_SWITCHED),
    "nested_arguments": (DROPPED, "tools", "thinking_mode switches thinking"),
    "dsml": (DROPPED, "tools", "thinking switches thinking"),
    "seed": (DROPPED, "tools", NOT_SWITCHED),
    "python_calls": (NO_REASONING, "tools", NOT_SWITCHED),
    "bare_python_calls": (NO_REASONING, "tools", NOT_SWITCHED),
    "python_lines": (NO_REASONING, "tools", NOT_SWITCHED),
    "call_list": (NO_REASONING, "tools", NOT_SWITCHED),
    "call_list_without_end": (NO_REASONING, "tools", NOT_SWITCHED),
    "option_without_tools": (
        NO_REASONING,
        "tools",
        "thinking switches thinking, which is off unless asked for",
    ),
    "call_lines": (NO_REASONING, "tools", NOT_SWITCHED),
    "bare_call_list": (NO_REASONING, "tools", NOT_SWITCHED),
    "role_of_a_call": (NO_REASONING, "tools", NOT_SWITCHED),
    "escaped_texts": (NO_REASONING, "tools", NOT_SWITCHED),
    "numbered_actions": (DROPPED, "tools", NOT_SWITCHED),
    "open_and_close": (DROPPED, "tools", NOT_SWITCHED),
    "strict_channels": (
        DROPPED,
        "tools",
        NOT_SWITCHED,
        "reasoning_effort low/medium/high",
    ),
    "text_after_calls": (DROPPED, "tools", NOT_SWITCHED),
    "tool_use_form": (NO_REASONING, "tools", NOT_SWITCHED),
    "system_with_last_word": (NO_REASONING, "tools", NOT_SWITCHED),
    "flat_schemas": (NO_REASONING, "tools", NOT_SWITCHED),
    "reasoning_or_answer": ("old reasoning kept", "tools", NOT_SWITCHED),
    "cuts_at_closing_mark": (DROPPED, "tools", NOT_SWITCHED),
    "refuses_empty_replies": (NO_REASONING, "tools", NOT_SWITCHED),
    "text_or_calls": (NO_REASONING, "tools", NOT_SWITCHED),
    "reasoning_without_text": ("old reasoning kept", "tools", NOT_SWITCHED),
    "named_results": (NO_REASONING, "tools", NOT_SWITCHED),
    "strict_schemas": (NO_REASONING, "tools", NOT_SWITCHED),
    "raw_texts": (NO_REASONING, "tools", NOT_SWITCHED),
    "separated_names": (NO_REASONING, "tools", NOT_SWITCHED),
    "answer_as_reasoning": ("old reasoning kept", "tools", NOT_SWITCHED),
}
LATE_SYSTEMS = "late system messages as marked user turns"
SET_IN = "text beside calls set before them"
QUOTED = "marks that a reply quotes kept from the template"
LONE_SYSTEM = "an empty question where there is none"
FIRST_ANSWER = "an empty question before a first answer"
FILLED = "empty descriptions and parameters for tools without"
SCHEMAS_IN_DESCRIPTIONS = "schemas written into the descriptions of tools"
SPACE = "empty messages as a space"
NEEDED = {
    "tools_before_last_user": [
        LATE_SYSTEMS,
        LONE_SYSTEM,
        FIRST_ANSWER,
        "user text after a result joined to it",
        "neighbours of one role merged",
        SET_IN,
    ],
    "dates": ["calls made one after the other", LONE_SYSTEM, "text beside calls in a turn of its own"],
    "no_system": [
        "tools listed in the system message",
        "calls and results written as text",
        "late system messages as marked user turns",
        "system message in the first user turn",
        FIRST_ANSWER,
        "neighbours of one role merged",
    ],
    "channels": [LATE_SYSTEMS, SCHEMAS_IN_DESCRIPTIONS],
    "arguments_as_text": [QUOTED],
    "strict_channels": [
        "calls made one after the other",
        LATE_SYSTEMS,
        SET_IN,
        QUOTED,
        FILLED,
        SCHEMAS_IN_DESCRIPTIONS,
    ],
    "text_after_calls": [SET_IN, QUOTED],
    "tool_use_form": ["calls and results written as text where no tools are offered", FILLED],
    "system_with_last_word": [LATE_SYSTEMS, "system message in the first user turn"],
    "flat_schemas": [FILLED, SCHEMAS_IN_DESCRIPTIONS],
    "reasoning_or_answer": ["no reasoning beside answers"],
    "cuts_at_closing_mark": [QUOTED],
    "refuses_empty_replies": [LATE_SYSTEMS, SPACE],
    "text_or_calls": [SET_IN, SPACE],
    "reasoning_without_text": [SET_IN],
    "named_results": ["results with the names of their tools"],
    "strict_schemas": [FILLED, SCHEMAS_IN_DESCRIPTIONS],
    "raw_texts": ["texts in calls escaped"],
    "answer_as_reasoning": ["no reasoning beside answers"],
    "hoists_systems": ["late system messages as marked user turns"],
    "bare_python_calls": [LONE_SYSTEM],
    "call_list_without_end": [LONE_SYSTEM],
    "option_without_tools": [LONE_SYSTEM],
    "bare_call_list": ["text beside calls in a turn of its own"],
    "plain": ["tools listed in the system message", "calls and results written as text"],
}
"""The adaptations for each template that needs any."""


@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_is_found(trait):
    assert preparer_of(trait).facts == FACTS[trait]


@pytest.mark.parametrize("trait", TRAITS)
def test_a_user_learns_what_a_template_does(trait):
    assert described(FACTS[trait]) == ", ".join(DESCRIBED[trait])


@pytest.mark.parametrize("trait", TRAITS)
def test_a_user_learns_what_is_done_for_a_template(trait):
    assert needed(FACTS[trait]) == NEEDED.get(trait, [])


def test_a_user_learns_that_a_tokenizer_cannot_be_cut():
    assert described(TemplateFacts(can_be_cut=False)).endswith(", cannot be cut")


def test_a_user_learns_what_is_lost_all_the_same():
    description = described(TemplateFacts(losses=("tools", "text beside calls")))
    assert description.endswith(", loses or refuses tools, text beside calls")


@pytest.mark.sample(6)
@pytest.mark.parametrize("trait", TRAITS)
def test_an_audit_takes_a_few_hundred_renderings(trait):
    watched = WatchedTokenizer(trait_tokenizer(trait))
    audit(watched, Family(name="generic"))
    assert len(watched.rendered) < 450


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


@pytest.mark.parametrize(
    ("after", "closers"),
    [
        ("<tool><end>", {"<end>"}),
        ("<tool><user>", {"<end>", "<tool>"}),
        ("", {"<end>", "<user>"}),
    ],
)
def test_a_reply_reaches_to_the_end_that_its_model_writes_if_the_history_has_it(after, closers):
    ends = "{{- ('" + after + "' if message.role == 'assistant' else '') -}}"
    template = TURNS.replace(" ~ '<end>' -}}", " -}}" + ends)
    assert facts_of(template).closers == closers


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
def test_reasoning_has_the_name_that_the_template_knows(key):
    facts = facts_of(TURNS.replace("message.content", f"(message.{key} or '') ~ message.content"))
    assert facts.reasoning_key == key
    assert facts.old_reasoning == "kept"
    assert facts.preserve == {}


@pytest.mark.parametrize(
    ("options", "preserve"),
    [
        ("truncate_history_thinking is false", {"truncate_history_thinking": False}),
        ("preserve_thinking", {"preserve_thinking": True}),
        ("clear_thinking is false", {"clear_thinking": False}),
        ("keep_all_reasoning", {"keep_all_reasoning": True}),
    ],
)
def test_an_option_that_keeps_old_reasoning_is_found(options, preserve):
    reasoning = f"(message.reasoning_content or '' if loop.last or {options} else '') ~ message.content"
    facts = facts_of(TURNS.replace("message.content", reasoning))
    assert (facts.old_reasoning, facts.preserve) == ("dropped", preserve)


def test_the_second_name_of_the_switch_is_found():
    facts = facts_of(TURNS.replace("'<assistant>'", "('<think>' if thinking else '</think>')"))
    assert facts.switch == Switch(option="thinking", thinks=False)


@pytest.mark.parametrize(
    ("opening", "tells"),
    [
        ("'<think>' ~ (thinking_budget or '')", True),
        ("'<think>' if thinking_budget is undefined or thinking_budget else '</think>'", False),
        ("'<think>' ~ (thinking_budget or '') if enable_thinking else '</think>'", True),
        ("'<think>'", False),
    ],
)
def test_a_template_that_tells_a_budget_is_known(opening: str, tells: bool):
    facts = facts_of(TURNS.replace("'<assistant>'", f"({opening})"))
    assert facts.tells_budget is tells
    assert ("thinking_budget is passed" in described(facts)) is tells
    in_front = facts_of(f"{{{{ {opening} }}}}" + TURNS)
    assert (in_front.tells_budget, in_front.generation_prompt_options) == (tells, frozenset())
    assert not tells or "thinking_budget" in facts.generation_prompt_options


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("condition", "switch"),
    [
        ("enable_thinking is not false", Switch(option="enable_thinking")),
        ("enable_thinking is defined and enable_thinking", Switch(option="enable_thinking", thinks=False)),
        (
            "thinking_mode | default('enabled') != 'disabled'",
            Switch(option="thinking_mode", on="enabled", off="disabled"),
        ),
        (
            "thinking_mode == 'thinking'",
            Switch(option="thinking_mode", on="thinking", off="chat", thinks=False),
        ),
        ("thinking_mode | default('on') == 'on'", Switch(option="thinking_mode", on="on", off="off")),
        ("reasoning | default(true)", Switch(option="reasoning")),
        ("thinking_budget is undefined or thinking_budget", Switch(option="thinking_budget", on=None, off=0)),
        (
            "not messages[0].content.endswith('/no_think')",
            Switch(option=SYSTEM_WORDS, on=None, off="/no_think"),
        ),
        (
            "messages[0].content.endswith('/think')",
            Switch(option=SYSTEM_WORDS, on="/think", off="/no_think", thinks=False),
        ),
        ("true", None),
    ],
)
def test_a_switch_is_found_with_what_the_template_does_without_it(condition, switch):
    facts = facts_of(TURNS.replace("'<assistant>'", f"('<think>' if {condition} else '</think>')"))
    assert facts.switch == switch
    in_front = facts_of(f"{{{{ 'think' if {condition} else 'answer' }}}}" + TURNS)
    assert in_front.switch == switch
    assert in_front.generation_prompt_options == frozenset()
    is_option = switch is not None and switch.option != SYSTEM_WORDS
    assert facts.generation_prompt_options == ({switch.option} if switch and is_option else frozenset())


def test_a_template_that_shows_what_the_system_says_does_not_act_on_it():
    assert facts_of(TURNS).switch is None


WORDS = ("minimal", "low", "medium", "high", "xhigh")
EFFORTS: dict[str, tuple[str, tuple[str | bool | None, ...] | None]] = {
    "prints any word": ("reasoning_effort or 'medium'", ("low", "low", "medium", "high", "high")),
    "prints any word its own way": (
        "(reasoning_effort or 'medium') | title",
        ("low", "low", "medium", "high", "high"),
    ),
    "another name": ("thinking_effort or 'high'", ("low", "low", "medium", "high", "high")),
    "one word, else its default, by name": (
        "'Effort: ' ~ ('High' if reasoning_effort == 'high' else 'Max')",
        ("high", "high", "high", "high", None),
    ),
    "one word, which is its default": (
        "'brief' if reasoning_effort == 'low' else 'long'",
        ("low", "low", None, None, None),
    ),
    "the most alone": (
        "'everything' if reasoning_effort == 'max' else ''",
        (None, None, None, None, "max"),
    ),
    "all of them": (
        "{'minimal': 1, 'low': 2, 'medium': 3, 'high': 4, 'xhigh': 5}[reasoning_effort] or ''",
        WORDS,
    ),
    "two words for the same": (
        "{'low': 'Effort: max', 'max': 'Effort: max', 'high': 'Effort: high'}[reasoning_effort] or ''",
        (None, None, None, "high", "max"),
    ),
    "words for another level in what it says": (
        "'Think with minimal effort' if reasoning_effort == 'low' else 'Think'",
        ("low", "low", None, None, None),
    ),
    "refuses what it does not know": (
        "{'low': 1, 'high': 2}[reasoning_effort or 'high'] or raise_exception('no')",
        ("low", "low", "high", "high", "high"),
    ),
    "a flag": ("'briefly' if low_effort else ''", (True, True, None, None, None)),
    "none": ("''", None),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", EFFORTS)
def test_an_effort_is_passed_as_the_nearest_word_that_the_template_knows(case):
    jinja, words = EFFORTS[case]
    effort = facts_of(f"{{{{ {jinja} }}}}" + TURNS).effort
    assert (effort and tuple(effort.words.values())) == words
    assert effort is None or tuple(effort.words) == WORDS


@pytest.mark.parametrize("default", ["none", "no_think"])
def test_a_word_for_no_effort_may_be_the_default_of_all_other_words(default):
    jinja = f"'effort:' ~ (reasoning_effort if reasoning_effort in ['low', 'high'] else '{default}')"
    facts = facts_of(f"{{{{ {jinja} }}}}" + TURNS)
    assert facts.switch == Switch(option="reasoning_effort", on="high", off=default, thinks=False)
    assert facts.effort is not None
    assert list(facts.effort.words.values()) == ["low", "low", "high", "high", "high"]


def test_an_effort_that_counts_only_while_the_model_thinks_is_found():
    jinja = "('everything' if reasoning_effort == 'max' else 'something') if enable_thinking else ''"
    facts = facts_of(f"{{{{ {jinja} }}}}" + TURNS)
    assert facts.effort is not None
    assert facts.effort.words["xhigh"] == "max"


@pytest.mark.parametrize(("default", "thinks"), [("none", False), ("high", True)])
def test_a_word_for_no_effort_is_the_switch_of_a_template_that_has_no_other(default, thinks):
    jinja = f"{{'none': 'answer', 'high': 'think'}}[reasoning_effort or '{default}'] or raise_exception('no')"
    facts = facts_of(f"{{{{ {jinja} }}}}" + TURNS)
    assert facts.switch == Switch(option="reasoning_effort", on="high", off="none", thinks=thinks)
    assert facts.effort == Effort(option="reasoning_effort", words=dict.fromkeys(WORDS, "high"))


@pytest.mark.parametrize("name", ["truncate_history_thinking is false", "preserve_thinking"])
def test_an_option_that_keeps_the_reasoning_of_calls_alone_is_found(name):
    reasoning = (
        f"(message.reasoning_content or '' if message.tool_calls and ({name}) else '') ~ message.content"
    )
    calls = "-}}{%- for call in message.tool_calls -%}{{- call.function | tojson -}}{%- endfor -%}{{- '<end>'"
    template = TURNS.replace("message.content", reasoning).replace("~ '<end>'", calls)
    option, _, value = name.partition(" is ")
    assert facts_of(template).preserve == {option: value != "false"}


def test_a_user_learns_that_a_model_does_not_think_unless_asked():
    switch = Switch(option="thinking", thinks=False)
    assert "thinking switches thinking, which is off unless asked for" in described(
        TemplateFacts(switch=switch)
    )


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


def test_a_template_that_lists_tools_as_python_does_shows_calls_all_the_same():
    tools = "{{- '<system>' ~ tools ~ '<end>' if tools -}}"
    written = "{{- call.function.arguments | tojson -}}"
    calls = f"-}}}}{{%- for call in message.tool_calls -%}}{written}{{%- endfor -%}}{{{{- '<end>'"
    facts = facts_of(tools + TURNS.replace("~ '<end>'", calls))
    assert facts.takes_calls
    assert not facts.arguments_as_text


@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_white_space_that_the_model_writes_before_its_answer_is_found(space):
    jinja = f"('{space}' if message.role == 'assistant' else '') ~ message.content"
    assert facts_of(TURNS.replace("message.content", jinja)).lead == space


def test_white_space_that_the_prompt_ends_with_is_not_the_models():
    facts = facts_of(TURNS.replace("'>'", "'>\n'").replace("'<assistant>'", "'<assistant>\n'"))
    assert facts.lead == ""


def test_a_tokenizer_that_marks_the_start_of_a_text_cannot_be_cut():
    assert facts_of(TURNS).can_be_cut
    assert not facts_of(TURNS, marks_the_start=True).can_be_cut


CALLS = """-}}
    {%- for call in message.tool_calls -%}
        {{- '(' ~ call.function.name ~ ':' ~ call.function.arguments | tojson ~ ')' -}}
    {%- endfor -%}
{{- '<end>'"""
WITH_CALLS = TURNS.replace("~ '<end>'", CALLS)


def test_text_that_can_stand_nowhere_else_is_moved_to_the_result():
    """No token marks the calls, and replies that follow each other are refused."""
    alone = WITH_CALLS.replace("message.content", "('' if message.tool_calls else message.content)")
    neighbours = "'no'.x.y if message.role == 'assistant' == loop.nextitem.role else message.role"
    facts = facts_of(alone.replace("message.role ~", f"({neighbours}) ~", 1))
    assert facts.takes_calls
    assert facts.text_beside_calls == "moved"
    assert "text beside calls before their result" in needed(facts)
    assert facts_of(alone).text_beside_calls == "parted"


def test_calls_that_vanish_beside_reasoning_are_found():
    hidden = WITH_CALLS.replace("in message.tool_calls", "in message.tool_calls if not message.thinking")
    facts = facts_of(hidden.replace("message.content", "(message.thinking or '') ~ message.content"))
    assert facts.reasoning_hide == {"calls"}
    assert "no reasoning beside calls" in needed(facts)


def test_a_template_that_refuses_blank_replies_too_gets_none():
    strict = "message.content if message.content | trim or message.role != 'assistant' else 'no'.x.y"
    facts = facts_of(TURNS.replace("message.content", f"({strict})"))
    assert facts.refuses_blank_replies
    assert "assistant" not in facts.refuses_empty
    assert "empty answers left out" in needed(facts)
    assert "conversations with empty answers" not in facts.losses


def test_a_schema_that_is_refused_is_found():
    refusing = """
        {%- for tool in tools or [] -%}
            {{- tool.function | tojson -}}
            {%- for one in tool.function.parameters.properties.values() if one.anyOf -%}
                {{- one.no.one -}}
            {%- endfor -%}
        {%- endfor -%}
    """
    facts = facts_of(refusing + TURNS)
    assert facts.takes_tools
    assert not facts.shows_schemas
    assert facts.losses == ()


def test_a_template_that_goes_through_tools_where_there_are_none_gets_an_empty_list():
    listing = "{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}"
    facts = facts_of(
        listing.replace("tools", "(tools if tools is not none else raise_exception('no'))") + TURNS
    )
    assert facts.lists_no_tools
    assert (facts.takes_tools, facts.takes_system, facts.losses) == (True, True, ())
    assert not facts_of(listing.replace("tools", "tools or []") + TURNS).lists_no_tools
    assert not facts_of(REFUSED).lists_no_tools


def test_text_before_calls_that_only_begin_an_answer_stands_apart():
    for template, way in ((WITH_CALLS, "parted"), (WITH_CALLS.replace("-}}", "~ '<tool>' -}}", 1), "kept")):
        tokenizer = FakeTokenizer(template, ADDED, ("<end>",))
        assert audit(tokenizer, Family(name="bare", calls_begin_answers=True)).text_beside_calls == way
        assert audit(tokenizer, Family(name="marked")).text_beside_calls == "kept"


def test_a_template_that_shows_tools_in_system_messages_alone_gets_one():
    jinja = "message.content ~ (tools | tojson if tools and message.role == 'system' else '')"
    facts = facts_of(TURNS.replace("message.content", jinja))
    assert (facts.takes_tools, facts.tools_need_system, facts.losses) == (True, True, ())
    assert not facts.takes_late_system
    assert needed(facts) == [
        "an empty system message beside tools",
        "calls and results written as text",
        LATE_SYSTEMS,
    ]


def test_a_template_that_is_beyond_repair_says_what_it_loses():
    assert facts_of(REFUSED).losses == ("all that is said",)
    assert facts_of(TURNS).losses == ()
    mute = facts_of(TURNS.replace("message.content", "message.content * (message.role != 'assistant')"))
    assert mute.losses == (
        "calls and results",
        "calls in one message",
        "text beside calls",
        "answers with reasoning",
        "marks that an answer quotes",
    )


def test_the_defaults_are_a_template_that_takes_everything():
    takes = [field.name for field in fields(TemplateFacts) if field.name.startswith(("takes_", "keeps_"))]
    facts = TemplateFacts()
    assert [name for name in takes if not getattr(facts, name)] == []
