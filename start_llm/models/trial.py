"""Looks for what would hang or fill the server if it were loaded, before anything is unloaded for it.

What loads runs on the one engine thread, and Python cannot stop a thread. So a template is rendered in a
process of its own first (`template_trial`), and the counts of config.json, each of which makes so many
objects, are held against the headers of the weights.
"""

import hashlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from start_llm.core.errors import ModelError
from start_llm.models.weight_files import header, weight_files

_ROOT = Path(__file__).resolve().parents[2]
_MODULE = "start_llm.hosting.template_trial"
_TOO_MUCH_MEMORY = 3
"""An exit status of that module, which is above this layer."""
_LONGEST_S = 60.0
_POLL_S = 0.02
_WATCH_S = 0.25
_MEMORY_BYTES = 3 * 2**29
_READ = (
    "config.json",
    "tokenizer_config.json",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_COUNT = re.compile(
    r"(num_|n_)?((hidden|transformer|encoder|decoder|text|vision|nextn_predict)_)?layers?|depth"
)
_SIZE = re.compile(r"hidden_size|vocab_size|intermediate_size|d_model|n_embd")
_MOST_PACKED = 16
"""Numbers that one element of a tensor holds at most: of two bits in a 32-bit word."""


class TemplateTrials:
    """Renders the templates of models in processes of their own. One that has passed is not tried again."""

    def __init__(self) -> None:
        self._passed: set[bytes] = set()

    def check(self, folder: Path) -> None:
        """Render the templates of a model.

        Raises:
            ModelError: rendering does not end, takes too much memory, or ends the process.
        """
        digest = _digest(folder)
        if digest in self._passed:
            return
        if problem := _problem(folder):
            raise ModelError(f"The chat template in {folder} {problem}")
        self._passed.add(digest)


def _digest(folder: Path) -> bytes:
    """Return a digest of what the trial reads."""
    digest = hashlib.blake2b(digest_size=16)
    for pattern in _READ:
        for path in filter(Path.is_file, sorted(folder.glob(pattern))):
            with suppress(OSError):  # loading tells of it
                digest.update(path.name.encode() + hashlib.blake2b(path.read_bytes()).digest())
    return digest.digest()


def _problem(folder: Path) -> str:
    """Return what is wrong with rendering; empty if nothing is."""
    child = subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(folder.resolve())],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return _judged(child)
    finally:
        child.kill()
        child.wait()


def _judged(child: subprocess.Popen[bytes]) -> str:
    deadline, next_look = time.monotonic() + _LONGEST_S, time.monotonic() + _WATCH_S
    while (status := child.poll()) is None:
        now = time.monotonic()
        if now > deadline:
            return "is not rendered to its end in a minute."
        if now > next_look:
            next_look = now + _WATCH_S
            if _memory(child.pid) > _MEMORY_BYTES:
                return "takes more than a gigabyte of memory to render."
        time.sleep(_POLL_S)
    if status == _TOO_MUCH_MEMORY:
        return "takes more than a gigabyte of memory to render."
    if status in (-signal.SIGXCPU, -signal.SIGALRM):
        return "is not rendered to its end in ten seconds of computing."
    if status < 0:
        return f"ends the process that renders it (signal {-status})."
    return f"cannot be tried: the process that renders it ends with status {status}." if status else ""


def _memory(process: int) -> int:
    """Return the bytes of memory that a process has, where its own limit is not obeyed; elsewhere 0."""
    if sys.platform != "darwin":
        return 0
    command = ("ps", "-o", "rss=", "-p", str(process))
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_LONGEST_S)
    return 1024 * int(result.stdout.strip() or 0)


def check_counts(folder: Path, config: Mapping[str, Any]) -> None:
    """Hold the counts and sizes of a config against the weights, of which only the headers are read.

    Raises:
        ModelError: the weights cannot be those of such a network.
    """
    tensors = [tensor for path in weight_files(folder) for tensor in header(path)]
    longest = max((size for tensor in tensors for size in tensor.shape), default=0)
    for name, value in _numbers(config):
        if _COUNT.fullmatch(name) and value > len(tensors):
            raise ModelError(
                f"config.json in {folder} says {name}={value:,}, and the weights are {len(tensors)} tensors."
            )
        if _SIZE.fullmatch(name) and value > _MOST_PACKED * longest:
            raise ModelError(
                f"config.json in {folder} says {name}={value:,}, and no tensor of the weights has a side of "
                f"more than {longest:,}."
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a config and of the configs in it, by name."""
    waiting = [config]
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif type(value) is int:
                yield name, value
