"""Reads the images of a request, from the forms in which the three protocols have them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidImage
from start_llm.core.images import Image
from start_llm.images.door import ImageDoor
from start_llm.images.fetching import PATIENCE_S
from start_llm.images.problems import ImageProblem, are_too_many, is_a_file, is_missing, is_unseen
from start_llm.protocols.fields import Fields

IMAGE_PARTS = ("image_url", "input_image", "image")
UNSEEN_IMAGE = is_unseen().note

type _Source = tuple[str, str, bool]
"""What a part holds of its image: the path of the field in the part, base64 or a URL, whether it is a URL."""
type Refuse = Callable[[Fields, str, ImageProblem], InvalidImage]
"""Returns the error for an image in a part, in the words of a protocol.

The second argument is the path of the field in the part; empty if it is the part itself.
"""


def refuse_as_openai(part: Fields, name: str, problem: ImageProblem) -> InvalidImage:
    path = part.path_of(name) if name else part.path
    return InvalidImage(f"'{path}' {problem.predicate}.", param=path, code=problem.code)


@dataclass(slots=True)
class ImageParser:
    """Reads the images of one request, and collects them.

    Attributes:
        door: None for a model that sees no images.
        images: those that were read, by their digests.
    """

    door: ImageDoor | None
    tenant: bytes
    refuse: Refuse = refuse_as_openai
    images: dict[bytes, Image] = field(default_factory=dict[bytes, Image])
    _count: int = 0
    _excess: int = 0
    _deadline: float | None = None

    def make_room(self, body: Fields, items: Sequence[Fields]) -> None:
        """Leave out the oldest images of the history if there are too many, and note their messages.

        Args:
            items: the messages or items in the order in which they are read.
        """
        counts = [count_images(dict(item.data)) for item in items]
        self._excess = excess = max(0, sum(counts) - self.door.max_count) if self.door else 0
        for item, count in zip(items, counts, strict=True):
            if count and excess > 0:
                body.note_mended(item.path)
            excess -= count

    def read(self, part: Fields, *, is_refused: bool) -> str:
        """Return the word of an image, or a note that it was there.

        Args:
            is_refused: the part belongs to the current question, so an image that cannot be shown is refused.
                Others become the note, because clients would send them again in every turn.

        Raises:
            InvalidImage: names an image that is refused.
        """
        name = ""
        try:
            if self.door is None:
                raise is_unseen()
            self._count += 1
            if self._count <= self._excess:
                raise are_too_many(self.door.max_count)
            name, text, is_url = _source(part)
            image = self._from_url(self.door, text) if is_url else self.door.from_base64(text)
        except ImageProblem as problem:
            if is_refused:
                raise self.refuse(part, name, problem) from problem
            return problem.note
        self.images[image.digest] = image
        return image.word

    def _from_url(self, door: ImageDoor, url: str) -> Image:
        """All addresses of a request share one time limit."""
        if self._deadline is None:
            self._deadline = time.monotonic() + PATIENCE_S
        return door.from_url(url, self.tenant, self._deadline)


def question_among(roles: Sequence[Json]) -> int:
    """Return the index of the newest message of the user, or -1 if the model has replied to it.

    The last message, if it is the model's, is the beginning of a reply that goes on.
    """
    newest = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
    return -1 if "assistant" in roles[newest + 1 : -1] else newest


def count_images(item: Json) -> int:
    """Return the number of image parts in a message or an item, those of results included, however deep."""
    count, left = 0, [item]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict) and value.get("type") in IMAGE_PARTS:
            count += 1
        elif isinstance(value, dict):
            left += (value.get(name) for name in ("content", "output"))
    return count


def _source(part: Fields) -> _Source:
    """Find the image in a part.

    Raises:
        ImageProblem: there is none.
    """
    source = next(_sources(part), None)
    if source is None:
        raise is_a_file() if _names_file(part) else is_missing()
    return source


def _sources(part: Fields) -> Iterator[_Source]:
    """Yield what a part may hold: OpenAI's `image_url`, Anthropic's `source`, MCP's `data`."""
    for name, inside, is_url in (
        ("image_url", "url", True),
        ("source", "data", False),
        ("source", "url", True),
    ):
        value = part.value(name)
        if isinstance(value, dict) and isinstance(text := value.get(inside), str):
            yield f"{name}.{inside}", text, is_url
        elif isinstance(value, str) and name == "image_url":
            yield name, value, is_url
    if isinstance(text := part.value("data"), str):
        yield "data", text, False


def _names_file(part: Fields) -> bool:
    source = part.value("source")
    return "file_id" in part.data or (isinstance(source, dict) and "file_id" in source)
