"""The lines of the terminal."""

from __future__ import annotations

import io

from start_llm.core.events import Prefilling, Restored, Usage
from start_llm.core.images import Image, ImageRun, ImageSpan
from start_llm.telemetry.terminal import RequestLine, Terminal
from tests.images.fakes import image, vision_of


def printed(write) -> str:
    stream = io.StringIO()
    write(Terminal(stream))
    return stream.getvalue()


def line(session: str | None = None, began: float = 0.0) -> RequestLine:
    return RequestLine(session=session, prompt_tokens=1234, began=began)


def image_run(one: Image) -> ImageRun:
    vision = vision_of("sees_everywhere")
    assert vision
    return vision.expand(one)


def test_a_finished_request_is_one_line_with_its_figures():
    request = line("conversation-42")
    request.first_text = 1.5
    text = printed(lambda terminal: terminal.finished(request, "stop", Usage(1234, 1000, 7)))
    assert text.count("\n") == 1
    for figure in ("ersation-42", "in 1,234", "cached 1,000", "out 7", "ttft 1.50 s", "tok/s", "stop"):
        assert figure in text


def test_a_request_under_adapters_says_so():
    request = line()
    assert "adapter" not in printed(lambda terminal: terminal.finished(request, "stop", None))
    request.adapter = "a+b"
    assert "stop  adapter a+b" in printed(lambda terminal: terminal.finished(request, "stop", None))


def test_a_request_that_never_spoke_has_no_times():
    text = printed(lambda terminal: terminal.finished(line(), "cancelled", None))
    assert "ttft -" in text
    assert "cancelled" in text


def test_a_session_id_cannot_move_the_cursor():
    text = printed(lambda terminal: terminal.finished(line("a\x1b[2J\nforged"), "stop", None))
    assert "\x1b" not in text
    assert text.count("\n") == 1


def test_a_short_prefill_is_not_reported_and_a_long_one_not_too_often():
    request = line(began=-100.0)
    progress = Prefilling(500, 1000)
    text = printed(lambda terminal: [terminal.prefilling(request, progress) for _ in range(5)])
    assert text.count("prefill 500/1,000 (50%)") == 1
    recent = line(began=1e12)
    assert printed(lambda terminal: terminal.prefilling(recent, progress)) == ""


def test_images_are_shown_with_their_places_and_what_became_of_them():
    """By names that say nothing of what is to be seen."""
    runs = [image_run(image(name)) for name in ("a", "b", "c")]
    spans = [ImageSpan(start, start + len(run), run) for start, run in zip((2, 20, 40), runs, strict=True)]
    request = line("one")
    request.beginning, request.images = (7, 8, *runs[0].tokens), spans
    text = printed(lambda terminal: terminal.images(request, Restored(22)))
    first, *shown = text.splitlines()
    assert f"begins 7 8 {runs[0].tokens[0]:08x}" in first
    assert [one.partition("image ")[2] for one in shown] == [
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
