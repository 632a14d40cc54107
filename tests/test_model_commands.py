"""`start_llm models`, `pull`, `fit` and `rm`, as a user types them."""

import argparse
import io
import json
import shutil
from pathlib import Path

import pytest

from start_llm.cli import main
from start_llm.commands import model_commands
from start_llm.commands.model_commands import remove_model
from start_llm.core.errors import SettingsError
from start_llm.library.hub import Hub
from start_llm.library.well_known import WELL_KNOWN
from start_llm.wiring.model_places import model_places, served_models
from tests.flat_settings import settings_of
from tests.models.fake_hub import hub_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A user without any models but those of the repository."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("start_llm.library.hub.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def model_dir(home, tiny_model, monkeypatch) -> Path:
    folder = home / "mine"
    shutil.copytree(tiny_model("qwen3", hidden=64, layers=1), folder / "lab" / "tiny")
    monkeypatch.setenv("MODEL_DIR", str(folder))
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_models_are_listed_in_columns(model_dir, capsys):
    status, out, _ = run(capsys, "models")
    assert status == 0
    head, demo, tiny = out.splitlines()
    assert head.split() == ["model", "place", "type", "size", "bits", "fits", "context", "tok/s"]
    assert demo.split()[:3] == ["demo", "models", "qwen3"]
    assert tiny.split()[:3] == ["lab/tiny", "model-dir", "qwen3"]
    assert tiny.split()[-4:] == ["-", "yes", "131,072", "-"]
    assert head.index("place") == demo.index("models") == tiny.index("model-dir")


def test_incomplete_and_unsupported_ones_are_marked(model_dir, capsys):
    config = model_dir / "lab" / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "nothing"}))
    assert run(capsys, "models")[1].splitlines()[-1].split()[-3] == "no"
    (config.parent / "model.safetensors").unlink()
    assert "incomplete" in run(capsys, "models")[1]


def test_without_models_the_way_to_one_is_shown(home, monkeypatch, capsys):
    monkeypatch.setattr(model_commands, "model_places", lambda *_: ())
    status, out, _ = run(capsys, "models")
    assert (status, "start_llm pull REPO" in out) == (0, True)


def test_the_flag_wins_over_the_environment(model_dir, home, capsys):
    (home / "empty").mkdir()
    assert "lab/tiny" not in run(capsys, "models", "--model-dir", str(home / "empty"))[1]


@pytest.mark.parametrize("command", ["models", "fit x", "rm x"])
def test_a_model_dir_that_is_not_there_is_named(home, command, capsys):
    status, _, errors = run(capsys, *command.split(), "--model-dir", "/no/such/folder")
    assert status == 2
    assert "MODEL_DIR='/no/such/folder': no such folder." in errors


def test_fit_shows_the_arithmetic_of_a_folder(model_dir, capsys):
    status, out, _ = run(capsys, "fit", str(model_dir / "lab" / "tiny"))
    assert status == 0
    assert out.splitlines()[0].startswith("tiny on ")
    for word in ("weights", "layers", "cache", "computing", "together", "window", "speed"):
        assert any(line.split()[:1] == [word] for line in out.splitlines()), word


def test_fit_takes_a_name_of_the_list_and_without_one_the_default(model_dir, capsys, monkeypatch):
    assert run(capsys, "fit", "lab/tiny")[1].startswith("lab/tiny on ")
    monkeypatch.setattr(model_commands, "model_name", lambda _: "lab/tiny")
    assert run(capsys, "fit")[1].startswith("lab/tiny on ")


def test_fit_judges_each_model_of_a_folder_and_all_together(model_dir, tiny_model, capsys):
    shutil.copytree(tiny_model("llama", hidden=64, layers=1), model_dir / "second")
    status, out, _ = run(capsys, "fit")
    assert status == 0
    for name in ("lab/tiny", "second"):
        assert any(line.startswith(f"{name} on ") for line in out.splitlines())
    last = out.splitlines()[-1]
    assert last.startswith("Beside each other they stay loaded: ")
    assert run(capsys, "fit", "second")[1].startswith("second on ")
    (model_dir / "second" / "model.safetensors").unlink()
    status, out, _ = run(capsys, "fit")
    assert status == 1
    assert "second cannot be judged. " in out
    assert "it lacks model.safetensors" in out
    assert "lab/tiny on " in out


