"""Real clients show pictures to a model that sees: with a tool of theirs, and as their users attach one.

All they know of the model is what the launcher tells them: that it sees.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.clients.conftest import Endpoints, installed, open_endpoints
from tests.clients.pictures import LOOK, PICTURE, SEEN, Shown, Witness, places, png, write_seeing_model
from tests.clients.table import LAUNCHED, Words
from tests.clients.talk import Line, Rewrite, Talk, Turn

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

QUESTION = "Is it still there?"


@dataclass(frozen=True, slots=True)
class Seeing:
    """A server whose model sees."""

    endpoints: Endpoints
    witness: Witness

    @property
    def tower_runs(self) -> int:
        return self.endpoints.server.get("/stats")["images"]["tower_runs"]


@pytest.fixture(scope="module")
def seeing(clients_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Seeing]:
    witness = Witness()
    folder = write_seeing_model(tmp_path_factory.mktemp("model"))
    with open_endpoints(tmp_path_factory, witness.app, folder=folder) as endpoints:
        yield Seeing(endpoints, witness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a client shows a picture.

    Attributes:
        place: in which message the model finds it.
        attach: makes it the user's; None: the model opens it with a tool.
    """

    place: str
    attach: Rewrite | None = None


def named_in_front(words: Words) -> Words:
    return (*words[:-1], f"@{PICTURE} {words[-1]}")


def word_in_front(words: Words) -> Words:
    return (*words[:-1], f"@{PICTURE}", words[-1])


def path_in_front(words: Words) -> Words:
    return (*words[:-1], f"./{PICTURE}: {words[-1]}")


def option(name: str) -> Rewrite:
    return lambda words: (*words, name, PICTURE)


