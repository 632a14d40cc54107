"""The model whose folder is looked into, and what it would write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from start_llm.core.chat import ChatRequest, Message
from start_llm.core.family import Family, ThoughtMarks
from start_llm.core.prompt import Prompt
from start_llm.models.tokenizer import Tokenizer
from start_llm.prompt.prepare import Preparer


@dataclass(frozen=True, slots=True)
class Subject:
    """A model without its weights. Its preparer remembers no conversation."""

    tokenizer: Tokenizer
    family: Family
    preparer: Preparer

    def prompt(self, request: ChatRequest) -> Prompt:
        return self.preparer.prepare(request)

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode(errors="replace")

    def written(self, request: ChatRequest, reply: Message) -> str | None:
        """A reply as the model writes it behind the prompt of a request; None if the template does not tell.

        That is what the template makes of the reply in a history. A thought that it drops there is put back.
        """
        before, message = self.prompt(request), len(request.messages)
        ways = ((), _next_messages(reply))
        histories = [
            self.prompt(replace(request, messages=(*request.messages, reply, *behind))) for behind in ways
        ]
        told = next((one for one in histories if message in _ends(one)), None)
        said = self._between(before, told or histories[0], message)
        if said is None:
            return None
        return self._with_thought(said if told else self._cut(said), before, reply.reasoning)

    def _cut(self, said: str) -> str:
        """The last reply of a history, where nothing but its closer tells where it ends."""
        places = [said.find(closer) for closer in self.preparer.facts.closers if closer in said]
        return said[: min(places, default=len(said))]

    def _between(self, prompt: Prompt, history: Prompt, message: int) -> str | None:
        """From where the prompt ends to where the message ends in the history, or to the history's end."""
        ends = {message: len(history.tokens.ids), **_ends(history)}
        known = _ends(prompt).get(message - 1) if message - 1 in ends else None
        start, behind = (0, 0) if known is None else (known, ends[message - 1])
        asked, told = (
            self.text(prompt.tokens.ids[start:]),
            self.text(history.tokens.ids[behind : ends[message]]),
        )
        heads = (head for head in self._heads(asked) if told.startswith(head))
        return next((told.removeprefix(head) for head in heads), None)

    def _heads(self, asked: str) -> Iterator[str]:
        """The end of a prompt, with what it has for a thought and without."""
        yield asked
        marks = self.family.thought
        for mark in (marks.opening, marks.closing) if marks else ():
            for head in (
                asked.rpartition(mark)[0] + mark,
                asked.rpartition(mark)[0],
                asked.partition(mark)[0],
            ):
                if mark in asked:
                    yield head

    def _with_thought(self, said: str, prompt: Prompt, thought: str | None) -> str:
        marks = self.family.thought
        if marks is None or (thought and thought in said):
            return said
        said = _without_empty_thought(said, marks)
        if not thought:
            return marks.cut + said if prompt.thought_is_open else said
        if self.family.channels:
            return f"{marks.opening}{thought}{marks.closing}<|start|>assistant{said}"
        line = "\n" if marks.cut.startswith("\n") else ""
        return f"{'' if prompt.thought_is_open else marks.opening + line}{thought}{marks.cut}{said}"


def _ends(prompt: Prompt) -> dict[int, int]:
    return {boundary.message: boundary.tokens for boundary in prompt.boundaries}


def _without_empty_thought(said: str, marks: ThoughtMarks) -> str:
    inside, closing, behind = said.lstrip().removeprefix(marks.opening).partition(marks.closing)
    return behind.lstrip("\n") if closing and not inside.strip() else said


def _next_messages(reply: Message) -> tuple[Message, ...]:
    results = [Message(role="tool", content="done", tool_call_id=call.id) for call in reply.tool_calls]
    return tuple(results) or (Message(role="user", content="Go on."),)
