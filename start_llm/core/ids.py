"""Names that nobody else has."""

from __future__ import annotations

import re
import secrets
import string

RANDOM_LENGTH = 24
_ALPHABET = string.ascii_letters + string.digits


_PUNCTUATION = re.compile(r"[\W_]+")


def random_name() -> str:
    """24 letters and digits, 142 bits of chance: clients drop other characters from ids."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(RANDOM_LENGTH))


def bare_id(given: str) -> str:
    """Without the punctuation that some clients take out."""
    return given if given.isalnum() else _PUNCTUATION.sub("", given)


def name_in(given: str | None) -> str:
    """The last 24 letters and digits of an id: its random name, if it is one of ours."""
    return bare_id(given or "")[-RANDOM_LENGTH:]
