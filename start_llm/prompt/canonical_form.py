"""Makes the canonical form of messages, in which conversations are compared.

Clients change what they send again: ids, the spelling of arguments, white space, texts of their own. It has
no ids, arguments in one spelling, and of the texts nothing that a row of `RULES` (`prompt.drift`) leaves out.
It is compared, and never shown to a model. Only `for_the_model` also removes text from the prompt.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from start_llm.core.canonical import (
    CanonicalKey,
    CanonicalMessage,
    Ignored,
    OmittedText,
    Root,
    text_digest,
)
from start_llm.core.chat import Json, Message, Role, tool_name
from start_llm.core.images import PlacedImage, without_images
from start_llm.core.prompt_policy import DriftPolicy
from start_llm.prompt.drift import RULES, Rule

_WHITE_SPACE = "white space"


def rules_of(policy: DriftPolicy) -> tuple[Rule, ...]:
    """Return the rules for what is left out when conversations are compared."""
    return RULES if policy == "note" else tuple(rule for rule in RULES if rule.drift == "transport")


def for_the_model(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Remove from the messages the text that is not content for the model either."""
    rules = [rule for rule in RULES if rule.is_for_the_model]
    return tuple(
        replace(message, content=_cut(message, some).text) if some else message
        for message, some in _applying(messages, rules)
    )


def canonical(
    messages: Sequence[Message],
    late_tools: Sequence[Mapping[str, Json]] = (),
    *,
    rules: Sequence[Rule] = RULES,
    begun: Collection[Role] = (),
) -> list[CanonicalMessage]:
    """Return the canonical form of each message.

    It has no reasoning, which clients leave out; the store keeps a variant for each. It has no ids of calls:
    a result refers to the position of its call.

    Args:
        messages: in native form (`call_ids.in_native_form`).
        late_tools: tools whose schemas are part of the messages that refer to them.
        rules: what to leave out. White space at the end of a text is always left out, except in tool results.
        begun: roles that occur in messages before these.
    """
    schemas = {tool_name(tool): tool for tool in late_tools}
    return [_canonical(message, schemas, some) for message, some in _applying(messages, rules, begun)]


def _canonical(
    message: Message, schemas: Mapping[str, Mapping[str, Json]], rules: Sequence[Rule]
) -> CanonicalMessage:
    """Encode a message: JSON of the other parts, a zero byte (which JSON never has), the text without images.

    The text is not encoded as JSON because it is long. Images are in the JSON, where no text can pretend to
    be one.
    """
    cut = _cut(message, rules)
    text = cut.text if message.role == "tool" else cut.text.rstrip()
    omitted = [
        OmittedText(rule.name, rule.drift, place, piece, rule.value(piece), rule.is_clock)
        for rule, place, piece in cut.pieces
        if rule.drift in ("own", "live", "block")
    ]
    if len(text) < len(cut.text):
        omitted.append(OmittedText(_WHITE_SPACE, "space", len(text), cut.text[len(text) :]))
    plain, images = without_images(text)
    data = _encoded(_parts(message, schemas, images)) + b"\0" + plain.encode(errors="surrogatepass")
    return CanonicalMessage(data, tuple(omitted), len(message.content) - len(text))


def canonical_reply(reply: Message) -> CanonicalMessage:
    """Return the canonical form of a reply that a client sends back."""
    return canonical([reply])[0]


def ignored(
    messages: Sequence[Message], rules: Sequence[Rule] = RULES, begun: Collection[Role] = ()
) -> list[tuple[Ignored, ...]]:
    """Return for each message the texts that are no content or that the next request will not have."""
    ignoring = [rule for rule in rules if rule.drift in ("transport", "transient")]
    return [
        tuple(
            Ignored(rule.name, rule.drift, text_digest(message.content[start:end]))
            for rule in some
            for start, end in rule.spans(message.content)
        )
        for message, some in _applying(messages, ignoring, begun)
    ]


def root_of(
    options: Mapping[str, Json],
    tools: Sequence[Mapping[str, Json]],
    dates: Sequence[str] = (),
    question: int | None = None,
) -> Root:
    """Return the root of a conversation: everything before the first message, tools in any order.

    Args:
        options: template options, without those that only change the generation prompt.
        dates: dates that the template writes.
        question: index of the message with which the template shows tools or the system text, if that moves
            to the last question; else None.
    """
    key = CanonicalKey.of(_encoded([dict(options), list(dates), question]))
    return Root(key, CanonicalKey.of(*sorted(_encoded(dict(tool)) for tool in tools)))


def _applying(
    messages: Sequence[Message], rules: Sequence[Rule], begun: Collection[Role] = ()
) -> Iterator[tuple[Message, Sequence[Rule]]]:
    """Yield each message with the rules that apply to it."""
    of_first: dict[Role, list[Rule]] = {}
    for rule in rules:
        of_first.setdefault(rule.role, []).append(rule)
    of_later = {role: [rule for rule in some if not rule.is_first] for role, some in of_first.items()}
    for role in begun:
        of_first.pop(role, None)
    for message in messages:
        yield message, of_first.pop(message.role, None) or of_later.get(message.role, ())


class _Cut(NamedTuple):
    """A text without what rules leave out.

    Attributes:
        pieces: the removed pieces in order: rule, number of remaining characters in front, text.
    """

    text: str
    pieces: list[tuple[Rule, int, str]]


def _cut(message: Message, rules: Sequence[Rule]) -> _Cut:
    """Remove what the rules match. If nothing would be left, keep the whole text."""
    text = message.content
    if not rules:
        return _Cut(text, [])
    spans = sorted(
        (start, end, number) for number, rule in enumerate(rules) for start, end in rule.spans(text)
    )
    left, pieces, after = "", list[tuple[Rule, int, str]](), 0
    for start, end, number in spans:
        if start >= after:
            left += text[after:start]
            pieces.append((rules[number], len(left), text[start:end]))
            after = end
    left += text[after:]
    return _Cut(left, pieces) if pieces and left.strip() else _Cut(text, [])


def _parts(
    message: Message, schemas: Mapping[str, Mapping[str, Json]], images: Sequence[PlacedImage]
) -> dict[str, Json]:
    parts: dict[str, Json] = {"role": message.role}
    if message.tool_calls:
        parts["calls"] = [
            {"name": call.name, "arguments": _number(dict(call.arguments))} for call in message.tool_calls
        ]
    if message.role == "tool":
        parts["result_of"] = message.tool_call_id
    if images:
        parts["images"] = [[place, digest.hex()] for place, digest in images]
    if message.name is not None:
        parts["name"] = message.name
    if message.tool_references:
        parts["references"] = [[name, dict(schemas.get(name, {}))] for name in message.tool_references]
    return parts


def _number(value: Json) -> Json:
    """Replace floats without a fraction by integers: to clients, 1000.0 and 1000 are the same number."""
    match value:
        case bool():
            return value
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_number(item) for item in value]
        case dict():
            return {key: _number(item) for key, item in value.items()}
        case _:
            return value


_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _encoded(value: Json) -> bytes:
    return _ENCODE(value).encode()
