"""Log-probabilities in both of OpenAI's shapes."""

from start_llm.core.events import ScoredToken, TokenLogprobs
from start_llm.protocols.logprobs import chat_logprobs
from tests.protocols.helpers import MODEL, scored


def test_a_chat_entry_names_text_bytes_and_alternatives():
    entry = chat_logprobs([scored(0, 0, 1)], MODEL.token_bytes)
    hello = {"token": "Hello", "bytes": list(b"Hello")}
    you = {"token": " you", "bytes": list(b" you"), "logprob": -2.0}
    assert entry == {
        "content": [{**hello, "logprob": -0.25, "top_logprobs": [{**hello, "logprob": -1.0}, you]}],
        "refusal": None,
    }


def test_a_part_of_a_character_keeps_its_bytes_and_shows_a_replacement():
    content = chat_logprobs([scored(4), scored(5)], MODEL.token_bytes)["content"]
    assert isinstance(content, list)
    halves = [entry for entry in content if isinstance(entry, dict)]
    data = [byte for half in halves for byte in (half["bytes"] if isinstance(half["bytes"], list) else [])]
    assert bytes(byte for byte in data if isinstance(byte, int)).decode() == "🐟"
    assert all("\ufffd" in str(half["token"]) for half in halves)


def test_no_alternatives_are_an_empty_list_and_no_tokens_too():
    entry = TokenLogprobs(ScoredToken(0, -0.5), ())
    content = chat_logprobs([entry], MODEL.token_bytes)["content"]
    assert content == [{"token": "Hello", "bytes": list(b"Hello"), "logprob": -0.5, "top_logprobs": []}]
    assert chat_logprobs([], MODEL.token_bytes) == {"content": [], "refusal": None}
