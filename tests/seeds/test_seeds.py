"""What the three documents that this project started from promise, line by line, and what becomes of it here.

000 and 001 are two copies of the README of the original server, 002 is the API of mlx-bun, 003 the cache of
oMLX. Each row names the document and its line. A row works (the test runs it), or is refused with a reason
that a document of ours states.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import install_and_run
from start_llm import cli
from start_llm.config.flags import variables_of
from start_llm.config.settings import WITHOUT_EFFECT, Settings, SettingSource, all_rows, load
from start_llm.core.errors import OverBudget, SettingsError
from tests import tiny_adapters
from tests.flat_settings import PLACES, value_of
from tests.images.files import data_url, picture
from tests.server.client import ask
from tests.serving import AS_JSON, Server, serving
from tests.test_cli import started

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ command lines


class Line(NamedTuple):
    """A command line of a seed, after the program's name, and fields of the settings that it leads to."""

    seed: str
    words: str
    wanted: dict[str, Any]


LINES = [
    Line("002:7", "--port 8090", {"server_port": 8090, "proxy_port": 4000}),
    Line("002:7", "--memory-budget 20GB", {"memory": 20 * 10**9}),
    Line("002:8", "--prompt-cache 8", {"cache_is_on": True, "cache_max_bytes": 8 * 2**30}),
    Line("002:8", "--prompt-cache 0.5", {"cache_max_bytes": 2**29}),
    Line("002:8", "--prompt-cache 4GB", {"cache_max_bytes": 4 * 10**9}),
    Line("002:8", "--prompt-cache 20%", {"cache_max_bytes": 0.2}),
    Line("002:8", "--prompt-cache 0", {"cache_is_on": False}),
    Line("002:8", "--prompt-cache off", {"cache_is_on": False}),
    Line("002:8", "--prompt-cache on", {"cache_is_on": True, "cache_max_bytes": 0.5}),
    Line("002:8", "--batch 8", {"batch": 8}),
    Line("002:8", "--kv-quant 8", {"kv_bits": 8}),
    Line("002:8", "--kv-quant 4", {"kv_bits": 4}),
    Line("002:8", "--kv-quant off", {"kv_bits": None}),
    Line("002:8", "--kv-quant config", {"kv_bits": "config"}),
    Line("002:8", "--kv-quant turbo", {"kv_bits": 4, "kv_quant_scheme": "turboquant"}),
    Line("002:8", "--kv-quant turbo:3.5", {"kv_bits": 3.5, "kv_quant_scheme": "turboquant"}),
    Line("002:8", "--thinking on", {"thinking": True}),
    Line("002:8", "--thinking false", {"thinking": False}),
    Line("002:8", "--temperature 0.7 --top-p 0.9", {"temperature": 0.7, "top_p": 0.9}),
    Line("002:8", "--temp 0 --top-k 20 --min-p 0.1", {"temperature": 0, "top_k": 20, "min_p": 0.1}),
    Line("002:8", "--max-tokens 512", {"reply_max_tokens": 512}),
    Line("002:15", "--hlg-sampling on", {"hlg": True, "hlg_width": None}),
    Line("002:15", "--hlg-sampling off", {"hlg": False}),
    Line(
        "002:15",
        "--hlg-sampling on --hlg-width 4 --hlg-shoulder 4 --hlg-toe 6 --hlg-pivot-offset 6",
        {"hlg": True, "hlg_width": 4, "hlg_shoulder": 4, "hlg_toe": 6, "hlg_pivot_offset": 6},
    ),
    Line(
        "003:25",
        "--model-dir /models --paged-ssd-cache-dir /cache --hot-cache-max-size 20%",
        {"model_dir": "/models", "ssd_folder": "/cache", "cache_max_bytes": 0.2},
    ),
    Line("003:36", "--paged-ssd-cache-dir ~/.omlx/cache", {"ssd_folder": "~/.omlx/cache"}),
    Line("003:36", "", {"ssd_folder": None, "ssd_max_size": None}),
    Line("003:37", "--paged-ssd-cache-max-size 200GB", {"ssd_max_size": 200 * 10**9}),
    Line("003:38", "--hot-cache-max-size 0", {"cache_max_bytes": 0}),
    Line("003:38", "--hot-cache-max-size 17179869184", {"cache_max_bytes": 2**34}),
    Line("003:40", "--initial-cache-blocks 256", {"initial_blocks": 256}),
    Line(
        "003:44",
        "--model-dir /models --paged-ssd-cache-dir /cache --paged-ssd-cache-max-size 200GB "
        "--hot-cache-max-size 20%",
        {"ssd_max_size": 200 * 10**9, "cache_max_bytes": 0.2},
    ),
    Line("003:50", "--model-dir /models --no-cache", {"model_dir": "/models", "cache_is_on": False}),
]


