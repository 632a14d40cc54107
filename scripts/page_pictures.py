"""Make the pictures of the status page in docs/pictures, from a live server with the demo model.

    .venv/bin/python -m scripts.page_pictures

Needs Chromium. On Linux start it with the BLAS that install_and_run.py preloads.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from PIL import Image

from scripts.browser import Page, browsing

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 1330
COLOURS = 256
CHUNK = 500
"""Tokens of the long prompt that are read before the picture is taken."""
MAX_BYTES = 150_000
PATIENCE_S = 60
NOTES = "The cache keeps what was read, so that the next turn of a conversation reads only what is new. "
QUESTIONS = (
    "What is a cache?",
    "And a token?",
    "Why does it matter?",
    "Go on.",
    "Who reads it?",
    "Thank you.",
)

type Colour = tuple[int, int, int]


@contextmanager
def serving(folder: str) -> Generator[int]:
    """Serve the demo model with a disk tier; return the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {**os.environ, "STATE_ROOT": f"{folder}/state", "SSD_CACHE_DIR": f"{folder}/disk"}
    environment |= {"ENABLE_REQUEST_LOGGING": "false", "SSD_CACHE_WRITE_AFTER_SECONDS": "1"}
    command = [sys.executable, "-m", "start_llm", "serve", "--demo", "--no-proxy", "--mlx-port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(port))
        yield port
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("The server did not come as far as the picture needs.")
        time.sleep(0.05)


def answers(port: int) -> bool:
    try:
        return bool(ask(port, "/health"))
    except OSError:
        return False


def ask(port: int, path: str, body: object | None = None) -> Any:
    """GET, or POST a body, and return the answer's JSON, whatever its status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        data = None if body is None else json.dumps(body)
        method = "GET" if body is None else "POST"
        headers = {"Content-Type": "application/json", "User-Agent": "demo"}
        connection.request(method, path, data, headers)
        return json.load(connection.getresponse())
    finally:
        connection.close()


def chat(port: int, messages: list[dict[str, str]], session: str, max_tokens: int = 40) -> Any:
    body = {"messages": messages, "session_id": session, "max_tokens": max_tokens}
    return ask(port, "/v1/chat/completions", body)


def make_traffic(port: int) -> None:
    """Two conversations, one of which its client changes in the middle, and two requests that are refused."""
    for session, changes in (("docs-writer", False), ("bug-hunter", True)):
        messages = [{"role": "system", "content": f"You are the {session}. {NOTES * 8}"}]
        for number, question in enumerate(QUESTIONS):
            if changes and number == 4:
                messages[0]["content"] = messages[0]["content"].replace("reads only", "has to read only", 1)
            messages.append({"role": "user", "content": question})
            reply = chat(port, messages, session)["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": reply or "Yes."})
    ask(port, "/v1/engines")
    chat(port, [{"role": "somebody", "content": "Hello"}], "typo")


def ask_in_page(page: Page, question: str) -> None:
    page.run("document.getElementById('question').focus()")
    page.write(question)
    page.press("Enter")
    page.until("document.getElementById('chat-state').innerText === 'The reply is complete.'", PATIENCE_S)
    page.run("document.activeElement.blur(); scrollTo(0, 0)")


@contextmanager
def long_prompt(port: int, name: str) -> Generator[None]:
    """A prompt that is being read for as long as the block takes, or a little less."""
    messages = [{"role": "user", "content": f"{name}: {NOTES * 110}"}]

    def read() -> None:
        with suppress(OSError):
            chat(port, messages, name, max_tokens=200)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: any(request["done_tokens"] > CHUNK for request in ask(port, "/activity")["running"]))
    yield
    reader.join()


def small(png: bytes) -> bytes:
    """Return the same picture with a palette of its most frequent colours. The others become the nearest."""
    whole = Image.open(io.BytesIO(png)).convert("RGB")
    data = whole.tobytes()
    pixels = list(zip(data[::3], data[1::3], data[2::3], strict=True))
    counts = Counter(pixels)
    palette = [colour for colour, _ in counts.most_common(COLOURS)]
    places = {colour: _nearest(palette, colour) for colour in counts}
    reduced = Image.frombytes("P", whole.size, bytes(places[pixel] for pixel in pixels))
    reduced.putpalette([part for colour in palette for part in colour])
    picture = io.BytesIO()
    reduced.save(picture, "PNG", optimize=True)
    return picture.getvalue()


def _nearest(palette: Sequence[Colour], colour: Colour) -> int:
    """Return the place of the colour that is most like another one."""
    distances = [sum((a - b) ** 2 for a, b in zip(candidate, colour, strict=True)) for candidate in palette]
    return distances.index(min(distances))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, serving(folder) as port, browsing() as browser:
        make_traffic(port)
        for name, dark in (("light", False), ("dark", True)):
            with browser.page(f"http://127.0.0.1:{port}", WIDTH, HEIGHT, dark=dark) as page:
                page.until("document.querySelectorAll('#recent li').length > 0")
                ask_in_page(page, "Hello! What can you do?")
                with long_prompt(port, f"reader-{name}"):
                    page.run("poll()")
                    page.until("document.querySelectorAll('#running li').length === 1")
                    picture = small(page.picture())
            if len(picture) > MAX_BYTES:
                raise SystemExit(f"The {name} picture has {len(picture):,} bytes.")
            path = FOLDER / f"status-page-{name}.png"
            path.write_bytes(picture)
            print(f"{path.relative_to(ROOT)}: {len(picture):,} bytes")


if __name__ == "__main__":
    main()
