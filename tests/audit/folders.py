"""Model folders without weights, around the templates of the traits."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.tiny_models import end_ids, tiny_tokenizer, write_tokenizer
from start_llm.audit.audit_page import AuditReport, audit_folder
from start_llm.config.settings import Settings
from tests.templates.traits import TRAITS


def folder_of(trait: str, folder: Path, *changes: tuple[str, str]) -> Path:
    """Writes config, tokenizer and template. `changes` are texts of the template and what stands for them."""
    model, template = TRAITS[trait], TRAITS[trait].template
    for old, new in changes:
        assert old in template
        template = template.replace(old, new)
    backend = tiny_tokenizer(model.vocabulary, added=model.added)
    write_tokenizer(folder, backend, template, model.added)
    config = {"model_type": "qwen3", "eos_token_id": end_ids(backend, model.added)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def page_of(folder: Path) -> AuditReport:
    return audit_folder(Settings(), folder)


def rows_of(page: AuditReport, name: str) -> list[str]:
    """The values of a row, and of those below it that have no name of their own."""
    values: dict[str, list[str]] = {}
    current = ""
    for title, value in page.rows:
        current = title or current
        values.setdefault(current, []).append(value)
    return values[name]
