"""A server that is stopped and started again knows its conversations."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from start_llm.storage.database_file import DatabaseFile
from tests.cache.small_disk import fill, small_disk
from tests.cache.test_power_cut import unsynced
from tests.conftest import TinyModel
from tests.http.continued import CONVERSATIONS, FAMILIES, conversations, dated, turn
from tests.http.test_conversations import CLOSERS, system, user
from tests.server.client import wait_until
from tests.serving import serving


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_conversations_go_on_as_on_a_server_that_never_stopped(
    family: str, tiny_model: TinyModel, tmp_path: Path
):
    folder, stopped, kept = tiny_model(family, hidden=128, layers=2), conversations(), conversations()
    with serving(folder, thinking=False) as server:
        for number in range(3):
            turn(server.post, kept, number)
    for number in range(3):
        with serving(folder, thinking=False, ssd_folder=str(tmp_path), drain_s=10) as server:
            turn(server.post, stopped, number)
            stats = server.get("/stats")
            assert stats["ssd"]["rejected_files"] == {}
            assert stats["ssd"]["hits"] == (CONVERSATIONS if number else 0)
            assert stats["ssd"]["conversations"]["rejected_rows"] == 0
    for talk, other in zip(stopped, kept, strict=True):
        assert talk.messages == other.messages, "the same replies"
        assert all(mine <= theirs + 64 for mine, theirs in zip(talk.computed, other.computed, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("lost", ["pages", "states", "transcripts", "all"])
def test_either_half_is_right_without_the_other(lost: str, tiny_model: TinyModel, tmp_path: Path):
    folder, everybody = tiny_model("qwen3_5", hidden=128, layers=2), conversations()[:3]
    kept = conversations()[:3]
    with serving(folder, thinking=False) as server:
        for number in range(2):
            turn(server.post, kept, number)
    with serving(folder, thinking=False, ssd_folder=str(tmp_path), drain_s=10) as server:
        turn(server.post, everybody, 0)
    for path in list(tmp_path.rglob("*")):
        if path.is_file() and lost in ("all", path.relative_to(tmp_path).parts[0]):
            path.unlink()
    with serving(folder, thinking=False, ssd_folder=str(tmp_path), drain_s=10) as server:
        turn(server.post, everybody, 1)
    echoing = [(talk, other) for talk, other in zip(everybody, kept, strict=True) if talk.sends is not dated]
    assert all(talk.messages == other.messages for talk, other in echoing)


@pytest.mark.thorough
def test_another_key_finds_nothing_after_a_restart(tiny_model: TinyModel, tmp_path: Path):
    from tests.server.client import CHAT
    from tests.server.client import ask as call

    folder, computed = tiny_model("qwen3"), list[int]()
    body = {"messages": [system("Tenants"), user("Fish?")], "max_tokens": 4, "temperature": 0}
    for key in ("one", "two", "one"):
        with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
            usage = call(server.port, "POST", CHAT, body, {"Authorization": f"Bearer {key}"}).json["usage"]
            computed.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    assert computed[0] == computed[1] > 50
    assert computed[2] <= CLOSERS


@pytest.mark.thorough
def test_a_stored_response_is_gone_on_from(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model("qwen3")
    body: dict[str, Any] = {"input": "Tell me of the sea. " * 10, "max_output_tokens": 4}
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        first = server.post("/v1/responses", body)
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        second = server.post("/v1/responses", {**body, "input": "More.", "previous_response_id": first["id"]})
    known = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert known >= first["usage"]["total_tokens"] - 1


@pytest.mark.thorough
def test_a_second_server_on_the_folder_says_so_and_serves(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model("qwen3")
    with (
        serving(folder, ssd_folder=str(tmp_path)) as first,
        serving(folder, ssd_folder=str(tmp_path)) as second,
    ):
        assert "stays off" in second.printed()
        assert first.get("/stats")["ssd"]["state"] in ("on", "scanning")
        assert second.get("/stats")["ssd"]["state"].startswith("off: process ")
        assert second.post("/v1/completions", {"prompt": "Fish", "max_tokens": 3})["choices"]


@pytest.mark.thorough
def test_a_damaged_database_is_begun_again(tiny_model: TinyModel, tmp_path: Path):
    folder, talk = tiny_model("qwen3"), conversations()[0]
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        talk.ask(server.post, "Fish?")
    (path,) = set((tmp_path / "transcripts").glob("*.db")) - {tmp_path / "transcripts" / "responses.db"}
    path.write_bytes(path.read_bytes()[:3000] + b"x" * 500)
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        assert server.get("/stats")["ssd"]["conversations"]["resets"] == 1
        talk.ask(server.post, "Boats?")
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def put_in_place(weights: Path, folder: Path) -> None:
    """Replace the weights as a restored backup does: of equal size, and with the time of the old ones."""
    old = folder / "model.safetensors"
    before = old.stat()
    shutil.copyfile(weights, old)
    os.utime(old, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (old.stat().st_size, old.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.thorough
def test_other_weights_of_equal_size_and_time_answer_for_themselves(tiny_model: TinyModel, tmp_path: Path):
    """Their folder and its disk tier stay, and so does what the server knows of weights."""
    folder = shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    others = tiny_model("qwen3", seed=1) / "model.safetensors"
    asked = {"prompt": "fish sea boat " * 200, "max_tokens": 12, "temperature": 0}
    tier = {"ssd_folder": str(tmp_path / "ssd"), "state_root": str(tmp_path / "state"), "drain_s": 10}
    with serving(tiny_model("qwen3", seed=1)) as server:
        own = server.post("/v1/completions", asked)["choices"][0]["text"]
    with serving(folder, **tier) as server:
        assert server.post("/v1/completions", asked)["choices"][0]["text"] != own
    put_in_place(others, folder)
    with serving(folder, **tier) as server:
        reply = server.post("/v1/completions", asked)
        assert reply["choices"][0]["text"] == own
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with serving(folder, **tier) as server:
        assert server.post("/v1/completions", asked)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.long
def test_a_prompt_is_read_while_the_database_is_busy(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """SQLite's checkpoints take as long as they take."""
    folder, talk, go = tiny_model("qwen3"), conversations()[0], threading.Event()
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        talk.ask(server.post, "Fish? " * 30)
    real, began = DatabaseFile.write, threading.Event()

    def slow(*arguments: Any) -> None:
        began.set()
        assert go.wait(30)
        real(*arguments)

    monkeypatch.setattr(DatabaseFile, "write", slow)
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        server.post("/v1/chat/completions", {"messages": [user("Boats?")], "max_tokens": 2})
        assert began.wait(10)
        talk.ask(server.post, "Tides?")
        assert server.get("/stats")["ssd"]["hits"] == 1
        go.set()
    assert talk.computed[1] <= talk.turns[1].new


