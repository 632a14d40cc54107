"""A template does not see what it would cut off or hide, and the prompt has it all the same."""

from typing import Any

from start_llm.core.family import ReasoningMarks
from start_llm.prompt.stand_ins import NO_STAND_INS, StandIns

type Seen = dict[str, Any]

THINK = ReasoningMarks("<think>", "</think>", cut="</think>")
QUOTING = StandIns(quoted=("<think>", "</think>"), inline=THINK)
SETTING_IN = StandIns(call_head="<call>", around_text=("(", ")"))


def answer(content: str, **more: Any) -> Seen:
    return {"role": "assistant", "content": content, **more}


def calling(content: str, *names: str) -> Seen:
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in names]
    return answer(content, tool_calls=calls)


def rendered(messages: list[Seen]) -> str:
    """As a template that shows no text beside calls."""
    texts: list[str] = []
    for message in messages:
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        texts.append("".join(f"<call>{name}" for name in names) or str(message["content"]))
    return "|".join(texts)


def test_a_conversation_without_marks_is_the_templates_as_it_is():
    talk: list[Seen] = [answer("plain"), {"role": "user", "content": "a </think>"}]
    for stand_ins in (NO_STAND_INS, QUOTING):
        seen, restored = stand_ins.put_into(talk)
        assert seen == talk
        assert restored("any </think> text") == "any </think> text"


def test_marks_that_a_reply_quotes_are_hidden_from_the_template_and_shown_in_the_prompt():
    talk = [answer("a </think> b <think> c", reasoning="d </think>", name="</think>")]
    seen, restored = QUOTING.put_into(talk)
    hidden = f"{seen[0]['content']}|{seen[0]['reasoning']}"
    assert "think" not in hidden
    assert seen[0]["name"] == "</think>"
    assert restored(hidden) == "a </think> b <think> c|d </think>"


def test_reasoning_at_the_start_of_a_text_is_the_templates_and_what_is_quoted_after_it_is_not():
    seen, restored = QUOTING.put_into([answer("<think>a</think>b </think> c")])
    content = str(seen[0]["content"])
    assert content.startswith("<think>a</think>b standin")
    assert content.count("think>") == 2
    assert restored(content) == "<think>a</think>b </think> c"


def test_a_text_beside_calls_is_set_in_before_the_first_one():
    seen, restored = SETTING_IN.put_into([calling("I ask.", "a", "b"), answer("c"), calling("And.", "d")])
    assert [message["content"] for message in seen] == ["", "c", ""]
    assert restored(rendered(seen)) == "(I ask.)<call>a<call>b|c|(And.)<call>d"


def test_a_name_that_is_given_again_has_no_text():
    seen, restored = SETTING_IN.put_into([calling("I ask.", "a")])
    assert restored(f"{rendered(seen)}>{rendered(seen).removeprefix('<call>')}") == "(I ask.)<call>a>a"
    assert restored(rendered(seen) * 2) == "(I ask.)<call>a<call>a"


def test_calls_without_a_text_stay_as_they_are():
    talk = [calling("", "a"), calling(" \n", "b")]
    assert SETTING_IN.put_into(talk)[0] == talk
    assert talk[0] == calling("", "a")
