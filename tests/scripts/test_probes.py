"""The probes of a running server: healthy on this one, and not on those that fall short."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

import pytest

from tests.conftest import TinyModel
from tests.scripts.conftest import LENGTH, SCRIPTS, Script, Serve
from tests.scripts.fakes import CHARACTERS_PER_TOKEN, Fake, Message, faked, tokens_of
from tests.serving import serving

PROBES = ("pi_like_probe", "probe_session", "test_openclaw_integration", "image_probe")


def rows_of(printed: str) -> list[list[str]]:
    """The cells of each turn's row."""
    return [line.split() for line in printed.splitlines() if re.match(r"\d+ +[\d,]+ ", line)]


# ------------------------------------------------------------------------------------------------- healthy


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_session_of_pi_is_healthy(family: str, script: Script, serve: Serve):
    done = script("pi_like_probe", "--base-url", serve(family, "calls").url, "--turns", "4", *LENGTH)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = rows_of(done.stdout)
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert [row[6] for row in rows[2:]] == ["100.0%"] * 2
    assert all(float(row[7]) >= 0.95 for row in rows[2:])
    assert re.search(r"exact_key_rejected_by_model_lcp +0 +0 +0\n", done.stdout)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.thorough
def test_the_four_scenarios_are_as_expected(family: str, script: Script, serve: Serve):
    done = script("probe_session", "--base-url", serve(family, "calls").url + "/v1", *LENGTH)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(rows_of(done.stdout)) == 3 + 3 + 4 + 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "does", "least"),
    [
        ("qwen3", "calls", "0.95"),
        ("qwen3_5", "calls", "0.95"),
        # A reply without call and chance is nobody's: each turn reads the question that lost its id again.
        ("qwen3", "says", "0.5"),
    ],
)
def test_openclaw_is_served(family: str, does: str, least: str, script: Script, serve: Serve):
    options = ("--turns", "3", "--min-efficiency", least, *LENGTH)
    done = script("test_openclaw_integration", "--base-url", serve(family, does).url, *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(rows_of(done.stdout)) == 2 * 3


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma4_blocks"])
@pytest.mark.long
def test_a_conversation_about_an_image_is_healthy(family: str, script: Script, tiny_vision_model: TinyModel):
    with serving(tiny_vision_model(family)) as server:
        done = script("image_probe", "--base-url", server.url, "--max-tokens", "24", *LENGTH)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = rows_of(done.stdout)
    assert [(row[0], row[-1]) for row in rows] == [("1", "1"), ("2", "0"), ("3", "0")]
    assert all(float(row[5].rstrip("%")) >= 94 for row in rows[1:])
    assert re.search(r"vlm_retreat +0 +0\n", done.stdout)


@pytest.mark.long
def test_clients_that_change_their_spelling_cost_what_the_rules_save(script: Script, serve: Serve):
    server = serve("qwen3", "calls", with_rules=False)
    done = script("probe_session", "--base-url", server.url, "--only", "drift", *LENGTH)
    assert done.returncode == 1
    assert re.search(r"falls short: drift, turn 2: [\d.]+% of ", done.stdout)


# ---------------------------------------------------------------------------------------------- falling short


def test_a_server_that_caches_nothing_falls_short(script: Script):
    with faked(Fake()) as fake:
        done = script("pi_like_probe", "--base-url", fake.url, "--turns", "4", "--context-chars", "24000")
    assert (done.returncode, done.stderr) == (1, "")
    expected = [f"falls short: turn {turn}: 0.0% of its prompt was cached, 97% is healthy" for turn in (3, 4)]
    assert expected == [line for line in done.stdout.splitlines() if line.startswith("falls short")]


def test_an_image_that_is_encoded_again_is_named(script: Script):
    with faked(Fake(looks=[1, 0, 2], cached=lambda prompt: prompt - 1)) as fake:
        done = script("image_probe", "--base-url", fake.url)
    assert (done.returncode, done.stderr) == (1, "")
    assert "falls short: turn 3: the tower looked at 2 images, 0 is healthy\n1 falling short" in done.stdout


def test_an_image_that_is_computed_again_is_named(script: Script):
    with faked(Fake(looks=[1], cached=lambda prompt: int(0.93 * prompt))) as fake:
        done = script("image_probe", "--base-url", fake.url)
    assert done.returncode == 1
    patterns = [rf"turn {turn}: 9[23]\.\d% of its prompt was cached, 94% is healthy" for turn in (2, 3)]
    assert re.search("\n".join(f"falls short: {line}" for line in patterns), done.stdout)


def test_a_turn_that_adds_much_is_judged_by_what_was_known(script: Script):
    with faked(Fake(cached=lambda prompt: int(0.6 * prompt))) as fake:
        done = script("pi_like_probe", "--base-url", fake.url, "--turns", "3", "--context-chars", "100")
    assert done.returncode == 1
    assert re.search(r"turn 3: [67]\d\.\d% of what could be cached was cached, 97% is healthy", done.stdout)


@pytest.mark.sample(2)
@pytest.mark.parametrize("counter", ["exact_key_rejected_by_model_lcp", "vlm_retreat", "hybrid_trim_miss"])
def test_a_counter_that_rises_is_named(counter: str, script: Script):
    perfect = Fake(cached=lambda prompt: prompt - 1, rise={counter: 1})
    with faked(perfect) as fake:
        done = script("pi_like_probe", "--base-url", fake.url, "--turns", "3")
    assert done.returncode == 1
    # A miss of the cold turn is none.
    rise = 2 if counter == "hybrid_trim_miss" else 3
    assert f"falls short: {counter} rose by {rise}, 0 is healthy\n1 falling short" in done.stdout


def test_without_counters_the_rest_is_judged(script: Script):
    with faked(Fake(cached=lambda prompt: prompt - 1, counters=None)) as fake:
        done = script("pi_like_probe", "--base-url", fake.url, "--turns", "3")
    assert done.returncode == 0
    assert "The counters are not judged: " in done.stdout


def test_a_hit_that_passes_a_change_is_named_with_its_scenario(script: Script):
    with faked(Fake(cached=lambda prompt: prompt - 1)) as fake:
        done = script("probe_session", "--base-url", fake.url)
    assert done.returncode == 1
    short = [line for line in done.stdout.splitlines() if line.startswith("falls short")]
    assert [line.split()[2] for line in short] == ["semantic,", "insert,"]
    assert all("and the change stands after" in line for line in short)


def test_a_hit_of_another_session_is_named(script: Script):
    with faked(Fake(cached=lambda prompt: prompt - 1)) as fake:
        done = script("test_openclaw_integration", "--base-url", fake.url, "--turns", "2")
    assert done.returncode == 1
    assert "falls short: another session, session A, turn 1: " in done.stdout
    assert "falls short: another session, session B, turn 2: " in done.stdout


def test_reasoning_that_is_sent_twice_is_named(script: Script):
    reasoning = "I have to look at it first, and at what was said before, then I know. " * 3

    def length(messages: Sequence[Message]) -> int:
        """As if each reasoning stood in the prompt twice."""
        return tokens_of(messages) + str(messages).count(reasoning) * len(reasoning) // CHARACTERS_PER_TOKEN

    with faked(Fake(reasoning=reasoning, content=f"{reasoning} Fine.", length=length)) as fake:
        done = script("test_openclaw_integration", "--base-url", fake.url, "--turns", "2")
    assert done.returncode == 1
    assert (
        "falls short: reasoning twice, session A, turn 1: reasoning stands in the reply's text" in done.stdout
    )
    assert "falls short: reasoning twice, session B, turn 2: the prompt grew by " in done.stdout


# ----------------------------------------------------------------------------------------- nothing to measure


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [*PROBES, "inspect_mlx_cache"])
def test_where_nothing_listens_one_line_says_so(name: str, script: Script):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = script(name, "--base-url", f"http://127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"{name}\.py: .*127\.0\.0\.1:{port}.*refused.*\n", done.stderr)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (Fake(status=500, broken="no\nmodel"), "answers 500: no model"),
        (Fake(broken='data: {"error": {"message": "out of memory"}}\n\n'), "broke the reply off"),
        (Fake(broken='data: {"choices": []}\n\n'), "ended without [DONE]"),
        (Fake(broken="data: [DONE]\n\n"), "has no usage.prompt_tokens"),
        (Fake(broken="data: {nothing\n\n"), "what is no JSON"),
    ],
)
def test_a_reply_that_is_none_ends_the_probe(fake: Fake, problem: str, script: Script):
    with faked(fake):
        done = script("pi_like_probe", "--base-url", fake.url)
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (Fake(), "the server did not look at the image"),
        (Fake(counters=None), "answers 404"),
        (Fake(looks=[1], status=400, broken="it is blind"), "answers 400: it is blind"),
    ],
)
def test_without_a_look_at_the_image_nothing_is_measured(fake: Fake, problem: str, script: Script):
    with faked(fake):
        done = script("image_probe", "--base-url", fake.url)
    assert (done.returncode, problem in done.stderr) == (2, True), done.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:4000", "http://"])
def test_what_is_no_url_is_refused(url: str, script: Script):
    done = script("pi_like_probe", "--base-url", url)
    assert done.returncode == 2
    assert "is no URL such as http://127.0.0.1:4000" in done.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*PROBES, "inspect_mlx_cache", "diff_turns"])
def test_help_tells_what_is_healthy(name: str, script: Script):
    done = script(name, "--help")
    assert done.returncode == 0
    assert "exit status is 1" in " ".join(done.stdout.split())


def test_the_document_names_every_script():
    document = (SCRIPTS.parent / "docs" / "benchmarking.md").read_text(encoding="utf-8")
    section = document.partition("## Probes")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)\.py`", section)) == {*PROBES, "inspect_mlx_cache", "diff_turns"}
