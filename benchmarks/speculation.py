"""What drafts save: forward passes on recorded edits, and the seconds of replies on real weights."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import mlx.core as mx

from benchmarks.harness import ROOT, Part, row, table
from scripts import real_model
from start_llm.cache.layers import leaves
from start_llm.core.sampling import Sampling
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import DraftIndex
from start_llm.engine.pass_times import PASSES, PassTimes, measure_passes
from start_llm.engine.work import measure_work
from start_llm.models.loader import LoadedModel, load
from start_llm.prompt.draft_texts import without_marks
from tests.cache.conversations import layers_of
from tests.engine.harness import Stepper, engine_request, uncached_resources

_LEAD = 1e4
"""By how much the logit of the recorded token leads."""
_FEWEST = 60
"""Tokens of a reply that is timed."""


class Session(NamedTuple):
    """What an agent had read, and what it then wrote."""

    kind: str
    read: str
    wrote: str


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sessions(commits: int) -> Iterator[Session]:
    """Edits of this repository's own history, as an agent makes them behind the file that it has read."""
    for commit in git("log", "--no-merges", "--format=%h", "-n", str(commits)).split():
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
    for edit in _edits(commit, path):
        yield Session("edit", old, edit)
        yield Session("edit behind line numbers", numbered, edit)
    if path.endswith(".py") and len(old) < 12_000:
        yield Session("whole file", old, git("show", f"{commit}:{path}"))


def _edits(commit: str, path: str) -> Iterator[str]:
    diff = git("show", "--format=", "-U2", commit, "--", path)
    for hunk in re.split(r"^@@.*@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-"))
        new = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+"))
        if old and new and len(old) < 4000:
            yield (
                f"<tool_call>\n<function=Edit>\n<parameter=file_path>\n{path}\n</parameter>\n"
                f"<parameter=old_string>\n{old}\n</parameter>\n<parameter=new_string>\n{new}\n</parameter>\n"
                "</function>\n</tool_call>"
            )


# --------------------------------------------------------------------------------------------------- forwards


class Account:
    """The passes of replies of one kind."""

    def __init__(self) -> None:
        self.replies = self.tokens = self.passes = self.drafted = self.accepted = 0
        self.cost = 0.0


class Encoded(NamedTuple):
    """A session in tokens.

    Attributes:
        texts: what was read, as a reply repeats it (`prompt.draft_texts`).
    """

    prompt: Sequence[int]
    reply: Sequence[int]
    texts: tuple[Sequence[int], ...]


def encoded(session: Session, model: LoadedModel) -> Encoded:
    prompt, reply = (model.tokenizer.encode(one, as_document=False) for one in (session.read, session.wrote))
    plain = without_marks(session.read)
    texts = () if plain is None else (model.tokenizer.encode_continuation(plain),)
    return Encoded(prompt or reply[:4], reply, texts)


def replay(session: Encoded, gain: DraftGain, account: Account) -> None:
    """Draft a recorded reply, of which it is known what is right."""
    reply = session.reply
    index, done = DraftIndex(session.prompt, session.texts), 0
    account.replies += 1
    account.tokens += len(reply)
    times = gain.times
    while done < len(reply):
        lengths = gain.lengths()
        found = index.find(max(lengths, default=1))
        found = found if found and found.tokens else None
        drafted = found.tokens[: lengths[found.match]] if found and lengths else ()
        rest = reply[done : done + len(drafted)]
        right = next(
            (at for at, (one, other) in enumerate(zip(drafted, rest, strict=False)) if one != other),
            len(rest),
        )
        if found and drafted:
            gain.note_verified(found.match, len(drafted), right)
        elif found:
            gain.note(found.match, 1, int(found.tokens[0] == reply[done]))
        account.passes += 1
        account.drafted += len(drafted)
        account.accepted += right
        account.cost += times.seconds(1 + len(drafted))
        index.extend(reply[done : done + right + 1])
        done += right + 1


