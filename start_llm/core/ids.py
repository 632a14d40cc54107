"""Names that nobody else has."""

from __future__ import annotations

import secrets
import string

RANDOM_LENGTH = 24
_ALPHABET = string.ascii_letters + string.digits


def random_name() -> str:
    """24 letters and digits, 142 bits of chance: clients drop other characters from ids."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(RANDOM_LENGTH))
