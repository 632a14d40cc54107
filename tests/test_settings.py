"""Every setting is read, says what is wrong with it, and acts."""

import http.client
import io
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from dotenv import dotenv_values

from start_llm import cli
from start_llm.access.backend_secret import BackendSecret, Caller
from start_llm.access.tenants import tenant_of_key
from start_llm.app import App
from start_llm.cache.kv_format import KVFormat
from start_llm.config.documents import as_env_file, as_markdown
from start_llm.config.paths import DEMO_MODEL
from start_llm.config.settings import (
    WITHOUT_EFFECT,
    Settings,
    SettingSource,
    all_rows,
    load,
    set_without_effect,
)
from start_llm.core.engine_request import EngineRequest
from start_llm.core.errors import ModelError, PortError, SettingsError
from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.pass_times import PASSES, PassTimes
from start_llm.engine.time_share import EngineTime
from start_llm.formats import registry
from start_llm.models.device import this_device
from start_llm.proxy.config import ProxyConfig, configuration
from start_llm.telemetry.terminal import Terminal
from start_llm.wiring.model_places import model_name
from tests import tiny_adapters
from tests.flat_settings import settings_of
from tests.images.files import data_url, picture
from tests.quantised import halve
from tests.server.client import ask, wait_until
from tests.serving import AS_JSON, Server, tried_once

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin: start_llm settings --format markdown -->\n", "<!-- end -->\n"

SEED_VARIABLES = """
    MODEL_PATH MODEL_FAMILY PROXY_MODEL_ID MLX_HOST MLX_PORT PROXY_PORT PROXY_STARTUP_WAIT_SECONDS
    MAX_KV_SIZE KV_GROUP_SIZE KV_BITS KV_QUANT_SCHEME QUANTIZED_KV_START
    PROMPT_CACHE_MAX_ENTRIES_GLOBAL PROMPT_CACHE_MAX_ENTRIES_PER_SESSION PROMPT_CACHE_TTL_SECONDS
    PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS PROMPT_CACHE_BLOCK_SIZE CACHE_USE_BLOCK_INDEX
    CACHE_CANONICALIZE_TOOL_CONTEXT CACHE_VLM_IMAGE_IDENTITY CACHE_SESSION_PARTITIONING
    CACHE_NORM_SAFETY_CHECK NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT
    DEFAULT_TEMPERATURE DEFAULT_TOP_P DEFAULT_TOP_K DEFAULT_MIN_P DEFAULT_REPETITION_PENALTY
    DEFAULT_REPETITION_CONTEXT_SIZE DEFAULT_MAX_TOKENS DEFAULT_THINKING PRESERVE_THINKING
    GENERATION_WATCHDOG_SECONDS ENABLE_REQUEST_LOGGING LOG_ROOT VLM_CACHE_DEBUG
""".split()
"""The variables of the documents that this project started from."""

ACTING = {row.name: row for row in Settings.rows()}

WHOLE = ["many", "1.5", "8080x", "1e3", "9" * 30]
NUMBER = ["many", "1,5", "nan", "inf", "-inf", "-1", "9" * 30]
SECONDS = [*NUMBER, "0", "86401"]


@dataclass(frozen=True)
class Values:
    """Three texts with the values that they mean, and texts that mean none."""

    good: list[tuple[str, Any]]
    bad: list[str]


