"""Name the program that sent a request, for people who look at the terminal. Proves nothing."""

import re
from collections.abc import Mapping

from start_llm.core.chat import PROGRAM_HEADER

_LONGEST = 12
_PRODUCT = re.compile(r"[\w.+-]+", re.ASCII)
_KNOWN: Mapping[str, str] = {"Mozilla": "browser"}


def client_name(headers: Mapping[str, str]) -> str:
    """Return the first word of a request's `PROGRAM_HEADER` or User-Agent; empty if there is none.

    Args:
        headers: with names in lower case.
    """
    product = _PRODUCT.match(headers.get(PROGRAM_HEADER) or headers.get("user-agent", ""))
    return _KNOWN.get(product[0], product[0][:_LONGEST]) if product else ""
