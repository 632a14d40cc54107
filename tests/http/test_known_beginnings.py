"""After a start, what the agents that were used last begin with is in memory before they ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.http.test_conversations import TOOLS
from tests.http.test_idle_work import FAMILIES, hurried, idle, until
from tests.serving import Server, serving

pytestmark = pytest.mark.usefixtures(hurried.__name__)

RULES = "You are an agent, and work on a project with many files. " * 40
OTHER_RULES = "You answer questions about the weather, and nothing else. " * 40
RECEIPT = {"x-start-llm-receipt": "1"}


def ask(server: Server, question: str, rules: str = RULES, **more: Any) -> dict[str, Any]:
    """Begin a conversation, and return the receipt."""
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0, "tools": TOOLS, **more}
    return server.post("/v1/chat/completions", body, RECEIPT)["usage"]["receipt"]


def computed(receipt: dict[str, Any]) -> int:
    return receipt["read"] + receipt["told"]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_turn_of_a_known_agent_reads_only_what_is_new(
    family: str, tiny_model: TinyModel, tmp_path: Path
):
    folder = tiny_model(family, hidden=64, layers=4)
    kept: dict[str, Any] = {"idle_work": "on", "ssd_folder": str(tmp_path), "drain_s": 10}
    with serving(folder, **kept) as server:
        ask(server, "Read the file.")
        new = computed(ask(server, "Look at it."))
    with serving(folder, **kept) as server:
        until(lambda: idle(server)["works"] >= 1)
        stats = idle(server)
        first = ask(server, "Begin with another one.")
        used = idle(server)["used_tokens"]
        replaced = server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0},
        )
    assert stats["restored_tokens"] > 0.9 * first["prompt_tokens"] - 64
    assert first["from_disk"] == 0, "it is in memory"
    assert computed(first) <= new + 12
    assert used >= 0.9 * stats["restored_tokens"]
    assert replaced["choices"]


@pytest.mark.thorough
def test_what_the_disk_has_lost_is_computed(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model(hidden=64, layers=2)
    kept: dict[str, Any] = {"idle_work": "on", "ssd_folder": str(tmp_path), "drain_s": 10}
    with serving(folder, **kept) as server:
        ask(server, "Read the file.")
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.relative_to(tmp_path).parts[0] in ("pages", "states"):
            path.unlink()
    with serving(folder, **kept) as server:
        until(lambda: idle(server)["works"] == 1)
        assert idle(server)["read_tokens"] > 300
        assert computed(ask(server, "Go on.")) < 60


@pytest.mark.long
def test_of_several_agents_the_ones_used_last_are_read(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model(hidden=64, layers=2)
    kept: dict[str, Any] = {"idle_work": "on", "ssd_folder": str(tmp_path), "drain_s": 10}
    with serving(folder, **kept) as server:
        for number in range(6):
            ask(server, "Read the file.", f"You are number {number}. {RULES}")
    with serving(folder, **kept) as server:
        until(lambda: idle(server)["works"] == 4)
        assert ask(server, "Hi", f"You are number 5. {RULES}")["from_disk"] == 0
        assert ask(server, "Hi", f"You are number 0. {RULES}")["from_memory"] < 100


@pytest.mark.thorough
def test_nothing_is_read_after_a_start_on_battery_or_where_it_is_off(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model(hidden=64, layers=2)
    kept: dict[str, Any] = {"ssd_folder": str(tmp_path), "drain_s": 10}
    with serving(folder, idle_work="on", **kept) as server:
        ask(server, "Read the file.")
    with serving(folder, idle_work="off", **kept) as server:
        first = ask(server, "Go on.")
        assert idle(server)["works"] == 0
    assert first["from_disk"] > 200


@pytest.mark.thorough
def test_a_beginning_is_for_its_own_key_alone(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model(hidden=64, layers=2)
    kept: dict[str, Any] = {"idle_work": "on", "ssd_folder": str(tmp_path), "drain_s": 10}
    ann, ben = ({"Authorization": f"Bearer {key}", **RECEIPT} for key in ("ann", "ben"))
    body = {
        "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": "Hi"}],
        "max_tokens": 3,
    }
    with serving(folder, **kept) as server:
        server.post("/v1/chat/completions", body, ann)
    with serving(folder, **kept) as server:
        until(lambda: idle(server)["works"] == 1)
        of_ben = server.post("/v1/chat/completions", body, ben)["usage"]["receipt"]
        of_ann = server.post("/v1/chat/completions", body, ann)["usage"]["receipt"]
    assert (of_ben["from_memory"], of_ben["from_disk"]) == (0, 0)
    assert of_ann["from_memory"] > 0.9 * of_ann["prompt_tokens"] - 64


def talk(
    server: Server,
    name: str,
    turns: int,
    messages: list[dict[str, Any]],
    headers: Mapping[str, str] = RECEIPT,
) -> dict[str, Any]:
    """Go on with a conversation for so many turns, and return the last receipt."""
    receipt: dict[str, Any] = {}
    for number in range(turns):
        messages.append({"role": "user", "content": f"{name}: this is step {number} of many."})
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "session_id": name}
        reply = server.post("/v1/chat/completions", body, headers)
        messages.append(reply["choices"][0]["message"])
        receipt = reply["usage"]["receipt"]
    return receipt


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_that_comes_back_often_is_in_memory_after_a_start(
    family: str, tiny_model: TinyModel, tmp_path: Path
):
    folder = tiny_model(family, hidden=64, layers=4)
    kept: dict[str, Any] = {"idle_work": "on", "ssd_folder": str(tmp_path), "drain_s": 10}
    conversations: dict[str, list[dict[str, Any]]] = {
        name: [{"role": "system", "content": f"{name} {RULES}"}] for name in "abcdef"
    }
    with serving(folder, **kept) as server:
        for name, messages in conversations.items():
            talk(server, name, 1 + 3 * (name == "a"), messages)
    with serving(folder, **kept) as server:
        until(lambda: idle(server)["works"] >= 5)
        stats = idle(server)
        receipt = talk(server, "a", 1, conversations["a"])
        used = idle(server)["used_tokens"]
    assert receipt["from_disk"] <= 64, "a state near the end may be on the disk alone"
    assert receipt["from_memory"] > 300
    assert computed(receipt) < 80
    assert used > 300
    assert stats["read_tokens"] < 0.1 * stats["restored_tokens"] + 64


@pytest.mark.thorough
def test_a_conversation_is_read_for_its_own_key_alone(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model(hidden=64, layers=2)
    kept: dict[str, Any] = {"idle_work": "on", "ssd_folder": str(tmp_path), "drain_s": 10}
    ann, ben = ({"Authorization": f"Bearer {key}", **RECEIPT} for key in ("ann", "ben"))
    of_ann: list[dict[str, Any]] = [{"role": "system", "content": RULES}]
    with serving(folder, **kept) as server:
        talk(server, "a", 3, of_ann, ann)
        talk(server, "b", 1, [{"role": "system", "content": RULES}], ben)
    with serving(folder, **kept) as server:
        until(lambda: idle(server)["works"] >= 3)
        receipts = [talk(server, "b", 1, [*of_ann], key) for key in (ben, ann)]
    by_ben, by_ann = (receipt["from_memory"] + receipt["from_disk"] for receipt in receipts)
    assert by_ben < by_ann - 64, "of the system text alone"


@pytest.mark.thorough
def test_a_receipt_tells_what_was_read_ahead(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model(hidden=64, layers=2)
    kept: dict[str, Any] = {"idle_work": "on", "ssd_folder": str(tmp_path), "drain_s": 10}
    with serving(folder, **kept) as server:
        assert ask(server, "Read the file.")["read_ahead"] == 0
    with serving(folder, **kept) as server:
        until(lambda: idle(server)["works"] >= 1)
        first, second = (ask(server, question) for question in ("Go on.", "Begin."))
        assert first["read_ahead"] == idle(server)["used_tokens"] > 300
    assert second["read_ahead"] == 0, "it was used already"
    restored, read = first["ranges"]
    assert (restored["source"], restored["end"], read["source"]) == ("restored", first["from_memory"], "read")
    common = min(first["ranges"][0]["end"], second["ranges"][0]["end"])
    assert common > 300
