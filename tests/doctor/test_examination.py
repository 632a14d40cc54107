"""`start_llm doctor`: it calls a healthy server healthy, each time, and finds what was broken on purpose."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import mlx.nn
import pytest

from start_llm.app import App
from start_llm.cache.disk.restore_pace import RestorePace
from start_llm.cache.layers import Layers
from start_llm.doctor import measures
from start_llm.doctor.examination import Extent, examine
from start_llm.doctor.findings import Finding, Findings
from start_llm.doctor.measures import draft_finding
from start_llm.doctor.server import ExaminedServer, ServerFailed, TimedAnswer
from start_llm.telemetry.metrics import DraftMetrics
from tests.cache.test_guards_of_disk import cache_conversation, files
from tests.conftest import TinyModel
from tests.flat_settings import settings_of
from tests.serving import tried_once

FEW = Extent(conversations=3, truth_s=60, restarted_s=30, cold_s=0.1)
"""For what is found whatever the extent; decoding is hardly timed then, and rounding measured once."""
MANY = replace(FEW, conversations=8)
FAMILIES = ["qwen3", "gemma3_text", "qwen3_5"]


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", hidden=128, layers=2)


def examined(model: Path, extent: Extent = FEW, **settings: Any) -> list[Finding]:
    """What is found, without ports that others may hold."""
    findings = Findings(show=lambda _: None)
    ports: dict[str, Any] = {"server_port": 0, "proxy_is_on": False}
    with tried_once(), ExitStack() as patches:
        if extent is FEW:
            patches.enter_context(patch("start_llm.doctor.examination._ROUNDING_WORDS", (120,)))
            patches.enter_context(patch("start_llm.doctor.measures._DECODE_RUNS", 1))
            patches.enter_context(patch("start_llm.doctor.measures._DECODED_TOKENS", 8))
        examine(
            settings_of(**ports, state_root=os.environ["STATE_ROOT"], **settings), model, findings, extent
        )
    return findings.entries


def verdicts(findings: list[Finding]) -> Counter[tuple[str, str]]:
    return Counter((finding.topic, finding.verdict) for finding in findings)


def count(finding: Finding, name: str) -> int:
    number = finding.figures[name]
    assert isinstance(number, int)
    return number


def faults(findings: list[Finding]) -> dict[str, str]:
    return {finding.topic: finding.text for finding in findings if finding.verdict == "fault"}


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_server_has_no_fault_and_leaves_nothing_behind(family: str, tiny_model: TinyModel):
    before = sorted(Path(os.environ["STATE_ROOT"]).rglob("*"))
    findings = examined(tiny_model(family, hidden=128, layers=2), MANY)
    assert faults(findings) == {}
    if family == FAMILIES[-1]:
        again = examined(tiny_model(family, hidden=128, layers=2), MANY)
        assert verdicts(findings) == verdicts(again), "it says the same each time"
    by_topic = {finding.topic: finding for finding in findings}
    truth, restart = by_topic["truth"], by_topic["restart"]
    assert [count(truth, name) for name in ("conversations", "replies", "tokens")] == [8, 24, 192]
    assert count(truth, "restored_tokens") > count(truth, "prompt_tokens") / 2
    assert count(restart, "disk_tokens") > 1000
    shapes = [finding for finding in findings if finding.topic == "reuse"]
    assert len(shapes) == 7
    assert all(count(finding, "cached_tokens") > 400 for finding in shapes)
    kept = sorted(Path(os.environ["STATE_ROOT"]).rglob("*"))
    assert [
        path for path in kept if path not in before and path.name not in ("weights.json", "seal.key")
    ] == []


def test_it_says_whether_drafts_pay_and_what_they_saved():
    without, with_drafts = DraftMetrics(), DraftMetrics(pays=True)
    with_drafts.note(15, 12, saved_s=1.26, rejected_s=0.1)
    assert draft_finding(without).text.startswith("none")
    assert "12 of 15 drafted tokens were right" in draft_finding(with_drafts).text
    assert "1.3 s saved" in draft_finding(with_drafts).text
    assert not draft_finding(without).figures["pays"]


def test_limits_of_the_users_keys_do_not_hold_for_it(tmp_path: Path):
    """They would refuse what the doctor asks, and that is no fault of the server."""
    settings = settings_of(requests_at_once=1, tokens_per_minute=10_000)
    access = ExaminedServer(settings, tmp_path, tmp_path)._settings.access
    assert (access.keys, access.requests_at_once, access.tokens_per_minute) == ((), 0, 0)


def test_one_of_several_replies_at_once_that_fails_is_reported():
    class OneFails:
        def chat(self, messages: list[dict[str, str]], *_: object, **__: object) -> TimedAnswer:
            if messages[-1] == measures._user("reply 2"):
                raise ServerFailed("a reply breaks off")
            return TimedAnswer({}, prompt=9, cached=0, completion=9, ttft_s=0.1, decode_s=0.1)

    with pytest.raises(ServerFailed, match="breaks off"):
        measures._together(cast("ExaminedServer", OneFails()), {})


def test_a_server_that_hangs_up_fails(tmp_path: Path):
    server = ExaminedServer(settings_of(), tmp_path, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server._app = cast("App", SimpleNamespace(port=listener.getsockname()[1]))

        def hang_up() -> None:
            listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(ServerFailed, match="not answered to its end"):
            server.tokens([])


@pytest.mark.long
def test_pages_that_come_back_changed_are_found(model: Path, monkeypatch):
    whole = Layers.assemble

    def assemble_damaged(self: Layers, *given: Any, **options: Any) -> Any:
        caches = whole(self, *given, **options)
        caches[1].values[..., :64, :] = 0
        return caches

    monkeypatch.setattr(Layers, "assemble", assemble_damaged)
    assert "of the reply is off by" in faults(examined(model, MANY))["truth"]


@pytest.mark.long
@pytest.mark.parametrize("wrong", [lambda offset: offset + 1 if offset else 0, lambda offset: 0])
def test_wrong_positions_are_found(model: Path, monkeypatch, wrong: Callable[[Any], Any]):
    right = mlx.nn.RoPE.__call__
    monkeypatch.setattr(
        mlx.nn.RoPE,
        "__call__",
        lambda self, x, offset=0, **more: right(
            self, x, offset=wrong(offset) if isinstance(offset, int) else offset, **more
        ),
    )
    assert "positions (RoPE)" in faults(examined(model))["network"]


@pytest.mark.long
def test_positions_that_are_wrong_after_a_restore_alone_are_found(model: Path, monkeypatch):
    whole = Layers.assemble

    def moved(self: Layers, *given: Any, **options: Any) -> Any:
        caches = whole(self, *given, **options)
        for cache in caches:
            cache.keys = mx.roll(cache.keys, 1, 2)
        return caches

    monkeypatch.setattr(Layers, "assemble", moved)
    assert set(faults(examined(model, MANY))) >= {"truth"}


@pytest.mark.long
def test_a_file_that_the_disk_changed_between_two_starts_is_found(model: Path, monkeypatch):
    stop = ExaminedServer.stop

    def stop_and_damage(self: ExaminedServer) -> None:
        stop(self)
        for path in Path(os.environ["STATE_ROOT"]).glob("doctor-*/pages/pages/**/*.safetensors"):
            content = bytearray(path.read_bytes())
            content[-9] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr(ExaminedServer, "stop", stop_and_damage)
    texts = faults(examined(model))
    assert "not read as they were written" in texts["disk tier"]
    assert "nothing came back from the disk" in texts["restart"]


@pytest.mark.long
def test_a_disk_that_is_slower_than_computing_is_reported_and_no_fault(model: Path, monkeypatch):
    monkeypatch.setattr(RestorePace, "is_slower", lambda *_: True)
    by_topic = {finding.topic: finding for finding in examined(model)}
    assert by_topic["restart"].verdict == "fine"
    assert by_topic["restart"].text.endswith("some were computed, which is faster than this disk")


@pytest.mark.long
def test_a_damaged_file_of_the_user_is_found_and_left_alone(model: Path, tmp_path: Path):
    cache_conversation(tmp_path, has_state=True)
    assemble_damaged = files(tmp_path)[1]
    content = bytearray(assemble_damaged.read_bytes())
    content[-9] ^= 1
    assemble_damaged.write_bytes(content)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    by_topic = {finding.topic: finding for finding in examined(model, ssd_folder=str(tmp_path))}
    assert by_topic["cached files"].verdict == "fault"
    assert by_topic["cached files"].figures["hurt"] == 1
    assert by_topic["truth"].verdict == "fine"
    assert {path: path.read_bytes() for path in files(tmp_path)} == before


@pytest.mark.long
def test_without_a_prompt_cache_reuse_is_not_judged(model: Path):
    counts = verdicts(examined(model, cache_is_on=False))
    assert counts["reuse", "skipped"] == 1
    assert "restart" not in {topic for topic, _ in counts}
    assert counts["truth", "fine"] == 1


@pytest.mark.long
def test_pages_with_fewer_bits_are_no_fault(model: Path):
    by_topic = {finding.topic: finding for finding in examined(model, MANY, kv_bits=4, kv_quant_start=0)}
    assert by_topic["truth"].verdict == "look"
    assert "KV_BITS" in by_topic["truth"].text


@pytest.mark.thorough
def test_a_server_that_does_not_start_is_a_finding(model: Path):
    findings = examined(model, memory=1000)
    assert "MEMORY_BUDGET" in faults(findings)["server"]
    assert not list(Path(os.environ["STATE_ROOT"]).glob("doctor-*"))


def test_a_folder_that_cannot_be_loaded_is_named_without_its_path(model: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "tokenizer.json").write_text("{")
    text = faults(examined(broken))["server"]
    assert "broken" in text
    assert str(tmp_path) not in text
