"""Every token has its exact bytes, and threads do not disturb each other."""

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_wrapper
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from scripts import tiny_models
from start_llm.core.chat import Json
from start_llm.core.client_presence import client_watched
from start_llm.core.errors import ClientGone
from start_llm.engine.detokenize import Detokenizer
from start_llm.models import chat_template
from start_llm.models.tokenizer import Tokenizer
from tests.templates.traits import TRAITS, trait_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "\u2581"
"""SentencePiece's mark for a space; a text that holds it is read as if it held a space."""

USER: dict[str, Json] = {"role": "user", "content": "hi"}
ABOUT: Json = {"name": "read", "description": "To read.", "parameters": {"type": "object", "properties": {}}}
TOOL: dict[str, Json] = {"type": "function", "function": ABOUT}


def byte_fallback(*, trims: bool) -> tokenizers.Tokenizer:
    """A SentencePiece model with byte fallback: Llama's, which puts a space in front, or Gemma's without."""
    known = [*"abcdefghijklmnopqrstuvwxyz ÄÖÜäöüß日本語é".replace(" ", SPACE)]
    words = ["<unk>", "<s>", "</s>", *BYTES, *known, SPACE + "t", SPACE + "th", "er", SPACE + "日"]
    merges = [(SPACE, "t"), (SPACE + "t", "h"), ("e", "r"), (SPACE, "日")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", SPACE)
    if trims:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    """A tokenizer of a kind that is neither of the two."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "fish": 1, "é": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def saved(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    """Through the files of a model folder, as a server reads them."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False})
    )
    return Tokenizer(load_wrapper(folder, eos_token_ids=[2]))


@pytest.fixture(scope="session")
def byte_level(tiny_model) -> Tokenizer:
    return Tokenizer(load_wrapper(tiny_model("qwen3")))


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return Tokenizer(load_wrapper(DEMO))


@pytest.fixture(scope="session")
def llama_like(tmp_path_factory) -> Tokenizer:
    return saved(byte_fallback(trims=True), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma_like(tmp_path_factory) -> Tokenizer:
    return saved(byte_fallback(trims=False), tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def own(tmp_path_factory) -> Tokenizer:
    """Made here, with the tests' own template."""
    folder, backend = tmp_path_factory.mktemp("own"), tiny_models.tiny_tokenizer(1000)
    tiny_models.write_tokenizer(folder, backend, tiny_models.CHAT_TEMPLATE, tiny_models.CHATML)
    return Tokenizer(load_wrapper(folder))


@pytest.fixture
def templated(tmp_path) -> Callable[[str], Tokenizer]:
    """A tokenizer with this chat template."""

    def make(template: str) -> Tokenizer:
        backend = tiny_models.tiny_tokenizer(256 + len(tiny_models.CHATML_TOKENS))
        tiny_models.write_tokenizer(tmp_path, backend, template, tiny_models.CHATML)
        return Tokenizer(load_wrapper(tmp_path))

    return make


def rendered(
    tokenizer: Tokenizer,
    *messages: dict[str, Json],
    tools: list[dict[str, Json]] | None = None,
    add_generation_prompt: bool = True,
    clock: Callable[[str], str] = str,
    **options: Json,
) -> str:
    return tokenizer.render(
        list(messages), tools, options, add_generation_prompt=add_generation_prompt, strftime_now=clock
    )


def bytes_of(tokenizer: Tokenizer, text: str) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text, as_document=False))


def detokenized(tokenizer: Tokenizer, text: str) -> str:
    detokenizer = Detokenizer(tokenizer.token_bytes, trims_leading_space=tokenizer.trims_leading_space)
    tokens = tokenizer.encode(text, as_document=False)
    return "".join(map(detokenizer.feed, tokens)) + detokenizer.close()


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_the_bytes_of_byte_level_tokens_are_the_bytes_of_the_text(byte_level, demo, text):
    assert bytes_of(byte_level, text) == bytes_of(demo, text) == text.encode()
    assert detokenized(byte_level, text) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text().filter(lambda text: SPACE not in text))