@pytest.mark.thorough
def test_a_full_disk_stops_no_reply_and_is_reported_once(tiny_model: TinyModel, tmp_path: Path):
    talk = {"messages": [user("Boats? " * 200)], "max_tokens": 4}
    with (
        small_disk(tmp_path / "disk", 16 * 2**20) as disk,
        serving(tiny_model("qwen3"), ssd_folder=str(disk / "ssd"), ssd_write_after_s=0.1) as server,
    ):
        wait_until(lambda: server.get("/stats")["ssd"]["state"] == "on", within_s=20)
        fill(disk)
        for _ in range(3):
            assert server.post("/v1/chat/completions", talk)["choices"]
        wait_until(lambda: server.get("/stats")["ssd"]["state"] == "paused", within_s=20)
        assert server.get("/health")["status"] == "ok"
        assert server.printed().count("The disk tier of the prompt cache pauses: there is no room") == 1


class Watched(threading.Thread):
    """Looks at the size of a folder until it is asked to end, SQLite's log aside."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.is_over = folder, threading.Event()
        self.largest = self.largest_file = 0

    def run(self) -> None:
        while not self.is_over.wait(0.003):
            sizes = [nbytes for path in self.folder.rglob("*") if (nbytes := self._size(path))]
            self.largest = max(self.largest, sum(sizes))
            self.largest_file = max(self.largest_file, *sizes, 0)

    def _size(self, path: Path) -> int:
        with suppress(OSError):
            return path.stat().st_size if path.is_file() and not path.name.endswith("-wal") else 0
        return 0


@pytest.mark.long
def test_two_models_take_turns_in_one_folder_and_another_server_beside_them(
    tiny_model: TinyModel, tmp_path: Path
):
    quota, watched = 3_000_000, Watched(tmp_path / "ssd")
    watched.folder.mkdir()
    watched.start()
    settings: dict[str, Any] = {"ssd_folder": str(watched.folder), "ssd_max_size": quota, "drain_s": 10}
    families = ["qwen3", "qwen3_5"]
    talks = {family: conversations(200)[:4] for family in families}
    ssd: dict[str, Any] = {}
    for number in range(3):
        for family in families:
            folder = tiny_model(family, hidden=128, layers=2)
            with (
                serving(folder, thinking=False, ssd_write_after_s=0.1, **settings) as server,
                serving(tiny_model("qwen3"), ssd_folder=str(watched.folder)) as other,
            ):
                turn(server.post, talks[family], number)
                assert other.post("/v1/completions", {"prompt": "Fish", "max_tokens": 3})["choices"]
                ssd = server.get("/stats")["ssd"]
                assert (ssd["rejected_files"], ssd["errors"]) == ({}, 0)
    watched.is_over.set()
    watched.join()
    assert ssd["evictions"], "there were more than fit"
    assert watched.largest <= quota + 2 * watched.largest_file, "one more, and one that is being written"


@pytest.mark.thorough
def test_after_an_upgrade_older_pages_are_reported_once_and_go_first(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Their keys begin with the versions of the libraries, so nothing finds them any more."""

    def pages() -> set[Path]:
        return set((tmp_path / "pages").rglob("*.safetensors"))

    def printed_after(start: int, quota: int = 10**9) -> str:
        with serving(tiny_model("qwen3"), ssd_folder=str(tmp_path), ssd_max_size=quota, drain_s=10) as server:
            prompt = [start + number % 50 for number in range(600)]
            assert server.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})["choices"]
        return server.printed()

    notice = "goes first when there is need for room"
    with monkeypatch.context() as older:
        older.setattr("start_llm.models.identity.version", lambda name: "0.1")
        assert notice not in printed_after(10)
        assert notice not in printed_after(100)
    old, size = pages(), sum(page.stat().st_size for page in pages())
    first = printed_after(200)
    assert notice in first
    assert "mlx 0.1" in first
    new = pages() - old
    assert notice not in printed_after(300, quota=int(1.9 * size)), "once"
    left = pages()
    assert new <= left, "what is of use stays"
    assert 0 < len(old & left) < len(old), "the older pages make room"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.thorough
