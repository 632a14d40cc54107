"""Converts the events of a reply to Anthropic's content blocks. State machines without I/O."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from start_llm.core.chat import Json
from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output, Reasoning
from start_llm.protocols.fields import parse_embedded

type Member = Literal["thinking", "signature", "text", "input"]
"""The member of a block that grows."""


@dataclass(frozen=True, slots=True)
class BlockStarted:
    """A block has begun; its members are still empty."""

    block: dict[str, Json]


@dataclass(frozen=True, slots=True)
class BlockGrew:
    member: Member
    text: str


@dataclass(frozen=True, slots=True)
class BlockStopped:
    pass


type Step = BlockStarted | BlockGrew | BlockStopped


class BlockWriter:
    """Opens and closes blocks, one at a time.

    White space waits for text to follow it. Clients drop a text block of white space, so they would send back
    a different reply from the one they received.

    Args:
        seal: creates the signature of reasoning.
        shows_reasoning: if False, send only the signature of reasoning.
    """

    def __init__(self, seal: Callable[[str], str], *, shows_reasoning: bool = True) -> None:
        self._seal = seal
        self._shows_reasoning = shows_reasoning
        self._open: str | None = None
        self._reasoning: list[str] = []
        self._space: list[str] = []

    def feed(self, output: Output) -> Iterator[Step]:
        match output:
            case Reasoning(text):
                yield from self._think(text)
            case Content(text):
                yield from self._say(text)
            case CallStarted(name=name, id=call_id):
                call: dict[str, Json] = {
                    "type": "tool_use",
                    "id": f"toolu_{call_id}",
                    "name": name,
                    "input": {},
                }
                yield from self._begin("tool_use", call)
            case CallArguments(text=text):
                yield BlockGrew("input", text)
            case CallEnded():
                yield from self.close()

    def close(self) -> Iterator[Step]:
        """Close the open block, if any."""
        if self._open == "thinking":
            yield BlockGrew("signature", self._seal("".join(self._reasoning)))
            self._reasoning.clear()
        if self._open is not None:
            yield BlockStopped()
        self._open = None

    def _think(self, text: str) -> Iterator[Step]:
        if self._open != "thinking":
            yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self._reasoning.append(text)
        if self._shows_reasoning:
            yield BlockGrew("thinking", text)

    def _say(self, text: str) -> Iterator[Step]:
        if self._open == "text":
            if text:
                yield BlockGrew("text", text)
        elif text.strip():
            first_text = "".join([*self._space, text])
            yield from self._begin("text", {"type": "text", "text": ""})
            yield BlockGrew("text", first_text)
        else:
            self._space.append(text)

    def _begin(self, kind: str, block: dict[str, Json]) -> Iterator[Step]:
        yield from self.close()
        self._space.clear()
        self._open = kind
        yield BlockStarted(block)


def whole_blocks(steps: Iterable[Step]) -> list[Json]:
    """Return the blocks of a reply that is not streamed."""
    blocks: list[dict[str, Json]] = []
    texts: dict[Member, list[str]] = {}
    for step in steps:
        match step:
            case BlockStarted(block):
                blocks.append(block)
                texts = {}
            case BlockGrew(member, text):
                texts.setdefault(member, []).append(text)
            case BlockStopped():
                blocks[-1] |= {member: _value(member, "".join(parts)) for member, parts in texts.items()}
    return [*blocks]


def _value(member: Member, text: str) -> Json:
    return _arguments(text) if member == "input" else text


def _arguments(text: str) -> Json:
    """Parse the arguments. The text of a cut call is kept under `raw`."""
    parsed = parse_embedded(text)
    return parsed if isinstance(parsed, dict) else {"raw": text}
