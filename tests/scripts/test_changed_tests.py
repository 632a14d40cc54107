"""Which tests a change concerns: those that need what changed, and its mutants."""

import subprocess

import pytest

from scripts.changed_tests import MUTANT_TEST, ROOT, Repository, changed_files, read_repository, selected

SOURCES = {
    "start_llm": "",
    "start_llm.__main__": "from start_llm.cli import main",
    "start_llm.cli": "def main():\n    from start_llm.engine.loop import Loop",
    "start_llm.engine": "",
    "start_llm.engine.loop": "from ..core import errors",
    "start_llm.core.errors": "",
    "start_llm.formats.qwen": "",
    "install_and_run": "",
    "scripts.probe": "import talking",
    "scripts.talking": "",
    "scripts.tiny": "",
    "tests.conftest": "from scripts import tiny\ndef ends():\n    from tests.sdk.endpoints import opened",
    "tests.cache.conftest": "import tests.cache.fakes",
    "tests.cache.fakes": "from start_llm.formats import qwen",
    "tests.cache.test_plan": "",
    "tests.cache.deep.test_store": "",
    "tests.corpus": "import importlib\nimportlib.import_module(f'{__name__}.{1}')",
    "tests.corpus.cases": "",
    "tests.sdk.endpoints": "import start_llm.engine.loop",
    "tests.sdk.test_sdk": "from tests.sdk.endpoints import opened",
    "tests.test_corpus": "from tests.corpus import CASES",
    "tests.test_errors": "from start_llm.core.errors import Refusal",
    "tests.test_program": "COMMAND = ['-m', 'start_llm']",
    "tests.test_scripts": "NAME = 'probe'",
    "tests.test_install": "SCRIPT = 'install_and_run.py'",
    "tests.test_readme": "TEXT = (ROOT / 'README.md').read_text()",
    "tests.test_clients": "import pytest\nimport start_llm.engine.loop\npytestmark = [pytest.mark.clients]",
    "tests.test_weights": "import pytest\nimport start_llm.engine.loop\npytestmark = [pytest.mark.real]",
}
PACKAGES = {"start_llm", "start_llm.engine", "tests.corpus"}
MUTANTS = {
    "01_stale.mutant": "bug: b\ntest: tests/test_errors.py::test_x\n\nin: start_llm/cli.py::main\nold:\n"
}
EVERY = sorted(
    f"{name.replace('.', '/')}.py"
    for name in SOURCES
    if name.rpartition(".")[2].startswith("test_")
    and name not in ("tests.test_clients", "tests.test_weights")
)


def path_of(module: str) -> str:
    return module.replace(".", "/") + ("/__init__.py" if module in PACKAGES else ".py")


REPOSITORY = Repository(SOURCES, {module: path_of(module) for module in SOURCES}, MUTANTS)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["tests/test_errors.py"], ["test_errors"]),
        (["start_llm/core/errors.py"], ["sdk/test_sdk", "test_errors", "test_program"]),
        (["start_llm/engine/loop.py"], ["sdk/test_sdk", "test_program"]),
        (["start_llm/engine/__init__.py"], ["sdk/test_sdk", "test_program"]),
        (["start_llm/cli.py"], ["test_program"]),
        (["start_llm/formats/qwen.py"], ["cache/deep/test_store", "cache/test_plan", "test_program"]),
        (["tests/cache/conftest.py"], ["cache/deep/test_store", "cache/test_plan"]),
        (["tests/corpus/cases.py"], ["test_corpus"]),
        (["tests/corpus/plain.jinja"], ["test_corpus"]),
        (["tests/sdk/answers/one.json"], ["sdk/test_sdk"]),
        (["scripts/talking.py"], ["test_scripts"]),
        (["install_and_run.py"], ["test_install"]),
        (["README.md"], ["test_readme"]),
        (["docs/notes.md", "scripts/note.txt"], []),
        (["start_llm/gone.py"], []),
        (["README.md", "tests/corpus/cases.py"], ["test_corpus", "test_readme"]),
    ],
)
def test_a_change_concerns_what_needs_it(changed, tests):
    files = [argument for argument in selected(REPOSITORY, changed) if "::" not in argument]
    assert files == [f"tests/{name}.py" for name in tests]


@pytest.mark.parametrize("changed", ["scripts/tiny.py", "tests/conftest.py", "pyproject.toml"])
def test_what_all_tests_share_concerns_all_of_them(changed):
    assert selected(REPOSITORY, [changed])[: len(EVERY)] == EVERY


@pytest.mark.parametrize(
    "changed", ["start_llm/cli.py", "tests/test_errors.py", "tests/mutants/01_stale.mutant"]
)
def test_a_mutant_runs_when_its_file_its_target_or_its_test_changes(changed):
    assert selected(REPOSITORY, [changed])[-1] == f"{MUTANT_TEST}[01_stale]"


def test_another_mutant_does_not_run():
    assert not any("::" in argument for argument in selected(REPOSITORY, ["start_llm/engine/loop.py"]))


def test_a_change_is_what_was_committed_what_was_not_and_what_is_new(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for number, name in enumerate(["old", "committed", "edited"]):
        (tmp_path / name).write_text("1")
        git("add", ".")
        git("commit", "-m", str(number))
    (tmp_path / "edited").write_text("2")
    (tmp_path / "new").write_text("1")
    assert changed_files(tmp_path, None) == ["edited", "new"]
    assert changed_files(tmp_path, "HEAD~2") == ["committed", "edited", "new"]
    git("update-ref", "refs/remotes/origin/main", "HEAD~2")
    assert changed_files(tmp_path, None) == ["committed", "edited", "new"]


@pytest.mark.long
def test_in_this_repository_a_format_concerns_its_corpus_and_not_the_cache():
    repository = read_repository(ROOT)
    chosen = selected(repository, ["start_llm/formats/kimi.py"])
    assert {"tests/output/test_splitter.py", "tests/formats/test_registry.py"} <= {*chosen}
    assert "tests/cache/test_eviction.py" not in chosen
    assert "tests/engine/test_loop.py" in selected(repository, ["start_llm/engine/loop.py"])
    assert {*selected(repository, ["tests/templates/kimi.jinja"])} >= {"tests/templates/test_traits.py"}