def test_the_bytes_of_sentencepiece_tokens_are_the_bytes_of_the_text(llama_like, gemma_like, text):
    assert bytes_of(gemma_like, text) == text.encode()
    assert detokenized(gemma_like, text) == text
    assert bytes_of(llama_like, text) == (b" " + text.encode() if text else b"")
    assert detokenized(llama_like, text) == text


def test_a_character_that_sentencepiece_spells_in_bytes_has_one_byte_a_token(llama_like):
    tokens = llama_like.encode("🐟", as_document=False)
    assert [llama_like.token_bytes(token) for token in tokens[1:]] == [bytes([b]) for b in "🐟".encode()]


def test_only_a_decoder_that_strips_makes_the_tokenizer_trim(byte_level, llama_like, gemma_like):
    assert llama_like.trims_leading_space
    assert not gemma_like.trims_leading_space
    assert not byte_level.trims_leading_space


def test_an_added_token_stands_for_its_own_text(byte_level, llama_like):
    for text in tiny_models.CHATML_TOKENS:
        (token,) = byte_level.encode(text, as_document=False)
        assert byte_level.token_bytes(token) == text.encode()
    assert llama_like.token_bytes(1) == b"<s>"
    tokens = llama_like.encode("a<tool>", as_document=False)
    assert llama_like.token_bytes(tokens[-1]) == b"<tool>"


def test_an_added_text_with_letters_of_the_byte_alphabet_is_not_decoded_twice(tmp_path):
    backend = tiny_models.byte_level_tokenizer({c: i for i, c in enumerate(tiny_models.byte_alphabet())}, [])
    tiny_models.add_tokens(backend, ["Ġcafé"])
    tokenizer = saved(backend, tmp_path)
    (token,) = tokenizer.encode("Ġcafé", as_document=False)
    assert tokenizer.token_bytes(token) == "Ġcafé".encode()


def test_an_id_that_no_token_has_stands_for_nothing(byte_level, llama_like):
    for tokenizer in (byte_level, llama_like):
        assert tokenizer.token_bytes(2047 * 1000) == b""


@settings(max_examples=100, deadline=None)
@given(text=st.text(), as_document=st.booleans())
def test_a_text_becomes_the_tokens_that_transformers_makes_of_it(byte_level, llama_like, text, as_document):
    for tokenizer in (byte_level, llama_like):
        wrapper = tokenizer._wrapper  # pyright: ignore[reportPrivateUsage]
        expected = wrapper.encode(text, add_special_tokens=as_document)
        assert tokenizer.encode(text, as_document=as_document) == expected


def test_a_text_is_tokenised_whole_whatever_the_file_says_of_lengths(tmp_path):
    backend = byte_fallback(trims=False)
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    tokenizer = saved(backend, tmp_path)
    assert bytes_of(tokenizer, "abcdef") == b"abcdef"


