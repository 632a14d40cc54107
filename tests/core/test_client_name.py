"""Which program sent a request, as the terminal names it."""

import pytest

from start_llm.access.client_name import client_name


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("claude-cli/2.0.1 (external, cli)", "claude-cli"),
        ("OpenAI/Python 2.1.0", "OpenAI"),
        ("curl/8.5.0", "curl"),
        ("Mozilla/5.0 (X11; Linux x86_64)", "browser"),
        ("a-name-without-end/1", "a-name-witho"),
        ("\x1b[2J", ""),
        ("", ""),
    ],
)
def test_the_first_word_of_the_user_agent_names_the_program(agent: str, name: str):
    assert client_name({"user-agent": agent}) == name


def test_a_request_without_one_has_no_name():
    assert client_name({}) == ""


def test_a_program_can_say_its_name_beside_the_user_agent_of_its_sdk():
    assert client_name({"user-agent": "OpenAI/JS 6.1", "x-start-llm-program": "Harbour/2"}) == "Harbour"


def test_a_name_is_its_own_name():
    """The proxy names the program to the server."""
    for name in ("claude-cli", "browser", ""):
        assert client_name({"user-agent": name}) == name
