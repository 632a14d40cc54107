"""What a request costs beside the network: prompts that are prepared, replies that are read."""

import gc
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from benchmarks import replies_prepare
from benchmarks.harness import Part, medians, row, table
from start_llm.core.chat import Json
from start_llm.core.events import CallArguments, Finished, Text, Usage
from start_llm.core.family import Family, ReasoningMarks
from start_llm.engine.detokenize import Detokenizer
from start_llm.formats.reading.schema import Tools
from start_llm.formats.registry import family_by_name
from start_llm.output.splitter import make_splitter
from start_llm.output.stream import OutputStream
from tests.output.corpus import damage
from tests.output.corpus.writers import WRITERS, Writer

LETTERS_PER_TOKEN = 4
TOKENS_PER_SECOND = 500
FAMILY = Family(
    name="qwen3",
    reasoning=ReasoningMarks("<think>", "</think>", cut="\n</think>\n\n"),
    formats=("qwen_xml", "hermes"),
)
WRITE: dict[str, Json] = {
    "name": "write",
    "parameters": {"properties": {"text": {"type": "string"}, "optional": {"type": ["string", "null"]}}},
}
TOOLS = Tools([{"type": "function", "function": WRITE}])
ARGUMENT_LETTERS = 4_000
UNCLOSED_LETTERS = 200_000
MAX_CLOSING_SECONDS = 0.1
UNCLOSED: Mapping[str, tuple[str, str, str]] = {
    "Hermes, object": ("qwen3", '<tool_call>\n{"name": "write", "arguments": {', ""),
    "Hermes, string": ("qwen3", '<tool_call>\n{"name": "', ""),
    "Qwen XML, no such tool": ("qwen3", "<tool_call>\n<function=x>\n<parameter=a>\nx\n</parameter>\n", ""),
    "Qwen XML, ends of values": ("qwen3", "<function=x><parameter=a></parameter>", ""),
    "GLM, no such tool": ("glm4", "<tool_call>x\n<arg_key>a</arg_key>\n<arg_value>", ""),
    "GLM, after no reasoning": ("glm4", "<function=write>{", ""),
    "MiniCPM, no such tool": ("minicpm", '<function name="x"><param name="a">', ""),
    "Gemma 4, object": ("gemma4", "<|tool_call>call:write{", ""),
    "Gemma 4, brackets": ("gemma4", "<|tool_call>call:write{" + "{}" * 40, ""),
    "Mistral, list": ("mistral", '[TOOL_CALLS][{"name":', ""),
    "Mistral, list that fails": ("mistral", '[TOOL_CALLS][{"name": [', "!"),
    "Kimi, object": ("kimi", "<|tool_call_begin|>write:0<|tool_call_argument_begin|>{", ""),
    "Llama, list": ("llama3", '<|python_tag|>{"name": [', ""),
    "Harmony, call": ("gpt_oss", "<|channel|>commentary to=functions.write<|message|>{", ""),
}
"""Family, what its reply repeats, and what the reply ends with."""
WORDS = (
    *"the cache of a page is kept while (key) in `tokens[i]`:".split(),
    "x <= 3,",
    '"é"',
    "{'a': 1}",
    "</b>",
    "\n\n   ",
)


def prose(letters: int) -> str:
    """Text with the letters that markup and JSON are made of."""
    chosen = random.Random(7)
    words: list[str] = []
    length = 0
    while length < letters:
        words.append(chosen.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:letters]


def qwen_xml(argument: str, text: str) -> str:
    inner = f"<parameter={argument}>\n{text}\n</parameter>\n"
    return f"<tool_call>\n<function=write>\n{inner}</function>\n</tool_call>"


