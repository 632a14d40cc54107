"""Start the proxy's process, watch it, restart it with growing pauses, and stop it."""

import http.client
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path

from start_llm.access.backend_secret import READINESS_HEADER
from start_llm.core.errors import PortError
from start_llm.proxy.config import ProxyConfig, configuration, environment
from start_llm.proxy.ports import Process, ProcessRecord, is_free, owner
from start_llm.proxy.proxy_log import ProcessOutput, ProxyLog, Say, TellRefusal
from start_llm.storage.private_files import Lock

_ROOT = Path(__file__).resolve().parent.parent.parent
_BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_STEADY_S = 60.0
_STOP_S = 4.0
_CHECK_EVERY_S = 10.0
_LAST_LINES_S = 2.0
_LOOK_EVERY_S = 0.25
_ATTEMPTS = 2
"""One alone might have met a moment in which a large body was parsed."""


class LivenessCheck:
    """Watches a proxy that has answered before, on a thread of its own.

    Args:
        port: of the proxy.
        every_s: seconds between two requests, and seconds in which each has to be answered.
    """

    def __init__(self, port: int, every_s: float) -> None:
        self._port = port
        self._every_s = every_s
        self._ended = threading.Event()
        self._hangs = threading.Event()

    @property
    def hangs(self) -> bool:
        """True once the proxy has left several requests in a row unanswered."""
        return self._hangs.is_set()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Ask while the block runs."""
        threading.Thread(target=self._watch, name="liveness of the proxy", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            if not any(answers(self._port, self._every_s) for _ in range(_ATTEMPTS)):
                self._hangs.set()
                return


def answers(port: int, within_s: float) -> bool:
    """Return True if the proxy on this port answers a request, which it does not pass on."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=within_s)
    try:
        connection.request("GET", "/health/liveliness")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def claim_port(port: int, logs: Path, say: Say) -> Lock:
    """Reserve the proxy's port, and end a stale proxy of this checkout that still listens on it.

    Returns:
        The lock that keeps other servers of this checkout away from the port and from its process record. If
        it cannot be written, the user is warned, and the port is kept by listening on it alone.

    Raises:
        PortError: another server of this checkout holds the lock, or another process listens on the port,
            which is left running.
    """
    lock = Lock(logs / f"proxy-{port}.lock")
    try:
        is_ours = lock.take()
    except OSError as error:
        say(f"{error.filename or logs} cannot be written ({error.strerror}); the server goes on without it.")
        is_ours = True
    if not is_ours:
        raise PortError(
            f"PROXY_PORT={port} belongs to a server that is running (pid {lock.holder()}); choose another "
            "with --proxy-port, or --no-proxy."
        )
    try:
        _free_port(port, logs, say)
    except PortError:
        lock.release()
        raise
    return lock


def _free_port(port: int, logs: Path, say: Say) -> None:
    if is_free(port):
        return
    holder = owner(port)
    if holder is not None and holder == _record(logs, port).read():
        say(f"Ending a proxy that was left behind on port {port} (pid {holder.pid}).")
        holder.end()
    if not is_free(port):
        who = f"by {holder.command} (pid {holder.pid})" if holder else "by another process"
        raise PortError(f"PROXY_PORT={port} is taken {who}; choose another with --proxy-port, or --no-proxy.")


def _record(logs: Path, port: int) -> ProcessRecord:
    return ProcessRecord(logs / f"proxy-{port}.json")


