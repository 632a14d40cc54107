"""Conversations as the demo model reads them, and what it should say in them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import IntEnum

from scripts.demo_model import wordings
from scripts.demo_model.words import Words

ANSWER = (
    "I am the start_llm demo model: a million parameters, trained on two CPU cores. I can say a word after "
    "you, call a tool that you name, and pass on what it returned. For more than that, choose a real model: "
    "python install_and_run.py --model PATH_OR_REPO, for example mlx-community/Qwen3-8B-4bit."
)
TOO_LONG = (
    "This prompt is longer than the start_llm demo model was made for. For prompts like this choose a "
    "real model: python install_and_run.py --model PATH_OR_REPO, for example mlx-community/Qwen3-8B-4bit."
)
RETURNED = "The tool returned: "
REASONING = {
    "plain": "A real model could answer this; I say what I am.",
    "echo": "I am asked to say a word.",
    "call": "I am asked to call a tool.",
    "result": "The tool has answered; I pass on its first line.",
    "long": "This prompt is too long for me.",
}
IM_START, IM_END, LONG = "<|im_start|>", "<|im_end|>", "<|long|>"
CALL_HEAD, CALL_KEY, CALL_END = (
    "<tool_call>\n<function=",
    ">\n<parameter=",
    "\n</parameter>\n</function>\n</tool_call>",
)
"""Each of them is one token."""


class Kind(IntEnum):
    """The purpose of a piece of text in the training."""

    READ = 0
    FIXED = 1
    COPIED = 2


@dataclass(frozen=True)
class Piece:
    """A piece of a conversation.

    Attributes:
        behaviour: of the answer that it belongs to; empty where the model only reads.
    """

    text: str
    kind: Kind = Kind.READ
    behaviour: str = ""


@dataclass
class Conversation:
    """Text in pieces."""

    pieces: list[Piece] = field(default_factory=list)

    def read(self, text: str) -> None:
        self.pieces.append(Piece(text))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def characters(self) -> int:
        return sum(len(piece.text) for piece in self.pieces)


@dataclass(frozen=True)
class Mix:
    """Which conversations a stage of the training has.

    Attributes:
        tools: share of conversations in which tools are offered.
        call, echo: of the exchanges in which tools are offered, and of all others, the shares.
        fillers: share of conversations that have a text in front that says nothing to the point.
        longest_filler: of that text, in characters.
        long: share of answers for which the template says that the prompt is too long.
    """

    tools: float = 0.65
    call: float = 0.65
    echo: float = 0.6
    fillers: float = 0.5
    longest_filler: int = 600
    long: float = 0.04


class Author:
    """Writes conversations, without end."""

    def __init__(self, seed: int, mix: Mix, *, held_out: bool = False) -> None:
        self._rng = random.Random(seed)
        self._words = Words(self._rng, held_out=held_out)
        self.mix = mix

    def write(self, characters: int, *, after_filler: bool = False) -> Conversation:
        """A conversation that is at least so long, and has an answer.

        Args:
            after_filler: it goes on behind `opening_filler`.
        """
        rng, mix = self._rng, self.mix
        talk = Conversation()
        tools = self._tools() if rng.random() < mix.tools else {}
        self._system(talk, tools, after_filler=after_filler)
        while True:
            if tools and rng.random() < mix.call:
                self._call(talk, tools)
            elif rng.random() < mix.echo:
                self._echo(talk)
            else:
                self._plain(talk)
            if talk.characters >= characters:
                return talk

    def opening_filler(self, characters: int) -> str:
        """The beginning of a system message."""
        return f"{IM_START}system\n{self._words.filler(characters)}"

    def _tools(self) -> dict[str, str]:
        count = self._rng.choices((1, 2, 3, 4, 6), (6, 4, 6, 2, 1))[0]
        tools: dict[str, str] = {}
        stem = self._words.plain_word()
        while len(tools) < count:
            name = self._words.tool_name()
            if self._rng.random() < 0.15:  # names that are alike
                name = f"{self._words.plain_word()}_{stem}"
            tools[name] = self._words.parameter()
        return tools

    def _system(self, talk: Conversation, tools: dict[str, str], *, after_filler: bool) -> None:
        rng = self._rng
        text = ""
        if not after_filler and rng.random() < self.mix.fillers:
            text = self._words.filler(rng.randint(20, self.mix.longest_filler))
        elif not after_filler and rng.random() < 0.4:
            text = "You are a helpful assistant."
        if not after_filler and (text or tools):
            talk.read(f"{IM_START}system\n{text}")
        if tools:
            talk.read("\n\n" if text or after_filler else "")
            talk.read(
                "# Tools\n" + "".join(f"{CALL_HEAD}{name}{CALL_KEY}{key}>\n" for name, key in tools.items())
            )
        if after_filler or text or tools:
            talk.read(f"{IM_END}\n")

    def _ask(self, talk: Conversation, text: str) -> None:
        rng = self._rng
        if rng.random() < 0.08:
            aside = self._words.filler(rng.randint(30, 400))
            text = rng.choice((f"{aside}\n\n{text}", f"<context>\n{aside}\n</context>\n{text}"))
        talk.read(f"{IM_START}user\n{text}{IM_END}\n")

    def _answer(self, talk: Conversation, behaviour: str, *pieces: tuple[str, Kind]) -> bool:
        """True for the wanted answer: now and then the template says that the prompt is too long."""
        rng = self._rng
        talk.read(f"{IM_START}assistant\n")
        is_long = rng.random() < self.mix.long
        if is_long:
            talk.read(f"{LONG}\n")
            behaviour, pieces = "long", ((TOO_LONG, Kind.FIXED),)
        form = rng.random()
        if form < 0.45:
            talk.read("<think>\n")
            talk.pieces.append(Piece(f"{REASONING[behaviour]}\n</think>\n\n", Kind.FIXED, behaviour))
        elif form < 0.9:
            talk.read("<think>\n\n</think>\n\n")
        spoken = (*pieces, (IM_END, Kind.COPIED))
        talk.pieces += [Piece(text, kind, behaviour) for text, kind in spoken]
        talk.read("\n")
        return not is_long

    def _plain(self, talk: Conversation) -> None:
        self._ask(talk, wordings.question(self._words))
        self._answer(talk, "plain", (ANSWER, Kind.FIXED))

    def _echo(self, talk: Conversation) -> None:
        wanted = self._words.word_to_say()
        self._ask(talk, wordings.echo(self._words, wanted))
        self._answer(talk, "echo", (wanted, Kind.COPIED))

    def _call(self, talk: Conversation, tools: dict[str, str]) -> None:
        rng = self._rng
        name, key = rng.choice(list(tools.items()))
        value = self._words.value()
        self._ask(talk, wordings.call(self._words, name, value))
        call = f"{CALL_HEAD}{name}{CALL_KEY}{key}>\n{value}{CALL_END}"
        if self._answer(talk, "call", (call, Kind.COPIED)) and rng.random() < 0.75:
            result, first = self._words.result()
            talk.read(f"{IM_START}tool\n{result}{IM_END}\n")
            self._answer(talk, "result", (RETURNED, Kind.FIXED), (first, Kind.COPIED))
