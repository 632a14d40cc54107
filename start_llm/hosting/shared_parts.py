"""What the models of a server share."""

from collections import defaultdict
from dataclasses import dataclass, field

from start_llm.access.key_limits import KeyLimits
from start_llm.hosting.model_adapters import AdapterFolders
from start_llm.hosting.model_loading import LoaderParts
from start_llm.hosting.shared_conversations import SharedConversations
from start_llm.protocols.response_store import ResponseStore
from start_llm.server.drain import RequestDrain
from start_llm.telemetry.activity import Activity
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.prometheus import ServerMetrics
from start_llm.telemetry.trace import Trace
from start_llm.transcripts.divergence import AnsweredRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts(LoaderParts):
    """What the models of a server share.

    Attributes:
        answered: the requests that were answered last, for clients that compare later ones with them.
        adapters: the folders of the mounted adapters, by the model.
    """

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
