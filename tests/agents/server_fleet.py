"""Several real servers behind one proxy, and conversations that are played in turn over them."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.agent_servers import HttpServer
from tests.agents.agent_account import SLACK_TOKENS, Rendering, Request, Sample
from tests.agents.agent_clients import PLAIN
from tests.agents.agent_shapes import QUICK, Chat, Player, Reply, Server, Shape
from tests.proxy.conftest import ROOT, answers, free_port, until
from tests.serving import wait_for_health

LEAST_EFFICIENCY = 0.97
COUNT = 3
_PATIENCE_S = 180
"""A busy machine takes long to load three models and LiteLLM at once."""


class ServerFleet:
    """Server processes with one model. The first one has the proxy, behind which all of them are.

    Args:
        state: an empty folder; what the servers keep and print is in it.
        key: what clients of the proxy have to send. The servers then ask for another one, which nobody knows.
        count: how many servers.
    """

    def __init__(self, model: Path, state: Path, *, key: str = "", count: int = COUNT) -> None:
        self.model = model
        self.secret, self.server_key = secrets.token_hex(24), secrets.token_hex(24)
        self.ports = [free_port() for _ in range(count)]
        self.proxy_port = free_port()
        self._state = state
        self._key = key
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @classmethod
    @contextmanager
    def started(
        cls, model: Path, state: Path, *, key: str = "", count: int = COUNT
    ) -> Generator[ServerFleet]:
        fleet = cls(model, state, key=key, count=count)
        try:
            for number in range(count):
                fleet.launch(number)
            for number in range(count):
                fleet.await_server(number)
            until(lambda: answers(fleet.proxy_port), within_s=_PATIENCE_S)
            until(fleet.is_whole, within_s=_PATIENCE_S)
            yield fleet
        finally:
            for number in list(fleet._processes):
                fleet.stop(number)

    @property
    def door(self) -> HttpServer:
        """The proxy."""
        return HttpServer(f"http://127.0.0.1:{self.proxy_port}/v1", "any", self._key)

    @property
    def by_chance(self) -> ByChance:
        """The servers themselves, past the proxy."""
        servers = [HttpServer(f"http://127.0.0.1:{port}/v1", "any") for port in self.ports]
        return ByChance(servers, random.Random(0))

    def launch(self, number: int) -> None:
        """Start the process of a server."""
        state = self._state / str(number)
        state.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "start_llm", "serve", "--model", str(self.model)]
        command += ["--mlx-port", str(self.ports[number])]
        with (state / "output").open("ab") as output:
            self._processes[number] = subprocess.Popen(
                command, cwd=ROOT, env=self._environment(number, state), stdout=output, stderr=output
            )

    def _environment(self, number: int, state: Path) -> dict[str, str]:
        others = ",".join(f"http://127.0.0.1:{port}" for port in self.ports[1:])
        proxy = {"PROXY": "true", "PROXY_PORT": str(self.proxy_port), "PROXY_BACKENDS": others}
        return {
            **os.environ,
            "BACKEND_SECRET": self.secret,
            "STATE_ROOT": str(state),
            "LOG_ROOT": str(state / "logs"),
            "TMPDIR": str(state),
            "SSD_CACHE_DIR": "off",
            **({"PROXY_API_KEY": self._key, "MLX_API_KEY": self.server_key} if self._key else {}),
            **({"PROXY": "false"} if number else proxy),
        }

    def await_server(self, number: int) -> None:
        wait_for_health(self._processes[number], self.ports[number], _PATIENCE_S)

    def start(self, number: int) -> None:
        """Start a server, and wait until the proxy sends requests to it."""
        self.launch(number)
        self.await_server(number)
        until(self.is_whole, within_s=_PATIENCE_S)

    def kill(self, number: int) -> int:
        """Kill a server. Returns its port."""
        process = self._processes.pop(number)
        process.kill()
        process.wait()
        return self.ports[number]

    def stop(self, number: int) -> None:
        process = self._processes.pop(number)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def states(self) -> list[str]:
        """What the proxy knows of each server."""
        return [server["state"] for server in self.page("/stats")["servers"]]

    def is_whole(self) -> bool:
        return set(self.states) == {"ok"}

    def page(self, path: str) -> Any:
        """Return what the proxy answers to a GET: an object, or text where it is no JSON."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.proxy_port}{path}", headers=headers)
        with urllib.request.urlopen(asked, timeout=30) as reply:
            text = reply.read().decode()
            return json.loads(text) if reply.headers["Content-Type"] == "application/json" else text

    def post(self, path: str, body: Any) -> Any:
        """Return the proxy's answer to a POST."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.proxy_port}{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return json.load(reply)

    def restart_proxy(self) -> None:
        """Kill the proxy, which its server starts again, and wait until it knows all servers."""
        record = self._state / "0" / "logs" / f"proxy-{self.proxy_port}.json"
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        until(lambda: not answers(self.proxy_port), within_s=_PATIENCE_S)
        until(lambda: answers(self.proxy_port), within_s=_PATIENCE_S)
        until(self.is_whole, within_s=_PATIENCE_S)

    def printed(self) -> str:
        """Return what all servers have printed and logged."""
        files = [path for path in self._state.rglob("*") if path.is_file() and path.suffix in ("", ".log")]
        return "".join(path.read_text(errors="replace") for path in files)

    def holders(self, conversations: Conversations) -> dict[str, int]:
        """Return for each conversation the port of the server that has most of its last request."""
        return {name: self._holder(chat.request) for name, chat in conversations.chats.items()}

    def _holder(self, request: Request) -> int:
        body = json.dumps({"messages": list(request.messages), "tools": list(request.tools)}).encode()

        def cached(port: int) -> int:
            url = f"http://127.0.0.1:{port}/v1/cache/explain"
            asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=30) as reply:
                return json.load(reply)["cached_tokens"]

        return max(self.ports, key=cached)


@dataclass(frozen=True)
class ByChance:
    """Sends each request to one of several servers at random, the same ones each time."""

    servers: Sequence[Server]
    source: random.Random

    def ask(self, request: Request) -> Reply:
        return self.source.choice(self.servers).ask(request)

    def leave(self, request: Request, after_s: float) -> None:
        self.source.choice(self.servers).leave(request, after_s)

    def prefilled_tokens(self) -> None:
        return None


@dataclass
class Played:
    """The samples of each conversation, by its name."""

    samples: dict[str, list[Sample]]

    @property
    def unavoidable(self) -> int:
        return sum(sample.unavoidable for samples in self.samples.values() for sample in samples)

    @property
    def computed(self) -> int:
        return sum(sample.computed for samples in self.samples.values() for sample in samples)

    @property
    def efficiency(self) -> float:
        return self.unavoidable / self.computed

    @property
    def paid(self) -> set[str]:
        """The conversations that computed more than they had to, beyond the slack of a request."""
        return {
            name
            for name, samples in self.samples.items()
            if any(sample.excess > SLACK_TOKENS for sample in samples)
        }

    def cells(self) -> list[str]:
        requests = sum(map(len, self.samples.values()))
        return [
            f"{requests}",
            f"{self.unavoidable:,}",
            f"{self.computed:,}",
            f"{self.efficiency:.3f}",
            f"{len(self.paid)} of {len(self.samples)}",
        ]


class Conversations:
    """Append-only conversations with a system text each, which are played in turn.

    Args:
        title: makes their texts other ones than those of another title.
        is_named: each sends a session id.
    """

    def __init__(
        self, title: str, server: Server, rendering: Rendering, count: int, *, is_named: bool
    ) -> None:
        self.title = title
        self._player = Player(server, rendering, own=False)
        client = replace(PLAIN, is_named=is_named)
        names = [f"{title}, conversation {number}" for number in range(count)]
        self.chats = {name: Chat.begin(self._player, name, f"{name}, task", client=client) for name in names}

    def play(self, turns: int) -> Played:
        """Let each of them ask, one after the other, as many times."""
        samples: dict[str, list[Sample]] = {name: [] for name in self.chats}
        for _ in range(turns):
            for name, chat in self.chats.items():
                shape = Shape(name, lambda *_, chat=chat: chat.turn())
                samples[name] += self._player.play(shape, QUICK).samples
        return Played(samples)
