"""Lists what clients change in a conversation when they send it again: one row for each thing."""

import re
from dataclasses import dataclass
from typing import Literal

from start_llm.core.chat import Message, Role
from start_llm.core.images import has_image

type Drift = Literal["transport", "own", "live", "block", "transient"]
"""The meaning of a change.

- `transport`: no content at all.
- `own`: belongs to its message, which keeps the value that it had first.
- `live`: a line about the current state; computed tokens keep the old value, and a note tells the new one.
- `block`: like `live`, but about one project or chat; only the conversation that it stands in may change it.
- `transient`: a message at the end that the next request does not have.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a client changes when it sends a message again.

    Attributes:
        name: description, used in notes.
        client: the clients that were seen to do it.
        is_first: only the first message of that role has it.
        drift: class of the change.
        lesson: number of the lesson with the evidence.
        mark: text that a message with a match must contain, checked first for speed; empty if there is none.
        pattern: matches it: whole lines, or a section from its heading to its end.
        within: matches the text around it, if it counts only there.
        is_clock: it is a date, a clock or a time zone, and nothing else.
        is_for_the_model: it is removed from the prompt too.
    """

    name: str
    client: str
    role: Role
    is_first: bool
    drift: Drift
    lesson: int
    mark: str
    pattern: re.Pattern[str]
    within: re.Pattern[str] | None = None
    is_clock: bool = False
    is_for_the_model: bool = False

    @property
    def says_now(self) -> bool:
        return self.drift in ("live", "block")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each match. Text with an image in it is content, whatever it is."""
        if self.mark not in text:
            return []
        around = [match.span() for match in self.within.finditer(text)] if self.within else [(0, len(text))]
        return [
            (start + match.start(), start + match.end())
            for start, end in around
            for match in self.pattern.finditer(text[start:end])
            if not has_image(match.group())
        ]

    def value(self, piece: str) -> str:
        """Return the value to compare and tell. The lines of an `own` text are stripped."""
        if self.drift == "own":
            lines = _STAMPED.sub(r"\g<0>\n", piece).split("\n")
            return "\n".join(line.strip().rstrip(",") for line in lines if line.strip())
        return piece.strip()


# Dates, clocks and time zones only: other text in such a line is content.
_WEEKDAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|"
    r"Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th|\.)?"
_DATE = (
    rf"(?:{_WEEKDAY},? )?(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{4}}|"
    rf"{_MONTH}\.? {_DAY},? \d{{4}}|{_DAY} {_MONTH}\.?,? \d{{4}})"
)
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?(?: ?[AaPp]\.?[Mm]\.?)?"
_AREAS = "Africa|America|Antarctica|Arctic|Asia|Atlantic|Australia|Etc|Europe|Indian|Pacific"
_ZONE = (
    rf"(?:(?:UTC|GMT|Z)(?:[+-]\d{{1,2}}(?::?\d{{2}})?)?|[+-]\d{{2}}:?\d{{2}}|(?:{_AREAS})(?:/[A-Z][A-Za-z_+-]+){{1,2}}|"
    r"(?:[CEW]ES?T|BST|IST|JST|MSK|AE[SD]T|[ECMP][SD]T))"
)
_HOUR = rf"{_CLOCK}(?:(?: | in )?\(?{_ZONE}\)?)?"
_MOMENT = rf"(?:{_DATE}(?:(?:,? (?:at )?|T){_HOUR})?|{_HOUR}(?:,? (?:on )?{_DATE})?)"


def _line(beginning: str, value: str = _MOMENT) -> tuple[str, re.Pattern[str]]:
    """Return the mark and pattern of a whole line that has this beginning, such a value and nothing else."""
    return beginning, re.compile(rf"^[ \t]*{beginning}{value}\.?[ \t]*(?:\n|\Z)", re.MULTILINE)


_TODAY = _line("Today's date: ")
_DATE_LINE = _line("Current date: ")
_TIME_LINE = _line("Current time is ")
_ZONE_LINE = _line("Time zone: ", _ZONE)
# The fields and the line break after them. The text that follows may begin without a line break (lesson 18).
_BILLING = (
    "x-anthropic-billing-header:",
    re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*cc\w*=[^;\s]*(?:;|(?=\s|\Z)))+(?:[ \t]*\n+)?"),
)
# Text that OpenClaw puts before a user's message: its time, metadata and sender.
_STAMP = rf"\[{_WEEKDAY} {_DATE} {_CLOCK}(?: {_ZONE})?\][ \t]*"
_STAMPED = re.compile(rf"\A{_STAMP}")
_METADATA = (
    r"(?:Conversation info|Sender)(?: \(untrusted metadata\))?:(?: ⟦openclaw:ctx⟧)?\n"
    r"```json\n(?:(?!```)[^\n]*\n)*```[ \t]*\n*"
)
_HINT = r"\[message_id: [^\]\n]*\][ \t]*\n*"
_CONTEXT = rf"Conversation context \(untrusted, [^)\n]*\):\n(?:#\S+ {_WEEKDAY} {_DATE} [^\n]*\n)+\n*"
_ENVELOPE = ("", re.compile(rf"\A(?:{_STAMP}|{_METADATA}|{_CONTEXT}|{_HINT})+"))
_STATISTICS = (
    "Stats: runtime ",
    re.compile(r"\bStats: runtime(?: ?\d+(?:\.\d+)?(?:ms|s|m|h))+[ \t]*(?=•|\n|\Z)"),
)
# From the heading, with an empty heading before it, to the end of the JSON.
_INBOUND = (
    "Inbound Context (trusted metadata)",
    re.compile(
        r"^(?:## Group Chat Context\n)?##+ Inbound Context \(trusted metadata\)\n"
        r"(?:(?!#|```)[^\n]*\n){0,10}```json\n(?:(?!```)[^\n]*\n)*```[ \t]*(?:\n+|\Z)",
        re.MULTILINE,
    ),
)
# Sections of OpenClaw's system prompt that change when it wakes by itself, or after a group has written.
_DEFERRED_TOOLS = (
    "### Deferred Tool Schemas",
    re.compile(
        r"^### Deferred Tool Schemas\nAvailable deferred-schema tools:\n(?:- [^\n]*\n)+", re.MULTILINE
    ),
)
_WATCHED = (
    "## Watched Sessions",
    re.compile(r"^## Watched Sessions\n\w[^\n]*\n(?:- [^\n]*\n)+", re.MULTILINE),
)
# The memory that its agent wrote, up to the next file, and the line that mentions it.
_MEMORY = (
    "/MEMORY.md",
    re.compile(r"^## /[^\n]*/MEMORY\.md\n(?:(?!## /|<!-- /openclaw:)[^\n]*(?:\n|\Z))*", re.MULTILINE),
)
_MEMORY_LINE = ("MEMORY.md: ", re.compile(r"^MEMORY\.md: [^\n]*\n", re.MULTILINE))
_RUNTIME = (
    "Runtime: ",
    re.compile(r"^Runtime: \w+=[^|\n]*(?: \| \w+=[^|\n]*)+(?:\n|\Z)", re.MULTILINE),
)
# From the first line to the last of the commits.
_GIT_STATUS = (
    "gitStatus: ",
    re.compile(
        r"^gitStatus: [^\n]*\n(?:(?!Recent commits:)[^\n]*\n){0,500}?Recent commits:\n(?:[^\n]+(?:\n|\Z))*",
        re.MULTILINE,
    ),
)
# A wrapper without a class of its own: its headings decide. Headings without a rule are content.
_REMINDER = re.compile(r"<system-reminder>\n(?:[^<]++|<(?!/?system-reminder>))*+</system-reminder>")
_REMINDER_DATE = (
    "# currentDate",
    re.compile(rf"(?<=\n# currentDate\n)Today's date is {_MOMENT}\.?\n"),
    _REMINDER,
)
# Up to the next heading of this kind, which is one word with a small first letter, or to the end of the
# reminder.
_INSTRUCTIONS = (
    "# claudeMd",
    re.compile(
        r"(?<=\n)# claudeMd\n(?:(?!# [a-z]\w*\n|[ \t]*IMPORTANT: this context |</system-reminder>)[^\n]*\n)*"
    ),
    _REMINDER,
)
_CARRIER = (
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>",
    re.compile(
        r"\A\s*(?:OpenClaw runtime context for [^\n]*\n(?:[^\n<][^\n]*\n)?\n)?"
        r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n.*\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\s*\Z",
        re.DOTALL,
    ),
)

RULES: tuple[Rule, ...] = (
    Rule("billing header", "Claude Code", "system", True, "transport", 18, *_BILLING, is_for_the_model=True),
    Rule("message metadata", "OpenClaw", "user", False, "own", 19, *_ENVELOPE),
    Rule("today's date", "opencode, Claude Code", "system", True, "live", 22, *_TODAY, is_clock=True),
    Rule("current date", "pi, OpenClaw", "system", True, "live", 22, *_DATE_LINE, is_clock=True),
    Rule("time zone", "OpenClaw", "system", True, "live", 27, *_ZONE_LINE, is_clock=True),
    Rule("current time", "the original server's", "system", True, "live", 22, *_TIME_LINE, is_clock=True),
    Rule(
        "current time of a message",
        "the original server's",
        "user",
        False,
        "live",
        22,
        *_TIME_LINE,
        is_clock=True,
    ),
    Rule("run statistics", "OpenClaw", "user", False, "live", 22, *_STATISTICS),
    Rule("runtime of the session", "OpenClaw", "user", True, "block", 83, *_RUNTIME),
    Rule("inbound context", "OpenClaw", "system", True, "block", 22, *_INBOUND),
    Rule("deferred tools", "OpenClaw", "system", True, "block", 83, *_DEFERRED_TOOLS),
    Rule("watched sessions", "OpenClaw", "system", True, "block", 83, *_WATCHED),
    Rule("memory", "OpenClaw", "system", True, "block", 83, *_MEMORY),
    Rule("line about the memory", "OpenClaw", "system", True, "block", 83, *_MEMORY_LINE),
    Rule("git status", "Claude Code", "system", True, "block", 22, *_GIT_STATUS),
    Rule("date in the reminder", "Claude Code", "user", True, "live", 27, *_REMINDER_DATE, is_clock=True),
    Rule("project instructions", "Claude Code", "user", True, "block", 27, *_INSTRUCTIONS),
    Rule("internal context", "OpenClaw", "user", False, "transient", 23, *_CARRIER),
)


def is_transient(message: Message) -> bool:
    """Return whether the next request will not have this message."""
    return any(
        rule.role == message.role and rule.spans(message.content)
        for rule in RULES
        if rule.drift == "transient"
    )