WAYS: Mapping[tuple[str, str], Way] = {
    ("claude", "opened"): Way(place="tool"),
    ("claude", "attached"): Way(place="user", attach=named_in_front),
    ("codex", "opened"): Way(place="tool"),
    ("codex", "attached"): Way(place="user", attach=option("--image")),
    ("pi", "opened"): Way(place="user"),
    ("pi", "attached"): Way(place="user", attach=word_in_front),
    ("opencode", "opened"): Way(place="user"),
    ("opencode", "attached"): Way(place="user", attach=option("--file")),
    ("openclaw", "opened"): Way(place="user"),
    ("openclaw", "attached"): Way(place="user", attach=path_in_front),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn.

    Attributes:
        longest: the request with the longest prompt.
        images: those of that prompt.
        looks: images that the tower has seen for the turn.
    """

    turn: Turn
    longest: Line
    images: Sequence[Shown]
    looks: int

    @property
    def places(self) -> list[str]:
        """Where the images stand."""
        return places(self.longest)

    def __str__(self) -> str:
        sizes = ", ".join(f"{width} x {height}" for width, height in (image.size for image in self.images))
        return f"{self.turn}; images {sizes or 'none'} at {self.places}, {self.looks} looks"


class Show:
    """A conversation with a client about pictures."""

    def __init__(self, name: str, way: Way, talk: Talk, seeing: Seeing) -> None:
        self._name, self._way, self._talk, self._seeing = name, way, talk, seeing

    def picture(self, file: bytes) -> Answer:
        """Ask what a picture shows, which the model opens or has in front of it."""
        self._talk.put(PICTURE, file)
        if self._way.attach is None:
            return self._say(LOOK)
        (self._talk.place.work / PICTURE).write_bytes(file)
        return self._say(QUESTION, self._way.attach)

    def words(self) -> Answer:
        return self._say(QUESTION)

    def _say(self, question: str, rewrite: Rewrite | None = None) -> Answer:
        looks = self._seeing.tower_runs
        self._seeing.witness.new_prompts()
        turn = self._talk.say(f"{question} ({secrets.token_hex(4)})", rewrite=rewrite)
        images = max(self._seeing.witness.new_prompts(), key=lambda prompt: prompt.length).images
        longest = max(turn.lines, key=lambda line: line["prompt_tokens"])
        answer = Answer(turn, longest, images, self._seeing.tower_runs - looks)
        print(f"{self._name}: {answer}")
        assert turn.status == 0, turn.printed
        assert SEEN in turn.printed
        assert turn.tries in (0, None), "it looked for other machines"
        return answer


@pytest.mark.parametrize("port", [8080, 4000])
@pytest.mark.parametrize(("name", "how"), WAYS)
def test_a_picture_is_seen_once(
    name: str, how: str, port: int, seeing: Seeing, clients_home: Path, tmp_path: Path
):
    """It stands where the client has put it, and the turns behind it compute what they add and no more."""
    agent, way = installed(LAUNCHED[name], clients_home), WAYS[name, how]
    talk = Talk(agent, clients_home, seeing.endpoints.ports[port], seeing.endpoints.trace, tmp_path)
    show = Show(f"{name} on {port}, {how}", way, talk, seeing)
    files = [png(secrets.randbits(64)) for _ in range(2)]
    answers = [show.picture(files[0]), show.words(), show.picture(files[1])]
    for answer, shown in zip(answers, (files[:1], files[:1], files), strict=True):
        assert [picture.image.data for picture in answer.images] == shown
        assert [picture.tokens for picture in answer.images] == [*map(seeing.witness.names_of, shown)]
        assert answer.places == [way.place] * len(shown)
    assert [answer.looks for answer in answers] == [1, 0, 1]
    assert min(answer.turn.efficiency for answer in answers[1:]) >= 0.97
    assert answers[1].turn.cached >= 0.97
    if not agent.has_asides:
        for before, after in pairwise(answers):
            assert after.turn.lines[0]["cached_tokens"] >= before.longest["prompt_tokens"]


LARGE = 3000, 2000
SHRUNK: Mapping[str, tuple[int, int]] = {
    "claude": (2000, 1333),
    "codex": (1920, 1280),
    "pi": (2000, 1333),
    "opencode": (2000, 1333),
    "openclaw": (1200, 800),
}
"""To what each client shrinks a picture of that size."""


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_a_large_picture_is_shrunk_once(
    name: str, how: str, seeing: Seeing, clients_home: Path, tmp_path: Path
):
    """By the client, to the same file in each turn."""
    agent, way = installed(LAUNCHED[name], clients_home), WAYS[name, how]
    talk = Talk(agent, clients_home, seeing.endpoints.ports[8080], seeing.endpoints.trace, tmp_path)
    show = Show(f"{name}, {how}", way, talk, seeing)
    answers = [show.picture(png(secrets.randbits(64), *LARGE)), show.words()]
    files = {image.image.data for answer in answers for image in answer.images}
    (file,) = files
    assert [image.tokens for answer in answers for image in answer.images] == [
        seeing.witness.names_of(file)
    ] * 2
    assert [answer.looks for answer in answers] == [1, 0]
    assert min(answers[1].turn.efficiency, answers[1].turn.cached) >= 0.97
    assert answers[0].images[0].size == SHRUNK[name]


def test_openclaw_takes_a_picture_back_after_four_turns(seeing: Seeing, clients_home: Path, tmp_path: Path):
    """It puts a text in its place; then all that stands behind it is computed once more, and nothing else."""
    agent, way = installed(LAUNCHED["openclaw"], clients_home), WAYS["openclaw", "opened"]
    talk = Talk(agent, clients_home, seeing.endpoints.ports[8080], seeing.endpoints.trace, tmp_path)
    show = Show("openclaw", way, talk, seeing)
    answers = [show.picture(png(secrets.randbits(64)))]
    while answers[-1].images and len(answers) < 8:
        answers.append(show.words())
    *kept, without = answers
    shown = next(line for line in kept[0].turn.lines if line["images"])
    (line,) = without.turn.lines
    assert len(kept) == 4
    assert line["cached_tokens"] > shown["cached_tokens"], "what stands in front of it is reused"
    assert show.words().turn.efficiency >= 0.97
