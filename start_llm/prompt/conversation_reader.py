"""Reads conversations: what stands in front of one, its keys, and which messages the model is shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from start_llm.core.canonical import (
    CanonicalMessage,
    Conversation,
    MessageRecord,
    OmittedText,
    Root,
    chain,
    exact_keys,
)
from start_llm.core.chat import ChatRequest, Json, Message
from start_llm.core.family import Family, ReasoningMarks
from start_llm.core.prompt_policy import PromptPolicy
from start_llm.prompt.adapt import adapt
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.canonical_form import canonical, for_the_model, ignored, root_of, rules_of
from start_llm.prompt.drift import is_transient
from start_llm.prompt.inline_reasoning import without_assumed_reasoning
from start_llm.prompt.remembered import ConversationScan, RememberedConversations
from start_llm.prompt.scan import ScanRules
from start_llm.prompt.shorten import with_short_contents
from start_llm.prompt.template_audit.facts import TemplateFacts

_ASKING = ("user", "tool")
_DATE = "the date"

type RestoreReasoning = Callable[[Conversation, Sequence[int]], Sequence[str | None]]


@dataclass(frozen=True, slots=True)
class ReadConversation:
    """A conversation that was compared with what is remembered.

    Attributes:
        scan: of the lasting messages.
        transient: messages after them, in the template's form.
    """

    root: Root
    scan: ConversationScan
    transient: tuple[Message, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The lasting messages, in the template's form."""
        return tuple(scan.native for scan in self.scan.scans)


