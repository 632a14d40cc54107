"""A server for an examination: the real one, with a model and nothing of the user's."""

import http.client
import io
import json
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from start_llm.app import App
from start_llm.config.paths import from_root
from start_llm.config.setting_types import OFF
from start_llm.config.settings import Settings
from start_llm.core.errors import StartLLMError
from start_llm.hosting.model_runtime import ModelRuntime
from start_llm.storage.private_files import private_folder
from start_llm.telemetry.terminal import Terminal

_REPLY_S = 600.0
_DRAIN_S = 5.0
_TEXTS = ("reasoning_content", "content")
_DIGESTS = "weights.json"


class ServerFailed(StartLLMError):
    """The server did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """A streamed answer.

    Attributes:
        message: as a client sends it back.
        prompt, cached, completion: tokens.
        ttft_s: seconds until its first text, or until its end if it has none.
        decode_s: seconds from there to its end.
    """

    message: dict[str, str]
    prompt: int
    cached: int
    completion: int
    ttft_s: float
    decode_s: float

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


class ExaminedServer:
    """Starts and stops the server; everything that it writes is in a folder of its own.

    Args:
        settings: the user's.
        folder: for all that the server writes.
    """

    def __init__(self, settings: Settings, folder: Path, model: Path) -> None:
        ssd_folder = str(folder / "pages") if settings.cache.is_on else OFF
        state = str(folder / "state")
        self._settings = replace(
            settings,
            model=replace(
                settings.model, path=str(model), dir=None, more=(), adapter_dir=None, pinned=(), aliases=()
            ),
            server=replace(settings.server, host="127.0.0.1", port=0, state_root=state, drain_s=_DRAIN_S),
            access=replace(settings.access, keys=(), requests_at_once=0, tokens_per_minute=0),
            proxy=replace(settings.proxy, is_on=False),
            ssd=replace(settings.ssd, folder=ssd_folder),
            log=replace(settings.log, traces=False, root=str(folder / "logs")),
        )
        self._app: App | None = None

    def start(self) -> float:
        """Load the model. Returns the seconds that it took.

        Raises:
            StartLLMError: the server does not start.
        """
        began = time.perf_counter()
        app = App(self._settings, Terminal(io.StringIO()))
        app.start()
        self._app = app
        return time.perf_counter() - began

    def stop(self) -> None:
        app, self._app = self._app, None
        if app and not app.close():
            raise ServerFailed("the engine did not stop")

    @property
    def runtime(self) -> ModelRuntime:
        if self._app is None:
            raise ServerFailed("the server does not run")
        return self._app.runtime

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a prompt, as a fresh conversation has them."""
        with self._answer("/tokenize", {"messages": messages}) as response:
            return list(json.loads(response.read())["tokens"])

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, **more: Any) -> TimedAnswer:
        """Ask for a streamed greedy reply, and read it to its end.

        Raises:
            ServerFailed: the answer is an error, or breaks off.
        """
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        began = time.perf_counter()
        with self._answer("/v1/chat/completions", body) as response:
            return _read(response, began)

    @contextmanager
    def _answer(self, path: str, body: object) -> Generator[http.client.HTTPResponse]:
        if self._app is None:
            raise ServerFailed("the server does not run")
        with closing(http.client.HTTPConnection("127.0.0.1", self._app.port, timeout=_REPLY_S)) as connection:
            try:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                yield _checked(connection.getresponse())
            except (OSError, http.client.HTTPException) as error:
                raise ServerFailed(f"a request is not answered to its end: {error!r}") from error


@contextmanager
def examined_server(settings: Settings, model: Path) -> Generator[ExaminedServer]:
    """Give an examination a server that has not been started. Stops it, and removes what it has written."""
    root = from_root(settings.server.state_root)
    private_folder(root)
    with TemporaryDirectory(prefix="doctor-", dir=root) as name:
        folder = Path(name)
        private_folder(folder / "state")
        if (root / _DIGESTS).is_file():
            # What the weights are is known already; reading all of them again would take minutes.
            shutil.copy(root / _DIGESTS, folder / "state")
        server = ExaminedServer(settings, folder, model)
        try:
            yield server
        finally:
            server.stop()


def _checked(response: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if response.status != http.client.OK:
        body = response.read(200).decode(errors="replace")
        raise ServerFailed(f"a request is answered with {response.status}: {body}")
    return response


def _read(response: http.client.HTTPResponse, began: float) -> TimedAnswer:
    first, usage = None, None
    message = {"role": "assistant", "content": ""}
    for chunk in _chunks(response):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            for name, text in choice["delta"].items():
                if name in _TEXTS and text:
                    first = first or time.perf_counter()
                    message[name] = message.get(name, "") + text
    end = time.perf_counter()
    if usage is None:
        raise ServerFailed("a reply breaks off")
    first = first or end
    return TimedAnswer(
        message=message,
        prompt=usage["prompt_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        completion=usage["completion_tokens"],
        ttft_s=first - began,
        decode_s=end - first,
    )


def _chunks(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: {"):
            chunk = json.loads(line[len(b"data: ") :])
            if "error" in chunk:
                raise ServerFailed(f"a reply breaks off: {chunk['error'].get('message')}")
            yield chunk
