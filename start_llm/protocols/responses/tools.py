"""Maps tools of the Responses protocol: the model knows flat function names, the client its own names.

{"type": "function", "name": "exec", …}                          exec
{"type": "namespace", "name": "agents", "tools": [function …]}   agents__close
{"type": "custom", "name": "note", …}                            note, with one text: {"input": …}
{"type": "shell"}                                                shell, with its published schema
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from start_llm.core.chat import Json, TextGrammar
from start_llm.protocols.custom_tools import custom_grammar, custom_schema
from start_llm.protocols.fields import Fields
from start_llm.protocols.tool_types import responses_tool_type

FUNCTION_CALL, CUSTOM_CALL = "function_call", "custom_tool_call"
_BETWEEN = "__"

type Tell = Callable[[str], None]
type Reader = Callable[[Fields, Tell], Iterator[ClientTool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """A tool with the client's names.

    Attributes:
        namespace: the namespace that contains it, if any.
        call_item: the type of the items that are its calls.
        grammar: what that text has to follow.
        schema: the function schema for the model, without the name.
    """

    name: str
    namespace: str | None = None
    call_item: str = FUNCTION_CALL
    grammar: TextGrammar | None = None
    schema: Mapping[str, Json]


class Toolbox:
    """The tools of a request, by their flat names."""

    def __init__(self, offered: list[ClientTool]) -> None:
        taken = {tool.name for tool in offered if tool.namespace is None}
        self._tools: list[tuple[str, ClientTool]] = []
        for tool in offered:
            name = tool.name if tool.namespace is None else _new_name(tool.namespace, tool.name, taken)
            self._tools.append((name, tool))
        self._by_name = dict(self._tools)
        self._flat = {(tool.namespace, tool.name): name for name, tool in self._tools}

    @property
    def schemas(self) -> tuple[Mapping[str, Json], ...]:
        """Function schemas for a chat template."""
        return tuple(
            {"type": "function", "function": {"name": name, **tool.schema}} for name, tool in self._tools
        )

    @property
    def grammars(self) -> tuple[TextGrammar, ...]:
        """The grammars of custom tools, by the model's names for these."""
        return tuple(replace(tool.grammar, tool=name) for name, tool in self._tools if tool.grammar)

    @property
    def names(self) -> frozenset[str]:
        """The flat names."""
        return frozenset(self._by_name)

    def called(self, name: str) -> ClientTool:
        """Return the client's tool for a flat name that the model called."""
        return self._by_name.get(name) or ClientTool(name=name, schema={})

    def flat(self, namespace: str | None, name: str) -> str:
        """Return the flat name of a client's tool, even if the tool is no longer offered."""
        known = self._flat.get((namespace, name))
        return known or (_flat_name(namespace, name) if namespace else name)


def _flat_name(namespace: str, name: str) -> str:
    return f"{namespace}{_BETWEEN}{name}"


def _new_name(namespace: str, name: str, taken: set[str]) -> str:
    """Return a unique flat name and add it to `taken`."""
    flat = _flat_name(namespace, name)
    while flat in taken:
        flat += "_"
    taken.add(flat)
    return flat


def read_toolbox(body: Fields, tell: Tell) -> Toolbox:
    """Return the tools that can be offered. Report the others in the terminal.

    Raises:
        InvalidRequest: a tool without a type or a name, or with fields of wrong types.
    """
    return Toolbox([tool for item in body.objects("tools") for tool in _read(item, tell, _READERS)])


def runs_elsewhere(tool: Fields) -> bool:
    """Return True for a tool that OpenAI runs."""
    kind = tool.required_text("type")
    return kind not in _READERS and responses_tool_type(kind, tool.value("environment")).runs == "vendor"


def _read(item: Fields, tell: Tell, readers: Mapping[str, Reader]) -> Iterator[ClientTool]:
    kind = item.required_text("type")
    reader = readers.get(kind)
    built_in = responses_tool_type(kind, item.value("environment"))
    if reader is None and built_in.runs == "client" and readers is _READERS:
        yield ClientTool(name=built_in.name, call_item=built_in.call_item, schema=built_in.schema)
        return
    if reader is None:
        tell(f"Tools of type {kind!r} are not offered to the model.")
        return
    yield from reader(item, tell)


def _function(item: Fields, tell: Tell) -> Iterator[ClientTool]:  # noqa: ARG001 - one of `_READERS`
    name = item.required_text("name")
    item.text("description")
    item.object("parameters")
    # Other fields, such as `strict`, are for the server and not for the model.
    for_the_model = ("description", "parameters")
    yield ClientTool(
        name=name, schema={key: item.data[key] for key in for_the_model if item.value(key) is not None}
    )


def _custom(item: Fields, tell: Tell) -> Iterator[ClientTool]:  # noqa: ARG001 - one of `_READERS`
    name, schema = item.required_text("name"), custom_schema(item)
    yield ClientTool(name=name, call_item=CUSTOM_CALL, grammar=custom_grammar(item), schema=schema)


def _namespace(item: Fields, tell: Tell) -> Iterator[ClientTool]:
    """Yield the namespace's tools. Its description is added to the first one."""
    namespace = item.required_text("name")
    about = item.text("description")
    for nested in item.objects("tools"):
        for tool in _read(nested, tell, _NESTED):
            own = tool.schema.get("description")
            description = "\n\n".join(text for text in (about, own) if text and isinstance(text, str))
            described = {"description": "", **tool.schema} | {"description": description}
            yield replace(tool, namespace=namespace, schema=described if description else tool.schema)
            about = None


_NESTED: Mapping[str, Reader] = {"function": _function, "custom": _custom}
_READERS: Mapping[str, Reader] = {**_NESTED, "namespace": _namespace}
