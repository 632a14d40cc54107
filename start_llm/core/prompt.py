"""The prompt: the tokens that the model reads, and where its messages end."""

from dataclasses import dataclass
from typing import NamedTuple

from start_llm.core.canonical import Conversation
from start_llm.core.chat import Message
from start_llm.core.images import ImageRun


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The exact token ids for the model, generation prompt included.

    A separate type, so that no other sequence of integers is taken for it. Never empty: the engine needs at
    least one token to sample from.
    """

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a prompt has at least one token")

    def __len__(self) -> int:
        return len(self.ids)


class Boundary(NamedTuple):
    """The end of a message: the text that closes it starts at token `tokens`.

    Attributes:
        message: index into the request's messages.
        tokens: number of prompt tokens before the closing text.
    """

    message: int
    tokens: int


class KeptPrefix(NamedTuple):
    """The beginning of a prompt that the client asks to keep.

    Attributes:
        tokens: its length; 0 if the place that the client has marked is not known in the prompt.
        seconds: for which to keep it at least.
    """

    tokens: int
    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request as the model reads it.

    Attributes:
        images: the runs of the request's images, one for each image.
        boundaries: in ascending order; a message has none if its end cannot be determined exactly.
        conversation: the form in which it is compared with others; None for texts.
        kept: in the order of the messages.
        has_transient: it ends with messages that the next request will not have. They are not part of the
            conversation and have no boundaries.
        lasting_end: the tokens that would follow the last boundary without those messages, if known.
        omitted_chars: number of characters of its messages that comparisons ignore.
        reasoning_is_open: the prompt ends inside reasoning.
        thinking: the model is asked to reason, or no setting forbids it.
        begun_reply: the message that the prompt ends in and the reply goes on from, if it does, with the
            reasoning that the model is shown.
    """

    tokens: ModelTokens
    images: tuple[ImageRun, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    kept: tuple[KeptPrefix, ...] = ()
    conversation: Conversation | None = None
    has_transient: bool = False
    lasting_end: tuple[int, ...] | None = None
    omitted_chars: int = 0
    reasoning_is_open: bool = False
    thinking: bool = True
    begun_reply: Message | None = None
