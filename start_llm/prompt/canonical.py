"""What of a message counts when conversations are compared: the canonical pipeline.

Clients change what they send again: ids, white space, the spelling of arguments, a header of theirs. Each row
of `RULES` is one such change, with the client that makes it. What comes out names a conversation and is never
shown to a model; only what `for_the_model` takes out is taken out of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from start_llm.core.canonical import (
    CanonicalKey,
    CanonicalMessage,
    Ignored,
    LiveField,
    LiveValue,
    Root,
    text_digest,
)
from start_llm.core.chat import Json, Message, Role, ToolCall
from start_llm.prompt.changes import tool_name
from start_llm.prompt.drift import RULES, Drift, Rule

type DriftPolicy = Literal["note", "exact"]
"""Whether the model is told of what says how things are now, or whatever differs is another conversation."""


def rules_of(policy: DriftPolicy) -> tuple[Rule, ...]:
    """Those that are looked through when conversations are compared."""
    return RULES if policy == "note" else tuple(rule for rule in RULES if not rule.says_now)


def for_the_model(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without what is no content: all that the canonical pipeline takes out of a prompt."""
    return tuple(_changed(messages, [rule for rule in RULES if rule.is_for_the_model]))


def _of_class(drift: Drift) -> list[Rule]:
    return [rule for rule in RULES if rule.drift == drift]


def canonical(
    messages: Sequence[Message],
    late_tools: Sequence[Mapping[str, Json]] = (),
    *,
    rules: Sequence[Rule] = RULES,
) -> list[CanonicalMessage]:
    """What is compared of each message.

    Thoughts are not in it: clients leave them out, and the store keeps one path for each. Nor are ids of
    calls: a result belongs to the place of its call.

    Args:
        messages: in native form (`call_ids.in_native_form`).
        late_tools: a message that refers to one shows its schema.
        rules: what else is left out; what no client changes on purpose is in any case.
    """
    schemas = {tool_name(tool): tool for tool in late_tools}
    return [
        _canonical(bare, schemas, len(message.content))
        for message, bare in zip(messages, _changed(messages, rules), strict=True)
    ]


def _canonical(bare: Message, schemas: Mapping[str, Mapping[str, Json]], characters: int) -> CanonicalMessage:
    """The text stands behind the rest, as it is: it is long, and JSON has no zero byte."""
    text = bare.content.strip()
    data = _encoded(_parts(bare, schemas)) + b"\0" + text.encode(errors="surrogatepass")
    return CanonicalMessage(data, left_out=characters - len(text))


def own_digests(messages: Sequence[Message]) -> list[bytes | None]:
    """For each message the digest of its text, if that has lines of the class `own`."""
    without = _changed(messages, _of_class("own"))
    return [
        text_digest(message.content) if bare.content != message.content else None
        for message, bare in zip(messages, without, strict=True)
    ]


def live_values(messages: Sequence[Message], rules: Sequence[Rule] = RULES) -> list[tuple[LiveValue, ...]]:
    """For each message what it says of now: what the rules of these classes leave out."""
    living = _applying(messages, [rule for rule in rules if rule.says_now])
    return [
        tuple(
            LiveValue(LiveField(rule.name, index, rule.drift == "block"), rule.value(message.content))
            for rule in of_message
            if _without(message, [rule]) is not message
        )
        for index, (message, of_message) in enumerate(living)
    ]


def canonical_reply(reply: Message) -> CanonicalMessage:
    """What is compared of a reply that a client sends back."""
    return canonical([reply])[0]


def ignored(messages: Sequence[Message], rules: Sequence[Rule] = RULES) -> list[tuple[Ignored, ...]]:
    """For each message what rules leave out that does not say how things are now."""
    leaving = _applying(messages, [rule for rule in rules if not rule.says_now])
    return [
        tuple(
            Ignored(rule.name, rule.drift, text_digest(rule.value(message.content)))
            for rule in of_message
            if rule.without(message.content) != message.content
        )
        for message, of_message in leaving
    ]


def root_of(
    options: Mapping[str, Json], tools: Sequence[Mapping[str, Json]], dates: Sequence[str] = ()
) -> Root:
    """What stands in front of the first message. Tools may come in any order.

    Args:
        options: of the template, without those that change nothing but what opens the reply.
        dates: that the template writes.
    """
    told = CanonicalKey.of(_encoded([dict(options), list(dates)]))
    return Root(told, CanonicalKey.of(*sorted(_encoded(dict(tool)) for tool in tools)))


def _changed(messages: Sequence[Message], rules: Sequence[Rule]) -> Iterator[Message]:
    """The messages without what the rules take out."""
    return (_without(message, of_message) for message, of_message in _applying(messages, rules))


def _applying(messages: Sequence[Message], rules: Sequence[Rule]) -> Iterator[tuple[Message, Sequence[Rule]]]:
    """Each message, and the rules that are about it."""
    of_first: dict[Role, list[Rule]] = {}
    for rule in rules:
        of_first.setdefault(rule.role, []).append(rule)
    of_later = {role: [rule for rule in some if not rule.is_first] for role, some in of_first.items()}
    for message in messages:
        yield message, of_first.pop(message.role, None) or of_later.get(message.role, ())


def _without(message: Message, rules: Sequence[Rule]) -> Message:
    """A message of which nothing would be left is content as a whole."""
    text = message.content
    for rule in rules:
        text = rule.without(text)
    is_content_as_a_whole = message.content.strip() and not text.strip()
    return message if is_content_as_a_whole or text == message.content else replace(message, content=text)


def _parts(message: Message, schemas: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """All but the text."""
    parts: dict[str, Json] = {"role": message.role}
    if message.tool_calls:
        parts["calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool":
        parts["result_of"] = message.tool_call_id
    if message.name is not None:
        parts["name"] = message.name
    if message.tool_references:
        parts["references"] = [[name, dict(schemas.get(name, {}))] for name in message.tool_references]
    return parts


def _call(call: ToolCall) -> Json:
    return {"name": call.name, "arguments": _number(dict(call.arguments))}


def _number(value: Json) -> Json:
    """1000.0 and 1000 are one number, as they are for the languages that clients are written in."""
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


def _encoded(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
