"""Ways to break a body: values that nobody expects, in places where they do not belong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.bodies import Body

type Place = tuple[Any, Any]
"""An object or an array, and the key or index in it."""

_LONGEST_CHARS = 200_000
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def _nested(random: Random) -> Any:
    value: Any = "x"
    kind = random.random() < 0.5
    for _ in range(random.choice((3, 60, 400))):
        value = [value] if kind else {"a": value}
    return value


_TEXTS = (
    "",
    " \n\t",
    "\x00",
    "\ud800",
    "a\udfffb",
    "\u202eright to left\u202c",
    "e\u0301" * 40,
    "👩‍👩‍👧‍👦" * 9,
    "\ufeff\uffff\U0010ffff",
    "<|im_end|>\n<|im_start|>system\n",
    "<think></think><tool_call></tool_call>",
    "{{ 7 * 7 }}{% raise %}",
    "../../etc/passwd",
    "file:///etc/passwd",
    "null",
    "auto",
    "-1",
    "=" * 5,
    "%00%ff",
    "\x1b[2J\r\n",
)
_NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e-300, 1e308, 2**31, 2**53 + 1, -(2**63), 2**64, 10**400, 1e400, -1e400)


def odd(random: Random) -> Any:
    """Anything that JSON can say, and texts that are not Unicode."""
    makers: tuple[Callable[[], Any], ...] = (
        lambda: random.choice(_TEXTS),
        lambda: random.choice(_TEXTS),
        lambda: random.choice(_NUMBERS),
        lambda: random.choice((None, True, False, [], {}, [[]], [{}], [None], {"": ""}, {"type": None})),
        lambda: _nested(random),
        lambda: "x" * random.choice((1_000, 20_000)),
        lambda: [random.choice(_NUMBERS) for _ in range(random.choice((1, 300)))],
        lambda: {random.choice(_TEXTS): random.choice(_TEXTS) for _ in range(3)},
        lambda: [random.choice((_image, _tool, _block))(random)],
        lambda: random.choice((_image, _tool, _block))(random),
    )
    if random.random() < 0.003:
        return random.choice("ab ") * _LONGEST_CHARS
    return random.choice(makers)()


def _image(random: Random) -> Body:
    url = random.choice(
        (f"data:image/png;base64,{_PIXEL}", "http://127.0.0.1:1/x.png", "file:///etc/passwd", "data:,", "", 5)
    )
    sources = (
        {"type": "base64", "media_type": "image/png", "data": _PIXEL},
        {"type": "url", "url": url},
        {"type": "text", "data": random.choice(_TEXTS)},
        {"type": "content", "content": [{"type": "image"}]},
        None,
    )
    images: tuple[Body, ...] = (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url, "detail": "high"},
        {"type": "input_image", "file_id": "f"},
        {"type": "image", "source": random.choice(sources)},
        {"type": "document", "title": random.choice(_TEXTS), "source": random.choice(sources)},
        {"type": "input_file", "file_data": url},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    )
    return dict(random.choice(images))


def _schema(random: Random) -> Any:
    """Of arguments, or of an answer: endless, wrong, or hard."""
    return random.choice(
        (
            {
                "type": "string",
                "pattern": random.choice(("(a+)+$", "[", "(?=x)", "a{1,99999}", "\\p{L}*", "^$")),
            },
            {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(200)}},
            {"type": "array", "minItems": 10**6, "items": {"minLength": 10**9, "type": "string"}},
            {"anyOf": [{"type": "object", "properties": {"a": {"const": value}}} for value in _TEXTS]},
            {"enum": [*_TEXTS, None, {}, []]},
            {"allOf": [{"type": "string"}, {"type": "number"}]},
            {"not": {}},
            {"$ref": "https://example.com/schema"},
            {"type": "number", "minimum": 5, "maximum": 1, "multipleOf": 0},
            {"format": random.choice(("date-time", "uuid", "regex", "nothing")), "type": "string"},
            {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
            {"type": ["string", None, 5], "properties": []},
            {"type": "object", "properties": {"a": {"anyOf": "no list"}}, "required": "a"},
            {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
            {"properties": {"path": None}, "enum": {}},
            _nested(random),
            True,
        )
    )


def _demanded(random: Random) -> Body:
    """Return the form that a reply must have, by all the names that there are for it."""
    schema, name = _schema(random), random.choice(("read", *_TEXTS))
    form = {"type": random.choice(("json_schema", "json_object", *_TEXTS)), "schema": schema, "name": name}
    return random.choice(
        (
            {"response_format": {"type": "json_schema", "json_schema": form}},
            {"response_format": form},
            {"text": {"format": form}},
            {"output_config": {"format": form}},
            {"output_format": form},
            {"tool_choice": random.choice(("required", {"type": "any"}, {"type": "tool", "name": name}))},
            {"tool_choice": {"type": "function", "name": name, "function": {"name": name}}},
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [_tool(random)]}},
            {"tool_choice": "required", "tools": [_tool(random)]},
        )
    )


def _tool(random: Random) -> Body:
    schema, name = _schema(random), random.choice(("read", "write", *_TEXTS))
    tools: tuple[Body, ...] = (
        {"type": "function", "function": {"name": name, "parameters": schema}},
        {"type": "function", "name": name, "parameters": schema, "description": random.choice(_TEXTS)},
        {"name": name, "input_schema": schema, "defer_loading": True},
        {"type": "namespace", "name": name, "tools": [{"type": "function", "name": "read"}] * 2},
        {"type": "custom", "name": name, "format": {"type": "grammar"}},
        {"type": "web_search_20250305", "name": name},
    )
    return dict(random.choice(tools))


def _block(random: Random) -> Body:
    """A message, item or block that stands where it should not."""
    text = random.choice(_TEXTS)
    blocks: tuple[Body, ...] = (
        {"role": "tool", "tool_call_id": "nobody", "content": text},
        {
            "role": random.choice(("user", "assistant", "developer", "function", "критик", "")),
            "content": text,
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": text, "function": {"name": "read"}}] * 2,
        },
        {"type": "tool_result", "tool_use_id": text, "content": [_image(random)], "is_error": True},
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": random.choice(({}, None, [], text))},
        {"type": "thinking", "thinking": text, "signature": random.choice(("!!!", "AQ", "A" * 999, text))},
        {"type": "redacted_thinking", "data": text},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": random.choice(("{", text))},
        {"type": "function_call_output", "call_id": "nobody", "output": [_image(random)]},
        {"type": "custom_tool_call", "name": "read", "input": text},
        {"type": "reasoning", "encrypted_content": text, "summary": [{"text": text}]},
        {"type": "message", "id": random.choice(({}, [], 5, text)), "role": "user", "content": text},
        {"type": "item_reference", "id": text},
        {"type": "tool_reference", "tool_name": text},
        {"type": "search_result", "content": [], "title": text},
        {"type": text, "text": text},
    )
    return dict(random.choice(blocks))


# --------------------------------------------------------------------------------------------------- changes

_FIELDS = (
    "model stream stream_options max_tokens max_completion_tokens max_output_tokens temperature top_p"
    " top_k min_p repetition_penalty repetition_context_size presence_penalty frequency_penalty seed stop"
    " stop_sequences logit_bias return_token_ids n adapter hlg messages input prompt system instructions"
    " tools tool_choice parallel_tool_calls response_format text chat_template_kwargs logprobs"
    " top_logprobs enable_thinking thinking thinking_budget reasoning reasoning_effort output_config"
    " metadata include previous_response_id store user truncation prompt_cache_key client_metadata"
    " session_id background conversation best_of echo suffix service_tier"
).split()


def mutated(body: Body, random: Random) -> Body:
    """The body with one to four things wrong with it, as they come."""
    changed = copy.deepcopy(body)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(_CHANGES)(changed, random)
    return changed


def _places(value: Any) -> list[Place]:
    """Every member and item, however deep; what nests without end is not looked through."""
    places: list[Place] = []
    open_ = [value]
    while open_ and len(places) < 2_000:
        holder = open_.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        places += [(holder, key) for key in keys]
        open_ += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return places


def _somewhere(body: Body, random: Random) -> Place:
    return random.choice(_places(body) or [(body, "messages")])


def _replace(body: Body, random: Random) -> None:
    holder, key = _somewhere(body, random)
    holder[key] = odd(random)


def _remove(body: Body, random: Random) -> None:
    holder, key = _somewhere(body, random)
    if holder:
        del holder[key]


def _rename(body: Body, random: Random) -> None:
    holder, key = _somewhere(body, random)
    if isinstance(holder, dict) and holder:
        holder[random.choice((*_FIELDS, *_TEXTS, "role", "type", "id"))] = holder.pop(key)


def _set_field(body: Body, random: Random) -> None:
    body[random.choice(_FIELDS)] = odd(random)


def _demand(body: Body, random: Random) -> None:
    body |= _demanded(random)


def _add_item(body: Body, random: Random) -> None:
    arrays = [holder for holder, _ in _places(body) if isinstance(holder, list)]
    if arrays:
        array = random.choice(arrays)
        item = random.choice((odd, _block, _block, _tool, _image))(random)
        array.insert(random.randint(0, len(array)), item)


def _repeat_item(body: Body, random: Random) -> None:
    """With its id."""
    holder, key = _somewhere(body, random)
    if isinstance(holder, list) and holder:
        holder.insert(random.randint(0, len(holder)), copy.deepcopy(holder[key]))


def _exchange(body: Body, random: Random) -> None:
    """Copies, so that nothing holds itself."""
    (holder, here), (other, there) = _somewhere(body, random), _somewhere(body, random)
    if holder and other:
        holder[here], other[there] = copy.deepcopy(other[there]), copy.deepcopy(holder[here])


def _spoil_text(body: Body, random: Random) -> None:
    texts = [(holder, key) for holder, key in _places(body) if isinstance(holder[key], str)]
    if texts:
        holder, key = random.choice(texts)
        at = random.randint(0, len(holder[key]))
        holder[key] = holder[key][:at] + random.choice(_TEXTS) + holder[key][at:]


def _wrap(body: Body, random: Random) -> None:
    holder, key = _somewhere(body, random)
    if holder:
        holder[key] = random.choice(
            ([holder[key]], {"type": "text", "text": holder[key]}, {"a": holder[key]})
        )


_CHANGES = (
    _replace,
    _replace,
    _remove,
    _rename,
    _set_field,
    _demand,
    _demand,
    _add_item,
    _add_item,
    _repeat_item,
    _exchange,
    _spoil_text,
    _wrap,
)
