"""Renders requests with the model's own chat template."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from start_llm.core.chat import Json
from start_llm.core.errors import ClientGone, InvalidRequest
from start_llm.core.images import hide_images
from start_llm.prompt.stand_ins import NO_STAND_INS, StandIns
from start_llm.prompt.substitution import with_marks

type TemplateMessage = dict[str, Json]
"""A message as the template gets it."""

SYSTEM_WORDS = "words in the system message"
"""An option that is not a template variable: its value is appended to the system message."""


class TemplateTokenizer(Protocol):
    """The tokenizer that the prompt layer needs. Safe to call from any thread."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def added_tokens(self) -> Sequence[str]:
        """Texts that are always one token, so that a text may be cut before them."""
        ...

    @property
    def end_texts(self) -> frozenset[str]:
        """Texts of the eos tokens."""
        ...

    def render(
        self,
        messages: list[TemplateMessage],
        tools: list[dict[str, Json]] | None,
        options: Mapping[str, Json],
        *,
        add_generation_prompt: bool,
        strftime_now: Callable[[str], str],
    ) -> str:
        """Render a conversation; `add_generation_prompt` adds the generation prompt.

        `strftime_now` is the clock for templates that write dates.
        """
        ...

    def encode(self, text: str, *, as_document: bool) -> list[int]:
        """Tokenise a text. `as_document` adds what the tokenizer puts around a whole text, such as BOS."""
        ...


class PromptTokenizer(TemplateTokenizer, Protocol):
    """The tokenizer that makes prompts."""

    @property
    def chat_template(self) -> str:
        """Text of the template; empty if there is none."""
        ...

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens by their texts."""
        ...

    def encode_continuation(self, text: str) -> list[int]:
        """Tokenise a text that goes on from another one: without a space that would open a text."""
        ...


class Rendering:
    """Renders the messages of one request with its tools and options.

    Args:
        strftime_now: clock for templates that write dates.
        stand_ins: placeholders for what the template must not see.
        lists_no_tools: give the template an empty list if there are no tools, not None.
    """

    def __init__(
        self,
        tokenizer: TemplateTokenizer,
        tools: Sequence[Mapping[str, Json]],
        options: Mapping[str, Json],
        strftime_now: Callable[[str], str],
        stand_ins: StandIns = NO_STAND_INS,
        *,
        lists_no_tools: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] if tools or lists_no_tools else None
        self._options = {name: value for name, value in options.items() if name != SYSTEM_WORDS}
        self._system_words = options.get(SYSTEM_WORDS)
        self._strftime_now = strftime_now
        self._stand_ins = stand_ins

    def text(self, messages: Sequence[TemplateMessage], *, add_generation_prompt: bool) -> str:
        """Render the messages in the model's form.

        Raises:
            InvalidRequest: the template refuses these messages.
        """
        seen, restored = self._stand_ins.put_into(messages)
        try:
            rendering = self._tokenizer.render(
                self._with_system_words(seen),
                self._tools,
                self._options,
                add_generation_prompt=add_generation_prompt,
                strftime_now=self._strftime_now,
            )
        except (ClientGone, MemoryError, OSError):
            raise
        except Exception as error:
            # A template is a program by the model's author that runs on the client's data. Any error is a
            # mismatch of the two, and only the client can change its side.
            reason = with_marks(hide_images(str(error))) or type(error).__name__
            raise InvalidRequest(
                f"The chat template of the model refuses these messages: {reason}", param="messages"
            ) from error
        return restored(rendering)

    def _with_system_words(self, messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        if self._system_words is None:
            return list(messages)
        first = messages[0] if messages and messages[0]["role"] == "system" else None
        content = f"{first['content']}\n{self._system_words}" if first else self._system_words
        system: TemplateMessage = {**(first or {"role": "system"}), "content": content}
        return [system, *(messages[1:] if first else messages)]
