"""The story of a request: refused, planned, answered, accounted for."""

import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from jinja2 import TemplateError

from start_llm.core.chat import (
    ChatRequest,
    GenerationOptions,
    Json,
    Lineage,
    Message,
    RequestOrigin,
    TextRequest,
    Thinking,
    ToolCall,
)
from start_llm.core.engine_request import EngineRequest, ReasoningLimit
from start_llm.core.errors import ContextOverflow, EngineDied, InvalidRequest, OverBudget, Overloaded
from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Failed,
    Finished,
    Idle,
    Prefilling,
    Reasoning,
    Restored,
    ScoredToken,
    Text,
    TokenLogprobs,
    Usage,
)
from start_llm.core.explanation import Explanation
from start_llm.core.family import Family, ReasoningMarks
from start_llm.core.images import ImageRun, image_tokens
from start_llm.core.prompt import ModelTokens
from start_llm.core.repetition import RUNAWAY_TOKENS, RepetitionPolicy
from start_llm.core.sampling import Sampling, SamplingChoice
from start_llm.prompt.prepare import Preparer
from start_llm.protocols.anthropic.error_bodies import anthropic_refusal
from start_llm.serving.answer import Answer
from start_llm.serving.request_preparation import RequestPreparer
from start_llm.serving.service import ReplyDefaults, Service, _image_spans
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.request_record import RequestRecord
from start_llm.telemetry.terminal import Terminal
from start_llm.telemetry.trace import Texts, Trace, fields_of, session_digest
from start_llm.transcripts.turn import Turn
from tests.model_cards import model_card
from tests.transcripts.fakes import transcripts

WINDOW = 20
REFUSED = "No."
USAGE = Usage(prompt=5, cached=2, completion=3)
DONE = Finished("stop", USAGE)
SPEAKER = Family(name="generic")
"""Thinks nothing that it does not say."""
THINKER = Family(
    name="qwen3", reasoning=ReasoningMarks("<think>", "</think>", cut="\n</think>\n\n"), formats=("hermes",)
)
ORIGIN = RequestOrigin("chatcmpl-1", "/v1/chat/completions", "tiny", "pi")
TOOL: dict[str, Json] = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


class Letters:
    """Its tokens are characters; its template writes all it gets, one after the other, and `tail`."""

    added_tokens: Sequence[str] = ()
    end_texts: frozenset[str] = frozenset()
    eos_token_ids = frozenset({ord("\n")})
    control_tokens: Mapping[str, int] = {}
    chat_template = ""

    def __init__(
        self, has_chat_template: bool = True, trims_leading_space: bool = False, tail: str = ""
    ) -> None:
        self.has_chat_template = has_chat_template
        self.trims_leading_space = trims_leading_space
        self._tail = tail

    def render(
        self,
        messages: list[dict[str, Json]],
        tools: list[dict[str, Json]] | None,
        options: Mapping[str, Json],
        *,
        add_generation_prompt: bool,
        strftime_now: Callable[[str], str],
    ) -> str:
        if messages[-1]["content"] == REFUSED:
            raise TemplateError("not this word")
        written = [json.dumps(tools)] if tools else []
        for message in messages:
            calls = message.get("tool_calls")
            written += [str(message["content"]), *([json.dumps(calls)] if calls else [])]
        return "".join(written) + (self._tail if add_generation_prompt else "")

    def encode(self, text: str, *, as_document: bool) -> list[int]:
        return [*([1] if as_document and text else []), *map(ord, text)]

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode(text, as_document=False)

    def fewest_tokens(self, text: str) -> int:
        return len(text) // 10  # more than it has to know

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()


_SOON_S = 60.0
"""Events at such times are so many seconds from now; all others were made when the test was written down."""


def made_now(event: Event) -> Event:
    """Return the event as the engine makes it now, or so many seconds later."""
    if isinstance(event, Text | Restored):
        now = time.perf_counter()
        return replace(event, at=now + event.at if event.at < _SOON_S else now)
    return event


class Script:
    """A generation that says what it was given, a list at a time."""

    def __init__(self, takes: list[list[Event]]) -> None:
        self.takes = iter(takes)
        self.cancelled = 0

    def take(self, timeout_s: float) -> list[Event]:
        assert 0 < timeout_s <= 0.1
        return [made_now(event) for event in next(self.takes)]

    def cancel(self, *, is_over: bool = False) -> None:
        self.cancelled += 1


class Engine:
    """Keeps the jobs that it is given."""

    def __init__(self, script: Script, refusal: Exception | None = None) -> None:
        self.script, self.refusal = script, refusal
        self.cached: int | None = None
        self.engine_requests: list[EngineRequest] = []

    def submit(self, request: EngineRequest) -> Script:
        if self.refusal:
            raise self.refusal
        self.engine_requests.append(request)
        return self.script

    def peek(self, request: EngineRequest) -> Restored:
        if self.refusal:
            raise self.refusal
        return Restored(len(request.prompt) - 1 if self.cached is None else self.cached)


