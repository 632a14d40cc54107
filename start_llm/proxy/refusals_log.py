"""Keep requests that were refused out of the proxy's log, but for a line.

LiteLLM logs each with two tracebacks. The client has been told what is wrong with its request.
"""

from __future__ import annotations

import logging

_LOGGERS = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")
_LONGEST = 300


def shorten_refusals() -> None:
    """Let LiteLLM log a line for each refused request. What failed otherwise keeps its traceback."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_shortened)


def _shortened(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        message = " ".join(str(error).split())
        record.msg, record.args = "A request was refused with %d: %s", (status, message[:_LONGEST])
        record.exc_info = record.exc_text = None
    return True
