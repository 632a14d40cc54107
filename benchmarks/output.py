"""Measure the cost of reading a reply: tokens to text, text to reasoning, answer and calls.

    python benchmarks/output.py [--rounds N] [--tokens N]

Feeds made-up replies of about four letters a token through the detokenizer and the output stream, as the
engine thread and an HTTP thread do together, and takes the CPU time of this thread. The figures are medians
of the rounds. A ratio of the last quarter to the first near 1 says that a long reply costs no more for each
token than a short one.

The second table is of replies that are nothing but calls that never end: what the dearest token costs, and
the end of the reply, at which all of it turns out to be text. The mark is an end under 100 ms after 200 kB;
the exit status is 1 if one is missed.

The third table is of time, in tokens: how long each notation holds back the text of an argument, from the
token that has it to the event with it. `quoted`: the text quotes a call of the same notation in its middle;
`-`: such a call has several readings.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from start_llm.core.chat import Json  # noqa: E402 - found through the line above
from start_llm.core.events import CallArguments, Content, Finished, Reasoning, Text, Usage  # noqa: E402
from start_llm.core.family import Family, ReasoningMarks  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.engine.detokenize import Detokenizer  # noqa: E402
from start_llm.formats.reading.schema import Tools  # noqa: E402
from start_llm.formats.registry import family_by_name  # noqa: E402
from start_llm.output.splitter import make_splitter  # noqa: E402
from start_llm.output.stream import OutputStream  # noqa: E402
from tests.output.corpus.writers import WRITERS, Writer  # noqa: E402

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


@dataclass(frozen=True)
class Cost:
    """CPU seconds of the four quarters of a reply."""

    quarters: tuple[float, ...]
    tokens: int

    @property
    def per_token(self) -> float:
        return sum(self.quarters) / self.tokens

    @property
    def growth(self) -> float:
        return self.quarters[-1] / self.quarters[0]


def tokens_of(text: str) -> list[bytes]:
    """Bytes of about four letters each, characters cut in two where they fall so."""
    data = text.encode()
    return [data[start : start + LETTERS_PER_TOKEN] for start in range(0, len(data), LETTERS_PER_TOKEN)]


def read(tokens: list[bytes]) -> Cost:
    """Read a whole reply, a token at a time."""
    detokenizer = Detokenizer(tokens.__getitem__)
    stream = OutputStream(make_splitter(FAMILY, TOOLS, reasoning_is_open=False, thinking=True))
    marks = [time.thread_time()]
    quarter = len(tokens) // 4
    letters = 0
    for token in range(len(tokens)):
        for output in stream.feed(Text(detokenizer.feed(token), (token,))):
            letters += len(output.text) if isinstance(output, Content | Reasoning) else 0
        if (token + 1) % quarter == 0 and len(marks) < 4:
            marks.append(time.thread_time())
    stream.close(Finished("stop", Usage(prompt=1, cached=0, completion=len(tokens))))
    marks.append(time.thread_time())
    return Cost(tuple(end - begin for begin, end in pairwise(marks)), len(tokens))


def row(name: str, costs: list[Cost]) -> str:
    microseconds = 1e6 * statistics.median(cost.per_token for cost in costs)
    share = microseconds * TOKENS_PER_SECOND / 1e4
    growth = statistics.median(cost.growth for cost in costs)
    return f"| {name} | {costs[0].tokens:,} | {microseconds:.1f} µs | {share:.2f} % | {growth:.2f} |"


@dataclass(frozen=True)
class Ending:
    """CPU seconds of the dearest token of a reply, and of its end."""

    worst_token: float
    closing: float


def end(family: str, text: str) -> Ending:
    """Read a reply, four letters at a time, and close it."""
    splitter = make_splitter(family_by_name(family), TOOLS, reasoning_is_open=False, thinking=True)
    worst = 0.0
    for start in range(0, len(text), LETTERS_PER_TOKEN):
        began = time.thread_time()
        splitter.feed(text[start : start + LETTERS_PER_TOKEN])
        worst = max(worst, time.thread_time() - began)
    began = time.thread_time()
    splitter.close(complete=True)
    return Ending(worst, time.thread_time() - began)


def unclosed(rounds: int) -> bool:
    """Print what unclosed calls cost. Whether every end keeps the mark."""
    print(f"\n| {UNCLOSED_LETTERS // 1000} kB of unclosed calls | dearest token | end | |")
    print("|---|---|---|---|")
    all_kept = True
    for name, (family, unit, last) in UNCLOSED.items():
        text = unit * (UNCLOSED_LETTERS // len(unit)) + last
        endings = [end(family, text) for _ in range(rounds)]
        # The dearest of 50,000 tokens meets every interruption of the machine, so the calmest round counts.
        worst = min(ending.worst_token for ending in endings)
        closing = statistics.median(ending.closing for ending in endings)
        is_kept = closing < MAX_CLOSING_SECONDS
        all_kept = all_kept and is_kept
        mark = "kept" if is_kept else "MISSED"
        print(f"| {name} | {1e3 * worst:.1f} ms | {1e3 * closing:.1f} ms | {mark} |", flush=True)
    return all_kept


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


def held_back() -> None:
    """Print for how many tokens the text of an argument waits."""
    plain = prose(ARGUMENT_LETTERS)
    tokens = ARGUMENT_LETTERS // LETTERS_PER_TOKEN
    print(f"\n| text argument of {tokens:,} tokens | median | most | quoted: median | quoted: most |")
    print("|---|---|---|---|---|")
    for name, writer in sorted(WRITERS.items()):
        half = len(plain) // 2
        quoting = f"{plain[:half]}\n{writer.call('write', text='a')}\n{plain[half:]}"
        columns: list[str] = []
        for text in (plain, quoting):
            waits = held_tokens(writer, text)
            columns += [f"{statistics.median(waits):.0f}", f"{max(waits)}"] if waits else ["-", "-"]
        print(f"| {name} | {' | '.join(columns)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=30_000)
    options = parser.parse_args()
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores; {options.rounds} rounds\n")
    print(
        f"| reply | tokens | CPU per token | of a core at {TOKENS_PER_SECOND} tok/s | last / first quarter |"
    )
    print("|---|---|---|---|---|")
    gc.disable()
    for name, make in REPLIES.items():
        tokens = tokens_of(make(options.tokens * LETTERS_PER_TOKEN))
        read(tokens)
        print(row(name, [read(tokens) for _ in range(options.rounds)]), flush=True)
    is_kept = unclosed(options.rounds)
    held_back()
    if not is_kept:
        sys.exit(1)


if __name__ == "__main__":
    run_with_openblas()
    main()