class Traced(Trace):
    """Keeps what it would write."""

    def __init__(self) -> None:
        self.written: list[tuple[dict[str, Any], tuple[str, str]]] = []

    def write(self, record: RequestRecord, explanation: Explanation, texts: Texts) -> None:
        self.written.append((fields_of(record, explanation), texts()))


class Desk:
    """A service with everything around it."""

    def __init__(
        self,
        *takes: list[Event],
        tokenizer: Letters | None = None,
        refusal: Exception | None = None,
        default_max_tokens: int | None = None,
        sampling_defaults: tuple[SamplingChoice, ...] = (),
        family: Family = SPEAKER,
        window: int = WINDOW,
        repetition: RepetitionPolicy = "stop",
        **memory: Any,
    ) -> None:
        tokenizer = tokenizer or Letters()
        self.script = Script(list(takes) or [[DONE]])
        self.engine = Engine(self.script, refusal)
        self.metrics = RequestMetrics()
        self.screen = io.StringIO()
        self.trace = Traced()
        self.transcripts = transcripts(lambda token: chr(token).encode(), lambda text: [*map(ord, text)])
        model = model_card(family=family, vocabulary=2**16, window=window, **memory)
        self.service = Service(
            engine=self.engine,
            requests=RequestPreparer(Preparer(tokenizer, family), tokenizer, model),
            transcripts=self.transcripts,
            defaults=ReplyDefaults(
                max_tokens=default_max_tokens, sampling=sampling_defaults, repetition=repetition
            ),
            reports=Reports(self.metrics, Terminal(self.screen), self.trace),
        )

    def answer(self, request: ChatRequest | TextRequest | None = None) -> Answer:
        return self.service.respond(request or chat(), ORIGIN)

    def planned(self, request: ChatRequest | TextRequest) -> EngineRequest:
        self.answer(request)
        return self.engine.engine_requests[-1]

    def stats(self) -> Any:
        counts = self.transcripts.metrics
        return replace(self.metrics), counts.bound, counts.fresh, counts.stored.nodes, counts.notes

    def lines(self) -> list[str]:
        """Return the terminal's lines, without the clock."""
        return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in self.screen.getvalue().splitlines()]


def chat(
    text: str = "Hello",
    role: Any = "user",
    session: str | None = None,
    tools: tuple[dict[str, Json], ...] = (),
    late_tools: tuple[dict[str, Json], ...] = (),
    thinking: Thinking | None = None,
    **options: Any,
) -> ChatRequest:
    return ChatRequest(
        messages=(Message(role=role, content=text),),
        tools=tools,
        late_tools=late_tools,
        thinking=thinking or Thinking(),
        options=GenerationOptions(**options),
        session_id=session,
    )


def text(prompt: str | tuple[int, ...] = "Hello", **options: Any) -> TextRequest:
    return TextRequest(prompt=prompt, options=GenerationOptions(**options))


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("request_", "tokenizer", "param", "message"),
    [
        (chat(""), Letters(), "messages", "holds no token"),
        (text(""), Letters(), "prompt", "holds no token"),
        (chat(REFUSED), Letters(), "messages", "refuses these messages: not this word"),
        (chat(), Letters(has_chat_template=False), "messages", "no chat template"),
        (chat("x" * WINDOW), Letters(), "messages", "maximum context length is 20 tokens"),
        (text(tuple(range(WINDOW + 5))), Letters(), "prompt", "resulted in 25 tokens"),
    ],
)
def test_a_request_that_cannot_be_served_never_reaches_the_engine(request_, tokenizer, param, message):
    desk = Desk(tokenizer=tokenizer)
    with pytest.raises(InvalidRequest, match=message) as refusal:
        desk.answer(request_)
    assert refusal.value.param == param
    assert desk.engine.engine_requests == []
    assert (desk.metrics.in_flight, desk.metrics.endings, desk.lines()) == (0, {}, [])


def test_a_prompt_beyond_the_window_says_so_as_clients_expect_it():
    with pytest.raises(ContextOverflow) as refusal:
        Desk().answer(chat("x" * 33))
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    assert refusal.value.message == (
        "This model's maximum context length is 20 tokens. However, your messages resulted in 33 tokens, "
        "which leaves no room for a reply."
    )


def test_a_prompt_that_memory_never_holds_is_refused_with_both_numbers():
    with pytest.raises(OverBudget) as refusal:
        Desk(window=1000, memory_window=30, budget_bytes=3 * 2**29).answer(chat("x" * 30))
    error = refusal.value
    assert (error.status, error.kind, error.code) == (400, "memory_admission", "context_over_budget")
    assert error.message == (
        "This model's maximum context length is 30 tokens within the memory budget of 1.5 GiB. However, your "
        "messages resulted in 30 tokens."
    )
    assert anthropic_refusal(error, "req_1")["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 30 tokens > 29 maximum",
    }


