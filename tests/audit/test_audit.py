"""A model's folder says what to expect of it: no weights are there in any of these tests but the last."""

import json
import os
from pathlib import Path

import pytest

from start_llm import cli
from start_llm.audit.call_round_trip import audit_calls
from start_llm.audit.requests import KINDS, meanings, words_of
from start_llm.audit.subject import AuditedModel
from start_llm.audit.turns import CLIENTS, efficiency
from start_llm.core.chat import ChatRequest, Thinking
from start_llm.core.errors import ModelError
from tests.audit.folders import folder_of, page_of, rows_of
from tests.prompt.fakes import call, family_of, preparer_of, reply
from tests.prompt.replies import ASKED, REASONING_FORMS, TOOLS, turn
from tests.serving import serving
from tests.templates.traits import TRAITS, trait_folder, trait_tokenizer

pytestmark = pytest.mark.product

MOVING = "tools_before_last_user"
UNREAD_CALLS = (
    ('<tool_call>\\n{"name": \' ~ tool_call.name | tojson', "<<call>> ' ~ tool_call.name"),
    (
        "', \"arguments\": ' ~ tool_call.arguments | tojson ~ '}\\n</tool_call>'",
        "tool_call.arguments | tojson",
    ),
)
LOSES_A_WORD = ("'\\n<tool_response>\\n' ~ message.content", "message.content.replace('result503x', '')")
REFUSES_A_WORD = (
    "{%- if message.role == 'assistant' -%}",
    "{{- raise_exception('late') if 'late506x' in message.content -}}{%- if message.role == 'assistant' -%}",
)
COLLECTION = os.environ.get("REAL_TEMPLATES")


def subject_of(trait: str) -> AuditedModel:
    return AuditedModel(trait_tokenizer(trait), family_of(trait), preparer_of(trait))


def test_every_kind_of_request_says_words_that_may_not_get_lost():
    assert len(KINDS) == 25
    assert all(words_of(request) for request in KINDS.values())
    assert all(meanings(words_of(request)) for request in KINDS.values()), "a person reads what they are"


@pytest.mark.sample(3)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("trait", TRAITS)
def test_a_reply_is_written_as_the_model_writes_it(trait, on):
    reasoning = "I look." if on and trait in REASONING_FORMS else None
    request = ChatRequest(messages=ASKED, tools=TOOLS, thinking=Thinking(on=on))
    for message in (
        reply("Nine metres.", reasoning=reasoning),
        reply("", call(path="a.py"), reasoning=reasoning),
    ):
        assert subject_of(trait).written(request, message) == turn(trait, message, on=on).reply


@pytest.mark.sample(48)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("trait", TRAITS)
def test_clients_have_nothing_computed_twice(trait, client):
    assert audit_calls(subject_of(trait)).notation
    for thinks in (True, False) if family_of(trait).reasoning else (False,):
        result = efficiency(subject_of(trait), client, thinks=thinks)
        assert result
        assert result >= 0.99 or trait == MOVING


def test_tools_that_move_are_computed_again_and_again():
    result = efficiency(subject_of(MOVING), "word for word", thinks=False)
    assert result
    assert result < 0.6


