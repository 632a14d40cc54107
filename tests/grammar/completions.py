"""The grammar of OpenAI's completions, chats and texts: what a client may rely on.

role?  (reasoning | text | call | life)*  finish  usage?  [DONE]
role?  (reasoning | text | call | life)*  error
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.grammar.wire import DONE, StreamContent, expect

_CHAT, _TEXT = "chat.completion", "text_completion"
_HEAD = ("id", "object", "created", "model", "system_fingerprint")
_IDS = {_CHAT: r"chatcmpl-[A-Za-z0-9]{24}", _TEXT: r"cmpl-[A-Za-z0-9]{24}"}
_BESIDE = {"index", "finish_reason", "logprobs", "token_ids"}
_CALL_TEXTS = {"function": "arguments", "custom": "input"}
"""For each type of call the member with its text."""
_FINISHES = ("stop", "length", "tool_calls")
_SIGNS_OF_LIFE: tuple[dict[str, Any], ...] = ({}, {"annotations": []})
"""Deltas that change nothing."""
_USAGE = {
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
}


def read(events: Sequence[Any]) -> StreamContent:
    """Return the content of the stream. Everything that its grammar does not allow fails."""
    *chunks, last = events
    if isinstance(last, dict) and "error" in last:
        if chunks:  # what fails before anything is said is an error alone
            _Reading.of(chunks).read(chunks)
        assert last["error"].keys() == {"message", "type", "param", "code"}
        return StreamContent(failure=last["error"]["message"])
    assert last == DONE, "it ends with neither an error nor the end mark"
    reading = _Reading.of(chunks)
    return StreamContent(reading.whole(chunks), parts=tuple(reading.parts))


def _usage(chunk: Any, head: dict[str, Any]) -> Any:
    usage = chunk["usage"]
    assert usage.keys() == _USAGE
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert 0 <= usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    expect(chunk, **{name: head[name] for name in ("id", "created", "model")})
    return usage


@dataclass
class _Reading:
    """A reply that is being put together."""

    head: dict[str, Any]
    kind: str
    texts: dict[str, str] = field(default_factory=lambda: {"content": "", "reasoning_content": ""})
    calls: list[dict[str, Any]] = field(default_factory=list)
    beside: dict[str, list[Any]] = field(default_factory=dict)
    parts: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, chunks: Sequence[Any]) -> _Reading:
        first = chunks[0]
        kind = first["object"].removesuffix(".chunk")
        assert re.fullmatch(_IDS[kind], first["id"])
        return cls({**{name: first[name] for name in _HEAD}, "object": kind}, kind)

    @property
    def is_chat(self) -> bool:
        return self.kind == _CHAT

    def whole(self, chunks: list[Any]) -> dict[str, Any]:
        """Usage stands in the last chunk, or after it in one without choices."""
        *chunks, last = chunks
        usage = _usage(last, self.head)
        if not last["choices"]:
            *chunks, last = chunks
            assert "usage" not in last, "usage is sent twice"
        self.read(chunks)
        return {**self.head, "choices": [self.finished(last)], "usage": usage}

    def read(self, chunks: Sequence[Any]) -> None:
        """All chunks but the last one."""
        assert chunks, "it does not begin"
        for at, chunk in enumerate(chunks):
            assert "usage" not in chunk, "usage is sent too early"
            choice = self._choice(chunk)
            assert choice["finish_reason"] is None, "something follows the end"
            if at == 0:
                self._open(choice)
            elif self.is_chat:
                self._change(choice["delta"])
            else:
                self.texts["content"] += choice["text"]
            self._note(choice)

    def finished(self, chunk: Any) -> dict[str, Any]:
        """The choice of the reply that is not streamed, once the last chunk is read."""
        choice = self._choice(chunk)
        reason = choice["finish_reason"]
        assert reason in _FINISHES
        assert self.calls or reason != "tool_calls", "no call was made"
        assert (choice["delta"] == {}) if self.is_chat else (choice["text"] == "")
        base = {"index": 0, "finish_reason": reason, "logprobs": None, **self._scores()}
        return (
            {**base, "message": self._message()} if self.is_chat else {**base, "text": self.texts["content"]}
        )

    def _choice(self, chunk: Any) -> Any:
        expect(chunk, **{**self.head, "object": "chat.completion.chunk" if self.is_chat else _TEXT})
        (choice,) = chunk["choices"]
        assert choice.keys() - _BESIDE == {"delta" if self.is_chat else "text"}
        assert choice["index"] == 0
        return choice

    def _open(self, choice: Any) -> None:
        if self.is_chat:
            assert choice["delta"] == {"role": "assistant", "content": ""}, "it does not begin with the role"
        else:
            assert choice["text"] == ""

    def _change(self, delta: Any) -> None:
        if delta in _SIGNS_OF_LIFE:
            return
        ((name, value),) = delta.items()
        if name == "tool_calls":
            (part,) = value
            self._call(part)
            return
        assert value, "an empty text is no change"
        self.texts[name] += value
        self._add_part(name, value)

    def _add_part(self, kind: str, text: str) -> None:
        """Neighbours of one kind are one part."""
        if self.parts and self.parts[-1][0] == kind:
            text = self.parts.pop()[1] + text
        self.parts.append((kind, text))

    def _call(self, part: Any) -> None:
        """The first part of a call names it; each of the others is a fragment of the call that began last."""
        kind = part["type"] if "id" in part else self.calls[-1]["type"]
        whole = _CALL_TEXTS[kind]
        text = part[kind][whole]
        if "id" in part:
            assert re.fullmatch(r"[A-Za-z0-9]+", part["id"]), "some clients drop other characters"
            assert part["id"] not in [call["id"] for call in self.calls]
            called = {"name": part[kind]["name"], whole: ""}
            assert part == {"index": len(self.calls), "id": part["id"], "type": kind, kind: called}
            self.calls.append({"id": part["id"], "type": kind, kind: called})
            self.parts.append((f"call {part['index']}", ""))
            return
        assert part == {"index": len(self.calls) - 1, kind: {whole: text}}
        assert text, "an empty fragment is no change"
        self.calls[-1][kind][whole] += text
        self._add_part(f"call {part['index']}", text)

    def _note(self, choice: Any) -> None:
        """Tokens and log-probabilities, one for the other."""
        if "token_ids" in choice:
            self.beside.setdefault("token_ids", []).extend(choice["token_ids"])
        if choice.get("logprobs"):
            for name, column in choice["logprobs"].items():
                self.beside.setdefault(name, []).extend(column or [])

    def _scores(self) -> dict[str, Any]:
        scores = dict(self.beside)
        ids = {"token_ids": scores.pop("token_ids")} if "token_ids" in scores else {}
        if not scores:
            return ids
        columns = {"content": scores["content"], "refusal": None} if self.is_chat else scores
        return {**ids, "logprobs": columns}

    def _message(self) -> dict[str, Any]:
        reasoning = self.texts["reasoning_content"]
        return {
            "role": "assistant",
            "content": self.texts["content"],
            "refusal": None,
            **({"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}),
            **({"tool_calls": self.calls} if self.calls else {}),
        }
