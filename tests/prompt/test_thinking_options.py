"""A request's options for thinking reach the template in the words that it knows."""

import pytest

from start_llm.core.chat import ChatRequest, Json, Thinking
from start_llm.core.family import Family
from start_llm.core.prompt import Prompt
from start_llm.core.prompt_policy import PromptPolicy
from start_llm.formats.registry import FAMILIES
from start_llm.prompt.prepare import Preparer
from tests.prompt.fakes import FakeTokenizer, prepared, shown, system, user

ADDED = ("<user>", "<system>", "<assistant>", "<end>", "</think>")
TURNS = """
{%- for message in messages -%}
    {{- '<' ~ message.role ~ '>' ~ message.content ~ '<end>' -}}
{%- endfor -%}
{{- '<assistant>' ~ (TAIL) if add_generation_prompt -}}
"""
OFF_BY_DEFAULT = "'<think>' if enable_thinking else '</think>'"
BY_EFFORT = "{'none': '</think>', 'high': '<think>'}[reasoning_effort or 'none'] or raise_exception('no')"


def tail(template_tail: str, thinking: Thinking = Thinking(), *, default: bool | None = None) -> str:  # noqa: B008
    """Return the generation prompt."""
    tokenizer = FakeTokenizer(TURNS.replace("TAIL", template_tail), ADDED, ("<end>",))
    preparer = Preparer(tokenizer, Family(name="generic"), policy=PromptPolicy(thinking=default))
    prompt = preparer.prepare(ChatRequest(messages=(user("Hi."),), thinking=thinking))
    return tokenizer.decode(prompt.tokens.ids).partition("<assistant>")[2]


def asked(*, on: bool | None, words: str = "Be brief.") -> Prompt:
    return prepared("words_in_system", system(words), user("Hi."), thinking=Thinking(on=on))


def test_a_model_that_does_not_think_unless_asked_is_left_so():
    assert tail(OFF_BY_DEFAULT) == "</think>"
    assert tail(OFF_BY_DEFAULT, Thinking(on=True)) == "<think>"


@pytest.mark.parametrize("default", [True, False])
def test_the_environment_counts_more_than_the_template_and_less_than_the_request(default):
    assert tail(OFF_BY_DEFAULT, default=default) == ("<think>" if default else "</think>")
    assert tail(OFF_BY_DEFAULT, Thinking(on=not default), default=default) == (
        "</think>" if default else "<think>"
    )


@pytest.mark.parametrize("value", [0, "false", "off", [], 7])
def test_a_switch_that_the_server_cannot_read_is_left_to_the_template(value: Json):
    shown_option = TURNS.replace("TAIL", "'<think>' ~ enable_thinking if enable_thinking else '</think>'")
    tokenizer = FakeTokenizer(shown_option, ADDED, ("<end>",))
    preparer = Preparer(tokenizer, Family(name="generic"), policy=PromptPolicy(thinking=True))

    def asked_with(on: bool | None) -> str:
        request = ChatRequest(
            messages=(user("Hi."),), thinking=Thinking(on=on), template_options={"enable_thinking": value}
        )
        return tokenizer.decode(preparer.prepare(request).tokens.ids).partition("<assistant>")[2]

    assert asked_with(None) == (f"<think>{value}" if value else "</think>")
    assert asked_with(False) == "</think>"


@pytest.mark.parametrize("value", [0, 7])
def test_a_model_thinks_unless_its_prompt_closes_the_reasoning(value: int):
    """A family whose reasoning may begin without a mark would take the whole answer for it."""
    off = "'<think></think>' if enable_thinking is defined and not enable_thinking else ''"
    shown_option = TURNS.replace("TAIL", off)
    tokenizer = FakeTokenizer(shown_option, ADDED, ("<end>",))
    preparer = Preparer(tokenizer, FAMILIES["glm4"].family)
    request = ChatRequest(messages=(user("Hi."),), template_options={"enable_thinking": value})
    assert preparer.prepare(request).thinking == (value != 0)


