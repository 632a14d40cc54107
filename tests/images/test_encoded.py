"""Base64 as clients write it."""

from __future__ import annotations

import threading
import time
from base64 import b64encode, encodebytes
from random import Random

import pytest

from start_llm.images.encoded import _CHUNK, decode_base64
from start_llm.images.problems import ImageProblem

MOST = 10 * 2**20


LENGTHS = [1, 2, 3, 4, 100, 10**6, *(3 * _CHUNK // 4 + more for more in (-1, 0, 1))]
WRONG = ["A", "AAA", "AA=", "AA==AAAA", "A A A", "####", "äAAA", "AA-_", "=", "====", "%41%41==", "\ud800AAA"]


@pytest.mark.parametrize("length", LENGTHS)
def test_what_was_encoded_is_decoded(length: int):
    data = Random(length).randbytes(length)
    text = b64encode(data).decode()
    assert decode_base64(text, 0, MOST) == data
    assert decode_base64(f"data:image/png;base64,{text}", 22, MOST) == data
    assert decode_base64(encodebytes(data).decode(), 0, MOST) == data
    assert decode_base64(f" {text}\r\n", 0, MOST) == data


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_base64_is_said_to_be_none(text: str):
    with pytest.raises(ImageProblem) as refused:
        decode_base64(text, 0, MOST)
    assert refused.value.code == "invalid_base64_image"


def test_padding_between_chunks_is_wrong():
    text = "A" * (_CHUNK - 1) + "=" + "AAAA"
    with pytest.raises(ImageProblem) as refused:
        decode_base64(text, 0, MOST)
    assert refused.value.code == "invalid_base64_image"


@pytest.mark.parametrize("text", ["", " \n", "data:,"])
def test_nothing_is_empty(text: str):
    with pytest.raises(ImageProblem) as refused:
        decode_base64(text, len(text) if ":" in text else 0, MOST)
    assert refused.value.code == "empty_image_file"


def test_line_breaks_do_not_count_as_bytes_of_an_image():
    data = Random(1).randbytes(10_000)
    assert decode_base64(encodebytes(data).decode(), 0, len(data)) == data


def test_what_is_too_long_is_not_decoded():
    text = "####" * 2**20
    with pytest.raises(ImageProblem) as refused:
        decode_base64(text, 0, 2**20)
    assert refused.value.code == "image_file_too_large"
    with pytest.raises(ImageProblem) as refused:
        decode_base64("AAAA", 0, 2)
    assert refused.value.message == "image exceeds 1.90735e-06 MB maximum: 3 bytes > 2 bytes"


def test_other_threads_go_on_while_a_large_image_is_decoded():
    text = b64encode(bytes(30 * 2**20)).decode()
    turns, is_over = list[float](), threading.Event()

    def take_turns() -> None:
        while not is_over.is_set():
            time.sleep(0.0005)
            turns.append(time.perf_counter())

    other = threading.Thread(target=take_turns)
    other.start()
    decode_base64(text, 0, 2**26)
    is_over.set()
    other.join()
    # Decoded at once, the other thread would have one turn in 50 to 200 ms.
    assert len(turns) >= 5
