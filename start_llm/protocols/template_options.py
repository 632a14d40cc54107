"""Reads variables that a client sets for the chat template (`chat_template_kwargs`)."""

from __future__ import annotations

from collections.abc import Mapping

from start_llm.core.chat import Json
from start_llm.protocols.effort import unread_template_options
from start_llm.protocols.fields import Fields

# The server sets these. If clients could set them, the template could do something else.
_RESERVED = frozenset(
    "messages conversation tools tokenize chat_template add_generation_prompt continue_final_message "
    "return_dict return_tensors return_assistant_tokens_mask padding truncation max_length "
    "tokenizer_kwargs strftime_now".split()
)


def read_template_options(body: Fields) -> Mapping[str, Json]:
    """Return the options that the server neither reads nor sets itself.

    Raises:
        InvalidRequest: names an option that the server sets.
    """
    options = body.object("chat_template_kwargs")
    if options is None:
        return {}
    for name in options.data:
        if name in _RESERVED:
            raise options.fail(name, "is decided by the server")
    return unread_template_options(options.data)
