"""Names for the model of tools whose own names its notation of calls cannot write.

mcp:files/read                  mcp__files__read          where a call is `call:NAME{…}`, as in Gemma 4
mcp:files/read, mcp/files:read  mcp__files__read_1b0c5f2e, mcp__files__read_e9a71c04
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256

import regex

from start_llm.core.chat import ChatRequest, Json, Message
from start_llm.core.events import CallStarted
from start_llm.core.family import Family
from start_llm.formats.reading.schema import Tools
from start_llm.formats.registry import preferred_call_text
from start_llm.output.splitter import make_splitter

_PLAIN = regex.compile(r"[\w.\-]{1,256}")
"""Names that every notation can write."""
_OTHERS = regex.compile(r"[^\w.\-]+")
_BETWEEN = "__"
_CLIENTS_NAME = "(Called {} by the client.)"
_DIGITS = 8
_MAX_KNOWN = 4_096


@dataclass(frozen=True, slots=True)
class ToolAliases:
    """The names of some tools of one request.

    Attributes:
        by_name: the model's name for each tool that has another one for it.
        names: the client's name for each of these.
    """

    by_name: Mapping[str, str] = field(default_factory=dict[str, str])
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def in_prompt(self, request: ChatRequest) -> ChatRequest:
        """Return the request with the model's names, in its tools, its history and its constraints."""
        if not self.by_name:
            return request
        chosen = request.form.tools
        return replace(
            request,
            tools=tuple(map(self._renamed, request.tools)),
            late_tools=tuple(map(self._renamed, request.late_tools)),
            grammars=tuple(replace(grammar, tool=self._alias(grammar.tool)) for grammar in request.grammars),
            form=replace(request.form, tools=None if chosen is None else frozenset(map(self._alias, chosen))),
            messages=tuple(map(self._with_aliases, request.messages)),
        )

    def for_client[Event](self, event: Event) -> Event | CallStarted:
        """Return an event of the reply with the client's names."""
        if isinstance(event, CallStarted) and event.name in self.names:
            return replace(event, name=self.names[event.name])
        return event

    def _alias(self, name: str) -> str:
        return self.by_name.get(name, name)

    def _renamed(self, tool: Mapping[str, Json]) -> Mapping[str, Json]:
        """Return a tool with the model's name. If that is another, its description tells the client's.

        A system text or a question may have the client's name, and those are never changed.
        """
        function = tool.get("function")
        if not isinstance(function, dict):
            return tool
        name = str(function.get("name"))
        if name not in self.by_name:
            return tool
        about = function.get("description")
        text = " ".join([*([about] if isinstance(about, str) and about else []), _CLIENTS_NAME.format(name)])
        return {**tool, "function": {**function, "name": self.by_name[name], "description": text}}

    def _with_aliases(self, message: Message) -> Message:
        of_tool = message.role == "tool" and message.name is not None
        if not (message.tool_calls or message.tool_references or of_tool):
            return message
        return replace(
            message,
            tool_calls=tuple(replace(call, name=self._alias(call.name)) for call in message.tool_calls),
            tool_references=tuple(map(self._alias, message.tool_references)),
            name=self._alias(message.name) if of_tool and message.name is not None else message.name,
        )


class AliasChooser:
    """Chooses the aliases for one model. Safe to use from any thread.

    Args:
        template: the model's chat template.
    """

    def __init__(self, family: Family, template: str) -> None:
        self._family = family
        self._template = template
        self._reads = lru_cache(_MAX_KNOWN)(self._reads_back)

    def choose(self, names: Iterable[str]) -> ToolAliases:
        """Return the aliases of offered tools. They depend on the names, and not on their order."""
        offered = frozenset(names)
        others = [name for name in offered if not self._can_write(name)]
        wanted = {name: _OTHERS.sub(_BETWEEN, name) for name in others}
        count = Counter(wanted.values())
        by_name = {
            name: _unique(alias, name) if count[alias] > 1 or alias in offered else alias
            for name, alias in wanted.items()
        }
        return ToolAliases(by_name, {alias: name for name, alias in by_name.items()})

    def _can_write(self, name: str) -> bool:
        """Return True if a call of this tool, as the model writes it, is read as one."""
        return _PLAIN.fullmatch(name) is not None or self._reads(name)

    def _reads_back(self, name: str) -> bool:
        tools = Tools([{"type": "function", "function": {"name": name}}])
        splitter = make_splitter(self._family, tools, reasoning_is_open=False, thinking=False)
        events = [*splitter.feed(self._written(name)), *splitter.close(complete=True)]
        return [event.name for event in events if isinstance(event, CallStarted)] == [name]

    def _written(self, name: str) -> str:
        if self._family.channels:
            return f"<|channel|>commentary to=functions.{name} json<|message|>{{}}<|call|>"
        return preferred_call_text(self._family.formats, self._template).write([(name, {})])


def _unique(alias: str, name: str) -> str:
    return f"{alias}_{sha256(name.encode()).hexdigest()[:_DIGITS]}"
