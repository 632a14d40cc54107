"""What is found of messages when they are compared, whatever stands in front of them but their calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from start_llm.core.canonical import CanonicalMessage, Ignored, thought_digest
from start_llm.core.chat import Json, Message, Role
from start_llm.core.family import CallIds, ThoughtMarks
from start_llm.core.ids import name_in
from start_llm.prompt.canonical import canonical, ignored
from start_llm.prompt.drift import Rule
from start_llm.prompt.spoken import thought_apart


@dataclass(frozen=True, slots=True)
class Ways:
    """How messages are compared.

    Attributes:
        call_ids: the template's own form of them.
        marks: of thoughts in the text of a reply; None: what stands there is compared as text.
        rules: what is left out.
    """

    call_ids: CallIds
    marks: ThoughtMarks | None
    rules: Sequence[Rule]


class Look(NamedTuple):
    """What is found of a message.

    Attributes:
        native: it in native form (`call_ids.in_native_form`).
        apart: it with its thought taken apart, for comparing alone.
        canonical: what is compared.
        echoed: digest of the thought that the client sent.
        ignored: what of it is no content.
    """

    native: Message
    apart: Message
    canonical: CanonicalMessage
    echoed: bytes | None
    ignored: tuple[Ignored, ...]


def looks_at(
    messages: Sequence[Message],
    ways: Ways,
    late_tools: Sequence[Mapping[str, Json]] = (),
    begun: Collection[Role] = (),
) -> list[Look]:
    """Args:
    messages: in native form.
    begun: roles of the messages in front of these.
    """
    apart = [thought_apart(message, ways.marks) for message in messages]
    compared = canonical(apart, late_tools, rules=ways.rules, begun=begun)
    echoed = [thought_digest(message.reasoning) for message in apart]
    return list(map(Look, messages, apart, compared, echoed, ignored(messages, ways.rules, begun)))


def names_of(message: Message) -> frozenset[str]:
    """By what the client shows that it was told this: names of its calls, and of the whole reply.

    Args:
        message: as the client sent it.
    """
    return frozenset(filter(None, (message.reply_name, *(name_in(call.id) for call in message.tool_calls))))
