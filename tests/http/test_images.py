"""Images over HTTP, on a model that sees: counted alike everywhere, reused, kept, and refused in time."""

from __future__ import annotations

import json
import resource
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from tests.conftest import TinyModel
from tests.images.files import data_url, empty_png, picture, saved
from tests.serving import AS_JSON, Server, serving

CAT, DOG = (data_url(picture(size=(96, 64), seed=seed)) for seed in (1, 2))
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def seeing(tiny_vision_model: TinyModel) -> Generator[Server]:
    with serving(tiny_vision_model()) as server:
        yield server


def chat_image(url: str) -> Any:
    return {"type": "image_url", "image_url": {"url": url}}


def messages_image(url: str) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"type": "image", "source": source}


def body_of(path: str, *urls: str, text: str = "look ") -> dict[str, Any]:
    match path:
        case "/v1/chat/completions":
            content = [{"type": "text", "text": text}, *map(chat_image, urls)]
            return {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
        case "/v1/messages":
            content = [{"type": "text", "text": text}, *map(messages_image, urls)]
            return {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
        case _:
            parts = [{"type": "input_image", "image_url": url} for url in urls]
            content = [{"type": "input_text", "text": text}, *parts]
            return {"input": [{"role": "user", "content": content}], "max_output_tokens": 3}


def refusal(server: Server, path: str, body: Any) -> tuple[int, Any, float]:
    """Status, error, and seconds."""
    raw = json.dumps(body).encode()
    began = time.perf_counter()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server.url + path, raw, AS_JSON), timeout=60)
    seconds = time.perf_counter() - began
    return refused.value.code, json.load(refused.value)["error"], seconds


def prompt_tokens(server: Server, path: str, body: Any) -> int:
    usage = server.post(path, body)["usage"]
    if path == MESSAGES:
        return usage["input_tokens"] + usage["cache_read_input_tokens"]
    return usage["prompt_tokens" if path == CHAT else "input_tokens"]


@pytest.mark.long
def test_a_prompt_with_images_is_counted_alike_in_every_protocol(seeing: Server):
    counts = {prompt_tokens(seeing, path, body_of(path, CAT, DOG)) for path in (CHAT, MESSAGES, RESPONSES)}
    assert len(counts) == 1
    (count,) = counts
    assert (
        count > prompt_tokens(seeing, CHAT, body_of(CHAT, CAT)) > prompt_tokens(seeing, CHAT, body_of(CHAT))
    )
    counted = seeing.post("/v1/messages/count_tokens", body_of(MESSAGES, CAT, DOG))
    assert counted["input_tokens"] == count
    assert seeing.post("/v1/responses/input_tokens", body_of(RESPONSES, CAT, DOG))["input_tokens"] == count


def test_the_model_is_listed_as_one_that_sees(seeing: Server):
    (model,) = seeing.get("/v1/models")["data"]
    assert model["vision"] is True


def test_turn_two_computes_what_is_new_and_looks_at_nothing_again(seeing: Server):
    body = body_of(CHAT, CAT, text="turns ")
    first = seeing.post(CHAT, body)
    looks = seeing.get("/stats")["images"]["tower_runs"]
    body["messages"] += [first["choices"][0]["message"], {"role": "user", "content": "and?"}]
    usage = seeing.post(CHAT, body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 8
    assert seeing.get("/stats")["images"]["tower_runs"] == looks


def test_the_same_words_with_another_image_share_nothing_behind_its_start(seeing: Server):
    seeing.post(CHAT, body_of(CHAT, CAT, text="swap "))
    usage = seeing.post(CHAT, body_of(CHAT, DOG, text="swap "))["usage"]
    in_front = prompt_tokens(seeing, CHAT, body_of(CHAT, text="swap "))
    assert usage["prompt_tokens_details"]["cached_tokens"] < in_front


def test_an_agent_reads_a_picture_with_its_tool(seeing: Server):
    read = {"name": "Read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    talk: list[Any] = [
        {"role": "user", "content": "What is in a.png?"},
        {"role": "assistant", "content": [call]},
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [messages_image(CAT)]}
    talk.append({"role": "user", "content": [result]})
    body: Any = {"max_tokens": 3, "tools": [read], "messages": talk}
    seen = prompt_tokens(seeing, MESSAGES, body)
    result["content"] = "nothing"
    assert seen > prompt_tokens(seeing, MESSAGES, body)


def test_an_explanation_names_the_message_whose_image_changed(seeing: Server):
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hi"},
        *body_of(CHAT, CAT)["messages"],
    ]
    body = {"messages": talk, "max_tokens": 3, "conversation_id": "mine"}
    seeing.post(CHAT, body)
    body["messages"] = [*talk[:2], *body_of(CHAT, DOG)["messages"]]
    report = seeing.post("/v1/cache/explain", body)
    assert report["divergence"]["message"] == 2
    assert "[image]" in report["divergence"]["computed"]


