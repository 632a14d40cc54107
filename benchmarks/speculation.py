"""What drafts save: forward passes on recorded edits, and the seconds of replies on real weights."""

import json
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import mlx.core as mx

from benchmarks.harness import ROOT, Part, row, table
from benchmarks.speculation_law import law
from scripts import real_model
from start_llm.cache.leaves import leaves
from start_llm.core.engine_request import Guide
from start_llm.core.sampling import Sampling
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import FORCED, Draft, DraftIndex
from start_llm.engine.earlier_texts import EarlierTexts
from start_llm.engine.pass_times import PASSES, PassTimes, measure_passes
from start_llm.engine.start_measurements import measure_work
from start_llm.formats.writing.lark import Grammar
from start_llm.models.loader import LoadedModel, load
from start_llm.output.grammar.enforcer import Enforcer
from start_llm.prompt.draft_texts import without_marks
from tests.cache.conversations import layers_of
from tests.engine.harness import Stepper, engine_request, uncached_resources

_LEAD = 1e4
"""By how much the logit of the recorded token leads."""
_LOOKUPS = 2000
"""Tokens of which each is looked up."""
_TENANT = b"tenant"
_SHAPES = ("edit", "edit behind line numbers", "whole file", "new file", "prose")
"""Of recorded replies."""
COSTS = (1.0, 1.1, 1.2, 1.5, 2.0)
_SHORTEST = 21
"""Tokens of a reply that is replayed."""
_FEWEST = 60
"""Tokens of a reply that is timed."""


class Session(NamedTuple):
    """What an agent had read, and what it then wrote.

    Attributes:
        arguments: of the call that it wrote, if it was one.
    """

    kind: str
    read: str
    wrote: str
    arguments: Mapping[str, str] | None = None


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sessions(commits: int) -> Iterator[Session]:
    """Edits of this repository's own history, as an agent makes them behind the file that it has read."""
    for commit in _latest(commits):
        yield from _sessions_of(commit)


def _latest(commits: int) -> list[str]:
    return git("log", "--no-merges", "--format=%h", "-n", str(commits)).split()


def _sessions_of(commit: str) -> Iterator[Session]:
    for line in git("show", "--format=", "--numstat", commit).splitlines():
        path = line.split("\t")[2]
        if path.endswith((".py", ".md")) and "=>" not in path:
            yield from _changes(commit, path)


def _changes(commit: str, path: str) -> Iterator[Session]:
    status = git("show", "--format=", "--name-status", commit, "--", path)[:1]
    if status == "A":
        new = git("show", f"{commit}:{path}")
        yield Session("new file" if path.endswith(".py") else "prose", "", new[:6000])
    if status != "M":
        return
    old = git("show", f"{commit}^:{path}")
    if len(old) > 30_000:
        return
    numbered = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(old.split("\n"), 1))
    for arguments in _edits(commit, path):
        call = _call(arguments)
        yield Session("edit", old, call, arguments)
        yield Session("edit behind line numbers", numbered, call, arguments)
    if path.endswith(".py") and len(old) < 12_000:
        yield Session("whole file", old, git("show", f"{commit}:{path}"))


def _call(arguments: Mapping[str, str]) -> str:
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function=Edit>\n{values}</function>\n</tool_call>"


def _edits(commit: str, path: str) -> Iterator[Mapping[str, str]]:
    diff = git("show", "--format=", "-U2", commit, "--", path)
    for hunk in re.split(r"^@@.*@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-"))
        new = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+"))
        if old and new and len(old) < 4000:
            yield {"file_path": path, "old_string": old, "new_string": new}


# --------------------------------------------------------------------------------------------------- forwards


@dataclass
class Account:
    """The passes of replies of one kind.

    Attributes:
        gain: decides how much is drafted of them.
    """

    gain: DraftGain
    replies: int = 0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0

    def cells(self) -> tuple[object, ...]:
        shares = (f"{total / self.tokens:.3f}" for total in (self.passes, self.cost))
        return self.replies, self.tokens, *shares, f"{self.accepted / max(self.drafted, 1):.2f}"