def test_two_tokens_that_are_spelled_alike_have_their_bytes_both(tmp_path):
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("<pad>", 0.0),
        (SPACE + "a", -1.0),
        ("b", -2.0),
        (SPACE + "a", -3.0),
    ]
    backend = tokenizers.Tokenizer(models.Unigram([*pieces, ("c", -4.0)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    tokenizer = saved(backend, tmp_path)
    assert [tokenizer.token_bytes(token) for token in range(3, 8)] == [b" a", b"b", b" a", b"c", b""]


def test_a_token_far_after_all_others_has_its_bytes(tmp_path):
    entries = {char: number for number, char in enumerate(tiny_models.byte_alphabet())}
    tokenizer = saved(tiny_models.byte_level_tokenizer(entries | {"Ġa": 9000}, []), tmp_path)
    assert [tokenizer.token_bytes(token) for token in (9000, 8999)] == [b" a", b""]


def test_the_bytes_of_a_token_are_given_while_a_text_is_tokenised(gemma_like):
    with gemma_like._lock:  # pyright: ignore[reportPrivateUsage] - as `encode` holds it for a long text
        asked = threading.Thread(target=lambda: list(map(gemma_like.token_bytes, range(400))), daemon=True)
        asked.start()
        asked.join(5)
        assert not asked.is_alive()


def test_a_tokenizer_of_another_kind_is_asked_for_the_text_of_a_token_behind_another_one(tmp_path):
    tokenizer = saved(word_level(), tmp_path)
    assert [tokenizer.token_bytes(token) for token in (1, 2, 99)] == [b" fish", " é".encode(), b""]
    assert tokenizer.trims_leading_space


def test_end_tokens_are_those_of_the_model(byte_level, llama_like):
    assert llama_like.eos_token_ids == {2}
    (end,) = byte_level.eos_token_ids
    assert byte_level.token_bytes(end) == tiny_models.END_OF_TURN.encode()


def test_the_texts_of_end_tokens_are_known_where_they_are_added_tokens(byte_level, llama_like, tmp_path):
    assert byte_level.end_texts == {tiny_models.END_OF_TURN}
    assert llama_like.end_texts == {"</s>"}
    wordy = saved(word_level(), tmp_path)
    assert (wordy.eos_token_ids, wordy.end_texts) == ({2}, frozenset())


def test_added_tokens_are_one_token_wherever_they_stand(byte_level, llama_like):
    assert set(byte_level.added_tokens) == set(tiny_models.CHATML_TOKENS)
    assert set(llama_like.added_tokens) == {"<unk>", "<s>", "</s>", "<tool>"}
    for text in byte_level.added_tokens:
        (token,) = byte_level.encode(text, as_document=False)
        before, after = (byte_level.encode(part, as_document=False) for part in ("a ", " b"))
        assert byte_level.encode(f"a {text} b", as_document=False) == [*before, token, *after]


def test_a_token_that_takes_what_stands_on_its_left_is_no_place_for_a_cut(tmp_path):
    backend = byte_fallback(trims=False)
    backend.add_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<word>", single_word=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
        ]
    )
    tokenizer = saved(backend, tmp_path)
    assert set(tokenizer.added_tokens) == {"<unk>", "<s>", "</s>", "<tool>", "<right>"}
    for text in tokenizer.added_tokens:
        whole, *parts = (
            tokenizer.encode(part, as_document=False) for part in (f"a {text} b", "a ", f"{text} b")
        )
        assert whole == [token for part in parts for token in part]


# ------------------------------------------------------------------------------------------- chat templates


def test_the_chat_template_is_the_text_that_renders(byte_level, llama_like):
    assert byte_level.has_chat_template
    assert byte_level.chat_template == tiny_models.CHAT_TEMPLATE
    assert (llama_like.has_chat_template, llama_like.chat_template) == (False, "")


TALK: tuple[dict[str, Json], ...] = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "é"},
    {"role": "user", "content": "and?"},
)
FUNCTION: Json = {"name": "read", "arguments": {"path": "é", "depth": [1, None]}}
CALLING: tuple[dict[str, Json], ...] = (
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": FUNCTION}]},
    {"role": "tool", "content": "found", "tool_call_id": "c"},
)


@pytest.mark.parametrize(
    "options", [{}, {"enable_thinking": False}, {"eos_token": "another"}], ids=["none", "thinking", "token"]
)
@pytest.mark.product
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("trait", "messages"),
    [*((trait, TALK) for trait in TRAITS), *((trait, CALLING) for trait in ("plain", "channels", "kimi"))],
)
def test_a_template_renders_what_it_renders_through_transformers(
    trait, messages, add_generation_prompt, options
):
    tokenizer = trait_tokenizer(trait)
    ours = rendered(
        tokenizer, *messages, tools=[TOOL], add_generation_prompt=add_generation_prompt, **options
    )
    chat_template.compiled(tokenizer.chat_template).globals["strftime_now"] = str  # the clock of our call
    transformers = tokenizer._wrapper._tokenizer  # pyright: ignore[reportPrivateUsage]
    assert ours == transformers.apply_chat_template(
        list(messages), tools=[TOOL], add_generation_prompt=add_generation_prompt, tokenize=False, **options
    )