def test_a_large_limit_is_cut_to_what_there_is_memory_for():
    desk = Desk(window=1000, memory_window=30)
    desk.answer(chat("x" * 20, max_tokens=500))
    assert desk.engine.engine_requests[-1].max_tokens == 10


def test_the_engine_learns_whose_request_it_is_and_whether_anybody_looks():
    desk = Desk()
    for is_background in (True, False):
        desk.answer(replace(chat(session="one"), is_background=is_background))
        assert (desk.engine.engine_requests[-1].session, desk.engine.engine_requests[-1].is_background) == (
            "one",
            is_background,
        )
    desk.answer(chat("Hello"))
    desk.answer(chat("Goodbye"))
    unnamed = [engine_request.session for engine_request in desk.engine.engine_requests[-2:]]
    assert all(unnamed) and len({*unnamed}) == 2, "each conversation is one of its own"


def test_a_full_engine_leaves_nothing_after():
    desk = Desk(refusal=Overloaded("full"))
    with pytest.raises(Overloaded):
        desk.answer()
    assert (desk.metrics.in_flight, desk.metrics.endings, desk.lines()) == (0, {}, [])


# ----------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("request_", [chat(), chat(tools=(TOOL,)), text(), text((1, 2, 3))])
def test_what_is_counted_is_what_would_be_computed_and_nothing_is_left_of_it(request_):
    desk = Desk(window=1000)
    before = desk.stats()
    counted = desk.service.count(request_)
    assert (desk.stats(), desk.engine.engine_requests) == (before, [])
    assert counted == len(desk.planned(request_).prompt)


def test_a_prompt_that_is_too_long_is_counted_and_one_that_cannot_be_made_is_refused():
    assert Desk().service.count(text(tuple(range(WINDOW + 5)))) == WINDOW + 5
    with pytest.raises(InvalidRequest, match="not this word"):
        Desk().service.count(chat(REFUSED))


# ----------------------------------------------------------------------------------------------- the plan


def test_the_engine_is_asked_for_what_the_request_says():
    engine_request = Desk().planned(chat("Hey", max_tokens=3, top_logprobs=4))
    assert engine_request.prompt.ids == (72, 101, 121)
    assert (engine_request.max_tokens, engine_request.top_logprobs) == (3, 4)


def test_a_text_is_a_document_and_token_ids_are_left_alone():
    assert Desk().planned(text("Hey")).prompt.ids == (1, 72, 101, 121)
    assert Desk().planned(text((7, 8))).prompt.ids == (7, 8)


@pytest.mark.parametrize(
    ("asked", "default", "planned"),
    [
        (3, None, 3),
        (15, None, 15),
        (16, None, 15),
        (2**31 - 1, 4, 15),
        (None, 4, 4),
        (None, 400, 15),
        (None, None, 15),
    ],
)
def test_a_reply_gets_at_most_what_the_prompt_leaves_of_the_window(asked, default, planned):
    desk = Desk(default_max_tokens=default)
    assert desk.planned(chat("12345", max_tokens=asked)).max_tokens == planned


def test_the_last_place_of_the_window_is_enough_for_one_token():
    assert Desk().planned(chat("x" * (WINDOW - 1))).max_tokens == 1


def test_sampling_comes_from_the_request_then_the_environment_then_the_model_then_the_table():
    environment = SamplingChoice(temperature=0.2, top_p=0.3)
    model = SamplingChoice(temperature=0.6, top_p=0.7, top_k=20)
    desk = Desk(sampling_defaults=(environment, model))
    sampling = desk.planned(chat(sampling=SamplingChoice(temperature=0.0))).sampling
    table = Sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.3, 20)
    assert (sampling.min_p, sampling.repetition_penalty) == (table.min_p, table.repetition_penalty)
    assert sampling.repetition_context_size == table.repetition_context_size


def test_penalties_bias_and_seed_are_the_requests_own():
    sampling = (
        Desk()
        .planned(chat(presence_penalty=1.0, frequency_penalty=-1.0, logit_bias={5: 2.0}, seed=9))
        .sampling
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.logit_bias, sampling.seed) == ({5: 2.0}, 9)
    assert Desk().planned(chat()).sampling.seed is None


def test_only_a_chat_drops_the_space_that_marks_the_start_of_a_text():
    desk = Desk(tokenizer=Letters(trims_leading_space=True))
    assert desk.planned(chat()).trims_leading_space
    assert not desk.planned(text()).trims_leading_space
    assert not Desk().planned(chat()).trims_leading_space