@pytest.mark.thorough
def test_a_page_says_what_to_expect(tmp_path):
    folder = folder_of("opens_reasoning", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    page = page_of(folder)
    assert page.is_fine
    assert rows_of(page, "family") == ["qwen3 (qwen3)"]
    assert rows_of(page, "reasoning") == ["<think> … </think>"]
    assert rows_of(page, "calls")[0] == "qwen_xml; 6 of 6 kinds read"
    assert rows_of(page, "lost") == ["nothing, in any of 25 kinds of requests"]
    assert rows_of(page, "efficiency") == [
        f"{how}: word for word 1.00, reasoning left out 1.00, arguments respelt 1.00"
        for how in ("not thinking", "thinking")
    ]
    assert rows_of(page, "sampling") == ["temperature 0.6, top_k 20 (generation_config.json)"]
    assert "old reasoning dropped unless preserve_thinking" in rows_of(page, "template")[0]


@pytest.mark.thorough
def test_calls_that_nobody_reads_are_named(tmp_path):
    page = page_of(folder_of("strips_old_reasoning", tmp_path, *UNREAD_CALLS))
    assert not page.is_fine
    calls = rows_of(page, "calls")
    assert calls[0] == "NOT READ by any reader: an agent gets them as text; 0 of 6 kinds read"
    assert calls[-1].startswith("as in: <<call>> look")
    assert all("word for word unknown" in line for line in rows_of(page, "efficiency"))


@pytest.mark.thorough
def test_words_that_do_not_reach_the_model_are_reported(tmp_path):
    page = page_of(folder_of("strips_old_reasoning", tmp_path, LOSES_A_WORD))
    assert not page.is_fine
    lost = rows_of(page, "lost")
    assert lost[0] == "in 8 of 25 kinds of requests"
    assert lost[1] == "a call: the result of a call does not reach the model"


@pytest.mark.thorough
def test_a_request_that_the_template_refuses_is_reported(tmp_path):
    page = page_of(folder_of("strips_old_reasoning", tmp_path, REFUSES_A_WORD))
    assert not page.is_fine
    lost = rows_of(page, "lost")
    assert lost[0] == "in 3 of 25 kinds of requests"
    assert lost[1].startswith("a system message in the middle: refused: The chat template")
    assert lost[1].endswith(": late")


@pytest.mark.thorough
def test_a_reply_that_does_not_go_on_from_its_prompt_cannot_be_recognized(tmp_path):
    other = ("{{- '<|im_start|>assistant\\n' -}}", "{{- '<|im_start|>model\\n' -}}")
    page = page_of(folder_of("strips_old_reasoning", tmp_path, other))
    assert not page.is_fine
    assert rows_of(page, "calls") == ["the template shows none that can be recognized in its prompt"]


@pytest.mark.thorough
def test_a_reply_of_a_renderer_in_python_is_recognized_too(tmp_path):
    folder = folder_of("arguments_as_text", tmp_path)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template_type": "deepseek_v32"}))
    page = page_of(folder)
    assert rows_of(page, "calls")[-1].startswith("as in: <｜DSML｜function_calls>")
    assert rows_of(page, "lost") == ["nothing, in any of 25 kinds of requests"]
    assert rows_of(page, "efficiency") == [
        f"{how}: word for word 1.00, reasoning left out 1.00, arguments respelt 1.00"
        for how in ("not thinking", "thinking")
    ]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "is not a model folder"),
        ("tokenizer.json", "{", "The tokenizer in .* cannot be loaded"),
        ("chat_template.jinja", None, "has no chat template"),
    ],
)
def test_a_folder_that_lacks_something_says_what(file, text, message, tmp_path):
    folder = folder_of("plain", tmp_path)
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    with pytest.raises(ModelError, match=message):
        page_of(folder)


@pytest.mark.thorough
def test_the_status_of_the_command_says_whether_an_agent_would_miss_something(tmp_path, capsys):
    for name in ("fine", "unread"):
        (tmp_path / name).mkdir()
    fine = folder_of("plain", tmp_path / "fine")
    unread = folder_of("strips_old_reasoning", tmp_path / "unread", *UNREAD_CALLS)
    assert cli.main(["audit", str(fine)]) == 0
    assert "nothing, in any of 25 kinds of requests" in capsys.readouterr().out
    assert cli.main(["audit", str(unread)]) == 1
    assert "NOT READ by any reader" in capsys.readouterr().out
    assert cli.main(["audit", str(tmp_path / "nowhere")]) == 2
    assert f"start_llm cannot look into {tmp_path / 'nowhere'}." in capsys.readouterr().err


@pytest.mark.skipif(COLLECTION is None, reason="REAL_TEMPLATES names no folder of model folders")
@pytest.mark.parametrize(
    "folder",
    sorted(path.parent for path in Path(COLLECTION or "/nowhere").glob("*/config.json")),
    ids=lambda folder: folder.name,
)
def test_nothing_is_lost_on_a_real_model(folder):
    page = page_of(folder)
    assert page.is_fine, "\n".join(f"{name:12}{value}" for name, value in page.rows)


# ------------------------------------------------------------------------------------------------- a server


@pytest.mark.thorough
def test_a_server_says_in_one_line_that_nobody_reads_the_calls_of_its_model(tmp_path):
    template = TRAITS["strips_old_reasoning"].template
    for old, new in UNREAD_CALLS:
        template = template.replace(old, new)
    notice = "No reader knows how this model writes calls; an agent gets them as text"
    with serving(trait_folder("strips_old_reasoning", tmp_path / "new", chat_template=template)) as server:
        (line,) = (line for line in server.printed().splitlines() if notice in line)
        assert "<<call>> look" in line
    with serving(trait_folder("strips_old_reasoning", tmp_path / "known")) as server:
        assert notice not in server.printed()