VALUES: dict[str, Values] = {
    "MODEL_PATH": Values([("lab/tiny", "lab/tiny"), ("/a b/c", "/a b/c"), ("é", "é")], []),
    "MODEL_DIR": Values([("/a/folder", "/a/folder"), ("~/models", "~/models"), ("/a b", "/a b")], []),
    "MAX_LOADED_MODELS": Values([("0", 0), ("1000", 1000), ("3", 3)], [*WHOLE, "-1", "1001"]),
    "MODEL_IDLE_SECONDS": Values([("0", 0), ("1e3", 1000), ("0.5", 0.5)], [*NUMBER, "1e10"]),
    "MODEL_LOAD_WAIT_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "STRICT_MODEL_NAMES": Values([("true", True), ("on", True), ("1", True)], ["maybe", "2"]),
    "MODEL_ALIASES": Values(
        [("a=b", ("a=b",)), ("a/b = c d, e=f", ("a/b = c d", "e=f")), ("x.y=z", ("x.y=z",))],
        ["a", "=b", "a=", "a=b=c", "a=b,,", "a=b,c"],
    ),
    "ADAPTER_DIR": Values([("/a/folder", "/a/folder"), ("~/adapters", "~/adapters"), ("/a b", "/a b")], []),
    "MORE_MODELS": Values(
        [("/a/b", ("/a/b",)), ("/a b, c/d", ("/a b", "c/d")), ("x,~/y", ("x", "~/y"))], [",", "a,,b"]
    ),
    "MODEL_PINS": Values([("a", ("a",)), ("a/b c, d", ("a/b c", "d")), ("x,y", ("x", "y"))], [","]),
    "CPU_DEQUANTIZE": Values(
        [("off", "off"), ("OFF", "off"), ("Off", "off")], ["on", "true", "float32", "0"]
    ),
    "MODEL_FAMILY": Values(
        [("qwen3", "qwen3"), ("GPT_OSS", "gpt_oss"), ("generic", "generic")],
        ["qwen", "glm-4", "auto", "1", "qwen3 glm4"],
    ),
    "MLX_HOST": Values([("0.0.0.0", "0.0.0.0"), ("::1", "::1"), ("localhost", "localhost")], []),
    "MLX_PORT": Values([("0", 0), ("65535", 65535), (" 81 ", 81)], [*WHOLE, "-1", "65536"]),
    "BATCH": Values([("1", 1), ("256", 256), ("8", 8)], [*WHOLE, "0", "-1", "257"]),
    "IDLE_WORK": Values([("auto", "auto"), ("on", "on"), (" Off ", "off")], ["true", "1", "battery"]),
    "SPECULATION": Values([("auto", "auto"), ("off", "off"), (" OFF ", "off")], ["on", "true", "1"]),
    "MAX_QUEUED_REQUESTS": Values([("1", 1), ("100000", 100_000), ("7", 7)], [*WHOLE, "0", "100001"]),
    "MEMORY_BUDGET": Values(
        [("4GB", 4 * 10**9), ("50%", 0.5), ("7", 7)], ["many", "-1", "1e3", "101%", "0.5", "GB"]
    ),
    "REPLY_TURN_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "DECODE_STALL_SECONDS": Values([("0.01", 0.01), ("60", 60), ("0.5", 0.5)], [*NUMBER, "0", "61"]),
    "ENGINE_STALL_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "MODEL_LOAD_STALL_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "END_WHEN_STUCK": Values([("true", True), ("on", True), ("1", True)], ["maybe", "2"]),
    "GENERATION_WATCHDOG_SECONDS": Values([("0", 0), ("1e3", 1000), ("0.5", 0.5)], [*NUMBER, "1e10"]),
    "REPETITION": Values([("stop", "stop"), ("tell", "tell"), ("off", "off")], ["on", "1"]),
    "MAX_BODY_BYTES": Values([("1024", 1024), ("8589934592", 2**33), ("2000", 2000)], [*WHOLE, "1023"]),
    "MAX_CONNECTIONS": Values([("1", 1), ("100000", 100_000), ("7", 7)], [*WHOLE, "0", "100001"]),
    "HTTP_IDLE_TIMEOUT_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("1e1", 10)], SECONDS),
    "HTTP_HEADER_TIMEOUT_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "HTTP_BODY_TIMEOUT_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "HTTP_WRITE_TIMEOUT_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "STREAM_KEEP_ALIVE_SECONDS": Values([("0.01", 0.01), ("10", 10), ("2.5", 2.5)], [*NUMBER, "0", "10.1"]),
    "STATE_ROOT": Values([("/a/folder", "/a/folder"), ("elsewhere", "elsewhere"), ("/a b", "/a b")], []),
    "RESPONSE_STORE_TTL_SECONDS": Values([("0", 0), ("1e3", 1000), ("0.5", 0.5)], [*NUMBER, "1e10"]),
    "RESPONSE_STORE_MAX_BYTES": Values([("0", 0), ("7", 7), (str(2**40), 2**40)], [*WHOLE, "-1"]),
    "PROXY": Values([("false", False), ("off", False), ("0", False)], ["maybe", "2"]),
    "PROXY_PORT": Values([("1", 1), ("65535", 65535), (" 81 ", 81)], [*WHOLE, "0", "65536"]),
    "PROXY_MODEL_ID": Values([("mine", "mine"), ("openai/x", "openai/x"), ("é", "é")], []),
    "PROXY_STARTUP_WAIT_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "PROXY_PYTHON": Values([("/a/python", "/a/python"), ("python3", "python3"), ("/a b", "/a b")], []),
    "PROXY_API_KEY": Values(
        [("sk-1", ("sk-1",)), ("a b, 0", ("a b", "0")), ("0,~!", ("0", "~!"))],
        ["a,,b", ",", "a,", "ä", "a\tb"],
    ),
    "BACKEND_SECRET": Values(
        [("0" * 24, "0" * 24), ("~!,ab-" * 9, "~!,ab-" * 9), ("f" * 48, "f" * 48)],
        ["short", "x" * 23, "ä" * 24, "a b" * 9],
    ),
    "PROXY_BACKENDS": Values(
        [
            ("http://10.0.0.2:8080", ("http://10.0.0.2:8080",)),
            (
                "http://studio.local:80, http://[fe80::1]:81",
                ("http://studio.local:80", "http://[fe80::1]:81"),
            ),
            ("https://a-b:65535", ("https://a-b:65535",)),
        ],
        [
            "ftp://a:80",
            "https://a",
            "a:80",
            "http://a:80/",
            "http://me:key@a:80",
            "http://a:0",
            "http://a:80,",
        ],
    ),
    "MLX_API_KEY": Values(
        [("sk-1", ("sk-1",)), ("a b, 0", ("a b", "0")), ("0,~!", ("0", "~!"))],
        ["a,,b", ",", "a,", "ä", "a\tb"],
    ),
    "ALLOWED_HOSTS": Values(
        [
            ("studio.local", ("studio.local",)),
            ("a, b-c", ("a", "b-c")),
            ("fe80::1,10.0.0.1", ("fe80::1", "10.0.0.1")),
        ],
        ["a:80", "http://a", "a/b", "*", "a,", "ä"],
    ),
    "KEY_REQUESTS_AT_ONCE": Values([("0", 0), ("1", 1), ("64", 64)], [*WHOLE, "-1"]),
    "KEY_TOKENS_PER_MINUTE": Values([("0", 0), ("1", 1), ("100000", 100_000)], [*WHOLE, "-1"]),
    "ALLOWED_ORIGINS": Values(
        [
            ("http://localhost:3000", ("http://localhost:3000",)),
            ("app://obsidian.md, https://a-b.c", ("app://obsidian.md", "https://a-b.c")),
            ("vscode-webview://*,http://[::1]:80", ("vscode-webview://*", "http://[::1]:80")),
        ],
        [
            "a",
            "localhost:3000",
            "http://a/",
            "http://a/b",
            "*",
            "http://*",
            "https://*",
            "null",
            "http://a,",
            "://",
        ],
    ),
    "DRAIN_SECONDS": Values([("0", 0), ("3600", 3600), ("2.5", 2.5)], [*NUMBER, "3601"]),
    "MAX_KV_SIZE": Values([("1", 1), ("2147483647", 2**31 - 1), ("4096", 4096)], [*WHOLE, "0", "-1"]),
    "KV_BITS": Values([("8", 8), ("OFF", None), ("3.5", 3.5)], ["3", "16", "on", "-8", "k8v3"]),
    "KV_GROUP_SIZE": Values([("32", 32), ("128", 128), ("64", 64)], [*WHOLE, "0", "65", "256"]),
    "QUANTIZED_KV_START": Values([("0", 0), ("5000", 5000), ("2147483647", 2**31 - 1)], [*WHOLE, "-1"]),
    "KV_QUANT_SCHEME": Values(
        [("uniform", "uniform"), ("UNIFORM", "uniform"), ("TurboQuant", "turboquant")],
        ["turbo", "affine", "4"],
    ),
    "HLG_SAMPLING": Values([("on", True), ("true", True), ("1", True)], ["maybe", "2"]),
    "HLG_WIDTH": Values([("0", 0), ("4", 4), ("1e6", 10**6)], [*NUMBER, "1000001"]),
    "HLG_SHOULDER": Values([("0.01", 0.01), ("4", 4), ("1e6", 10**6)], [*NUMBER, "0"]),
    "HLG_TOE": Values([("0.01", 0.01), ("6", 6), ("1e6", 10**6)], [*NUMBER, "0"]),
    "HLG_PIVOT_OFFSET": Values([("0", 0), ("6", 6), ("1e6", 10**6)], [*NUMBER, "1000001"]),
    "PROMPT_CACHE": Values([("false", False), ("off", False), ("0", False)], ["maybe", "2"]),
    "PROMPT_CACHE_MAX_BYTES": Values(
        [("4GB", 4 * 10**9), ("12.5%", 0.125), ("0", 0)],
        [
            "0%",
            "0.0 %",
            "many",
            "-1",
            "1e3",
            "nan",
            "inf",
            "4 potatoes",
            "4G",
            "GB",
            "%",
            "101%",
            "-5%",
            "0.5",
            "1,5GB",
        ],
    ),
    "SSD_CACHE_DIR": Values([("/a/folder", "/a/folder"), ("OFF", "off"), ("/a b", "/a b")], []),
    "SSD_CACHE_MAX_SIZE": Values(
        [("1TB", 10**12), ("50%", 0.5), ("2tib", 2**41)], ["many", "-1", "1e3", "101%", "0.5", "TB"]
    ),
    "SSD_CACHE_WRITE_AFTER_SECONDS": Values([("0.01", 0.01), ("86400", 86400), ("5", 5)], SECONDS),
    "SSD_CACHE_MAX_WRITE_PER_DAY": Values(
        [("1TB", 10**12), ("0", 0), ("7", 7)], ["many", "-1", "1e3", "50%", "0.5", "GB"]
    ),
    "PROMPT_CACHE_BLOCK_SIZE": Values([("1", 1), ("4096", 4096), ("16", 16)], [*WHOLE, "0", "4097"]),
    "INITIAL_CACHE_BLOCKS": Values([("1", 1), ("65536", 65536), ("256", 256)], [*WHOLE, "0", "65537"]),
    "PROMPT_CACHE_MAX_ENTRIES_GLOBAL": Values([("1", 1), ("24", 24), ("1000000", 10**6)], [*WHOLE, "0"]),
    "PROMPT_CACHE_TTL_SECONDS": Values([("0", 0), ("1800", 1800), ("0.5", 0.5)], [*NUMBER, "1e10"]),
    "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS": Values(
        [("0", 0), ("1800", 1800), ("0.5", 0.5)], [*NUMBER, "1e10"]
    ),
    "CACHE_CANONICALIZE_TOOL_CONTEXT": Values([("false", False), ("off", False), ("0", False)], ["maybe"]),
    "CACHE_DRIFT_POLICY": Values(
        [("exact", "exact"), ("EXACT", "exact"), ("Exact", "exact")], ["maybe", "1"]
    ),
    "CACHE_SESSION_PARTITIONING": Values([("false", False), ("off", False), ("0", False)], ["maybe"]),
    "CACHE_NORM_SAFETY_CHECK": Values([("true", True), ("on", True), ("1", True)], ["maybe"]),
    "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT": Values(
        [("true", True), ("on", True), ("1", True)], ["maybe", "2"]
    ),
    "PRESERVE_THINKING": Values(
        [("template", "template"), ("FALSE", "false"), ("False", "false")], ["maybe", "1"]
    ),
    "DEFAULT_TEMPERATURE": Values([("0", 0), ("5", 5), ("0.6", 0.6)], [*NUMBER, "5.1"]),
    "DEFAULT_TOP_P": Values([("0", 0), ("1", 1), ("0.9", 0.9)], [*NUMBER, "1.1"]),
    "DEFAULT_TOP_K": Values([("0", 0), ("2147483647", 2**31 - 1), ("20", 20)], [*WHOLE, "-1", "2147483648"]),
    "DEFAULT_MIN_P": Values([("0", 0), ("1", 1), ("0.1", 0.1)], [*NUMBER, "1.1"]),
    "DEFAULT_REPETITION_PENALTY": Values([("0.01", 0.01), ("10", 10), ("1.1", 1.1)], [*NUMBER, "0", "10.1"]),
    "DEFAULT_REPETITION_CONTEXT_SIZE": Values([("0", 0), ("1048576", 2**20), ("9", 9)], [*WHOLE, "-1"]),
    "DEFAULT_THINKING": Values([("false", False), ("yes", True), ("0", False)], ["maybe", "2", "none"]),
    "DEFAULT_MAX_TOKENS": Values([("1", 1), ("2147483647", 2**31 - 1), ("512", 512)], [*WHOLE, "0", "-1"]),
    "ENABLE_REQUEST_LOGGING": Values([("false", False), ("off", False), ("0", False)], ["maybe", "2"]),
    "LOG_ROOT": Values([("/a/folder", "/a/folder"), ("elsewhere", "elsewhere"), ("/a b", "/a b")], []),
    "LOG_PROMPTS": Values([("true", True), ("on", True), ("1", True)], ["maybe", "2"]),
    "CACHE_VLM_IMAGE_IDENTITY": Values(
        [("true", True), ("on", True), ("1", True)], ["false", "off", "0", "maybe"]
    ),
    "IMAGE_MAX_TOKENS": Values([("64", 64), ("1048576", 2**20), ("1000", 1000)], [*WHOLE, "63"]),
    "IMAGE_MAX_BYTES": Values([("1", 1), ("8589934592", 2**33), ("1000", 1000)], [*WHOLE, "0"]),
    "IMAGE_MAX_PIXELS": Values([("1", 1), ("2147483647", 2**31 - 1), ("1000", 1000)], [*WHOLE, "0"]),
    "IMAGE_MAX_COUNT": Values([("1", 1), ("100000", 100_000), ("7", 7)], [*WHOLE, "0"]),
    "IMAGE_URLS": Values([("true", True), ("on", True), ("1", True)], ["maybe", "2"]),
    "VLM_CACHE_DEBUG": Values([("true", True), ("on", True), ("1", True)], ["maybe", "2"]),
}


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def environment(**variables: str) -> SettingSource:
    return SettingSource("environment", variables)


def value_of(settings: Settings, name: str) -> Any:
    return getattr(getattr(settings, ACTING[name].group), ACTING[name].field)


# -------------------------------------------------------------------------------------------------- reading


def test_every_acting_row_has_its_values_here():
    assert VALUES.keys() == set(ACTING)


def test_nothing_set_gives_the_defaults():
    assert load() == load(environment(), SettingSource(".env", {"UNRELATED": "1"})) == Settings()


def test_the_defaults_are_the_documented_ones():
    settings = Settings()
    assert (settings.server.host, settings.server.port, settings.engine.batch) == ("127.0.0.1", 8080, 4)
    assert (settings.engine.max_kv_size, settings.http.max_body_bytes) == (196_608, 64 * 2**20)
    assert settings.http.idle_s > 120, "proxies keep connections for 120 s"
    assert settings.http.keep_alive_s < 10, "clients give up after 10 s of silence"
    unset = {name for name in ACTING if value_of(settings, name) is None}
    named = {"MODEL_PATH", "MODEL_DIR", "ADAPTER_DIR", "MODEL_FAMILY", "PROXY_MODEL_ID", "PROXY_PYTHON"}
    named |= {"BACKEND_SECRET"}
    of_requests = {name for name in ACTING if name.startswith("DEFAULT_")}
    of_the_cache = {"PROMPT_CACHE_TTL_SECONDS", "PROMPT_CACHE_MAX_ENTRIES_GLOBAL"}
    of_the_curve = {"HLG_WIDTH", "HLG_SHOULDER", "HLG_TOE", "HLG_PIVOT_OFFSET"}
    assert unset == named | of_requests | of_the_cache | of_the_curve | {
        "KV_BITS",
        "SSD_CACHE_DIR",
        "SSD_CACHE_MAX_SIZE",
    }
    assert settings.access.keys == settings.proxy.keys == settings.access.hosts == ()


@pytest.mark.parametrize("name", ACTING)
def test_a_default_is_shown_as_it_would_be_written(name):
    row = ACTING[name]
    written = load(environment(**{name: row.default}))
    assert written == Settings()


@pytest.mark.parametrize("name", ACTING)
def test_a_good_value_is_read_and_changes_nothing_else(name):
    for text, value in VALUES[name].good:
        settings = load(environment(**{name: text}))
        assert value_of(settings, name) == value
        assert type(value_of(settings, name)) is type(value) or isinstance(value, int)
        others = [other for other in ACTING if other != name]
        assert all(value_of(settings, other) == value_of(Settings(), other) for other in others)


@pytest.mark.parametrize("name", [name for name in VALUES if VALUES[name].bad])
def test_a_bad_value_is_refused_with_name_value_source_and_what_is_expected(name):
    row = ACTING[name]
    assert any(word in row.kind.expected for word in (" from ", "one of ", "one or more "))
    for text in VALUES[name].bad:
        with pytest.raises(SettingsError) as refused:
            load(environment(**{name: text}))
        shown = "..." if row.kind.is_secret else repr(text)
        assert str(refused.value) == f"{name}={shown} (environment): expected {row.kind.expected}."