@pytest.mark.parametrize(("tail", "starts_open"), [("<think>", True), ("</think>", False), ("", False)])
def test_reasoning_gets_its_budget_and_is_closed_with_the_marks_of_the_family(tail, starts_open):
    desk = Desk(tokenizer=Letters(tail=tail), family=THINKER)
    assert desk.planned(chat(thinking=Thinking(budget=7))).reasoning == ReasoningLimit(
        max_reasoning_tokens=7,
        starts_open=starts_open,
        opening="<think>",
        closing="</think>",
        closing_tokens=tuple(map(ord, "\n</think>\n\n")),
    )


def test_reasoning_has_no_limit_without_a_budget_or_marks_or_in_a_text():
    thinker = Desk(family=THINKER)
    assert thinker.planned(chat()).reasoning is None
    assert thinker.planned(text()).reasoning is None
    assert Desk().planned(chat(thinking=Thinking(budget=7))).reasoning is None


# ---------------------------------------------------------------------------------------------- the answer


def heard(desk: Desk, request: ChatRequest | TextRequest | None = None) -> list[Event]:
    with desk.answer(request) as answer:
        return list(answer.events())


def test_events_come_through_up_to_the_end():
    story: list[list[Event]] = [[Idle()], [Prefilling(3, 5)], [Text("a", (1,))], [Idle()], [Text("b", (2,))]]
    expected = [Idle(), Prefilling(3, 5), Content("a", tokens=(1,)), Idle(), Content("b", tokens=(2,)), DONE]
    assert heard(Desk(*story, [DONE])) == expected


def test_text_that_piled_up_is_one_piece():
    scores = [TokenLogprobs(ScoredToken(token, -1.0), ()) for token in (1, 2)]
    piled: list[Event] = [Text("a", (1,), (scores[0],)), Text("b", (2,), (scores[1],)), Text("", (3,)), DONE]
    assert heard(Desk(piled)) == [Content("ab", tokens=(1, 2, 3), logprobs=tuple(scores)), DONE]


def test_of_progress_that_piled_up_the_newest_is_reported():
    piled: list[Event] = [Restored(1), Prefilling(2, 5), Prefilling(4, 5), Text("a", (1,)), DONE]
    assert heard(Desk(piled)) == [Prefilling(4, 5), Content("a", tokens=(1,)), DONE]


class ReadEvents(list[Event]):
    """Counts how many events are read of it, one by one or in slices."""

    reads = 0

    def __iter__(self) -> Iterator[Event]:
        for event in super().__iter__():
            self.reads += 1
            yield event

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        self.reads += len(part) if isinstance(part, list) else 1
        return part


def test_events_that_piled_up_are_read_a_few_times_however_many_there_are(monkeypatch: pytest.MonkeyPatch):
    """A client that had stopped reading for a while cost seconds: each was compared with all others."""
    desk = Desk()
    piled = ReadEvents([Restored(1), Prefilling(4, 5), *(Text("a", (1,)) for _ in range(500)), DONE])
    monkeypatch.setattr(desk.script, "take", lambda _: piled)
    assert heard(desk) == [Prefilling(4, 5), Content("a" * 500, tokens=(1,) * 500), DONE]
    assert piled.reads <= 3 * len(piled)


def test_text_before_a_failure_is_sent_first():
    piled: list[Event] = [Text("a", (1,)), Text("b", (2,)), Failed("no")]
    assert heard(Desk(piled)) == [Content("ab", tokens=(1, 2)), Failed("no")]


def test_reasoning_and_the_answer_after_it_are_kept_apart_and_the_reasoning_tokens_counted():
    desk = Desk(
        [Text("<think>", (1,))], [Text("Hm.", (2,)), Text("</think>", (3,)), Text("Yes", (4,))], [DONE],
        family=THINKER,
    )  # fmt: skip
    assert heard(desk) == [
        Idle(),
        Reasoning("Hm.", tokens=(1, 2)),
        Content("Yes", tokens=(3, 4)),
        Finished("stop", Usage(prompt=5, cached=2, completion=3, reasoning=3)),
    ]


def test_reasoning_that_the_prompt_has_opened_needs_no_opening_mark():
    desk = Desk([Text("Hm.</think>Yes", (1,)), DONE], tokenizer=Letters(tail="<think>"), family=THINKER)
    assert heard(desk)[:2] == [Reasoning("Hm.", tokens=(1,)), Content("Yes")]


def test_reasoning_is_assumed_only_where_the_model_may_think():
    family = replace(THINKER, orphan_close=True)
    events: list[Event] = [Text("Hm.</think>Yes", (1,)), DONE]
    assert heard(Desk(events, family=family))[:2] == [Reasoning("Hm.", tokens=(1,)), Content("Yes")]
    answer = heard(Desk(events, family=family), chat(thinking=Thinking(on=False)))
    assert answer == [Content("Hm.</think>Yes", tokens=(1,)), DONE]


