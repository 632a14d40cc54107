"""Name the conversation of a request by what its client sends, so that it finds its server again.

A name is a digest: of the client's id for exactly this conversation, or of the messages up to some place,
each hashed onto the one before it as it was sent. An id that conversations may share, such as
`prompt_cache_key` or `x-session-affinity`, gives no name. Tenant, model and `previous_response_id` are in all
of them, so no tenant's names are another's. A wrong match costs time and nothing else: whether computed
tokens are used, the server decides by the tokens.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from start_llm.access.tenants import TENANT_HEADER
from start_llm.core.chat import Json
from start_llm.protocols.fields import Fields
from start_llm.protocols.routes import BodyKind
from start_llm.protocols.sessions import conversation_id

MAX_NAMES = 100_000
"""About 20 MB with their places in the table."""
_DIGEST_BYTES = 32
_CONVERSATION = b"conversation"
_INSTRUCTING = ("system", "developer")
_ASKING = (*_INSTRUCTING, "user")


@dataclass(frozen=True, slots=True)
class RoutingNames:
    """The names of one request's conversation.

    Attributes:
        names: the surest first: by the client's id, then those of its messages, the longest prefix first.
        goes_on: the request has a reply in it, so some server has computed a part of it before.
    """

    names: tuple[bytes, ...] = ()
    goes_on: bool = False


def routing_names(
    kind: BodyKind | None, body: Mapping[str, Json], headers: Mapping[str, str]
) -> RoutingNames:
    """Return the names of a request's conversation.

    Instructions alone name none: all conversations of one client share them.

    Args:
        body: as the client has sent it.
        headers: with names in lower case, and with the tenant's, which the proxy has put there.
    """
    before = body.get("previous_response_id")
    root = json.dumps([headers.get(TENANT_HEADER, ""), body.get("model"), before]).encode()
    conversation = conversation_id(Fields(body), headers)
    messages = _messages(kind, body)
    prefixes = [*_prefixes(root, messages)]
    names = (*((_digest(root + _CONVERSATION, conversation),) if conversation else ()), *reversed(prefixes))
    return RoutingNames(names, any(not _asks(message) for message in messages))


def _messages(kind: BodyKind | None, body: Mapping[str, Json]) -> Sequence[Json]:
    """Return the messages in their order, instructions that stand beside them first."""
    if kind == "responses":
        instructions, items = body.get("instructions"), body.get("input")
    else:
        instructions, items = body.get("system"), body.get("messages")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, list):
        return [*messages, *items]
    return [*messages, {"role": "user", "content": items}] if items else messages


def _prefixes(root: bytes, messages: Sequence[Json]) -> Iterator[bytes]:
    """Yield a name for each prefix of the messages that has more than instructions."""
    name, is_conversation = root, False
    for message in messages:
        name = _digest(name, message)
        is_conversation = is_conversation or _role(message) not in _INSTRUCTING
        if is_conversation:
            yield name


def _asks(message: Json) -> bool:
    """Return whether this comes from the user or the client's author. All else follows a reply."""
    return _role(message) in _ASKING


def _role(message: Json) -> Json:
    return message.get("role") if isinstance(message, dict) else None


def _digest(before: bytes, message: Json) -> bytes:
    written = json.dumps(message, sort_keys=True).encode()
    return hashlib.blake2b(before + b"\0" + written, digest_size=_DIGEST_BYTES).digest()


class RoutedConversations:
    """Remembers by name which server each conversation went to last. For one event loop.

    Args:
        max_names: beyond these the least recently used ones are forgotten.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._servers: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._servers)

    def find(self, names: Sequence[bytes], is_able: Callable[[str], bool]) -> str | None:
        """Return the server of the surest name whose server is able to answer; None if there is none."""
        servers = (self._servers[name] for name in names if name in self._servers)
        return next(filter(is_able, servers), None)

    def note(self, names: Sequence[bytes], server: str) -> None:
        """Remember that this server has been asked."""
        for name in reversed(names):
            self._servers[name] = server
            self._servers.move_to_end(name)
        while len(self._servers) > self._max_names:
            self._servers.popitem(last=False)
