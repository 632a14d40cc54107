"""What documents say of the program: clients, formats, model types, settings, limits, endpoints, figures."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from scripts.model_types import model_types
from start_llm.access.backend_secret import OWN_HEADERS
from start_llm.config.settings import all_rows
from start_llm.core.errors import NotFound
from start_llm.formats.registry import MODEL_FORMATS
from start_llm.launch.clients import CLIENTS
from start_llm.protocols.routes import ROUTES, RouteTable
from tests.launch.test_suitability import CUT_BY_THE_DEMO

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CLAUDE.md")),
    *(ROOT / "docs").rglob("*.md"),
]
SHAPES = {
    "20 tool turns, append-only": "append-only tool turns",
    "four sub-agents with one system prompt at once": "4 sub-agents at once",
    "branch and return": "branch and return",
    "a chat resumed after 20 others": "resumed after other chats",
    "a billing header that changes with each request": "billing header changes",
    "tools in another order each time": "tools in another order",
}
"""Rows of the README's table, by their names in `benchmarks/RESULTS.md`."""

KV_BITS = {
    "**Gemma 3 270M**, prose": "prompt-cache.md",
    "code": "loop.py",
    "JSON": "codex.json",
    "a mix": "ARCHITECTURE.md",
    "demo model, worst of four texts": "demo, LICENSE",
    "random tiny qwen3": "tiny qwen3",
}
"""Rows of the table in prompt-cache.md, by their names in `benchmarks/RESULTS.md`."""
KINDS_OF_REUSE = ("to the token", "at checkpoints")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def rows_of(text: str) -> Iterator[list[str]]:
    """The rows of the tables of a document."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def section(document: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    return document.partition(f"\n## {heading}")[2].partition("\n## ")[0]


def lowest_efficiencies(results: str) -> Mapping[tuple[str, str], float]:
    """The lowest efficiency of each shape and server, of a table with a column for each family and server."""
    head, *rows = rows_of(section(results, "Prompt tokens that are computed twice"))
    servers = {column: name.partition(": ")[2] for column, name in enumerate(head) if ": " in name}
    lowest: dict[tuple[str, str], float] = {}
    for row in rows:
        for column, server in servers.items():
            if computed := count(row[column]):
                efficiency = count(row[1]) / computed
                lowest[row[0], server] = min(lowest.get((row[0], server), 2.0), efficiency)
    return lowest


def count(cell: str) -> int:
    """The first number of a cell, which may have commas; 0 if it begins with none."""
    number = re.match(r"[≈ ]*([\d,]+)", cell)
    return int(number[1].replace(",", "")) if number else 0


def test_the_table_of_the_readme_has_the_lowest_figures_of_the_results():
    lowest = lowest_efficiencies(read(ROOT / "benchmarks" / "RESULTS.md"))
    servers = ("start_llm", "mlx_lm.server", "no cache")
    table = {row[0]: row[1:] for row in rows_of(section(read(README), "See it work")) if row[0] in SHAPES}
    assert table == {
        row: [f"{lowest[shape, server]:.2f}" if (shape, server) in lowest else "" for server in servers]
        for row, shape in SHAPES.items()
    }


def test_the_table_of_kv_bits_has_the_figures_of_the_results():
    measured = {
        row[0]: [re.sub(r" \(.*?\)", "", cell).replace(" ", ", ") for cell in row[1:]]
        for row in rows_of(section(read(ROOT / "benchmarks" / "RESULTS.md"), "KV bits"))
    }
    documented = {
        row[0]: row[1:] for row in rows_of(section(read(ROOT / "docs" / "prompt-cache.md"), "KV bits"))
    }
    assert {row: documented[row] for row in KV_BITS} == {row: measured[text] for row, text in KV_BITS.items()}


def test_model_types_are_counted():
    text = read(ROOT / "docs" / "model-types.md")
    cached = {row[0]: row[2] for row in rows_of(text) if row[2] in KINDS_OF_REUSE}
    assert cached.keys() == {*model_types()}
    exact, at_checkpoints = (sum(kind == value for value in cached.values()) for kind in KINDS_OF_REUSE)
    assert f"Prompt cache: {exact} to the token, {at_checkpoints} at checkpoints, 0 none." in text
    assert f"works with {len(cached)} [model types]" in read(README)


def test_the_readme_and_the_document_of_clients_name_each_client():
    (started,) = re.findall(r"In your project folder, start (.*):\n", read(README))
    assert {*re.findall(r"`(\w+)`", started)} == CLIENTS.keys()
    (suited,) = re.findall(r"The demo model can read the prompts of (.*), not", read(README))
    assert {*re.findall(r"`(\w+)`", suited)} == CLIENTS.keys() - {*CUT_BY_THE_DEMO}
    assert CLIENTS.keys() <= {row[0] for row in rows_of(read(ROOT / "docs" / "clients.md"))}


def test_the_api_document_names_each_format():
    formats = section(read(ROOT / "docs" / "api.md"), "Tool calls").partition("\n\n")[2].partition("\n\n")[0]
    letters = re.sub(r"[^a-z0-9]", "", formats.lower())
    assert [model.name for model in MODEL_FORMATS if re.split(r"[_\d]", model.name)[0] not in letters] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.sample(1)
def test_lessons_and_decisions_that_a_document_cites_are_there(document: Path):
    lessons = {*re.findall(r"^## (\d+)\.", read(ROOT / ".context" / "LESSONS.md"), re.MULTILINE)}
    decisions = {str(int(path.name[:4])) for path in (ROOT / "docs" / "adr").iterdir()}
    assert {*re.findall(r"\b[Ll]essons? (\d+)", read(document))} <= lessons
    assert {*re.findall(r"\bADR (\d+)", read(document))} <= decisions


def test_defaults_that_stand_behind_a_variable_are_right():
    defaults = {row.name: row.default for row in all_rows()}
    named = [
        (name, value)
        for document in DOCUMENTS
        if "adr" not in document.parts
        for name, value in re.findall(r"`([A-Z][A-Z_]+)` \(([\d.]+)\)", read(document))
    ]
    assert named
    assert [(name, value) for name, value in named if defaults[name] != value] == []


def sources() -> str:
    files = [
        path for name in ("start_llm", "tests", "scripts", "benchmarks") for path in (ROOT / name).rglob("*")
    ]
    return "\n".join(read(path) for path in files if path.suffix in (".py", ".sh"))


NAME = r"[A-Z]+_[A-Z_\d]+|[a-z]+(?:_[a-z\d]+)+|x-start-llm-[a-z-]+"
"""A variable, a field or function, a header."""


def test_names_of_documents_are_names_of_the_program():
    """`tests/http/test_metrics.py` compares those of metrics.md with what a server returns."""
    texts = [read(path) for path in DOCUMENTS if path.name != "metrics.md" and "adr" not in path.parts]
    named = {name for text in texts for name in re.findall(rf"`({NAME})[`=:(]", text)}
    code = sources()
    headers = {f"{OWN_HEADERS}{name}" for name in re.findall(r"\{OWN_HEADERS\}([a-z-]+)", code)}
    known = {*re.findall(r"\w+", code), *re.findall(r"x-start-llm-[a-z-]+", code)}
    assert len(named) > 200
    assert sorted(named - headers - known) == []


def documented_routes() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        if document.name != "CONTRIBUTING.md":  # its recipe adds an endpoint
            yield from re.findall(r"`(GET|POST|DELETE) (/[\w./{}-]*)[`?]", read(document))


@pytest.mark.parametrize(("method", "path"), sorted({*documented_routes()}))
@pytest.mark.sample(1)
def test_an_endpoint_that_a_document_names_is_there(method: str, path: str):
    assert RouteTable(ROUTES).find(method, path.replace("{id}", "name"))


def test_what_is_no_endpoint_is_found():
    with pytest.raises(NotFound):
        RouteTable(ROUTES).find("GET", "/v1/gone")


LIMITS = (
    ("ARCHITECTURE.md", "A key has up to {} variants", "transcripts.transcript_store:_MAX_VARIANTS"),
    ("ARCHITECTURE.md", "give way for {:g} s", "engine.schedule:BACKGROUND_PATIENCE_S"),
    ("api.md", "at most {:,} values", "protocols.fields:MOST_VALUES"),
    ("api.md", "After {:g} s it is served as any other request", "engine.schedule:BACKGROUND_PATIENCE_S"),
    ("api.md", "is one like any other {:g} s after it came", "engine.schedule:BACKGROUND_PATIENCE_S"),
    ("api.md", "of this API key is remembered: the last {} are", "transcripts.divergence:_MOST"),
    ("api.md", "a list of up to {:,} of either", "protocols.openai.embeddings:_MOST_INPUTS"),
    ("api.md", "A text has at most {:,} tokens", "engine.embedding:LONGEST_TEXT"),
    ("api.md", "one text for at most {:g} s", "server.embedding_page:_PATIENCE_OF_A_TEXT_S"),
    ("api.md", "a request for at most {:g} s", "server.embedding_page:_PATIENCE_S"),
    ("api.md", "one side may be {} times as long", "images.checking:MAX_RATIO"),
    ("api.md", "a definition has at most {:,} characters", "output.grammar.enforcer:_MAX_DEFINITION"),
    ("api.md", "over at most {} levels", "output.grammar.enforcer:MAX_LEVELS"),
    ("api.md", "repeats a piece of at most {} tokens", "core.repetition:LONGEST_PERIOD"),
    ("api.md", "tokens for {:,} tokens ends", "core.repetition:RUNAWAY_TOKENS"),
    ("api.md", "keeps the list for {:g} s", "library.folders:_KEPT_S"),
    ("explain.md", "remembers up to {} requests of each session", "transcripts.recent:_MAX_OF_A_SESSION"),
    ("explain.md", "and {} in all, in memory only", "transcripts.recent:_MOST"),
    ("explain.md", "on both sides: {} tokens before it", "transcripts.explain:_BEFORE"),
    ("explain.md", "tokens before it and {} from it on", "transcripts.explain:_BEHIND"),
    ("proxy.md", "one of which is sent every {:g} s", "proxy.launcher:_CHECK_EVERY_S"),
    ("status-page.md", "| The last {}, with up to", "telemetry.activity:_MAX_CONVERSATIONS"),
    ("status-page.md", "with up to {} turns", "telemetry.activity:_MAX_TURNS"),
    ("status-page.md", "The last {} kinds of refusals", "telemetry.activity:_MAX_REFUSED"),
    ("status-page.md", "up to {} characters on each side", "telemetry.activity:_MAX_TEXT"),
    ("terminal.md", "up to {:,} lines wait for it", "telemetry.screen:_MOST_LINES"),
)
"""A document, a sentence of it with a limit, and the constant that is the limit."""


@pytest.mark.parametrize(("document", "sentence", "constant"), LIMITS)
@pytest.mark.sample(1)
def test_a_limit_that_a_document_names_is_that_of_the_program(document: str, sentence: str, constant: str):
    module, name = constant.split(":")
    limit = getattr(importlib.import_module(f"start_llm.{module}"), name)
    assert sentence.format(limit) in " ".join(read(ROOT / "docs" / document).split())
