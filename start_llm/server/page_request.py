"""What pages are made of: the request for one, and the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from start_llm.core.chat import Json
from start_llm.protocols.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A request that is answered without a reply of tokens.

    Attributes:
        fields: of its body, or of its query.
        headers: with lower-case names.
        name: what stands for `{id}` in its path, decoded.
    """

    tenant: bytes = b""
    fields: Fields = field(default_factory=lambda: Fields({}))
    headers: Mapping[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A page that is not JSON: its body, and its headers besides the length."""

    body: bytes
    headers: Mapping[str, str]


def members(record: object, names: str) -> dict[str, Json]:
    """Return attributes of a record as members of an object.

    Args:
        names: of the members, between blanks; `bytes=nbytes` is the attribute `nbytes` under another name.
    """
    pairs = (name.partition("=") for name in names.split())
    return {member: getattr(record, attribute or member) for member, _, attribute in pairs}


type Page = tuple[int, Mapping[str, Json]]
"""A status code and a JSON body."""
