"""`python -m start_llm` as a user starts and ends it: real processes, real signals."""

import ctypes
import gc
import http.client
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from start_llm import __version__, cli
from start_llm.config.flags import FLAGS, SWITCHES
from start_llm.config.settings import all_rows
from start_llm.telemetry.terminal import Terminal
from tests.serving import AS_JSON
from tests.telemetry.ttys import COLOUR, LIVELY, Tty, a_tty

ROOT = Path(__file__).resolve().parents[1]
ENDS_WITHIN_S = 5.0
LONG_PROMPT = 80_000
"""Tokens whose prefill takes many times longer than any of these tests."""

# Starts main() for every folder in one process, so that the imports are paid once.
FAILING_STARTS = """
import sys, threading
from start_llm.cli import main
for folder in sys.argv[1:]:
    print("status", main(["serve", "--model", folder, "--mlx-port", "0"]), flush=True)
    print("end of", folder, file=sys.stderr, flush=True)
print("threads", threading.active_count())
"""


class Process:
    """A started command. What it prints is collected line by line, by a thread."""

    def __init__(self, checkout: Path, *arguments: str, **environment: str) -> None:
        self.checkout = checkout
        ours = {row.name for row in all_rows()}
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        self.popen = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=checkout,
            env=inherited | {"PROXY": "false", "ENABLE_REQUEST_LOGGING": "false"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=lambda stream=stream, into=into: into.extend(stream), daemon=True)
            for stream, into in ((self.popen.stdout, self.lines), (self.popen.stderr, self.errors))
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def port(self) -> int:
        address = re.search(r"address +http://127\.0\.0\.1:(\d+)/v1", self.output)
        assert address, self.output
        return int(address[1])

    def until_it_says(self, text: str, seconds: float = 60) -> None:
        until(lambda: text in self.output or self.popen.poll() is not None, seconds)
        assert text in self.output, "".join(self.errors)

    def until_it_ends(self, seconds: float = 60) -> int:
        """Wait, and return the status; everything printed is then there."""
        status = self.popen.wait(seconds)
        for reader in self._readers:
            reader.join(10)
        return status

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return json.load(reply)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_open(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def started(checkout: Path, *arguments: str, **environment: str) -> Generator[Process]:
    """A process that is gone afterwards, whatever happened."""
    process = Process(checkout, *arguments, **environment)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


@contextmanager
def serving(checkout: Path, folder: Path, *flags: str, **environment: str) -> Generator[Process]:
    """A server that is ready."""
    command = ["-m", "start_llm", "serve", "--model", str(folder), "--mlx-port", "0", *flags]
    with started(checkout, *command, **environment) as process:
        process.until_it_says("Ctrl-C ends the server.")
        yield process


def stream(process: Process, **body: Any) -> http.client.HTTPResponse:
    """A streamed text completion whose status and headers have come."""
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({"stream": True, **body}), AS_JSON)
    return connection.getresponse()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the program, so that the .env of this checkout does not count."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "start_llm", folder / "start_llm")
    shutil.copytree(ROOT / "models", folder / "models")
    return folder


def with_a_client(folder: Path) -> Path:
    """A folder with a client that tells what it was started with."""
    programs = folder / "programs"
    programs.mkdir()
    program = programs / "pi"
    program.write_text("#!/bin/sh\npwd\ncat $PI_CODING_AGENT_DIR/models.json\n")
    program.chmod(0o755)
    return programs


@pytest.fixture(scope="module")
def server(tmp_path_factory, chain_model) -> Generator[Process]:
    """A server with settings from all three sources, for everything that does not end it."""
    checkout = tmp_path_factory.mktemp("configured")
    shutil.copytree(ROOT / "start_llm", checkout / "start_llm")
    folder = shutil.copytree(chain_model({"\n": ["Hello", " you"]}), checkout / 'it\'s a "tiny" model')
    (checkout / ".env").write_text(
        f"MODEL_PATH='/nowhere'\nBATCH=7\nMAX_KV_SIZE=16000\nCACHE_USE_BLOCK_INDEX=0\n# MLX_HOST=x\n"
        f"TRACE={folder}\n"
    )
    environment = {"BATCH": "6", "MODEL_FAMILY": "generic", "VLM_CACHE_DEBUG": "true", "DEFAULT_TOP_K": ""}
    environment |= {"LOG_ROOT": "elsewhere", "ENABLE_REQUEST_LOGGING": "true"}
    environment |= {"PATH": f"{with_a_client(checkout)}:{os.environ['PATH']}"}
    flags = ["--batch", "3", "--hot-cache-max-size", "64MiB"]
    with serving(checkout, folder, *flags, **environment) as process:
        yield process
        process.popen.terminate()
        assert process.until_it_ends(ENDS_WITHIN_S) == 0
        assert process.lines[-2:] == ["Stopping ...\n", "Stopped.\n"]
        assert process.errors == [], "".join(process.errors)
        assert not is_open(process.port)


