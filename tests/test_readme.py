"""The commands in the README and the API document work, and links between documents lead somewhere."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import wait_for_health

ROOT = Path(__file__).resolve().parent.parent
README, API = ROOT / "README.md", ROOT / "docs" / "api.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE, GLOSSARY = ROOT / "docs" / "ARCHITECTURE.md", ROOT / "docs" / "glossary.md"
MAX_WORDS = {README: 900, ARCHITECTURE: 3000}
MAX_TERMS = 50


def blocks(document: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)


CURL_LINES = [
    line
    for document in (README, API)
    for block in blocks(document)
    for line in block.splitlines()
    if line.startswith("curl ")
]


@pytest.fixture(scope="module")
def server_on_8080() -> Iterator[None]:
    command = [sys.executable, "-m", "start_llm", "serve", "--no-proxy", "--demo", "--mlx-port", "8080"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_for_health(process, 8080)
        yield
    finally:
        process.terminate()
        assert process.wait(10) == 0


@pytest.mark.sample(8)
@pytest.mark.usefixtures("server_on_8080")
@pytest.mark.parametrize("line", CURL_LINES)
def test_curl_line_gets_an_answer(line: str) -> None:
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)
    if " -N " in line:
        events = [text.removeprefix("data: ") for text in done.stdout.splitlines() if text]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
    else:
        assert json.loads(done.stdout).get("error") is None


def test_the_documents_show_the_endpoints_with_curl() -> None:
    shown = "\n".join(CURL_LINES)
    assert all(
        path in shown
        for path in (
            "/v1/models",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/responses",
            "/stats",
        )
    )


def test_readme_names_the_test_command() -> None:
    assert any("python3 install_and_run.py --test" in block for block in blocks(README))


@pytest.mark.parametrize("document", MAX_WORDS, ids=lambda path: path.name)
def test_what_everybody_reads_is_short(document: Path) -> None:
    assert len(document.read_text(encoding="utf-8").split()) <= MAX_WORDS[document]


def anchors(document: Path) -> set[str]:
    """The fragments of a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(document: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = document.parent / path if path else document
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.sample(1)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    own = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in own if not leads_somewhere(document, link)] == []


def source_names() -> set[str]:
    """Every identifier in the project's Python files."""
    folders = [ROOT / name for name in ("start_llm", "tests", "benchmarks", "scripts")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return {name for path in files for name in re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8"))}


def is_there(name: str, identifiers: set[str]) -> bool:
    """True if a path, `package/module`, `package/module.name`, class or method exists. True for all else."""
    folder, slash, _ = name.partition("/")
    if not slash:
        return not re.fullmatch(r"[A-Z][a-z]\w*(\.\w+)?", name) or set(name.split(".")) <= identifiers
    bases = [base for base in (ROOT, ROOT / "start_llm") if folder and (base / folder).is_dir()]
    module, _, attribute = name.rpartition(".")
    return (
        not bases
        or folder == "logs"
        or any((base / name).exists() or (base / f"{name}.py").exists() for base in bases)
        or (attribute in identifiers and any((base / f"{module}.py").exists() for base in bases))
    )


NAMING = [
    ROOT / "CLAUDE.md",
    ROOT / ".context" / "LESSONS.md",
    *(path for path in DOCUMENTS if "adr" not in path.parts),
]


@pytest.mark.parametrize("document", NAMING, ids=lambda path: path.name)
@pytest.mark.sample(12)
def test_files_and_classes_that_a_document_names_are_there(document: Path) -> None:
    """Decisions (`docs/adr`) keep the names of their day."""
    names = set(re.findall(r"`([\w/.]+)`", document.read_text(encoding="utf-8")))
    identifiers = source_names()
    assert sorted(name for name in names if not is_there(name, identifiers)) == []


@pytest.mark.parametrize("name", ["engine/pressure", "engine/admission.gone", "Strand", "Batch.remove"])
def test_a_name_that_is_gone_is_found(name: str) -> None:
    assert not is_there(name, {"shortage", "remove"})


def glossary_names(text: str) -> list[str]:
    """The last name in backticks of each entry."""
    entries = re.findall(r"^- \*\*.+$", text, re.MULTILINE)
    return [re.findall(r"`([^`]+)`", entry)[-1] for entry in entries]


def definitions(text: str) -> Iterator[str]:
    """Every name that a source defines: classes, functions, types, variables, fields, arguments."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.TypeAlias(name=ast.Name(id=name)) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case _:
                pass


@pytest.mark.thorough
def test_every_term_of_the_glossary_is_a_name_of_the_program() -> None:
    names = glossary_names(GLOSSARY.read_text(encoding="utf-8"))
    sources = [*(ROOT / "start_llm").rglob("*.py"), ROOT / "tests" / "templates" / "traits.py"]
    defined = {name for path in sources for name in definitions(path.read_text(encoding="utf-8"))}
    assert MAX_TERMS // 2 < len(names) <= MAX_TERMS
    assert sorted(set(names) - defined) == []
