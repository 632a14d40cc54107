"""Variables that a client sets for the chat template (`chat_template_kwargs`)."""

from __future__ import annotations

from collections.abc import Mapping

from start_llm.core.chat import Json
from start_llm.protocols.effort import unread_template_options
from start_llm.protocols.fields import Fields

# The server decides these; a client that could set them could make the template do something else.
_RESERVED = frozenset(
    "messages conversation tools tokenize chat_template add_generation_prompt continue_final_message "
    "return_dict return_tensors return_assistant_tokens_mask padding truncation max_length "
    "tokenizer_kwargs strftime_now".split()
)


def read_template_options(body: Fields) -> Mapping[str, Json]:
    """Those that the server does not read or decide itself.

    Raises:
        InvalidRequest: names one that the server decides.
    """
    options = body.object("chat_template_kwargs")
    if options is None:
        return {}
    for name in options.data:
        if name in _RESERVED:
            raise options.fail(name, "is decided by the server")
    return unread_template_options(options.data)
