"""Scans messages for comparison. A scan depends on earlier messages only through their calls and roles."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from start_llm.core.canonical import CanonicalMessage, Ignored, reasoning_digest
from start_llm.core.chat import Json, Message, Role
from start_llm.core.family import CallIds, ReasoningMarks
from start_llm.core.ids import name_in
from start_llm.prompt.canonical_form import canonical, ignored
from start_llm.prompt.drift import Rule
from start_llm.prompt.inline_reasoning import split_inline_reasoning


@dataclass(frozen=True, slots=True)
class ScanRules:
    """Rules for comparing messages.

    Attributes:
        call_ids: the form of call ids that the template takes.
        marks: marks of reasoning in a reply's text; None: such text is compared as text.
        drift: what to leave out.
    """

    call_ids: CallIds
    marks: ReasoningMarks | None
    drift: Sequence[Rule]


class MessageScan(NamedTuple):
    """The result of scanning a message.

    Attributes:
        native: the message in native form (`call_ids.in_native_form`).
        apart: the message with its reasoning moved out of the text, for comparisons only.
        echoed: digest of the reasoning that the client sent.
        ignored: texts in it that are no content.
    """

    native: Message
    apart: Message
    canonical: CanonicalMessage
    echoed: bytes | None
    ignored: tuple[Ignored, ...]


def scan_messages(
    messages: Sequence[Message],
    rules: ScanRules,
    late_tools: Sequence[Mapping[str, Json]] = (),
    begun: Collection[Role] = (),
) -> list[MessageScan]:
    """Scan messages.

    Args:
        messages: in native form.
        late_tools: tools whose schemas are part of the messages that refer to them.
        begun: roles that occur in messages before these.
    """
    apart = [split_inline_reasoning(message, rules.marks) for message in messages]
    compared = canonical(apart, late_tools, rules=rules.drift, begun=begun)
    echoed = [reasoning_digest(message.reasoning) for message in apart]
    return list(map(MessageScan, messages, apart, compared, echoed, ignored(messages, rules.drift, begun)))


def names_of(message: Message) -> frozenset[str]:
    """Return the random names of a reply and its calls: they show that the client received it.

    Args:
        message: as the client sent it.
    """
    return frozenset(filter(None, (message.reply_name, *(name_in(call.id) for call in message.tool_calls))))