def forwards(
    folder: Path, *, commits: int = 60, most: int = 150, costs: Sequence[float] = (1.0, 1.1, 1.2, 1.5, 2.0)
) -> Iterator[str]:
    """Forward passes for each token of recorded replies, with the tokenizer of real weights.

    Args:
        commits: of this repository.
        most: replies of each kind.
        costs: what passes of 1, 2, 4, 8 and 16 tokens cost, in passes of one.
    """
    del folder
    model = load(real_model.model_folder("float32", real_model.default_folder()))
    accounts: dict[str, Account] = {}
    gains: dict[str, DraftGain] = {}
    for session in sessions(commits):
        account = accounts.setdefault(session.kind, Account())
        if account.replies >= most:
            continue
        gain = gains.setdefault(session.kind, DraftGain(PassTimes(dict(zip(PASSES, costs, strict=True)))))
        recorded = encoded(session, model)
        if len(recorded.reply) > 20:
            replay(recorded, gain, account)
    table("", "replies", "tokens", "passes a token", "cost a token", "accepted", "rejected cost")
    for kind, one in accounts.items():
        rejected = gains[kind].metrics.rejected_s / one.cost
        row(
            kind,
            one.replies,
            one.tokens,
            f"{one.passes / one.tokens:.3f}",
            f"{one.cost / one.tokens:.3f}",
            f"{one.accepted / max(one.drafted, 1):.2f}",
            f"{rejected:.3f}",
        )
    yield from ()


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
    folder: Path,
    *,
    kind: Annotated[str, real_model.KINDS] = "float32",
    commits: int = 40,
    most: int = 6,
    tokens: int = 300,
    rounds: int = 3,
) -> Iterator[str]:
    """Seconds of recorded replies on real weights, drafted and not, in turn.

    Args:
        kind: of the weights.
        commits: of this repository.
        most: replies of each kind.
        tokens: of a reply, at most; prompts have up to ten times as many.
        rounds: of each reply, drafted and not.
    """
    del folder
    model = load(real_model.model_folder(kind, real_model.default_folder()))
    layers = layers_of(model.network)
    times = measure_passes(model.network, layers.fresh(), measure_work(model.network, layers).pace)
    if times is None:
        yield "the caches of these weights cannot be taken back"
        return
    row("passes of", *PASSES, "tokens, in ms:", *(f"{1000 * times.seconds(one):.1f}" for one in PASSES))
    network = Recorded(model.network)
    resources = uncached_resources(network, model.tokenizer.token_bytes, frozenset(), 1, batches=False)
    table(
        "",
        "replies",
        "passes a token",
        "seconds, drafted / not",
        "rejected, of the time",
        "drafts",
        "accepted",
    )
    for name, replies in _short_sessions(model, commits, most, tokens).items():
        gain = DraftGain(PassTimes({one: times.seconds(one) for one in PASSES}))
        plain, drafting = Stepper(resources), Stepper(resources, gain=gain)
        pairs = [
            (timed(plain, network, reply), timed(drafting, network, reply))
            for reply in replies
            for _ in range(rounds)
        ]
        if any(without.tokens != drafted.tokens for without, drafted in pairs):
            yield f"a reply of kind {name} is another one when it is drafted"
        passes, spent = (sum(getattr(drafted, one) for _, drafted in pairs) for one in ("passes", "seconds"))
        counts = gain.metrics
        row(
            name,
            len(replies),
            f"{passes / sum(len(drafted.tokens) for _, drafted in pairs):.3f}",
            f"{median(drafted.seconds / without.seconds for without, drafted in pairs):.3f}",
            f"{counts.rejected_s / spent:.3f}",
            counts.drafts,
            f"{counts.accepted_tokens / max(counts.drafted_tokens, 1):.2f}",
        )


def _short_sessions(model: LoadedModel, commits: int, most: int, tokens: int) -> dict[str, list[Encoded]]:
    """Return sessions by their kind, where the prompt is not too long for a slow machine."""
    chosen: dict[str, list[Encoded]] = {}
    for session in sessions(commits):
        some = chosen.setdefault(session.kind, [])
        if len(some) == most:
            continue
        recorded = encoded(session, model)
        if len(recorded.reply) >= _FEWEST and len(recorded.prompt) <= 10 * tokens:
            some.append(recorded._replace(reply=recorded.reply[:tokens]))
    return chosen


PARTS: Mapping[str, Part] = {"forwards": forwards, "wall": wall}