# -------------------------------------------------------------------------------------------- what is kept


@pytest.mark.thorough
def test_a_response_goes_on_with_its_images_also_after_a_restart(
    tiny_vision_model: TinyModel, tmp_path: Path
):
    folder = str(tmp_path / "ssd")
    with serving(tiny_vision_model(), ssd_folder=folder) as server:
        first = server.post(RESPONSES, body_of(RESPONSES, CAT))
        more = {"input": "and?", "previous_response_id": first["id"], "max_output_tokens": 3}
        before = server.post(RESPONSES, more)["usage"]["input_tokens"]
        assert before > first["usage"]["input_tokens"]
    with serving(tiny_vision_model(), ssd_folder=folder) as server:
        assert server.post(RESPONSES, more)["usage"]["input_tokens"] == before
        items = server.get(f"{RESPONSES}/{first['id']}/input_items")["data"]
        assert items[0]["content"][1]["image_url"] == CAT


@pytest.mark.thorough
def test_the_trace_counts_images_and_shows_none(tiny_vision_model: TinyModel, tmp_path: Path):
    with serving(tiny_vision_model(), traces=True, traces_prompts=True, log_root=str(tmp_path)) as server:
        server.post(CHAT, body_of(CHAT, CAT, DOG, CAT))
    (file,) = tmp_path.glob("*/*.log")
    line = json.loads(file.read_text())
    assert line["images"] == 3
    assert line["prompt"].count("[image]") == 3
    assert CAT.partition(",")[2][:40] not in file.read_text()


# ------------------------------------------------------------------------------------------ what is refused

BAD = {
    "bomb": empty_png(10_000, 10_000, bytes(10**6)),
    "line": empty_png(1, 100_000),
    "half": picture(size=(300, 300))[:20_000],
    "PDF": b"%PDF-1.7\n" * 1000,
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_bad_images_are_refused_at_once_and_leave_nothing_behind(seeing: Server, path: str, kind: str):
    body = body_of(path, data_url(BAD[kind]))
    refusal(seeing, path, body)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, error, seconds = min(
        (refusal(seeing, path, body) for _ in range(3)), key=lambda result: result[2]
    )
    assert status == 400
    assert seconds < 0.5, "a busy machine; alone it takes some milliseconds"
    where = {CHAT: "messages[0].content[1].image_url.url", RESPONSES: "input[0].content[1].image_url"}
    text = error["message"] if path == MESSAGES else error["param"]
    assert where.get(path, "messages.0.content.1.image.source.base64: ") in text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


@pytest.mark.long
def test_a_body_of_forty_megabytes_is_answered(seeing: Server):
    large = data_url(saved(Pillow.effect_noise((3100, 3200), 90).convert("RGB"), "BMP"))
    body = body_of(CHAT, large)
    assert len(json.dumps(body)) > 39e6
    assert prompt_tokens(seeing, CHAT, body) > 100


@pytest.mark.thorough
def test_a_blind_model_says_that_it_sees_nothing(tiny_model: TinyModel):
    with serving(tiny_model("qwen3")) as server:
        assert server.get("/v1/models")["data"][0]["vision"] is False
        status, error, _ = refusal(server, CHAT, body_of(CHAT, CAT))
        assert (status, error["param"]) == (400, "messages[0].content[1]")
        assert "cannot see images" in error["message"]
