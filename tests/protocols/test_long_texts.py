"""Long texts are parsed and encoded in steps, and nobody can tell."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from start_llm.core.errors import InvalidRequest
from start_llm.protocols import long_texts
from start_llm.protocols.fields import parse_body
from start_llm.protocols.long_texts import encoded_in_steps, long_text_length, without_long_texts
from start_llm.storage.database_file import encode_json

MB = 2**20
LONG = Random(1).randbytes(MB // 2 + 9).hex()
TEXTS = {
    "base64": LONG,
    "a data URL": f"data:image/png;base64,{LONG}",
    "a JPEG": f"/9j/{LONG}+/==",
    "quotes in front": f'he said "{LONG}',
    "quotes behind": f'{LONG}" he said',
    "quotes around": f'a "{LONG}" b',
    "white space": f"{LONG} ",
    "a line break": f"{LONG}\n{LONG}",
    "a backslash": f"{LONG}\\",
    "other characters": f"{LONG}é日本👩",
    "a surrogate escaped as two": LONG + "\U0001f600" * 9,
    "brackets": f"[{LONG}]",
    "not so long": "x" * (MB - 1),
}


def forms(text: str) -> list[Any]:
    return [
        {"a": text},
        {"a": [text, {"b": text}], "c": text[:5]},
        {"a": {"type": "image", "data": text}, "b": [1, 1.5, None, True, ""], text[:9]: text},
        {"a" + LONG: text},
    ]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.sample(8)
def test_a_body_is_parsed_as_json_parses_it(kind: str):
    for form in forms(TEXTS[kind]):
        for raw in (json.dumps(form), json.dumps(form, ensure_ascii=False), json.dumps(form, indent=2)):
            assert parse_body(raw.encode()).data == form


@pytest.mark.parametrize("kind", ["base64", "a data URL", "a JPEG"])
def test_images_are_taken_out(kind: str):
    short, texts = without_long_texts(json.dumps({"a": TEXTS[kind]}).encode())
    assert texts == [TEXTS[kind]]
    assert len(short) < 100


@pytest.mark.parametrize(
    "kind", ["white space", "a line break", "other characters", "brackets", "not so long"]
)
def test_other_texts_stay(kind: str):
    raw = json.dumps({"a": TEXTS[kind]}).encode()
    assert without_long_texts(raw) == (raw, [])


@pytest.mark.parametrize(
    "raw",
    [
        '{"a": "%s", "b": }',
        '{"a": "%s"',
        '{"a": "%s" "b": 1}',
        '{"a"%s"b": 1}',
        '["a", %s]',
        '{"a": "b"%s}',
        '"%s',
        "%s",
        '{"a": "%s\x01"}',
    ],
)
def test_what_is_no_json_is_none_with_a_long_text_in_it(raw: str):
    with pytest.raises(InvalidRequest):
        parse_body((raw % LONG).encode())


@pytest.mark.thorough
def test_numbers_between_two_texts_stay_numbers():
    form = {"a": 1, "b": [7] * MB, "c": "d", "e": LONG}
    assert parse_body(json.dumps(form, separators=(",", ":")).encode()).data == form


def test_a_body_that_is_deep_and_long_is_refused_or_read():
    raw = b'{"a": "%b", "b": %b}' % (LONG.encode(), b"[" * 50_000 + b"]" * 50_000)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        parse_body(raw)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.sample(8)
def test_what_is_stored_is_encoded_as_before(kind: str):
    for form in (*forms(TEXTS[kind]), TEXTS[kind], [TEXTS[kind]] * 3, {"a": "\ud800", "b": TEXTS[kind]}):
        assert encoded_in_steps((form, None)) == encode_json((form, None))
    assert long_text_length(forms(TEXTS["base64"])[1]) == 2 * len(LONG)


def test_what_is_nested_deeply_is_encoded_as_before():
    deep: Any = LONG
    for _ in range(500):
        deep = [deep]
    assert encoded_in_steps(deep) == encode_json(deep)


def test_no_client_knows_the_words_that_stand_for_texts():
    assert long_texts._WORD not in json.dumps(list(TEXTS.values()))
    assert len(long_texts._WORD) > 32
