"""Transcripts with nothing in them, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from start_llm.core.canonical import (
    CanonicalKey,
    CanonicalMessage,
    Conversation,
    Ignored,
    MessageRecord,
    Root,
    chain,
    exact_keys,
)
from start_llm.prompt.canonical_form import canonical_reply
from start_llm.telemetry.metrics import TranscriptMetrics
from start_llm.transcripts.beginnings import Beginnings
from start_llm.transcripts.conversation_names import ConversationNames
from start_llm.transcripts.prefix_history import PrefixHistory
from start_llm.transcripts.reasoning_store import ReasoningStore
from start_llm.transcripts.recent import RecentConversations
from start_llm.transcripts.transcript_store import TranscriptStore
from start_llm.transcripts.transcripts import Transcripts

ROOT = Root(CanonicalKey.of(b"no options"), CanonicalKey.of(b"no tools"))


def transcripts(
    token_bytes: Callable[[int], bytes],
    encode: Callable[[str], Sequence[int]],
    max_bytes: int = 10**8,
    **policy: Any,
) -> Transcripts:
    """`policy` may also have stores, which take the place of new ones."""
    stores: dict[str, Any] = {
        "store": TranscriptStore(max_bytes),
        "reasoning_texts": ReasoningStore(max_bytes),
        "seen": PrefixHistory(),
        "names": ConversationNames(),
        "beginnings": Beginnings(),
    } | policy
    return Transcripts(
        recent=RecentConversations(),
        metrics=TranscriptMetrics(stores["store"].metrics),
        canonical_reply=canonical_reply,
        token_bytes=token_bytes,
        encode=encode,
        **stores,
    )


def conversation_of(
    *messages: CanonicalMessage,
    tenant: bytes = b"",
    root: CanonicalKey | None = None,
    name: str | None = None,
    session: str = "",
    transient: tuple[Ignored, ...] = (),
    **columns: Sequence[Any],
) -> Conversation:
    """Of somebody who makes no calls and has no name, if nothing else is said.

    Args:
        root: the key at which its chain starts; that of `ROOT` if none is given.
        columns: fields of `MessageRecord`, each with one value for each message.
    """
    keys = chain(root or ROOT.key(tenant), messages)
    exact = exact_keys(keys, messages, columns.get("echoed", [None] * len(messages)))
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    records = [
        replace(MessageRecord(role="user", canonical=message, key=key, exact=exactly), **row)
        for message, key, exactly, row in zip(messages, keys, exact, rows or [{}] * len(keys), strict=True)
    ]
    return Conversation(
        tenant=tenant, root=ROOT, messages=tuple(records), name=name, session=session, transient=transient
    )
