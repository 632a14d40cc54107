"""The cache of a running server, as a table."""

from __future__ import annotations

import re

import pytest

from tests.scripts.conftest import Script, Serve
from tests.scripts.fakes import Fake, faked


@pytest.mark.long
def test_the_cache_of_this_server_is_shown(script: Script, serve: Serve):
    server = serve("qwen3", "calls")
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello " * 600}]})
    cache = server.get("/stats")["prompt_cache"]
    done = script("inspect_mlx_cache", "--base-url", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert cache["lookups"] > 0
    for name, number in (("pages", cache["entries"]), ("lookups", cache["lookups"])):
        assert re.search(rf"^{name} +{number:,}\b", done.stdout, re.MULTILINE)
    assert re.search(r"^budget +[\d.,]+ [MG]B$", done.stdout, re.MULTILINE)
    assert re.search(r"^  no_state: kept, but for the state at its end +0 ", done.stdout, re.MULTILINE)
    assert re.search(r"^bound +\d+ ", done.stdout, re.MULTILINE)


def test_what_a_server_does_not_tell_is_left_out(script: Script):
    with faked(Fake()) as fake:
        done = script("inspect_mlx_cache", "--base-url", fake.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "session turn store" not in done.stdout


def test_a_counter_that_has_to_stay_is_named(script: Script):
    with faked(Fake(counters={"exact_key_rejected_by_model_lcp": 3})) as fake:
        done = script("inspect_mlx_cache", "--base-url", fake.url)
    assert done.returncode == 1
    assert "falls short: exact_key_rejected_by_model_lcp is 3, 0 is healthy" in done.stdout


def test_a_page_of_several_servers_is_not_judged(script: Script):
    with faked(Fake(is_router=True)) as fake:
        done = script("inspect_mlx_cache", "--base-url", fake.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{fake.url}/stats is of several servers: --stats-url says whose is meant" in done.stderr


def test_without_stats_one_line_says_so(script: Script):
    with faked(Fake(counters=None)) as fake:
        done = script("inspect_mlx_cache", "--base-url", fake.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{fake.url}/stats answers 404" in done.stderr