class Encoded(NamedTuple):
    """A session in tokens.

    Attributes:
        texts: what was read, as a reply repeats it (`prompt.draft_texts`).
    """

    prompt: Sequence[int]
    reply: Sequence[int]
    texts: tuple[Sequence[int], ...]


def encoded(session: Session, model: LoadedModel) -> Encoded:
    prompt, reply = (
        model.tokenizer.encode(text, as_document=False) for text in (session.read, session.wrote)
    )
    plain = without_marks(session.read)
    texts = () if plain is None else (model.tokenizer.encode_continuation(plain),)
    return Encoded(prompt or reply[:4], reply, texts)


def by_kind(
    recorded: Iterable[Session],
    model: LoadedModel,
    most: int,
    shortest: int = _SHORTEST,
    longest: int = 10**6,
) -> dict[str, list[Encoded]]:
    """The first replies of each kind, of so many tokens or more, behind prompts of no more than `longest`."""
    kinds = defaultdict[str, list[Encoded]](list)
    for session in recorded:
        if len(kinds[session.kind]) < most:
            reply = encoded(session, model)
            if len(reply.reply) >= shortest and len(reply.prompt) <= longest:
                kinds[session.kind].append(reply)
    return {kind: replies for kind, replies in kinds.items() if replies}


def replay(
    session: Encoded, account: Account, guide: Guide | None = None, earlier: EarlierTexts | None = None
) -> None:
    """Draft a recorded reply, of which it is known what is right.

    Args:
        guide: what it is held to.
        earlier: what its tenant said before.
    """
    earlier = earlier or EarlierTexts()
    index, done = DraftIndex(session.prompt, session.texts), 0
    account.replies += 1
    account.tokens += len(session.reply)
    while done < len(session.reply):
        rest = session.reply[done:]
        find = partial(earlier.find_longest, _TENANT, index)
        drafted, right = _drafted(find, rest, account.gain, guide)
        account.passes += 1
        account.drafted += drafted
        account.accepted += right
        account.cost += account.gain.times.seconds(1 + drafted)
        index.extend(rest[: right + 1])
        if guide:
            guide.advance(rest[: right + 1])
        done += right + 1


def _drafted(
    find: Callable[[int], Draft | None], rest: Sequence[int], gain: DraftGain, guide: Guide | None
) -> tuple[int, int]:
    """Return how many tokens are drafted of the rest of a reply, and how many of them are right."""
    lengths, forced = gain.lengths(), guide.forced() if guide else ()
    draft = Draft(tuple(forced), FORCED) if forced else find(max(lengths, default=1))
    if draft is None:
        return 0, 0
    drafted = draft.tokens[: lengths[draft.match]] if lengths else ()
    drafted = drafted[: guide.count_allowed(drafted)] if guide else drafted
    pairs = enumerate(zip(drafted, rest, strict=False))
    right = next((at for at, (token, other) in pairs if token != other), min(len(drafted), len(rest)))
    if drafted:
        gain.note_verified(draft.match, len(drafted), right)
    else:
        gain.note(draft.match, 1, int(draft.tokens[0] == rest[0]))
    return len(drafted), right


def forwards(_: Path, *, commits: int = 60, most: int = 150, costs: Sequence[float] = COSTS) -> None:
    """Forward passes for each token of recorded replies, with the tokenizer of real weights.

    Args:
        commits: of this repository.
        most: replies of each kind.
        costs: what passes of 1, 2, 4, 8 and 16 tokens cost, in passes of one.
    """
    accounts = _accounts(costs)
    for kind, replies in by_kind(sessions(commits), _real_weights(), most).items():
        for reply in replies:
            replay(reply, accounts[kind])
    _tell(accounts)


def _real_weights(kind: str = "float32") -> LoadedModel:
    return load(real_model.model_folder(kind, real_model.default_folder()))


def _accounts(costs: Sequence[float] = COSTS) -> defaultdict[str, Account]:
    """Return the accounts of all kinds of sessions, in which passes of each length cost so much."""
    return defaultdict(lambda: Account(DraftGain(PassTimes(dict(zip(PASSES, costs, strict=True))))))


