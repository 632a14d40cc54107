"""What the models of a server share."""

from collections import defaultdict
from dataclasses import dataclass, field

from start_llm.access.key_limits import KeyLimits
from start_llm.config.settings import Settings
from start_llm.engine.engine_thread import EngineThread
from start_llm.engine.followers import Followers
from start_llm.hosting.disk_storage import DiskStorage
from start_llm.hosting.model_adapters import AdapterFolders
from start_llm.hosting.shared_conversations import SharedConversations
from start_llm.models.rank_group import RankGroup
from start_llm.protocols.response_store import ResponseStore
from start_llm.server.drain import RequestDrain
from start_llm.telemetry.activity import Activity
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.prometheus import ServerMetrics
from start_llm.telemetry.terminal import Terminal
from start_llm.telemetry.trace import Trace
from start_llm.transcripts.divergence import AnsweredRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What the models of a server share.

    Attributes:
        thread: computes for all of them.
        answered: the requests that were answered last, for clients that compare later ones with them.
        adapters: the folders of the mounted adapters, by the model.
        ranks: that compute the model together with this process; None: it computes alone.
        followers: those of them that do what this one decides.
    """

    settings: Settings
    terminal: Terminal
    thread: EngineThread
    disk: DiskStorage
    conversations: SharedConversations
    requests: RequestMetrics
    prometheus: ServerMetrics
    trace: Trace | None
    responses: ResponseStore
    drain: RequestDrain
    activity: Activity
    key_limits: KeyLimits
    adapters: defaultdict[str, AdapterFolders] = field(default_factory=lambda: defaultdict(dict))
    answered: AnsweredRequests = field(default_factory=AnsweredRequests)
    ranks: RankGroup | None = None
    followers: Followers = field(default_factory=Followers)