def settings_of(*words: str) -> Settings:
    options = cli._parser().parse_args(["serve", *words])
    return load(SettingSource("command line", variables_of(options)))


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.seed} {line.words}")
def test_a_command_line_means_what_its_document_says(line):
    settings = settings_of(*line.words.split())
    for name, value in line.wanted.items():
        assert value_of(settings, name) == value, name
    wanted = {PLACES[name] for name in line.wanted}
    others = {
        name
        for name, row in PLACES.items()
        if row not in wanted and value_of(settings, name) != value_of(Settings(), name)
    }
    optional = {"cache_is_on", "cache_max_bytes", "model_dir", "ssd_folder"}
    assert {PLACES[name] for name in others} <= {PLACES[name] for name in optional}, (
        "more is set than was asked"
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.seed} {line.words}")
def test_the_installer_passes_a_command_line_on(line):
    options, rest = install_and_run.option_parser().parse_known_args(line.words.split())
    assert settings_of(*install_and_run.serve_options(options), *rest) == settings_of(*line.words.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--kv-quant turbo:k8v3", "expected one of OFF, 3.5, 4, 8, config"),
        ("--no-cache --prompt-cache 8", "--prompt-cache and --no-cache both say what PROMPT_CACHE is"),
        ("--prompt-cache 8 --hot-cache-max-size 20%", "both say what PROMPT_CACHE_MAX_BYTES is"),
        ("--hot-cache-max-size 0%", "expected bytes from 0 on (0 = no cap)"),
    ],
)
def test_a_command_line_that_is_refused_says_why(words, reason):
    with pytest.raises(SettingsError) as refused:
        settings_of(*words.split())
    assert reason in str(refused.value)


def test_two_flags_that_agree_are_one():
    assert settings_of("--no-cache", "--prompt-cache", "off").cache.is_on is False


@pytest.mark.parametrize("flag", ["--port", "--prompt-cache", "--kv-quant", "--thinking", "--model-dir"])
def test_our_document_names_the_flags_that_differ(flag):
    assert f"`{flag}" in SEEDS


# --------------------------------------------------------------------------------------- files and programs


@pytest.mark.parametrize(
    "path",
    """
    start-llm.py install_and_run.py .env.example requirements.txt CLAUDE.md scripts/pi_like_probe.py
    scripts/probe_session.py scripts/diff_turns.py scripts/inspect_mlx_cache.py
    scripts/test_openclaw_integration.py .context/GOALS.md .context/TASKS.md .context/LESSONS.md
    .claude/rules/server-core.md
    """.split(),
)
def test_the_files_of_the_original_project_are_there(path):
    """000:308 to 321."""
    assert (ROOT / path).is_file()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["pi_like_probe", "probe_session", "diff_turns", "inspect_mlx_cache"])