def _tell(accounts: Mapping[str, Account]) -> None:
    table(" | replies | tokens | passes a token | cost a token | accepted | rejected cost")
    for kind, account in accounts.items():
        row(kind, *account.cells(), f"{account.gain.metrics.rejected_s / account.cost:.3f}")


def earlier(_: Path, *, commits: int = 40, most: int = 8) -> None:
    """Forward passes without and with what earlier conversations said; each commit counts as one.

    Args:
        commits: of this repository, the oldest first.
        most: replies of each kind in a conversation, of which each also has those before it.
    """
    model = _real_weights()
    conversations = [by_kind(_sessions_of(commit), model, most) for commit in reversed(_latest(commits))]
    for is_alone, title in ((True, "each by itself"), (False, "with earlier ones")):
        accounts, texts = _accounts(), defaultdict[str, EarlierTexts](EarlierTexts)
        for kind, replies in (pair for kinds in conversations for pair in kinds.items()):
            history: list[int] = []
            for prompt, reply, plain in replies:
                source = None if is_alone else texts[kind]
                replay(Encoded([*history, *prompt], reply, plain), accounts[kind], earlier=source)
                history += [*prompt, *reply]
            texts[kind].add(_TENANT, history)
        row(title)
        _tell(accounts)


_EDIT = (
    '{"type": "object", "properties": {"file_path": {"type": "string"}, "old_string": {"type": "string"}, '
    '"new_string": {"type": "string"}}, "required": ["file_path", "old_string", "new_string"], '
    '"additionalProperties": false}'
)
_CALL = Grammar(
    'start: "<tool_call>\\n{\\"name\\": \\"Edit\\", \\"arguments\\": " arguments "}\\n</tool_call>"\n'
    f"arguments: %json {_EDIT}",
    (),
)


def calls(_: Path, *, commits: int = 25, most: int = 60) -> None:
    """Forward passes for each token of calls that a grammar demands, with the tokenizer of real weights.

    Args:
        commits: of this repository.
        most: calls.
    """
    model, accounts = _real_weights(), _accounts()
    enforcer = Enforcer(model.tokenizer, model.vocabulary)
    edits = (session for session in sessions(commits) if session.kind == "edit")
    for session in islice(edits, most):
        written = json.dumps(session.arguments, ensure_ascii=False)
        call = f'<tool_call>\n{{"name": "Edit", "arguments": {written}}}\n</tool_call>'
        replay(encoded(session._replace(wrote=call), model), accounts["calls"], enforcer.guide(_CALL))
    _tell(accounts)


# ------------------------------------------------------------------------------------------------------- wall


class Recorded:
    """A network whose most likely token is that of a recorded reply, for what it costs to compute.

    Attributes:
        tokens: prompt and reply.
    """

    def __init__(self, network: Any, tokens: Sequence[int] = ()) -> None:
        self._network = network
        self.tokens = tokens
        self.passes = 0

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        begin = next(int(leaf.offset) for leaf in leaves(cache) if hasattr(leaf, "offset"))
        count = tokens.shape[1]
        following = self.tokens[begin + 1 : begin + 1 + count]
        following = [*following, *[0] * (count - len(following))]
        logits = self._network(tokens, cache=cache)
        self.passes += 1
        return logits.at[0, mx.arange(count), mx.array(following)].add(_LEAD)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class Timed(NamedTuple):
    seconds: float
    passes: int
    tokens: list[int]


def timed(stepper: Stepper, network: Recorded, session: Encoded) -> Timed:
    """The seconds from the first token of a reply to its last, and the passes between."""
    prompt, reply, texts = session
    network.tokens = [*prompt, *reply]
    greedy = Sampling(temperature=0)
    watched = stepper.submit(engine_request(prompt, len(reply), greedy, draft_texts=texts))
    stepper.step_until(lambda: watched.tokens)
    began, before = time.perf_counter(), network.passes
    stepper.finish(watched, max_steps=10**6)
    return Timed(time.perf_counter() - began, network.passes - before, watched.tokens)