@pytest.mark.parametrize("request_", [chat(tools=(TOOL,)), chat(late_tools=(TOOL,))])
def test_a_call_of_a_tool_that_was_offered_is_a_call_and_ends_the_reply_as_one(request_):
    written = '<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>'
    desk = Desk([Text(written, (1,)), DONE], family=THINKER, window=10_000)
    *events, end = heard(desk, request_)
    assert events[0] == CallStarted(0, "read", tokens=(1,))
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert json.loads(arguments) == {"path": "a"}
    assert events[-1] == CallEnded(0)
    assert end == Finished("tool_calls", USAGE)
    assert desk.metrics.endings == {"tool_calls": 1}
    assert " tool calls " in desk.lines()[0]


def test_what_looks_like_a_call_is_text_where_no_tool_was_offered():
    written = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
    assert heard(Desk([Text(written, (1,)), DONE], family=THINKER)) == [Content(written, tokens=(1,)), DONE]


def test_a_stop_string_ends_the_reply_and_what_the_engine_still_does():
    desk = Desk([Restored(2)], [Text("so EN", (1,))], [Text("D", (2,)), Text("never", (3,)), DONE])
    events = heard(desk, chat(stop=("END", "nowhere")))
    assert events == [
        Prefilling(2, 5),
        Content("so ", tokens=(1,)),
        Content("", tokens=(2,)),
        Finished("stop", Usage(prompt=5, cached=2, completion=2), stop="END"),
    ]
    assert desk.script.cancelled == 2, "once for the stop string, once because it is left"
    assert desk.metrics.endings == {"stop": 1}


def test_a_stop_string_ends_a_text_wherever_it_stands():
    desk = Desk([Text("<think>a\n\nb", (1,)), DONE], family=THINKER)
    events = heard(desk, text(stop=("\n\n",)))
    ended = Finished("stop", Usage(prompt=6, cached=0, completion=1), stop="\n\n")
    assert events == [Content("<think>a", tokens=(1,)), ended]


def test_a_stop_string_in_reasoning_or_in_the_space_after_it_is_none():
    desk = Desk([Text("<think>a\n\nb</think>\n\nc", (1,)), DONE], family=THINKER)
    assert heard(desk, chat(stop=("\n\n",))) == [Reasoning("a\n\nb", tokens=(1,)), Content("c"), DONE]


def test_a_stop_string_that_is_seen_when_the_reply_has_ended_is_named():
    desk = Desk([Text("so\n\n", (1,)), DONE], family=THINKER, window=1000)
    events = heard(desk, chat(stop=("\n\n",), tools=(TOOL,)))
    assert events == [Content("so", tokens=(1,)), replace(DONE, stop="\n\n")]


def test_the_marks_of_a_family_mean_nothing_in_a_text_completion():
    desk = Desk([Text("<think>Hm.</think>Yes", (1,)), DONE], family=THINKER)
    assert heard(desk, text()) == [Content("<think>Hm.</think>Yes", tokens=(1,)), DONE]


def test_text_whose_meaning_is_not_known_yet_leaves_time_to_look_after_the_client():
    story: list[list[Event]] = [[Text(piece, (1,))] for piece in ("<thi", "nk", ">", "\n", "Hm.")]
    desk = Desk(*story, [DONE], family=THINKER)
    *signs_of_life, reasoning, _ = heard(desk)
    assert signs_of_life == [Idle()] * 4
    assert reasoning == Reasoning("Hm.", tokens=(1,) * 5)


def test_a_long_silence_is_reported_again_and_again():
    assert heard(Desk([Idle()], [Idle()], [Idle()], [DONE])) == [Idle(), Idle(), Idle(), DONE]


@pytest.mark.parametrize(("reason", "status"), [("stop", "complete"), ("length", "at limit")])
def test_a_reply_is_counted_and_reported_when_it_ends(reason, status):
    desk = Desk(
        [Restored(2), Prefilling(4, 5), Text("a", (1,)), Text("bc", (2, 3))], [Finished(reason, USAGE)]
    )
    with desk.answer(chat(session="0123456789abcdef")) as answer:
        assert desk.metrics.in_flight == 1
        list(answer.events())
    assert (desk.metrics.in_flight, desk.metrics.endings) == (0, {reason: 1})
    counted = desk.metrics.prompt_tokens, desk.metrics.cached_tokens, desk.metrics.completion_tokens
    assert counted == (5, 2, 3)
    (line,) = desk.lines()
    who = rf"chat +pi +[0-9a-f]{{6}} 456789abcdef +{status}"
    assert re.fullmatch(rf"{who} +2 cached +3 read +3 written +[\d,.]+/s  first  0\.\d\d s", line)


def test_a_failure_is_counted_and_its_cause_reported():
    desk = Desk([Text("a", (1,))], [Failed("The engine failed: no")])
    assert heard(desk)[-1] == Failed("The engine failed: no")
    assert (desk.metrics.endings, desk.metrics.completion_tokens) == ({"failed": 1}, 1)
    cause, line = desk.lines()
    assert cause.endswith("The engine failed: no")
    assert re.search(r" failed .* 1 written", line)