class Proxy:
    """The proxy's process, and the thread that watches and restarts it.

    Args:
        say: prints a line on the terminal.
        patience_s: seconds that a start may take before the user gets a warning.
        logs: the folder of `proxy.log` and of the process record. The proxy runs without them if it cannot be
            written.
        tell_refusal: called for each request that the proxy refuses itself.
        check_every_s: seconds between two requests that look whether it still answers. One that leaves two
            of them unanswered, each for as long, is ended and started again.
    """

    def __init__(
        self,
        config: ProxyConfig,
        *,
        say: Say,
        patience_s: float,
        logs: Path,
        tell_refusal: TellRefusal = lambda _: None,
        check_every_s: float = _CHECK_EVERY_S,
    ) -> None:
        self._config = config
        self._say = say
        self._patience_s = patience_s
        self._check_every_s = check_every_s
        self._log = ProxyLog(logs / "proxy.log", say, tell_refusal)
        self._record = _record(logs, config.port)
        self._folder = _private_folder()
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._server_is_open = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread(target=self._watch, name="proxy", daemon=True)

    def start(self) -> None:
        """Start the watching thread, which starts the proxy. Does not wait.

        The server may still be loading its model: requests that come through the proxy wait for it.
        """
        self._watcher.start()

    def expect_answers(self) -> None:
        """Say when the proxy answers, or that it does not: the server answers from now on."""
        self._server_is_open.set()

    @property
    def pid(self) -> int | None:
        """The number of the running process, or None."""
        return self._child.pid if self._child else None

    @property
    def is_ready(self) -> bool:
        """True once a request has passed through both servers since the proxy last started."""
        return self._ready.is_set()

    def abandon(self) -> None:
        """Kill the proxy at once. A signal handler may call this, so it takes no lock (lesson 6)."""
        if self._child:
            self._child.kill()
        self._folder.cleanup()
        self._record.forget()

    def stop(self) -> None:
        """Stop the proxy and wait until it has ended."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join(_STOP_S + 3)
        self._folder.cleanup()
        self._log.close()

    def _watch(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            ending = self._run_once()
            if self._stopping.is_set():
                return
            attempt = 0 if time.monotonic() - began > _STEADY_S else attempt
            pause = _BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)]
            self._say(f"The proxy {ending} Starting it again in {pause:g} s.")
            self._stopping.wait(pause)
            attempt += 1

    def _run_once(self) -> str:
        """Start the proxy once, and wait until it ends or hangs, or `stop` is called.

        Returns:
            How it ended, and its last words.
        """
        output = ProcessOutput(self._log)
        try:
            child = self._spawn()
        except OSError as error:
            # PROXY_PYTHON is not a program, the disk is full, or the system is out of resources. The server
            # runs on without it.
            output.note(f"{error.filename or self._config.python} cannot be used: {error.strerror}.")
            return f"ended: {output.last_words()}"
        drain = threading.Thread(target=output.drain, args=(child.stdout,), daemon=True)
        try:
            drain.start()
            self._remember(child, output)
            self._wait_for_answer(child, output)
            self._wait_for_end(child)
        finally:
            self._ready.clear()
            self._child = None
            end_child(child)
            self._record.forget()
        drain.join(_LAST_LINES_S)
        return f"{_ending(child.returncode)}: {output.last_words()}"

    def _wait_for_end(self, child: subprocess.Popen[bytes]) -> None:
        """Wait until the child ends or hangs, or `stop` is called."""
        check = LivenessCheck(self._config.port, self._check_every_s)
        with ExitStack() as stack:
            if self._ready.is_set():
                stack.enter_context(check.watching())
            while child.poll() is None and not self._stopping.wait(0.2):
                if check.hangs:
                    self._say("The proxy runs, but does not answer any more. It is ended.")
                    return

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A new one each time: the system removes temporary folders that nobody has used for days.
        self._folder.cleanup()
        self._folder = _private_folder()
        path = Path(self._folder.name) / "config.yaml"
        path.write_text(configuration(self._config))
        child = subprocess.Popen(
            [self._config.python, "-m", "start_llm.proxy.child", str(path), str(self._config.port)],
            cwd=_ROOT,
            env=environment(self._config, os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C must reach this process only, which ends the proxy after the running streams.
            start_new_session=True,
        )
        self._child = child
        return child

    def _remember(self, child: subprocess.Popen[bytes], output: ProcessOutput) -> None:
        """Record the process, so that a later start recognises a proxy that was left behind."""
        process = Process.of(child.pid)
        try:
            if process is not None:
                self._record.write(process)
        except OSError as error:
            output.note(f"Which process the proxy is cannot be written down: {error.strerror}.")

    def _wait_for_answer(self, child: subprocess.Popen[bytes], output: ProcessOutput) -> None:
        """Wait until a request passes through both servers, the child ends, or `stop` is called."""
        spawned, port = time.monotonic(), self._config.port
        is_open = self._wait_for_server(child)
        expected, is_announced, is_reported = time.monotonic(), False, False
        while is_open and child.poll() is None and not self._stopping.is_set():
            if answers_end_to_end(self._config):
                self._ready.set()
                waited = time.monotonic() - spawned
                self._say(f"The proxy answers on http://127.0.0.1:{port} after {waited:.0f} s.")
                return
            if not is_announced:
                is_announced = True
                self._say(f"Waiting for the proxy on port {port} (LiteLLM needs 5 to 30 s to start) ...")
            waited = time.monotonic() - expected
            if waited > self._patience_s and not is_reported:
                is_reported = True
                self._say(f"The proxy does not answer after {waited:.0f} s: {output.last_words()}")
            self._stopping.wait(_LOOK_EVERY_S)

    def _wait_for_server(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait until the server answers itself. False if the child ends, or `stop` is called, before."""
        while not self._server_is_open.wait(_LOOK_EVERY_S):
            if child.poll() is not None or self._stopping.is_set():
                return False
        return True


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="start_llm-proxy-", ignore_cleanup_errors=True)


def _ending(status: int | None) -> str:
    """Say how a process ended, of its exit status."""
    if status is not None and status < 0:
        return f"was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"ended with status {status}" if status else "ended"


def answers_end_to_end(config: ProxyConfig) -> bool:
    """Send a chat through both servers; True if the server answered.

    The server answers it without the model, and counts it nowhere. Status 400 counts as an answer: a model
    without a chat template refuses every chat.
    """
    body = {"model": config.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {next(iter(config.keys), 'local')}",
        READINESS_HEADER: config.secret.readiness,
    }
    connection = http.client.HTTPConnection("127.0.0.1", config.port, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection.getresponse().status in (HTTPStatus.OK, HTTPStatus.BAD_REQUEST)
    except (OSError, http.client.HTTPException):
        # Not up yet.
        return False
    finally:
        connection.close()


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Close the child's standard input, terminate it, and kill it if it still runs after 4 s."""
    if child.stdin:
        child.stdin.close()
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
