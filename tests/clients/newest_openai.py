"""Asks a server through openai 3.57, and validates each object that comes back by the SDK's own types.

    python newest_openai.py http://127.0.0.1:8080/v1

The SDK itself takes whatever comes. `tests/clients/test_newest_openai.py` runs this in an environment of its
own, since the tests' has an older one. Prints, as JSON, the fields that the types do not have.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel

RECEIPT = {"x-start-llm-receipt": "1"}
RULES = "You are brief, and say what you see. " * 20
KEPT = {"mode": "explicit", "ttl": "30m"}
OPTIONS: Any = {"ttl": "12h"}


def unknown(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields that no type has, without what is below them."""
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}".lstrip(".") for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name, None), f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from unknown(item, path)


def validated(reply: Any) -> set[str]:
    """Validate a reply or an event, and return its unknown fields. Raises ValidationError."""
    kind: type[BaseModel] = type(reply)
    kind.model_validate(reply.to_dict(mode="json"))
    return set(unknown(reply))


def chat(client: Any) -> set[str]:
    part: Any = {"type": "text", "text": RULES, "prompt_cache_breakpoint": KEPT}
    asked: Any = {
        "model": "any",
        "messages": [{"role": "system", "content": [part]}, {"role": "user", "content": "How deep?"}],
        "max_completion_tokens": 4,
        "prompt_cache_options": OPTIONS,
        "service_tier": "flex",
        "logprobs": True,
        "extra_headers": RECEIPT,
    }
    reply = client.chat.completions.create(**asked)
    details = reply.usage.prompt_tokens_details if reply.usage else None
    assert details
    assert details.cache_write_tokens
    assert reply.service_tier == "flex"
    assert reply.usage
    assert reply.usage.model_extra
    assert reply.usage.model_extra["receipt"]["breakpoints"][0]["ttl_s"] == 1800
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage
    return validated(reply).union(*map(validated, chunks))


def responses(client: Any) -> set[str]:
    asked: Any = {
        "model": "any",
        "instructions": RULES,
        "input": "How deep?",
        "max_output_tokens": 16,
        "extra_headers": RECEIPT,
    }
    first = client.responses.create(**asked, prompt_cache_options=OPTIONS)
    assert first.prompt_cache_options
    assert first.prompt_cache_options.ttl == "12h"
    compared: Any = {**OPTIONS, "comparison_response_id": first.id}
    same = client.responses.create(**asked, prompt_cache_options=compared)
    changed = client.responses.create(
        **{**asked, "instructions": "Otherwise."}, prompt_cache_options=compared
    )
    other: Any = {"comparison_response_id": "resp_of_nobody"}
    lost = client.responses.create(**asked, prompt_cache_options=other)
    kinds = [
        item.prompt_cache_diagnostics and item.prompt_cache_diagnostics.type for item in (same, changed, lost)
    ]
    assert kinds == ["cache_hit", "cache_miss", "comparison_response_not_found"], kinds
    warm: Any = {"prewarm": True}
    read = client.responses.create(
        **{**asked, "input": "And behind it?"}, extra_body={"prompt_cache_options": warm}
    )
    assert read.output == []
    events = list(client.responses.create(**asked, stream=True, prompt_cache_options=compared))
    kept = client.responses.retrieve(first.id)
    return set[str]().union(*map(validated, (first, same, changed, lost, read, kept, *events)))


def others(client: Any) -> set[str]:
    text = client.completions.create(model="any", prompt=RULES, max_tokens=4, extra_headers=RECEIPT)
    listed = [validated(model) for model in client.models.list()]
    return validated(text).union(*listed)


def main(url: str) -> None:
    client = OpenAI(base_url=url, api_key="sk-local", max_retries=0)
    fields = {"chat": chat(client), "responses": responses(client), "others": others(client)}
    print(
        json.dumps({"version": openai.__version__, **{name: sorted(names) for name, names in fields.items()}})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
