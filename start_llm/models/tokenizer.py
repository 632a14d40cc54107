"""Makes the tokenizer of the loaded model usable from every thread."""

import json
import threading
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from start_llm.core.allocator import give_back_free_memory
from start_llm.core.chat import Json
from start_llm.core.client_presence import check_client, held_in_turn
from start_llm.models import chat_template
from start_llm.models.rust_panics import panics_as_errors
from start_llm.models.token_lengths import token_lengths
from start_llm.models.token_table import token_table

LARGE_TEXT = 2**18
"""Characters from which on texts are encoded one at a time: a third of a second, and tens of megabytes."""
_LARGE_ENCODING = threading.Lock()
"""Of all models: it keeps the cores and the memory for others, who do not wait for it."""

_OPENING_TOKENS = 2
"""At most so many tokens spell a space and a line break."""
_ENCODING = ("encode", "_encode_plus")
"""Methods of transformers between a text and the ids that the tokenizers library returns."""


class Tokenizer:
    """A Hugging Face tokenizer in mlx_lm's wrapper, made thread-safe.

    Once its settings are fixed, the tokenizers library encodes on any number of threads at once, and a
    compiled template renders on any number. A lock guards what changes a state of its own: tokenizers and
    renderers that are programs of transformers, of mlx_lm or of the model ("Already borrowed" if two threads
    meet). The engine thread only uses a table that is built once, so it never waits.

    Attributes:
        has_chat_template: whether conversations can be rendered.
        chat_template: text of the template; empty if there is none.
        eos_token_ids: ids of the tokens that end a reply.
        end_texts: texts of those tokens.
        added_tokens: texts that are always one token and that do not absorb white space on their left, so
            that a text may be cut before them.
        control_tokens: ids of special tokens by their text; only such a token produces that text.
        trims_leading_space: whether decoding drops the space that marks the start of a text (SentencePiece).
        decoding_warning: see `models.token_table.TokenTable.warning`.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._lock = threading.Lock()
        self._backend = _lone_backend(wrapper)
        added = {int(number): str(token) for number, token in wrapper.added_tokens_decoder.items()}
        table = token_table(wrapper)
        self._bytes = table.bytes
        self.has_chat_template = bool(wrapper.has_chat_template)
        self.chat_template = str(wrapper.chat_template or "")
        self._renders_itself = _renders_itself(wrapper)
        self._special_texts: Mapping[str, Json] = (
            {} if self._renders_itself else dict(wrapper.special_tokens_map)
        )
        self.eos_token_ids = frozenset(int(token) for token in wrapper.eos_token_ids)
        self.end_texts = frozenset(added[token] for token in self.eos_token_ids if token in added)
        self.added_tokens = tuple(
            str(token)
            for token in wrapper.added_tokens_decoder.values()
            if not (token.lstrip or token.single_word)
        )
        self.control_tokens: Mapping[str, int] = {
            str(token): int(number) for number, token in wrapper.added_tokens_decoder.items() if token.special
        }
        self.trims_leading_space = table.trims_leading_space
        self.decoding_warning = table.warning
        absorbs_space = any(token.lstrip or token.rstrip for token in wrapper.added_tokens_decoder.values())
        spellings = frozenset((*self._bytes.values(), *(text.encode() for text in added.values())))
        self._opens_with_space = self._spelling("a") == b" a"
        self._lengths = token_lengths(self._backend, spellings, absorbs_space=absorbs_space)

    def render(
        self,
        messages: list[dict[str, Json]],
        tools: list[dict[str, Json]] | None,
        options: Mapping[str, Json],
        *,
        add_generation_prompt: bool,
        strftime_now: Callable[[str], str],
    ) -> str:
        """Render a conversation; see `prompt.template.TemplateTokenizer`."""
        if self._renders_itself:
            with held_in_turn(self._lock):
                return str(
                    self._wrapper.apply_chat_template(
                        messages,
                        tools=tools,
                        add_generation_prompt=add_generation_prompt,
                        tokenize=False,
                        **options,
                    )
                )
        check_client()
        # The clock is a variable of this rendering: globals would be those of other threads, too.
        variables = {
            **self._special_texts,
            "documents": None,
            "strftime_now": strftime_now,
            **options,
        }
        return self._compiled(tools).render(
            variables, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def _compiled(self, tools: list[dict[str, Json]] | None) -> Any:
        """Return the compiled template. Some models have a second template for use with tools.

        `apply_chat_template` is not used: it copies every message to make plain data, which the messages
        already are.
        """
        return chat_template.compiled(str(self._wrapper.get_chat_template(None, tools)))

    def encode(self, text: str, *, as_document: bool) -> list[int]:
        """Return the ids of a text.

        Raises:
            InternalError: the tokenizers library has panicked.
        """
        with panics_as_errors("The tokenizer of this model"):
            return self._ids(text, as_document=as_document)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of a text that goes on from another one.

        SentencePiece puts a space before a text. There the text is encoded behind a line break, which joins
        with nothing: the ids of space and break are taken off again.
        """
        if not self._opens_with_space:
            return self.encode(text, as_document=False)
        ids = self.encode(f"\n{text}", as_document=False)
        opening = list(accumulate(map(self.token_bytes, ids[:_OPENING_TOKENS])))
        return ids[opening.index(b" \n") + 1 :] if b" \n" in opening else self.encode(text, as_document=False)

    def _ids(self, text: str, *, as_document: bool) -> list[int]:
        if self._backend is None:
            with held_in_turn(self._lock):
                return list(self._wrapper.encode(text, add_special_tokens=as_document))
        if len(text) < LARGE_TEXT:
            return self._encoded(text, as_document=as_document)
        with held_in_turn(_LARGE_ENCODING):
            ids = self._encoded(text, as_document=as_document)
            give_back_free_memory()
            return ids

    def _encoded(self, text: str, *, as_document: bool) -> list[int]:
        check_client()
        # This method releases the GIL while it encodes, and it computes nothing but ids. The backend's
        # settings are fixed, so it needs no lock.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=as_document)
        return encoded.ids

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without encoding it; 0 if nothing is known."""
        return self._lengths.fewest_tokens(text)

    def definition(self) -> str:
        """Return as JSON everything that decides how a text is tokenised: vocabulary, merges, normalisation.

        Without a backend of the tokenizers library it is the vocabulary alone. Truncation and padding are
        left out, because `encode` uses neither.
        """
        with self._lock:
            backend = getattr(self._wrapper, "backend_tokenizer", None)
            if backend is None:
                return json.dumps(self._wrapper.get_vocab(), sort_keys=True)
            rules = json.loads(backend.to_str())
        return json.dumps(rules | {"truncation": None, "padding": None}, sort_keys=True)

    def _spelling(self, text: str) -> bytes:
        return b"".join(map(self.token_bytes, self.encode(text, as_document=False)))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer does not know. It never waits."""
        return self._bytes.get(token, b"")


def _lone_backend(wrapper: Any) -> Any:
    """Return the tokenizers library's tokenizer, set up as transformers does; None if that adds steps."""
    kind = type(wrapper._tokenizer)
    if any(getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name) for name in _ENCODING):
        return None
    backend = wrapper.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = wrapper.split_special_tokens
    return backend


def _renders_itself(wrapper: Any) -> bool:
    """Return whether a program of the model or of mlx_lm renders conversations, not a template alone."""
    renderer = getattr(type(wrapper._tokenizer), "apply_chat_template", None)
    return wrapper._chat_template is not None or renderer is not PreTrainedTokenizerBase.apply_chat_template