def test_a_word_for_no_effort_turns_thinking_off_whatever_effort_is_named():
    assert tail(BY_EFFORT, Thinking(on=False, effort="xhigh")) == "</think>"
    assert tail(BY_EFFORT, Thinking(on=True)) == "<think>"
    assert tail(BY_EFFORT, Thinking(on=True, effort="low")) == "<think>"
    assert tail(BY_EFFORT) == "</think>"


@pytest.mark.parametrize(
    ("thinking", "opening"),
    [
        (Thinking(), "<think>any"),
        (Thinking(budget=4096), "<think>4096"),
        (Thinking(on=True, budget=1), "<think>1"),
        (Thinking(on=False, budget=4096), "<think>0"),
        (Thinking(on=False), "<think>0"),
    ],
)
def test_a_budget_is_passed_to_a_template_that_shows_it_to_the_model(thinking: Thinking, opening: str):
    by_budget = "'<think>' ~ (thinking_budget if thinking_budget is defined else 'any')"
    assert tail(by_budget, thinking) == opening
    assert tail("'<think>'", thinking) == "<think>"


def test_of_a_budget_that_only_a_switch_asks_for_the_template_hears_nothing():
    by_switch = "'<think>' if thinking_budget is undefined else '</think>' ~ (thinking_budget != 0)"
    assert tail(by_switch, Thinking(budget=4096)) == "<think>"
    assert tail(by_switch, Thinking(on=False, budget=4096)) == "</think>False"


@pytest.mark.parametrize("is_in_front", [True, False])
def test_conversations_with_other_budgets_are_others_only_where_the_budget_stands_in_front(is_in_front: bool):
    front, end = ("{{ thinking_budget }}", "''") if is_in_front else ("", "thinking_budget")
    template = front + TURNS.replace("(TAIL)", f"({end})")
    preparer = Preparer(FakeTokenizer(template, ADDED, ("<end>",)), Family(name="generic"))
    prompts = [
        preparer.prepare(ChatRequest(messages=(user("Hi."),), thinking=Thinking(budget=budget)))
        for budget in (512, 513)
    ]
    keys = {repr(prompt.conversation.keys) for prompt in prompts if prompt.conversation}
    assert len(keys) == (2 if is_in_front else 1)
    assert prompts[0].tokens.ids != prompts[1].tokens.ids


@pytest.mark.parametrize(
    ("effort", "line"),
    [
        ("minimal", "Think briefly."),
        ("low", "Think briefly."),
        ("medium", "Think."),
        ("high", "Think of everything."),
        ("xhigh", "Think of everything."),
        (None, "Think of everything."),
    ],
)
def test_no_effort_of_a_request_is_refused(effort, line):
    text = shown("effort_words", user("Hi."), thinking=Thinking(on=True, effort=effort))
    assert text.startswith(f"<|im_start|>system\n{line}<|im_end|>")


def test_a_template_without_a_switch_gets_the_least_effort_where_nobody_wants_reasoning():
    assert "Reasoning: low" in shown("channels", user("Hi."), thinking=Thinking(on=False))


def test_a_word_in_the_system_text_turns_thinking_off_and_is_nothing_that_the_model_reads():
    on, off = (shown("words_in_system", user("Hi."), thinking=Thinking(on=on)) for on in (True, False))
    assert on.endswith("<think>\n")
    assert off.endswith("<think></think>")
    assert "/no_think" not in off
    prompt = shown("words_in_system", system("Be brief."), user("Hi."), thinking=Thinking(on=False))
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert prompt.endswith("<think></think>")


def test_a_client_may_write_the_word_itself():
    assert not asked(on=None, words="Be brief. /no_think").reasoning_is_open
    assert asked(on=None).reasoning_is_open


def test_a_word_in_the_system_text_makes_another_conversation_of_it():
    on, off = (asked(on=on).conversation for on in (True, False))
    assert on
    assert off
    assert on.root != off.root
