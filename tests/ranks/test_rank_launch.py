"""`serve --hosts`: which hosts it takes, the command that it runs, and what it makes of its end."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from start_llm import cli
from start_llm.commands import rank_launch
from start_llm.commands.rank_launch import RankLaunch, hosts_of, serve_on_hosts
from start_llm.core.errors import RanksApart, SettingsError

HERE = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}


def test_addresses_and_names_are_hosts_and_this_machine_needs_no_ssh():
    assert hosts_of("localhost,192.0.2.7") == [HERE, {"ssh": "192.0.2.7", "ips": ["192.0.2.7"]}]


def test_a_file_of_hosts_keeps_what_it_says_of_their_links(tmp_path: Path):
    path = tmp_path / "hosts.json"
    links = [None, "rdma_en2"]
    hosts = [{"ssh": "here", "ips": ["127.0.0.1"], "rdma": links}, {"ssh": "b", "ips": ["192.0.2.7"]}]
    for content in (hosts, {"backend": "jaccl", "hosts": hosts}):
        path.write_text(json.dumps(content))
        assert hosts_of(str(path)) == [{**hosts[0], "ssh": "127.0.0.1"}, hosts[1]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("localhost", "two machines or more"),
        ("192.0.2.7,localhost", "has to be this one"),
        ("localhost,no-such-name.invalid", "'no-such-name.invalid' has no address"),
    ],
)
def test_hosts_that_cannot_serve_are_refused(text: str, reason: str):
    with pytest.raises(SettingsError, match=reason):
        hosts_of(text)


@pytest.mark.parametrize("content", ["{", "[]x", '{"hosts": 1}', '[{"ssh": "a"}]'])
def test_what_is_no_file_of_hosts_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "hosts.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match="no file of hosts"):
        hosts_of(str(path))


def test_flags_reach_the_ranks_as_variables(tmp_path: Path):
    hosts = [HERE, {"ssh": "b", "ips": ["192.0.2.7"]}]
    words = RankLaunch(hosts=hosts, backend="ring", variables={"MODEL_PATH": "a b"}).words(tmp_path)
    assert words[words.index("--env") + 1] == "MODEL_PATH=a b"
    assert words[words.index("--backend") + 1] == "ring"
    assert words[-4:] == [sys.executable, "-m", "start_llm", "serve"]
    assert "--starting-port" not in words


def test_over_thunderbolt_the_device_tells_at_once_what_is_computed(tmp_path: Path):
    words = RankLaunch(hosts=[HERE, HERE], backend="jaccl", variables={}).words(tmp_path)
    assert words[words.index("--env") + 1] == "MLX_METAL_FAST_SYNCH=1"


@pytest.mark.parametrize("flags", [["--restart"], ["--backend", "ring"]])
def test_flags_of_hosts_are_refused_without_any(flags: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", *flags]) == 2
    assert "are for --hosts" in capsys.readouterr().err


def test_ranks_on_one_machine_get_ports_that_are_free(tmp_path: Path):
    words = RankLaunch(hosts=[HERE, HERE], backend="ring", variables={}).words(tmp_path)
    assert int(words[words.index("--starting-port") + 1]) >= 32323


# ------------------------------------------------------------------------------------------------ how it ends


class Played(RankLaunch):
    """A launch of a program in place of `mlx.launch`."""

    def words(self, hostfile: Path) -> list[str]:
        return [sys.executable, "-c", self.backend, str(hostfile)]


def played(program: str, *, restarts: bool = False) -> tuple[int, list[str]]:
    notices: list[str] = []
    launch = Played(hosts=[HERE, HERE], backend=program, variables={})
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return serve_on_hosts(launch, notices.append, restarts=restarts), notices
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exits(*codes: int) -> str:
    """A program that says of so many ranks how they ended, as `mlx.launch` does."""
    lines = [f"Node with rank {rank} exited with code {code}" for rank, code in enumerate(codes)]
    return f"import sys; print({chr(10).join(lines)!r}, file=sys.stderr)"


@pytest.mark.parametrize(
    ("codes", "status"), [((), 0), ((75,), 75), ((-9, 75), 75), ((-15, 2), 2), ((139,), 75)]
)
def test_the_status_says_whether_it_would_help_to_start_it_again(codes, status, capfd):
    assert played(exits(*codes)) == (status, [])
    assert ("exited with code" in capfd.readouterr().err) == bool(codes)


def test_a_service_that_has_failed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_launch, "_PAUSES_S", (0.0, 0.01))
    count = tmp_path / "count"
    program = (
        f"import pathlib, sys; path = pathlib.Path({str(count)!r})\n"
        "tried = len(path.read_text()) if path.exists() else 0\n"
        "path.write_text('x' * (tried + 1))\n"
        "tried < 2 and print('Node with rank 1 exited with code 75', file=sys.stderr)\n"
    )
    status, notices = played(program, restarts=True)
    assert status == 0
    assert notices == ["The service has failed. It starts again in 0.01 s."] * 2
    assert count.read_text() == "xxx"


def test_a_service_is_started_again_though_the_system_has_removed_its_file_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As systemd-tmpfiles and macOS do with folders that nobody has used for days."""
    monkeypatch.setattr(rank_launch, "_PAUSES_S", (0.0, 0.0))
    count = tmp_path / "count"
    program = (
        "import pathlib, shutil, sys; hosts = pathlib.Path(sys.argv[1])\n"
        f"with open({str(count)!r}, 'a') as file: print(hosts.exists(), file=file)\n"
        "shutil.rmtree(hosts.parent, ignore_errors=True)\n"
        f"if len(open({str(count)!r}).readlines()) < 2:\n"
        "    print('Node with rank 1 exited with code 75', file=sys.stderr)\n"
    )
    assert played(program, restarts=True)[0] == 0
    assert count.read_text() == "True\nTrue\n"


def test_ranks_that_do_not_find_each_other_may_when_they_try_again(monkeypatch, capsys):
    def serve(_: object) -> int:
        raise RanksApart("Rank 1 cannot reach the others.")

    monkeypatch.setitem(cli._COMMANDS, "serve", serve)
    assert cli.main(["serve"]) == 75
    assert "Rank 1 cannot reach the others." in capsys.readouterr().err


def test_what_cannot_start_is_not_started_again():
    assert played(exits(2), restarts=True) == (2, [])


def test_without_restart_it_is_not_started_again():
    assert played(exits(75)) == (75, [])


def test_a_launch_that_says_nothing_of_its_ranks_has_failed():
    assert played("raise SystemExit(3)") == (75, [])


def test_a_rank_that_is_stuck_is_killed_when_another_one_has_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_launch, "_LAST_S", 0.05)
    program = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('Node with rank 0 exited with code 70', file=sys.stderr, flush=True)\n"
        "signal.pause()"
    )
    assert played(program) == (75, ["A rank has not ended 0.05 s after another one. It is killed."])


def test_a_signal_asks_the_ranks_to_stop(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The program ends when it reads the line, as rank 0 does."""
    ready = tmp_path / "ready"
    program = f"import sys; open({str(ready)!r}, 'w').close(); print(repr(sys.stdin.readline()))"
    threading.Thread(target=stop_when, args=(ready,), daemon=True).start()
    assert played(program, restarts=True) == (0, [])
    assert capfd.readouterr().out == repr("stop\n") + "\n"


def stop_when(ready: Path) -> None:
    while not ready.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