@pytest.mark.parametrize("name", ACTING)
def test_flags_win_over_the_environment_which_wins_over_the_file(name):
    (low, low_value), (middle, middle_value), (high, high_value) = VALUES[name].good
    texts = {"command line": high, "environment": middle, ".env": low}
    sources = [SettingSource(source, {name: text}) for source, text in texts.items()]
    values = [value_of(load(*sources[start:]), name) for start in range(3)]
    assert values == [high_value, middle_value, low_value]


@pytest.mark.parametrize("name", ACTING)
def test_an_empty_value_is_unset_and_the_next_source_counts(name):
    text, value = VALUES[name].good[0]
    for empty in ("", " ", "\t\n"):
        assert load(environment(**{name: empty})) == Settings()
        settings = load(environment(**{name: empty}), SettingSource(".env", {name: text}))
        assert value_of(settings, name) == value


def test_an_unknown_family_is_refused_with_the_names_of_all_and_every_name_is_a_family():
    with pytest.raises(SettingsError) as refused:
        load(environment(MODEL_FAMILY="alpaca"))
    names = str(refused.value).partition("one of ")[2].removesuffix(".").split(", ")
    assert names == list(registry.FAMILIES)
    assert [registry.family_by_name(name).name for name in names] == names


def test_a_bad_value_is_reported_only_if_it_would_count():
    assert load(environment(MLX_PORT="81"), SettingSource(".env", {"MLX_PORT": "many"})).server.port == 81


def test_all_problems_are_reported_together():
    flags, file = (
        SettingSource("command line", {"BATCH": "0"}),
        SettingSource(".env", {"DEFAULT_TOP_P": "7", "MLX_PORT": "9"}),
    )
    with pytest.raises(SettingsError) as refused:
        load(flags, environment(MLX_PORT="eighty", MAX_KV_SIZE="-1"), file)
    assert str(refused.value).splitlines() == [
        "MLX_PORT='eighty' (environment): expected a whole number from 0 to 65535.",
        "BATCH='0' (command line): expected a whole number from 1 to 256.",
        "MAX_KV_SIZE='-1' (environment): expected a whole number from 1 to 2147483647.",
        "DEFAULT_TOP_P='7' (.env): expected a number from 0 to 1.",
    ]


def test_settings_never_change():
    settings: Any = load()
    with pytest.raises(FrozenInstanceError):
        settings.engine.batch = 5


# ------------------------------------------------------------------------------------------------ documents


def test_every_variable_of_the_seeds_has_a_row():
    assert set(SEED_VARIABLES) <= {row.name for row in all_rows()}


def test_no_variable_has_two_rows():
    names = [row.name for row in all_rows()]
    assert len(names) == len(set(names)) == len(ACTING) + len(WITHOUT_EFFECT)


def test_every_row_says_what_it_does_and_none_speaks_of_later():
    for row in all_rows():
        assert row.help.endswith(".")
        assert not re.search(r"\bissue\b|later than|not yet", row.help)


def test_a_variable_without_effect_that_is_set_is_known():
    for row in WITHOUT_EFFECT:
        assert set_without_effect(environment(**{row.name: "x"})) == [row]
        assert set_without_effect(SettingSource(".env", {row.name: "x"}), environment()) == [row]
        assert set_without_effect(environment(**{row.name: " "})) == []
    assert set_without_effect(environment(**dict.fromkeys(ACTING, "1"))) == []


def test_the_example_file_is_what_the_command_prints(capsys):
    assert cli.main(["settings", "--format", "env"]) == 0
    assert (ROOT / ".env.example").read_text(encoding="utf-8") == capsys.readouterr().out == as_env_file()


