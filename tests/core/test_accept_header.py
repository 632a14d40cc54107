"""Who opens a page, and who asks for data."""

import pytest

from start_llm.access.accept_header import prefers_html

CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    "accept", [CHROMIUM, "text/html", "TEXT/HTML ; q=0.5, application/json;q=0.5", "*/*, text/html;level=1"]
)
def test_a_browser_prefers_html(accept: str):
    assert prefers_html(accept)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/*",
        "application/json",
        "application/json, text/html;q=0.9",
        "application/json, text/plain, */*",
        "text/html;q=0",
        "text/html;q=high",
        ",;,=;q=,",
    ],
)
def test_other_clients_do_not(accept: str):
    assert not prefers_html(accept)
