"""Models whose calls nobody reads say so when they are loaded, in the forms of Muse and Inkling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.tiny_models import AddedTokens, end_ids, tiny_tokenizer, write_tokenizer
from start_llm.audit.call_round_trip import unread_call
from start_llm.audit.subject import AuditedModel
from start_llm.config.settings import Settings
from start_llm.models.loader import read
from start_llm.prompt.prepare import Preparer
from start_llm.wiring.from_settings import model_family
from tests.audit.folders import folder_of, page_of, rows_of

_MUSE = """\
{%- for message in messages -%}
    {%- if message.role == 'assistant' and message.tool_calls -%}
        {%- for call in message.tool_calls -%}
            {{- '<|start|>assistant to=' ~ call.function.name ~ '<|message|><atem:function_calls>\\n' -}}
            {{- '<atem:invoke name="' ~ call.function.name ~ '">\\n' -}}
            {%- for key, value in call.function.arguments.items() -%}
                {{- '<atem:parameter name="' ~ key ~ '">' -}}
                {{- (value if value is string else value | tojson) ~ '</atem:parameter>\\n' -}}
            {%- endfor -%}
            {{- '</atem:invoke>\\n</atem:function_calls>' ~ ('<|eot|>' if loop.last else '<|eom|>') -}}
        {%- endfor -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<|start|>assistant to=user<|message|>' ~ message.content ~ '<|eot|>' -}}
    {%- else -%}
        {{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|eot|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""
_INKLING = """\
{%- for message in messages -%}
    {{- '<|message_' ~ ('model' if message.role == 'assistant' else message.role) ~ '|>' -}}
    {%- if message.content -%}{{- '<|content_text|>' ~ message.content ~ '<|end_message|>' -}}{%- endif -%}
    {%- for call in message.tool_calls -%}
        {{- ('' if loop.first else '<|message_model|>') ~ call.function.name -}}
        {{- '<|content_invoke_tool_json|>{"name": ' ~ call.function.name | tojson -}}
        {{- ', "args": ' ~ call.function.arguments | tojson ~ '}<|end_message|>' -}}
    {%- endfor -%}
    {{- '<|content_model_end_sampling|>' if message.role == 'assistant' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|message_model|>' -}}{%- endif -%}
"""
_APERTUS = """\
{%- set state = namespace(open=false) -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '' if state.open else '<|assistant_start|>' -}}
        {{- message.content -}}
        {%- set state.open = message.tool_calls and true -%}
        {%- for call in message.tool_calls -%}
            {{- '<|tools_prefix|>[' if loop.first else ', ' -}}
            {{- '{"' ~ call.function.name ~ '": ' ~ call.function.arguments | tojson ~ '}' -}}
            {{- ']<|tools_suffix|>' if loop.last -}}
        {%- endfor -%}
        {{- '' if state.open else '<|assistant_end|>' -}}
    {%- elif message.role == 'tool' -%}
        {{- '[' ~ message.content ~ ']' -}}
    {%- else -%}
        {{- '<|' ~ message.role ~ '_start|>' ~ message.content ~ '<|assistant_end|>' -}}
        {%- set state.open = false -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not state.open -%}{{- '<|assistant_start|>' -}}{%- endif -%}
"""
_FORMS = {
    "muse_glimmer": (_MUSE, "<|start|> <|message|>", "<|eot|> <|eom|>", "<atem:invoke"),
    "muse_spark": (_MUSE, "<|start|> <|message|>", "<|eot|> <|eom|>", "<atem:invoke"),
    "apertus": (
        _APERTUS,
        "<|system_start|> <|user_start|> <|assistant_start|> <|tools_prefix|> <|tools_suffix|>",
        "<|assistant_end|>",
        "",
    ),
    "inkling": (
        _INKLING,
        "<|message_user|> <|message_model|> <|content_invoke_tool_json|> <|end_message|>",
        "<|content_model_end_sampling|>",
        "<|content_invoke_tool_json|>",
    ),
}


def subject_of(kind: str, folder: Path) -> AuditedModel:
    template, special, ends, _ = _FORMS[kind]
    added = AddedTokens(
        special=(*special.split(), *ends.split()), markup=(), ends=tuple(ends.split()), bos=None
    )
    backend = tiny_tokenizer(2036 + len(added.texts), added=added)
    write_tokenizer(folder, backend, template, added)
    config = {"model_type": kind, "eos_token_id": end_ids(backend, added)}
    (folder / "config.json").write_text(json.dumps(config))
    model = read(folder)
    family = model_family(Settings(), model.config, model.tokenizer)
    return AuditedModel(model.tokenizer, family, Preparer(model.tokenizer, family))


@pytest.mark.parametrize("kind", ["muse_glimmer", "muse_spark", "inkling"])
def test_a_format_without_a_reader_is_reported_at_the_start(kind, tmp_path):
    unread = unread_call(subject_of(kind, tmp_path))
    assert unread is not None
    assert _FORMS[kind][3] in unread


def test_a_call_that_is_read_is_no_alarm_though_its_result_is_in_the_same_turn(tmp_path):
    subject = subject_of("apertus", tmp_path)
    assert subject.family.name == "apertus"
    assert unread_call(subject) is None


@pytest.mark.thorough
def test_a_template_that_writes_nothing_for_null_is_no_alarm(tmp_path):
    nothing = ("{{- value | tojson -}}", "{{- value | tojson if value is not none -}}")
    page = page_of(folder_of("nested_arguments", tmp_path, nothing))
    assert page.is_fine, page.rows
    assert "6 of 6 kinds read" in rows_of(page, "calls")[0]