def test_the_table_in_the_documents_is_what_the_command_prints(capsys):
    assert cli.main(["settings", "--format", "markdown"]) == 0
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    table = text.partition(BEGIN)[2].partition(END)[0]
    assert table == capsys.readouterr().out == as_markdown()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_gets_every_setting_in_lines_that_fit(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["settings"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= width
    assert "|" not in printed.replace("on|off", "")
    for row in all_rows():
        assert f"  {row.name}={row.default}" in lines or f"  {row.name}  (unset)" in lines
        assert row.help in " ".join(printed.split())


def test_the_example_file_sets_nothing_and_uncommented_it_sets_the_defaults():
    example = as_env_file()
    assert dotenv_values(stream=io.StringIO(example)) == {}
    lines = [line[1:] for line in example.splitlines() if line.startswith("#") and not line.startswith("# ")]
    assert len(lines) == len(all_rows())
    written = {name: text or "" for name, text in dotenv_values(stream=io.StringIO("\n".join(lines))).items()}
    assert written == {row.name: row.default for row in all_rows()}
    assert load(SettingSource(".env", written)) == Settings()


def test_the_documents_say_of_a_row_without_effect_that_it_has_none():
    for row in WITHOUT_EFFECT:
        assert f"# Has no effect. {row.help}\n#{row.name}={row.default}\n" in as_env_file()
        assert f"| `{row.name}` | `{row.default}` | Has no effect. {row.help} |\n" in as_markdown()
    assert as_env_file().count("Has no effect") == len(WITHOUT_EFFECT)


def test_the_table_has_one_line_for_each_row():
    lines = as_markdown().splitlines()[2:]
    assert len(lines) == len(all_rows())
    for row, line in zip(all_rows(), lines, strict=True):
        assert line.startswith(f"| `{row.name}` | ")
        assert line.count(" | ") == 2


# --------------------------------------------------------------------------------------------------- acting


@dataclass(frozen=True)
class Models:
    """Folders: `plain` and `wild` say random things, `wild` by default hot ones; `loud` says megabytes.

    `thinker` thinks "Hm." and says "Yes", or only "No" if its prompt asks for no reasoning.
    `seeing` sees images. `latent` keeps a latent of keys and values.
    """

    plain: Path
    wild: Path
    loud: Path
    thinker: Path
    seeing: Path
    latent: Path
    greedy: str
    """The words of `plain` and `wild` at temperature 0."""


@pytest.fixture(scope="module")
def models(tiny_model, chain_model, tiny_vision_model, tmp_path_factory) -> Models:
    plain = tiny_model("qwen3")
    wild = shutil.copytree(plain, tmp_path_factory.mktemp("wild") / "wild")
    author = json.loads((wild / "generation_config.json").read_text())
    hot = {"temperature": 5, "top_p": 1, "top_k": 0, "min_p": 0}
    (wild / "generation_config.json").write_text(json.dumps(author | hot))
    loud = chain_model({"\n": [bytes([65 + n]) * 2**20 for n in range(12)]})
    thinker = chain_model({"\n": ["<think>", "Hm.", "</think>", "Yes"], "\n\n": ["No"]})
    with running(plain) as server:
        greedy = reply(server, temperature=0)
    return Models(plain, wild, loud, thinker, tiny_vision_model(), tiny_model("glm4_moe_lite"), greedy)


@contextmanager
def running(folder: Path, **variables: str) -> Generator[Server]:
    """The application as these variables make it."""
    output = io.StringIO()
    base = {"MODEL_PATH": str(folder), "MLX_PORT": "0", "PROXY": "false", "ENABLE_REQUEST_LOGGING": "false"}
    base |= {"STATE_ROOT": os.environ["STATE_ROOT"], "SSD_CACHE_DIR": "off", "DRAIN_SECONDS": "1.5"}
    base["IDLE_WORK"] = "off"  # what is counted depends on no clock
    app = App(load(environment(**(base | variables))), Terminal(output))
    with tried_once():
        app.start()
    try:
        yield Server(app, output)
    finally:
        assert app.close(), "the engine thread did not end"


def reply(server: Server, **more: Any) -> str:
    body = {"prompt": "The fish in the sea", "max_tokens": 16, "seed": 3, **more}
    return server.post("/v1/completions", body)["choices"][0]["text"]


def words_of(server: Server, **more: Any) -> tuple[str | None, str]:
    """Reasoning and answer of a chat."""
    body = {"messages": [{"role": "user", "content": "Is it?"}], **more}
    message = server.post("/v1/chat/completions", body)["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"]


def refusal(server: Server, body: object) -> tuple[int, Any, Any]:
    """Status, headers and error object of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/v1/completions", body)
    return refused.value.code, refused.value.headers, json.load(refused.value)["error"]


def endless(server: Server) -> http.client.HTTPResponse:
    """A stream that goes on until it is closed."""
    body = {"prompt": [1, 2, 3], "max_tokens": 100_000, "stream": True}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), AS_JSON)
    return urllib.request.urlopen(request, timeout=30)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def at_work(server: Server) -> tuple[int, int]:
    """Rows that decode, and requests that wait."""
    stats = server.get("/stats")
    return stats["batch"]["active_rows"], stats["engine"]["waiting"]


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def seconds_until_closed(connection: socket.socket) -> float:
    began = time.monotonic()
    assert connection.recv(1000) == b""
    return time.monotonic() - began


def checks_model_path(models: Models) -> None:
    with running(models.wild) as server:
        assert server.get("/v1/models")["data"][0]["id"] == "wild"


def checks_family(models: Models) -> None:
    """The model writes the same; the family decides how it is understood."""
    with running(models.thinker) as server:
        assert words_of(server) == ("Hm.", "Yes")
        assert "qwen3 (qwen3)" in server.printed()
    with running(models.thinker, MODEL_FAMILY="llama3") as server:
        assert words_of(server) == (None, "<think>Hm.</think>Yes")
        assert "llama3 (qwen3)" in server.printed()


def checks_cpu_dequantize(models: Models) -> None:
    halved = halve(models.plain, models.wild.parent / "halved")
    notice = "The bfloat16 weights were converted to float32"
    with running(halved) as server:
        assert (notice in server.printed()) == (this_device().kind == "CPU")
    with running(halved, CPU_DEQUANTIZE="off") as server:
        assert notice not in server.printed()


def checks_thinking(models: Models) -> None:
    with running(models.thinker, DEFAULT_THINKING="false") as server:
        assert words_of(server) == (None, "No")
        assert words_of(server, enable_thinking=True) == ("Hm.", "Yes")
    with running(models.thinker, DEFAULT_THINKING="true") as server:
        assert words_of(server) == ("Hm.", "Yes")
        assert words_of(server, enable_thinking=False) == (None, "No")


def checks_host(models: Models) -> None:
    host = "127.0.0.2" if sys.platform == "linux" else "::1"
    with running(models.plain, MLX_HOST=host) as server:
        assert host in server.url
        assert server.get("/health")["status"] == "ok"
        with pytest.raises(OSError, match="refused"):
            connected(server)


def checks_keys(models: Models) -> None:
    with running(models.plain, MLX_API_KEY="one, two") as server:
        assert (
            status_of(server, "/v1/models")
            == status_of(server, "/v1/models", Authorization="Bearer x")
            == 401
        )
        for key in ("one", "two"):
            assert status_of(server, "/v1/models", Authorization=f"Bearer {key}") == 200
            assert status_of(server, "/v1/models", **{"x-api-key": key}) == 200


def checks_hosts(models: Models) -> None:
    with running(models.plain, ALLOWED_HOSTS="studio.local, other") as server:
        names = ("studio.local", "STUDIO.local:8080", "other", "studio", "local", "studio.local.evil")
        assert [status_of(server, "/health", Host=name) for name in names] == [200, 200, 200, 403, 403, 403]


def checks_origins(models: Models) -> None:
    """Pages of these may ask, and read what is answered; of others neither."""
    with running(models.plain, ALLOWED_ORIGINS="http://localhost:3000, vscode-webview://*") as server:
        for origin in ("http://localhost:3000", "vscode-webview://0abc", "http://localhost:3001", "null"):
            is_ours = origin in ("http://localhost:3000", "vscode-webview://0abc")
            assert status_of(server, "/health", Origin=origin) == (200 if is_ours else 403)


def status_of(server: Server, path: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers)) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def checks_requests_at_once(models: Models) -> None:
    with running(models.plain, KEY_REQUESTS_AT_ONCE="1") as server:
        with endless(server) as stream:
            assert stream.readline()
            status, headers, error = refusal(server, {"prompt": "x"})
            assert (status, error["type"], headers["Retry-After"]) == (429, "rate_limit_error", "1")
        until(lambda: at_work(server) == (0, 0))
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})


def checks_tokens_per_minute(models: Models) -> None:
    with running(models.plain, KEY_TOKENS_PER_MINUTE="10") as server:
        asked = {"prompt": "a longer prompt", "max_tokens": 12}
        assert server.post("/v1/completions", asked)["usage"]["completion_tokens"] == 12
        status, headers, error = refusal(server, asked)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        assert 6 <= int(headers["Retry-After"]) <= 180


def checks_drain(models: Models) -> None:
    for seconds in (0, 0.6):
        with running(models.plain, DRAIN_SECONDS=str(seconds)) as server:
            stream = endless(server)
            assert stream.readline()
            began = time.monotonic()
            server.app.close()
            assert seconds <= time.monotonic() - began < seconds + 5
            stream.close()


def checks_port(models: Models) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running(models.plain, MLX_PORT=str(port)) as server:
        assert server.url.endswith(f":{port}")
        assert server.get("/health")["status"] == "ok"


def checks_batch(models: Models) -> None:
    with running(models.plain, BATCH="2") as server, ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(endless(server))
        until(lambda: at_work(server) == (2, 1))
        assert [at_work(server) for _ in range(20)] == [(2, 1)] * 20
        assert server.get("/stats")["batch"]["configured"] == 2


def checks_drafts(models: Models) -> None:
    cheap = PassTimes(dict.fromkeys(PASSES, 1.0))
    for value, are_made in (("auto", True), ("off", False)):
        with (
            patch("start_llm.hosting.model_loading.measure_passes", return_value=cheap),
            running(models.plain, SPECULATION=value) as server,
        ):
            reply(server, prompt="one two three four " * 30, max_tokens=60, temperature=0)
            stats = server.get("/stats")["speculation"]
            assert (stats["pays"], stats["drafts"] > 0) == (are_made, are_made)


def checks_idle_work(models: Models) -> None:
    carrier = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    asked = [{"role": "user", "content": text} for text in ("Is it?", carrier)]
    for value, on_battery, is_done in (
        ("auto", False, True),
        ("auto", True, False),
        ("on", True, True),
        ("off", False, False),
    ):
        with (
            patch("start_llm.core.battery._is_discharging", return_value=on_battery),
            patch("start_llm.serving.read_ahead._SETTLES_S", 0.0),
            running(models.plain, IDLE_WORK=value) as server,
        ):
            server.post("/v1/chat/completions", {"messages": asked, "max_tokens": 40, "temperature": 0})
            if is_done:
                until(lambda server=server: server.get("/stats")["idle_work"]["works"] == 1)
            else:
                time.sleep(0.3)
                assert server.get("/stats")["idle_work"]["works"] == 0


def checks_queue(models: Models) -> None:
    with running(models.plain, BATCH="1", MAX_QUEUED_REQUESTS="1") as server, ExitStack() as streams:
        streams.enter_context(endless(server))
        until(lambda: at_work(server) == (1, 0))
        streams.enter_context(endless(server))
        until(lambda: at_work(server) == (1, 1))
        status, headers, error = refusal(server, {"prompt": "x"})
        assert (status, error["type"]) == (503, "overloaded_error")
        assert int(headers["Retry-After"]) > 0


def checks_memory(models: Models) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # What is measured differs by a tenth from start to start, as buffers are freed in another thread.
        patch.setattr("start_llm.hosting.model_loading.work_reserve", lambda settings, cost: 40_000_000)
        with running(models.plain, MEMORY_BUDGET="100MB") as server:
            admission = server.get("/stats")["admission"]
        aside = 0.95 * admission["memory_budget_bytes"] - admission["usable_bytes"]
        with running(models.plain, MEMORY_BUDGET=str(int((aside + 500_000) / 0.95))) as server:
            longest = server.get("/stats")["admission"]["max_safe_context"]
            assert 10 < longest < admission["max_safe_context"]
            assert server.get("/v1/models")["data"][0]["context_window"] == longest
            status, _, error = refusal(server, {"prompt": [7] * longest})
            assert (status, error["type"], error["code"]) == (400, "memory_admission", "context_over_budget")
            assert f"{longest} tokens" in error["message"]
            usage = server.post("/v1/completions", {"prompt": [7] * (longest - 3), "max_tokens": 50})["usage"]
            assert usage["completion_tokens"] == 3
    with pytest.raises(ModelError, match=r"MEMORY_BUDGET is 1,000 bytes.*no room for a prompt"):
        running(models.plain, MEMORY_BUDGET="1000").__enter__()


def checks_turns(models: Models) -> None:
    def preemptions(server: Server) -> int:
        return server.get("/stats")["engine"]["preemptions"]

    for seconds, are_many in (("0.05", True), ("600", False)):
        with running(models.plain, BATCH="1", REPLY_TURN_SECONDS=seconds) as server, ExitStack() as streams:
            for _ in range(2):
                streams.enter_context(endless(server))
            until(lambda: sum(at_work(server)) == 2)
            if are_many:
                until(lambda: preemptions(server) > 3)
            else:
                assert [preemptions(server) for _ in range(10)] == [0] * 10


def checks_pieces(models: Models) -> None:
    pieces = {}
    for seconds in ("0.01", "30"):
        with running(models.plain, DECODE_STALL_SECONDS=seconds) as server, endless(server):
            assert server.get("/stats")["engine"]["decode_stall"]["target_s"] == float(seconds)
            until(lambda: at_work(server) == (1, 0))
            usual = EngineTime.compute_chunk
            with patch.object(EngineTime, "compute_chunk", autospec=True, side_effect=usual) as computed:
                server.post("/v1/completions", {"prompt": [7] * 2000, "max_tokens": 1})
            pieces[seconds] = computed.call_count
    assert pieces["0.01"] > pieces["30"] == 1, pieces


class Stuck(CacheProbe):
    """A question that the engine does not get over for a second."""

    @property
    def request(self) -> EngineRequest:
        time.sleep(1)
        raise KeyError("nothing was asked")

    @request.setter
    def request(self, value: Any) -> None:
        pass


def checks_stall(models: Models) -> None:
    with running(models.plain, ENGINE_STALL_SECONDS="0.2") as server:
        assert server.get("/health")["status"] == "ok"
        engine = server.app.runtime.engine
        assert engine
        engine._inbox.put(Stuck(cast("EngineRequest", None)))

        def health() -> tuple[int, str]:
            try:
                return 200, server.get("/health")["status"]
            except urllib.error.HTTPError as error:
                body = json.load(error)
                assert "busy with one step for" in body["reason"]
                return error.code, body["status"]

        until(lambda: health() == (503, "stuck"))
        until(lambda: health() == (200, "ok"))


def checks_load_stall(models: Models) -> None:
    with running(models.plain, MODEL_LOAD_STALL_SECONDS="77") as server:
        assert server.get("/health")["status"] == "ok"
        host: Any = server.app._hosting.result()
        assert host.switcher._shared.settings.engine.load_stall_s == 77


def checks_end_when_stuck(models: Models) -> None:
    with running(models.plain, END_WHEN_STUCK="true"):
        assert "watch" in {thread.name for thread in threading.enumerate()}


def checks_deadline(models: Models) -> None:
    with running(models.plain, GENERATION_WATCHDOG_SECONDS="0.3") as server:
        began = time.monotonic()
        words_of = server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 100_000})
        assert 0.2 < time.monotonic() - began < 5
        assert words_of["choices"][0]["finish_reason"] == "length"
        assert 0 < words_of["usage"]["completion_tokens"] < 10_000
        until(lambda: server.get("/stats")["requests"]["endings"] == {"deadline": 1})
    with running(models.plain, GENERATION_WATCHDOG_SECONDS="0") as server, endless(server) as stream:
        assert stream.read(5000)


def checks_repetition(models: Models) -> None:
    loop = {"prompt": [1, 2, 3], "max_tokens": 700, "temperature": 0, "logit_bias": {"7": 100}}
    with patch("start_llm.core.repetition.RUNAWAY_TOKENS", 400):
        for policy, least, most in (("stop", 400, 500), ("tell", 700, 700), ("off", 700, 700)):
            with running(models.plain, REPETITION=policy) as server:
                words_of = server.post("/v1/completions", loop)
                assert words_of["choices"][0]["finish_reason"] == "length"
                assert least <= words_of["usage"]["completion_tokens"] <= most
                until(lambda: bool(server.get("/stats")["requests"]["endings"]))
                assert server.get("/stats")["requests"]["repetitions"] == (policy != "off")


def checks_body_bytes(models: Models) -> None:
    with running(models.plain, MAX_BODY_BYTES="2000") as server:
        status, _, error = refusal(server, {"prompt": "x" * 2000, "max_tokens": 1})
        assert status == 413
        assert "2000 bytes" in error["message"]
        assert reply(server, user="x" * 1500)


def checks_connections(models: Models) -> None:
    with running(models.plain, MAX_CONNECTIONS="2") as server:
        first, second, third = (connected(server) for _ in range(3))
        with first, second, third:
            assert first.recv(1) == b"", "the longest idle one is closed"
            for connection in (second, third):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def checks_idle(models: Models) -> None:
    with running(models.plain, HTTP_IDLE_TIMEOUT_SECONDS="0.3") as server, connected(server) as connection:
        assert 0.2 < seconds_until_closed(connection) < 5


def checks_header(models: Models) -> None:
    with running(models.plain, HTTP_HEADER_TIMEOUT_SECONDS="0.3") as server, connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost:")
        assert 0.2 < seconds_until_closed(connection) < 5


def checks_body(models: Models) -> None:
    with running(models.plain, HTTP_BODY_TIMEOUT_SECONDS="0.3") as server, connected(server) as connection:
        connection.sendall(POST + b"Content-Length: 9\r\n\r\n{")
        began = time.monotonic()
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
        assert 0.2 < time.monotonic() - began < 5


def checks_write(models: Models) -> None:
    with running(models.loud, HTTP_WRITE_TIMEOUT_SECONDS="0.3") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({"prompt": "\n", "stream": True}).encode()
        head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        until(lambda: server.get("/stats")["requests"]["endings"] == {"cancelled": 1}, seconds=10)


def checks_keep_alive(models: Models) -> None:
    body = {"prompt": [7] * 1500, "max_tokens": 1, "stream": True}
    with running(models.plain, STREAM_KEEP_ALIVE_SECONDS="0.05") as server:
        request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), AS_JSON)
        with urllib.request.urlopen(request, timeout=60) as stream:
            lines = [line.removeprefix(b"data: ") for line in stream if line.strip()]
    texts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    opening, *signs_of_life, _, _ = texts
    assert opening == ""
    assert len(signs_of_life) > 2
    assert set(signs_of_life) == {""}


def checks_window(models: Models) -> None:
    with running(models.plain, MAX_KV_SIZE="64") as server:
        assert server.get("/v1/models")["data"][0]["context_window"] == 64
        status, _, error = refusal(server, {"prompt": [7] * 64})
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "64 tokens" in error["message"]
        usage = server.post("/v1/completions", {"prompt": [7] * 60, "max_tokens": 50})["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (60, 4)


def known_of(server: Server, prompt: list[int]) -> int:
    """Tokens of a prompt that are not computed."""
    usage = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def cache_at_rest(server: Server) -> dict[str, Any]:
    """Return the cache's part of `/stats` once the last row has given back what it computed."""

    def cache() -> dict[str, Any]:
        return server.get("/stats")["prompt_cache"]

    wait_until(lambda: cache()["bytes_by_kind"]["sequence_caches"] > 0, within_s=5)
    return cache()


def checks_cache(models: Models) -> None:
    for value, known in (("true", 49), ("false", 0)):
        with running(models.plain, PROMPT_CACHE=value) as server:
            assert [known_of(server, [7] * 50) for _ in range(3)] == [0, known, known]
            assert (server.get("/stats")["prompt_cache"]["max_bytes"] > 0) == bool(known)
            assert bool(re.search(r"cache +off", server.printed())) == (not known)


def checks_cache_bytes(models: Models) -> None:
    budgets: list[int] = []
    for share in ("10%", "20%"):
        with running(models.plain, PROMPT_CACHE_MAX_BYTES=share) as server:
            budgets.append(server.get("/stats")["prompt_cache"]["max_bytes"])
    assert budgets[1] == pytest.approx(2 * budgets[0], abs=2)
    checks_uncapped(models)
    with running(models.plain, PROMPT_CACHE_MAX_BYTES="3MB") as server:
        for start in range(5):
            assert known_of(server, list(range(start, start + 300))) == 0
        cache = cache_at_rest(server)
        assert (cache["max_bytes"], cache["evictions"] > 0) == (3_000_000, True)
        assert 0 < cache["bytes"] <= 3_000_000


def checks_uncapped(models: Models) -> None:
    sizes: list[int] = []
    for size in ("0", "100%"):
        with running(models.plain, PROMPT_CACHE_MAX_BYTES=size) as server:
            sizes.append(server.get("/stats")["prompt_cache"]["max_bytes"])
    assert sizes[0] == sizes[1] > 0


def checks_model_dir(models: Models) -> None:
    def listed(server: Server) -> list[str]:
        entries = server.get("/library")["models"]
        return [entry["repo_id"] for entry in entries if entry["place"] == "model-dir"]

    with running(models.plain) as server:
        assert listed(server) == []
    with pytest.raises(SettingsError, match="no such folder"), running(models.plain, MODEL_DIR="/no/such"):
        pass
    with tempfile.TemporaryDirectory() as folder:
        with (
            pytest.raises(ModelError, match="holds no model"),
            running(Path(), MODEL_DIR=folder, MODEL_PATH=""),
        ):
            pass
        shutil.copytree(models.plain, Path(folder) / "lab" / "tiny")
        with running(Path("tiny"), MODEL_DIR=folder, MODEL_PATH="") as server:
            assert server.get("/health")["model"] == "lab/tiny"
            assert listed(server) == ["lab/tiny"]
        shutil.copytree(models.plain, Path(folder) / "other")
        with running(Path("other"), MODEL_DIR=folder) as server:
            assert server.get("/health")["model"] == "other"
        with running(models.plain, MODEL_DIR=folder) as server:
            assert listed(server) == ["lab/tiny", "other"]
        with running(Path(), MODEL_DIR=folder, MODEL_PATH="") as server:
            assert loaded(server) == {"lab/tiny"}
            server.post("/v1/completions", {"model": "other", "prompt": [1, 2], "max_tokens": 1})
            assert loaded(server) == {"lab/tiny", "other"}


def checks_more_models(models: Models) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two", "lab/two"):
            shutil.copytree(models.plain, Path(folder) / name)
        with running(Path(folder) / "one", MORE_MODELS=f"{folder}/two") as server:
            assert loaded(server) == {"one"}
            server.post("/v1/completions", {"model": "two", "prompt": [1, 2], "max_tokens": 1})
            assert loaded(server) == {"one", "two"}
        with running(Path(folder) / "one", MORE_MODELS=f"{folder}/one") as server:
            assert [model["id"] for model in server.get("/v1/models")["data"]] == ["one"]
        for more in (f"{folder}/two, {folder}/lab/two", f"{folder}/lab/two,{folder}/two"):
            with (
                pytest.raises(SettingsError, match="two models are called 'two'"),
                running(Path(folder) / "one", MORE_MODELS=more),
            ):
                pass
        with pytest.raises(ModelError, match="no such folder"), running(models.plain, MORE_MODELS="/no/such"):
            pass


def loaded(server: Server) -> set[str]:
    return {model["id"] for model in server.get("/v1/models")["data"] if model["state"] == "loaded"}


@contextmanager
def two_models(models: Models, **variables: str) -> Generator[Server]:
    """Both are loaded, if nothing keeps them from it; the first one was used first."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two"):
            shutil.copytree(models.plain, Path(folder) / name)
        with running(Path("one"), MODEL_DIR=folder, **variables) as server:
            server.post("/v1/completions", {"model": "two", "prompt": [1, 2], "max_tokens": 1})
            yield server


def checks_loaded_models(models: Models) -> None:
    with two_models(models) as server:
        assert loaded(server) == {"one", "two"}
    with two_models(models, MAX_LOADED_MODELS="1") as server:
        assert loaded(server) == {"two"}


def checks_idle_models(models: Models) -> None:
    with two_models(models, MODEL_IDLE_SECONDS="0.3") as server:
        until(lambda: loaded(server) == set())


def checks_load_wait(models: Models) -> None:
    with (
        pytest.raises(urllib.error.HTTPError) as refused,
        two_models(models, MODEL_LOAD_WAIT_SECONDS="0.01"),
    ):
        pass
    assert refused.value.code == 503
    assert "'two' is still being loaded" in refused.value.read().decode()


def checks_strict_names(models: Models) -> None:
    with two_models(models, STRICT_MODEL_NAMES="on") as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            reply(server, model="three")
        assert refused.value.code == 404
        assert "there is one, two" in refused.value.read().decode()


def checks_pins(models: Models) -> None:
    with two_models(models, MODEL_IDLE_SECONDS="0.3", MODEL_PINS="one") as server:
        until(lambda: loaded(server) == {"one"})
    with (
        pytest.raises(SettingsError, match="MODEL_PINS: there is no model 'three'; there is one, two"),
        two_models(models, MODEL_PINS="three"),
    ):
        pass


def checks_aliases(models: Models) -> None:
    with two_models(models, MODEL_ALIASES="other=two, third=one") as server:
        server.post("/v1/completions", {"model": "other", "prompt": [1, 2], "max_tokens": 1})
        assert loaded(server) == {"one", "two"}
        assert server.get("/v1/models/third")["id"] == "one"
    with (
        pytest.raises(SettingsError, match="MODEL_ALIASES: there is no model 'three'; there is one, two"),
        two_models(models, MODEL_ALIASES="x=three"),
    ):
        pass


def checks_adapter_dir(models: Models) -> None:
    with pytest.raises(SettingsError, match="no such folder"), running(models.plain, ADAPTER_DIR="/no/such"):
        pass
    with tempfile.TemporaryDirectory() as folder:
        tiny_adapters.build(models.plain, Path(folder) / "a", 1)
        with running(models.plain, ADAPTER_DIR=folder) as server:
            assert server.post("/v1/adapters", {"id": "a"})["id"] == "a"
            server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1, "adapter": "a"})


def checks_kv_bits(models: Models) -> None:
    for bits in ("4", "8"):
        quantised = {"KV_BITS": bits, "KV_GROUP_SIZE": "32", "QUANTIZED_KV_START": "0"}
        with running(models.plain, **quantised) as server:
            assert server.get("/stats")["kv_quant"] == {
                "mode": f"uniform-kv{bits}", "layers": {f"kv{bits}": 4}, "attention": {"global": 4}
            }  # fmt: skip
            assert re.search(rf"cache +up to .*, pages uniform-kv{bits}", server.printed())
            warned = "With uniform 4 bits, 6 to 18 % of the likeliest tokens change" in server.printed()
            assert warned == (bits == "4")
            assert reply(server) == reply(server)
    with running(models.plain, KV_BITS="OFF") as server:
        assert server.get("/stats")["kv_quant"]["mode"] == "f32"
    with (
        pytest.raises(
            SettingsError, match="KV_BITS=8 is for the pages of the prompt cache, and there is none"
        ),
        running(models.plain, KV_BITS="8", PROMPT_CACHE="off"),
    ):
        pass
    with (
        pytest.raises(SettingsError, match=r"KV_BITS=8: this model keeps a latent .*Leave KV_BITS out\."),
        running(models.latent, KV_BITS="8"),
    ):
        pass


def written_formats(folder: str) -> set[str]:
    """What the page files of a folder say of their KV."""
    formats: set[str] = set()
    for path in (Path(folder) / "pages").rglob("*.safetensors"):
        length = int.from_bytes(path.read_bytes()[:8], "little")
        formats.add(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"].get("kv_format", ""))
    return formats


def checks_kv_format(**variables: str) -> Callable[[Models], None]:
    """Pages on disk say that they are quantised as the variables ask."""

    def check(models: Models) -> None:
        formats: list[set[str]] = []
        plain = {"KV_BITS": "8", "QUANTIZED_KV_START": "256"}
        for settings in (plain, plain | variables):
            with tempfile.TemporaryDirectory() as folder:
                with running(models.plain, SSD_CACHE_DIR=folder, **settings) as server:
                    known_of(server, [7] * 700)
                formats.append(written_formats(folder))
        assert formats[0] == {"", KVFormat(8, 64, 256).tag}
        assert formats[0] != formats[1]

    return check


def checks_kv_scheme(models: Models) -> None:
    for bits in ("4", "3.5"):
        with running(models.plain, KV_QUANT_SCHEME="turboquant", KV_BITS=bits) as server:
            kv = server.get("/stats")["kv_quant"]
            assert (kv["mode"], kv["layers"]) == (f"turboquant-kv{bits}", {f"turbo{bits}": 4})
            assert re.search(rf"cache +up to .*, pages turboquant-kv{bits}", server.printed())
            assert "uniform 4 bits" not in server.printed()
    with running(models.plain, KV_QUANT_SCHEME="turboquant", KV_BITS="OFF") as server:
        assert server.get("/stats")["kv_quant"]["mode"] == "f32"
        assert "KV_QUANT_SCHEME=turboquant has no effect without KV_BITS=4 or 3.5." in server.printed()
    checks_kv_format(KV_QUANT_SCHEME="turboquant", KV_BITS="4")(models)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("scheme", "bits", "problem"),
    [
        (
            "turboquant",
            "8",
            "KV_BITS=8: KV_QUANT_SCHEME=turboquant has 3.5 or 4. Set KV_QUANT_SCHEME=uniform",
        ),
        (
            "turboquant",
            "config",
            "KV_BITS=config: KV_QUANT_SCHEME=turboquant has 3.5 or 4. Set KV_QUANT_SCHEME=u",
        ),
        (
            "uniform",
            "3.5",
            "KV_BITS=3.5: KV_QUANT_SCHEME=uniform has 4 or 8 or config. Set KV_QUANT_SCHEME=turbo",
        ),
    ],
)
def test_bits_that_a_scheme_does_not_have_are_refused_with_the_scheme_that_has_them(
    scheme, bits, problem, models
):
    with (
        pytest.raises(SettingsError, match=re.escape(problem)),
        running(models.plain, KV_QUANT_SCHEME=scheme, KV_BITS=bits),
    ):
        pass


@pytest.mark.long
def test_bits_by_layer_come_from_the_models_folder(models, tmp_path):
    folder = shutil.copytree(models.plain, tmp_path / "mixed")
    with (
        pytest.raises(ModelError, match=r"from kv_config\.json in the model's folder, and mixed has none"),
        running(folder, KV_BITS="config"),
    ):
        pass
    entries = [{"layer_idx": layer, "bits": bits, "group_size": 32} for layer, bits in ((0, 8), (3, 4))]
    (folder / "kv_config.json").write_text(json.dumps(entries))
    with running(folder, KV_BITS="config", QUANTIZED_KV_START="0") as server:
        assert server.get("/stats")["kv_quant"] == {
            "mode": "mixed (kv_config.json)",
            "layers": {"kv8": 1, "f32": 2, "kv4": 1},
            "attention": {"global": 4},
        }
        assert server.printed().count("With uniform 4 bits, ") == 1
        assert reply(server) == reply(server)
    (folder / "kv_config.json").write_text(json.dumps(entries[:1]))
    with running(folder, KV_BITS="config") as server:
        assert "With uniform 4 bits, " not in server.printed()


@pytest.mark.thorough
def test_layers_that_keep_a_window_stay_exact_and_are_counted_at_start(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("gemma3_text"), tmp_path / "windows")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    entries = [{"layer_idx": layer, "bits": 8, "group_size": 64} for layer in range(layers)]
    (folder / "kv_config.json").write_text(json.dumps(entries))
    with running(folder, KV_BITS="config") as server:
        kept = server.get("/stats")["kv_quant"]["layers"]
        exact = layers - kept["kv8"]
        assert 0 < exact < layers
        line = f"{exact} of the {layers} layers in kv_config.json stay exact: they keep a window or a state."
        assert line in server.printed()
    (folder / "kv_config.json").write_text(json.dumps(entries[:1]))
    with (
        pytest.raises(SettingsError, match="this model has no layer whose pages can be quantised"),
        running(folder, KV_BITS="config"),
    ):
        pass


def checks_curve(**variables: str) -> Callable[[Models], None]:
    """A reply on the server's curve is that of a request that asks for the same curve."""

    def check(models: Models) -> None:
        wanted = {name.removeprefix("HLG_").lower(): float(text) for name, text in variables.items()}
        hot: dict[str, Any] = {"temperature": 2, "max_tokens": 40}
        with running(models.plain) as server:
            plain = reply(server, **hot)
            default = reply(server, **hot, hlg=True)
            asked = reply(server, **hot, hlg={"enabled": True, **wanted})
        assert plain != default
        assert bool(variables) == (asked != default)
        with running(models.plain, HLG_SAMPLING="on", **variables) as server:
            assert reply(server, **hot) == asked
            assert reply(server, **hot, hlg=False) == plain
        with running(models.plain, **variables) as server:
            assert reply(server, **hot) == plain, "the curve is off"
            assert reply(server, **hot, hlg=True) == asked

    return check


def checks_page_size(models: Models) -> None:
    for size, pages in (("16", 2), ("350", 1), ("4096", 0)):
        with running(models.plain, PROMPT_CACHE_BLOCK_SIZE=size) as server:
            assert known_of(server, [7] * 599) == 0
            assert server.get("/stats")["prompt_cache"]["entries"] == pages
            assert known_of(server, [7] * 599) == 598


def checks_initial_blocks(models: Models) -> None:
    stored: list[int] = []
    for blocks in ("1", "4"):
        with running(models.plain, INITIAL_CACHE_BLOCKS=blocks) as server:
            assert [known_of(server, [7] * 50) for _ in range(2)] == [0, 49]
            stored.append(cache_at_rest(server)["bytes_by_kind"]["sequence_caches"])
    assert stored[1] == 4 * stored[0] > 0


def checks_disk_tier(models: Models) -> None:
    with tempfile.TemporaryDirectory() as folder:
        known: list[int] = []
        for _ in range(2):
            with running(models.plain, SSD_CACHE_DIR=f"{folder}/new") as server:
                known.append(known_of(server, [7] * 599))
                assert f"{folder}/new, up to " in server.printed()
        assert known == [0, 598]
    with tempfile.TemporaryDirectory() as folder:
        for expected in (0, 598):
            with running(models.plain, SSD_CACHE_DIR="", STATE_ROOT=folder) as server:
                assert known_of(server, [7] * 599) == expected
                assert f"{folder}/prompt-cache, up to " in server.printed()
                assert "SSD_CACHE_DIR=off turns it off" in server.printed()
        kept = [path for path in Path(folder, "prompt-cache").rglob("*") if path.is_file()]
        assert len(kept) > 2
        assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    with tempfile.TemporaryDirectory() as folder, running(models.plain, STATE_ROOT=folder) as server:
        known_of(server, [7] * 599)
        assert not Path(folder, "prompt-cache").exists()


def after_writing(models: Models, **variables: str) -> dict[str, Any]:
    """Return the disk tier's part of `/stats` after several prompts and a restart."""
    with tempfile.TemporaryDirectory() as folder:
        stats: list[dict[str, Any]] = []
        for _ in range(2):
            with running(models.plain, SSD_CACHE_DIR=folder, **variables) as server:
                wait_until(lambda: server.get("/stats")["ssd"]["state"] != "scanning", within_s=10)
                stats.append(server.get("/stats")["ssd"])
                for start in range(5):
                    known_of(server, list(range(start, start + 600)))
        return stats[1]


def checks_disk_size(models: Models) -> None:
    small = after_writing(models, SSD_CACHE_MAX_SIZE="3MB")
    assert small["max_bytes"] == 3_000_000
    free = shutil.disk_usage(tempfile.gettempdir()).free
    assert after_writing(models)["max_bytes"] == pytest.approx(min(100 * 10**9, 0.8 * free), rel=0.1)
    with tempfile.TemporaryDirectory() as folder:
        with running(models.plain, SSD_CACHE_DIR="", STATE_ROOT=folder) as server:
            wait_until(lambda: server.get("/stats")["ssd"]["state"] == "on", within_s=10)
            usual = server.get("/stats")["ssd"]["max_bytes"]
        assert usual == pytest.approx(min(20 * 10**9, 0.1 * free), rel=0.1)
    assert 0 < small["bytes"] <= 3_000_000
    assert after_writing(models)["bytes"] > 3_000_000


def checks_disk_delay(models: Models) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with running(models.plain, SSD_CACHE_DIR=folder) as server:
            known_of(server, [7] * 599)
            time.sleep(1.5)
            assert not server.get("/stats")["ssd"]["written_files"]
        with running(models.plain, SSD_CACHE_DIR=folder, SSD_CACHE_WRITE_AFTER_SECONDS="0.1") as server:
            known_of(server, [8] * 599)
            wait_until(lambda: server.get("/stats")["ssd"]["written_files"] >= 3, within_s=10)


def checks_disk_wear(models: Models) -> None:
    few = after_writing(models, SSD_CACHE_MAX_WRITE_PER_DAY="1")["files"]
    assert 0 < few <= 3 < after_writing(models)["files"]


def checks_most_ends(models: Models) -> None:
    with running(models.plain, PROMPT_CACHE_MAX_ENTRIES_GLOBAL="2") as server:
        prompts = [[start, *[7] * 40] for start in range(3)]
        assert [known_of(server, prompt) for prompt in (*prompts, prompts[2], prompts[1])] == [
            0,
            0,
            0,
            40,
            40,
        ]
        assert known_of(server, prompts[0]) == 0


def checks_unused_s(models: Models) -> None:
    for seconds, known in (("0.05", 0), ("0", 49)):
        with running(models.plain, PROMPT_CACHE_TTL_SECONDS=seconds) as server:
            assert known_of(server, [7] * 50) == 0
            time.sleep(0.1)
            known_of(server, [9] * 3)
            assert known_of(server, [7] * 50) == known


def usage_of(server: Server, *messages: object, **more: Any) -> tuple[int, int]:
    """Tokens of a prompt, and how many of them were not computed."""
    usage = server.post("/v1/chat/completions", {"messages": messages, **more})["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def checks_kept_reasoning(models: Models) -> None:
    """Reasoning that the client leaves out, and one that is shown as long as nobody asks anything new."""
    asked, words_of = user("Is it?"), {"role": "assistant", "content": "Yes"}
    lengths: dict[str, tuple[int, int]] = {}
    for kept in ("true", "template", "false"):
        with running(models.thinker, PRESERVE_THINKING=kept) as server:
            usage_of(server, asked)
            later, _ = usage_of(server, asked, words_of, user("Sure?"))
            shown, _ = usage_of(server, user("And?"), {**words_of, "reasoning_content": "Hm."})
            lengths[kept] = later, shown
    assert lengths["true"][0] > lengths["template"][0] == lengths["false"][0]
    assert lengths["true"][1] == lengths["template"][1] > lengths["false"][1]


def checks_canonicalizes(models: Models) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.329.d79;"
    for value, is_shown in (("true", False), ("false", True)):
        with running(models.thinker, CACHE_CANONICALIZE_TOOL_CONTEXT=value) as server:
            plain, _ = usage_of(server, {"role": "system", "content": "Be brief."}, user("Is it?"))
            headed, _ = usage_of(
                server, {"role": "system", "content": f"{header}\nBe brief."}, user("Is it?")
            )
            assert (headed > plain) == is_shown


def checks_drift(models: Models) -> None:
    """A date before much that stays as it is."""
    rules = "Be brief and say what you see. " * 20

    def rules_of_day(day: int) -> dict[str, str]:
        return {"role": "system", "content": f"Today's date: 2026-11-{day}\n{rules}"}

    for value, is_reused in (("note", True), ("exact", False)):
        with running(models.thinker, CACHE_DRIFT_POLICY=value) as server:
            total, _ = usage_of(server, rules_of_day(21), user("Is it?"))
            _, cached = usage_of(server, rules_of_day(22), user("Is it?"))
            assert (cached > total // 2) == is_reused


def checks_partitions(models: Models) -> None:
    def cached(server: Server, key: str) -> int:
        body = json.dumps({"prompt": [7] * 50, "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        with urllib.request.urlopen(
            urllib.request.Request(server.url + "/v1/completions", body, headers), timeout=30
        ) as answer:
            return json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]

    for value, known in (("true", 0), ("false", 49)):
        with running(models.plain, CACHE_SESSION_PARTITIONING=value) as server:
            assert (cached(server, "one"), cached(server, "one")) == (0, 49)
            assert cached(server, "two") == known


def checks_left_out(models: Models) -> None:
    """A date that is most of the text, and one that is little of it."""
    rules = "You are brief. " * 20

    def bound(server: Server, text: str) -> int:
        for day in (21, 22):
            first = {"role": "system", "content": f"{text}\nCurrent date: 2026-11-{day}\n"}
            usage_of(server, first, user("Is it?"))
        return server.get("/stats")["transcripts"]["bound"]

    for value, counts in (("true", (1, 1)), ("false", (1, 2))):
        with running(models.thinker, CACHE_NORM_SAFETY_CHECK=value) as server:
            assert (bound(server, rules), bound(server, "Be brief.")) == counts


def checks_shortens_writes(models: Models) -> None:
    call = {"name": "write", "arguments": json.dumps({"path": "x", "content": "word " * 200})}
    calling = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    talk = (user("Write it."), calling, {"role": "tool", "tool_call_id": "1", "content": "done"})
    lengths: list[int] = []
    for value in ("true", "false"):
        with running(models.thinker, NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT=value) as server:
            lengths.append(usage_of(server, *talk)[0])
    assert lengths[1] > lengths[0] + 200


def checks_transcript_idle(models: Models) -> None:
    for seconds, forgets in (("0.05", True), ("0", False)):
        with running(models.thinker, PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS=seconds) as server:
            usage_of(server, user("Is it?"))
            time.sleep(0.1)
            usage_of(server, user("Was it?"))
            assert (server.get("/stats")["transcripts"]["forgotten"] > 0) == forgets


def checks_greedy(**variables: str) -> Callable[[Models], None]:
    """A hot model becomes a greedy one by this variable alone."""

    def check(models: Models) -> None:
        greedy = models.greedy
        with running(models.wild, **variables) as server:
            assert reply(server) == reply(server, seed=4) == greedy
            assert reply(server, temperature=5, top_k=0, top_p=1, min_p=0) != greedy

    return check


def checks_penalty(models: Models) -> None:
    greedy = models.greedy
    with running(models.plain, DEFAULT_TEMPERATURE="0", DEFAULT_REPETITION_PENALTY="9") as server:
        penalised = reply(server)
        assert penalised != greedy
        assert penalised == reply(server, repetition_penalty=9)
        assert reply(server, repetition_penalty=1) == greedy


def checks_penalty_window(models: Models) -> None:
    greedy = models.greedy
    with running(models.plain, DEFAULT_REPETITION_CONTEXT_SIZE="0") as server:
        assert reply(server, temperature=0, repetition_penalty=9) == greedy
        assert reply(server, temperature=0, repetition_penalty=9, repetition_context_size=256) != greedy


def checks_reply_length(models: Models) -> None:
    with running(models.plain, DEFAULT_MAX_TOKENS="5") as server:
        answer = server.post("/v1/completions", {"prompt": "x"})
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["finish_reason"] == "length"
        assert (
            server.post("/v1/completions", {"prompt": "x", "max_tokens": 7})["usage"]["completion_tokens"]
            == 7
        )


def traces(root: Path) -> list[dict[str, Any]]:
    files = sorted(root.glob("*/cache-session-*.log"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def checks_traces(models: Models) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "new"
        with running(models.plain, LOG_ROOT=str(root)) as server:
            assert reply(server)
            assert "off" in re.findall(r"trace +(.*)", server.printed())
        assert not root.exists()
        with running(models.plain, LOG_ROOT=str(root), ENABLE_REQUEST_LOGGING="true") as server:
            assert reply(server)
            assert str(root) in re.findall(r"trace +(.*)", server.printed())
        (line,) = traces(root)
        assert line["ending"] == "length"
        assert "prompt" not in line
        with pytest.raises(SettingsError, match=r"LOG_ROOT=.*expected a folder"):
            App(
                load(environment(LOG_ROOT=__file__, PROXY="false", ENABLE_REQUEST_LOGGING="true")), Terminal()
            )


def checks_traced_prompts(models: Models) -> None:
    with tempfile.TemporaryDirectory() as folder:
        variables = {"LOG_ROOT": folder, "ENABLE_REQUEST_LOGGING": "true", "LOG_PROMPTS": "true"}
        with running(models.plain, **variables) as server:
            words_of = reply(server)
            assert "in clear" in server.printed()
        (line,) = traces(Path(folder))
        assert line["prompt"].endswith("The fish in the sea")
        assert line["reply"] == words_of


def checks_state(models: Models) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "new"
        with running(models.plain, STATE_ROOT=str(root)) as server:
            key = (root / "seal.key").read_bytes()
            assert "cannot be kept" not in server.printed()
        with running(models.plain, STATE_ROOT=str(root)):
            assert (root / "seal.key").read_bytes() == key
    with running(models.plain, STATE_ROOT=__file__) as server:
        assert server.printed().count("The key of sealed reasoning cannot be kept") == 1
        assert reply(server)


def goes_on(server: Server) -> bool:
    """True if a response is there for the next one."""
    body = {"input": "Is it?", "max_output_tokens": 1}
    name = server.post("/v1/responses", body)["id"]
    try:
        server.post("/v1/responses", {**body, "previous_response_id": name})
    except urllib.error.HTTPError as error:
        assert error.code == 404
        return False
    return True


def checks_response_age(models: Models) -> None:
    with running(models.thinker, RESPONSE_STORE_TTL_SECONDS="0") as server:
        assert not goes_on(server)
        assert server.get("/stats")["response_store"]["ttl_ms"] == 0
    with running(models.thinker) as server:
        assert goes_on(server)
        assert server.get("/stats")["response_store"]["ttl_ms"] == 3_600_000


def checks_response_bytes(models: Models) -> None:
    with running(models.thinker, RESPONSE_STORE_MAX_BYTES="100") as server:
        assert not goes_on(server)
        assert server.get("/stats")["response_store"] == {
            "entries": 0, "bytes": 0, "max_bytes": 100, "ttl_ms": 3_600_000
        }  # fmt: skip
    with running(models.thinker) as server:
        assert goes_on(server)
        assert server.get("/stats")["response_store"]["entries"] == 2


def shown(server: Server, *urls: str) -> tuple[int, Any]:
    """Status, and tokens of a prompt with images or the error."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    try:
        return 200, server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def checks_image_tokens(models: Models) -> None:
    url, counts = data_url(picture(size=(600, 400))), list[int]()
    for most in ("64", "4096"):
        with running(models.seeing, IMAGE_MAX_TOKENS=most) as server:
            status, count = shown(server, url)
            assert status == 200, "a large image is made smaller, not refused"
            counts.append(count)
    assert counts[0] < 100 < counts[1]


def checks_image_limit(name: str, value: str, code: str) -> Callable[[Models], None]:
    """Two images of 40 by 30 pixels are too much for this limit alone."""

    def check(models: Models) -> None:
        urls = [data_url(picture(seed=seed)) for seed in (1, 2)]
        with running(models.seeing, **{name: value}) as server:
            status, error = shown(server, *urls)
            assert (status, error["code"]) == (400, code)
            assert name in error["message"]
        with running(models.seeing) as server:
            assert shown(server, *urls)[0] == 200

    return check


def checks_image_urls(models: Models) -> None:
    """Neither asks for this address; with the setting it is refused for what it is."""
    for value, why in (("false", "IMAGE_URLS"), ("true", "not a public address")):
        with running(models.seeing, IMAGE_URLS=value) as server:
            status, error = shown(server, "http://127.0.0.1/a.png")
            assert (status, error["code"]) == (400, "invalid_image_url")
            assert why in error["message"]


def checks_image_lines(models: Models) -> None:
    for value, is_shown in (("true", True), ("false", False)):
        with running(models.seeing, VLM_CACHE_DEBUG=value) as server:
            assert shown(server, data_url(picture()))[0] == 200
            line = re.search(r"image [0-9a-f]{8} at [\d,]+ to [\d,]+  computed", server.printed())
            assert bool(line) == is_shown


def checks_image_identity(models: Models) -> None:
    """It says what is so in any case: another image shares nothing."""
    with running(models.seeing, CACHE_VLM_IMAGE_IDENTITY="true") as server:
        for seed in (1, 2):
            assert shown(server, data_url(picture(seed=seed)))[0] == 200
        assert server.get("/stats")["prompt_cache"]["reused_tokens"] < 10
    with pytest.raises(SettingsError, match=r"CACHE_VLM_IMAGE_IDENTITY='false'.*exact pixels"):
        load(environment(CACHE_VLM_IMAGE_IDENTITY="false"))


def checks_proxy(models: Models) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        same = {"MLX_PORT": port, "PROXY_PORT": port, "PROXY": "true"}
        with (
            pytest.raises(SettingsError, match=f"MLX_PORT and PROXY_PORT are both {port}"),
            running(models.plain, **same),
        ):
            pass
        with (
            pytest.raises(PortError, match=f"PROXY_PORT={port} is taken"),
            running(models.plain, PROXY="true", PROXY_PORT=port),
        ):
            pass
        with running(models.plain, PROXY="false", PROXY_PORT=port) as server:
            assert server.get("/health")["status"] == "ok"


def proxy_config(settings: Settings) -> ProxyConfig:
    return ProxyConfig(
        settings=settings,
        backend="http://127.0.0.1:9",
        first_model="tiny",
        secret=BackendSecret("backend"),
    )


def checks_proxy_config(**variables: str) -> Callable[[Models], None]:
    def check(_: Models) -> None:
        config, default = map(proxy_config, (load(environment(**variables)), load()))
        assert config != default
        assert str(*variables.values()) in (config.model, config.python, *config.keys)
        assert (default.model, default.python, default.keys) == ("openai/tiny", sys.executable, ())

    return check


def checks_proxy_patience(models: Models) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        sleeper = Path(folder) / "python"
        sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
        sleeper.chmod(0o700)
        slow = {"PROXY": "true", "PROXY_PORT": port, "PROXY_PYTHON": str(sleeper)}
        with running(models.plain, **slow, PROXY_STARTUP_WAIT_SECONDS="0.1") as server:
            until(lambda: "The proxy does not answer after" in server.printed())


def checks_secret(models: Models) -> None:
    """Who knows it can say whose a request is. Unset, nobody knows it."""
    known, caller = BackendSecret("0" * 24), Caller(tenant_of_key("ann"), "pi")
    signed = {"Authorization": f"Bearer {known.api_key}", **known.signed(caller, "POST", "/v1/responses")}
    kept: dict[str, Any] = {"input": "Hi", "max_output_tokens": 16}
    for secret, status in ((known.text, 200), ("1" * 24, 404), ("", 404)):
        with running(models.plain, BACKEND_SECRET=secret) as server:
            first = ask(server.port, "POST", "/v1/responses", kept, {"Authorization": "Bearer ann"})
            later = {**kept, "previous_response_id": first.json["id"]}
            assert ask(server.port, "POST", "/v1/responses", later, signed).status == status


def checks_backends(_: Models) -> None:
    """The proxy gets them behind its own server. Without a secret that they share, nothing is started."""
    others = "http://127.0.0.1:1,http://127.0.0.1:2"
    with pytest.raises(SettingsError, match="PROXY_BACKENDS needs BACKEND_SECRET"):
        App(load(environment(PROXY_BACKENDS=others)), Terminal(io.StringIO()))
    config = proxy_config(load(environment(PROXY_BACKENDS=others)))
    assert config.backends == ("http://127.0.0.1:9", "http://127.0.0.1:1", "http://127.0.0.1:2")
    parsed = json.loads(configuration(config))
    bases = [model["litellm_params"]["api_base"] for model in parsed["model_list"]]
    assert bases == [f"{url}/v1" for url in config.backends for _ in range(2)]
    assert "callbacks" in parsed["litellm_settings"]
    assert "callbacks" not in json.loads(configuration(proxy_config(load())))["litellm_settings"]


CHECKS: dict[str, Callable[[Models], None]] = {
    "MODEL_PATH": checks_model_path,
    "MODEL_DIR": checks_model_dir,
    "MORE_MODELS": checks_more_models,
    "MAX_LOADED_MODELS": checks_loaded_models,
    "MODEL_IDLE_SECONDS": checks_idle_models,
    "MODEL_PINS": checks_pins,
    "MODEL_LOAD_WAIT_SECONDS": checks_load_wait,
    "STRICT_MODEL_NAMES": checks_strict_names,
    "ADAPTER_DIR": checks_adapter_dir,
    "MODEL_ALIASES": checks_aliases,
    "CPU_DEQUANTIZE": checks_cpu_dequantize,
    "MODEL_FAMILY": checks_family,
    "MLX_HOST": checks_host,
    "MLX_PORT": checks_port,
    "MLX_API_KEY": checks_keys,
    "ALLOWED_HOSTS": checks_hosts,
    "ALLOWED_ORIGINS": checks_origins,
    "KEY_REQUESTS_AT_ONCE": checks_requests_at_once,
    "KEY_TOKENS_PER_MINUTE": checks_tokens_per_minute,
    "DRAIN_SECONDS": checks_drain,
    "BATCH": checks_batch,
    "SPECULATION": checks_drafts,
    "IDLE_WORK": checks_idle_work,
    "MAX_QUEUED_REQUESTS": checks_queue,
    "MEMORY_BUDGET": checks_memory,
    "REPLY_TURN_SECONDS": checks_turns,
    "DECODE_STALL_SECONDS": checks_pieces,
    "ENGINE_STALL_SECONDS": checks_stall,
    "MODEL_LOAD_STALL_SECONDS": checks_load_stall,
    "END_WHEN_STUCK": checks_end_when_stuck,
    "GENERATION_WATCHDOG_SECONDS": checks_deadline,
    "REPETITION": checks_repetition,
    "MAX_BODY_BYTES": checks_body_bytes,
    "MAX_CONNECTIONS": checks_connections,
    "HTTP_IDLE_TIMEOUT_SECONDS": checks_idle,
    "HTTP_HEADER_TIMEOUT_SECONDS": checks_header,
    "HTTP_BODY_TIMEOUT_SECONDS": checks_body,
    "HTTP_WRITE_TIMEOUT_SECONDS": checks_write,
    "STREAM_KEEP_ALIVE_SECONDS": checks_keep_alive,
    "STATE_ROOT": checks_state,
    "RESPONSE_STORE_TTL_SECONDS": checks_response_age,
    "RESPONSE_STORE_MAX_BYTES": checks_response_bytes,
    "PROXY": checks_proxy,
    "PROXY_PORT": checks_proxy,
    "PROXY_MODEL_ID": checks_proxy_config(PROXY_MODEL_ID="mine"),
    "PROXY_STARTUP_WAIT_SECONDS": checks_proxy_patience,
    "PROXY_PYTHON": checks_proxy_config(PROXY_PYTHON="/a/python"),
    "BACKEND_SECRET": checks_secret,
    "PROXY_API_KEY": checks_proxy_config(PROXY_API_KEY="sk-1"),
    "PROXY_BACKENDS": checks_backends,
    "MAX_KV_SIZE": checks_window,
    "KV_BITS": checks_kv_bits,
    "KV_GROUP_SIZE": checks_kv_format(KV_GROUP_SIZE="32"),
    "QUANTIZED_KV_START": checks_kv_format(QUANTIZED_KV_START="512"),
    "KV_QUANT_SCHEME": checks_kv_scheme,
    "PROMPT_CACHE": checks_cache,
    "PROMPT_CACHE_MAX_BYTES": checks_cache_bytes,
    "PROMPT_CACHE_BLOCK_SIZE": checks_page_size,
    "INITIAL_CACHE_BLOCKS": checks_initial_blocks,
    "SSD_CACHE_DIR": checks_disk_tier,
    "SSD_CACHE_MAX_SIZE": checks_disk_size,
    "SSD_CACHE_WRITE_AFTER_SECONDS": checks_disk_delay,
    "SSD_CACHE_MAX_WRITE_PER_DAY": checks_disk_wear,
    "PROMPT_CACHE_MAX_ENTRIES_GLOBAL": checks_most_ends,
    "PROMPT_CACHE_TTL_SECONDS": checks_unused_s,
    "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS": checks_transcript_idle,
    "CACHE_CANONICALIZE_TOOL_CONTEXT": checks_canonicalizes,
    "CACHE_SESSION_PARTITIONING": checks_partitions,
    "CACHE_NORM_SAFETY_CHECK": checks_left_out,
    "CACHE_DRIFT_POLICY": checks_drift,
    "CACHE_VLM_IMAGE_IDENTITY": checks_image_identity,
    "IMAGE_MAX_TOKENS": checks_image_tokens,
    "IMAGE_MAX_BYTES": checks_image_limit("IMAGE_MAX_BYTES", "100", "image_file_too_large"),
    "IMAGE_MAX_PIXELS": checks_image_limit("IMAGE_MAX_PIXELS", "1199", "image_too_large"),
    "IMAGE_MAX_COUNT": checks_image_limit("IMAGE_MAX_COUNT", "1", "too_many_images"),
    "IMAGE_URLS": checks_image_urls,
    "VLM_CACHE_DEBUG": checks_image_lines,
    "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT": checks_shortens_writes,
    "PRESERVE_THINKING": checks_kept_reasoning,
    "DEFAULT_TEMPERATURE": checks_greedy(DEFAULT_TEMPERATURE="0"),
    "DEFAULT_TOP_P": checks_greedy(DEFAULT_TOP_P="0.000001"),
    "DEFAULT_TOP_K": checks_greedy(DEFAULT_TOP_K="1"),
    "DEFAULT_MIN_P": checks_greedy(DEFAULT_MIN_P="1"),
    "HLG_SAMPLING": checks_curve(),
    "HLG_WIDTH": checks_curve(HLG_WIDTH="0"),
    "HLG_SHOULDER": checks_curve(HLG_SHOULDER="0.01"),
    "HLG_TOE": checks_curve(HLG_TOE="40"),
    "HLG_PIVOT_OFFSET": checks_curve(HLG_PIVOT_OFFSET="0"),
    "DEFAULT_REPETITION_PENALTY": checks_penalty,
    "DEFAULT_REPETITION_CONTEXT_SIZE": checks_penalty_window,
    "DEFAULT_THINKING": checks_thinking,
    "DEFAULT_MAX_TOKENS": checks_reply_length,
    "ENABLE_REQUEST_LOGGING": checks_traces,
    "LOG_ROOT": checks_traces,
    "LOG_PROMPTS": checks_traced_prompts,
}
"""Checks on a running application that a variable is not only read."""


def test_every_acting_row_is_checked_on_a_running_application():
    assert CHECKS.keys() == set(ACTING)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ACTING)
def test_a_setting_acts(name, models):
    assert name in CHECKS, f"{name} is read, and nothing shows that it acts"
    CHECKS[name](models)


@pytest.mark.thorough
def test_a_request_wins_over_the_environment_which_wins_over_the_author(models):
    greedy = models.greedy
    with running(models.wild) as server:
        assert reply(server) != greedy
        assert reply(server, temperature=0) == greedy
    with running(models.wild, DEFAULT_TEMPERATURE="0") as server:
        assert reply(server) == greedy
        assert reply(server, temperature=5) != greedy


@pytest.mark.skipif(sys.platform == "darwin", reason="Apple silicon has a real model as its default")
def test_without_a_model_path_the_demo_model_is_served():
    assert model_name(Settings()) == str(DEMO_MODEL)
    assert model_name(settings_of(model_path="lab/tiny")) == "lab/tiny"