def test_after_a_power_cut_replies_are_right_and_the_folder_heals(
    tiny_model: TinyModel, tmp_path: Path, seed: int
):
    """Nothing is synced but SQLite's own files, and here they are not either."""
    folder, rng = tiny_model("qwen3_5", hidden=128, layers=2), random.Random(seed)
    everybody, kept = ([talk for talk in conversations() if talk.sends is not dated][:3] for _ in range(2))
    with serving(folder, thinking=False) as server:
        for number in range(3):
            turn(server.post, kept, number)
    with serving(folder, thinking=False, ssd_folder=str(tmp_path / "ssd"), ssd_write_after_s=0.1) as server:
        turn(server.post, everybody, 0)
        wait_until(lambda: server.get("/stats")["ssd"]["conversations"]["written_rows"] > 0, within_s=10)
        shutil.copytree(tmp_path / "ssd", tmp_path / "left", ignore=shutil.ignore_patterns("*.tmp"))
    for path in (tmp_path / "left").rglob("*"):
        if path.is_file() and rng.random() < 0.4:
            path.write_bytes(unsynced(path.read_bytes() or b"\0", rng))
    for number in (1, 2):
        with serving(folder, thinking=False, ssd_folder=str(tmp_path / "left"), drain_s=10) as server:
            turn(server.post, everybody, number)
            assert server.get("/stats")["ssd"]["state"] == "on"
    assert [talk.messages for talk in everybody] == [talk.messages for talk in kept]
    assert all(talk.turns[2].computed <= talk.turns[2].new + 64 for talk in everybody), "it is whole again"
