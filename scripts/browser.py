"""Drive Chromium over its DevTools protocol: enough for the tests and the pictures of the status page."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
    "--disable-background-networking --disable-component-update --disable-sync --disable-default-apps "
    "--no-default-browser-check --remote-debugging-port=0"
).split()
_LISTENS = re.compile(r"DevTools listening on (ws://\S+)")
_PATIENCE_S = 30
_KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Space": (" ", 32, " "),
    "Escape": ("Escape", 27, ""),
}


class PageError(Exception):
    """The browser refused a command, or a script of a test raised."""


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def browsing() -> Generator[Browser]:
    """Start a browser with a profile of its own; both are gone afterwards, whatever happens.

    Raises:
        PageError: there is no Chromium, or it does not start.
    """
    program = find_chromium()
    if program is None:
        raise PageError("no Chromium on PATH")
    profile = tempfile.mkdtemp(prefix="start_llm-browser-")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["TMPDIR"] = profile  # where it leaves folders when it is killed
    process = subprocess.Popen(
        [program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        with connect(_address(process.stderr), max_size=None) as socket:
            yield Browser(socket)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        _remove(Path(profile))


def _address(stream: IO[str] | None) -> str:
    """Return the address at which a browser that is starting listens."""
    for line in stream or ():
        if listening := _LISTENS.search(line):
            return listening[1]
    raise PageError("Chromium ended before it listened")


def _remove(profile: Path) -> None:
    """Remove a profile; a process that was just killed may still be writing to it."""
    for _ in range(20):
        shutil.rmtree(profile, ignore_errors=True)
        if not profile.exists():
            return
        time.sleep(0.05)


@dataclass
class Browser:
    """A running browser. For one thread."""

    socket: Connection
    _last_id: int = 0
    _pages: dict[str, Page] = field(default_factory=dict[str, "Page"])

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send a command and return its result. Events that come before it go to their pages."""
        self._last_id += 1
        own = self._last_id
        command = {"id": own, "method": method, "params": parameters}
        self.socket.send(json.dumps(command | ({"sessionId": session} if session else {})))
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            message = self._receive(deadline - time.monotonic())
            if message.get("id") == own:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']['message']}")
                return message["result"]

    def listen(self, seconds: float) -> None:
        """Receive events for a while."""
        deadline = time.monotonic() + seconds
        with suppress(TimeoutError):
            while (left := deadline - time.monotonic()) > 0:
                self._receive(left)

    def _receive(self, timeout_s: float) -> Any:
        message = json.loads(self.socket.recv(timeout=max(timeout_s, 0)))
        page = self._pages.get(message.get("sessionId", ""))
        if page and "method" in message:
            page.note(message["method"], message["params"])
        return message

    @contextmanager
    def page(self, url: str, width: int = 1600, height: int = 1000, *, dark: bool = False) -> Generator[Page]:
        """Open a page in a context of its own: nothing is stored from one to the next."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
                page.call(f"{domain}.enable")
            page.resize(width, height)
            page.set_colours(dark=dark)
            page.call("Page.navigate", url=url)
            page.until("document.readyState === 'complete'")
            yield page
        finally:
            del self._pages[session]
            with suppress(PageError):
                self.call("Target.disposeBrowserContext", browserContextId=context)


@dataclass
class Page:
    """An open page.

    Attributes:
        problems: errors in the console, refusals of the Content-Security-Policy, scripts that raised.
        requested: the addresses of all requests.
    """

    browser: Browser
    session: str
    problems: list[str] = field(default_factory=list[str])
    requested: list[str] = field(default_factory=list[str])

    def call(self, method: str, **parameters: Any) -> Any:
        return self.browser.call(method, self.session, **parameters)

    def note(self, method: str, event: Any) -> None:
        match method:
            case "Log.entryAdded" if event["entry"]["level"] == "error":
                self.problems.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "assert"):
                self.problems.append(str(event["args"]))
            case "Runtime.exceptionThrown":
                self.problems.append(str(event["exceptionDetails"]))
            case "Network.requestWillBeSent":
                self.requested.append(event["request"]["url"])
            case _:
                pass

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def set_colours(self, *, dark: bool) -> None:
        wanted = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[wanted])

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        evaluated = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in evaluated:
            raise PageError(str(evaluated["exceptionDetails"]))
        return evaluated["result"].get("value")

    def until(self, condition: str, seconds: float = 10) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise PageError(f"not in {seconds:g} s: {condition}")
            self.browser.listen(0.05)

    def press(self, name: str, *, shift: bool = False) -> None:
        """Press a key of `_KEYS`."""
        key, code, text = _KEYS[name]
        key_event = {"key": key, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **key_event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key_event)

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def names(self, roles: Sequence[str]) -> list[tuple[str, str]]:
        """Return the roles and accessible names of all elements that have one of these roles."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles
        ]

    def picture(self) -> bytes:
        """Return a PNG of what is visible."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