class ConversationReader:
    """Compares conversations for one model. Safe to use from any thread.

    Args:
        restore_reasoning: returns the reasoning of the replies at some indices of a conversation, None if
            unknown.

    Attributes:
        marks: of reasoning in a reply's text; None: such text is compared as text.
    """

    def __init__(
        self, family: Family, facts: TemplateFacts, policy: PromptPolicy, restore_reasoning: RestoreReasoning
    ) -> None:
        self._family = family
        self._facts = facts
        self._policy = policy
        self._restore_reasoning = restore_reasoning
        self._rules = rules_of(policy.drift) if policy.with_rules else ()
        self._tells_now = any(rule.says_now for rule in self._rules)
        self.marks: ReasoningMarks | None = family.reasoning if policy.with_rules else None
        self._remembered = RememberedConversations(ScanRules(facts.call_ids, self.marks, self._rules))

    def root(self, request: ChatRequest, options: dict[str, Json], now: datetime) -> Root:
        """Return what stands in front of the first message, or changes all that follows."""
        dates = [] if self._tells_now else self._dates(now)
        question = self._last_question(request) if self.has_moving(request) else None
        return root_of(self._facts.options_in_front(options), request.tools, dates, question)

    def read(self, request: ChatRequest, root: Root) -> ReadConversation:
        """Scan what is new of a conversation. Transient messages at its end are split off."""
        sent, after = self._parted(self._without_assumed_reasoning(request.messages))
        scan = self._remembered.scan(sent, request.late_tools, root.key(request.tenant))
        return ReadConversation(root, scan, tuple(scan.calls.copy().in_native_form(after)) if after else ())

    def conversation(self, request: ChatRequest, read: ReadConversation, now: datetime) -> Conversation:
        """Return the conversation as the client sent it; what is shown of reasoning is filled in later."""
        scans, keys = read.scan.scans, read.scan.keys
        compared, apart = [scan.canonical for scan in scans], [scan.apart for scan in scans]
        if self._policy.checks_keys and _is_much_left_out(compared, apart):
            compared = canonical(apart, request.late_tools, rules=rules_of("exact"))
            keys = chain(read.scan.root, compared)
        compared = self._dated(compared, now)
        exact = exact_keys(keys, compared, [scan.echoed for scan in scans])
        roles = [scan.native.role for scan in scans]
        records = zip(roles, compared, keys, exact, scans, read.scan.names, strict=True)
        return Conversation(
            tenant=request.tenant,
            root=read.root,
            messages=tuple(
                MessageRecord(
                    role=role,
                    canonical=message,
                    key=key,
                    exact=name,
                    echoed=scan.echoed,
                    ids=ids,
                    can_hold_note=role in _ASKING,
                    ignored=scan.ignored,
                )
                for role, message, key, name, scan, ids in records
            ),
            name=request.conversation_id,
            session=request.session_id or keys[_first_question(roles)].digest.hex(),
            transient=tuple(text for texts in ignored(read.transient) for text in texts),
        )

    def shown_messages(self, read: ReadConversation, asked: Conversation) -> tuple[Message, ...]:
        """Return the messages to render: without what is no content, with restored reasoning."""
        scans, messages = read.scan.scans, list(read.messages)
        if self._policy.with_rules:
            messages = list(for_the_model(messages))
        messages = list(self.as_policy_shows(messages))
        if self._policy.shown_reasoning == "false":
            return tuple(messages)
        bare = [
            index
            for index, scan in enumerate(scans)
            if scan.native.role == "assistant" and not scan.apart.reasoning
        ]
        for index, reasoning in zip(bare, self._restore_reasoning(asked, bare), strict=True):
            if reasoning != messages[index].reasoning:
                messages[index] = replace(messages[index], reasoning=reasoning)
        return tuple(messages)

    def as_policy_shows(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages without what the policy hides."""
        if self._policy.shortens_writes:
            messages = list(map(with_short_contents, messages))
        return tuple(
            map(_without_reasoning, messages) if self._policy.shown_reasoning == "false" else messages
        )

    def has_moving(self, request: ChatRequest) -> bool:
        """Return whether the next question changes the whole prompt: something moves to it."""
        has = {
            "tools": request.tools,
            "system": any(message.role == "system" for message in request.messages),
        }
        return any(has[name] for name in self._facts.moving)

    def _parted(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Split off transient messages at the end, if a question or a result precedes them."""
        end = len(messages)
        while self._rules and end and is_transient(messages[end - 1]):
            end -= 1
        asks = end > 0 and messages[end - 1].role in _ASKING
        return (messages[:end], messages[end:]) if asks else (messages, ())

    def _without_assumed_reasoning(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Drop reasoning that equals the answer, for families whose replies may begin inside reasoning.

        It runs before messages are compared and rendered, so both start from the same messages.
        """
        return tuple(map(without_assumed_reasoning, messages)) if self._family.orphan_close else messages

    def _last_question(self, request: ChatRequest) -> int | None:
        """Return the index of the question that shows what moves, until the next question."""
        native = in_native_form(request.messages, self._facts.call_ids)
        adapted = adapt(replace(request, messages=native), self._facts)
        asking = (
            last for seen, last in zip(adapted.messages, adapted.lasts, strict=True) if seen["role"] == "user"
        )
        return max(asking, default=None)

    def _dates(self, now: datetime) -> list[str]:
        """Return the dates that the template writes."""
        return [now.strftime(form) for form in self._facts.dates]

    def _dated(self, messages: list[CanonicalMessage], now: datetime) -> list[CanonicalMessage]:
        """Add the dates that the template itself writes to the omitted texts of the first message."""
        dates = self._dates(now) if self._tells_now else []
        if not dates:
            return messages
        written = tuple(
            OmittedText(f"{_DATE} {number}", "live", number, date, f"{_DATE}: {date}", is_clock=True)
            for number, date in enumerate(dates)
        )
        first, *rest = messages
        return [replace(first, omitted=(*first.omitted, *written)), *rest]


def _is_much_left_out(compared: Sequence[CanonicalMessage], messages: Sequence[Message]) -> bool:
    """Return whether the keys leave out more than a tenth of the text."""
    omitted_chars = sum(message.omitted_chars for message in compared)
    return 10 * omitted_chars > sum(len(message.content) for message in messages)


def _first_question(roles: Sequence[str]) -> int:
    """Return the index of the first question, or of the last message if there is no question.

    The key of this prefix names the session of a conversation without a session id.
    """
    return roles.index("user") if "user" in roles else len(roles) - 1


def _without_reasoning(message: Message) -> Message:
    return replace(message, reasoning=None) if message.role == "assistant" else message
