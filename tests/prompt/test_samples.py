"""The form of a model's text is recognized by what its template renders, too."""

import json
from pathlib import Path

import pytest

from start_llm.formats import registry
from start_llm.models.loader import load
from start_llm.prompt.template_audit.samples import rendered_samples
from tests.prompt.fakes import FakeTokenizer
from tests.serving import serving
from tests.templates.traits import TRAITS, trait_folder, trait_tokenizer

COMPOSED = """
{%- set ns = '' -%}
{%- for message in messages -%}
    {{- '[' ~ message.role ~ ']' -}}
    {{- '<' ~ ns ~ 'think>' ~ message.thinking ~ '</' ~ ns ~ 'think>' if message.thinking else '' -}}
    {{- message.content -}}
    {%- for call in message.tool_calls -%}
        {{- '<tool' ~ '_call><' ~ 'function=' ~ call.function.name ~ '></function></tool' ~ '_call>' -}}
    {%- endfor -%}
{%- endfor -%}
"""
HEAD = "{{ raise_exception('no') if messages[0].role == 'system' }}"


def recognized(template: str) -> tuple[str, str | None]:
    """The family and the closing mark of its reasoning, by the rendering alone."""
    family = registry.detect({}, template, (), rendered_samples(FakeTokenizer(template)))
    return family.name, family.reasoning and family.reasoning.closing


@pytest.mark.parametrize("head", ["", HEAD], ids=["plain", "no system message"])
@pytest.mark.parametrize(("ns", "family"), [("", "qwen3"), ("seed:", "seed_oss"), ("mm:", "qwen3")])
def test_marks_that_a_template_puts_together_are_found(head, ns, family):
    composed = head + COMPOSED.replace("set ns = ''", f"set ns = '{ns}'")
    assert registry.detect({}, composed, ()).name == "generic"
    assert recognized(composed) == (family, f"</{ns}think>")


def test_a_mark_that_only_the_call_for_reasoning_has_is_found():
    asking = "{{ '<thi' ~ 'nk>' if enable_thinking else '<think></thi' ~ 'nk>' if thinking is false }}"
    assert recognized(COMPOSED.replace("message.thinking", "message.none") + asking) == ("qwen3", "</think>")


def test_a_template_that_refuses_everything_tells_nothing():
    assert rendered_samples(FakeTokenizer("{{ raise_exception('no') }}")).strip() == ""


COMPOSES = frozenset({"open_and_close"})
"""Traits whose template has no mark of reasoning in one piece."""


@pytest.mark.parametrize("trait", sorted(TRAITS.keys() - COMPOSES))
def test_what_a_trait_renders_tells_no_other_family_than_its_files(trait):
    tokenizer = trait_tokenizer(trait)
    files = {}, tokenizer.chat_template, tokenizer.added_tokens
    assert registry.detect(*files, rendered_samples(tokenizer)) == registry.detect(*files)


@pytest.fixture(scope="module")
def rendered_in_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose conversations mlx_lm renders itself."""
    folder = trait_folder("arguments_as_text", tmp_path_factory.mktemp("python"))
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template_type": "deepseek_v32"}
    path.write_text(json.dumps(config))
    return folder


def test_a_renderer_in_python_is_asked_for_its_marks(rendered_in_python):
    tokenizer = load(rendered_in_python).tokenizer
    assert tokenizer.chat_template == ""
    samples = rendered_samples(tokenizer)
    assert '<｜DSML｜invoke name="probetool">' in samples
    family = registry.detect({}, tokenizer.chat_template, (), samples)
    assert family.reasoning
    assert family.reasoning.closing == "</think>"


@pytest.mark.thorough
def test_a_server_starts_with_a_renderer_in_python(rendered_in_python):
    question = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
    with serving(rendered_in_python) as server:
        assert "enable_thinking switches thinking" in server.printed()
        assert server.post("/v1/chat/completions", question)["usage"]["completion_tokens"] == 4
