"""Find out, from the chat template, what a model would write as a given reply."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from start_llm.core.chat import ChatRequest, Message
from start_llm.core.family import Family, ReasoningMarks
from start_llm.core.prompt import Prompt
from start_llm.models.tokenizer import Tokenizer
from start_llm.prompt.prepare import Preparer


@dataclass(frozen=True, slots=True)
class AuditedModel:
    """The audited model, without its weights; `preparer` makes its prompts."""

    tokenizer: Tokenizer
    family: Family
    preparer: Preparer

    def prompt(self, request: ChatRequest) -> Prompt:
        return self.preparer.prepare(request)

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode(errors="replace")

    def written(self, request: ChatRequest, reply: Message) -> str | None:
        """Return a reply as the model would write it after the prompt of a request.

        This is the template's rendering of the reply in a history. Reasoning that the template drops there is
        added again. Return None if the reply cannot be found in the rendering.
        """
        before, message = self.prompt(request), len(request.messages)
        ways = ((), _next_messages(reply))
        histories = [
            self.prompt(replace(request, messages=(*request.messages, reply, *after))) for after in ways
        ]
        ended = next((history for history in histories if message in _ends(history)), None)
        text = self._between(before, ended or histories[0], message)
        if text is None:
            return None
        return self._with_reasoning(text if ended else self._cut(text), before, reply.reasoning)

    def _cut(self, text: str) -> str:
        """Cut the text at the first closer, because the reply's end in the history is not known otherwise."""
        places = [text.find(closer) for closer in self.preparer.facts.closers if closer in text]
        return text[: min(places, default=len(text))]

    def _between(self, prompt: Prompt, history: Prompt, message: int) -> str | None:
        """Return the history's text from the prompt's end to the message's end, or to the history's end.

        Return None if the history does not continue the prompt.
        """
        ends = {message: len(history.tokens.ids), **_ends(history)}
        known = _ends(prompt).get(message - 1) if message - 1 in ends else None
        start, after = (0, 0) if known is None else (known, ends[message - 1])
        asked, rest = (
            self.text(prompt.tokens.ids[start:]),
            self.text(history.tokens.ids[after : ends[message]]),
        )
        heads = (head for head in self._heads(asked) if rest.startswith(head))
        return next((rest.removeprefix(head) for head in heads), None)

    def _heads(self, asked: str) -> Iterator[str]:
        """Yield the end of a prompt, with its reasoning marks and cut before or after them."""
        yield asked
        marks = self.family.reasoning
        for mark in (marks.opening, marks.closing) if marks else ():
            for head in (
                asked.rpartition(mark)[0] + mark,
                asked.rpartition(mark)[0],
                asked.partition(mark)[0],
            ):
                if mark in asked:
                    yield head

    def _with_reasoning(self, text: str, prompt: Prompt, reasoning: str | None) -> str:
        marks = self.family.reasoning
        if marks is None or (reasoning and reasoning in text):
            return text
        text = _without_empty_reasoning(text, marks)
        if not reasoning:
            return marks.cut + text if prompt.reasoning_is_open else text
        if self.family.channels:
            return f"{marks.opening}{reasoning}{marks.closing}<|start|>assistant{text}"
        line = "\n" if marks.cut.startswith("\n") else ""
        return f"{'' if prompt.reasoning_is_open else marks.opening + line}{reasoning}{marks.cut}{text}"


def _ends(prompt: Prompt) -> dict[int, int]:
    return {boundary.message: boundary.tokens for boundary in prompt.boundaries}


def _without_empty_reasoning(text: str, marks: ReasoningMarks) -> str:
    inside, closing, after = text.lstrip().removeprefix(marks.opening).partition(marks.closing)
    return after.lstrip("\n") if closing and not inside.strip() else text


def _next_messages(reply: Message) -> tuple[Message, ...]:
    results = [Message(role="tool", content="done", tool_call_id=call.id) for call in reply.tool_calls]
    return tuple(results) or (Message(role="user", content="Go on."),)
