"""The lines of the terminal."""

from __future__ import annotations

import io
import re
import time
from typing import Any

from start_llm.core.events import Restored
from start_llm.core.images import Image, ImageRun, ImageSpan
from start_llm.telemetry.activity import Refusal
from start_llm.telemetry.request_record import RequestFacts, RequestRecord, session_name
from start_llm.telemetry.terminal import Terminal
from tests.images.fakes import image, vision_of


def printed(write: Any) -> str:
    stream = io.StringIO()
    write(Terminal(stream))
    return stream.getvalue()


def facts(**changes: Any) -> RequestFacts:
    fields: dict[str, Any] = {
        "id": "req_1",
        "tenant": b"",
        "endpoint": "/v1/chat/completions",
        "model": "m",
        "session": "digest",
        "name": "ersation-42",
        "session_source": "client",
        "prompt_tokens": 1234,
        "client": "claude-cli",
    }
    return RequestFacts(**fields | changes)


def finished(asked: RequestFacts | None = None, **changes: Any) -> RequestRecord:
    """A request that was read for half a second, one second after it came, and written for two."""
    fields: dict[str, Any] = {"ending": "stop", "restored": Restored(1000, at=101.0), "written": 7}
    fields |= {"decoded": 6, "first_text": 101.5, "last_text": 103.5, "left": 103.5}
    return RequestRecord(asked or facts(), arrived=100.0, **fields | changes)


def refusal(reason: str = "no", **changes: Any) -> Refusal:
    fields: dict[str, Any] = {"tenant": None, "method": "POST", "path": "/v1/messages", "status": 403}
    return Refusal(**fields | changes, reason=reason)


def image_run(image: Image) -> ImageRun:
    vision = vision_of("sees_everywhere")
    assert vision
    return vision.expand(image)


def test_a_finished_request_is_one_line_that_says_who_asked_and_what_was_done():
    """234 tokens were computed in half a second; those of the cache are no speed."""
    text = printed(lambda terminal: terminal.finished(finished()))
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d chat +claude-cli +digest ersation-42 +complete +1,000 cached +234 read +468/s"
        r" +7 written +3.0/s +first +1.50 s\n",
        text,
    )


def test_a_line_says_why_a_conversation_was_read_again_and_of_others_nothing():
    why = "message 2 (user) says something else"
    text = printed(lambda terminal: terminal.finished(finished(again=9, reason=why, continues=True)))
    assert text.endswith(f"read 9 tokens again: {why}\n")
    assert text.count("\n") == 1
    assert "again" not in printed(lambda terminal: terminal.finished(finished(again=9, reason=why)))


def test_one_token_is_a_token():
    line = printed(lambda terminal: terminal.finished(finished(again=1, reason="x", continues=True)))
    assert line.endswith("read 1 token again: x\n")


def test_a_request_under_adapters_says_so():
    assert "adapter" not in printed(lambda terminal: terminal.finished(finished()))
    under = finished(facts(adapter="a+b"))
    assert printed(lambda terminal: terminal.finished(under)).endswith("  adapter a+b\n")


def test_a_request_that_never_spoke_has_no_times():
    never = finished(ending="cancelled", written=0, first_text=None, last_text=None, decoded=0)
    text = printed(lambda terminal: terminal.finished(never))
    assert re.search(r"cancelled .* 0 written +first +-$", text)
    assert "/s" not in text


def test_what_a_client_says_cannot_move_the_cursor():
    evil = "a\x1b[2J\nforged"
    assert session_name(evil) == "a?[2J?forged"
    text = printed(lambda terminal: terminal.refused(refusal(evil, path=f"/{evil}", method=evil)))
    assert "\x1b" not in text
    assert text.count("\n") == 1


def test_progress_is_reported_now_and_then_and_its_speed_is_that_of_computed_tokens():
    running = RequestRecord(facts(prompt_tokens=2000))
    running.note_restored(Restored(1000))
    assert printed(lambda terminal: terminal.progress(running)) == "", "it has just begun"
    running.note_restored(Restored(1000, at=time.perf_counter() - 5))
    running.done = 1500
    text = printed(lambda terminal: [terminal.progress(running) for _ in range(5)])
    assert re.fullmatch(r".* reading 1,500 of 2,000 \(75%\) (99\.\d|100\.0)/s\n", text)


def test_a_long_reply_shows_that_it_is_written():
    running = RequestRecord(facts())
    running.note_restored(Restored(0))
    running.note_text(1, time.perf_counter())
    assert printed(lambda terminal: terminal.progress(running)) == ""
    running.written, running.first_text = 9001, time.perf_counter() - 90
    text = printed(lambda terminal: [terminal.progress(running) for _ in range(5)])
    assert re.fullmatch(r".* 9,001 written so far (99\.\d|100\.0)/s\n", text)


def test_a_refused_request_is_a_line_with_status_and_reason():
    text = printed(lambda terminal: terminal.refused(refusal("The key is wrong.", status=401)))
    assert re.fullmatch(r"\d\d:\d\d:\d\d refused +401 POST /v1/messages  The key is wrong\.\n", text)


def test_a_scanner_cannot_fill_the_terminal():
    stream = io.StringIO()
    terminal = Terminal(stream)
    for number in range(500):
        terminal.refused(refusal("x" * 5000, path=f"/{number}"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert max(map(len, lines)) < 250
    assert "many more" in lines[-1]


def test_after_a_flood_the_number_of_unreported_refusals_is_reported():
    terminal = Terminal(io.StringIO())
    reports = [terminal._refusals.parts(refusal(), now) for now in (*[0.0] * 50, 61.0, 62.0)]
    assert [len(lines) for lines in reports] == [1] * 10 + [1] + [0] * 39 + [2, 1]
    assert reports[-2][0] == ("40 more requests, which were not shown",)


def test_images_are_shown_with_their_places_and_what_became_of_them():
    """By names that say nothing of what is to be seen."""
    runs = [image_run(image(name)) for name in ("a", "b", "c")]
    spans = [ImageSpan(start, start + len(run), run) for start, run in zip((2, 20, 40), runs, strict=True)]
    beginning = (7, 8, *runs[0].tokens)
    text = printed(lambda terminal: terminal.images(facts(), beginning, spans, Restored(22)))
    first, *shown = text.splitlines()
    assert f"begins 7 8 {runs[0].tokens[0]:08x}" in first
    assert [line.partition("image ")[2] for line in shown] == [
        f"{runs[0].tokens[0]:08x} at 2 to 8  restored",
        f"{runs[1].tokens[0]:08x} at 20 to 26  cut",
        f"{runs[2].tokens[0]:08x} at 40 to 46  computed",
    ]


def test_names_and_values_are_aligned():
    text = printed(lambda terminal: terminal.summary([("model", "m"), ("context", "8")]))
    assert text == "  model    m\n  context  8\n"


def test_a_closed_terminal_does_not_stop_the_server():
    stream = io.StringIO()
    terminal = Terminal(stream)
    stream.close()
    terminal.say("nobody reads this")