@pytest.mark.parametrize("arguments", [["lab/tiny"], []])
def test_fit_warns_of_uniform_4_bits_and_names_the_better_scheme(
    model_dir, tiny_model, capsys, monkeypatch, arguments
):
    shutil.copytree(tiny_model("llama", hidden=64, layers=1), model_dir / "second")
    for variables, is_warned in (
        ({"KV_BITS": "4"}, True),
        ({"KV_BITS": "8"}, False),
        ({"KV_BITS": "4", "PROMPT_CACHE": "off"}, False),
        ({"KV_BITS": "4", "PROMPT_CACHE": "on", "KV_QUANT_SCHEME": "turboquant"}, False),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        out = run(capsys, "fit", *arguments)[1]
        assert ("With uniform 4 bits, 6 to 18 % of the likeliest tokens change" in out) == is_warned
        assert ("KV_QUANT_SCHEME=turboquant" in out) == is_warned


def test_fit_knows_well_known_models_without_a_network(home, capsys):
    status, out, _ = run(capsys, "fit", "mlx-community/Kimi-K2-Instruct-4bit")
    assert status == 1
    assert "does not fit: weights and computing need 538" in out
    assert "61 x latent attention: (512 + 64) x 2 bytes" in out


def test_fit_of_what_is_nowhere_is_an_error(home, capsys):
    status, _, errors = run(capsys, "fit", "nobody/nothing")
    assert status == 2
    assert "is not on this machine, and the hub did not help" in errors
    status, _, errors = run(capsys, "fit", "nothing")
    assert (status, "is no folder, none of `models`" in errors) == (2, True)


def test_the_document_holds_what_the_command_prints(capsys):
    table = run(capsys, "fit", "--table", "--format", "markdown")[1]
    page = (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")
    begin, end = "<!-- start_llm fit --table --format markdown -->\n", "<!-- end -->"
    assert page.partition(begin)[2].partition(end)[0].strip() == table.strip()


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize(("width", "tables"), [(80, 5), (120, 3), (240, 2)])
def test_a_terminal_gets_tables_with_columns_that_fit_it(width, tables, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    printed = run(capsys, "fit", "--table")[1]
    assert "|" not in printed
    blocks = printed.split("\n\n")
    assert len(blocks) == tables
    assert all(len(block.splitlines()) == len(WELL_KNOWN) + 1 for block in blocks)
    machines = [line for block in blocks[1:] for line in block.splitlines()]
    assert max(map(len, machines)) <= width
    assert "M3 Ultra 512 GB" in blocks[-1]


@pytest.mark.parametrize("name", ["x", "../x", "a/b/c"])
def test_pull_takes_names_of_repositories_only(home, name, capsys):
    status, _, errors = run(capsys, "pull", name)
    assert status == 2
    assert errors.startswith(f"start_llm cannot download {name}.\n")
    assert "not the name of a repository" in errors


def test_pull_without_a_network_says_so(home, capsys):
    status, _, errors = run(capsys, "pull", "lab/tiny")
    assert (status, "The hub cannot be reached: " in errors) == (2, True)
    assert "Errno" not in errors
    assert "ConnectError" not in errors


def test_a_search_lists_what_the_hub_has_for_mlx(home, monkeypatch, capsys):
    with hub_of({}) as hub:
        hub.results = [{"id": "lab/tiny-4bit", "downloads": 1234}, {"id": "lab/tiny"}]
        monkeypatch.setattr(model_commands, "Hub", lambda: Hub(home, endpoint=hub.url))
        status, out, _ = run(capsys, "search", "tiny", "4bit")
        assert status == 0
        assert [line.split() for line in out.splitlines()[1:3]] == [
            ["lab/tiny-4bit", "1,234"],
            ["lab/tiny", "0"],
        ]
        assert "start_llm pull NAME" in out
        assert hub.asked["search"] == ["tiny 4bit"]
        assert hub.asked["filter"] == ["mlx"]
        hub.results = []
        assert run(capsys, "search", "nothing") == (
            1,
            "No model for MLX on the hub has 'nothing' in its name.\n",
            "",
        )
        hub.status = 503
        status, _, errors = run(capsys, "search", "tiny")
        assert (status, errors.startswith("start_llm cannot search the hub.\n")) == (2, True)


def test_a_search_without_a_network_says_so(home, capsys):
    status, _, errors = run(capsys, "search", "tiny")
    assert (status, "The hub cannot be reached: " in errors) == (2, True)


def removal(model_dir: Path, answer: str, *, yes: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    options = argparse.Namespace(repo="lab/tiny", yes=yes)
    status = remove_model(settings_of(model_dir=str(model_dir)), options, out, io.StringIO(answer))
    return status, out.getvalue()


@pytest.mark.parametrize("answer", ["y\n", "YES\n"])
def test_rm_asks_and_a_yes_removes(model_dir, answer):
    status, out = removal(model_dir, answer)
    assert status == 0
    assert out.startswith("Remove lab/tiny (")
    assert not (model_dir / "lab" / "tiny").exists()


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "perhaps\n"])
def test_rm_asks_and_anything_else_keeps(model_dir, answer):
    status, out = removal(model_dir, answer)
    assert status == 1
    assert out.endswith("Nothing was removed.\n")
    assert (model_dir / "lab" / "tiny" / "config.json").is_file()


def test_rm_with_yes_does_not_ask(model_dir):
    status, out = removal(model_dir, "", yes=True)
    assert (status, out) == (0, f"Removed {model_dir / 'lab' / 'tiny'}\n")


def test_rm_of_what_is_not_listed_or_not_the_users_is_refused_before_the_question(home, capsys):
    for name, words in (("nothing", "There is no model"), ("demo", "part of this repository")):
        status, out, errors = run(capsys, "rm", name)
        assert (status, out, words in errors) == (2, "", True)


def test_a_model_dir_is_seen_from_the_repository(monkeypatch):
    monkeypatch.chdir("/")
    folders = {place.name: place.folder for place in model_places(settings_of(model_dir="models"), Hub())}
    assert folders["model-dir"] == ROOT / "models"


def test_a_model_beside_one_of_its_name_in_model_dir_is_refused(tmp_path):
    for place in ("models/one", "elsewhere/one", "elsewhere/two"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "models")
    elsewhere = tmp_path / "elsewhere"
    settings = settings_of(model_dir=str(tmp_path / "link"))
    name, folders = served_models(settings, elsewhere / "two")
    assert (name, folders.keys()) == ("two", {"one", "two"})
    assert served_models(settings, tmp_path / "models" / "one")[0] == "one", "it is this one"
    with pytest.raises(SettingsError, match="MODEL_PATH: two models are called 'one'"):
        served_models(settings, elsewhere / "one")


def test_a_model_has_its_own_name_although_a_link_to_it_stands_in_front(tmp_path):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text("{}")
    (tmp_path / "default").symlink_to(tmp_path / "qwen")
    name, folders = served_models(settings_of(model_dir=str(tmp_path)), tmp_path / "qwen")
    assert (name, folders.keys()) == ("qwen", {"default", "qwen"})
