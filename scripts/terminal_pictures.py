"""Make the pictures of the terminal and of the menu in docs/pictures, from a live server with the demo model.

    .venv/bin/python -m scripts.terminal_pictures

Server and menu run on a pseudo-terminal. The bytes that it writes are replayed, and rich draws what is to be
seen of them. On Linux start it with the BLAS that install_and_run.py preloads.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from scripts.page_pictures import NOTES, PATIENCE_S, answers, ask, make_traffic, wait_until

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
PICTURE, MENU_PICTURE = PICTURES / "terminal.svg", PICTURES / "menu.svg"
COLUMNS, ROWS = 136, 30
READY = "Ctrl-C ends the server."
END = "<|im_end|>"
MAX_BYTES = 150_000
_CODES = re.compile(r"(\r?\n|\r|\x1b\[\d+A|\x1b\[J)")
_FETCHED_FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


def replayed(written: str) -> list[str]:
    """Return the rows of a terminal after these characters. Colours stay in them as codes."""
    rows, row = [""], 0
    for part in _CODES.split(written):
        if part.endswith("\n"):
            row += 1
            rows += [""] * (row == len(rows))
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(row - int(part[2:-1]), 0)
        elif part == "\x1b[J":
            rows[row:] = [""]
        elif part != "\r":
            rows[row] += part
    return rows


def drawn(rows: list[str], title: str) -> str:
    """Return an SVG picture of rows. Its letters are of a font that the reader has; nothing is fetched."""
    how: dict[str, Any] = {"force_terminal": True, "color_system": "standard", "no_color": False}
    console = Console(file=StringIO(), record=True, width=COLUMNS, **how)
    for row in rows:
        console.print(Text.from_ansi(row), soft_wrap=True)
    return console.export_svg(title=title, code_format=_FETCHED_FONTS.sub("", CONSOLE_SVG_FORMAT))


class Recording:
    """What a pseudo-terminal was sent so far."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):  # the last of those who write has ended
            while data := os.read(self._descriptor, 65536):
                self.text += data.decode()

    def shows(self, *words: str) -> bool:
        rows = "\n".join(replayed(self.text)[-ROWS:])
        return all(word in rows for word in words)


@contextmanager
def serving(folder: str) -> Generator[tuple[int, Recording]]:
    """Serve the demo model on a pseudo-terminal; return its port, and what it writes."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "STATE_ROOT": f"{folder}/state", "TERM": "xterm-256color", "NO_COLOR": ""}
    environment |= {"ENABLE_REQUEST_LOGGING": "false", "PROXY": "false", "MLX_PORT": "0"}
    command = [sys.executable, "-m", "start_llm", "serve", "--demo"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=writer, stderr=writer)
    os.close(writer)
    recording = Recording(reader)
    try:
        wait_until(lambda: recording.shows(READY))
        port = port_in(recording.text)
        wait_until(lambda: answers(port))
        yield port, recording
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def port_in(text: str) -> int:
    match = re.search(r"http://127\.0\.0\.1:(\d+)/v1", text)
    if not match:
        raise SystemExit(f"The server does not say where it is: {text}")
    return int(match[1])


def menu_rows(folder: str, port: int) -> list[str]:
    """Open the menu beside the server of this folder, look at the clients, and return what is to be seen."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "STATE_ROOT": f"{folder}/state", "TERM": "dumb"}
    environment |= {"PROXY": "false", "MLX_PORT": str(port)}
    command = [sys.executable, "-m", "start_llm"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=writer, stdout=writer, stderr=writer
    ) as process:
        os.close(writer)
        recording = Recording(reader)
        wait_until(lambda: "q to leave: " in recording.text)
        os.write(reader, b"1\n")
        wait_until(lambda: "Enter to go back: " in recording.text)
        process.kill()
    return replayed(f"$ start_llm\r\n{recording.text}")


@contextmanager
def asked(port: int, session: str, text: str, **more: Any) -> Generator[None]:
    """A request that runs beside the block, or a little longer."""
    body = {"messages": [{"role": "user", "content": text}], "session_id": session, **more}
    asking = threading.Thread(target=ask, args=(port, "/v1/chat/completions", body))
    asking.start()
    yield
    asking.join()


def without_end(port: int) -> dict[str, int]:
    """Return a logit bias with which the model does not end its reply."""
    (end,) = ask(port, "/tokenize", {"prompt": END})["tokens"]
    return {str(end): -100}


def write_picture(path: Path, picture: str) -> None:
    if len(picture) > MAX_BYTES:
        raise SystemExit(f"The picture has {len(picture):,} bytes.")
    path.write_text(picture)
    print(f"{path.relative_to(ROOT)}: {len(picture):,} bytes")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, serving(folder) as (port, recording):
        make_traffic(port)
        bias = without_end(port)
        with (
            asked(port, "story-teller", "Tell me a story.", max_tokens=1500, logit_bias=bias),
            asked(port, "long-reader", NOTES * 800, max_tokens=5),
        ):
            wait_until(lambda: recording.shows("reading", "writing"))
            lines = recording.text.partition(READY)[2].lstrip()
            picture = drawn(replayed(lines), "start_llm")
        write_picture(PICTURE, picture)
        write_picture(MENU_PICTURE, drawn(menu_rows(folder, port), "start_llm"))


if __name__ == "__main__":
    main()
