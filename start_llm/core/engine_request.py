"""A request to the engine: one prompt with all choices made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from start_llm.core.adapters import BASE_MODEL, AdapterStack
from start_llm.core.images import FIRST_IMAGE_TOKEN, ImageRun
from start_llm.core.prompt import KeptPrefix, ModelTokens
from start_llm.core.sampling import Sampling


class Guide(Protocol):
    """Tells which tokens may come next in one reply. One thread makes it, and another one then uses it."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Accept the next tokens of the reply.

        Raises:
            ConstraintViolated: the constraint does not allow them.
        """
        ...

    def allowed(self) -> bytes:
        """Return a byte for each token id: 0 if the token cannot come next.

        Raises:
            ConstraintViolated: the allowed tokens cannot be computed.
        """
        ...

    def forced(self) -> Sequence[int]:
        """Return tokens of the only text that can come next; empty if several can."""
        ...

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens can come next, one after the other. `go_back` returns to here."""
        ...

    def go_back(self, kept: int) -> None:
        """Return to where `count_allowed` was asked, and accept again the first `kept` tokens since."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningLimit:
    """The limit for a reply's reasoning.

    Attributes:
        max_reasoning_tokens: reply tokens after which open reasoning is closed; at least 1.
        starts_open: the prompt ends inside reasoning.
        opening: text that opens reasoning at the start of the reply.
        closing: text that closes it.
        closing_tokens: tokens that the engine feeds to close it.
    """

    max_reasoning_tokens: int
    starts_open: bool
    opening: str
    closing: str
    closing_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt to continue, with all choices made.

    Attributes:
        prompt: exact token ids; those of images name them, and the last one is no image's.
        images: the runs of all images in the prompt, one for each image.
        max_tokens: prompt and reply fit the context window. 0: the prompt is only read into the cache, when
            nobody waits for anything else (`engine.schedule`).
        sampling: values that MLX accepts for this vocabulary.
        boundaries: numbers of prompt tokens at which messages end, ascending; other prompts may continue from
            there.
        kept: beginnings of the prompt that stay in the cache at least so long, where there is room.
        repeated_tokens: prompt tokens of messages that were computed before, as these tokens or as others.
        salt: separates what different callers computed.
        session: prompts of one session are due one after the other (`engine.schedule`); empty: it has none.
        is_background: nobody waits for it, so it gives way to others (`engine.schedule`).
        top_logprobs: None or 0..20.
        reasoning: None for unlimited reasoning.
        trims_leading_space: the tokenizer marks the start of a text with a space that is not content.
        guide: None for an unconstrained reply.
        adapters: computed under these, prompt and reply. `salt` tells them apart.
        is_idle_work: nobody asked for it: a prewarm that is given up for anything that arrives.
        draft_texts: tokens of texts that the reply may repeat, beside those of the prompt. Whatever they are,
            the reply stays the same.
    """

    prompt: ModelTokens
    max_tokens: int
    sampling: Sampling
    images: tuple[ImageRun, ...] = ()
    boundaries: tuple[int, ...] = ()
    kept: tuple[KeptPrefix, ...] = ()
    repeated_tokens: int = 0
    salt: bytes = b""
    session: str = ""
    is_background: bool = False
    top_logprobs: int | None = None
    reasoning: ReasoningLimit | None = None
    trims_leading_space: bool = False
    guide: Guide | None = None
    adapters: AdapterStack = BASE_MODEL
    draft_texts: tuple[Sequence[int], ...] = ()
    is_idle_work: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, not {self.max_tokens}")
        if self.prompt.ids[-1:] >= (FIRST_IMAGE_TOKEN,):
            raise ValueError("a prompt must not end with an image: a reply follows a text")

    @property
    def is_prewarm(self) -> bool:
        """True if the prompt is only read into the cache, and nothing is generated."""
        return self.max_tokens == 0