def test_a_client_that_leaves_cancels_its_generation():
    desk = Desk([Text("a", (1,))], [Text("b", (2,))], [DONE])
    with pytest.raises(ConnectionError), desk.answer() as answer:
        for event in answer.events():
            assert desk.script.cancelled == 0
            if isinstance(event, Content):
                raise ConnectionError
    assert desk.script.cancelled == 1
    assert (desk.metrics.in_flight, desk.metrics.endings) == (0, {"cancelled": 1})
    (line,) = desk.lines()
    assert re.search(r" cancelled +0 cached +5 read +1 written +first  0\.\d\d s$", line)
    counted = desk.metrics.prompt_tokens, desk.metrics.cached_tokens, desk.metrics.completion_tokens
    assert counted == (5, 0, 1), "what was made counts, also for nobody"


@pytest.mark.parametrize(
    "step",
    [
        "transcripts.turn.Turn.record_submitted",
        "serving.service.Service._prompt_account",
        "telemetry.activity.Activity.begin",
    ],
)
def test_what_breaks_behind_the_submission_leaves_no_request_that_nobody_reads(
    step: str, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(f"start_llm.{step}", broken)
    desk = Desk()
    with pytest.raises(MemoryError), desk.answer():
        pass
    assert (len(desk.engine.engine_requests), desk.script.cancelled, desk.metrics.in_flight) == (1, 1, 0)


@pytest.mark.parametrize("step", ["transcripts.turn.Turn.explain", "telemetry.terminal.Terminal.finished"])
def test_a_request_whose_report_breaks_is_out_of_flight_all_the_same(
    step: str, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(f"start_llm.{step}", broken)
    desk = Desk()
    with pytest.raises(RuntimeError), desk.answer() as answer:
        list(answer.events())
    assert (desk.metrics.in_flight, desk.metrics.endings) == (0, {"stop": 1})


def test_no_event_of_a_reply_waits_for_its_explanation(monkeypatch: pytest.MonkeyPatch):
    explained, explain = list[Restored](), Turn.explain

    def noted(turn: Turn, restored: Restored) -> Explanation:
        explained.append(restored)
        return explain(turn, restored)

    monkeypatch.setattr(Turn, "explain", noted)
    restored = Restored(2)
    desk = Desk([restored, Text("a", (1,))], [DONE])
    with desk.answer() as answer:
        assert list(answer.events())[-1] == DONE
        assert explained == []
    assert explained == [restored]


def test_what_breaks_before_the_submission_reaches_no_engine(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise RecursionError

    monkeypatch.setattr("start_llm.serving.service.repeated_calls", broken)
    desk = Desk()
    with pytest.raises(RecursionError):
        desk.answer()
    assert desk.engine.engine_requests == []


def test_a_client_that_leaves_before_the_first_text_has_no_times():
    desk = Desk([Restored(1), Prefilling(3, 5)], [Idle()])
    with desk.answer() as answer:
        next(answer.events())
    assert desk.metrics.endings == {"cancelled": 1}
    assert (desk.metrics.prompt_tokens, desk.metrics.cached_tokens) == (3, 1), "as far as it was read"
    assert re.search(r" cancelled +1 cached +2 read +0 written +first       -$", desk.lines()[0])


def test_answers_at_the_same_time_are_counted_one_by_one():
    desk = Desk()
    with desk.answer(), desk.answer(), desk.answer():
        assert desk.metrics.in_flight == 3
    assert (desk.metrics.in_flight, desk.metrics.endings) == (0, {"cancelled": 3})


def test_the_clock_of_a_request_begins_before_its_prompt_is_prepared():
    class Slow(Letters):
        def encode(self, text: str, *, as_document: bool) -> list[int]:
            time.sleep(0.05 if text == "Hello" else 0)
            return super().encode(text, as_document=as_document)

    desk = Desk([Text("a", (1,)), DONE], tokenizer=Slow())
    heard(desk)
    ttft = re.search(r"first  (\d\.\d\d) s", desk.lines()[0])
    assert ttft
    assert float(ttft[1]) >= 0.05


def test_speeds_are_those_of_the_engine_although_its_tokens_are_read_all_at_once():
    """40 tokens of the prompt took 2 s, then 3 of the reply 0.5 s each; the reader came after all of that."""
    events: list[Event] = [Restored(10, at=0.0), Text("a", (1,), at=2.0)]
    events += [Text("b", (2, 3), at=3.0), Text("c", (4,), at=3.5), DONE]
    desk = Desk(events, window=200)
    heard(desk, chat("Hello" * 10))
    (line,) = desk.lines()
    assert re.search(r" 40 read +20\.0/s +3 written +2\.0/s +first +2\.0\d s", line)


# ------------------------------------------------------------------------------------------------ the trace


def traced(desk: Desk, request: ChatRequest | TextRequest | None = None) -> dict[str, Any]:
    heard(desk, request)
    ((line, _),) = desk.trace.written
    return line


def test_what_the_cache_had_is_progress_and_stands_in_the_trace():
    desk = Desk([Restored(2, "no_state", 1)], [Prefilling(4, 5), Text("a", (1,)), DONE])
    assert heard(desk) == [Prefilling(2, 5), Prefilling(4, 5), Content("a", tokens=(1,)), DONE]
    ((line, _),) = desk.trace.written
    assert (line["cached_tokens"], line["computed_tokens"], line["completion_tokens"]) == (2, 3, 3)
    assert (line["cache_hit"], line["miss_reason"], line["ending"]) == (True, "no_state", "stop")
    assert line["cache_metrics_bumped_this_request"] == {
        "vlm_retreat": 0,
        "hybrid_trim_miss": 1,
        "exact_key_rejected_by_model_lcp": 1,
    }


def test_a_request_is_traced_once_it_has_ended_and_before_it_is_out_of_flight():
    desk = Desk([Restored(0, "new"), Text("a", (1,)), DONE])
    with desk.answer() as answer:
        list(answer.events())
        assert desk.trace.written == []
    assert len(desk.trace.written) == 1


@pytest.mark.parametrize(
    ("story", "computed", "replied", "hit"),
    [
        ([Idle()], 0, 0, None),
        ([Restored(1)], 0, 0, True),
        ([Restored(1), Prefilling(4, 5)], 3, 0, True),
        ([Restored(0, "new"), Prefilling(4, 5), Text("ab", (1, 2))], 5, 2, False),
    ],
)
def test_of_a_request_that_was_given_up_what_had_been_done_is_traced(story, computed, replied, hit):
    desk = Desk(story)
    with desk.answer() as answer:
        next(answer.events())
    ((line, _),) = desk.trace.written
    assert (line["ending"], line["computed_tokens"], line["completion_tokens"]) == (
        "cancelled",
        computed,
        replied,
    )
    assert line["cache_hit"] is hit
    assert (line["ttft_seconds"] is None) == (replied == 0)


def test_a_failure_is_traced():
    desk = Desk([Restored(0, "new"), Failed("no")])
    line = traced(desk)
    assert (line["ending"], line["computed_tokens"], line["completion_tokens"]) == ("failed", 0, 0)


def test_a_request_that_was_refused_is_not_traced():
    desk = Desk(refusal=Overloaded("full"))
    with pytest.raises(Overloaded):
        desk.answer()
    assert desk.trace.written == []


def test_the_trace_has_the_request_and_nothing_that_a_client_chose():
    request = replace(chat("Hey", session="mine"), lineage=Lineage("parent", None), tenant=b"t")
    line = traced(Desk([DONE]), request)
    assert (line["request_id"], line["endpoint"], line["model"]) == (ORIGIN.id, ORIGIN.endpoint, ORIGIN.model)
    assert (line["session"], line["session_source"]) == (session_digest(b"t", "mine"), "client")
    assert (line["parent_session"], line["branch"]) == (session_digest(b"t", "parent"), None)
    assert (line["messages"], line["prompt_tokens"]) == (1, 3)
    assert "mine" not in repr(line)


def test_without_a_name_a_conversation_is_called_after_its_beginning_and_a_text_not_at_all():
    first = traced(Desk([DONE]), chat("Hey"))
    second = traced(Desk([DONE]), chat("Hey"))
    other = traced(Desk([DONE]), chat("Ho"))
    assert first["session"] == second["session"] != other["session"]
    assert first["session_source"] == "conversation"
    nameless = traced(Desk([DONE]), text("Hey"))
    assert (nameless["session"], nameless["session_source"]) == (session_digest(b"", ""), "none")
    assert nameless["messages"] == 0


def test_the_trace_has_how_much_was_known_and_how_much_of_it_was_bound():
    desk = Desk([Text("Yes", tuple(b"Yes")), Finished("length", USAGE)], [DONE], window=100)
    heard(desk)
    again = [Message(role="user", content="Hello"), Message(role="assistant", content="Yes \n")]
    heard(desk, ChatRequest(messages=(*again, Message(role="user", content="Why?"))))
    first, second = (line for line, _ in desk.trace.written)
    assert (first["stable_prefix_msg_count"], first["bound_messages"], first["cache_key_delta_chars"]) == (
        0,
        0,
        0,
    )
    assert (second["stable_prefix_msg_count"], second["cache_key_delta_chars"]) == (2, 2)
    assert first["session"] == second["session"]
    assert second["binding_refusal"] is None


def test_the_texts_of_the_trace_are_what_the_model_read_and_wrote():
    desk = Desk([Text("<think>", (60,)), Text("Yes", tuple(b"Yes")), DONE], tokenizer=Letters(tail="|"))
    heard(desk)
    ((_, texts),) = desk.trace.written
    assert texts == ("Hello|", "<Yes")


# ----------------------------------------------------------------------------------------------------- images


def pictured(*numbers: int) -> tuple[EngineRequest, list[int]]:
    """A prompt with four tokens of text and of an image for each number, and the images decoded so far."""
    decoded: list[int] = []

    def run(number: int) -> ImageRun:
        def inputs() -> Mapping[str, Any]:
            decoded.append(number)
            return {}

        return ImageRun(image_tokens(bytes([number]), 4), (9,) * 4, None, inputs)

    runs = tuple(run(number) for number in numbers)
    ids = [token for image_run in runs for token in (1, 2, 3, 4, *image_run.tokens)]
    prompt = ModelTokens((*ids, 5))
    return EngineRequest(prompt=prompt, max_tokens=1, sampling=Sampling(), images=runs), decoded


@pytest.mark.parametrize(
    ("cached", "expected"), [(0, [1, 2, 3]), (7, [1, 2, 3]), (8, [2, 3]), (16, [3]), (24, [])]
)
def test_images_that_are_cached_are_not_decoded(cached, expected):
    """Before the engine has the request: the HTTP thread waits for its own images only."""
    desk, (request, decoded) = Desk(), pictured(1, 2, 3)
    desk.engine.cached = cached
    desk.service._decode_images(_image_spans(request), request)
    assert decoded == expected


def test_nothing_is_asked_about_a_prompt_without_images():
    desk = Desk(refusal=EngineDied("it would be asked"))
    request, _ = pictured()
    desk.service._decode_images(_image_spans(request), request)


# ----------------------------------------------------------------------------------------------- in circles

LOOP: list[Event] = [Text("ha ", (104, 97, 32)) for _ in range(RUNAWAY_TOKENS)]
"""Three times as many tokens as make a runaway reply."""


def looping(repetition: RepetitionPolicy, **desk: Any) -> Desk:
    return Desk(*([piece] for piece in LOOP), [DONE], repetition=repetition, window=10**5, **desk)


def test_a_reply_that_runs_away_ends_as_at_its_limit_and_is_not_recorded():
    desk = looping("stop")
    events = heard(desk)
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.cut_by) == ("length", "repetition")
    assert RUNAWAY_TOKENS <= end.usage.completion <= RUNAWAY_TOKENS + 120
    assert desk.script.cancelled
    assert desk.metrics.endings == {"repetition": 1}
    assert desk.metrics.repetitions == 1
    assert "repeats a piece of 3 tokens for 2,000 tokens; it was ended" in "\n".join(desk.lines())
    assert any("ran away" in line for line in desk.lines())
    reply = "".join(event.text for event in events if isinstance(event, Content))
    assert reply == "ha " * (len(reply) // 3), "nothing that was held back is lost"
    talk = (*chat().messages, Message(role="assistant", content=reply), Message(role="user", content="Go on"))
    heard(desk_going_on(desk), replace(chat(), messages=talk))
    assert desk.transcripts.metrics.bound_tokens < end.usage.completion


def desk_going_on(desk: Desk) -> Desk:
    story: list[list[Event]] = [[DONE]]
    desk.script.takes = iter(story)
    return desk


@pytest.mark.parametrize(("repetition", "repetitions"), [("tell", 1), ("off", 0)])
def test_a_reply_that_runs_away_may_go_on(repetition: RepetitionPolicy, repetitions: int):
    desk = looping(repetition)
    assert heard(desk)[-1] == DONE
    assert desk.metrics.repetitions == repetitions
    assert ("it goes on" in "\n".join(desk.lines())) is bool(repetitions)


def test_a_reply_inside_a_call_is_reported_and_not_ended():
    opening = Text('<tool_call>\n{"name": "read", "arguments": {"path": "', (1,))
    story: list[list[Event]] = [[opening], *([piece] for piece in LOOP), [DONE]]
    desk = Desk(*story, repetition="stop", window=10**5, family=THINKER)
    end = heard(desk, chat(tools=(TOOL,)))[-1]
    assert isinstance(end, Finished)
    assert end.cut_by is None
    assert desk.metrics.repetitions == 1
    assert desk.metrics.endings["repetition"] == 0


def test_calls_that_a_conversation_repeats_are_reported_and_the_model_reads_nothing_of_it():
    call = ToolCall("c1", "read", {"path": "a"})
    turn = (
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content="no", tool_call_id="c1"),
    )
    for count, is_reported in ((3, False), (4, True), (5, False), (8, True)):
        desk = Desk(window=10**5)
        request = replace(chat(), messages=(*chat().messages, *turn * count))
        heard(desk, request)
        words = f"calls read with the same arguments and the same result, {count} times in a row"
        assert any(words in line for line in desk.lines()) is is_reported
        quiet = Desk(window=10**5, repetition="off")
        heard(quiet, request)
        assert quiet.metrics.repetitions == 0
        assert quiet.engine.engine_requests[-1].prompt == desk.engine.engine_requests[-1].prompt