def hermes(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': {'text': text}})}\n</tool_call>"


REPLIES: Mapping[str, Callable[[int], str]] = {
    "prose": prose,
    "reasoning": lambda letters: f"<think>\n{prose(letters)}\n</think>\n\nDone.",
    "text argument, Qwen XML": lambda letters: qwen_xml("text", prose(letters)),
    "text argument, Hermes": lambda letters: hermes(prose(letters)),
    "text or null, Qwen XML": lambda letters: qwen_xml("optional", prose(letters)),
    "line breaks": lambda letters: "\n" * letters,
    "line breaks in reasoning": lambda letters: "<think>" + "\n" * letters,
}


def tokens_of(text: str) -> list[bytes]:
    """Bytes of about four letters each, characters cut in two where they fall so."""
    data = text.encode()
    return [data[start : start + LETTERS_PER_TOKEN] for start in range(0, len(data), LETTERS_PER_TOKEN)]


def read(tokens: list[bytes]) -> tuple[float, float]:
    """CPU seconds for each token of a reply, and those of the last quarter of it over those of the first."""
    detokenizer, marks = Detokenizer(tokens.__getitem__), [time.thread_time()]
    stream = OutputStream(make_splitter(FAMILY, TOOLS, reasoning_is_open=False, thinking=True))
    for token in range(len(tokens)):
        deque(stream.feed(Text(detokenizer.feed(token), (token,))), maxlen=0)
        if (token + 1) % (len(tokens) // 4) == 0 and len(marks) < 4:
            marks.append(time.thread_time())
    stream.close(Finished("stop", Usage(prompt=1, cached=0, completion=len(tokens))))
    marks.append(time.thread_time())
    quarters = [end - begin for begin, end in pairwise(marks)]
    return sum(quarters) / len(tokens), quarters[-1] / quarters[0]


def end(family: str, text: str) -> tuple[float, float]:
    """CPU seconds of the dearest token of a reply, which is read four letters at a time, and of its end."""
    splitter = make_splitter(family_by_name(family), TOOLS, reasoning_is_open=False, thinking=True)
    worst = 0.0
    for start in range(0, len(text), LETTERS_PER_TOKEN):
        began = time.thread_time()
        splitter.feed(text[start : start + LETTERS_PER_TOKEN])
        worst = max(worst, time.thread_time() - began)
    began = time.thread_time()
    splitter.close(complete=True)
    return worst, time.thread_time() - began


def held_tokens(writer: Writer, text: str) -> list[int] | None:
    """For each token of a text argument, the tokens that come before the event with its last letter.

    None: the text is not read as it was written.
    """
    reply = writer.call("write", text=text)
    tokens = tokens_of(reply)
    detokenizer = Detokenizer(tokens.__getitem__)
    stream = OutputStream(make_splitter(writer.family, TOOLS, reasoning_is_open=False, thinking=True))
    sent: list[str] = []
    lengths: list[int] = []
    for token in range(len(tokens)):
        outputs = stream.feed(Text(detokenizer.feed(token), (token,)))
        sent += [output.text for output in outputs if isinstance(output, CallArguments)]
        lengths.append(sum(map(len, sent)))
    outputs, _ = stream.close(Finished("stop", Usage(prompt=1, cached=0, completion=len(tokens))))
    sent += [output.text for output in outputs if isinstance(output, CallArguments)]
    arguments = "".join(sent)
    if json.dumps({"text": text}, ensure_ascii=False) != arguments:
        return None
    return _waits(reply, text, lengths, arguments.index(json.dumps(text, ensure_ascii=False)) + 1)


def _waits(reply: str, text: str, lengths: list[int], opening: int) -> list[int]:
    """Compare when a letter's token came with when the JSON up to that letter had been sent."""
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    plain = text if text in reply else written if written in reply else None
    begin = 0 if plain is None else len(reply[: reply.index(plain)].encode())
    data = (plain or text).encode()
    waits: list[int] = []
    for place in range(LETTERS_PER_TOKEN, len(data), LETTERS_PER_TOKEN):
        before = data[:place].decode(errors="ignore")
        needed = opening + len(before if plain == written else json.dumps(before, ensure_ascii=False)[1:-1])
        came = (begin + place - 1) // LETTERS_PER_TOKEN
        out = next((token for token, length in enumerate(lengths) if length >= needed), len(lengths))
        waits.append(out - came)
    return waits


def held(_: Path) -> None:
    """For how many tokens each notation holds back the text of an argument, up to the event with it.

    "Quoted": the text quotes a call of the same notation in its middle; "-": such a call has several
    readings.
    """
    plain = prose(ARGUMENT_LETTERS)
    tokens = ARGUMENT_LETTERS // LETTERS_PER_TOKEN
    table(f"text argument of {tokens:,} tokens | median | most | quoted: median | quoted: most")
    for name, writer in sorted(WRITERS.items()):
        half = len(plain) // 2
        quoting = f"{plain[:half]}\n{writer.call('write', text='a')}\n{plain[half:]}"
        columns: list[str] = []
        for text in (plain, quoting):
            waits = held_tokens(writer, text)
            columns += [f"{statistics.median(waits):.0f}", f"{max(waits)}"] if waits else ["-", "-"]
        row(name, *columns)


def reading(_: Path, *, rounds: int = 5, tokens: int = 30_000) -> None:
    """The cost of reading a reply: tokens to text, text to reasoning, answer and calls.

    Made-up replies of about four letters a token go through the detokenizer and the output stream, as the
    engine thread and an HTTP thread do together. CPU time of this thread; medians of the rounds. A ratio of
    the last quarter to the first near 1 says that a long reply costs no more for each token than a short one.

    Args:
        tokens: of each reply
    """
    share = f"of a core at {TOKENS_PER_SECOND} tok/s"
    table(f"reply | tokens | CPU per token | {share} | last / first quarter")
    gc.disable()
    for name, make in REPLIES.items():
        pieces = tokens_of(make(tokens * LETTERS_PER_TOKEN))
        read(pieces)
        token_s, growth = medians(read(pieces) for _ in range(rounds))
        microseconds, used = f"{1e6 * token_s:.1f} µs", f"{100 * token_s * TOKENS_PER_SECOND:.2f} %"
        row(name, f"{len(pieces):,}", microseconds, used, f"{growth:.2f}")
    gc.enable()


def unclosed(_: Path, *, rounds: int = 5) -> Iterator[str]:
    """Replies that are nothing but calls that never end: the dearest token, and the end of the reply.

    At the end all of it turns out to be text: under 100 ms after 200 kB.
    """
    table(f"{UNCLOSED_LETTERS // 1000} kB of unclosed calls | dearest token | end")
    for name, (family, unit, last) in UNCLOSED.items():
        text = unit * (UNCLOSED_LETTERS // len(unit)) + last
        worst, closing = zip(*(end(family, text) for _ in range(rounds)), strict=True)
        # The dearest of 50,000 tokens meets every interruption of the machine, so the calmest round counts.
        seconds = statistics.median(closing)
        row(name, f"{1e3 * min(worst):.1f} ms", f"{1e3 * seconds:.1f} ms")
        if seconds >= MAX_CLOSING_SECONDS:
            yield f"{name}: the end takes {1e3 * seconds:.0f} ms"


def damaged(
    _: Path,
    *,
    notations: Annotated[Sequence[str], WRITERS] = tuple(sorted(WRITERS)),
    outputs: int = 0,
) -> Iterator[str]:
    """Damaged replies in every notation (`tests/output/corpus/damage.py`), and what would harm an agent.

    Each notation writes two calls, alone and beside prose and reasoning. Each reply is damaged: cut, a
    character lost, doubled, swapped or put in, a mark lost, doubled, swapped, or another notation's in its
    place. It is read as one that the model ended, and as one that the limit cut, at once and letter by
    letter. Counted are

        streamed   it means something else when it comes in pieces
        open       a call is open although the model ended its reply
        invalid    arguments that are no JSON object
        wrong      an argument that nobody meant: no value of the undamaged reply, nor words of this one; or a
                   value with the tag of another argument or call in it, before which nothing ended a value
        shown      a control token of Harmony in the answer; markup of others is text where it makes no call
        words      beside these: a value with such a tag behind its own end tag or in a wrapper, or where more
                   than one thing is wrong. It has several readings, so it is what the model wrote (ADR 19)

    Args:
        outputs: of each notation; 0 for all
    """
    counted = (*damage.HARMS, "words")
    table(f"notation | outputs | calls | {' | '.join(counted)} | CPU")
    for name in notations:
        writer, tally, began = WRITERS[name], damage.Tally(), time.process_time()
        tags = damage.Tags.of(writer)
        for text, is_single in damage.outputs(writer, outputs).items():
            damage.check(writer, text, tally, tags, is_single=is_single)
        counts = (tally.harms[kind] for kind in counted)
        row(name, f"{tally.outputs:,}", f"{tally.calls:,}", *counts, f"{time.process_time() - began:.0f} s")
        if harms := sum(tally.harms[harm] for harm in damage.HARMS):
            yield f"{name}: {harms} harms"


PARTS: Mapping[str, Part] = {
    "reading": reading,
    "unclosed": unclosed,
    "held": held,
    "damaged": damaged,
    "prepare": replies_prepare.prepare,
    "many": replies_prepare.many,
}
