"""What clients change in a conversation when they send it again: one row for each thing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from start_llm.core.chat import Message, Role

type Drift = Literal["transport", "own", "live", "block", "transient"]
"""What a change means.

`transport` is no content at all. `own` belongs to its message, which keeps what it said at first. `live` is
a line that says how things are now: what was computed keeps the old one, and a note tells the new one.
`block` is live too, but tells of one project or chat, and may only change within the conversation that it
stands in. `transient` is a message at the end that the next request does not have.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a client changes when it sends a message again.

    Attributes:
        name: in words; notes name a live value by it.
        client: the one that was seen to do it.
        role: of the messages that it stands in.
        is_first: it stands in the first message of its role alone.
        drift: its class.
        lesson: number of the lesson that has the evidence.
        mark: words that it has; empty if it is found as fast without.
        pattern: finds it: lines, or a section from its heading to its end.
        within: finds what it has to stand in, if it does not count elsewhere.
        is_clock: a date, a clock or a zone, and nothing else.
        is_for_the_model: it is taken out of the prompt too.
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
        """Where it stands."""
        if self.mark not in text:
            return []
        around = [one.span() for one in self.within.finditer(text)] if self.within else [(0, len(text))]
        return [
            (start + found.start(), start + found.end())
            for start, end in around
            for found in self.pattern.finditer(text[start:end])
        ]

    def without(self, text: str) -> str:
        spans = self.spans(text)
        ends = [0, *(end for _, end in spans)]
        starts = [*(start for start, _ in spans), len(text)]
        return "".join(text[end:start] for end, start in zip(ends, starts, strict=True))

    def said(self, piece: str) -> str:
        """What it says: a line with its clock to the minute, a block as it stands; of what belongs to its
        message each line for itself."""
        if self.drift == "own":
            lines = _STAMPED.sub(r"\g<0>\n", piece).split("\n")
            return "\n".join(line.strip().rstrip(",") for line in lines if line.strip())
        return _SECONDS.sub(r"\1", piece.strip()) if self.drift == "live" else piece.strip()


_SECONDS = re.compile(r"(\b\d{1,2}:\d{2}):\d{2}(?:\.\d+)?\b")


# Dates, clocks and zones, and nothing else: what stands beside them in a line is content.
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
    """A whole line that begins so, and has such a value and nothing else."""
    return beginning, re.compile(rf"^[ \t]*{beginning}{value}\.?[ \t]*(?:\n|\Z)", re.MULTILINE)


_TODAY = _line("Today's date: ")
_DATE_LINE = _line("Current date: ")
_TIME_LINE = _line("Current time is ")
_ZONE_LINE = _line("Time zone: ", _ZONE)
# Its fields, and the line break behind them; the text that follows may begin without one (lesson 18).
_BILLING = (
    "x-anthropic-billing-header:",
    re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*cc\w*=[^;\s]*(?:;|(?=\s|\Z)))+(?:[ \t]*\n+)?"),
)
# What stands in front of a user's words: when they came, what is known of them, and who sent them.
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
# From its heading, and an empty one in front of it, to the end of its JSON.
_INBOUND = (
    "Inbound Context (trusted metadata)",
    re.compile(
        r"^(?:## Group Chat Context\n)?##+ Inbound Context \(trusted metadata\)\n"
        r"(?:(?!#|```)[^\n]*\n){0,10}```json\n(?:(?!```)[^\n]*\n)*```[ \t]*(?:\n+|\Z)",
        re.MULTILINE,
    ),
)
# Sections of OpenClaw's system prompt that are others when it wakes by itself, or once a group has spoken.
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
# What its agent wrote down, up to the next file, and the line that tells of it.
_MEMORY = (
    "/MEMORY.md",
    re.compile(r"^## /[^\n]*/MEMORY\.md\n(?:(?!## /|<!-- /openclaw:)[^\n]*(?:\n|\Z))*", re.MULTILINE),
)
_MEMORY_LINE = ("MEMORY.md: ", re.compile(r"^MEMORY\.md: [^\n]*\n", re.MULTILINE))
_RUNTIME = (
    "Runtime: ",
    re.compile(r"^Runtime: \w+=[^|\n]*(?: \| \w+=[^|\n]*)+(?:\n|\Z)", re.MULTILINE),
)
# From its first line to the last of its commits.
_GIT_STATUS = (
    "gitStatus: ",
    re.compile(
        r"^gitStatus: [^\n]*\n(?:(?!Recent commits:)[^\n]*\n){0,500}?Recent commits:\n(?:[^\n]+(?:\n|\Z))*",
        re.MULTILINE,
    ),
)
# A wrapper, and no class: what stands in it has a heading, which decides. Others of its headings are content.
_REMINDER = re.compile(r"<system-reminder>\n(?:[^<]++|<(?!/?system-reminder>))*+</system-reminder>")
_REMINDER_DATE = (
    "# currentDate",
    re.compile(rf"(?<=\n# currentDate\n)Today's date is {_MOMENT}\.?\n"),
    _REMINDER,
)
# To the next heading of its kind, one word that begins with a small letter, or to what ends the reminder.
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
    """The next request will not have this message."""
    return any(
        rule.role == message.role and rule.without(message.content) != message.content
        for rule in RULES
        if rule.drift == "transient"
    )
