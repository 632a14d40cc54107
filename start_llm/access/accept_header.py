"""Read the Accept header: tell a browser that opens a page from a program that asks for data."""


def prefers_html(accept: str) -> bool:
    """Return True if the header names text/html itself, and prefers nothing of JSON to it.

    A wildcard does not count: curl and most programs send `*/*`.
    """
    weights = dict(_entry(part) for part in accept.lower().split(","))
    html = weights.get("text/html", 0.0)
    return html > 0 and html >= weights.get("application/json", 0.0)


def _entry(part: str) -> tuple[str, float]:
    """Return a media type and its weight; 0 if the weight is not a number."""
    kind, *parameters = (text.strip() for text in part.split(";"))
    weight = next((text.removeprefix("q=") for text in parameters if text.startswith("q=")), "1")
    try:
        return kind, float(weight)
    except ValueError:
        return kind, 0.0
