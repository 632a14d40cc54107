"""The processes of a launch: rank 0 serves, and the others load their shards and follow it."""

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from start_llm.config.settings import Settings
from start_llm.core.errors import StartLLMError, StartupError
from start_llm.core.standard_error import print_message, print_traceback
from start_llm.engine.engine_thread import EngineThread
from start_llm.engine.resources import EngineResources
from start_llm.hosting.disk_storage import DiskStorage
from start_llm.hosting.model_loading import EngineLoader, LoaderParts
from start_llm.library.download import resolve
from start_llm.models.model_names import name_of
from start_llm.models.rank_group import RankGroup
from start_llm.ranks.follower import Follower, LeaderMessages
from start_llm.ranks.leader import Leader
from start_llm.ranks.links import PLACE, Link, LinkClosed, Meeting, MeetingPlace, meet
from start_llm.ranks.rank_settings import followed, left_out, settings_together
from start_llm.ranks.wire import SentEnd, SentSettings, SentTrouble
from start_llm.telemetry.terminal import Terminal
from start_llm.wiring.model_places import model_name

type Lead = Callable[[Settings, Leader | None], int]
"""Serves with these settings, and returns the exit status."""

_MEETING_S = 60.0
"""Seconds in which the followers connect to rank 0. All of them have joined the group by then."""
_LAST_FILES_S = 5.0
"""Seconds for files that are queued when everything else has ended."""
_CANNOT_START = 2
_WITHOUT_RANK_0 = 75
"""Exit status of a follower: it may work when the launch is tried again (`EX_TEMPFAIL`)."""


def serve_together(settings: Settings, terminal: Terminal, lead: Lead) -> int:
    """Join the other ranks of a launch. Rank 0 serves, and the others follow it; return the exit status.

    Raises:
        RanksApart: the ranks do not find each other.
        StartupError: the settings ask for what they cannot do.
    """
    launch = _LaunchWatch()
    ranks = RankGroup.join()
    launch.note_joined()
    if ranks is None:
        return lead(settings, None)
    if ranks.rank:
        return _follow(settings, terminal, ranks)
    leader = Leader(ranks, meet_followers(ranks))
    try:
        for line in left_out(settings):
            terminal.say(line)
        return lead(settings_together(settings, ranks), leader)
    finally:
        leader.close()


def meet_followers(ranks: RankGroup) -> list[Link]:
    """Return the links from rank 0 to all others.

    Raises:
        RanksApart: they do not come.
        StartupError: rank 0 cannot listen where they look for it.
    """
    meeting = Meeting(ranks.address)
    ranks.gathered(PLACE.pack(*meeting.place))
    return meeting.wait_for(ranks.size, _MEETING_S)


def meet_leader(ranks: RankGroup) -> Link:
    """Return the link from another rank to rank 0.

    Raises:
        RanksApart: rank 0 is not there.
    """
    place = MeetingPlace(*PLACE.unpack(ranks.gathered(bytes(PLACE.size))[0]))
    return meet(ranks.address, place, ranks.rank)


class _LaunchWatch:
    """Stops this process, as a signal would, when the launch that started it is gone or asks for it.

    `mlx.launch` holds the other end of the standard input, and passes on what it reads.
    """

    def __init__(self) -> None:
        self._has_joined = threading.Event()
        threading.Thread(target=self._watch, name="launch", daemon=True).start()

    def note_joined(self) -> None:
        """Note that the main thread does not wait for other ranks any more, and will see a signal."""
        self._has_joined.set()

    def _watch(self) -> None:
        while sys.stdin.readline():
            self._stop()
        self._stop()

    def _stop(self) -> None:
        if not self._has_joined.is_set():
            os._exit(_CANNOT_START)
        os.kill(os.getpid(), signal.SIGTERM)


# ------------------------------------------------------------------------------------------------- a follower


def _follow(settings: Settings, terminal: Terminal, ranks: RankGroup) -> int:
    link = meet_leader(ranks)
    # Rank 0 stops first, and then says so: until then a follower has to go on computing.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    incoming = LeaderMessages(link, lambda: os._exit(_WITHOUT_RANK_0))
    own = settings_together(settings, ranks)
    sent = incoming.next()
    if isinstance(sent, SentEnd):
        return _CANNOT_START
    if not isinstance(sent, SentSettings):
        raise StartupError(f"Rank 0 began with {type(sent).__name__}.")
    return _FollowerProcess(followed(own, sent), terminal, ranks, link).run(incoming)


class _FollowerProcess:
    """Loads a shard on an engine thread, and follows rank 0 there."""

    def __init__(self, settings: Settings, terminal: Terminal, ranks: RankGroup, link: Link) -> None:
        self._settings = settings
        self._terminal = terminal
        self._ranks = ranks
        self._link = link
        self._disk = DiskStorage(settings, terminal.say)
        self._thread = EngineThread()

    def run(self, incoming: LeaderMessages) -> int:
        """Follow until the service ends, and return the exit status."""
        ended: Future[int] = Future()
        self._disk.add_listener(incoming.note_disk)
        self._thread.start()
        self._thread.submit(lambda: ended.set_result(self._run(incoming)))
        status = ended.result()
        self._thread.close()
        self._disk.close(_LAST_FILES_S)
        return status

    def _run(self, incoming: LeaderMessages) -> int:
        try:
            follower = Follower(self._loaded())
            gc.freeze()  # as `cli.serve` does
            follower.follow(incoming)
        except StartupError as error:
            return self._tell(str(error), is_final=True)
        except StartLLMError as error:
            return self._tell(f"{error}.", is_final=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 must not wait for this rank
            print_traceback()
            return self._tell(f"{type(error).__name__}: {error}", is_final=False)
        return 0

    def _tell(self, message: str, *, is_final: bool) -> int:
        try:
            self._link.send(SentTrouble(message, is_final))
        except LinkClosed:
            print_message(message)
        return _CANNOT_START if is_final else _WITHOUT_RANK_0

    def _loaded(self) -> EngineResources:
        folder = resolve(model_name(self._settings))
        self._terminal.say(f"{self._ranks.name.capitalize()}: loading {name_of(folder)} ...")
        # What the loader would say of the model, rank 0 says.
        parts = LoaderParts(
            settings=self._settings,
            terminal=Terminal(io.StringIO()),
            thread=self._thread,
            disk=self._disk,
            ranks=self._ranks,
        )
        return EngineLoader(parts, self._settings, name_of(folder), folder, 0).assemble()
