"""The status page: one HTML document with its style and script, and the headers that lock it down."""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from start_llm.server.page_request import Document

_FOLDER = Path(__file__).with_name("page")
_STYLE, _SCRIPT = "/* page.css */", "/* page.js */"
_KEY_IS_ASKED = 'data-asks-key=""'
"""Places in `page.html`."""


@cache
def status_page(*, asks_key: bool) -> Document:
    """Return the page. It holds no data: its script asks `/activity` for everything.

    Args:
        asks_key: the server asks for keys, so the page asks its user for one before it asks the server.
    """
    html, style, script = (
        (_FOLDER / f"page.{kind}").read_text(encoding="utf-8").strip() for kind in ("html", "css", "js")
    )
    html = html.replace(_KEY_IS_ASKED, f'data-asks-key="{str(asks_key).lower()}"')
    body = html.replace(_STYLE, style).replace(_SCRIPT, script)
    return Document(body.encode(), _headers(style, script))


def _headers(style: str, script: str) -> Mapping[str, str]:
    policy = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes markup, whatever the script does
        "trusted-types 'none'",
    )
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
        "Vary": "Accept",
    }


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
