"""Implements POST /tokenize and POST /detokenize, in vLLM's form.

A text is tokenized as `/v1/completions` does it, and messages as `/v1/chat/completions` does.
"""

from collections.abc import Mapping, Sequence

from start_llm.core.chat import Json
from start_llm.protocols.base import ModelFacts, ParsedRequest, RequestContext
from start_llm.protocols.fields import Fields
from start_llm.protocols.generation_fields import UnsupportedField, refuse_unsupported, token_ids
from start_llm.protocols.openai import chat_completions as chat
from start_llm.protocols.openai import completions

_ALWAYS = (UnsupportedField("add_special_tokens", True, "must be true: the model reads them"),)
_A_REPLY_FOLLOWS = UnsupportedField(
    "add_generation_prompt",
    True,
    "must be true, or stand beside 'continue_final_message': a reply follows",
)


def parse(body: Fields, headers: Mapping[str, str], context: RequestContext) -> ParsedRequest:
    """Parse a request for the tokens of `messages` or of a `prompt`."""
    goes_on = body.value("messages") is not None and body.boolean("continue_final_message")
    refuse_unsupported(body, _ALWAYS if goes_on else (*_ALWAYS, _A_REPLY_FOLLOWS))
    if body.value("messages") is not None:
        return chat.parse(body, headers, context)
    return completions.parse(body, headers, context)


def tokens_body(tokens: Sequence[int], window: int) -> dict[str, Json]:
    return {"count": len(tokens), "max_model_len": window, "tokens": list(tokens)}


def text_body(body: Fields, model: ModelFacts) -> dict[str, Json]:
    """Return the text of token ids. Bytes that are no UTF-8 become replacement characters.

    Raises:
        InvalidRequest: `tokens` is no list of token ids.
    """
    ids = token_ids(body.array("tokens"), "tokens", model.card.vocabulary)
    return {"prompt": b"".join(map(model.token_bytes, ids)).decode("utf-8", "replace")}
