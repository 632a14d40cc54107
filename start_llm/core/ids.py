"""Random names, unique for practical purposes."""

import re
import secrets
import string

RANDOM_LENGTH = 24
_ALPHABET = string.ascii_letters + string.digits


_PUNCTUATION = re.compile(r"[\W_]+")


def random_name() -> str:
    """Return 24 random letters and digits, 142 bits. Clients remove other characters from ids."""
    number = secrets.randbelow(
        len(_ALPHABET) ** RANDOM_LENGTH
    )  # asks the system once, not for each character
    characters: list[str] = []
    for _ in range(RANDOM_LENGTH):
        number, place = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[place])
    return "".join(characters)


def bare_id(given: str) -> str:
    """Return the id without the punctuation that some clients remove."""
    return given if given.isalnum() else _PUNCTUATION.sub("", given)


def name_in(given: str | None) -> str:
    """Return the last 24 letters and digits of an id: its random name if this server made it."""
    return bare_id(given or "")[-RANDOM_LENGTH:]