# ------------------------------------------------------------------------------------------- a running server


@pytest.mark.long
def test_the_summary_is_aligned_and_says_what_is_served(server):
    rows = re.findall(r"^  (\w+)( +)(\S.*)$", server.output, re.MULTILINE)
    rows = rows[: [name for name, _, _ in rows].index("address") + 1]
    summary = {name: value for name, _, value in rows}
    names = "model family template layers device memory cache disk images context batch trace address"
    assert list(summary) == names.split()
    assert len({len(name) + len(gap) for name, gap, _ in rows}) == 1
    assert summary["model"] == 'it\'s a "tiny" model'
    assert (summary["family"], summary["layers"]) == ("generic (qwen3)", "1 full attention")
    assert "enable_thinking switches thinking" in summary["template"]
    assert re.fullmatch(r"(CPU|Metal|CUDA) \(.+\), [\d.,]+ GiB of memory", summary["device"])
    assert summary["memory"].startswith("weights ")
    assert summary["cache"] == "up to 64.0 MiB"
    assert Path(summary["trace"]).parts[-2:] == (server.checkout.name, "elsewhere")
    assert len(list(Path(summary["trace"]).iterdir())) == 1, "the folder of today"
    assert summary["address"] == f"http://127.0.0.1:{server.port}/v1"


@pytest.mark.thorough
def test_flags_win_over_the_environment_which_wins_over_the_file(server):
    assert re.search(r"batch +3 at once", server.output)
    assert re.search(r"context +16,000 tokens", server.output)
    assert server.get("/stats")["batch"]["configured"] == 3
    assert server.get("/stats")["prompt_cache"]["max_bytes"] == 64 * 2**20
    assert server.get("/v1/models")["data"][0]["context_window"] == 16_000


def test_variables_without_effect_are_announced_with_the_reason(server):
    (line,) = (line for line in server.lines if "CACHE_USE_BLOCK_INDEX" in line)
    assert line == (
        "CACHE_USE_BLOCK_INDEX is set, and has no effect. Pages are looked up by chain hash; "
        "there is no other way.\n"
    )
    assert server.output.count("has no effect") == 1


def test_the_curl_command_works_as_it_is_printed_and_fits_80_columns(server):
    command = re.search(r"^ +curl (?:.+\n)+", server.output, re.MULTILINE)
    assert command
    assert max(map(len, command[0].splitlines())) < 80
    done = subprocess.run(["bash", "-c", command[0]], check=True, capture_output=True, text=True, timeout=60)
    *chunks, end = [text.removeprefix("data: ") for text in done.stdout.splitlines() if text]
    assert end == "[DONE]"
    texts = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "Hello you"
    assert json.loads(chunks[0])["model"] == 'it\'s a "tiny" model'


def test_the_lines_for_clients_work_as_they_are_printed(server):
    exports = [line.strip() for line in server.lines if line.strip().startswith("export ")]
    script = "\n".join(
        [*exports, 'curl -s -H "Authorization: Bearer $OPENAI_API_KEY" $OPENAI_BASE_URL/models']
    )
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True, timeout=60)
    (model,) = json.loads(done.stdout)["data"]
    assert f"# model: {model['id']}" in server.output


