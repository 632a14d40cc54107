"""What is rendered before a model is loaded, and how long that takes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import tiny_models
from start_llm.core.errors import ModelError
from start_llm.hosting.template_trial import TrialTokenizer, templates_in
from start_llm.library.folders import check_loadable
from start_llm.models.trial import TemplateTrials
from start_llm.prompt.template_audit.samples import rendered_samples
from tests.conftest import TinyModel
from tests.templates.traits import TRAITS, trait_tokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", TRAITS)
def test_a_template_is_rendered_as_the_server_renders_it(name: str):
    """With what transformers puts into a template, and without transformers."""
    own = trait_tokenizer(name)
    special_tokens = {
        f"{kind}_token": own._wrapper.special_tokens_map.get(f"{kind}_token")
        for kind in ("bos", "eos", "pad")
    }
    assert rendered_samples(TrialTokenizer(own.chat_template, special_tokens)) == rendered_samples(own)


def test_the_process_of_the_trial_imports_nothing_slow():
    code = "import sys, start_llm.hosting.template_trial; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"mlx.core", "transformers", "numpy", "start_llm.models"} & {*done.stdout.split()}


def test_a_template_that_has_passed_is_not_tried_again(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    trials = TemplateTrials()
    trials.check(tmp_path)
    began = time.perf_counter()
    trials.check(tmp_path)
    assert time.perf_counter() - began < 0.05


def test_a_second_template_is_rendered_too(tmp_path: Path):
    """The one for tools, of which transformers knows two places."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ '%9999999999d' % 1 }}")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}'
    )
    assert templates_in(tmp_path) == ["a", "b", "{{ messages }}", "{{ '%9999999999d' % 1 }}"]
    with pytest.raises(ModelError, match="takes more than a gigabyte"):
        TemplateTrials().check(tmp_path)


@pytest.mark.thorough
def test_templates_are_tried_though_a_folder_and_a_dead_link_are_called_like_one(tmp_path: Path):
    (tmp_path / "a.jinja").mkdir()
    (tmp_path / "b.jinja").symlink_to(tmp_path / "nowhere")
    (tmp_path / "chat_template.jinja").write_text("{{ '%9999999999d' % 1 }}")
    assert templates_in(tmp_path) == ["{{ '%9999999999d' % 1 }}"]
    with pytest.raises(ModelError, match="takes more than a gigabyte"):
        TemplateTrials().check(tmp_path)


def test_a_model_whose_trial_ends_in_an_error_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("start_llm.models.trial._MODULE", "start_llm.no_such_module")
    with pytest.raises(ModelError, match=r"cannot be tried: .* ends with status 1"):
        TemplateTrials().check(tmp_path)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_the_counts_of_a_model_are_those_of_its_weights(family: str, tiny_model: TinyModel):
    check_loadable(tiny_model(family, hidden=128, layers=2))