def test_a_model_that_renders_in_python_is_asked_to():
    assert rendered(Tokenizer(FakeWrapper())) == "rendered"


def test_the_tail_that_makes_the_model_answer_is_there_only_if_it_is_asked_for(byte_level):
    bare = "<|im_start|>user\nhi<|im_end|>\n"
    assert rendered(byte_level, USER, add_generation_prompt=False) == bare
    assert rendered(byte_level, USER, add_generation_prompt=True) == bare + "<|im_start|>assistant\n"


def test_a_template_that_writes_dates_gets_the_clock_that_it_is_given(templated):
    tokenizer = templated("{{ messages[0].content }} on {{ strftime_now('%d %B') }}{{ mood }}")
    forms: list[str] = []

    def clock(form: str) -> str:
        forms.append(form)
        return "the first day"

    assert rendered(tokenizer, USER, clock=clock, mood="!") == "hi on the first day!"
    assert rendered(tokenizer, USER, clock=lambda _: "another day") == "hi on another day"
    assert forms == ["%d %B"]


def test_a_second_template_for_conversations_with_tools_gets_the_clock_too(tmp_path):
    backend = tiny_models.tiny_tokenizer(256 + len(tiny_models.CHATML_TOKENS))
    tiny_models.write_tokenizer(tmp_path, backend, "", tiny_models.CHATML)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain {{ strftime_now('%Y') }}"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }} {{ strftime_now('%Y') }}<tool_call>"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(load_wrapper(tmp_path))
    assert rendered(tokenizer, USER, clock=lambda _: "1984") == "plain 1984"
    assert rendered(tokenizer, USER, tools=[TOOL], clock=lambda _: "1985") == "read 1985<tool_call>"
    assert "<tool_call>" in tokenizer.chat_template, "what tells the family is found in any of them"


def test_threads_with_different_clocks_never_see_each_others(templated):
    tokenizer = templated("{% for _ in range(9) %}{{ strftime_now('%c') }} {% endfor %}")
    together = threading.Barrier(8)

    def work(number: int) -> set[str]:
        together.wait()
        return {rendered(tokenizer, USER, clock=lambda _: str(number)) for _ in range(60)}

    patience = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            seen = list(threads.map(work, range(8)))
    finally:
        sys.setswitchinterval(patience)
    assert seen == [{f"{number} " * 9} for number in range(8)]


# --------------------------------------------------------------------------------------------------- threads


@pytest.mark.thorough
def test_eight_threads_encode_and_render_at_once(byte_level):
    texts = [f"Thread {number} counts fish: " + "🐟 ab\n" * 200 * number for number in range(8)]
    expected = [byte_level.encode(text, as_document=False) for text in texts]
    together = threading.Barrier(8)

    def work(number: int) -> bool:
        together.wait()
        same = [byte_level.encode(texts[number], as_document=False) == expected[number] for _ in range(30)]
        message: dict[str, Json] = {"role": "user", "content": texts[number]}
        shown = [texts[number] in rendered(byte_level, message) for _ in range(30)]
        spelt = b"".join(map(byte_level.token_bytes, expected[number])) == texts[number].encode()
        return all(same) and all(shown) and spelt

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [True] * 8


LINES = "".join(
    f"def f{number}(x): return x * {number}  # Zeile {number}, \u6f22\n" for number in range(12_000)
)
"""564 kB, most of which the tokenizer has not read before."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["byte_level", "llama_like"])
def test_twelve_large_texts_on_four_threads_have_the_tokens_of_one_alone(name, request):
    """Through the library itself: the server's own turn for large texts is not in the way."""
    backend = request.getfixturevalue(name)._backend
    texts = [f"{number} {LINES}"[:564_000] for number in range(12)]

    def ids(text: str) -> list[int]:
        (encoded,) = backend.encode_batch_fast([text], add_special_tokens=True)
        return encoded.ids

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(ids, texts))
    assert together == list(map(ids, texts))
    assert len({len(sample) for sample in texts}) == 1