@pytest.mark.thorough
def test_the_line_for_coding_clients_works_as_it_is_printed(server, tmp_path):
    """But for the environment, which stands in the checkout and not in this copy of it."""
    (line,) = (line.strip() for line in server.lines if " launch --base-url " in line)
    program, *words = shlex.split(line)
    assert Path(program) == server.checkout / "scripts" / "start_llm"
    environment = os.environ | {"PATH": f"{server.checkout / 'programs'}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / "scripts" / "start_llm", *words],
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    folder, _, models = done.stdout.partition("\n")
    assert folder == str(tmp_path), done.stderr
    provider = json.loads(models)["providers"]["start_llm"]
    assert provider["baseUrl"] == f"http://127.0.0.1:{server.port}/v1"
    assert provider["models"][0]["contextWindow"] == 16_000


def test_each_finished_request_is_one_line(server):
    with stream(server, prompt="\n", session_id="my-session") as reply:
        assert reply.read().endswith(b"data: [DONE]\n\n")
    server.until_it_says("my-session")
    (line,) = (line for line in server.lines if "my-session" in line)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d completions +- +\d{6} my-session +complete +0 cached +1 read"
        r" +3 written +[\d,.]+/s  first +\d+\.\d\d s\n",
        line,
    )


@pytest.mark.long
def test_a_busy_port_ends_the_second_server_with_a_message_that_names_it(server, checkout):
    port = str(server.port)
    with started(checkout, "-m", "start_llm", "serve", "--demo", "--mlx-port", port) as second:
        assert second.until_it_ends() == 2
    text = "".join(second.errors)
    assert text.startswith("start_llm cannot start.\nMLX_HOST=127.0.0.1 MLX_PORT=")
    assert f"MLX_PORT={port} cannot be listened on" in text
    assert "--mlx-port" in text
    assert "Traceback" not in text
    assert server.get("/health")["status"] == "ok"


@pytest.mark.long
def test_without_a_cache_every_prompt_is_computed(checkout, tiny_model):
    """The flag wins over the environment."""
    with serving(checkout, tiny_model("qwen3"), "--no-cache", PROMPT_CACHE="true") as process:
        for _ in range(2):
            with stream(process, prompt=[7] * 300, max_tokens=1) as reply:
                assert reply.read().endswith(b"data: [DONE]\n\n")
        stats = process.get("/stats")
        assert re.search(r"cache +off\n", process.output)
        assert (stats["prompt_cache"]["max_bytes"], stats["requests"]["cached_tokens"]) == (0, 0)
        assert stats["prompt_cache"]["computed_tokens"] == 2 * 300


def a_free_port() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return str(taken.getsockname()[1])


@pytest.mark.long
def test_the_proxys_files_are_in_the_folder_of_the_logs(checkout, tiny_model, tmp_path):
    port, logs = a_free_port(), tmp_path / "elsewhere"
    environment = {"PROXY": "true", "PROXY_PORT": port, "LOG_ROOT": str(logs)}
    with serving(checkout, tiny_model("qwen3"), **environment) as process:
        process.until_it_says("Ctrl-C ends the server")
        until((logs / f"proxy-{port}.json").exists, 10)
        assert {path.name for path in logs.iterdir()} == {
            f"proxy-{port}.lock",
            f"proxy-{port}.json",
            "proxy.log",
        }
        assert not (checkout / "logs").exists()
        process.popen.terminate()
        assert process.until_it_ends() == 0
    assert [path.name for path in logs.iterdir()] == ["proxy.log"]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write to")
def test_a_folder_for_logs_that_cannot_be_written_stops_nothing(checkout, tiny_model):
    environment = {"PROXY": "true", "PROXY_PORT": a_free_port(), "LOG_ROOT": "/proc/logs"}
    with serving(checkout, tiny_model("qwen3"), ENABLE_REQUEST_LOGGING="true", **environment) as process:
        process.until_it_says("Ctrl-C ends the server")
        assert process.get("/health")["status"] == "ok"
        process.popen.terminate()
        assert process.until_it_ends() == 0
    notices = [line for line in process.lines if "cannot be written" in line]
    assert [line for line in notices if "the server goes on without it." in line]
    assert [line for line in notices if line.startswith("/proc/logs/proxy.log cannot be written")]
    assert [line for line in notices if line.startswith("The trace cannot be written")]
    assert process.errors == [], "".join(process.errors)


@contextmanager
def started_on(screen: Tty, checkout: Path, folder: Path, **environment: str) -> Generator[Any]:
    """A server whose output is a pseudo-terminal, once it is ready."""
    ours = {"PROXY": "false", "ENABLE_REQUEST_LOGGING": "false", "NO_COLOR": "", **LIVELY, **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "start_llm", "serve", "--model", str(folder), "--mlx-port", "0"],
        cwd=checkout,
        env=os.environ | ours,
        stdout=screen.writer,
        stderr=screen.writer,
    )
    try:
        screen.until("Ctrl-C ends the server.", within_s=60)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.parametrize(("signals", "status", "patience_s"), [(1, 0, "0.5"), (2, 130, "60")])
