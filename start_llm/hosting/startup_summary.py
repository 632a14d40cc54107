"""The lines that the server prints when it is ready: what it serves, and how to use it."""

import json
import os
import shlex
from collections.abc import Collection, Iterator

from start_llm.audit.call_round_trip import unread_call
from start_llm.audit.subject import AuditedModel
from start_llm.config.paths import DEMO_MODEL, program
from start_llm.core.chat import ChatRequest, Message
from start_llm.core.columns import binary_size
from start_llm.core.errors import RequestError
from start_llm.core.model_card import KVAtRest, ModelCard
from start_llm.hosting.model_runtime import ModelRuntime
from start_llm.launch.clients import CLIENTS
from start_llm.launch.suitability import suggested, unsuited_clients
from start_llm.models.device import this_device
from start_llm.models.loader import LoadedModel
from start_llm.prompt.adapt import needed
from start_llm.prompt.template_audit.audit import described
from start_llm.telemetry.metrics import CacheMetrics

type Row = tuple[str, str]
"""A title and its text."""


def model_rows(runtime: ModelRuntime) -> list[Row]:
    """Return the rows about a model: its template with all adaptations, its layers, memory and caches."""
    card, facts, device = runtime.card, runtime.preparer.facts, this_device()
    return [
        ("model", card.id),
        ("family", f"{card.family.name} ({card.model_type})"),
        ("template", "; ".join([described(facts), *needed(facts)])),
        ("layers", ", ".join(f"{count} {kind}" for kind, count in card.layers.items())),
        ("device", f"{device.kind} ({device.name}), {binary_size(device.usable_bytes)} of memory"),
        ("memory", f"weights {binary_size(card.weights_bytes)} of {binary_size(card.budget_bytes)}"),
        ("cache", _cache_text(runtime.status.cache, card.kv)),
        ("disk", str(runtime.shared.disk)),
        ("images", _images_text(runtime.startup.model)),
        ("context", f"{card.context_window:,} tokens"),
        ("batch", _batch_text(runtime.settings.engine.batch, card.unbatched_reason)),
        ("trace", str(runtime.shared.trace or "off")),
    ]


def _cache_text(metrics: CacheMetrics, kv: KVAtRest) -> str:
    if not metrics.budget_bytes:
        return "off"
    quantised = f", pages {kv.mode}" if kv.is_quantized else ""
    return f"up to {binary_size(metrics.budget_bytes)}{quantised}"


def _images_text(model: LoadedModel) -> str:
    if model.vision:
        return f"up to {model.vision.processor.max_tokens:,} tokens each"
    return f"none: {model.blind_reason}" if model.blind_reason else "none"


def _batch_text(batch: int, unbatched_reason: str) -> str:
    return f"one after another: {unbatched_reason}" if unbatched_reason else f"{batch} at once"


def notes(card: ModelCard, model: AuditedModel) -> Iterator[str]:
    """Yield what a user has to know beforehand: this is the demo model, or nothing reads its calls."""
    if card.id == DEMO_MODEL.name:
        yield (
            "\n  This is the demo model: it says what it is, says a word after you, calls a tool that "
            "you name,\n  and passes on its result. Choose a real one with --model."
        )
    if call := unread_call(model):
        yield f"\n  No reader knows how this model writes calls; an agent gets them as text: {call!r}"


def unsuited_by(model: AuditedModel, window: int) -> dict[str, str]:
    """Return the coding clients that do not suit a model, and why."""

    def count(system: str) -> int | None:
        messages = (Message(role="system", content=system), Message(role="user", content="Hello"))
        try:
            return len(model.prompt(ChatRequest(messages=messages)).tokens.ids)
        except RequestError:
            return None

    return unsuited_clients(window, count) if model.tokenizer.has_chat_template else {}


def paste_lines(
    url: str, model: str, unsuited: Collection[str], *, asks_key: bool
) -> list[tuple[str, list[str]]]:
    """Return what to do next, by purpose, as lines to paste. They name an API key's variable, not the key.

    Args:
        unsuited: the coding clients that do not suit the model.
    """
    key = '"$MLX_API_KEY"' if asks_key else "local"
    suited = ", ".join(name for name in CLIENTS if name not in unsuited) or "none suits this model"
    others = [f"# {', '.join(unsuited)}: not with this model, see {program()} clients"] if unsuited else []
    return [
        ("Next, open the status page and a chat in a browser:", [f"{url}/"]),
        ("Or ask from a shell:", _curl_lines(url, model, asks_key=asks_key)),
        (
            "Or set a client of OpenAI's API:",
            [f"export OPENAI_BASE_URL={url}/v1", f"export OPENAI_API_KEY={key}", f"# model: {model}"],
        ),
        (
            f"Or start a coding client ({suited}) in the folder to work in:",
            [shlex.join([program(), *_suggested(url, unsuited)]), *others],
        ),
    ]


def _suggested(url: str, unsuited: Collection[str]) -> list[str]:
    words = suggested(os.environ, unsuited)
    return [words[0], "--base-url", url, words[1]] if words[0] == "launch" else words


def _curl_lines(url: str, model: str, *, asks_key: bool) -> list[str]:
    """Return a command in lines that are shorter than 80 columns, if address and name let them be."""
    chat = '"stream": true, "messages": [{"role": "user", "content": "Hello"}]'
    body = f'{{"model": {json.dumps(model, ensure_ascii=False)},\n{chat}}}'
    return [
        f"curl -N {url}/v1/chat/completions \\",
        *(['  -H "Authorization: Bearer $MLX_API_KEY" \\'] if asks_key else []),
        "  -H 'Content-Type: application/json' \\",
        *(f"  {line}" for line in f"-d {shlex.quote(body)}".splitlines()),
    ]
