"""What ranks send to each other, as texts: requests, parts of steps, and what goes beside them.

A follower gets of a request what it needs to compute and keep the same. What it samples does not count
(`RankGroup.agree`), so it gets neither how to sample nor the constraints of the reply.
"""

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from start_llm.cache.disk.page_file import TensorLayout
from start_llm.cache.disk.shared_restore import RestoreWish
from start_llm.core.engine_request import EngineRequest, ReasoningLimit
from start_llm.core.images import ImageRun
from start_llm.core.prompt import KeptPrefix, ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.engine.followers import ExecutorState
from start_llm.engine.step_plan import PrefillPart, StepPart

_PARTS: Mapping[str, type[StepPart]] = {
    kind.__name__: kind for parts in (StepPart, PrefillPart) for kind in get_args(parts.__value__)
}
"""The parts that several ranks execute, by the name that goes over the wire."""


@dataclass(frozen=True, slots=True)
class SentSettings:
    """What followers are loaded with.

    Attributes:
        model: MODEL_PATH, as it is set on rank 0.
        groups: values of settings, by the names of their groups.
    """

    model: str | None
    groups: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request, under the number that it has on rank 0."""

    number: int
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part of a step.

    Attributes:
        at: the plan's time.
        state: what the executor of rank 0 has before it.
    """

    part: StepPart
    at: float
    state: ExecutorState


@dataclass(frozen=True, slots=True)
class SentTrimming:
    """So many arrays of the prompt cache are to be trimmed."""

    arrays: int


@dataclass(frozen=True, slots=True)
class SentBudget:
    """The prompt cache may have so many bytes from a time of the plan on."""

    nbytes: int
    at: float


@dataclass(frozen=True, slots=True)
class SentRestore:
    """A restore from the disk begins, under the number that it has on rank 0."""

    number: int
    wish: RestoreWish
    at: float


@dataclass(frozen=True, slots=True)
class SentRead:
    """A follower has read so many files of a restore."""

    number: int
    files: int


@dataclass(frozen=True, slots=True)
class SentRestored:
    """All ranks have read so many files of a restore, and keep what these have given."""

    number: int
    files: int
    at: float


@dataclass(frozen=True, slots=True)
class SentFlush:
    """What is not on the disk yet is written, for so many seconds at most: the service ends."""

    patience_s: float


@dataclass(frozen=True, slots=True)
class SentEnd:
    """The service ends."""


@dataclass(frozen=True, slots=True)
class SentTrouble:
    """A follower cannot go on, and says why.

    Attributes:
        is_final: it would not get further if it were started again.
    """

    message: str
    is_final: bool


type _Plain = (
    SentSettings | SentTrimming | SentBudget | SentRead | SentRestored | SentFlush | SentEnd | SentTrouble
)
type Message = SentRequest | SentPart | SentRestore | _Plain
_PLAIN: Mapping[str, type[_Plain]] = {kind.__name__: kind for kind in get_args(_Plain.__value__)}


def encoded(message: Message) -> bytes:
    """Return a message as it goes over the wire."""
    return json.dumps({"kind": type(message).__name__, **_fields(message)}).encode()


def _fields(message: Message) -> dict[str, Any]:
    match message:
        case SentRequest(number, request):
            return {"number": number, "request": _request_fields(request)}
        case SentPart(part, at, state):
            return {"part": type(part).__name__, "values": asdict(part), "at": at, "state": state}
        case SentRestore(number, wish, at):
            return {"number": number, "wish": _wish_fields(wish), "at": at}
        case _:
            return asdict(message)


def decoded(data: bytes) -> Message:
    """Return a message that came over the wire.

    Raises:
        ValueError: it is none.
    """
    try:
        fields = json.loads(data)
        return _message(fields.pop("kind"), fields)
    except (AttributeError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"no message: {error!r}") from error


def _message(kind: str, fields: dict[str, Any]) -> Message:
    if kind == SentRequest.__name__:
        return SentRequest(fields["number"], _request(fields["request"]))
    if kind == SentPart.__name__:
        values = {name: _frozen(value) for name, value in fields["values"].items()}
        return SentPart(_PARTS[fields["part"]](**values), fields["at"], ExecutorState(*fields["state"]))
    if kind == SentRestore.__name__:
        return SentRestore(fields["number"], _wish(fields["wish"]), fields["at"])
    return _PLAIN[kind](**fields)


def _wish_fields(wish: RestoreWish) -> dict[str, Any]:
    packed = {"ids": _packed(wish.ids), "last": _packed(wish.last), "salt": b64encode(wish.salt).decode()}
    return asdict(wish) | packed


def _wish(fields: dict[str, Any]) -> RestoreWish:
    state = fields.pop("state")
    return RestoreWish(
        ids=_unpacked(fields.pop("ids")),
        last=_unpacked(fields.pop("last")),
        salt=b64decode(fields.pop("salt")),
        state=None if state is None else tuple((name, _layout(*form)) for name, form in state),
        numbers=_frozen(fields.pop("numbers")),
        **fields,
    )


def _layout(dtype: str, shape: list[int]) -> TensorLayout:
    return TensorLayout(dtype, tuple(shape))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _request_fields(request: EngineRequest) -> dict[str, Any]:
    return {
        "prompt": _packed(request.prompt.ids),
        "max_tokens": request.max_tokens,
        "images": [_run_fields(run) for run in request.images],
        "boundaries": request.boundaries,
        "kept": request.kept,
        "repeated_tokens": request.repeated_tokens,
        "salt": b64encode(request.salt).decode(),
        "reasoning": asdict(request.reasoning) if request.reasoning else None,
        "trims_leading_space": request.trims_leading_space,
        "draft_texts": [_packed(text) for text in request.draft_texts],
        "is_idle_work": request.is_idle_work,
    }


def _request(fields: dict[str, Any]) -> EngineRequest:
    reasoning = fields.pop("reasoning")
    return EngineRequest(
        prompt=ModelTokens(_unpacked(fields.pop("prompt"))),
        images=tuple(_run(**run) for run in fields.pop("images")),
        kept=tuple(KeptPrefix(*place) for place in fields.pop("kept")),
        salt=b64decode(fields.pop("salt")),
        boundaries=tuple(fields.pop("boundaries")),
        reasoning=_limit(reasoning) if reasoning else None,
        draft_texts=tuple(map(_unpacked, fields.pop("draft_texts"))),
        sampling=Sampling(temperature=0),
        **fields,
    )


def _run_fields(run: ImageRun) -> dict[str, Any]:
    return {"tokens": _packed(run.tokens), "network_ids": _packed(run.network_ids), "grid": run.grid}


def _run(tokens: str, network_ids: str, grid: list[int] | None) -> ImageRun:
    return ImageRun(_unpacked(tokens), _unpacked(network_ids), _frozen(grid), _no_pixels)


def _no_pixels() -> Mapping[str, Any]:
    """Return the arguments of a vision tower that does not run here: rank 0 sends what its own has made."""
    return {}


def _limit(fields: dict[str, Any]) -> ReasoningLimit:
    return ReasoningLimit(closing_tokens=tuple(fields.pop("closing_tokens")), **fields)


def _packed(ids: Sequence[int]) -> str:
    """Return token ids as four bytes each, the lowest first, in base64."""
    return b64encode(struct.pack(f"<{len(ids)}I", *ids)).decode()


def _unpacked(text: str) -> tuple[int, ...]:
    return tuple(number for (number,) in struct.iter_unpack("<I", b64decode(text)))
