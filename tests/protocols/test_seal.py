"""Sealed reasoning open for this server and their tenant alone, and the key outlives the server."""

import base64
import os
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.protocols import seal as seal_module
from start_llm.protocols.seal import KEY_BYTES, Seal, Sealed, kept_key
from start_llm.wiring.from_settings import make_seal
from tests.flat_settings import settings_of

SEAL = Seal(bytes(range(KEY_BYTES)))
NAME = "aB3x" * 6
REASONING = "\nThe sea is deep. 🐟 \n"


@given(st.text(), st.binary(max_size=20))
def test_reasoning_comes_back_exactly(reasoning, tenant):
    assert SEAL.open(SEAL.seal(reasoning, NAME, tenant), tenant) == Sealed(reasoning, NAME)


@given(st.text(), st.binary(max_size=5), st.binary(max_size=5))
def test_another_tenant_opens_nothing(reasoning, tenant, other):
    if tenant != other:
        assert SEAL.open(SEAL.seal(reasoning, NAME, tenant), other) is None


def test_another_key_opens_nothing():
    assert Seal(bytes(KEY_BYTES)).open(SEAL.seal(REASONING, NAME, b"me"), b"me") is None


def test_it_is_the_same_each_time_and_safe_in_any_text():
    sealed = SEAL.seal(REASONING, NAME, b"me")
    assert sealed == SEAL.seal(REASONING, NAME, b"me")
    assert SEAL.seal("", NAME, b"")
    assert set(sealed) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_a_long_reasoning_is_packed():
    assert len(SEAL.seal(REASONING * 1000, NAME, b"")) < len(REASONING) * 100


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_nothing_that_is_damaged_is_opened(place, change):
    whole = bytearray(base64.urlsafe_b64decode(SEAL.seal(REASONING, NAME, b"me") + "=="))
    whole[place % len(whole)] ^= change
    assert SEAL.open(base64.urlsafe_b64encode(whole).decode(), b"me") is None


@given(st.integers(0, 10**6))
def test_nothing_that_is_cut_short_is_opened(length):
    sealed = SEAL.seal(REASONING, NAME, b"me")
    assert SEAL.open(sealed[: length % len(sealed)], b"me") is None


@given(st.text())
def test_what_is_no_seal_is_not_opened(text):
    assert SEAL.open(text, b"") is None


@pytest.mark.parametrize("length", [0, KEY_BYTES - 1, KEY_BYTES + 1])
def test_a_key_has_its_length(length):
    with pytest.raises(ValueError, match=str(length)):
        Seal(bytes(length))


def test_no_more_is_unpacked_than_reasoning_may_have(monkeypatch: pytest.MonkeyPatch):
    """Also where the key has become known to somebody."""
    sealed = SEAL.seal("x" * 1000, NAME, b"")
    monkeypatch.setattr(seal_module, "MAX_BYTES", 1025)
    assert SEAL.open(sealed, b"") == Sealed("x" * 1000, NAME)
    monkeypatch.setattr(seal_module, "MAX_BYTES", 1024)
    assert SEAL.open(sealed, b"") is None


@pytest.mark.parametrize("packed", [b"no zlib", zlib.compress(b"\xff"), zlib.compress(b"x")[:-1]])
def test_what_was_never_packed_here_is_not_opened_even_with_the_key(packed):
    whole = seal_module._VERSION + SEAL._mac(packed, b"") + packed
    assert SEAL.open(base64.urlsafe_b64encode(whole).decode(), b"") is None


# ---------------------------------------------------------------------------------------------------- the key


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path):
    path = tmp_path / "new" / "deeper" / "seal.key"
    key = kept_key(path)
    assert len(key) == KEY_BYTES
    assert kept_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["seal.key"], "a draft is left"


def test_two_places_have_two_keys(tmp_path: Path):
    assert kept_key(tmp_path / "a") != kept_key(tmp_path / "b")


def test_servers_that_start_together_have_one_key(tmp_path: Path):
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(kept_key, [tmp_path / "seal.key"] * 64))
    assert len(keys) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["seal.key"]


def test_a_key_that_others_might_read_becomes_its_owners_alone(tmp_path: Path):
    path = tmp_path / "seal.key"
    key = kept_key(path)
    path.chmod(0o644)
    assert kept_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def link_to_a_key(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(bytes(KEY_BYTES))
    link(path)


@pytest.mark.parametrize(
    "put",
    [Path.touch, lambda path: path.write_bytes(b"x" * 33), Path.mkdir, os.mkfifo, link, link_to_a_key],
    ids=["empty", "long", "folder", "pipe", "link", "link_to_a_key"],
)
def test_something_else_in_its_place_is_neither_read_nor_replaced(put, tmp_path: Path):
    path = tmp_path / "seal.key"
    put(path)
    before = path.lstat()
    with pytest.raises(OSError, match=r"seal\.key"):
        kept_key(path)
    assert path.lstat() == before
    assert not list(tmp_path.glob("seal.key.*"))


def test_what_was_sealed_before_a_restart_is_opened_after_it(tmp_path: Path):
    notices: list[str] = []
    settings = settings_of(state_root=str(tmp_path / "state"))
    sealed = make_seal(settings, notices.append).seal(REASONING, NAME, b"me")
    assert make_seal(settings, notices.append).open(sealed, b"me") == Sealed(REASONING, NAME)
    assert notices == []


def test_without_a_place_for_the_key_there_is_one_for_this_process(tmp_path: Path):
    notices: list[str] = []
    (tmp_path / "state").touch()
    settings = settings_of(state_root=str(tmp_path / "state"))
    first, second = make_seal(settings, notices.append), make_seal(settings, notices.append)
    sealed = first.seal(REASONING, NAME, b"me")
    assert first.open(sealed, b"me") == Sealed(REASONING, NAME)
    assert second.open(sealed, b"me") is None
    assert len(notices) == 2
    assert "state" in notices[0]
