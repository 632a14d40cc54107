"""Frames of a stream: what is encoded once is what would be encoded for each of them."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.protocols.base import FrameTemplate, SSEFrame

LINE_ENDS = [chr(code) for code in range(0x3000) if len(f"a{chr(code)}b".splitlines()) == 2]
"""Characters at which Python ends a line, and httpx with it."""


@given(name=st.text() | st.just("\ue000"), text=st.text())
def test_a_frame_from_a_mould_says_what_it_would_say_by_itself(name: str, text: str):
    frame = FrameTemplate(lambda delta: {"model": name, "delta": {"text": delta}, "end": None}, "grew").frame(
        text
    )
    assert frame.event == "grew"
    assert isinstance(frame.data, str)
    assert json.loads(frame.data) == {"model": name, "delta": {"text": text}, "end": None}


def line_of(frame: SSEFrame) -> Any:
    """The data of a frame, as a client that reads line by line has it."""
    name, data, *rest = httpx.Response(200, content=frame.encoded()).iter_lines()
    assert (name, rest) == ("event: grew", [""])
    return json.loads(data.removeprefix("data: "))


@pytest.mark.parametrize("end", LINE_ENDS, ids=ascii)
def test_what_ends_a_line_for_some_clients_ends_no_event(end: str):
    """LiteLLM's providers lost the text of such an event, and all that its line went on with."""

    def data(text: str) -> dict[str, Any]:
        return {"model": f"m{end}", "delta": {"text": text, f"k{end}": f'{{"a":"{end}"}}'}}

    text = f"é{end}{end}b\\"
    assert line_of(SSEFrame(data(text), "grew")) == data(text)
    assert line_of(FrameTemplate(data, "grew").frame(text)) == data(text)


def test_other_text_is_sent_as_it_is():
    frame = SSEFrame({"text": "日本 é 🐟 \u2027\u202a\u0086"})
    assert frame.encoded() == 'data: {"text":"日本 é 🐟 \u2027\u202a\u0086"}\n\n'.encode()
