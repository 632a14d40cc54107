"""The header that names the model which has answered a request, whatever name the request used."""

from urllib.parse import quote

ANSWERING_MODEL = "x-start-llm-model"
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def in_a_header(name: str) -> str:
    """Return the name of a model as the value of a header: what is not printable ASCII is percent-encoded."""
    return quote(name, safe=_PRINTABLE)
