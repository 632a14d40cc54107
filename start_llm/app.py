"""Build the parts of the server, connect them, start them and stop them (the composition root)."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from start_llm import __version__
from start_llm.access.key_limits import KeyLimits
from start_llm.access.request_tenant import Tenants
from start_llm.audit.subject import AuditedModel
from start_llm.config.paths import from_root, servers_folder
from start_llm.config.settings import Settings
from start_llm.engine.engine_thread import EngineThread
from start_llm.engine.followers import Followers
from start_llm.hosting.disk_storage import DiskStorage
from start_llm.hosting.model_host import ModelHost
from start_llm.hosting.model_runtime import ModelRuntime
from start_llm.hosting.shared_conversations import SharedConversations
from start_llm.hosting.shared_parts import SharedParts
from start_llm.hosting.startup_summary import model_rows, notes, paste_lines, unsuited_by
from start_llm.launch.server_info import own_url
from start_llm.library.download import resolve
from start_llm.library.shelf import Shelf
from start_llm.models.device import this_device
from start_llm.protocols.notices import Notices
from start_llm.proxy.config import ProxyConfig
from start_llm.proxy.launcher import Proxy, claim_port
from start_llm.proxy.refusals import ProxyRefusal
from start_llm.ranks.leader import Leader
from start_llm.ranks.rank_settings import sent_settings
from start_llm.server.activity_pages import ServingMachine, memory_parts
from start_llm.server.drain import RequestDrain
from start_llm.server.handler import Handler
from start_llm.server.library_pages import LibraryPages
from start_llm.server.listener import Listener, ServerContext
from start_llm.storage.running_servers import RunningServer, ServerFile
from start_llm.telemetry.activity import Activity, Refusal
from start_llm.telemetry.live_table import LiveTable, MemoryUse
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.prometheus import ServerMetrics
from start_llm.telemetry.terminal import Terminal
from start_llm.wiring.from_settings import (
    access_policy,
    backend_secret,
    check_backends,
    check_ports,
    make_seal,
    make_trace,
    no_table,
    response_store,
)
from start_llm.wiring.memory_plan import memory_budget
from start_llm.wiring.model_places import (
    adapter_dir,
    first_start_advice,
    make_shelf,
    model_aliases,
    model_name,
    served_models,
)

_STOP_S = 5.0  # the longest prefill chunk that is tried takes 4 s
_LAST_LINES_S = 0.5
_WATCH_S = 1.0
_STUCK = 70
"""Exit status: an error inside of the software (`EX_SOFTWARE`)."""
_CANNOT_START = 2
"""Exit status: as of any server that cannot start."""
_WITHOUT_A_RANK = 75
"""Exit status: it may work when it is tried again (`EX_TEMPFAIL`)."""
_LEAST_FLUSH_S = 1.0
"""Seconds for writing to the disk, if running requests took all of DRAIN_SECONDS."""


class App:
    """One server process.

    1. bind the ports          so that a busy port is found before the model is loaded
    2. find the model          in a folder, or download it with progress; `/health` says `starting`
    3. load it                 on the engine thread, which owns it from then on
    4. open                    answer requests
    5. start the proxy         in a process of its own; its watcher prints when it is ready. Beside a GPU, and
                               without other servers, it starts before 3, and its requests wait for the model
    6. close                   refuse new requests, wait for running ones, then stop everything

    Args:
        leader: leads the other ranks that compute the model; None: there are none.
    """

    def __init__(self, settings: Settings, terminal: Terminal, leader: Leader | None = None) -> None:
        self._settings = settings
        self._terminal = terminal
        self._leader = leader
        self._requests = RequestMetrics()
        self._prometheus = ServerMetrics()
        self._activity = Activity()
        self._thread = EngineThread()
        self._trace = make_trace(settings, terminal.say)
        self._hosting: Future[ModelHost] = Future()
        self._secret = backend_secret(settings)
        self._access_policy = access_policy(settings, self._secret.api_key)
        self._drain = RequestDrain()
        self._key_limits = KeyLimits(settings.access.requests_at_once, settings.access.tokens_per_minute)
        check_ports(settings)
        check_backends(settings)
        self._logs = from_root(settings.log.root)
        self._file = ServerFile(servers_folder(settings.server.state_root))
        # What would outlive a process that ended at once; and all that `close` closes, the last part first.
        with ExitStack() as opened:
            if settings.proxy.is_on:
                opened.callback(claim_port(settings.proxy.port, self._logs, terminal.say).release)
            self._listener = Listener(settings.server.host, settings.server.port, Handler, settings.http)
            opened.callback(self._file.remove)
            self._left_behind = opened.pop_all()
        self._opened = ExitStack()
        self._opened.callback(self._left_behind.close)

    @property
    def runtime(self) -> ModelRuntime:
        """The loaded model that was used last. Only once the app has started."""
        return self._hosting.result(timeout=0).default

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def url(self) -> str:
        return own_url(self._settings.server.host, self.port)

    def start(self) -> None:
        """Carry out steps 2 to 5.

        Raises:
            StartupError: a step failed. Everything that was started is stopped again.
        """
        try:
            self._announce()
            self._listener.begin(self._access_policy)
            for line in first_start_advice(self._settings):
                self._terminal.say(line)
            name, folders = self._find_models()
            adapters = adapter_dir(self._settings)
            self._terminal.say(f"start_llm {__version__}: loading {name} ...")
            self._begin_leading()
            host = ModelHost(self._share(), folders, model_aliases(self._settings, folders))
            shelf = make_shelf(self._settings, lambda: host.loaded)
            self._begin_computing(host, shelf)
            self._terminal.names_models = len(folders) > 1
            self._watch(host)
            proxy = self._start_proxy(name) if self._may_start_proxy_early else None
            host.switcher.load_first(name)
            # As soon as the port is open a request may put another model in the place of the first one.
            introduce = self._introduction(host.default)
            self._open(host, shelf, adapters)
            introduce()
            if proxy := proxy or self._start_proxy(name):
                proxy.expect_answers()
            host.switcher.begin_unloading_idle()
        except BaseException:
            self.close()
            raise

    def close(self) -> bool:
        """Carry out step 6. False if the engine is still computing; the caller may then exit the process."""
        patience_s = self._settings.server.drain_s
        self._drain.begin(patience_s)
        if running := self._drain.inside:
            self._terminal.say(
                f"Waiting up to {patience_s:g} s for {running} running requests. Ctrl-C again ends at once."
            )
        self._drain.wait(patience_s)
        self._listener.stop_accepting()
        self._listener.connections.close_all()
        self._opened.close()
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Kill the proxy, release its lock and clean the terminal, without waiting: the process exits now."""
        self._terminal.abandon()
        self._left_behind.close()

    def _begin_leading(self) -> None:
        """Let the other ranks load the model too. From now on the process ends when one of them is gone."""
        if self._leader:
            self._leader.watch(self._end_without_a_rank)
            self._leader.begin(sent_settings(self._settings))

    def _end_without_a_rank(self, reason: str, is_final: bool) -> None:
        """End the process at once: the engine may be waiting for the rank that is gone."""
        self._terminal.say(f"{reason} The service ends.")
        self._terminal.close()
        self.abandon()
        os._exit(_CANNOT_START if is_final else _WITHOUT_A_RANK)

    def _watch(self, host: ModelHost) -> None:
        """End the process once it is stuck, if something starts it again: no thread of it can be stopped."""

        def watch() -> None:
            while not self._drain.has_begun:
                time.sleep(_WATCH_S)
                if reason := host.stuck_reason():
                    self._terminal.say(f"The server is stuck: {reason}. It ends, to be started again.")
                    self._terminal.close()
                    self.abandon()
                    os._exit(_STUCK)

        if self._settings.server.ends_when_stuck:
            threading.Thread(target=watch, name="watch", daemon=True).start()

    def _announce(self) -> None:
        """Write where this server is, so that commands find it."""
        port = self._settings.proxy.port
        server = RunningServer(
            pid=os.getpid(),
            url=self.url,
            proxy_url=own_url("127.0.0.1", port) if self._settings.proxy.is_on else None,
            version=__version__,
            started_at=time.time(),
        )
        try:
            self._file.write(server)
        except OSError as error:
            self._terminal.say(f"STATE_ROOT cannot be written ({error}): commands do not find this server.")

    def _find_models(self) -> tuple[str, dict[str, Path]]:
        """Return the id of the model to load first, and the folders of all models by id."""
        return served_models(self._settings, resolve(model_name(self._settings)))

    def _share(self) -> SharedParts:
        """Open what the models share."""
        disk = DiskStorage(self._settings, self._terminal.say)
        self._opened.callback(disk.close, _STOP_S)
        self._prometheus.show_disk(disk.metrics)
        responses = disk.responses()
        if responses:
            self._opened.callback(responses.close)
        return SharedParts(
            settings=self._settings,
            terminal=self._terminal,
            thread=self._thread,
            disk=disk,
            conversations=SharedConversations(self._settings, disk),
            requests=self._requests,
            prometheus=self._prometheus,
            trace=self._trace,
            responses=response_store(self._settings, responses.table if responses else no_table),
            drain=self._drain,
            activity=self._activity,
            key_limits=self._key_limits,
            ranks=self._leader.group if self._leader else None,
            followers=self._leader or Followers(),
        )

    def _begin_computing(self, host: ModelHost, shelf: Shelf) -> None:
        """Start the engine thread. `close` stops the models first, and last what requests write to."""
        self._opened.callback(host.switcher.leave_conversations)
        self._opened.callback(shelf.queue.close)
        self._opened.callback(self._drain.wait, _LAST_LINES_S)
        self._opened.callback(self._thread.close, _STOP_S)
        self._opened.callback(self._stop_models, host)
        self._thread.start()
        self._hosting.set_result(host)

    def _stop_models(self, host: ModelHost) -> None:
        host.switcher.stop(_STOP_S, flush_s=max(self._drain.left_s, _LEAST_FLUSH_S))

    def _open(self, host: ModelHost, shelf: Shelf, adapters: Path | None) -> None:
        machine = ServingMachine(this_device().name, memory_budget(self._settings), host.default.status.disk)
        context = ServerContext(
            models=host,
            library=LibraryPages(shelf, shelf.queue, host),
            adapter_root=adapters,
            prometheus=self._prometheus,
            seal=make_seal(self._settings, self._terminal.say),
            tenants=Tenants(self._secret, apart=self._settings.access.isolates_tenants),
            responses=host.default.status.responses,
            notices=Notices(self._terminal.say),
            access_policy=self._access_policy,
            drain=self._drain,
            key_limits=self._key_limits,
            activity=self._activity,
            show_refusal=self._terminal.refused,
            machine=machine,
        )
        self._listener.open(context)
        self._file.tell_ready()

        def memory() -> MemoryUse:
            return MemoryUse(sum(memory_parts(host.listed()).values()), machine.budget_bytes)

        self._terminal.follow(LiveTable(self._activity, memory), os.environ)

    @property
    def _may_start_proxy_early(self) -> bool:
        """True if the proxy may start while the first model is loaded.

        Where the processor computes the model, LiteLLM would slow what is measured of it. Other servers
        behind the proxy would answer with models of theirs.
        """
        return this_device().kind != "CPU" and not self._settings.proxy.backends

    def _start_proxy(self, first_model: str) -> Proxy | None:
        settings = self._settings
        if not settings.proxy.is_on:
            return None
        proxy = Proxy(
            ProxyConfig(
                settings=settings,
                backend=self.url,
                first_model=first_model,
                secret=self._secret,
            ),
            say=self._terminal.say,
            patience_s=settings.proxy.wait_s,
            logs=self._logs,
            tell_refusal=self._note_proxy_refusal,
        )
        self._left_behind.callback(proxy.abandon)
        self._opened.callback(proxy.stop)
        proxy.start()
        return proxy

    def _note_proxy_refusal(self, proxy_refusal: ProxyRefusal) -> None:
        refusal = Refusal(tenant=None, **asdict(proxy_refusal))
        self._activity.refuse(refusal)
        self._terminal.refused(refusal)

    def _introduction(self, runtime: ModelRuntime) -> Callable[[], None]:
        """Return what prints the summary of a model. It does not refer to the model, which may go."""
        card, model = runtime.card, runtime.startup.model
        rows = [*model_rows(runtime), ("address", f"{self.url}/v1")]
        audited = AuditedModel(model.tokenizer, card.family, runtime.preparer)
        sentences, unsuited = list(notes(card, audited)), unsuited_by(audited, card.context_window)
        pasted = paste_lines(self.url, card.id, unsuited, asks_key=bool(self._settings.access.keys))

        def introduce() -> None:
            self._terminal.summary(rows)
            for sentence in sentences:
                self._terminal.say(sentence)
            for title, lines in pasted:
                self._terminal.paste(title, lines)
            self._terminal.say("\n  Ctrl-C ends the server.\n")

        return introduce