def test_a_script_of_the_original_project_tells_its_use(name):
    """000:337 to 339."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{name}.py", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "usage" in done.stdout


@pytest.mark.long
def test_start_llm_py_serves(chain_model):
    """000:54 `python start-llm.py`."""
    words = ["start-llm.py", "--model", str(chain_model({"\n": ["Hello"]})), "--port", "0", "--no-proxy"]
    away = {"STATE_ROOT": os.environ["STATE_ROOT"], "SSD_CACHE_DIR": "off"}
    with started(ROOT, *words, **away) as process:
        process.until_it_says("Ctrl-C ends the server.")
        assert process.get("/v1/models")["object"] == "list"


# ------------------------------------------------------------------------------------------------ variables

VARIABLES = {
    "MODEL_PATH": "lmstudio-community/GLM-4.7-Flash-MLX-4bit", "MODEL_FAMILY": "", "PROXY_MODEL_ID": "",
    "MLX_HOST": "127.0.0.1", "MLX_PORT": "8080", "PROXY_PORT": "4000", "PROXY_STARTUP_WAIT_SECONDS": "2.0",
    "MAX_KV_SIZE": "196608", "KV_GROUP_SIZE": "64", "KV_BITS": "OFF", "KV_QUANT_SCHEME": "uniform",
    "QUANTIZED_KV_START": "5000", "PROMPT_CACHE_MAX_ENTRIES_GLOBAL": "24",
    "PROMPT_CACHE_MAX_ENTRIES_PER_SESSION": "2", "PROMPT_CACHE_TTL_SECONDS": "1800",
    "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS": "1800", "PROMPT_CACHE_BLOCK_SIZE": "16",
    "CACHE_USE_BLOCK_INDEX": "true", "CACHE_CANONICALIZE_TOOL_CONTEXT": "true",
    "CACHE_VLM_IMAGE_IDENTITY": "true", "CACHE_SESSION_PARTITIONING": "true",
    "CACHE_NORM_SAFETY_CHECK": "false", "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT": "false",
    "DEFAULT_TEMPERATURE": "0.1", "DEFAULT_TOP_P": "0.9", "DEFAULT_TOP_K": "40", "DEFAULT_MIN_P": "0.05",
    "DEFAULT_REPETITION_PENALTY": "1.08", "DEFAULT_REPETITION_CONTEXT_SIZE": "256",
    "DEFAULT_MAX_TOKENS": "2048", "DEFAULT_THINKING": "true", "PRESERVE_THINKING": "true",
    "GENERATION_WATCHDOG_SECONDS": "600", "ENABLE_REQUEST_LOGGING": "true", "LOG_ROOT": "logs",
    "VLM_CACHE_DEBUG": "false",
}  # fmt: skip
"""The variables of 000:252 to 303 with their defaults."""


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_is_read_with_the_default_of_its_document_or_one_that_ours_explains(name):
    (row,) = (row for row in all_rows() if row.name == name)
    if row in WITHOUT_EFFECT:
        assert f"| `{name}` | has no effect: " in SEEDS
        return
    acting = {row.name for row in Settings.rows()}
    theirs = load(SettingSource("environment", {name: VARIABLES[name]}))
    assert theirs == Settings() or f"`{name}`" in SEEDS.partition("## Defaults")[2]
    assert name in acting


def test_what_our_document_says_of_defaults_is_so():
    for line in SEEDS.partition("## Defaults that differ")[2].splitlines()[4:]:
        for name in line.split("|")[1].replace("`", "").split(","):
            spec = next((row for row in all_rows() if row.name == name.strip().partition(" ")[0]), None)
            if spec and spec.default:
                assert f"| {spec.default.removesuffix('.0')}" in line, name


# ----------------------------------------------------------------------------------------- requests, replies

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(chain_model) -> Iterator[Server]:
    """It thinks "Hm." and says "Hello you.", or only "No" if the prompt asks for no reasoning."""
    thinks = ["<think>", "Hm.", "</think>", "Hello", " you", "."]
    with serving(chain_model({"\n": thinks, "\n\n": ["No"]})) as server:
        yield server


def chat(server: Server, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": HI, **fields})


def text_of(server: Server, **fields: Any) -> str:
    return chat(server, **fields)["choices"][0]["message"]["content"]


def is_thinking(server: Server, **fields: Any) -> bool:
    return "reasoning_content" in chat(server, **fields)["choices"][0]["message"]


def refused(server: Server, path: str, body: object) -> tuple[int, Any]:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, AS_JSON)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    return error.value.code, json.load(error.value)


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    request = urllib.request.Request(
        server.url + path, json.dumps({"stream": True, **body}).encode(), AS_JSON
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        lines = [line.decode().strip().removeprefix("data: ") for line in reply if line.startswith(b"data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def message(server: Server, **fields: Any) -> Any:
    return server.post("/v1/messages", {"messages": HI, "max_tokens": 50, **fields})


def response(server: Server, **fields: Any) -> Any:
    return server.post("/v1/responses", {"input": "Hi", **fields})


def usage_is_whole(server: Server) -> None:
    usage = chat(server)["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def reply_has_its_keys(server: Server) -> None:
    reply = chat(server)
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert {"created", "model", "choices", "usage"} <= reply.keys()
    (choice,) = reply["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert choice["message"]["role"] == "assistant"


def stream_has_its_order(server: Server) -> None:
    *chunks, end = events(server, "/v1/chat/completions", {"messages": HI})
    assert end == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello you."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."


def messages_have_their_events(server: Server) -> None:
    names = [event["type"] for event in events(server, "/v1/messages", {"messages": HI, "max_tokens": 50})]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert {"content_block_start", "content_block_delta", "content_block_stop"} <= set(names)


def message_has_its_keys(server: Server) -> None:
    reply = message(server, system="Be brief.", temperature=0, top_p=0.9, top_k=5, stop_sequences=["x"])
    assert reply["id"].startswith("msg_")
    assert (reply["type"], reply["stop_reason"]) == ("message", "end_turn")
    assert reply["content"][-1]["type"] == "text"
    assert {"input_tokens", "output_tokens", "cache_read_input_tokens"} <= reply["usage"].keys()


def message_errors_have_their_shape(server: Server) -> None:
    status, body = refused(server, "/v1/messages", {"messages": "x", "max_tokens": 1})
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")


def responses_have_their_events(server: Server) -> None:
    names = [event["type"] for event in events(server, "/v1/responses", {"input": "Hi"}) if event != "[DONE]"]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    chain = "output_item.added content_part.added output_text.delta output_text.done content_part.done"
    following = iter(names)
    assert all(f"response.{name}" in following for name in [*chain.split(), "output_item.done"])


def response_goes_on(server: Server) -> None:
    first = response(server, instructions="Be brief.")
    assert first["id"].startswith("resp_")
    assert (first["object"], first["status"]) == ("response", "completed")
    assert {"output", "usage"} <= first.keys()
    second = response(server, previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    status, _ = refused(server, "/v1/responses", {"input": "Hi", "previous_response_id": "resp_no"})
    assert status == 404


def curve_acts(server: Server) -> None:
    curve = {"enabled": True, "width": 4, "shoulder": 4, "toe": 6, "pivot_offset": 6}
    assert text_of(server, hlg=curve, temperature=1) == "Hello you."
    for name in ("width", "shoulder", "toe", "pivot_offset"):
        status, body = refused(server, "/v1/chat/completions", {"messages": HI, "hlg": {name: -1}})
        assert (status, body["error"]["param"]) == (400, f"hlg.{name}")


def sessions_are_kept_apart(server: Server) -> None:
    for name in ("session_id", "conversation_id", "thread_id", "chat_id"):
        for body in ({name: "s"}, {"metadata": {name: "s"}}, {"extra_body": {name: "s"}}):
            assert text_of(server, **body) == "Hello you."


def reasoning_is_switched(server: Server) -> None:
    for off in (
        {"enable_thinking": False},
        {"thinking": "off"},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "off"},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"level": "off"}},
        {"reasoning": {"type": "disabled"}},
        {"metadata": {"enable_thinking": False}},
        {"extra_body": {"reasoning_effort": "off"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert not is_thinking(server, **off), off
    for on in (
        {},
        {"enable_thinking": True},
        *({"thinking": word} for word in ("on", "low", "medium", "high", "xhigh")),
        *({"reasoning_effort": word} for word in ("minimal", "low", "medium", "high", "xhigh")),
        {"reasoning": {"effort": "high"}},
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert is_thinking(server, **on), on


STATS = {
    "server": "owner model started_at",
    "prompt_cache": "entries bytes max_bytes hits misses vlm_retreat hybrid_trim_miss "
    "exact_key_rejected_by_model_lcp",
    "response_store": "entries bytes max_bytes ttl_ms",
    "kv_quant": "mode layers attention",
    "admission": "max_safe_context memory_budget_bytes usable_bytes weights_bytes",
    "batch": "configured batched active_rows",
}


def stats_have_their_keys(server: Server) -> None:
    stats = server.get("/stats")
    for section, keys in STATS.items():
        assert set(keys.split()) <= stats[section].keys(), section
        assert all(stats[section][key] is not None for key in keys.split()), section


def keys_of(body: Mapping[str, Any], words: str) -> None:
    assert set(words.split()) <= body.keys()


def models_on_disk_are_listed(server: Server) -> None:
    (ours,) = (model for model in server.get("/library")["models"] if model["place"] == "models")
    keys_of(ours, "repo_id model_type size_bytes quant_bits vision supported serving assessment")
    keys_of(ours["assessment"], "fits max_safe_context predicted_decode_tps")


def the_loaded_model_is_judged(server: Server) -> None:
    reply = server.get("/fit")
    keys_of(reply, "context_tokens typical_context_tokens typical_decode_tps measured_decode_tps measured_at")
    keys_of(reply["machine"], "chip ram_bytes bandwidth_gbs")
    keys_of(reply["report"], "fits weights_bytes kv_bytes transient_bytes total_bytes usable_bytes")
    keys_of(reply["report"], "max_safe_context predicted_decode_tps")
    assert reply["sku_matrix_ctx"] == min(32_768, reply["context_tokens"])
    (row,) = (entry for entry in reply["sku_matrix"] if entry["sku"] == "M4 Pro 24 GB")
    keys_of(row, "sku ram_gb fits max_context decode_tps")


def downloads_are_listed(server: Server) -> None:
    assert server.get("/downloads") == {"downloads": []}


def one_of_two_limits_wins(server: Server) -> None:
    usage = chat(server, max_tokens=1, max_completion_tokens=3)["usage"]
    assert usage["completion_tokens"] == 3
    assert chat(server, max_tokens=1)["choices"][0]["finish_reason"] == "length"


def stops_are_left_out(server: Server) -> None:
    assert text_of(server, stop=" you") == "Hello"
    assert text_of(server, stop=["###", "lo y"]) == "Hel"
    assert chat(server, stop="o")["choices"][0]["finish_reason"] == "stop"


def wrong_requests_are_refused(server: Server) -> None:
    for body in ("{", {"messages": []}, {"messages": HI, "adapter": "unknown"}):
        status, reply = refused(server, "/v1/chat/completions", body)
        assert status == 400
        assert reply["error"]["message"]


def tools_can_be_offered(server: Server) -> None:
    assert text_of(server, tools=[TOOL], tool_choice="auto") == "Hello you."
    assert text_of(server, tools=[TOOL], tool_choice="none") == "Hello you."
    anthropic = [{"name": "read", "description": "", "input_schema": {"type": "object"}}]
    assert message(server, tools=[*anthropic, {"type": "web_search_20250305", "name": "web_search"}])
    assert response(server, tools=[{"type": "function", "name": "read"}, {"type": "web_search"}])
    history = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "text"},
    ]  # fmt: skip
    assert text_of(server, messages=history, tools=[TOOL]) == "Hello you."


def models_are_listed(server: Server) -> None:
    listed = server.get("/v1/models")
    assert listed["object"] == "list"
    assert listed["data"][0]["object"] == "model"
    assert chat(server, model="any name at all")["model"] == "any name at all", "a difference: see seeds.md"


class Promise(NamedTuple):
    """Something that a request gets, by document and line."""

    seed: str
    words: str
    check: Callable[[Server], object]


def common_fields_are_read(server: Server) -> None:
    sampling = {"temperature": 0.7, "top_p": 0, "top_k": 0, "seed": 1234, "repetition_penalty": 1.1}
    assert text_of(server, stream=False, **sampling) == "Hello you."


def no_adapter_is_an_adapter(server: Server) -> None:
    assert text_of(server, adapter="none") == "Hello you."


def parts_are_texts(server: Server) -> None:
    parts = [{"type": "text", "text": "Hi"}]
    assert text_of(server, messages=[{"role": "user", "content": parts}]) == "Hello you."


PROMISES = [
    Promise("000:156", "session_id and its kin, nested too", sessions_are_kept_apart),
    Promise("000:192", "enable_thinking, thinking, reasoning_effort, reasoning", reasoning_is_switched),
    Promise("000:57", "curl /v1/models", models_are_listed),
    Promise("000:225", "the three counters of correctness", stats_have_their_keys),
    Promise("002:3", "the request's model field is ignored", models_are_listed),
    Promise("002:15", "temperature, top_p, top_k, seed, repetition_penalty", common_fields_are_read),
    Promise("002:15", "max_tokens, or max_completion_tokens (wins)", one_of_two_limits_wins),
    Promise("002:15", "stop: a text, or several", stops_are_left_out),
    Promise("002:15", "tools, tool_choice", tools_can_be_offered),
    Promise("002:15", "chat_template_kwargs; reasoning_effort overrides it", reasoning_is_switched),
    Promise("002:15", "hlg", curve_acts),
    Promise("002:15", "adapter: none", no_adapter_is_an_adapter),
    Promise("002:23", "content is a string or an array of parts", parts_are_texts),
    Promise("002:29", "a whole reply", reply_has_its_keys),
    Promise("002:29", "usage with cached_tokens", usage_is_whole),
    Promise("002:29", "a stream", stream_has_its_order),
    Promise("002:37", "a round trip of tools", tools_can_be_offered),
    Promise("002:53", "errors", wrong_requests_are_refused),
    Promise("002:56", "messages: keys", message_has_its_keys),
    Promise("002:61", "messages: events", messages_have_their_events),
    Promise("002:62", "messages: errors", message_errors_have_their_shape),
    Promise("002:67", "responses: events", responses_have_their_events),
    Promise("002:65", "responses: previous_response_id", response_goes_on),
    Promise("002:69", "GET /v1/models", models_are_listed),
    Promise("002:71", "GET /stats", stats_have_their_keys),
    Promise("002:72", "GET /library", models_on_disk_are_listed),
    Promise("002:74", "GET /downloads", downloads_are_listed),
    Promise("002:77", "GET /fit", the_loaded_model_is_judged),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda case: f"{case.seed} {case.words}")
def test_a_request_gets_what_its_document_promises(promise, server):
    promise.check(server)


def test_images_reach_a_model_that_sees(tiny_vision_model):
    """002:25 and 58."""
    url = data_url(picture())
    chat_part = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    block = {"type": "image", "source": source}
    elsewhere = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with serving(tiny_vision_model()) as server:
        for path, part in (("/v1/chat/completions", chat_part), ("/v1/messages", block)):
            asked = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
            server.post(path, {"messages": asked, "max_tokens": 2})
        assert server.get("/stats")["images"]["tower_runs"] == 1, "the same image is looked at once"
        messages = [{"role": "user", "content": [elsewhere]}]
        status, _ = refused(server, "/v1/chat/completions", {"messages": messages})
        assert status == 400, "a difference: see seeds.md"


@pytest.mark.long
def test_the_models_of_a_folder_are_loaded_when_they_are_named(chain_model, tmp_path):
    """003:25, `--model-dir` with several models."""
    for name in ("one", "two"):
        shutil.copytree(chain_model({"\n": [f"I am {name}."]}), tmp_path / name)
    with serving(Path("one"), model_dir=str(tmp_path)) as server:
        assert text_of(server, model="two") == "I am two."
        assert text_of(server, model="one") == "I am one."


def test_a_prompt_beyond_the_window_is_refused_and_a_ceiling_is_not(server):
    """002:53. `tests/test_settings.py` has the error of a memory budget."""
    assert (OverBudget.kind, OverBudget.code) == ("memory_admission", "context_over_budget")
    window = server.get("/v1/models")["data"][0]["context_window"]
    status, body = refused(server, "/v1/completions", {"prompt": [1] * (window + 1)})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert text_of(server, max_tokens=window) == "Hello you.", "a difference: see seeds.md"


@pytest.mark.thorough
def test_a_call_has_the_form_of_its_document_whole_and_streamed(chain_model):
    """002:29 and 37, 000:183."""
    call = ["<tool_call>", '{"name": "read", "arguments": {"path": "a"}}', "</tool_call>"]
    with serving(chain_model({"\n": ["<think>", "Hm.", "</think>", *call]})) as server:
        (choice,) = chat(server, tools=[TOOL])["choices"]
        (tool_call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "")
        assert (tool_call["type"], tool_call["function"]["name"]) == ("function", "read")
        assert tool_call["id"].startswith("call"), "a difference: see seeds.md"
        assert json.loads(tool_call["function"]["arguments"]) == {"path": "a"}
        chunks = events(server, "/v1/chat/completions", {"messages": HI, "tools": [TOOL]})[:-1]
        deltas = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert (deltas[0]["index"], deltas[0]["type"], deltas[0]["function"]["name"]) == (
            0,
            "function",
            "read",
        )
        assert json.loads("".join(part["function"]["arguments"] for part in deltas)) == {"path": "a"}
        blocks = message(server, tools=[{"name": "read", "input_schema": {"type": "object"}}])["content"]
        assert (blocks[-1]["type"], blocks[-1]["input"]) == ("tool_use", {"path": "a"})
        (item,) = (
            part for part in response(server, tools=[{"type": "function", "name": "read"}])["output"]
            if part["type"] == "function_call"
        )  # fmt: skip
        assert json.loads(item["arguments"]) == {"path": "a"}


def test_adapters_are_mounted_while_it_runs_and_chosen_by_requests(tiny_model, tmp_path):
    """002:15 and 84."""
    model = tiny_model("qwen3", hidden=128, layers=2)
    folder = tiny_adapters.build(model, tmp_path / "dir", 1)
    with serving(model, adapter_dir=str(tmp_path)) as server:

        def answer_under(name: str) -> str:
            return text_of(server, adapter=name, temperature=0, max_tokens=8)

        entry = server.post("/v1/adapters", {"id": "x", "path": str(folder)})
        assert server.get("/v1/adapters") == {"adapters": [entry]}
        assert set(entry) == {"id", "path", "rank", "scale", "size_bytes", "mounted_layers"}
        assert answer_under("x") != answer_under("none")
        assert ask(server.port, "DELETE", "/v1/adapters/x").status == 200
        assert ask(server.port, "DELETE", "/v1/adapters/x").status == 404
        status, _ = refused(server, "/v1/chat/completions", {"messages": HI, "adapter": "x"})
        assert status == 400
        status, _ = refused(server, "/v1/adapters", {"id": "y", "path": str(model)})
        assert status == 400, "a difference: see seeds.md"
