"""Keeps clients from writing control tokens: the model reads the characters of a mark that their texts quote.

A web page with `<|im_end|>` in it would otherwise end the turn of the tool result that holds it, and open a
forged one. Words stand in for the marks of a client's text while the template renders, as they do for images
(`core.images`). In the finished text each mark comes back with a break inside: a tokenizer that gets its two
pieces one by one cannot take them for the control token.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from os.path import commonprefix
from typing import NamedTuple

from start_llm.core.chat import Json, Message, ToolCall
from start_llm.core.family import Family, ReasoningMarks
from start_llm.prompt.inline_reasoning import split_inline_reasoning
from start_llm.prompt.substitution import mark_of, mark_words, substitute, word_of
from start_llm.prompt.template import PromptTokenizer
from start_llm.prompt.template_audit.samples import rendered_samples


def control_marks(tokenizer: PromptTokenizer, family: Family) -> list[str]:
    """Return the texts that a model reads as control tokens.

    These are the special tokens, and those other added tokens that the template or the model's format writes:
    `<think>` is not special in many vocabularies. Further added tokens, such as Gemma's runs of blanks and
    its tags of HTML, are ordinary text.
    """
    if not tokenizer.has_chat_template:
        return []
    written = "\n".join((tokenizer.chat_template, rendered_samples(tokenizer), *family.marks))
    added = (text for text in tokenizer.added_tokens if text in written)
    return [text for text in dict.fromkeys((*tokenizer.control_tokens, *added)) if not text.isspace()]


class Broken(NamedTuple):
    """A text with its marks.

    Attributes:
        cuts: the given offsets, in this text.
        breaks: offsets inside each mark, and behind some, where the text is cut before it is tokenised.
    """

    text: str
    cuts: list[int]
    breaks: list[int]


class ClientMarks:
    """Hides marks in what a client sent, and brings them back. Safe to use from any thread.

    Args:
        marks: texts of control tokens. One that cannot be broken in two, such as a single character, is not
            hidden.
        reasoning: marks of reasoning at the beginning of a reply, which stay marks.
    """

    def __init__(self, marks: Iterable[str], reasoning: ReasoningMarks | None = None) -> None:
        marks = sorted(filter(None, marks))  # every piece holds an empty text
        by_length: dict[int, set[str]] = {}
        for mark in marks:
            by_length.setdefault(len(mark), set()).add(mark)
        self._breaks = {mark: at for mark in marks if (at := _break_of(mark, by_length))}
        beginnings = list(_beginnings(marks, by_length))
        tails = {beginning.mark[: beginning.start] for beginning in beginnings}
        self._cut_behind = tails | {beginning.mark for beginning in beginnings if beginning.goes_beyond}
        self._words = {text: word_of(text) for text in (*self._breaks, *tails)}
        tail = rf"(?:{_pattern(tails)})\Z" if tails else ""
        self._any = re.compile("|".join(filter(None, (_pattern(self._breaks), tail))) or r"(?!)")
        self._reasoning = reasoning

    @classmethod
    def of(cls, tokenizer: PromptTokenizer, family: Family) -> ClientMarks:
        return cls(control_marks(tokenizer, family), family.reasoning)

    def hidden(self, text: str) -> str:
        """Return a text with words in place of its marks, and of an end that would become a mark with what a
        mark that the template writes behind it begins with.
        """
        return self._any.sub(lambda mark: self._words[mark[0]], text)

    def hidden_object(self, members: Mapping[str, Json]) -> dict[str, Json]:
        """Return a JSON object with words in place of the marks in its texts and names."""
        return {self.hidden(name): self._hidden_value(value) for name, value in members.items()}

    def _hidden_value(self, value: Json) -> Json:
        match value:
            case str():
                return self.hidden(value)
            case list():
                return list(map(self._hidden_value, value))
            case dict():
                return self.hidden_object(value)
            case _:
                return value

    def hidden_message(self, message: Message) -> Message:
        """Return a message with words in place of its marks, except around reasoning that begins a reply."""
        if not self._quotes(message):
            return message
        return replace(
            message,
            content=self._hidden_content(message),
            reasoning=message.reasoning and self.hidden(message.reasoning),
            tool_calls=tuple(map(self._hidden_call, message.tool_calls)),
            tool_call_id=message.tool_call_id and self.hidden(message.tool_call_id),
            tool_references=tuple(map(self.hidden, message.tool_references)),
            name=message.name and self.hidden(message.name),
        )

    def _quotes(self, message: Message) -> bool:
        texts = (message.content, message.reasoning, message.tool_call_id, message.name)
        return any(map(self._any.search, filter(None, (*texts, *message.tool_references)))) or any(
            self._hidden_call(call) != call for call in message.tool_calls
        )

    def _hidden_content(self, message: Message) -> str:
        marks = self._reasoning
        if marks is None or split_inline_reasoning(message, marks) is message:
            return self.hidden(message.content)
        before, opening, rest = message.content.partition(marks.opening)
        reasoning, closing, answer = rest.partition(marks.closing)
        return "".join((before, opening, self.hidden(reasoning), closing, self.hidden(answer)))

    def _hidden_call(self, call: ToolCall) -> ToolCall:
        return ToolCall(self.hidden(call.id), self.hidden(call.name), self.hidden_object(call.arguments))

    def broken(self, text: str, cuts: Sequence[int] = ()) -> Broken:
        """Return a text with its marks, and where they have to be cut.

        Args:
            cuts: offsets in `text`, none of them in a word.
        """
        done = substitute(text, mark_words(text), mark_of)
        written = zip(done.starts, done.written, strict=True)
        breaks = [start + at for start, text in written for at in self._breaks_in(text)]
        return Broken(done.text, [done.moved(cut) for cut in cuts], breaks)

    def _breaks_in(self, text: str) -> Iterator[int]:
        """Where a hidden text is cut: inside, if it is a mark; behind it, if another mark may begin in it."""
        if at := self._breaks.get(text):
            yield at
        if text in self._cut_behind:
            yield len(text)


def tokens_of_client_text(tokenizer: PromptTokenizer, marks: ClientMarks, text: str) -> list[int]:
    """Tokenise a text of a client alone, without control tokens."""
    broken = marks.broken(marks.hidden(text))
    begin, *others = (broken.text[start:end] for start, end in _spans(broken))
    rest = chain.from_iterable(map(tokenizer.encode_continuation, others))
    return [*tokenizer.encode(begin, as_document=False), *rest]


def _spans(broken: Broken) -> Iterable[tuple[int, int]]:
    return zip([0, *broken.breaks], [*broken.breaks, len(broken.text)], strict=True)


class _Beginning(NamedTuple):
    """A mark begins inside another one, or inside another occurrence of itself.

    Attributes:
        start: the place, not the first one of the mark in which it begins.
        goes_beyond: it may end behind that mark.
    """

    mark: str
    start: int
    goes_beyond: bool


def _beginnings(marks: Sequence[str], by_length: Mapping[int, Container[str]]) -> Iterator[_Beginning]:
    """Find where marks begin inside marks.

    Args:
        marks: all of them, sorted.
        by_length: the same, by their number of characters.
    """
    lengths: dict[str, set[int]] = {}
    for mark in marks:
        lengths.setdefault(mark[0], set()).add(len(mark))
    for mark in marks:
        for start in range(1, len(mark)):
            known, left = lengths.get(mark[start], ()), len(mark) - start
            goes_beyond = left < max(known, default=0) and _begins_any(mark[start:], marks)
            inside = (length for length in known if length <= left)
            if goes_beyond or any(mark[start : start + length] in by_length[length] for length in inside):
                yield _Beginning(mark, start, goes_beyond)


def _begins_any(text: str, marks: Sequence[str]) -> bool:
    """Return whether one of the sorted marks begins with a text and is longer."""
    after = bisect_right(marks, text)
    return after < len(marks) and marks[after].startswith(text)


def _break_of(mark: str, by_length: Mapping[int, Container[str]]) -> int:
    """Return the first offset at which a mark falls into two pieces without a mark; 0 if there is none.

    Its own parts are looked up among the marks, of which Gemma has 6,400.

    Args:
        by_length: all marks, by their number of characters.
    """
    spans = ((start, start + length) for length in by_length for start in range(len(mark) - length + 1))
    inside = [(start, end) for start, end in spans if mark[start:end] in by_length[end - start]]
    inside.remove((0, len(mark)))
    places = range(1, len(mark))
    return next((at for at in places if all(start < at < end for start, end in inside)), 0)


def _pattern(texts: Iterable[str]) -> str:
    """Return a pattern of any of the texts, the longest first, that shares their beginnings."""
    tree: dict[str, list[str]] = {}
    for text in filter(None, texts):
        tree.setdefault(text[0], []).append(text)
    branches = list(map(_branch, tree.values()))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""


def _branch(texts: Sequence[str]) -> str:
    beginning = commonprefix(texts)  # noqa: RUF071 - characters are meant
    return re.escape(beginning) + _optional([text.removeprefix(beginning) for text in texts])


def _optional(rests: Sequence[str]) -> str:
    return f"(?:{_pattern(rests)})?" if "" in rests and any(rests) else _pattern(rests)