def test_a_terminal_shows_what_runs_and_nothing_of_it_is_left_at_the_end(
    checkout, tiny_model, signals, status, patience_s
):
    with (
        a_tty(120) as screen,
        started_on(screen, checkout, tiny_model("qwen3"), DRAIN_SECONDS=patience_s) as process,
    ):
        screen.until("waiting for requests")
        address = re.search(r"http://127\.0\.0\.1:(\d+)/v1", COLOUR.sub("", screen.text))
        assert address
        client = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=30)
        body = {"prompt": "x", "max_tokens": 30_000, "stream": True, "session_id": "endless"}
        client.request("POST", "/v1/completions", json.dumps(body), AS_JSON)
        client.getresponse()
        screen.until("1 running")
        assert re.search(r"endless +- +completions +writing", COLOUR.sub("", screen.text))
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            screen.until("Stopping ...")
        assert process.wait(10) == status
        assert ("Stopped." in screen.text) == (signals == 1)
        assert re.search(r"\r\x1b\[\dA\x1b\[J$", screen.text), "the table was removed, nothing came after"


# --------------------------------------------------------------------------------------------- failing starts


@pytest.mark.thorough
def test_bad_settings_end_the_start_with_all_their_names(checkout):
    environment = {"BATCH": "0", "DEFAULT_TOP_P": "x", "MLX_HOST": "127.0.0.1"}
    with started(checkout, "-m", "start_llm", "serve", "--mlx-port", "eighty", **environment) as process:
        assert process.until_it_ends() == 2
    assert process.errors == [
        "start_llm cannot start.\n",
        "MLX_PORT='eighty' (command line): expected a whole number from 0 to 65535.\n",
        "BATCH='0' (environment): expected a whole number from 1 to 256.\n",
        "DEFAULT_TOP_P='x' (environment): expected a number from 0 to 1.\n",
    ]
    assert process.output == ""


@pytest.mark.long
def test_a_model_that_cannot_be_served_ends_the_start_with_a_sentence(checkout, tiny_model, tmp_path):
    missing = tmp_path / "missing"
    empty = tmp_path / "empty"
    empty.mkdir()
    broken, unknown = (
        shutil.copytree(tiny_model("qwen3"), tmp_path / name) for name in ("broken", "unknown")
    )
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:100_000])
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "wizard"}))
    expected = {
        missing: f"MODEL_PATH='{missing}': no such folder",
        empty: f"{empty / 'config.json'} is missing, or is no JSON object.",
        broken: f"{broken / 'model.safetensors'} is not whole: ",
        unknown: f"mlx_lm alone cannot run {unknown}, of model_type 'wizard'.",
    }
    with started(checkout, "-c", FAILING_STARTS, *map(str, expected)) as process:
        assert process.until_it_ends() == 0
    assert process.output.count("status 2\n") == 4
    assert process.lines[-1] == "threads 1\n", "a failed start left a thread"
    text = "".join(process.errors)
    assert "Traceback" not in text
    for folder, sentence in expected.items():
        message, _, text = text.partition(f"end of {folder}\n")
        assert f"start_llm cannot start.\n{sentence}" in message


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["sing"], "invalid choice: 'sing'"),
        (["serve", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["serve", "--mlx-p", "80"], "unrecognized arguments: --mlx-p 80"),
        (["serve", "--batch"], "--batch: expected one argument"),
        (["settings", "--format", "poem"], "invalid choice: 'poem'"),
    ],
)
def test_a_command_line_that_is_not_understood_is_explained(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_version_is_reported(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"start_llm {__version__}\n"


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    flags = [name for flag in FLAGS for name in flag.names]
    assert all(flag in text for flag in (*flags, *SWITCHES, "--demo"))


# ----------------------------------------------------------------------------------------------------- ending


@contextmanager
def hard_at_work(
    checkout: Path, folder: Path
) -> Generator[tuple[Process, http.client.HTTPResponse, http.client.HTTPResponse]]:
    """A server in the middle of a stream, and of the prefill of a long prompt."""
    with serving(checkout, folder, "--batch", "2", DRAIN_SECONDS="1") as process:
        talking = stream(process, prompt=[1, 2, 3], max_tokens=100_000)
        assert talking.readline().startswith(b"data: ")
        reading = stream(process, prompt=[7] * LONG_PROMPT)
        with closing(talking), closing(reading):
            until(lambda: (process.get("/stats")["engine"]["prefill"] or {"done": 0})["done"] > 0)
            assert process.get("/stats")["batch"]["active_rows"] == 1
            yield process, talking, reading


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_clients_see_that_they_were_cut_off(number, checkout, tiny_model):
    with hard_at_work(checkout, tiny_model("qwen3")) as (process, talking, reading):
        began = time.monotonic()
        process.popen.send_signal(number)
        assert process.until_it_ends() == 0
        assert time.monotonic() - began < ENDS_WITHIN_S
        for reply in (talking, reading):
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)) as cut:
                reply.read()
            if isinstance(cut.value, http.client.IncompleteRead):
                assert b"[DONE]" not in cut.value.partial
        assert not is_open(process.port)
    assert "Stopping ..." in process.output
    assert "Traceback" not in "".join(process.errors)