def test_the_settings_of_the_library_stay_as_they_are(byte_level):
    """Nothing that a request may do changes a setting: a change beside an encoding would be an error."""
    backend = byte_level._backend
    before = backend.truncation, backend.padding, backend.encode_special_tokens
    assert before == (None, None, False)
    for as_document in (True, False):
        byte_level.encode("Hi", as_document=as_document)
    rendered(byte_level, USER, tools=[TOOL])
    byte_level.definition()
    assert (backend.truncation, backend.padding, backend.encode_special_tokens) == before


@pytest.mark.thorough
def test_a_small_text_does_not_wait_for_a_large_one(own):
    """Nor does a rendering."""
    large = threading.Thread(target=own.encode, args=(LINES * 4,), kwargs={"as_document": False})
    large.start()
    try:
        for number in range(5):
            began = time.perf_counter()
            own.encode(f"Hi {number}", as_document=False)
            rendered(own, {"role": "user", "content": f"Hi {number}"})
            assert time.perf_counter() - began < 0.5
        assert large.is_alive(), "the large text was done sooner"
    finally:
        large.join()


@pytest.mark.thorough
def test_who_leaves_while_waiting_for_the_turn_of_large_texts_gives_up(own):
    large = threading.Thread(target=own.encode, args=(LINES * 4,), kwargs={"as_document": False})
    large.start()
    try:
        began = time.perf_counter()
        with client_watched(lambda: True), pytest.raises(ClientGone):
            own.encode(LINES, as_document=False)
        assert time.perf_counter() - began < 0.5
        assert large.is_alive(), "the large text was done sooner"
    finally:
        large.join()


class FakeWrapper:
    """A tokenizer that cannot do two things at once, as the real one under some settings."""

    added_tokens_decoder: Mapping[int, str] = {}
    has_chat_template = True
    chat_template = "rendered"
    eos_token_ids = (2,)
    _tokenizer = _chat_template = None

    def __init__(self) -> None:
        self._alone = threading.Lock()

    def get_chat_template(self, name: None, tools: object) -> str:
        return self._slowly(self.chat_template)

    def apply_chat_template(self, messages: object, **_: object) -> str:
        return self._slowly("rendered")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._slowly([len(text)])

    def get_vocab(self) -> dict[str, int]:
        return {f"piece {token}": token for token in range(40)}

    def convert_ids_to_tokens(self, tokens: list[int]) -> list[str]:
        return [f"piece {token}" for token in tokens]

    def decode(self, tokens: list[int], **_: object) -> str:
        return self._slowly("".join(f"text {token}" for token in tokens))

    def _slowly[T](self, result: T) -> T:
        assert self._alone.acquire(blocking=False), "Already borrowed"
        time.sleep(0.001)
        self._alone.release()
        return result


def test_no_two_threads_are_in_the_tokenizer_at_once():
    tokenizer = Tokenizer(FakeWrapper())

    def work(number: int) -> tuple[str, list[int], bytes]:
        encoded = tokenizer.encode("x" * number, as_document=False)
        return rendered(tokenizer), encoded, tokenizer.token_bytes(number)

    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(work, range(40)))
    assert done == [("rendered", [number], f"text {number}".encode()) for number in range(40)]


CONTINUATIONS = ("the er", " the", "|im_end|>", "", " ", "  t", "日本", "é", "\nth", "\n")


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("text", CONTINUATIONS)
def test_what_goes_on_from_a_text_has_no_space_of_its_own(trims: bool, text: str, tmp_path: Path):
    tokenizer = saved(byte_fallback(trims=trims), tmp_path)
    ids = tokenizer.encode_continuation(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert (ids == tokenizer.encode(text, as_document=False)) is (not trims or text == "")


def test_a_tokenizer_that_joins_line_breaks_keeps_its_space(tmp_path: Path):
    backend = word_level()
    assert saved(backend, tmp_path).encode_continuation("fish") == [1]
