"""The places where the requests of a trace diverge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import Script

COUNTS = {
    "messages": 2,
    "prompt_tokens": 1000,
    "cached_tokens": 0,
    "computed_tokens": 1000,
    "stable_prefix_msg_count": 0,
    "bound_messages": 0,
    "miss_reason": "new",
}
GROWN = COUNTS | {
    "messages": 4,
    "prompt_tokens": 1100,
    "cached_tokens": 1010,
    "computed_tokens": 90,
    "stable_prefix_msg_count": 3,
    "bound_messages": 3,
    "miss_reason": None,
}
EDITED = GROWN | {
    "messages": 6,
    "cached_tokens": 400,
    "computed_tokens": 800,
    "stable_prefix_msg_count": 1,
    "miss_reason": "drift",
}

SYSTEM = "<system>Be brief and say what you see.\n" * 10
FIRST = SYSTEM + "<user>How deep is the sea?\n<assistant>"


def trace(folder: Path, *lines: dict[str, Any] | str) -> str:
    path = folder / "logs" / "2026-11-22" / "cache-session-0123456789abcdef.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_a_session_that_grows_is_healthy(script: Script, tmp_path: Path):
    done = script("diff_turns", trace(tmp_path, COUNTS, GROWN))
    assert (done.returncode, done.stderr) == (0, "")
    assert "request 2: prompt 1,100, cached 1,010, computed 90 tokens\n    1 → 2: goes on\n" in done.stdout


def test_counts_tell_which_message_is_new_and_what_it_cost(script: Script, tmp_path: Path):
    done = script("diff_turns", trace(tmp_path, COUNTS, GROWN, EDITED))
    assert done.returncode == 1
    assert "falls short: request 3 message 2 is another one; 700 tokens read again\n" in done.stdout
    assert "messages seen before: 1; the last request had 4" in done.stdout
    assert "miss_reason: drift" in done.stdout


def test_tokens_that_are_read_again_diverge_though_every_message_was_seen(script: Script, tmp_path: Path):
    evicted = GROWN | {"cached_tokens": 0, "computed_tokens": 1100, "miss_reason": "evicted"}
    done = script("diff_turns", trace(tmp_path, COUNTS, evicted))
    assert done.returncode == 1
    assert "request 2 diverges; 1,000 tokens read again" in done.stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["stable_prefix_msg_count", "cached_tokens", "prompt_tokens", "messages"])
def test_a_field_that_is_missing_is_named(name: str, script: Script, tmp_path: Path):
    line = {key: value for key, value in GROWN.items() if key != name}
    done = script("diff_turns", trace(tmp_path, COUNTS, line))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"the line has no {name}\n" in done.stdout


def test_lines_without_any_count_cannot_be_compared(script: Script, tmp_path: Path):
    done = script("diff_turns", trace(tmp_path, {}, {}, "half a li"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 → 2: cannot be compared" in done.stdout
    assert "line 3 is no JSON object" in done.stdout


def test_prompts_tell_the_character(script: Script, tmp_path: Path):
    edited = FIRST.replace("deep", "wide") + "Very.\n<user>Thanks.\n<assistant>"
    done = script("diff_turns", trace(tmp_path, COUNTS | {"prompt": FIRST}, EDITED | {"prompt": edited}))
    place = FIRST.index("deep")
    assert done.returncode == 1
    assert f"1 → 2: diverges at character {place:,} of {len(FIRST):,}" in done.stdout
    assert 'last "deep is the sea?\\n<assistant>"' in done.stdout
    assert 'this "wide is the sea?\\n<assistant>Very' in done.stdout


def test_a_reply_that_was_changed_is_reported_as_such(script: Script, tmp_path: Path):
    reply = "It is three thousand eight hundred metres deep on average, and eleven thousand at its deepest."
    first = COUNTS | {"prompt": FIRST, "reply": reply}
    changed = GROWN | {"prompt": f"{FIRST}{reply.replace('three', 'four')}\n<user>Thanks.\n<assistant>"}
    done = script("diff_turns", trace(tmp_path, first, changed))
    assert done.returncode == 1
    assert f"diverges at character {reply.index('three')} of the reply" in done.stdout


def test_a_request_goes_on_from_the_one_that_it_has_most_in_common_with(script: Script, tmp_path: Path):
    side = COUNTS | {"prompt": "<system>Give it a title.\n<user>How deep is the sea?\n<assistant>"}
    next_one = GROWN | {"prompt": f"{FIRST}Very.\n<user>Thanks.\n<assistant>"}
    done = script("diff_turns", trace(tmp_path, COUNTS | {"prompt": FIRST}, side, next_one))
    assert "    1 → 3: goes on" in done.stdout


def test_a_transient_message_that_is_gone_is_no_divergence(script: Script, tmp_path: Path):
    carrier = "<user><<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nNone.\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\n"
    asked = FIRST.removesuffix("<assistant>")
    first = COUNTS | {"prompt": f"{asked}{carrier}<assistant>", "reply": "Very."}
    then = GROWN | {"prompt": f"{asked}<assistant>Very.\n<user>Thanks.\n{carrier}<assistant>"}
    done = script("diff_turns", trace(tmp_path, first, then))
    assert done.returncode == 0
    assert "goes on from where a transient message of OpenClaw stood" in done.stdout


def test_without_a_file_the_newest_trace_is_taken(script: Script, tmp_path: Path):
    path = trace(tmp_path, GROWN)
    Path(f"{path}.1").write_text(json.dumps(COUNTS) + "\n")
    done = script("diff_turns", "--logs", str(tmp_path / "logs"))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{path}\nrequest 1: prompt 1,000")
    assert "1 → 2: goes on" in done.stdout


@pytest.mark.parametrize("arguments", [["--logs", "nowhere"], ["nowhere.log"]])
def test_without_a_trace_one_line_says_so(arguments: list[str], script: Script):
    done = script("diff_turns", *arguments)
    assert (done.returncode, done.stdout.count("\n") <= 1) == (2, True)
    assert done.stderr.startswith("diff_turns.py: ") and "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1