@pytest.mark.long
def test_a_second_signal_ends_the_process_at_once(checkout, tiny_model):
    with hard_at_work(checkout, tiny_model("qwen3")) as (process, _, _):
        began = time.monotonic()
        process.popen.send_signal(signal.SIGINT)
        process.popen.send_signal(signal.SIGTERM)
        assert process.until_it_ends() == 130
        assert time.monotonic() - began < 1
        assert not is_open(process.port)
    assert "Stopped." not in process.output


@pytest.mark.skipif(sys.platform != "linux", reason="sends a signal to one thread of another process")
@pytest.mark.long
def test_a_signal_that_the_kernel_gave_to_another_thread_ends_the_server_too(checkout, tiny_model):
    with serving(checkout, tiny_model("qwen3")) as process:
        threads = sorted(int(task.name) for task in Path(f"/proc/{process.popen.pid}/task").iterdir())
        ctypes.CDLL(None).tgkill(process.popen.pid, threads[-1], signal.SIGTERM)
        assert process.until_it_ends(ENDS_WITHIN_S) == 0


@pytest.mark.long
def test_ctrl_c_while_the_model_loads_ends_at_once(checkout, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("qwen3"), tmp_path / "slow")
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")  # whoever reads it waits for ever
    with started(checkout, "-m", "start_llm", "serve", "--model", str(folder), "--mlx-port", "0") as process:
        process.until_it_says("loading slow ...")
        time.sleep(0.3)
        began = time.monotonic()
        process.popen.send_signal(signal.SIGINT)
        assert process.until_it_ends() == 128 + signal.SIGINT
        assert time.monotonic() - began < ENDS_WITHIN_S
    assert process.lines[-1] == "Interrupted before the server was ready.\n"
    assert process.errors == [], "".join(process.errors)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see how far the imports are")
def test_ctrl_c_in_the_middle_of_the_imports_leaves_no_traceback(checkout):
    with started(checkout, "-m", "start_llm", "serve", "--demo", "--mlx-port", "0") as process:
        loaded = Path(f"/proc/{process.popen.pid}/maps")
        until(lambda: "libmlx" in loaded.read_text())
        process.popen.send_signal(signal.SIGINT)
        assert process.until_it_ends() in (-signal.SIGINT, 128 + signal.SIGINT)
    assert process.errors == [], "".join(process.errors)


@pytest.mark.thorough
def test_what_the_start_has_made_is_left_alone_by_the_collector(monkeypatch: pytest.MonkeyPatch):
    class Started:
        def start(self) -> None:
            self.made = [list[int]() for _ in range(10)]

        def abandon(self) -> None: ...

        def close(self) -> bool:
            return True

    started, frozen = Started(), list[bool]()

    def look(_: object) -> None:
        collected = {id(item) for item in gc.get_objects()}
        frozen.append(not any(id(item) in collected for item in started.made))

    monkeypatch.setattr(cli, "_app", lambda *_: started)
    monkeypatch.setattr(cli, "_leave_on_signals", lambda: None)
    monkeypatch.setattr(cli, "_wait_for_a_signal", look)
    try:
        assert cli.serve((), Terminal(io.StringIO())) == 0
    finally:
        gc.unfreeze()
    assert frozen == [True]
