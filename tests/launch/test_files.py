"""Files of clients: what TOML says, and what stays of what the client wrote itself."""

import datetime as dt
import json
import stat
import string
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.errors import LaunchError
from start_llm.launch.files import deep_merge, text_of, write_all

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = TEXTS | st.text(string.ascii_letters + "_-", min_size=1, max_size=6)
TOML = Path("config.toml")
LEAVES = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXTS
    | st.datetimes(timezones=st.just(dt.UTC))
    | st.dates()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@pytest.mark.thorough
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_whatever_is_written_as_toml_is_read_back(document):
    assert tomllib.loads(text_of(TOML, document)) == document


def test_toml_looks_as_one_would_write_it():
    document = {"a": {"x y": {"on": True}}, "model": 'a "b"', "list": [{"n": 1}, 2.5]}
    assert text_of(TOML, document) == ('model = "a \\"b\\""\nlist = [{n = 1}, 2.5]\n\n[a."x y"]\non = true\n')


def test_ours_wins_and_what_it_does_not_mention_stays():
    before = {"model": "old", "projects": {"/p": {"trust_level": "trusted"}}, "models": [1, 2]}
    ours = {"model": "new", "models": [3], "features": {"plugins": False}}
    assert deep_merge(before, ours) == {
        "model": "new",
        "projects": {"/p": {"trust_level": "trusted"}},
        "models": [3],
        "features": {"plugins": False},
    }


def test_files_are_for_their_owner_alone(tmp_path):
    folder = tmp_path / "clients" / "one"
    write_all(folder, {folder / "a.json": {"a": 1}, folder / "b.toml": {"b": "é"}})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.toml"]
    assert (folder / "b.toml").read_text() == 'b = "é"\n'


def test_what_a_client_wrote_stays_and_a_file_that_says_all_is_not_touched(tmp_path):
    path = tmp_path / "config.toml"
    write_all(tmp_path, {path: {"model": "a"}})
    path.write_text("# mine\n" + path.read_text() + '[projects."/p"]\ntrust_level = "trusted"\n')
    before = path.read_text(), path.stat().st_ino
    write_all(tmp_path, {path: {"model": "a"}})
    assert (path.read_text(), path.stat().st_ino) == before
    write_all(tmp_path, {path: {"model": "b"}})
    assert tomllib.loads(path.read_text()) == {
        "model": "b",
        "projects": {"/p": {"trust_level": "trusted"}},
    }


@pytest.mark.parametrize("junk", ["", "{", "[1]", "null"])
def test_a_file_that_holds_no_object_is_written_anew(tmp_path, junk):
    path = tmp_path / "a.json"
    path.write_text(junk)
    write_all(tmp_path, {path: {"a": 1}})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "clients").write_text("a file")
    with pytest.raises(LaunchError, match=r"clients.* cannot be written: Not a directory"):
        write_all(tmp_path / "clients" / "pi", {})
