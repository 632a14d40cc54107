"""Frames of a stream: what is encoded once is what would be encoded for each of them."""

import json

from hypothesis import given
from hypothesis import strategies as st

from start_llm.protocols.base import FrameTemplate


@given(name=st.text() | st.just("\ue000"), text=st.text())
def test_a_frame_from_a_mould_says_what_it_would_say_by_itself(name: str, text: str):
    frame = FrameTemplate(lambda delta: {"model": name, "delta": {"text": delta}, "end": None}, "grew").frame(
        text
    )
    assert frame.event == "grew"
    assert isinstance(frame.data, str)
    assert json.loads(frame.data) == {"model": name, "delta": {"text": text}, "end": None}
