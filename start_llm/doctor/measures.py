"""Measure what a user of a coding agent notices: what is read again, and how long everything takes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from start_llm.core.common_beginning import common_length
from start_llm.doctor.findings import Finding
from start_llm.doctor.network import AGAINST_THE_END, Network
from start_llm.doctor.server import ExaminedServer, TimedAnswer
from start_llm.doctor.text import prose
from start_llm.telemetry.metrics import DraftMetrics

_QUESTION_WORDS = 12
_REPLY_TOKENS = 12
_DECODED_TOKENS = 64
_DECODE_RUNS = 3
_AT_ONCE = 4
_TRIAL_WORDS = 400
_LEAST_TOKENS, _MOST_TOKENS = 600, 12_000
_LOST_SHARE, _LOST_TOKENS = 0.03, 256
"""What may be computed again without a remark: this share of what was known, or a page."""
_SLOW_DECODE = 0.5

type Message = dict[str, str]


def _user(seed: str) -> Message:
    return {"role": "user", "content": prose(seed, _QUESTION_WORDS)}


@dataclass(frozen=True, slots=True)
class ReuseShape:
    """How much of a prompt was computed.

    Attributes:
        unavoidable: prompt tokens that nobody could know before.
    """

    name: str
    unavoidable: int
    answer: TimedAnswer

    @property
    def known(self) -> int:
        return self.answer.prompt - self.unavoidable

    @property
    def lost(self) -> int:
        """Tokens that were known before and were computed again."""
        return max(self.known - self.answer.cached, 0)


@dataclass(slots=True)
class _GrowingChat:
    """A growing conversation with the server.

    Attributes:
        known: tokens of the last prompt and its reply.
    """

    server: ExaminedServer
    messages: list[Message]
    known: int = 0

    def ask(self) -> TimedAnswer:
        answer = self.server.chat(self.messages, _REPLY_TOKENS)
        self.known = answer.prompt + answer.completion
        return answer

    def go_on(self, answer: TimedAnswer, seed: str) -> None:
        self.messages = [*self.messages, answer.message, _user(seed)]

    def next_shape(self, name: str, before: TimedAnswer, seed: str) -> ReuseShape:
        """Ask the next question."""
        known = self.known
        self.go_on(before, seed)
        answer = self.ask()
        return ReuseShape(name, max(answer.prompt - known, 1), answer)

    def branch(self, name: str, messages: list[Message]) -> ReuseShape:
        """Ask something else; the conversation does not go on with it."""
        ours, theirs = self.server.tokens(messages), self.server.tokens(self.messages)
        answer = self.server.chat(messages, _REPLY_TOKENS)
        return ReuseShape(name, max(len(ours) - common_length(ours, theirs), 1), answer)


@dataclass(frozen=True, slots=True)
class CacheTrial:
    """A conversation in the shapes that agents give it, played up to a restart of the server.

    Attributes:
        cold: the first answer.
        last: the last answer of the conversation.
        shapes: of all other requests.
    """

    talk: _GrowingChat
    cold: TimedAnswer
    last: TimedAnswer
    shapes: tuple[ReuseShape, ...]

    @classmethod
    def play(cls, server: ExaminedServer, tokens: int) -> CacheTrial:
        """Play it.

        Args:
            tokens: of the first prompt, about.
        """
        rules = {"role": "system", "content": _rules_in(server, tokens)}
        talk = _GrowingChat(server, [rules, _user("first")])
        cold = talk.ask()
        following = talk.next_shape("the next question", cold, "second")
        again = ReuseShape("the same prompt again", 1, server.chat(talk.messages, _REPLY_TOKENS))
        reworded = talk.branch("the last question in other words", [*talk.messages[:-1], _user("reworded")])
        other = talk.branch("another conversation, same rules", [rules, _user("other")])
        back = talk.next_shape("back in the first conversation", following.answer, "third")
        return cls(talk, cold, back.answer, (following, again, reworded, other, back))

    def findings_after_restart(self, *, reuses: bool) -> Iterator[Finding]:
        """Go on once the server has been started again, and judge all of it.

        Args:
            reuses: there is a prompt cache.
        """
        rules = self.talk.messages[0]
        back = self.talk.next_shape("after a restart", self.last, "fourth")
        other = self.talk.branch("after a restart, another conversation, same rules", [rules, _user("later")])
        yield _first_token(self.cold, self.shapes[0].answer, back.answer)
        if reuses:
            yield from map(_reuse, (*self.shapes, back, other))
        else:
            yield Finding("reuse", "skipped", "there is no prompt cache for this model and these settings")


def _rules_in(server: ExaminedServer, tokens: int) -> str:
    """Return rules of about so many tokens."""
    for_a_word = len(server.tokens([_rules_of(_TRIAL_WORDS)])) / _TRIAL_WORDS
    return _rules_of(int(tokens / for_a_word))["content"]


def _rules_of(words: int) -> Message:
    return {"role": "user", "content": prose("rules of the house", words)}


def prompt_length(server: ExaminedServer, seconds: float) -> int:
    """Return the tokens of a prompt that takes about so long here and fits the model's window."""
    trial = server.chat([_rules_of(_TRIAL_WORDS)], 1)
    speed = trial.computed / trial.ttft_s
    window = server.runtime.card.context_window
    return min(max(int(speed * seconds), _LEAST_TOKENS), _MOST_TOKENS, window // 2)


def _reuse(shape: ReuseShape) -> Finding:
    figures: Mapping[str, Any] = {
        "shape": shape.name,
        "prompt_tokens": shape.answer.prompt,
        "cached_tokens": shape.answer.cached,
        "unavoidable_tokens": shape.unavoidable,
        "lost_tokens": shape.lost,
    }
    text = (
        f"{shape.name}: {shape.answer.computed:,} of {shape.answer.prompt:,} tokens computed, "
        f"{shape.unavoidable:,} of them new"
    )
    if shape.answer.cached == 0:
        return Finding("reuse", "fault", f"{text}: nothing was reused", figures)
    is_fine = shape.lost <= max(_LOST_SHARE * shape.known, _LOST_TOKENS)
    return Finding("reuse", "fine" if is_fine else "look", text, figures)


def _first_token(cold: TimedAnswer, warm: TimedAnswer, restarted: TimedAnswer) -> Finding:
    """Compare the times to the first token."""
    speed = cold.computed / cold.ttft_s
    figures = {
        "prompt_tokens": cold.prompt,
        "cold_s": round(cold.ttft_s, 3),
        "warm_s": round(warm.ttft_s, 3),
        "after_restart_s": round(restarted.ttft_s, 3),
        "prefill_tokens_per_s": round(speed, 1),
    }
    text = (
        f"{cold.ttft_s:.2f} s cold ({cold.prompt:,} tokens, {speed:,.0f} a second), {warm.ttft_s:.2f} s for "
        f"the next question, {restarted.ttft_s:.2f} s after a restart"
    )
    return Finding("first token", "fine", text, figures)


def decode_findings(server: ExaminedServer, network: Network) -> Iterator[Finding]:
    """Compare replies of the server with those of mlx_lm's own loop, run by turns."""
    runtime = server.runtime
    prompt = server.tokens([_rules_of(_TRIAL_WORDS)])
    bias = dict.fromkeys(map(str, runtime.startup.model.tokenizer.eos_token_ids), AGAINST_THE_END)
    bare, ours = list[float](), list[float]()
    for _ in range(_DECODE_RUNS):
        bare.append(
            runtime.engine.run(
                "decode without a server", partial(network.decode_speed, prompt, _DECODED_TOKENS)
            )
        )
        ours.append(_speed(server.chat([_rules_of(_TRIAL_WORDS)], _DECODED_TOKENS, logit_bias=bias)))
    own, theirs = statistics.median(ours), statistics.median(bare)
    figures = {
        "tokens_per_s": round(own, 1),
        "mlx_lm_tokens_per_s": round(theirs, 1),
        "ratio": round(own / theirs, 3),
    }
    text = f"{own:,.1f} tokens a second, {own / theirs:.2f} of bare mlx_lm ({theirs:,.1f})"
    if own < _SLOW_DECODE * theirs:
        yield Finding("decode", "look", f"{text}: the server takes more time than the model", figures)
    else:
        yield Finding("decode", "fine", text, figures)
    together = _together(server, bias)
    text = (
        f"{_AT_ONCE} replies at once: {together:,.1f} tokens a second, {together / own:.1f} times one reply"
    )
    reason = runtime.card.unbatched_reason
    if reason:
        text += f"; one after another, because {reason}"
    yield Finding(
        "decode",
        "fine",
        text,
        {"replies": _AT_ONCE, "tokens_per_s": round(together, 1), "batches": not reason},
    )


def draft_finding(drafts: DraftMetrics) -> Finding:
    """Say whether drafts pay on this machine, and what they have done for the replies of this examination."""
    figures = {
        "pays": drafts.pays,
        "drafted_tokens": drafts.drafted_tokens,
        "accepted_tokens": drafts.accepted_tokens,
        "saved_s": round(drafts.saved_s, 3),
    }
    if not drafts.pays:
        text = "none: a pass of several tokens takes as long as so many passes, or SPECULATION is off"
        return Finding("drafts", "fine", text, figures)
    text = (
        f"they can pay here: {drafts.accepted_tokens:,} of {drafts.drafted_tokens:,} drafted tokens were "
        f"right, as many forward passes less; {drafts.saved_s:.1f} s saved"
    )
    return Finding("drafts", "fine", text, figures)


def _speed(answer: TimedAnswer) -> float:
    return (answer.completion - 1) / max(answer.decode_s, 1e-6)


def _together(server: ExaminedServer, bias: Mapping[str, float]) -> float:
    """Return the tokens per second of several replies together, from the first one's beginning on."""

    def ask(number: int) -> TimedAnswer:
        asked = [_rules_of(_TRIAL_WORDS), {"role": "assistant", "content": "Yes."}, _user(f"reply {number}")]
        return server.chat(asked, _DECODED_TOKENS, logit_bias=bias)

    pool = ThreadPoolExecutor(_AT_ONCE)  # no `with`: who interrupts it would wait for the replies
    answers = [*pool.map(ask, range(_AT_ONCE))]
    pool.shutdown()
    longest = max(answer.decode_s for answer in answers)
    return sum(answer.completion - 1 for answer in answers) / max(longest, 1e-6)