def wall(
    _: Path,
    *,
    kind: Annotated[str, real_model.KINDS] = "float32",
    replies: Annotated[Sequence[str], _SHAPES] = _SHAPES,
    commits: int = 40,
    most: int = 6,
    tokens: int = 300,
    rounds: int = 3,
) -> Iterator[str]:
    """Seconds of recorded replies on real weights, drafted and not, in turn.

    Args:
        kind: of the weights.
        replies: their shapes.
        commits: of this repository.
        most: replies of each shape.
        tokens: of a reply, at most; prompts have up to ten times as many.
        rounds: of each reply, drafted and not.
    """
    model = _real_weights(kind)
    layers = layers_of(model.network)
    times = measure_passes(model.network, layers.fresh(), measure_work(model.network, layers).pace)
    if times is None:
        yield "the caches of these weights cannot be taken back"
        return
    row("passes of", *PASSES, "tokens, in ms:", *(f"{1000 * times.seconds(count):.1f}" for count in PASSES))
    network = Recorded(model.network)
    resources = uncached_resources(network, model.tokenizer.token_bytes, frozenset(), 1, batches=False)
    table(" | replies | passes a token | seconds, drafted / not | rejected, of the time | drafts | accepted")
    shares: list[float] = []
    wanted = (session for session in sessions(commits) if session.kind in replies)
    for name, recorded in by_kind(wanted, model, most, shortest=_FEWEST, longest=10 * tokens).items():
        gain = DraftGain(PassTimes({count: times.seconds(count) for count in PASSES}))
        plain, drafting = Stepper(resources), Stepper(resources, gain=gain)
        pairs = [
            (timed(plain, network, reply), timed(drafting, network, reply))
            for reply in (chosen._replace(reply=chosen.reply[:tokens]) for chosen in recorded)
            for _ in range(rounds)
        ]
        shares += [drafted.seconds / without.seconds for without, drafted in pairs]
        if any(without.tokens != drafted.tokens for without, drafted in pairs):
            yield f"a reply of kind {name} is another one when it is drafted"
        passes, spent = (
            sum(getattr(drafted, measure) for _, drafted in pairs) for measure in ("passes", "seconds")
        )
        counts = gain.metrics
        row(
            name,
            len(recorded),
            f"{passes / sum(len(drafted.tokens) for _, drafted in pairs):.3f}",
            f"{median(shares[-len(pairs) :]):.3f}",
            f"{counts.rejected_s / spent:.3f}",
            counts.drafts,
            f"{counts.accepted_tokens / max(counts.drafted_tokens, 1):.2f}",
        )
    row("all", len(shares) // rounds, "", f"{median(shares):.3f}", "", "", "")


# ---------------------------------------------------------------------------------------------------- lookups


def lookups(_: Path, *, tokens: int = 100_000, commits: int = 200) -> None:
    """What the index of a long prompt takes: to make it, to look something up for each token, and in bytes.

    A look-up is one in the sequence, and where that has no long match one in all that a tenant said before.

    Args:
        tokens: of the prompt, from files of this repository.
        commits: whose files are read.
    """
    model = _real_weights()
    read: list[int] = []
    for session in sessions(commits):
        if len(read) > tokens + _LOOKUPS:
            break
        read += model.tokenizer.encode(session.read or session.wrote, as_document=False)
    prompt, reply = read[:tokens], read[tokens : tokens + _LOOKUPS]
    began = time.perf_counter()
    index = DraftIndex(prompt)
    made_s = time.perf_counter() - began
    earlier = EarlierTexts()
    for text in (read[tokens // 2 :], prompt):
        earlier.add(_TENANT, text)
    taken: list[float] = []
    for token in reply:
        began = time.perf_counter()
        index.extend([token])
        earlier.find_longest(_TENANT, index, 15)
        taken.append(time.perf_counter() - began)
    table("tokens | made in, ms | bytes a token | look-up, µs: median | 99 %")
    taken.sort()
    row(
        len(prompt),
        f"{1000 * made_s:.1f}",
        f"{index.nbytes / len(index):.1f}",
        *(f"{1e6 * taken[int(share * len(taken))]:.1f}" for share in (0.5, 0.99)),
    )


PARTS: Mapping[str, Part] = {
    "forwards": forwards,
    "earlier": earlier,
    "calls": calls,
    "lookups": lookups,
    "wall": wall,
    "law": law,
}
